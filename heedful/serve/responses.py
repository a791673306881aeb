"""Types of response bodies, from which /openapi.json is generated."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Vector = list[float]


class LabelScore(Struct, kw_only=True):
    """A label with its probability, or the value of a regression.

    `predicted` is set for multi-label models, and with min_confidence or prediction_set.
    """

    label: str
    score: float
    predicted: bool | None = None


class RankedText(Struct, kw_only=True):
    """The index of a text in the request, and its relevance to the query."""

    index: int
    score: float
    text: str | None = None


class FoundDocument(Struct, kw_only=True):
    """A document of the index with its best passage: characters `start` to `end` of the document.

    `highlights` are the query's words in the passage: start and end of each, in characters.
    """

    id: str
    score: float
    title: str
    passage: str
    start: int
    end: int
    highlights: list[tuple[int, int]] | None = None


class TokenInfo(Struct, kw_only=True):
    """A token, and the characters of the text that it covers."""

    id: int
    text: str
    special: bool
    start: int
    stop: int


class EmbeddingObject(Struct, kw_only=True):
    """One vector, as numbers, or as the base64 of little-endian float32 numbers."""

    object: Literal["embedding"]
    index: int
    embedding: Vector | str


class ModelObject(Struct, kw_only=True):
    """A model, in OpenAI's form."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Struct, kw_only=True):
    """All models, in OpenAI's form."""

    object: Literal["list"]
    data: list[ModelObject]


class TokenUsage(Struct, kw_only=True):
    """The number of tokens that the model read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    """The vectors of all texts, in OpenAI's form."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: TokenUsage


class WordResponse(Struct, kw_only=True):
    """A word with its label. A word without tokens has no probability."""

    text: str
    label: str | None
    probability: float | None
    start: int
    end: int


class EntityResponse(Struct, kw_only=True):
    """An entity: consecutive words with one label."""

    label: str
    text: str
    start: int
    end: int
    probability: float


class TokenClassificationResponse(Struct, kw_only=True):
    """The words of a text with their labels, and the entities that the words form."""

    words: list[WordResponse]
    entities: list[EntityResponse]
    windows: int


class QuestionAnsweringResponse(Struct, kw_only=True):
    """The answer with its offsets in the context; "" if the context has no answer."""

    answer: str
    start: int
    end: int
    score: float | None
    no_answer_score: float
    windows: int
    best_answer: str | None = None


class MultipleChoiceResponse(Struct, kw_only=True):
    """The most probable candidate, and the probabilities of all."""

    choice: str
    index: int
    probability: float
    probabilities: list[float]
    windows: int | None = None


class NextSentenceResponse(Struct, kw_only=True):
    """The probability that the second text follows the first."""

    is_next_probability: float


class MaskCandidate(Struct, kw_only=True):
    """A candidate token for a mask: its name in the vocabulary, and its text."""

    token: str
    text: str
    probability: float


class MaskResponse(Struct, kw_only=True):
    """A mask with its position in the text, in characters, and the most probable tokens for it."""

    start: int
    end: int
    candidates: list[MaskCandidate]


class FillMaskResponse(Struct, kw_only=True):
    """The masks of a text."""

    masks: list[MaskResponse]
    windows: int
    note: str | None = None


class GeneratedTextResponse(Struct, kw_only=True):
    """A generated text. `complete` is false if the text was cut off at the maximum number of tokens."""

    text: str
    log_probability: float
    tokens: int
    complete: bool


class GenerateResponse(GeneratedTextResponse, kw_only=True):
    """The best generated text, and the texts of the other beams."""

    alternatives: list[GeneratedTextResponse] | None = None


class AttentionLayer(Struct, kw_only=True):
    """Attention weights of one layer, [heads, queries, keys]; each row of keys sums to 1."""

    part: Literal["encoder", "decoder", "cross"]
    layer: int
    heads: list[int]
    weights: list[list[list[float]]]


class AttentionResponse(Struct, kw_only=True):
    """Attention weights of the tokens of a text."""

    tokens: list[TokenInfo]
    layers: list[AttentionLayer]


class IndexFacts(Struct, kw_only=True):
    """The size of an index."""

    documents: int
    passages: int


class Info(Struct, kw_only=True):
    """A model, its routes, and the limits of the server."""

    model_id: str
    model_dtype: str
    model_type: dict[str, Any]
    family: str
    parameters: int
    routes: list[str]
    labels: list[str] | None
    index: IndexFacts | None
    max_input_length: int | None
    max_batch_tokens: int
    max_concurrent_requests: int
    max_client_batch_size: int
    max_connections: int
    max_connections_per_address: int | None
    auto_truncate: bool
    models: list[str]
    version: str


class OutputTensor(Struct, kw_only=True):
    """A tensor of the response."""

    name: str
    shape: list[int]
    datatype: Literal["BYTES", "FP32"]
    data: list[str | float]


class InferResponse(Struct, kw_only=True):
    """The response of the Open Inference Protocol."""

    model_name: str
    outputs: list[OutputTensor]
    id: str | None = None


class TensorSpec(Struct, kw_only=True):
    """An input or output tensor of a model; -1 in its shape is any size."""

    name: str
    datatype: Literal["BYTES", "FP32"]
    shape: list[int]


class ModelFacts(Struct, kw_only=True):
    """The Open Inference Protocol's description of a model."""

    name: str
    platform: str
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]


class ServerFacts(Struct, kw_only=True):
    """The Open Inference Protocol's description of a server."""

    name: str
    version: str
    extensions: list[str]


class Live(Struct, kw_only=True):
    """Whether the server runs."""

    live: bool


class Ready(Struct, kw_only=True):
    """Whether the models are loaded and the server accepts requests."""

    ready: bool


class Health(Struct, kw_only=True):
    """The status of the server."""

    status: Literal["ok", "loading", "stopping"]


class ErrorResponse(Struct, kw_only=True):
    """An error message, and its type for programs."""

    error: str
    error_type: str


class OpenAIErrorDetails(Struct, kw_only=True):
    """Details of an error in OpenAI's form."""

    message: str
    type: str
    code: int


class OpenAIErrorResponse(Struct, kw_only=True):
    """An error, in OpenAI's form."""

    error: OpenAIErrorDetails
