"""Settings of the initial model of a fine-tuning run: a pretrained model, or random weights of some architecture.

This module imports nothing heavy, so that a wrong setting is refused immediately.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from heedful.bundled import BUNDLED_ENCODER
from heedful.errors import HeedfulError
from heedful.model.classic_config import (
    AttentionPooling,
    BagPooling,
    GlobalAttention,
    HardAttention,
    HierarchicalPooling,
    RecurrentSeq2Seq,
    StructuredPooling,
)
from heedful.model.vaswani import PUBLISHED_SIZES, VaswaniSize

HEAD_DIMENSION = 32  # head dimension of a Scratch encoder
WORD_DIMENSION = 96  # default dimension of word vectors
DEFAULT_POOLING, DEFAULT_RNN = BagPooling(), RecurrentSeq2Seq()


@dataclass(frozen=True, kw_only=True, slots=True)
class WordSettings:
    """Word embeddings of a classic model that does not run over a pretrained encoder."""

    # words: split at spaces and punctuation; subwords: a WordPiece tokenizer
    tokens: Literal["words", "subwords"] = "words"
    vocab_size: int = 30_000  # maximum words, from the training texts first, then from the file of vectors
    lower_case: bool = True  # lower-case texts before they are split
    width: int = WORD_DIMENSION  # dimension of the word vectors, if they are not from a file
    vectors: str = ""  # GloVe or word2vec file; "": random, or trained with skipgram_steps
    frozen: bool = False  # do not train the word vectors
    dropout: float = 0.0  # dropout of the word vectors and of the text vector

    def __post_init__(self) -> None:
        if self.vocab_size < 2 or self.width < 1:
            sizes = f"vocab_size is {self.vocab_size} and width {self.width}"
            raise HeedfulError(f"{sizes}; expected whole numbers from 2 and from 1")
        if not 0 <= self.dropout < 1:
            raise HeedfulError(f"dropout is {self.dropout}; expected a number from 0 to below 1")
        if self.vectors and self.width != WORD_DIMENSION:
            raise HeedfulError(f"width conflicts with vectors={self.vectors}, which fixes the dimension; remove width")
        if self.vectors and self.tokens != "words":
            raise HeedfulError(f'vectors is {self.vectors}, a file of word vectors: set tokens = "words"')


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTokenizer:
    """The tokenizer of a seq2seq model, trained on source and target texts."""

    algorithm: Literal["bpe", "wordpiece"] = "bpe"  # bpe is byte-level and reproduces any text; wordpiece does not
    vocab_size: int = 8000  # vocabulary size, shared by source and target
    lower_case: bool = False  # lower-case texts before they are tokenised


@dataclass(frozen=True, kw_only=True, slots=True)
class ScratchTokenizer:
    """The WordPiece tokenizer of a Scratch encoder, trained on the texts."""

    vocab_size: int = 4000  # vocabulary size


def name_with_revision(model: str, revision: str) -> tuple[str, str]:
    """Return NAME@REVISION and an empty revision. A folder or the bundled encoder is returned unchanged.

    >>> name_with_revision("someone/model", "v1"), name_with_revision("someone/model@v1", "")
    (('someone/model@v1', ''), ('someone/model@v1', ''))
    """
    if not revision or model in ("", BUNDLED_ENCODER) or os.path.isdir(model):
        return model, revision
    return f"{model.rpartition('@')[0] or model}@{revision}", ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretrained:
    """A pretrained model."""

    kind: Literal["pretrained"] = "pretrained"
    model: str = BUNDLED_ENCODER  # a folder, or NAME[@REVISION] on the hub
    revision: str = ""  # revision on the hub, instead of NAME@REVISION
    reinit_layers: int = 0  # how many top blocks are re-initialised (Zhang et al. 2021)

    def __post_init__(self) -> None:
        _merge_revision(self)
        if not self.model:
            raise HeedfulError('model is ""; give a folder or NAME[@REVISION], or set kind = "scratch" to train one')
        if self.reinit_layers < 0:
            raise HeedfulError(f"reinit_layers is {self.reinit_layers}; expected a whole number from 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    """A small encoder with random weights, and a tokenizer trained on the texts."""

    kind: Literal["scratch"] = "scratch"
    layers: int = 2  # Transformer blocks
    width: int = 256  # hidden size, a multiple of 32
    tokenizer: ScratchTokenizer = ScratchTokenizer()
    mlm_steps: int = 0  # steps of masked language modelling before fine-tuning, 64 texts each; harmful with few texts

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("layers", self.layers >= 1, "a whole number from 1"),
            ("width", self.width > 0 and not self.width % HEAD_DIMENSION, f"a multiple of {HEAD_DIMENSION}"),
            ("mlm_steps", self.mlm_steps >= 0, "a whole number from 0"),
        ):
            if not is_valid:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassicInit:
    """A model from before the Transformer, over word embeddings or the hidden states of a frozen pretrained encoder."""

    kind: Literal["classic"] = "classic"
    reader: BagPooling | AttentionPooling | StructuredPooling | HierarchicalPooling = DEFAULT_POOLING
    model: str = ""  # frozen encoder: a folder, or NAME[@REVISION] on the hub; "": word vectors instead
    revision: str = ""  # revision on the hub, instead of NAME@REVISION
    words: WordSettings = WordSettings()
    skipgram_steps: int = 0  # steps of skip-gram that train the word vectors before fine-tuning, 64 texts each

    def __post_init__(self) -> None:
        _merge_revision(self)
        if self.skipgram_steps < 0:
            raise HeedfulError(f"skipgram_steps is {self.skipgram_steps}; expected a whole number from 0")
        for name, is_changed in (("words", self.words != WordSettings()), ("skipgram_steps", self.skipgram_steps)):
            if self.model and is_changed:
                raise HeedfulError(f"{name} would change nothing: hidden states of model are read; leave one out")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentInit:
    """A recurrent encoder and decoder with random weights, for seq2seq."""

    kind: Literal["recurrent"] = "recurrent"
    rnn: RecurrentSeq2Seq = DEFAULT_RNN
    embedding_width: int | None = None  # embedding dimension; None: half of rnn.width
    tokenizer: SharedTokenizer = SharedTokenizer()

    def __post_init__(self) -> None:
        if self.embedding_width is not None and self.embedding_width < 1:
            raise HeedfulError(f"embedding_width is {self.embedding_width}; expected a whole number from 1")
        _refuse_ineffective(self.rnn)


DEFAULT_LONGEST = 256  # default of `longest`
SIZES = {"small": VaswaniSize(layers=3, width=256, heads=8, inner=512, dropout=0.1), **PUBLISHED_SIZES}
Positions = Literal["none", "learned", "sine", "rotary", "shaw", "buckets", "transformer_xl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerInit:
    """The original Transformer with random weights, for seq2seq (Vaswani et al. 2017, base and big from table 3)."""

    kind: Literal["transformer"] = "transformer"
    # named size of encoder and decoder; base and big are from Vaswani et al. 2017
    size: Literal["small", "base", "big"] = "small"
    layers: int | None = None  # Transformer blocks; None: as in the size
    width: int | None = None  # hidden size; None: as in the size
    heads: int | None = None  # attention heads; None: as in the size
    inner: int | None = None  # intermediate size of the feed-forward layer; None: as in the size
    dropout: float | None = None  # dropout probability; None: as in the size
    norm_at: Literal["post", "pre"] = "post"  # after each residual sum, or before each sublayer and at the end
    positions: Positions = "sine"  # kind of position encoding
    longest: int = DEFAULT_LONGEST  # maximum length of learned positions
    tokenizer: SharedTokenizer = SharedTokenizer()

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "inner", "longest"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise HeedfulError(f"{name} is {value}; expected a whole number from 1")
        if self.longest != DEFAULT_LONGEST and self.positions != "learned":
            raise HeedfulError(
                f'longest is {self.longest}, which is for learned positions, but positions is "{self.positions}": '
                "leave longest out, or set positions=learned"
            )
        shape = self.shape
        if not 0 <= shape.dropout < 1:
            raise HeedfulError(f"dropout is {shape.dropout}; expected a number from 0 to below 1")
        if shape.width % (2 * shape.heads):
            raise HeedfulError(f"width is {shape.width} and heads {shape.heads}; expected an even width for each head")

    @property
    def shape(self) -> VaswaniSize:
        """The named size, with the values that are set replaced."""
        values = {name: getattr(self, name) for name in ("layers", "width", "heads", "inner", "dropout")}
        return replace(SIZES[self.size], **{name: value for name, value in values.items() if value is not None})


Init = Pretrained | Scratch | ClassicInit | RecurrentInit | TransformerInit
Seq2Seq = RecurrentInit | TransformerInit  # seq2seq models with random weights


def model_name(init: Init) -> str:
    """Return the pretrained model that training starts from, or over which a classic model runs, or "" without one."""
    return init.model if isinstance(init, Pretrained | ClassicInit) else ""


def _merge_revision(init: Pretrained | ClassicInit) -> None:
    """Move the revision into the name, as NAME@REVISION."""
    model, revision = name_with_revision(init.model, init.revision)
    object.__setattr__(init, "model", model)
    object.__setattr__(init, "revision", revision)


def _refuse_ineffective(rnn: RecurrentSeq2Seq) -> None:
    """Raise a HeedfulError for settings that would change nothing. Saved models have them, so models accept them."""
    match rnn.look:
        case None if not rnn.feed:
            raise HeedfulError(
                "rnn.feed is false, which would change nothing: rnn.look is none, so that no attended vector could be "
                "fed into the next step; leave feed out, or choose a kind of attention in rnn.look"
            )
        case GlobalAttention() | HardAttention() as look if (
            look.score != "location" and look.longest != GlobalAttention().longest
        ):
            raise HeedfulError(
                f'rnn.look.longest is for location scores, but look.score is "{look.score}", with which a text may '
                "have any length: leave longest out, or set look.score=location"
            )
