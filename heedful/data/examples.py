"""Typed examples, one class for each kind of task, with the file and line they come from."""

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

    about: ClassVar[str]  # phrase for messages
    needed: ClassVar[tuple[str, ...]]  # roles of columns, see data/labelled/columns.py
    alternative: ClassVar[tuple[str, ...]] = ()  # other roles that are needed where those of `needed` are missing
    optional: ClassVar[tuple[str, ...]] = ()
    file: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)  # from 1; for Parquet and datasets in memory the number of the row

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the example."""
        raise NotImplementedError

    @property
    def target(self) -> str:
        """The target as one text; examples with equal texts and different targets contradict each other."""
        return ""

    @property
    def group(self) -> str:
        """Text that a generated dev split keeps on one side, such as a context shared by several questions."""
        return "\x1f".join(self.texts)

    @classmethod
    def from_cells(cls, read: Any, cells: Cells) -> Iterator[dict[str, object]]:
        """Yield the fields of each example in a row; `read` is a RowReader.

        Overridden by classes of other modules; data/labelled/row_reader.py knows the classes of this one.
        """
        raise NotImplementedError

    @classmethod
    def merge_rows(cls, examples: Iterator[Self]) -> Iterator[Self]:
        """Yield the examples of a split; several rows may make one example."""
        return examples

    @classmethod
    def from_inputs(cls, engine_inputs: Iterable[object], label: str) -> Iterator[Self]:
        """Yield examples from inputs of an engine, with a dummy target."""
        for engine_input in engine_inputs:
            yield cls.from_input(engine_input, label)

    @classmethod
    def from_input(cls, engine_input: object, label: str) -> Self:
        """Make an example from one input of an engine, with a dummy target."""
        raise NotImplementedError

    def to_input(self) -> object:
        """Return the example without its target, as an input of an engine."""
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
        text, text_pair = _texts(engine_input)
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
        text, text_pair = _texts(engine_input)
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
    """A text, or a pair of texts, with a number: regression."""

    about: ClassVar[str] = "a text, or two, with a number"
    needed: ClassVar[tuple[str, ...]] = ("text", "score")
    optional: ClassVar[tuple[str, ...]] = ("text_pair",)
    text: str
    text_pair: str | None = None
    score: float

    @classmethod
    def from_input(cls, engine_input: object, label: str) -> Self:
        text, text_pair = _texts(engine_input)
        return cls(text=text, text_pair=text_pair, score=0.0)

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, and the second text if there is one."""
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)

    @property
    def target(self) -> str:
        """The number."""
        return repr(self.score)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggedExample(Example):
    """A sentence of words with one tag for each: token classification."""

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
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionExample(Example):
    """A question, its context and all correct answers (none if it is unanswerable): question answering."""

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
        """The first answer; alternative answers do not contradict it."""
        return self.answers[0].text if self.answers else ""

    @property
    def group(self) -> str:
        """The context, so that all its questions are in one split."""
        return self.context


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceExample(Example):
    """A prompt with candidates of which one is correct: multiple choice."""

    about: ClassVar[str] = "a prompt with candidates of which one is right"
    needed: ClassVar[tuple[str, ...]] = ("candidates", "answer")
    optional: ClassVar[tuple[str, ...]] = ("prompt", "question")
    prompt: str
    candidates: tuple[str, ...]
    answer: int  # from 0

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
    """An anchor and a positive text, or two texts with a similarity score: sentence embeddings."""

    about: ClassVar[str] = "two texts that belong together, or as much as their score says"
    needed: ClassVar[tuple[str, ...]] = ("anchor", "positive")
    optional: ClassVar[tuple[str, ...]] = ("score", "negative", "teacher_scores")
    anchor: str
    positive: str
    score: float | None = None
    negatives: tuple[str, ...] = ()  # texts that are alike, and do not belong to the anchor (hard negatives)
    teacher_scores: tuple[float, ...] = ()  # of the positive and each negative; only their differences count

    @classmethod
    def from_inputs(cls, engine_inputs: Iterable[object], label: str) -> Iterator[Self]:
        """Yield pairs as they are, and single texts two by two; a last single text is paired with itself."""
        waiting: str | None = None
        for engine_input in engine_inputs:
            if not isinstance(engine_input, str):
                anchor, positive = _texts(engine_input)
                assert positive is not None
                yield cls(anchor=anchor, positive=positive)
            elif waiting is None:
                waiting = engine_input
            else:
                yield cls(anchor=waiting, positive=engine_input)
                waiting = None
        if waiting is not None:
            yield cls(anchor=waiting, positive=waiting)

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

    A row has a relevant document and irrelevant ones, or one document with its relevance; the rows of the second kind
    that share a query are one example, whose most relevant documents come first.
    """

    about: ClassVar[str] = "a query with relevant and irrelevant documents"
    needed: ClassVar[tuple[str, ...]] = ("query", "positive", "negative")
    alternative: ClassVar[tuple[str, ...]] = ("query", "document", "relevance")
    optional: ClassVar[tuple[str, ...]] = ("teacher_scores",)
    query: str
    documents: tuple[str, ...]
    relevance: tuple[float, ...]  # of each document; above 0 it is relevant
    teacher_scores: tuple[float, ...] = ()  # of each document; only their differences count

    @classmethod
    def merge_rows(cls, examples: Iterator[Self]) -> Iterator[Self]:
        """Yield rows with several documents as they come, then the queries of rows with one document."""
        rows: dict[str, list[Self]] = {}
        for example in examples:
            if len(example.documents) > 1:
                yield example
            else:
                rows.setdefault(example.query, []).append(example)
        for of_query in rows.values():
            ordered = sorted(of_query, key=lambda row: -row.relevance[0])
            yield replace(
                of_query[0],
                documents=tuple(document for row in ordered for document in row.documents),
                relevance=tuple(relevance for row in ordered for relevance in row.relevance),
                teacher_scores=tuple(score for row in ordered for score in row.teacher_scores),
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
    text: str
    rewritten: str

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


def _texts(engine_input: object) -> tuple[str, str | None]:
    if isinstance(engine_input, str):
        return engine_input, None
    assert isinstance(engine_input, list | tuple)
    return engine_input[0], engine_input[1]


def normalise_text(text: str) -> str:
    """Remove case, punctuation and doubled white space; a text of only punctuation is returned as it is.

    >>> normalise_text(" Don't  PANIC! "), normalise_text("?!")
    ('don t panic', '?!')
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(re.findall(r"\w+", text.casefold())) or text.strip()


def hash_text(text: str, seed: int = 0) -> int:
    """64-bit hash of a text and a seed, the same on every machine."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8, key=b"%d" % seed).digest(), "little")


def in_dev_split(example: Example, share: float, seed: int) -> bool:
    """Whether an example belongs to the generated dev split: a hash of its normalised split key decides."""
    return hash_text(normalise_text(example.group), seed) < share * 2**64


def sort_labels(labels: set[str]) -> tuple[str, ...]:
    """Sort labels: numerically if all are numbers, else by characters.

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
