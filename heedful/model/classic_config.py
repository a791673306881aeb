"""Configurations of models from before the Transformer: contextualizers, poolings, recurrent encoder and decoder.

`classic.py`, `pooling.py` and `recurrent_seq2seq.py` build modules from them. They are also settings of fine-tuning,
`init.reader` and `init.rnn`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heedful.errors import SettingError
from heedful.model.config import Initialisation, ModelConfig, Xavier


def _check_minimum(config: object, **minimum: int) -> None:
    """Raise SettingError for a field below its minimum."""
    for name, low in minimum.items():
        if getattr(config, name) < low:
            raise SettingError(f"{name} is {getattr(config, name)}; expected a number from {low}")


# -- contextualizers, which change word vectors by their context ----------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrent:
    """A bidirectional recurrent network: LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014)."""

    kind: Literal["recurrent"] = "recurrent"
    cell: Literal["lstm", "gru"] = "lstm"  # kind of recurrent unit
    width: int = 128  # hidden size of each direction; outputs have twice this size
    layers: int = 1  # stacked recurrent layers

    def __post_init__(self) -> None:
        _check_minimum(self, width=1, layers=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class UntrainedSelfAttention:
    """Untrained self-attention softmax(X X) X: each word becomes a mean of its text's words, weighted by similarity.

    This is a demonstration: the attention between two words does not depend on their context.
    """

    kind: Literal["self"] = "self"
    score: Literal["dot", "cosine"] = "dot"  # similarity of two positions before the softmax


# -- poolings, which make one or more vectors from the hidden states of a text --------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingConfig:
    """Settings of every pooling."""

    over: Recurrent | UntrainedSelfAttention | None = None  # layer over the word vectors (default: none)
    binary: Literal["softmax", "sigmoid"] = "softmax"  # for two labels: two scores, or one for the second label


@dataclass(frozen=True, kw_only=True, slots=True)
class BagPooling(PoolingConfig):
    """Bag of words: the sum or the mean of the hidden states, whatever their order."""

    kind: Literal["bag"] = "bag"
    how: Literal["mean", "sum"] = "mean"  # how word vectors become one vector


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPooling(PoolingConfig):
    """Attention with a trained query q: softmax(K q) V (Yang et al. 2016; Lin et al. 2017).

    Keys K are the hidden states x, W x, or tanh(W x + b). Values V are x or W x.
    """

    kind: Literal["attention"] = "attention"
    queries: Literal["one", "classes"] = "one"  # one query for all classes, or one for each, with its own vector
    # what scores are computed on: word vectors, or a linear map of them, without or with tanh
    keys: Literal["rows", "linear", "tanh"] = "rows"
    values: Literal["rows", "linear"] = "rows"  # values: word vectors, or a linear map of them
    scaled: bool = False  # divide scores by sqrt(width)

    def __post_init__(self) -> None:
        if self.queries == "classes" and self.binary == "sigmoid":
            raise SettingError('queries is "classes", which gives each class its own score: set binary = "softmax"')


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredPooling(PoolingConfig):
    """Structured self-attention of hidden states H: A = softmax(W2 tanh(W1 H)) and M = A H (Lin et al. 2017).

    penalty |A A - 1|^2 (Frobenius norm) is added to the loss of each text, so that the rows of A differ (section 2.2).
    Default sizes are those of section 4.1.
    """

    kind: Literal["structured"] = "structured"
    over: Recurrent | UntrainedSelfAttention | None = Recurrent(width=300)  # encoder over the word vectors, or none
    hops: int = 30  # count of attention queries
    inner: int = 350  # size of the hidden layer that scores positions
    penalty: float = 1.0  # weight of the penalty on attention rows that repeat each other
    hidden: int = 0  # units of a layer with ReLU before the scores (3,000 in the paper; default: no such layer)

    def __post_init__(self) -> None:
        _check_minimum(self, hops=1, inner=1, hidden=0, penalty=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class HierarchicalPooling(PoolingConfig):
    """Hierarchical attention softmax(tanh(W h + b) u) h, over words and then over sentences (Yang et al. 2016).

    A sentence ends after one or more tokens of `ends`, and before the second text of a pair. Default sizes are those
    of section 3.3.
    """

    kind: Literal["hierarchical"] = "hierarchical"
    # encoder over the words of a sentence, or none
    over: Recurrent | UntrainedSelfAttention | None = Recurrent(cell="gru", width=50)
    sentences: Recurrent | None = Recurrent(cell="gru", width=50)  # layer over the sentence vectors
    inner: int = 100  # size of the hidden layer that scores words and sentences
    ends: tuple[int, ...] = ()  # ids of tokens that end a sentence (default: those of ".", "!" and "?")

    def __post_init__(self) -> None:
        _check_minimum(self, inner=1)


PoolingConfigs = BagPooling | AttentionPooling | StructuredPooling | HierarchicalPooling


# -- recurrent encoder and decoder, and attention between them ----------------------------

ScoreName = Literal["cosine", "additive", "location", "general", "dot", "scaled_dot"]  # see nn/scores.py


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceAttentionConfig:
    """Settings of every attention to the source."""

    score: ScoreName = "additive"  # how a decoder state is compared with encoder states

    def __post_init__(self) -> None:
        if self.score == "location":
            raise SettingError(
                f'score is "location", which ignores keys, but {getattr(self, "kind", "this")} attention '
                'compares some of them: use another score, or kind = "global" or "hard"'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalAttention(SourceAttentionConfig):
    """Global attention: softmax over all positions (Bahdanau et al. 2015; Luong et al. 2015, section 3.1)."""

    kind: Literal["global"] = "global"
    longest: int = 128  # longest source, in tokens, for location scores

    def __post_init__(self) -> None:
        _check_minimum(self, longest=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class HardAttention(SourceAttentionConfig):
    """Hard attention to one position: the one with the highest score, or in training a sampled one.

    Xu et al. 2015, section 4.1. The gradient is that of the softmax (straight-through estimator).
    """

    kind: Literal["hard"] = "hard"
    # position that is attended: the highest score, or one sampled by scores
    how: Literal["highest", "drawn"] = "highest"
    longest: int = 128  # longest source, in tokens, for location scores

    def __post_init__(self) -> None:
        _check_minimum(self, longest=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalM(SourceAttentionConfig):
    """local-m: token t attends to the positions t - radius to t + radius (Luong et al. 2015, section 3.2)."""

    kind: Literal["local_m"] = "local_m"
    radius: int = 10  # source tokens on each side of the window's centre

    def __post_init__(self) -> None:
        SourceAttentionConfig.__post_init__(self)
        _check_minimum(self, radius=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalP(SourceAttentionConfig):
    """local-p: a Gaussian window around a predicted position (Luong et al. 2015, section 3.2)."""

    kind: Literal["local_p"] = "local_p"
    radius: int = 10  # source tokens on each side of the predicted centre

    def __post_init__(self) -> None:
        SourceAttentionConfig.__post_init__(self)
        _check_minimum(self, radius=1)


SourceAttentionConfigs = GlobalAttention | HardAttention | LocalM | LocalP


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentSeq2Seq:
    """Sequence to sequence: a bidirectional recurrent encoder and a recurrent decoder (Sutskever et al. 2014).

    The decoder's first state is computed from the encoder's last states in both directions. With `look`, the decoder
    attends to the encoder's hidden states in each step, and predicts from tanh(W [context; state]). With `feed`, this
    vector is also an input of the next step (Luong et al. 2015, equation 5 and section 3.3).
    """

    kind: Literal["recurrent"] = "recurrent"
    cell: Literal["lstm", "gru"] = "gru"  # kind of recurrent unit
    width: int = 512  # hidden size of the decoder, and of both directions of the encoder together
    layers: int = 1  # stacked recurrent layers of the encoder and of the decoder
    # attention over the source; without it, the decoder has only the encoder's last state
    look: GlobalAttention | HardAttention | LocalM | LocalP | None = GlobalAttention()
    feed: bool = True  # feed the attended vector into the decoder's next step (input feeding, Luong et al. 2015)
    dropout: float = 0.0  # dropout of word vectors, between layers, and of the output

    def __post_init__(self) -> None:
        _check_minimum(self, width=2, layers=1)
        if self.width % 2:
            raise SettingError(f"width is {self.width}; expected an even number: each direction has half of it")
        if not 0 <= self.dropout < 1:
            raise SettingError(f"dropout is {self.dropout}; expected a number from 0 to below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassicConfig(ModelConfig):
    """A classic model: word embeddings or an encoder, and a pooling, or a recurrent encoder and decoder."""

    reader: BagPooling | AttentionPooling | StructuredPooling | HierarchicalPooling | RecurrentSeq2Seq = BagPooling()
    frozen: bool = False  # embedding and encoder are not trained, and have no dropout
    initialisation: Initialisation = Xavier()  # noqa: RUF009  # frozen

    def __post_init__(self) -> None:
        if self.decoder is not None:
            raise SettingError("a classic model has word embeddings or an encoder: give it no decoder")
        if self.has_decoder and (self.encoder is not None or self.frozen):
            raise SettingError(
                "recurrent networks that generate text train their own words: give them no encoder, and frozen = false"
            )

    @property
    def word_width(self) -> int:
        """Dimension of the word vectors."""
        return self.embedding.width if self.encoder is None else self.encoder.width

    @property
    def has_encoder(self) -> bool:
        """Whether the model reads a source text: always."""
        return True

    @property
    def has_decoder(self) -> bool:
        """Whether the model has a recurrent decoder, which generates text."""
        return isinstance(self.reader, RecurrentSeq2Seq)

    @property
    def max_source_positions(self) -> int | None:
        """Maximum source length that the decoder can attend to, or None if unlimited; location scores limit it."""
        match self.reader:
            case RecurrentSeq2Seq(look=GlobalAttention() | HardAttention() as look) if look.score == "location":
                return look.longest
        return None

    @property
    def width(self) -> int:
        """Hidden size of the output."""
        if isinstance(self.reader, RecurrentSeq2Seq):
            return self.embedding.width
        over = self.reader.over
        return 2 * over.width if isinstance(over, Recurrent) else self.word_width
