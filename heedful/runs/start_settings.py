"""What a fine-tuning run starts from: a model that is named, or one that is made on the spot, and of what.

Imports nothing heavy, so that a wrong one is told at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from heedful.errors import HeedfulError
from heedful.model.classic_config import Attention, Bag, Everywhere, Hard, Hierarchical, Structured, Writer
from heedful.model.original import PUBLISHED, Shape
from heedful.shipped import ENCODER

HEAD_WIDTH = 32  # of an encoder that is trained on the spot
LAYERS, WIDTH, VOCABULARY = 2, 256, 4000  # of an encoder that is trained on the spot
WORD_WIDTH = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class WordSettings:
    """The words of a classic model, where no model is named whose rows it reads."""

    tokens: Literal["words", "subwords"] = "words"
    vocabulary: int = 30_000  # words of the training texts first, then of the file of vectors
    lower_case: bool = True
    width: int = WORD_WIDTH  # of their vectors, unless a file gives them
    vectors: str = ""  # a file of GloVe or word2vec; "": drawn, and with start.steps learned by skip-gram first
    frozen: bool = False  # they stay as they are
    dropout: float = 0.0  # of the vectors, and of what a text is read as

    def __post_init__(self) -> None:
        if self.vocabulary < 2 or self.width < 1:
            sizes = f"vocabulary is {self.vocabulary} and width {self.width}"
            raise HeedfulError(f"{sizes}; expected whole numbers from 2 and from 1")
        if not 0 <= self.dropout < 1:
            raise HeedfulError(f"dropout is {self.dropout}; expected a number from 0 to below 1")
        if self.vectors and self.width != WORD_WIDTH:
            raise HeedfulError(f"width is {self.width}, but the vectors of {self.vectors} are as wide as they are")
        if self.vectors and self.tokens != "words":
            raise HeedfulError(f'vectors is {self.vectors}, which has vectors of words: set tokens = "words"')


LONGEST = 256
SIZES = {"small": Shape(layers=3, width=256, heads=8, inner=512, dropout=0.1), **PUBLISHED}
Positions = Literal["none", "learned", "sine", "rotary", "shaw", "buckets", "transformer_xl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerSettings:
    """The original Transformer with random weights (Vaswani et al. 2017), base and big as in its table 3."""

    size: Literal["small", "base", "big"] = "small"
    layers: int | None = None  # None: as many as the size has; so with the others
    width: int | None = None
    heads: int | None = None
    inner: int | None = None
    dropout: float | None = None
    norm_at: Literal["post", "pre"] = "post"  # after each residual sum, or before each sublayer and at the end
    positions: Positions = "sine"
    longest: int = LONGEST  # places of learned positions

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "inner", "longest"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise HeedfulError(f"{name} is {value}; expected a whole number from 1")
        if self.longest != LONGEST and self.positions != "learned":
            raise HeedfulError(
                f'longest is {self.longest}, which is of learned positions, but positions is "{self.positions}", '
                "which has no end: leave longest out, or set positions=learned"
            )
        shape = self.shape
        if not 0 <= shape.dropout < 1:
            raise HeedfulError(f"dropout is {shape.dropout}; expected a number from 0 to below 1")
        if shape.width % (2 * shape.heads):
            raise HeedfulError(f"width is {shape.width} and heads {shape.heads}; expected an even width for each head")

    @property
    def shape(self) -> Shape:
        """Of its size, but for what is set."""
        given = {name: getattr(self, name) for name in ("layers", "width", "heads", "inner", "dropout")}
        return replace(SIZES[self.size], **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceSettings:
    """The one vocabulary of both texts, where a model learns to write from random weights."""

    kind: Literal["bpe", "wordpiece"] = "bpe"  # bpe: any text comes back as it was; wordpiece: others are counted
    vocabulary: int = 8000
    lower_case: bool = False
    width: int | None = None  # of the vectors of recurrent nets; None: half as wide as they are

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 1:
            raise HeedfulError(f"width is {self.width}; expected a whole number from 1")


def one_name(model: str, revision: str) -> tuple[str, str]:
    """Both as NAME@REVISION and no revision, however they are given; a folder, and what ships, stay as they are.

    >>> one_name("someone/model", "v1"), one_name("someone/model@v1", "")
    (('someone/model@v1', ''), ('someone/model@v1', ''))
    """
    if not revision or model in ("", ENCODER) or os.path.isdir(model):
        return model, revision
    return f"{model.rpartition('@')[0] or model}@{revision}", ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartSettings:
    """What training starts from."""

    model: str = ENCODER  # a folder, or NAME@REVISION on the hub; "": an encoder trained on the spot, on the same texts
    revision: str = ""  # of the name, in place of one that stands there
    redraw: int = 0  # blocks at the top that are drawn anew
    layers: int = LAYERS  # of an encoder that is trained on the spot
    width: int = WIDTH
    vocabulary: int = VOCABULARY
    steps: int = 0  # of masked language modelling first, 64 texts each: on few texts it makes things worse
    # over words, or a named model's rows; recurrent: two nets, of which one writes
    classic: Bag | Attention | Structured | Hierarchical | Writer | None = None
    words: WordSettings = WordSettings()
    transformer: TransformerSettings | None = None  # learns to write, from random weights
    pieces: PieceSettings = PieceSettings()

    def __post_init__(self) -> None:
        for name, value in zip(("model", "revision"), one_name(self.model, self.revision), strict=True):
            object.__setattr__(self, name, value)
        if self.classic is not None and self.transformer is not None:
            raise HeedfulError("start.classic and start.transformer are two models: give one of them")
        if self.writer is None and self.pieces != PieceSettings():
            raise HeedfulError("start.pieces is of models that learn to write: say which with start.transformer.size")
        if self.transformer is not None and self.pieces.width is not None:
            raise HeedfulError("start.pieces.width is of recurrent nets: set start.transformer.width")
        if self.writer is not None and self.words != WordSettings():
            raise HeedfulError("start.words is of models that read: set start.pieces, the vocabulary of both texts")
        if self.classic is not None or self.transformer is not None:
            what = "start.transformer" if self.transformer is not None else "start.classic"
            for name, usual in (("layers", LAYERS), ("width", WIDTH), ("vocabulary", VOCABULARY)):
                if getattr(self, name) != usual:
                    raise HeedfulError(
                        f"start.{name} is of an encoder that is trained on the spot: {what} has sizes of its own, and "
                        f"{'start.words' if self.writer is None else 'start.pieces'} those of its vocabulary"
                    )
        if self.classic is not None and self.writer is None and self.redraw:
            raise HeedfulError(
                "start.redraw is of a model that learns on: what start.classic stands over stays as it is"
            )
        if self.writer is not None and self.steps:
            raise HeedfulError("start.steps is of models that read: one that learns to write is not trained before")
        if self.writer is not None and self.redraw:
            raise HeedfulError("start.redraw is of a model that learns on: of one that learns to write all is drawn")
        if isinstance(self.classic, Writer):
            _without_effect(self.classic)
        for name, right, expected in (
            ("redraw", self.redraw >= 0, "a whole number from 0"),
            ("layers", self.layers >= 1, "a whole number from 1"),
            ("width", self.width >= HEAD_WIDTH and not self.width % HEAD_WIDTH, f"a multiple of {HEAD_WIDTH}"),
            ("steps", self.steps >= 0, "a whole number from 0"),
        ):
            if not right:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")

    @property
    def writer(self) -> Writer | TransformerSettings | None:
        """What learns to write from random weights."""
        return self.classic if isinstance(self.classic, Writer) else self.transformer


def _without_effect(writer: Writer) -> None:
    """Refuse what would change nothing; not where a model is made, as folders may have been saved with it."""
    match writer.look:
        case None if not writer.feed:
            raise HeedfulError(
                "start.classic.feed says whether what was looked at goes into the next step, but look is none: leave "
                "feed out, or look at something"
            )
        case Everywhere() | Hard() as look if look.score != "location" and look.longest != Everywhere().longest:
            raise HeedfulError(
                f'start.classic.look.longest is of location scores, but look.score is "{look.score}", for which a text '
                "may have any length: leave longest out, or set look.score=location"
            )
