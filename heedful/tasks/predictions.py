"""The predictions that `Engine` returns in Python: one frozen dataclass for each kind of head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from heedful.errors import HeedfulError


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Base class of predictions for one input."""

    truncated_tokens: int = 0  # tokens at the end of the input that were cut off

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Self:
        """Convert an answer to this class, field by field. Keys that are not fields are ignored."""
        return cls(**{field.name: answer[field.name] for field in fields(cls) if field.name in answer})

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for JSON: texts, numbers, lists and dicts."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


AnyPrediction = TypeVar("AnyPrediction", bound=Prediction, default=Prediction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification(Prediction):
    """The prediction of a classifier with one label of several."""

    label: str  # "": the model abstains because the probability is below min_confidence
    probability: float  # probability of the most probable label
    probabilities: dict[str, float]  # probability of each label
    prediction_set: tuple[str, ...] = ()  # labels that contain the correct one with the requested probability


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiLabelClassification(Prediction):
    """The prediction of a classifier with any number of labels."""

    labels: tuple[str, ...]  # labels whose probability is at least their threshold
    probabilities: dict[str, float]  # probability of each label


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression(Prediction):
    """The prediction of a regression head: a value for each output."""

    values: dict[str, float]  # value of each output, by its name

    @property
    def value(self) -> float:
        """The value of a head with one output.

        Raises:
            ValueError: If the head has several outputs.
        """
        (value,) = self.values.values()
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Reranking(Prediction):
    """The relevance of each text to a query."""

    scores: tuple[float, ...]  # larger is more relevant


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """A word and its tag."""

    text: str
    label: str | None  # None: the word has no token, and the model has no label "O"
    probability: float | None  # None: the word has no token
    start: int  # first character in the input; the words of a list are joined by single spaces
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entity:
    """An entity: neighbouring words of one type."""

    label: str  # type of the entity, without the prefix B-, I-, ...
    text: str
    probability: float  # mean probability of its words
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenClassification(Prediction):
    """The tag of every word, and the entities that the tags form."""

    entities: tuple[Entity, ...]
    words: tuple[Word, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span(Prediction):
    """The span of the context that answers a question."""

    answer: str  # "": the context has no answer
    start: int  # first character in the context
    end: int
    score: float | None  # start score plus end score of the best span; None: the context is empty
    no_answer_score: float  # start score plus end score of "no answer"
    best_answer: str  # the best span, even if the model decides that there is no answer


@dataclass(frozen=True, kw_only=True, slots=True)
class MultipleChoice(Prediction):
    """The prediction for a multiple-choice question: one candidate of several."""

    choice: str  # the chosen candidate
    index: int  # index of the chosen candidate, from 0
    probability: float  # probability of the chosen candidate
    probabilities: tuple[float, ...]  # probability of each candidate


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embedding(Prediction):
    """The embedding of a text."""

    vector: NDArray[np.float32]  # [embedding dimension]
    tokens: int  # tokens of the text that the vector is computed from


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Similarity(Prediction):
    """The similarity of two texts: the cosine of their vectors."""

    similarity: float
    vectors: NDArray[np.float32]  # [2, embedding dimension]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCandidate:
    """A candidate token for a mask."""

    token: str  # spelling in the vocabulary
    text: str  # decoded text
    probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """A mask and its candidates, the most likely one first."""

    start: int  # first character in the input
    end: int
    candidates: tuple[TokenCandidate, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FillMask(Prediction):
    """The masks of a text with their candidates."""

    masks: tuple[Mask, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NextSentence(Prediction):
    """Whether the second text of a pair follows the first."""

    is_next_probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """A text that a model generated."""

    text: str
    log_probability: float  # sum over the generated tokens, including the end token
    tokens: int  # generated tokens, without the end token
    complete: bool  # False: cut off at the maximum number of new tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedText(Prediction):
    """The text that a model generated for an input."""

    text: str
    log_probability: float  # sum over the generated tokens, including the end token
    tokens: int  # generated tokens, without the end token
    complete: bool  # False: cut off at the maximum number of new tokens
    alternatives: tuple[Generated, ...] = ()  # texts of the other beams, the best one first


def check_prediction_type(
    predictions: Sequence[Prediction], answer_type: type[AnyPrediction] | None
) -> list[AnyPrediction]:
    """Return the predictions unchanged after checking their class.

    Raises:
        HeedfulError: If a prediction is not of the requested class.
    """
    for prediction in predictions:
        if answer_type is not None and not isinstance(prediction, answer_type):
            raise HeedfulError(
                f"answer_type is {answer_type.__name__}, but this model answers with {type(prediction).__name__}: pass "
                "that, or leave answer_type out"
            )
    return cast("list[AnyPrediction]", predictions)


def _plain(value: object) -> object:
    """Convert dataclasses, tuples and arrays to plain data."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value
