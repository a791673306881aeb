"""Configurations of models and heads: plain data, independent of families, from which modules are built.

`families` reads them. `width` is the hidden size or the dimension of vectors; `head_width` is the dimension of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heedful.errors import ModelError


def _check(config: object, minimum: dict[str, int], *fractions: str) -> None:
    """Raise ModelError for a field below its minimum, or a fraction outside 0 to 1."""
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
    padding: int | None = None  # row that stays zero and gets no gradient
    join: Literal["add", "concatenate"] = "add"
    width: int | None = None  # width of concatenated positions; added positions are as wide as the embedding

    @property
    def limit(self) -> int:
        """How many positions there are."""
        return self.count - self.offset


@dataclass(frozen=True, kw_only=True, slots=True)
class Sinusoidal:
    """Fixed sines and cosines (Vaswani et al. 2017, section 3.5), in one of the three published layouts.

    "interleaved": sin, cos, sin, cos, ... of p / base^(2i/d) (the paper). "halves": all sines, then all cosines, with
    the same exponents (Marian). "halves_inclusive": all sines, then all cosines, of p / base^(i/(d/2 - 1))
    (tensor2tensor, fairseq).
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves", "halves_inclusive"] = "interleaved"
    base: float = 10_000.0
    offset: int = 0  # added to the positions
    join: Literal["add", "concatenate"] = "add"
    width: int | None = None  # width of concatenated positions; added positions are as wide as the embedding
    limit: int | None = None  # tokens in the longest sequences of the model's training (default: unlimited)


# -- relative positions, in attention ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Position interpolation: all positions are divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicNtk:
    """Dynamic NTK: the base grows with the length of a sequence beyond the trained one (bloc97 and emozilla 2023)."""

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: float = 1.0
    trained: int = 512  # positions in the longest sequences of training


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """YaRN: slow frequencies are divided by a factor, fast ones are not (Peng et al. 2023, arXiv:2309.00071)."""

    kind: Literal["yarn"] = "yarn"
    factor: float = 1.0
    trained: int = 512  # positions in the longest sequences of training
    magnitude: float = 1.0  # factor of queries and keys
    fast: float = 32.0  # rotations within the trained positions, from which a frequency is unchanged
    slow: float = 1.0  # rotations within the trained positions, up to which a frequency is divided by `factor`
    truncate: bool = True  # round the index of the first and of the last interpolated frequency to an integer


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: slow frequencies are divided by a factor, fast ones are not (arXiv:2407.21783)."""

    kind: Literal["llama3"] = "llama3"
    factor: float = 8.0
    trained: int = 8192  # positions in the longest sequences of training
    low: float = 1.0  # rotations within the trained positions, up to which a frequency is divided by `factor`
    high: float = 4.0  # rotations within the trained positions, from which a frequency is unchanged

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ModelError(f"low is {self.low} and high {self.high}; expected a low below high")


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRope:
    """LongRoPE: a divisor for each frequency, other ones in long sequences (Ding et al. 2024, arXiv:2402.13753)."""

    kind: Literal["longrope"] = "longrope"
    short: tuple[float, ...] = ()  # head_width / 2 divisors for sequences of up to `trained` tokens
    long: tuple[float, ...] = ()  # head_width / 2 divisors for longer sequences
    trained: int = 512  # positions in the longest sequences of training
    magnitude: float = 1.0  # factor of queries and keys


Scaling = LinearScaling | DynamicNtk | Yarn | Llama3Scaling | LongRope


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Rotary position embeddings: queries and keys are rotated by their positions (Su et al. 2021)."""

    kind: Literal["rotary"] = "rotary"
    base: float = 10_000.0
    local_base: float | None = None  # base in layers with a window (default: `base` and `scaling` in all layers)
    scaling: Scaling | None = None
    local_scaling: Scaling | None = None  # scaling in layers with a window, if `local_base` is set


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """A bias for each head and bucket of distances, shared by all layers of a stack (Raffel et al. 2020)."""

    kind: Literal["buckets"] = "buckets"
    count: int = 32
    reach: int = 128  # distance from which all distances share the last bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaw:
    """Trained vectors for each distance, one added to keys and one to values (Shaw et al. 2018)."""

    kind: Literal["shaw"] = "shaw"
    reach: int = 16  # largest distance with its own vectors; larger ones are clipped to it
    values: bool = True  # whether vectors are also added to values, not only to keys


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerXl:
    """Scores from sinusoids of the distance, and from whether segments are the same (Dai et al. 2019)."""

    kind: Literal["transformer_xl"] = "transformer_xl"
    reach: int | None = None  # distance to which larger ones are clipped (default: unlimited)


@dataclass(frozen=True, kw_only=True, slots=True)
class Disentangled:
    """Disentangled attention: scores of content with distance and of distance with content (He et al. 2021).

    All layers share one vector for each bucket of distances, and project it by their own query and key matrices.
    """

    kind: Literal["disentangled"] = "disentangled"
    buckets: int = 256  # buckets on each side; half of them for one distance each, the others logarithmic up to `reach`
    reach: int = 512  # distance from which all distances share the last bucket
    norm: bool = True  # layer norm of the vectors before they are projected


# -- the model ------------------------------------------------------------------------------------------------

Norm = Literal["layer", "rms"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig:
    """The input embedding: tokens, positions and types are joined, normalised, dropped out and projected."""

    vocabulary: int  # count of tokens
    width: int  # dimension of token vectors
    positions: Learned | Sinusoidal | None = None
    types: int = 0  # count of token types (segments); 0: no vectors of types
    padding: int | None = None  # id of the token whose vector stays zero and gets no gradient
    scale: float = 1.0  # factor of token vectors; sqrt(width) in the original Transformer
    norm: Norm | None = None
    norm_eps: float = 1e-12
    norm_bias: bool = True
    dropout: float = 0.0
    query: bool = False  # whether there is a vector for the query stream (Yang et al. 2019, section 2.3)
    always_project: bool = False  # project to the hidden size even if token vectors have that dimension

    def __post_init__(self) -> None:
        _check(self, {"vocabulary": 1, "width": 1, "types": 0, "padding": 0}, "dropout", "norm_eps")
        if self.positions is not None:
            width, are_added = self.positions.width, self.positions.join == "add"
            if are_added and width not in (None, self.width):
                raise ModelError(
                    f"positions.width is {width}; added positions are as wide as tokens, {self.width}: leave it out"
                )
            if not are_added and (width is None or width < 1):
                raise ModelError(f"positions.width is {width}; concatenated positions need a whole number from 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig:
    """A stack of blocks of attention and MLP."""

    width: int  # hidden size
    layers: int
    heads: int
    head_width: int  # dimension of a head
    kv_heads: int | None = None  # heads of keys and values in self-attention, for groups of heads (default: heads)
    qk_norm: bool = False  # RMS norm of each head's query and key, before positions are applied
    inner_width: int  # size of the MLP's inner layer
    activation: Activation = "gelu"
    gated: bool = False  # the MLP computes activation(gate) * up instead of activation(up)
    attention_bias: bool = True
    mlp_bias: bool = True
    up_bias: bool | None = None  # bias of the MLP's first layer (default: mlp_bias)
    norm: Norm = "layer"
    norm_at: Literal["post", "pre"] = "post"  # norm after each residual sum, or before each sublayer
    norm_eps: float = 1e-12
    norm_bias: bool = True
    final_norm: bool = False  # norm after the last block, as models with pre-norm have it
    first_norm: bool = True  # with pre-norm: norm before the first attention
    blocks: int | None = None  # different blocks; if fewer than layers, adjacent layers share one (Lan et al. 2020)
    relation: Rotary | Buckets | Shaw | TransformerXl | Disentangled | None = None  # relative positions
    score_scale: float | None = None  # factor of q k (default: 1 / sqrt(head_width))
    causal: bool = False
    cross: bool = False  # cross-attention to the encoder's hidden states
    window: int | None = None  # tokens on each side that a token attends to, except in global layers (default: all)
    global_every: int | None = None  # g: layers 0, g, 2g, ... have no window (default: all layers have it)
    global_layers: tuple[int, ...] | None = None  # indices of the layers without a window, instead of global_every
    dropout: float = 0.0  # dropout after the MLP, and after attention unless attention_out_dropout is set
    attention_out_dropout: float | None = None  # dropout after attention (default: dropout)
    attention_dropout: float = 0.0  # dropout of attention weights, after the softmax
    inner_dropout: float = 0.0  # dropout inside the MLP, after the activation
    final_dropout: float = 0.0  # dropout of the output

    def __post_init__(self) -> None:
        if self.blocks is not None and not 1 <= self.blocks <= self.layers:
            raise ModelError(f"blocks is {self.blocks}; expected 1 to {self.layers}, the number of layers")
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
            raise ModelError(
                f'kv_heads and qk_norm are not supported with relation "{self.relation.kind}": leave them out'
            )
        if self.global_layers is not None and self.global_every is not None:
            raise ModelError("global_every and global_layers both say which layers see everything: give one of them")
        sizes = {"width": 1, "layers": 1, "heads": 1, "head_width": 1, "inner_width": 1, "window": 0, "global_every": 1}
        dropouts = ("dropout", "attention_out_dropout", "attention_dropout", "inner_dropout", "final_dropout")
        _check(self, sizes, *dropouts, "norm_eps")

    def _check_rotary(self, relation: Rotary) -> None:
        """Raise ModelError if heads cannot be rotated, or for a scaling that this stack cannot have."""
        if self.head_width % 2:
            raise ModelError(f"head_width is {self.head_width}; rotary positions rotate numbers in pairs: make it even")
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
        """Sizes of a token's query, key and value, all heads together."""
        kv_size = (self.kv_heads or self.heads) * self.head_width
        return self.heads * self.head_width, kv_size, kv_size

    def kv_heads_of(self, heads: int) -> int | None:
        """Return kv_heads for a stack of `heads` heads with the group size of this one, or None if it has no groups."""
        group = self.heads // (self.kv_heads or self.heads)
        return heads // group if group > 1 and heads % group == 0 else None

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer, or None if the layer is global."""
        if self.global_layers is not None:
            return None if layer in self.global_layers else self.window
        return None if self.global_every and layer % self.global_every == 0 else self.window


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedNormal:
    """Normal distribution, truncated at `cut` standard deviations (Google's BERT; Devlin et al. 2019)."""

    kind: Literal["truncated_normal"] = "truncated_normal"
    std: float = 0.02  # standard deviation
    cut: float = 2.0  # standard deviations
    outputs: float = 1.0  # factor of std for matrices that end a residual branch (Radford et al. 2019, section 2.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Normal:
    """Normal distribution (Hugging Face's BERT)."""

    kind: Literal["normal"] = "normal"
    std: float = 0.02  # standard deviation
    outputs: float = 1.0  # factor of std for matrices that end a residual branch


@dataclass(frozen=True, kw_only=True, slots=True)
class FanIn:
    """Normal distribution with standard deviation factor * (fan in)^-0.5 (T5; Raffel et al. 2020, as released).

    The deviation of query matrices is multiplied by head_width^-0.5, since T5 does not scale scores. Embeddings have
    the deviation `factor`, and relative biases factor * width^-0.5.
    """

    kind: Literal["fan_in"] = "fan_in"
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Xavier:
    """Uniform, variance 2 / (fan in + fan out) (Glorot and Bengio 2010); embeddings normal, deviation width^-0.5."""

    kind: Literal["xavier"] = "xavier"


Initialisation = TruncatedNormal | Normal | FanIn | Xavier


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A Transformer with an encoder, a decoder, or both."""

    embedding: EmbeddingConfig
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    decoder_embedding: EmbeddingConfig | None = None  # None: the decoder uses `embedding`
    shared_tokens: bool = False  # decoder_embedding has the token vectors of embedding
    start: int | None = None  # token that decoder inputs begin with
    starts_with_last: bool = False  # decoder inputs that repeat the source begin with its last token instead of `start`
    initialisation: Initialisation = TruncatedNormal()

    @property
    def has_encoder(self) -> bool:
        """Whether the model reads a source text with an encoder."""
        return self.encoder is not None

    @property
    def has_decoder(self) -> bool:
        """Whether the model generates text, token by token."""
        return self.decoder is not None

    @property
    def uses_token_types(self) -> bool:
        """Whether token types (segments) change the model's outputs."""
        stacks = (self.encoder, self.decoder)
        in_attention = any(isinstance(stack.relation, TransformerXl) for stack in stacks if stack is not None)
        return in_attention or self.embedding.types > 1

    @property
    def max_source_positions(self) -> int | None:
        """Maximum source length that the decoder can attend to; None if unlimited."""
        return None

    @property
    def width(self) -> int:
        """Hidden size of the output."""
        last = self.decoder or self.encoder
        assert last is not None
        return last.width


# -- heads ----------------------------------------------------------------------------------------------------

Pooling = Literal["mean", "first", "max", "mean_sqrt_length", "last"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A vector for each sequence, by pooling, dropout, dense layer, activation, norm and dropout, in this order."""

    pooling: Pooling = "first"
    pooled_token: int | None = None  # with "last": id of the token to pool, at its last occurrence in a sequence
    pools_last: bool = False  # compute dense, activation and norm for every token, and pool the results
    dense: bool = True  # whether there is a dense layer, with activation and norm
    dense_bias: bool = True
    activation: Activation | None = "tanh"  # None: no activation
    norm_eps: float | None = None  # None: no norm
    norm_bias: bool = False
    dropout_first: float = 0.0  # dropout before the dense layer
    dropout: float = 0.0  # dropout before the head's last layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Rowwise:
    """A vector for each token, by an optional dense layer with activation and norm, and dropout."""

    dense: bool = False  # whether there is a dense layer, with activation and norm
    dense_bias: bool = True
    activation: Activation | None = "gelu"  # None: no activation
    norm_eps: float | None = None  # None: no norm
    norm_bias: bool = False
    dropout: float = 0.0  # dropout before the head's last layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooled:
    """The pooler: tanh(W h + b) of each sequence's first hidden state (Devlin et al. 2019, section 3.2)."""

    kind: Literal["pooler"] = "pooler"


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedTokens:
    """Masked language modelling: scores over the vocabulary for each token by dense, activation, norm and decoder."""

    kind: Literal["masked_lm"] = "masked_lm"
    dense: bool = True  # whether a dense layer, activation and norm precede the decoder
    activation: Activation = "gelu"
    norm_eps: float = 1e-12
    tied: bool = True  # the decoder's weight is the token embedding
    dense_bias: bool = True
    norm_bias: bool = True
    bias: bool = True  # bias of the decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class NextSentenceScores:
    """Next-sentence prediction: two scores for each sequence.

    Score 0 means that the second segment follows the first, score 1 that it does not.
    """

    kind: Literal["next_sentence"] = "next_sentence"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretraining:
    """Masked language modelling with next-sentence or sentence-order prediction (0: as written, 1: swapped)."""

    kind: Literal["pretraining"] = "pretraining"
    activation: Activation = "gelu"
    norm_eps: float = 1e-12
    tied: bool = True  # the decoder's weight is the token embedding
    dense_bias: bool = True
    norm_bias: bool = True
    bias: bool = True  # bias of the decoder
    dropout: float = 0.0  # dropout before the layer of the two scores


ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
ScoreActivation = Literal["identity", "sigmoid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Classes(Summary):
    """Sequence classification: scores over labels for each sequence."""

    kind: Literal["sequence_classification"] = "sequence_classification"
    labels: tuple[str, ...]
    problem_type: ProblemType = "single_label_classification"
    bias: bool = True  # bias of the last layer
    score_activation: ScoreActivation | None = None  # activation of a cross-encoder's score (default: no cross-encoder)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenClasses(Rowwise):
    """Token classification: scores over labels for each token."""

    kind: Literal["token_classification"] = "token_classification"
    labels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Summary):
    """Multiple choice: one score for each sequence; the candidates of a question are consecutive sequences."""

    kind: Literal["multiple_choice"] = "multiple_choice"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanScores(Rowwise):
    """Extractive question answering: start and end scores for each token (Devlin et al. 2019, section 4.2)."""

    kind: Literal["question_answering"] = "question_answering"
    no_answer: Literal["first", "last"] = "first"  # token that means "no answer"; it must attend to all others


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedTokens(Rowwise):
    """Replaced token detection: one score for each token, above 0 if it was replaced (Clark et al. 2020)."""

    kind: Literal["replaced_token_detection"] = "replaced_token_detection"
    dense: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class NextToken:
    """Language modelling: scores over the vocabulary for each token by one linear layer."""

    kind: Literal["language_model"] = "language_model"
    tied: bool = True  # the layer's weight is the token embedding
    bias: bool = False
    bias_is_trained: bool = True
    scale: float = 1.0  # factor of the hidden states before the linear layer


@dataclass(frozen=True, kw_only=True, slots=True)
class PermutedTokens:
    """Permutation language modelling: scores over the vocabulary for the query stream (Yang et al. 2019)."""

    kind: Literal["permutation_lm"] = "permutation_lm"
    tied: bool = True  # the layer's weight is the token embedding
    bias: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class NextTokenAndChoice(Summary):
    """Language modelling and multiple choice: a `NextToken` and a `Choice` head together (Radford et al. 2018)."""

    kind: Literal["double_heads"] = "double_heads"
    tied: bool = True  # the weight of the vocabulary scores is the token embedding
    bias: bool = False  # bias of the vocabulary scores
    scale: float = 1.0  # factor of the hidden states before the vocabulary scores


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseLayer:
    """A layer activation(W x + b) on a pooled vector, as the Dense module of sentence-transformers."""

    width: int  # dimension of the output
    bias: bool = True
    activation: Activation | None = "tanh"  # None: no activation


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceEmbedding:
    """Sentence embedding: one vector for each sequence, as in sentence-transformers (Reimers and Gurevych 2019)."""

    kind: Literal["embedding"] = "embedding"
    pooling: tuple[Pooling, ...] = ("mean",)  # poolings whose vectors are concatenated
    dense: tuple[DenseLayer, ...] = ()  # layers after the pooling
    normalise: bool = False  # scale vectors to unit length
    dimensions: int | None = None  # how many dimensions of a vector to return, the first ones (default: all)
    max_length: int | None = None  # longest text, in tokens (default: the model's limit)
    keeps_pooler: bool = False  # the model folder has an unused pooler, which is saved again
    prompts: tuple[tuple[str, str], ...] = ()  # names and texts of prompts
    default_prompt: str | None = None  # name of the prompt for texts without a named one (default: no prompt)
    pools_prompt: bool = True  # whether the tokens of a prompt are pooled too
    similarity: str | None = None  # name of a similarity, saved for sentence-transformers

    def prompt(self, *names: str) -> str:
        """Return the prompt of the first of these names that has one; otherwise the default prompt, or ""."""
        prompts = dict(self.prompts)
        return next((prompts[name] for name in (*names, self.default_prompt) if name in prompts), "")

    def width(self, model: ModelConfig) -> int:
        """Return the dimension of the vectors for a model."""
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
