"""What a model from before the Transformer is: words, what goes over their rows, how a text is read off or written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heedful.errors import HeedfulError
from heedful.model.config import Initialisation, ModelConfig, Xavier


def _least(config: object, **least: int) -> None:
    for name, low in least.items():
        if getattr(config, name) < low:
            raise HeedfulError(f"{name} is {getattr(config, name)}; expected a number from {low}")


# -- over the rows of words -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrent:
    """A recurrent net in both directions: LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014)."""

    kind: Literal["recurrent"] = "recurrent"
    cell: Literal["lstm", "gru"] = "lstm"  # kind of recurrent unit
    width: int = 128  # of each direction: rows become twice as wide
    layers: int = 1  # stacked recurrent layers

    def __post_init__(self) -> None:
        _least(self, width=1, layers=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class UntrainedSelfAttention:
    """softmax(X X) X, or of cosines: each word becomes a mean of its text's words by likeness; nothing is trained.

    A demonstration: two words always attend to each other as much, whatever stands around them.
    """

    kind: Literal["self"] = "self"
    score: Literal["dot", "cosine"] = "dot"  # similarity of two positions before the softmax


# -- readers: a text's rows become one or more vectors --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingConfig:
    """What all of them have."""

    over: Recurrent | UntrainedSelfAttention | None = None  # None: the rows of words as they are
    binary: Literal["softmax", "sigmoid"] = "softmax"  # of two labels: two scores, or one for the second label


@dataclass(frozen=True, kw_only=True, slots=True)
class BagPooling(PoolingConfig):
    """The sum or the mean of the rows: a bag of words, in which order does not count."""

    kind: Literal["bag"] = "bag"
    how: Literal["mean", "sum"] = "mean"  # how word vectors become one vector


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPooling(PoolingConfig):
    """softmax(K q) V with a trained query: what the classifier looks for (Yang et al. 2016; Lin et al. 2017).

    K are the rows, W x, or tanh(W x + b); V are the rows or W x.
    """

    kind: Literal["attention"] = "attention"
    queries: Literal["one", "classes"] = "one"  # for all, or one for each class, whose score is read off its own vector
    # what scores are computed on: word vectors, or a linear map of them, without or with tanh
    keys: Literal["rows", "linear", "tanh"] = "rows"
    values: Literal["rows", "linear"] = "rows"  # what is averaged: word vectors, or a linear map of them
    scaled: bool = False  # K q / sqrt(width)

    def __post_init__(self) -> None:
        if self.queries == "classes" and self.binary == "sigmoid":
            raise HeedfulError('queries is "classes", which gives each class its own score: let binary be "softmax"')


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredPooling(PoolingConfig):
    """Several mixtures of a text's rows side by side, A = softmax(W2 tanh(W1 H)) and M = A H (Lin et al. 2017).

    penalty |A A - 1|^2 (Frobenius) is added to the loss of each text, so that the mixtures differ (section 2.2). The
    sizes are those of section 4.1.
    """

    kind: Literal["structured"] = "structured"
    over: Recurrent | UntrainedSelfAttention | None = Recurrent(width=300)  # encoder over the word vectors; None: none
    hops: int = 30  # how many mixtures
    inner: int = 350  # width of the hidden layer that scores positions
    penalty: float = 1.0  # weight of the penalty on attention rows that repeat each other
    hidden: int = 0  # units of a layer with ReLU before the scores (3,000 in the paper); 0: none

    def __post_init__(self) -> None:
        _least(self, hops=1, inner=1, hidden=0, penalty=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class HierarchicalPooling(PoolingConfig):
    """Words to sentences to the document, with attention in both: softmax(tanh(W h + b) u) h (Yang et al. 2016).

    A sentence ends after tokens of `ends`, several in a row count as one end, and where the second text of a pair
    begins. The sizes are those of section 3.3.
    """

    kind: Literal["hierarchical"] = "hierarchical"
    # encoder over the words of a sentence; None: none
    over: Recurrent | UntrainedSelfAttention | None = Recurrent(cell="gru", width=50)
    sentences: Recurrent | None = Recurrent(cell="gru", width=50)  # over the rows of sentences
    inner: int = 100  # width of the hidden layer that scores words and sentences
    ends: tuple[int, ...] = ()  # token ids

    def __post_init__(self) -> None:
        _least(self, inner=1)


PoolingConfigs = BagPooling | AttentionPooling | StructuredPooling | HierarchicalPooling


# -- writing: what is looked at of the text that was read, and the pair of recurrent nets ----------------------------

ScoreName = Literal["cosine", "additive", "location", "general", "dot", "scaled_dot"]  # see nn/scores.py


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceAttentionConfig:
    """What all of them have."""

    score: ScoreName = "additive"  # how a decoder state is compared with encoder states

    def __post_init__(self) -> None:
        if self.score == "location":
            raise HeedfulError(
                f'score is "location", which does not look at keys, but {getattr(self, "kind", "this")} attention '
                'compares some of them: use another score, or kind = "global" or "hard"'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalAttention(SourceAttentionConfig):
    """At all places, each a little: softmax (Bahdanau et al. 2015; Luong et al. 2015, section 3.1)."""

    kind: Literal["global"] = "global"
    longest: int = 128  # places of the text that is read, of which location scores know no more

    def __post_init__(self) -> None:
        _least(self, longest=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class HardAttention(SourceAttentionConfig):
    """At one place: the one with the highest score, or in training one that is drawn (Xu et al. 2015, section 4.1).

    The gradient goes straight through to what softmax would have given.
    """

    kind: Literal["hard"] = "hard"
    # position that is attended: the highest score, or one sampled by scores
    how: Literal["highest", "drawn"] = "highest"
    longest: int = 128  # longest source, in tokens, for location scores

    def __post_init__(self) -> None:
        _least(self, longest=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalM(SourceAttentionConfig):
    """Token t looks at the places t - radius to t + radius: local-m (Luong et al. 2015, section 3.2)."""

    kind: Literal["local_m"] = "local_m"
    radius: int = 10  # source tokens on each side of the window's centre

    def __post_init__(self) -> None:
        SourceAttentionConfig.__post_init__(self)
        _least(self, radius=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalP(SourceAttentionConfig):
    """Around a place that is predicted, less and less with the distance: local-p (Luong et al. 2015, section 3.2)."""

    kind: Literal["local_p"] = "local_p"
    radius: int = 10  # source tokens on each side of the predicted centre

    def __post_init__(self) -> None:
        SourceAttentionConfig.__post_init__(self)
        _least(self, radius=1)


SourceAttentionConfigs = GlobalAttention | HardAttention | LocalM | LocalP


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentSeq2Seq:
    """A recurrent net reads a text in both directions, and another writes one (Sutskever et al. 2014).

    The second begins with what the first knows at both ends. With `look` it looks at the first one's rows at each
    token, and writes from tanh(W [what it saw; its state]); with `feed` that also goes into the next token's step
    (Luong et al. 2015, equation 5 and section 3.3).
    """

    kind: Literal["recurrent"] = "recurrent"
    cell: Literal["lstm", "gru"] = "gru"  # kind of recurrent unit
    width: int = 512  # of the writing net, and of both directions of the reading one together
    layers: int = 1  # stacked recurrent layers of the encoder and of the decoder
    # attention over the source; None: only the encoder's last state
    look: GlobalAttention | HardAttention | LocalM | LocalP | None = GlobalAttention()
    feed: bool = True  # feed the attended vector into the decoder's next step (input feeding, Luong et al. 2015)
    dropout: float = 0.0  # of words, between the layers of both nets, and of what is written from

    def __post_init__(self) -> None:
        _least(self, width=2, layers=1)
        if self.width % 2:
            raise HeedfulError(f"width is {self.width}; expected an even number: each direction has half of it")
        if not 0 <= self.dropout < 1:
            raise HeedfulError(f"dropout is {self.dropout}; expected a number from 0 to below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassicConfig(ModelConfig):
    """A classic model: an embedding of words, or with an encoder their rows in context, and what reads or writes."""

    reader: BagPooling | AttentionPooling | StructuredPooling | HierarchicalPooling | RecurrentSeq2Seq = BagPooling()
    frozen: bool = False  # embedding and encoder stay as they are, and nothing is dropped out in them
    initialisation: Initialisation = Xavier()  # noqa: RUF009  # frozen

    def __post_init__(self) -> None:
        if self.decoder is not None:
            raise HeedfulError("a classic model reads the rows of words or of an encoder: it has no decoder")
        if self.has_decoder and (self.encoder is not None or self.frozen):
            raise HeedfulError(
                "recurrent nets that write learn their own words: give them no encoder, and frozen = false"
            )

    @property
    def word_width(self) -> int:
        """The width of the rows of words."""
        return self.embedding.width if self.encoder is None else self.encoder.width

    @property
    def has_encoder(self) -> bool:
        """Each takes a text."""
        return True

    @property
    def has_decoder(self) -> bool:
        """A pair of recurrent nets does."""
        return isinstance(self.reader, RecurrentSeq2Seq)

    @property
    def max_source_positions(self) -> int | None:
        """Location scores know so many places; the text that is written may have any length."""
        match self.reader:
            case RecurrentSeq2Seq(look=GlobalAttention() | HardAttention() as look) if look.score == "location":
                return look.longest
        return None

    @property
    def width(self) -> int:
        """Of the rows that come out."""
        if isinstance(self.reader, RecurrentSeq2Seq):
            return self.embedding.width
        over = self.reader.over
        return 2 * over.width if isinstance(over, Recurrent) else self.word_width
