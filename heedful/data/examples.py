"""One typed example for each kind of task, with the place it came from."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, Self

WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """What all kinds share: where it stands, its texts, and what is to be learned of them."""

    about: ClassVar[str]  # what one is, in words
    needed: ClassVar[tuple[str, ...]]  # roles of columns, see data/columns.py
    optional: ClassVar[tuple[str, ...]] = ()
    file: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)  # from 1; in Parquet and data-set objects the number of the row

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything that is read."""
        raise NotImplementedError

    @property
    def target(self) -> str:
        """What is to be learned, in one text; equal texts with other targets are at odds."""
        return ""

    @property
    def group(self) -> str:
        """What a split that is made keeps on one side."""
        return "\x1f".join(self.texts)

    @classmethod
    def from_cells(cls, read: Any, cells: Any) -> Iterator[dict[str, Any]]:
        """Yield the fields of each example in a row; `read` is a Reader of data/columns.py.

        The classes of this module have theirs in data/fields.py.
        """
        raise NotImplementedError

    @classmethod
    def of_inputs(cls, given: Iterable[Any], label: str) -> Iterator[Self]:
        """Yield examples of inputs of an engine, with any target."""
        for each in given:
            yield cls.of_input(each, label)

    @classmethod
    def of_input(cls, given: Any, label: str) -> Self:
        """Make an example of one input of an engine, with any target."""
        raise NotImplementedError

    def as_input(self) -> Any:
        """Return the input of an engine, of an example that files may hold only with its target."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class TextExample(Example):
    """A text and nothing else."""

    about: ClassVar[str] = "a text"
    needed: ClassVar[tuple[str, ...]] = ("text",)
    text: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The text."""
        return (self.text,)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledExample(Example):
    """A text or two with one label."""

    about: ClassVar[str] = "a text, or two, with one label"
    needed: ClassVar[tuple[str, ...]] = ("text", "label")
    optional: ClassVar[tuple[str, ...]] = ("text_pair",)
    text: str
    text_pair: str | None = None
    label: str

    @classmethod
    def of_input(cls, given: Any, label: str) -> Self:
        return cls(**_texts(given), label=label)

    @property
    def texts(self) -> tuple[str, ...]:
        """One or two."""
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)

    @property
    def target(self) -> str:
        """The label."""
        return self.label


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiLabelExample(Example):
    """A text or two with any number of labels."""

    about: ClassVar[str] = "a text, or two, with any number of labels"
    needed: ClassVar[tuple[str, ...]] = ("text", "labels")
    optional: ClassVar[tuple[str, ...]] = ("text_pair",)
    text: str
    text_pair: str | None = None
    labels: tuple[str, ...]

    @classmethod
    def of_input(cls, given: Any, label: str) -> Self:
        return cls(**_texts(given), labels=())

    @property
    def texts(self) -> tuple[str, ...]:
        """One or two."""
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)

    @property
    def target(self) -> str:
        """The labels in order."""
        return "\x1f".join(sorted(self.labels))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredExample(Example):
    """A text or two with a number."""

    about: ClassVar[str] = "a text, or two, with a number"
    needed: ClassVar[tuple[str, ...]] = ("text", "score")
    optional: ClassVar[tuple[str, ...]] = ("text_pair",)
    text: str
    text_pair: str | None = None
    score: float

    @classmethod
    def of_input(cls, given: Any, label: str) -> Self:
        return cls(**_texts(given), score=0.0)

    @property
    def texts(self) -> tuple[str, ...]:
        """One or two."""
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)

    @property
    def target(self) -> str:
        """The number."""
        return repr(self.score)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggedExample(Example):
    """A sentence in words, a tag for each of them."""

    about: ClassVar[str] = "a sentence in words with a tag for each"
    needed: ClassVar[tuple[str, ...]] = ("words", "tags")
    words: tuple[str, ...]
    tags: tuple[str, ...]

    @classmethod
    def of_input(cls, given: Any, label: str) -> Self:
        words = tuple(WORD.findall(given) if isinstance(given, str) else given)
        return cls(words=words, tags=(label,) * len(words))

    def as_input(self) -> Any:
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
    """An answer: context[start : start + len(text)] == text."""

    text: str
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionExample(Example):
    """A question, its context and all answers that count as right; none where it is impossible."""

    about: ClassVar[str] = "a question, its context and its right answers"
    needed: ClassVar[tuple[str, ...]] = ("question", "context", "answers")
    optional: ClassVar[tuple[str, ...]] = ("id", "impossible")
    id: str
    question: str
    context: str
    answers: tuple[AnswerSpan, ...]
    impossible: bool = False

    @classmethod
    def of_input(cls, given: Any, label: str) -> Self:
        return cls(id="", question=given["question"], context=given["context"], answers=())

    def as_input(self) -> Any:
        return {"question": self.question, "context": self.context}

    @property
    def texts(self) -> tuple[str, ...]:
        """Question and context."""
        return (self.question, self.context)

    @property
    def target(self) -> str:
        """The first answer; what others call right as well is no contradiction."""
        return self.answers[0].text if self.answers else ""

    @property
    def group(self) -> str:
        """The context: all questions on it stay together."""
        return self.context


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceExample(Example):
    """A prompt and candidates of which one is right."""

    about: ClassVar[str] = "a prompt with candidates of which one is right"
    needed: ClassVar[tuple[str, ...]] = ("candidates", "answer")
    optional: ClassVar[tuple[str, ...]] = ("prompt", "question")
    prompt: str
    candidates: tuple[str, ...]
    answer: int  # from 0

    @classmethod
    def of_input(cls, given: Any, label: str) -> Self:
        return cls(prompt=given["prompt"], candidates=tuple(given["choices"]), answer=0)

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompt and the candidates."""
        return (self.prompt, *self.candidates)

    @property
    def target(self) -> str:
        """The right candidate."""
        return self.candidates[self.answer]

    @property
    def group(self) -> str:
        """The prompt: all questions on it stay together."""
        return self.prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PairExample(Example):
    """Two texts that belong together, or as much as the score says."""

    about: ClassVar[str] = "two texts that belong together, or as much as their score says"
    needed: ClassVar[tuple[str, ...]] = ("anchor", "positive")
    optional: ClassVar[tuple[str, ...]] = ("score",)
    anchor: str
    positive: str
    score: float | None = None

    @classmethod
    def of_inputs(cls, given: Iterable[Any], label: str) -> Iterator[Self]:
        """Yield pairs as they are, and single texts two by two; the last one of an odd number beside itself."""
        waiting: str | None = None
        for each in given:
            if not isinstance(each, str):
                yield cls(anchor=each[0], positive=each[1])
            elif waiting is None:
                waiting = each
            else:
                yield cls(anchor=waiting, positive=each)
                waiting = None
        if waiting is not None:
            yield cls(anchor=waiting, positive=waiting)

    @property
    def texts(self) -> tuple[str, ...]:
        """Both."""
        return (self.anchor, self.positive)

    @property
    def target(self) -> str:
        """The score."""
        return "" if self.score is None else repr(self.score)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seq2SeqExample(Example):
    """A text and what is to be written for it."""

    about: ClassVar[str] = "a text and what is to be written for it"
    needed: ClassVar[tuple[str, ...]] = ("source", "target")
    text: str
    rewritten: str

    @property
    def texts(self) -> tuple[str, ...]:
        """Both."""
        return (self.text, self.rewritten)

    @property
    def target(self) -> str:
        """What is to be written."""
        return self.rewritten

    @property
    def group(self) -> str:
        """The text: all that is written for it stays together."""
        return self.text


def _texts(given: Any) -> dict[str, Any]:
    return {"text": given} if isinstance(given, str) else {"text": given[0], "text_pair": given[1]}


def normalise_text(text: str) -> str:
    """The text without case, punctuation and doubled white space; a text of nothing else stays as it is.

    >>> normalised(" Don't  PANIC! "), normalised("?!")
    ('don t panic', '?!')
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(re.findall(r"\w+", text.casefold())) or text.strip()


def hash_text(text: str, seed: int = 0) -> int:
    """64 bits of the text and the seed, the same on every machine."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8, key=b"%d" % seed).digest(), "little")


def in_dev_split(example: Example, share: float, seed: int) -> bool:
    """Whether a made dev split takes this example; that depends on its text without case and punctuation alone."""
    return hash_text(normalise_text(example.group), seed) < share * 2**64


def sort_labels(labels: set[str]) -> tuple[str, ...]:
    """Labels in an order that does not depend on their rows: numbers by value, else by their characters.

    >>> in_order({"10", "9"}), in_order({"pos", "neg", "10"})
    (('9', '10'), ('10', 'neg', 'pos'))
    """
    try:
        values = {label: float(label) for label in labels}
    except ValueError:
        values = {}
    if len(values) == len(labels) and all(map(math.isfinite, values.values())):
        return tuple(sorted(labels, key=lambda label: (values[label], label)))
    return tuple(sorted(labels))
