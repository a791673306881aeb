"""Bodies of answers, as types, of which /openapi.json is made."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Vector = list[float]


class Label(Struct, kw_only=True):
    """A label with its probability, or a regression's value. `predicted` is set by multi-label models only."""

    label: str
    score: float
    predicted: bool | None = None


class Ranked(Struct, kw_only=True):
    """Where a text stood, and what it has to do with the query."""

    index: int
    score: float
    text: str | None = None


class Token(Struct, kw_only=True):
    """A token, and which characters of the text it stands for."""

    id: int
    text: str
    special: bool
    start: int
    stop: int


class Embedding(Struct, kw_only=True):
    """One vector; in base64 it is little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: Vector | str


class Served(Struct, kw_only=True):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(Struct, kw_only=True):
    """OpenAI's form."""

    object: Literal["list"]
    data: list[Served]


class Usage(Struct, kw_only=True):
    """How many tokens were read."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct, kw_only=True):
    """OpenAI's form."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Word(Struct, kw_only=True):
    """A word with its label; one of which no token is left has no probability."""

    word: str
    label: str | None
    probability: float | None
    start: int
    end: int


class Entity(Struct, kw_only=True):
    """Neighbouring words of one kind."""

    label: str
    text: str
    start: int
    end: int
    probability: float


class Tags(Struct, kw_only=True):
    """Every word, and the entities that they make."""

    words: list[Word]
    entities: list[Entity]
    windows: int


class Found(Struct, kw_only=True):
    """The answer in characters of the context; "" where there is none."""

    answer: str
    start: int
    end: int
    score: float | None
    no_answer_score: float
    windows: int
    best: str | None = None


class Chosen(Struct, kw_only=True):
    """The candidate that fits best."""

    choice: str
    number: int
    probability: float
    probabilities: list[float]
    windows: int | None = None


class Follows(Struct, kw_only=True):
    """How likely the second text follows the first."""

    follows: float


class Candidate(Struct, kw_only=True):
    """A token for a mask."""

    token: str
    text: str
    probability: float


class Mask(Struct, kw_only=True):
    """A mask, in characters of the text, and the likeliest tokens for it."""

    start: int
    end: int
    tokens: list[Candidate]


class Filled(Struct, kw_only=True):
    """The masks of a text."""

    masks: list[Mask]
    windows: int
    note: str | None = None


class Text(Struct, kw_only=True):
    """What was written; not complete: it would go on."""

    text: str
    log_probability: float
    tokens: int
    complete: bool


class Written(Text, kw_only=True):
    """The best text, and those of other beams."""

    others: list[Text] | None = None


class Layer(Struct, kw_only=True):
    """Weights [heads, rows, keys] of one layer; a row sums to 1."""

    part: Literal["encoder", "decoder", "cross"]
    layer: int
    heads: list[int]
    weights: list[list[list[float]]]


class Attention(Struct, kw_only=True):
    """What each token of a text looks at."""

    tokens: list[Token]
    layers: list[Layer]


class Info(Struct, kw_only=True):
    """A model, and what it may be asked."""

    model_id: str
    model_dtype: str
    model_type: dict[str, Any]
    family: str
    parameters: int
    routes: list[str]
    labels: list[str] | None
    max_input_length: int | None
    max_batch_tokens: int
    max_concurrent_requests: int
    max_client_batch_size: int
    max_connections: int
    max_connections_per_address: int | None
    auto_truncate: bool
    models: list[str]
    version: str


class Output(Struct, kw_only=True):
    """A tensor."""

    name: str
    shape: list[int]
    datatype: Literal["BYTES", "FP32"]
    data: list[str | float]


class Inferred(Struct, kw_only=True):
    """The Open Inference Protocol's answer."""

    model_name: str
    outputs: list[Output]
    id: str | None = None


class Described(Struct, kw_only=True):
    """A tensor that a model reads or gives."""

    name: str
    datatype: Literal["BYTES", "FP32"]
    shape: list[int]


class ModelFacts(Struct, kw_only=True):
    """The Open Inference Protocol's description of a model."""

    name: str
    platform: str
    inputs: list[Described]
    outputs: list[Described]


class ServerFacts(Struct, kw_only=True):
    """The Open Inference Protocol's description of a server."""

    name: str
    version: str
    extensions: list[str]


class Live(Struct, kw_only=True):
    """It runs."""

    live: bool


class Ready(Struct, kw_only=True):
    """It answers."""

    ready: bool


class Health(Struct, kw_only=True):
    """It answers, or why not."""

    status: Literal["ok", "loading", "stopping"]


class Error(Struct, kw_only=True):
    """What went wrong, for a person and for a program."""

    error: str
    error_type: str


class ErrorOf(Struct, kw_only=True):
    """The same in OpenAI's form."""

    message: str
    type: str
    code: int


class OpenAIError(Struct, kw_only=True):
    """OpenAI's form."""

    error: ErrorOf
