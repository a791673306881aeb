"""Types of request bodies. Bodies are validated against them, and /openapi.json is generated from them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(max_length=200)]
TEXTS_HINT = "; send texts: token ids of another tokenizer mean other words here"
Model = Annotated[Name | None, Meta(description="Name of a served model; null: the first that the route can use.")]
Numbers = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=1000)]


class ModelBody(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The fields of every request."""

    hint: ClassVar[str] = ""  # appended to the message of a validation error
    model: Model = None


class TruncatedBody(ModelBody, kw_only=True, frozen=True):
    """The field of Text Embeddings Inference for the truncation of long texts."""

    truncation_direction: Literal["Right", "right"] = "Right"


class EmbedBody(TruncatedBody, kw_only=True, frozen=True):
    """Texts to embed. Texts longer than the model's limit are truncated, or refused if truncate is false."""

    hint = TEXTS_HINT
    inputs: str | list[str]
    normalize: bool = True
    truncate: bool | None = None  # null is true
    dimensions: Positive | None = None
    prompt_name: str | None = None  # name of a prompt; null for the model's default prompt


class TextPair(Struct, forbid_unknown_fields=True, frozen=True):
    """A text, or a pair of texts."""

    text: str
    text_pair: str | None = None


class PredictBody(TruncatedBody, kw_only=True, frozen=True):
    """Texts or pairs to classify: a text, an object, or a list of texts, of [text] or [text, text], or of objects."""

    inputs: str | TextPair | list[str | Annotated[list[str], Meta(min_length=1, max_length=2)] | TextPair]
    truncate: bool | None = None  # accepted and ignored, since long texts are split into windows
    raw_scores: bool = False  # true is refused
    min_confidence: Annotated[float, Meta(ge=0, le=1)] | None = None  # minimum probability of a "predicted" label
    prediction_set: Annotated[float, Meta(gt=0, lt=1)] | None = None  # coverage of the set of "predicted" labels


class ZeroShotParameters(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The labels to choose from, and the text around each of them."""

    candidate_labels: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1000)]], Meta(min_length=1)]
    hypothesis_template: Annotated[str, Meta(max_length=1000)] | None = None  # has {}; null for the model's default
    multi_label: bool = False


class ZeroShotBody(ModelBody, kw_only=True, frozen=True):
    """Texts, and labels that the model was not trained on."""

    inputs: str | Annotated[list[str], Meta(min_length=1)]
    parameters: ZeroShotParameters


class RerankBody(TruncatedBody, kw_only=True, frozen=True):
    """Texts to sort by their relevance to a query."""

    query: str
    texts: Annotated[list[str], Meta(min_length=1)]
    truncate: bool | None = None
    raw_scores: bool = False
    return_text: bool = False


class SearchBody(ModelBody, kw_only=True, frozen=True):
    """A query for the index that is served."""

    query: str
    top_k: Annotated[int, Meta(ge=1, le=1000)] = 10
    method: Literal["hybrid", "words", "vectors"] = "hybrid"
    reranker: str | None = None  # name of a served cross-encoder, such as /rerank uses
    highlight: bool = False  # also return the positions of the query's words in each passage


class SentenceComparison(Struct, forbid_unknown_fields=True, frozen=True):
    """A sentence, and the sentences to compare it with."""

    source_sentence: str
    sentences: Annotated[list[str], Meta(min_length=1)]


class TruncationParameters(Struct, forbid_unknown_fields=True, frozen=True):
    """Whether and where long texts are truncated."""

    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] = "Right"
    prompt_name: None = None


class SimilarityBody(ModelBody, frozen=True):
    """Sentences to compare by the cosine of their vectors."""

    inputs: SentenceComparison
    parameters: TruncationParameters | None = None


class TokenizeBody(ModelBody, frozen=True):
    """Texts to tokenize."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: None = None


class EmbeddingsBody(ModelBody, frozen=True):
    """Texts to embed, in OpenAI's form."""

    hint = TEXTS_HINT
    input: str | list[str]
    encoding_format: Literal["float", "base64"] | None = None  # null is float
    dimensions: Positive | None = None
    user: str | None = None


class TokenClassificationBody(ModelBody, frozen=True):
    """Texts to tag: a text, or a list of texts and of lists of words."""

    inputs: str | list[str | list[str]]


class ContextQuestion(Struct, forbid_unknown_fields=True, frozen=True):
    """A question, and the text that may contain its answer."""

    question: str
    context: str


class QuestionAnsweringBody(ModelBody, frozen=True):
    """Questions with their contexts."""

    inputs: ContextQuestion | list[ContextQuestion]


class PromptChoices(Struct, forbid_unknown_fields=True, frozen=True):
    """A prompt, and the candidates to choose from."""

    prompt: str
    choices: Annotated[list[str], Meta(min_length=1)]


class MultipleChoiceBody(ModelBody, frozen=True):
    """Prompts with their candidates."""

    inputs: PromptChoices | list[PromptChoices]


class NextSentenceBody(ModelBody, frozen=True):
    """Pairs of texts, for the probability that the second text follows the first."""

    inputs: list[Annotated[list[str], Meta(min_length=2, max_length=2)]]


class FillMaskBody(ModelBody, frozen=True):
    """Texts with mask tokens to fill in."""

    inputs: str | list[str]
    top_k: Annotated[int, Meta(ge=1, le=100)] = 5


class GenerateBody(ModelBody, frozen=True):
    """Texts to generate from, by greedy decoding, beam search, or sampling at a temperature."""

    inputs: str | list[str]
    max_new_tokens: Positive | None = None  # null for the value in the model's generation_config.json, or 128
    num_beams: Annotated[int, Meta(ge=1, le=16)] | None = None
    temperature: Annotated[float, Meta(ge=1e-6, le=10)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


class AttentionBody(ModelBody, frozen=True):
    """A text or a pair. Layers and heads are counted from 0; null: all."""

    inputs: str | Annotated[list[str], Meta(min_length=2, max_length=2)]
    layers: Numbers | None = None
    heads: Numbers | None = None


class ClientParameters(Struct, frozen=True):
    """Parameters of any form, which the server ignores."""


class InputTensor(Struct, forbid_unknown_fields=True, frozen=True):
    """A tensor of texts, in the Open Inference Protocol's form."""

    name: str
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=8)]
    datatype: Literal["BYTES"]
    data: list[str | list[str]]  # a list of texts, or of lists with one text
    parameters: ClientParameters | None = None


class RequestedOutput(Struct, forbid_unknown_fields=True, frozen=True):
    """The name of an output to return."""

    name: str
    parameters: ClientParameters | None = None


class InferBody(Struct, forbid_unknown_fields=True, frozen=True):
    """Tensors of texts in the Open Inference Protocol; GET /v2/models/NAME lists their names."""

    inputs: Annotated[list[InputTensor], Meta(min_length=1)]
    id: Name | None = None
    outputs: list[RequestedOutput] | None = None
    parameters: ClientParameters | None = None
