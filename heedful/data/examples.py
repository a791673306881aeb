"""Typed examples, with one class for each kind of task: what readers of data yield, and what tasks train on.

Also text hashes, the generated dev split that they decide, and the order of labels.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

if TYPE_CHECKING:
    from heedful.data.formats.tables import Cells

WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Base class of examples: source file and line, texts, and target."""

    about: ClassVar[str]  # description of an example, a phrase for messages
    needed: ClassVar[tuple[str, ...]]  # roles of required columns, see data/labelled/columns.py
    alternative: ClassVar[tuple[str, ...]] = ()  # roles required instead, if columns of `needed` are missing
    optional: ClassVar[tuple[str, ...]] = ()  # roles of optional columns
    file: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)  # line from 1; row from 1 in Parquet and data in memory

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the example."""
        raise NotImplementedError

    @property
    def target(self) -> str:
        """The target as one text. Two examples with equal texts and different targets contradict each other."""
        return ""

    @property
    def group(self) -> str:
        """The text that decides on the split: a generated dev split has all examples of a group or none of them."""
        return "\x1f".join(self.texts)

    @classmethod
    def from_cells(cls, reader: Any, cells: Cells) -> Iterator[dict[str, object]]:
        """Yield the fields of each example in a row of a table; `reader` is a RowReader.

        Only classes outside this module override this method. For the classes of this module,
        data/labelled/row_reader.py has functions instead.
        """
        raise NotImplementedError

    @classmethod
    def merge_rows(cls, examples: Iterator[Self]) -> Iterator[Self]:
        """Yield the examples of a split, given one example per row. Several rows may be merged into one example."""
        return examples

    @classmethod
    def from_inputs(cls, engine_inputs: Iterable[object], label: str) -> Iterator[Self]:
        """Convert inputs of an Engine to examples with a dummy target; `label` is a valid label for it."""
        for engine_input in engine_inputs:
            yield cls.from_input(engine_input, label)

    @classmethod
    def from_input(cls, engine_input: object, label: str) -> Self:
        """Convert one input of an Engine to an example with a dummy target."""
        raise NotImplementedError

    def to_input(self) -> object:
        """Convert the example, without its target, to an input of an Engine."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class TextExample(Example):
    """A text without a target."""

    about: ClassVar[str] = "a text"
    needed: ClassVar[tuple[str, ...]] = ("text",)
    text: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The text."""
        return (self.text,)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledExample(Example):
    """A text, or a pair of texts, with one label: text classification."""

    about: ClassVar[str] = "a text, or two, with one label"
    needed: ClassVar[tuple[str, ...]] = ("text", "label")
    optional: ClassVar[tuple[str, ...]] = ("text_pair",)
    text: str
    text_pair: str | None = None
    label: str

    @classmethod
    def from_input(cls, engine_input: object, label: str) -> Self:
        text, text_pair = _split_pair(engine_input)
        return cls(text=text, text_pair=text_pair, label=label)

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, and the second text if there is one."""
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)

    @property
    def target(self) -> str:
        """The label."""
        return self.label


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiLabelExample(Example):
    """A text, or a pair of texts, with any number of labels: multi-label classification."""

    about: ClassVar[str] = "a text, or two, with any number of labels"
    needed: ClassVar[tuple[str, ...]] = ("text", "labels")
    optional: ClassVar[tuple[str, ...]] = ("text_pair",)
    text: str
    text_pair: str | None = None
    labels: tuple[str, ...]

    @classmethod
    def from_input(cls, engine_input: object, label: str) -> Self:
        text, text_pair = _split_pair(engine_input)
        return cls(text=text, text_pair=text_pair, labels=())

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, and the second text if there is one."""
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)

    @property
    def target(self) -> str:
        """The labels, sorted."""
        return "\x1f".join(sorted(self.labels))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredExample(Example):
    """A text, or a pair of texts, with a score: regression."""

    about: ClassVar[str] = "a text, or two, with a number"
    needed: ClassVar[tuple[str, ...]] = ("text", "score")
    optional: ClassVar[tuple[str, ...]] = ("text_pair",)
    text: str
    text_pair: str | None = None
    score: float

    @classmethod
    def from_input(cls, engine_input: object, label: str) -> Self:
        text, text_pair = _split_pair(engine_input)
        return cls(text=text, text_pair=text_pair, score=0.0)

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, and the second text if there is one."""
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)

    @property
    def target(self) -> str:
        """The score."""
        return repr(self.score)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggedExample(Example):
    """A sentence of words with a tag for each word: token classification."""

    about: ClassVar[str] = "the words of a sentence, with a tag for each"
    needed: ClassVar[tuple[str, ...]] = ("words", "tags")
    words: tuple[str, ...]
    tags: tuple[str, ...]

    @classmethod
    def from_input(cls, engine_input: object, label: str) -> Self:
        assert isinstance(engine_input, str | list | tuple)
        words = tuple(WORD.findall(engine_input) if isinstance(engine_input, str) else engine_input)
        return cls(words=words, tags=(label,) * len(words))

    def to_input(self) -> object:
        return list(self.words)

    @property
    def texts(self) -> tuple[str, ...]:
        """The words, joined by spaces."""
        return (" ".join(self.words),)

    @property
    def target(self) -> str:
        """The tags."""
        return "\x1f".join(self.tags)


class AnswerSpan(NamedTuple):
    """An answer in a context: context[start : start + len(text)] == text."""

    text: str
    start: int  # index of the first character in the context


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionExample(Example):
    """A question, its context and all correct answers, () if there is no answer: question answering."""

    about: ClassVar[str] = "a question, its context and its right answers"
    needed: ClassVar[tuple[str, ...]] = ("question", "context", "answers")
    optional: ClassVar[tuple[str, ...]] = ("id", "impossible")
    id: str
    question: str
    context: str
    answers: tuple[AnswerSpan, ...]
    impossible: bool = False

    @classmethod
    def from_input(cls, engine_input: object, label: str) -> Self:
        assert isinstance(engine_input, dict)
        return cls(id="", question=engine_input["question"], context=engine_input["context"], answers=())

    def to_input(self) -> object:
        return {"question": self.question, "context": self.context}

    @property
    def texts(self) -> tuple[str, ...]:
        """The question and the context."""
        return (self.question, self.context)

    @property
    def target(self) -> str:
        """The first answer, or "". Examples that differ only in alternative answers do not contradict each other."""
        return self.answers[0].text if self.answers else ""

    @property
    def group(self) -> str:
        """The context, so that all its questions are in one split."""
        return self.context


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceExample(Example):
    """Multiple choice: a prompt with several candidates and exactly one correct candidate."""

    about: ClassVar[str] = "a prompt with candidates, one of them right"
    needed: ClassVar[tuple[str, ...]] = ("candidates", "answer")
    optional: ClassVar[tuple[str, ...]] = ("prompt", "question")
    prompt: str
    candidates: tuple[str, ...]
    answer: int  # index of the correct candidate, from 0

    @classmethod
    def from_input(cls, engine_input: object, label: str) -> Self:
        assert isinstance(engine_input, dict)
        return cls(prompt=engine_input["prompt"], candidates=tuple(engine_input["choices"]), answer=0)

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompt and the candidates."""
        return (self.prompt, *self.candidates)

    @property
    def target(self) -> str:
        """The correct candidate."""
        return self.candidates[self.answer]

    @property
    def group(self) -> str:
        """The prompt, so that all its questions are in one split."""
        return self.prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PairExample(Example):
    """An anchor with a positive text, or two texts with a similarity score: sentence embeddings."""

    about: ClassVar[str] = "two texts that belong together, or as much as their score says"
    needed: ClassVar[tuple[str, ...]] = ("anchor", "positive")
    optional: ClassVar[tuple[str, ...]] = ("score", "negative", "teacher_scores")
    anchor: str
    positive: str
    score: float | None = None  # similarity; None: anchor and positive match
    negatives: tuple[str, ...] = ()  # hard negatives: texts similar to the positive that do not match the anchor
    teacher_scores: tuple[float, ...] = ()  # scores of the positive and each negative; only differences matter

    @classmethod
    def from_inputs(cls, engine_inputs: Iterable[object], label: str) -> Iterator[Self]:
        """Yield an example for each pair, and for every two single texts. A last single text is paired with itself."""
        unpaired: str | None = None
        for engine_input in engine_inputs:
            if not isinstance(engine_input, str):
                anchor, positive = _split_pair(engine_input)
                assert positive is not None
                yield cls(anchor=anchor, positive=positive)
            elif unpaired is None:
                unpaired = engine_input
            else:
                yield cls(anchor=unpaired, positive=engine_input)
                unpaired = None
        if unpaired is not None:
            yield cls(anchor=unpaired, positive=unpaired)

    @property
    def texts(self) -> tuple[str, ...]:
        """The anchor, the positive text and the negatives."""
        return (self.anchor, self.positive, *self.negatives)

    @property
    def target(self) -> str:
        """The score."""
        return "" if self.score is None else repr(self.score)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExample(Example):
    """A query and documents with their relevance to it: reranking.

    A row of a file has a relevant document and irrelevant ones, or one document with its relevance. Rows with one
    document are merged into one example per query, with the most relevant document first.
    """

    about: ClassVar[str] = "a query with relevant and irrelevant documents"
    needed: ClassVar[tuple[str, ...]] = ("query", "positive", "negative")
    alternative: ClassVar[tuple[str, ...]] = ("query", "document", "relevance")
    optional: ClassVar[tuple[str, ...]] = ("teacher_scores",)
    query: str
    documents: tuple[str, ...]
    relevance: tuple[float, ...]  # relevance of each document, from 0; 0: irrelevant
    teacher_scores: tuple[float, ...] = ()  # score of each document; only differences matter

    @classmethod
    def merge_rows(cls, examples: Iterator[Self]) -> Iterator[Self]:
        """Yield the rows with several documents in order, then one example per query for rows with one document."""
        rows_by_query: dict[str, list[Self]] = {}
        for example in examples:
            if len(example.documents) > 1:
                yield example
            else:
                rows_by_query.setdefault(example.query, []).append(example)
        for rows in rows_by_query.values():
            ranked = sorted(rows, key=lambda row: -row.relevance[0])
            yield replace(
                rows[0],
                documents=tuple(document for row in ranked for document in row.documents),
                relevance=tuple(relevance for row in ranked for relevance in row.relevance),
                teacher_scores=tuple(score for row in ranked for score in row.teacher_scores),
            )

    @property
    def texts(self) -> tuple[str, ...]:
        """The query and the documents."""
        return (self.query, *self.documents)

    @property
    def target(self) -> str:
        """The relevance of each document."""
        return "\x1f".join(map(repr, self.relevance))

    @property
    def group(self) -> str:
        """The query, so that all its documents are in one split."""
        return self.query


@dataclass(frozen=True, kw_only=True, slots=True)
class Seq2SeqExample(Example):
    """A source text and the text to generate: sequence to sequence."""

    about: ClassVar[str] = "a text and what is to be written for it"
    needed: ClassVar[tuple[str, ...]] = ("source", "target")
    text: str  # source text
    rewritten: str  # target text

    @property
    def texts(self) -> tuple[str, ...]:
        """The source and the target text."""
        return (self.text, self.rewritten)

    @property
    def target(self) -> str:
        """The target text."""
        return self.rewritten

    @property
    def group(self) -> str:
        """The source text, so that all its targets are in one split."""
        return self.text


def _split_pair(engine_input: object) -> tuple[str, str | None]:
    """Return the texts of an input. The second one is None if the input is a single text."""
    if isinstance(engine_input, str):
        return engine_input, None
    assert isinstance(engine_input, list | tuple)
    return engine_input[0], engine_input[1]


def normalise_text(text: str) -> str:
    """Remove case, punctuation and repeated white space. A text of only punctuation is stripped instead.

    >>> normalise_text(" Don't  PANIC! "), normalise_text("?!")
    ('don t panic', '?!')
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(re.findall(r"\w+", text.casefold())) or text.strip()


def hash_text(text: str, seed: int = 0) -> int:
    """Hash a text and a seed to 64 bits, the same on every machine."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8, key=b"%d" % seed).digest(), "little")


def in_dev_split(example: Example, share: float, seed: int) -> bool:
    """Whether an example belongs to the generated dev split, by the hash of its normalised group.

    Args:
        example: the example.
        share: expected share of examples in the dev split (0-1).
        seed: seed of the hash.
    """
    return hash_text(normalise_text(example.group), seed) < share * 2**64


def sort_labels(labels: set[str]) -> tuple[str, ...]:
    """Sort labels numerically if all are numbers, else alphabetically.

    >>> sort_labels({"10", "9"}), sort_labels({"pos", "neg", "10"})
    (('9', '10'), ('10', 'neg', 'pos'))
    """
    try:
        values = {label: float(label) for label in labels}
    except ValueError:
        values = {}
    if len(values) == len(labels) and all(map(math.isfinite, values.values())):
        return tuple(sorted(labels, key=lambda label: (values[label], label)))
    return tuple(sorted(labels))
