"""Model and head configurations: plain data from which modules are built, independent of families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heedful.errors import ModelError


def _check(config: object, minimum: dict[str, int], *fractions: str) -> None:
    """Raise ModelError for a number below its minimum, or a fraction outside 0 to 1."""
    for name, low in minimum.items():
        value = getattr(config, name)
        if value is not None and value < low:
            raise ModelError(f"{name} is {value}; expected a whole number from {low}")
    for name in fractions:
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            raise ModelError(f"{name} is {value}; expected a number from 0 to 1")


# -- positions that are added to the embeddings ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """One trained vector for each position; position p takes row p + offset."""

    kind: Literal["learned"] = "learned"
    count: int  # rows of the table, the first `offset` included
    offset: int = 0
    padding: int | None = None  # a row that stays zero and gets no gradient
    join: Literal["add", "concatenate"] = "add"
    width: int | None = None  # of concatenated positions; added ones have the embedding's width

    @property
    def limit(self) -> int:
        """Number of tokens that have positions."""
        return self.count - self.offset


@dataclass(frozen=True, kw_only=True, slots=True)
class Sinusoidal:
    """Fixed sines and cosines (Vaswani et al. 2017, section 3.5), in one of the three published layouts.

    interleaved: sin, cos, sin, cos, ... with wavelength base^(2i/d): the paper.
    halves: all sines, then all cosines, the same wavelengths: Marian.
    halves_inclusive: as halves, up to a wavelength of base itself, base^(i/(d/2 - 1)): tensor2tensor, fairseq.
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves", "halves_inclusive"] = "interleaved"
    base: float = 10_000.0
    offset: int = 0
    join: Literal["add", "concatenate"] = "add"
    width: int | None = None  # of concatenated positions
    limit: int | None = None  # tokens of a sequence, as the model was trained; None: any number


# -- positions that enter attention -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicNtk:
    """A base that grows with the length of the sequence, beyond the trained one (bloc97 and emozilla 2023)."""

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: float = 1.0
    trained: int = 512  # positions


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Slow rotations are divided by a factor, fast ones are not (Peng et al. 2023, arXiv:2309.00071)."""

    kind: Literal["yarn"] = "yarn"
    factor: float = 1.0
    trained: int = 512  # positions
    magnitude: float = 1.0  # queries and keys are multiplied by it
    fast: float = 32.0  # rotations within the trained positions, from which on numbers are not stretched
    slow: float = 1.0  # rotations up to which numbers are stretched by the whole factor
    truncate: bool = True  # the bounds of both in whole pairs of numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Slow rotations are divided by a factor, fast ones are not, as in Llama 3.1 (arXiv:2407.21783)."""

    kind: Literal["llama3"] = "llama3"
    factor: float = 8.0
    trained: int = 8192  # positions
    low: float = 1.0  # rotations within the trained positions, up to which they are divided by the whole factor
    high: float = 4.0  # rotations from which on they are not divided

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ModelError(f"low is {self.low} and high {self.high}; expected a low below high")


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRope:
    """Each rotation has its own divisor; long sequences have other divisors (Ding et al. 2024, arXiv:2402.13753)."""

    kind: Literal["longrope"] = "longrope"
    short: tuple[float, ...] = ()  # divisors, head_width / 2 numbers
    long: tuple[float, ...] = ()  # the same for sequences of more than `trained` tokens
    trained: int = 512  # positions
    magnitude: float = 1.0  # queries and keys are multiplied by it


Scaling = LinearScaling | DynamicNtk | Yarn | Llama3Scaling | LongRope


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Rotary position embeddings: queries and keys rotated by their positions (Su et al. 2021)."""

    kind: Literal["rotary"] = "rotary"
    base: float = 10_000.0
    local_base: float | None = None  # of layers with a window; None: base
    scaling: Scaling | None = None
    local_scaling: Scaling | None = None  # of layers with a window, if local_base is set


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """A bias for each head and bucket of distances, shared by all layers of a stack (Raffel et al. 2020)."""

    kind: Literal["buckets"] = "buckets"
    count: int = 32
    reach: int = 128  # distance from which all fall into the last bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaw:
    """A vector for each distance up to `reach`, added to keys and values (Shaw et al. 2018)."""

    kind: Literal["shaw"] = "shaw"
    reach: int = 16
    values: bool = True  # False: only to keys


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerXl:
    """Sinusoids of the distance, and whether segments are the same, each with its own query bias (Dai et al. 2019)."""

    kind: Literal["transformer_xl"] = "transformer_xl"
    reach: int | None = None  # larger distances count as this one


@dataclass(frozen=True, kw_only=True, slots=True)
class Disentangled:
    """Scores of contents with distances and of distances with contents, beside those of contents (He et al. 2021).

    All layers share one vector for each bucket of distances; each projects them by its own query and key matrices.
    """

    kind: Literal["disentangled"] = "disentangled"
    buckets: int = 256  # for distances on each side; half of them exact, the others logarithmic up to `reach`
    reach: int = 512
    norm: bool = True  # of the vectors, before they are projected


# -- the model ------------------------------------------------------------------------------------------------

Norm = Literal["layer", "rms"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig:
    """The input embedding: tokens, positions and types are joined, normalised, dropped out and projected."""

    vocabulary: int
    width: int
    positions: Learned | Sinusoidal | None = None
    types: int = 0  # segment types; 0: none
    padding: int | None = None  # a token whose vector stays zero and gets no gradient
    scale: float = 1.0  # multiplies token vectors: sqrt(width) in the original Transformer
    norm: Norm | None = None
    norm_eps: float = 1e-12
    norm_bias: bool = True
    dropout: float = 0.0
    query: bool = False  # a trained vector for rows of the query stream (Yang et al. 2019, section 2.3)
    always_project: bool = False  # a projection to the stack's width even where the widths are equal

    def __post_init__(self) -> None:
        _check(self, {"vocabulary": 1, "width": 1, "types": 0, "padding": 0}, "dropout", "norm_eps")
        if self.positions is not None:
            width, added = self.positions.width, self.positions.join == "add"
            if added and width not in (None, self.width):
                raise ModelError(
                    f"positions.width is {width}; added positions are as wide as tokens, {self.width}: leave it out"
                )
            if not added and (width is None or width < 1):
                raise ModelError(f"positions.width is {width}; concatenated positions need a whole number from 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig:
    """A stack of blocks of attention and MLP."""

    width: int
    layers: int
    heads: int
    head_width: int
    kv_heads: int | None = None  # key and value heads of self-attention, shared by groups of heads; None: heads
    qk_norm: bool = False  # RMS norm of each query and key over head_width, before positions enter
    inner_width: int
    activation: Activation = "gelu"
    gated: bool = False  # activation(gate) * up instead of activation(up)
    attention_bias: bool = True
    mlp_bias: bool = True
    up_bias: bool | None = None  # of the MLP's first layer; None: mlp_bias
    norm: Norm = "layer"
    norm_at: Literal["post", "pre"] = "post"  # after each residual sum, or before each sublayer
    norm_eps: float = 1e-12
    norm_bias: bool = True
    final_norm: bool = False  # after the last block; models with pre-norm have it
    first_norm: bool = True  # with pre-norm: before the first attention too
    blocks: int | None = None  # fewer than layers: neighbouring layers share their weights (Lan et al. 2020)
    relation: Rotary | Buckets | Shaw | TransformerXl | Disentangled | None = None
    score_scale: float | None = None  # None: 1 / sqrt(head_width)
    causal: bool = False
    cross: bool = False  # cross-attention to the encoder's rows
    window: int | None = None  # positions that a row sees on each side, except in global layers
    global_every: int | None = None  # layers 0, g, 2g, ... see everything; None: none of them
    global_layers: tuple[int, ...] | None = None  # numbers of the layers that see everything, in place of global_every
    dropout: float = 0.0  # after the MLP, and after attention unless attention_out_dropout is set
    attention_out_dropout: float | None = None
    attention_dropout: float = 0.0  # of the weights, after the softmax
    inner_dropout: float = 0.0  # inside the MLP, after the activation
    final_dropout: float = 0.0  # of the output rows

    def __post_init__(self) -> None:
        if self.blocks is not None and not 1 <= self.blocks <= self.layers:
            raise ModelError(f"blocks is {self.blocks}; expected 1 to {self.layers}, the number of layers")
        if isinstance(self.relation, Rotary) and self.head_width % 2:
            raise ModelError(f"head_width is {self.head_width}; rotary positions rotate numbers in pairs: make it even")
        if isinstance(self.relation, Rotary):
            self._check_rotary(self.relation)
        if isinstance(self.relation, Buckets):
            count, reach, minimum = self.relation.count, self.relation.reach, 2 if self.causal else 4
            if count < minimum:
                raise ModelError(f"relation.count is {count}; expected a whole number of buckets from {minimum}")
            if reach <= count // minimum:
                raise ModelError(
                    f"relation.reach is {reach}; expected more than {count // minimum}: nearer ones have a bucket each"
                )
        if isinstance(self.relation, Disentangled) and not 4 <= self.relation.buckets < 2 * self.relation.reach:
            raise ModelError(
                f"relation.buckets is {self.relation.buckets}; expected a whole number from 4 to less than twice "
                f"relation.reach, {self.relation.reach}"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ModelError(f"kv_heads is {self.kv_heads}; expected a number that divides heads, {self.heads}")
        if isinstance(self.relation, TransformerXl | Disentangled) and (self.kv_heads or self.qk_norm):
            raise ModelError(f'kv_heads and qk_norm are not built with relation "{self.relation.kind}": leave them out')
        if self.global_layers is not None and self.global_every is not None:
            raise ModelError("global_every and global_layers both say which layers see everything: give one of them")
        sizes = {"width": 1, "layers": 1, "heads": 1, "head_width": 1, "inner_width": 1, "window": 0, "global_every": 1}
        _check(
            self,
            sizes,
            "dropout",
            "attention_out_dropout",
            "attention_dropout",
            "inner_dropout",
            "final_dropout",
            "norm_eps",
        )

    def _check_rotary(self, relation: Rotary) -> None:
        for scaling in (relation.scaling, relation.local_scaling):
            if isinstance(scaling, DynamicNtk | LongRope) and self.causal:
                raise ModelError(
                    f"rotations by the length of a sequence ({scaling.kind}) are for encoders; this stack is causal"
                )
            if isinstance(scaling, LongRope):
                for name, divisors in (("short", scaling.short), ("long", scaling.long)):
                    if len(divisors) != self.head_width // 2 or min(divisors) <= 0:
                        raise ModelError(
                            f"relation.scaling.{name} is {divisors}; expected {self.head_width // 2} positive numbers, "
                            "half of head_width"
                        )

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Numbers of a row's query, key and value: all heads of each."""
        keys = (self.kv_heads or self.heads) * self.head_width
        return self.heads * self.head_width, keys, keys

    def kv_heads_of(self, heads: int) -> int | None:
        """Return kv_heads of a similar stack with that many heads: groups as large as here, or None."""
        group = self.heads // (self.kv_heads or self.heads)
        return heads // group if group > 1 and heads % group == 0 else None

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer; None: it sees everything."""
        if self.global_layers is not None:
            return None if layer in self.global_layers else self.window
        return None if self.global_every and layer % self.global_every == 0 else self.window


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedNormal:
    """Normal with standard deviation std, truncated at `cut` of them (Google's BERT; Devlin et al. 2019)."""

    kind: Literal["truncated_normal"] = "truncated_normal"
    std: float = 0.02
    cut: float = 2.0  # in standard deviations
    outputs: float = 1.0  # factor of std for matrices that end a residual branch (Radford et al. 2019, section 2.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Normal:
    """Normal with standard deviation std (Hugging Face's BERT)."""

    kind: Literal["normal"] = "normal"
    std: float = 0.02
    outputs: float = 1.0  # factor of std for matrices that end a residual branch


@dataclass(frozen=True, kw_only=True, slots=True)
class FanIn:
    """Normal with factor * (fan in)^-0.5 (T5; Raffel et al. 2020, as released).

    Queries are multiplied by (head width)^-0.5, since T5's scores are not scaled; embeddings have the standard
    deviation factor, relative biases factor * width^-0.5.
    """

    kind: Literal["fan_in"] = "fan_in"
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Xavier:
    """Uniform with variance 2 / (fan in + fan out) (Glorot and Bengio 2010); embeddings normal with width^-0.5."""

    kind: Literal["xavier"] = "xavier"


Initialisation = TruncatedNormal | Normal | FanIn | Xavier


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """An encoder, a decoder, or both; the decoder shares the embedding unless it has its own."""

    embedding: EmbeddingConfig
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    decoder_embedding: EmbeddingConfig | None = None
    shared_tokens: bool = False  # decoder_embedding has the token vectors of embedding
    start: int | None = None  # token that decoder inputs begin with
    starts_with_last: bool = False  # a decoder that reads the encoder's text begins with its last token instead
    initialisation: Initialisation = TruncatedNormal()

    @property
    def has_encoder(self) -> bool:
        """Whether it reads a source text with an encoder."""
        return self.encoder is not None

    @property
    def has_decoder(self) -> bool:
        """Whether it generates text, token by token."""
        return self.decoder is not None

    @property
    def uses_token_types(self) -> bool:
        """Whether token types (segments) change its outputs."""
        stacks = (self.encoder, self.decoder)
        relative = any(isinstance(stack.relation, TransformerXl) for stack in stacks if stack is not None)
        return relative or self.embedding.types > 1

    @property
    def max_source_positions(self) -> int | None:
        """Maximum source length that the decoder can attend to; None if unlimited."""
        return None

    @property
    def width(self) -> int:
        """Width of the output rows."""
        last = self.decoder or self.encoder
        assert last is not None
        return last.width


# -- heads ----------------------------------------------------------------------------------------------------


Pooling = Literal["mean", "first", "max", "mean_sqrt_length", "last"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A vector for each sequence: pooling, dropout, dense, activation, norm, dropout."""

    pooling: Pooling = "first"
    pooled_token: int | None = None  # with "last": the last row of this token, in sequences that have it
    pools_last: bool = False  # dense, activation and norm are computed of every row, and their results are pooled
    dense: bool = True  # False: the pooled row itself
    dense_bias: bool = True
    activation: Activation | None = "tanh"
    norm_eps: float | None = None  # None: no norm
    norm_bias: bool = False
    dropout_first: float = 0.0  # before the dense layer
    dropout: float = 0.0  # before the last layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Rowwise:
    """A vector for each row: optional dense, activation and norm, then dropout."""

    dense: bool = False
    dense_bias: bool = True
    activation: Activation | None = "gelu"
    norm_eps: float | None = None
    norm_bias: bool = False
    dropout: float = 0.0  # before the last layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooled:
    """The pooler: tanh(W h + b) of each sequence's first row (Devlin et al. 2019, section 3.2)."""

    kind: Literal["pooler"] = "pooler"


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedTokens:
    """Masked language modelling: scores over the vocabulary for each row by dense, activation, norm and decoder."""

    kind: Literal["masked_lm"] = "masked_lm"
    dense: bool = True  # False: the decoder alone
    activation: Activation = "gelu"
    norm_eps: float = 1e-12
    tied: bool = True  # the decoder's weight is the embedding
    dense_bias: bool = True
    norm_bias: bool = True
    bias: bool = True  # of the decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class NextSentenceScores:
    """Next-sentence prediction: two scores for each sequence, the second segment follows the first (0) or not (1)."""

    kind: Literal["next_sentence"] = "next_sentence"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretraining:
    """Masked tokens together with next-sentence or sentence-order prediction (0: as written, 1: swapped)."""

    kind: Literal["pretraining"] = "pretraining"
    activation: Activation = "gelu"
    norm_eps: float = 1e-12
    tied: bool = True
    dense_bias: bool = True
    norm_bias: bool = True
    bias: bool = True
    dropout: float = 0.0  # before the two scores


ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
ScoreActivation = Literal["identity", "sigmoid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Classes(Summary):
    """Sequence classification: scores over labels for each sequence."""

    kind: Literal["sequence_classification"] = "sequence_classification"
    labels: tuple[str, ...]
    problem_type: ProblemType = "single_label_classification"
    bias: bool = True
    score_activation: ScoreActivation | None = None  # of a cross-encoder's one score; None: it is none


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenClasses(Rowwise):
    """Token classification: scores over labels for each row."""

    kind: Literal["token_classification"] = "token_classification"
    labels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Summary):
    """Multiple choice: one score for each sequence; the candidates of one question follow each other."""

    kind: Literal["multiple_choice"] = "multiple_choice"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanScores(Rowwise):
    """Extractive question answering: start and end scores for each row (Devlin et al. 2019, section 4.2)."""

    kind: Literal["question_answering"] = "question_answering"
    no_answer: Literal["first", "last"] = "first"  # row whose scores mean "no answer"; it must see all others


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedTokens(Rowwise):
    """Replaced token detection: one score for each row, above 0 if its token was replaced (Clark et al. 2020)."""

    kind: Literal["replaced_token_detection"] = "replaced_token_detection"
    dense: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class NextToken:
    """Language modelling: scores over the vocabulary for each row by one linear layer."""

    kind: Literal["language_model"] = "language_model"
    tied: bool = True
    bias: bool = False
    bias_is_trained: bool = True  # False: it stays as it was loaded
    scale: float = 1.0  # multiplies the rows before the linear layer


@dataclass(frozen=True, kw_only=True, slots=True)
class PermutedTokens:
    """Permutation language modelling: scores over the vocabulary for rows of the query stream (Yang et al. 2019)."""

    kind: Literal["permutation_lm"] = "permutation_lm"
    tied: bool = True
    bias: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class NextTokenAndChoice(Summary):
    """Next tokens and multiple choice: vocabulary scores of rows, a score of each sequence (Radford et al. 2018)."""

    kind: Literal["double_heads"] = "double_heads"
    tied: bool = True
    bias: bool = False
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseLayer:
    """activation(W x + b) of a pooled vector: the Dense module of sentence-transformers."""

    width: int  # of its output
    bias: bool = True
    activation: Activation | None = "tanh"


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceEmbedding:
    """Sentence embedding: one vector for each sequence, as in sentence-transformers (Reimers and Gurevych 2019)."""

    kind: Literal["embedding"] = "embedding"
    pooling: tuple[Pooling, ...] = ("mean",)  # several: their vectors side by side
    dense: tuple[DenseLayer, ...] = ()  # after the pooling
    normalise: bool = False  # to unit length
    dimensions: int | None = None  # the first numbers of the vector, after normalisation; None: all
    max_length: int | None = None  # tokens of a text that are read
    keeps_pooler: bool = False  # the folder has an unused pooler, which saving keeps
    prompts: tuple[tuple[str, str], ...] = ()  # by name
    default_prompt: str | None = None  # name of the prompt before texts for which no other is named
    pools_prompt: bool = True  # False: the tokens of a prompt are read, but not pooled
    similarity: str | None = None  # saved for sentence-transformers

    def prompt(self, *names: str) -> str:
        """Return the first prompt with one of these names; else the default prompt, or ""."""
        prompts = dict(self.prompts)
        return next((prompts[name] for name in (*names, self.default_prompt) if name in prompts), "")

    def width(self, model: ModelConfig) -> int:
        """Return the width of the vectors that it makes from the rows of a model."""
        width = self.dense[-1].width if self.dense else model.width * len(self.pooling)
        return width if self.dimensions is None else min(width, self.dimensions)


Head = (
    Pooled
    | MaskedTokens
    | NextSentenceScores
    | Pretraining
    | Classes
    | TokenClasses
    | Choice
    | SpanScores
    | ReplacedTokens
    | NextToken
    | NextTokenAndChoice
    | PermutedTokens
    | SentenceEmbedding
)
