"""Predictions: what a model answers to one input, one frozen dataclass for each kind of head."""

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
    """The answer to one input."""

    truncated_tokens: int = 0  # tokens at the end of the input that the model did not read

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Self:
        """Return an answer in this form: the values of its fields, by name; what else the answer has is left out."""
        return cls(**{field.name: answer[field.name] for field in fields(cls) if field.name in answer})

    def to_dict(self) -> dict[str, object]:
        """Return plain data that JSON can hold: text, numbers, lists and dicts."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


AnyPrediction = TypeVar("AnyPrediction", bound=Prediction, default=Prediction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification(Prediction):
    """One label of several."""

    label: str  # "": the model abstains, since the probability is below min_confidence
    probability: float  # of the most probable label
    probabilities: dict[str, float]  # of each label
    prediction_set: tuple[str, ...] = ()  # labels that contain the right one with the probability that was asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiLabelClassification(Prediction):
    """Any number of labels."""

    labels: tuple[str, ...]  # those whose probability reaches the threshold
    probabilities: dict[str, float]  # of each label


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression(Prediction):
    """A number, or one for each output of the head."""

    values: dict[str, float]  # by the name of the output

    @property
    def value(self) -> float:
        """The number of a head that has one output.

        Raises:
            ValueError: If the head has several outputs.
        """
        (value,) = self.values.values()
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Reranking(Prediction):
    """The relevance of each text to a query; larger is more relevant."""

    scores: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """A word and its tag."""

    text: str
    label: str | None  # None: the word has no token, and the model has no label for "outside"
    probability: float | None  # None: the word has no token
    start: int  # in characters of the input; given words count as joined by single spaces
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entity:
    """Neighbouring words of one type."""

    label: str  # without the prefix B-, I-, ...
    text: str
    probability: float  # mean over its words
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenClassification(Prediction):
    """The tag of every word, and the entities that the tags make."""

    entities: tuple[Entity, ...]
    words: tuple[Word, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span(Prediction):
    """The part of the context that answers a question."""

    answer: str  # "": the context has no answer
    start: int  # in characters of the context
    end: int
    score: float | None  # of the best span: sum of the scores of its start and its end; None: no context
    no_answer_score: float
    best_answer: str  # the best span, also where the model decides that there is no answer


@dataclass(frozen=True, kw_only=True, slots=True)
class MultipleChoice(Prediction):
    """One candidate of several."""

    choice: str
    index: int  # of the candidate, from 0
    probability: float  # of the candidate
    probabilities: tuple[float, ...]  # of each candidate


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embedding(Prediction):
    """The vector of a text."""

    vector: NDArray[np.float32]
    tokens: int  # that were read


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Similarity(Prediction):
    """How similar two texts are: the cosine of their vectors."""

    similarity: float
    vectors: NDArray[np.float32]  # [2, width]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCandidate:
    """A token that may replace a mask."""

    token: str  # as the vocabulary has it
    text: str
    probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """A mask and the tokens that fit, the most likely first."""

    start: int  # in characters of the input
    end: int
    candidates: tuple[TokenCandidate, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FillMask(Prediction):
    """The masks of a text."""

    masks: tuple[Mask, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NextSentence(Prediction):
    """Whether the second text of a pair follows the first."""

    is_next_probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """A text that a model wrote."""

    text: str
    log_probability: float
    tokens: int
    complete: bool  # False: it was cut off at the maximum number of new tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedText(Prediction):
    """The text that a model wrote for an input."""

    text: str
    log_probability: float
    tokens: int
    complete: bool  # False: it was cut off at the maximum number of new tokens
    alternatives: tuple[Generated, ...] = ()  # of the other beams, the best first


def check_prediction_type(
    predictions: Sequence[Prediction], answer_type: type[AnyPrediction] | None
) -> list[AnyPrediction]:
    """Check the class of predictions.

    Raises:
        HeedfulError: If they are not of the requested class.
    """
    for prediction in predictions:
        if answer_type is not None and not isinstance(prediction, answer_type):
            raise HeedfulError(
                f"answer_type is {answer_type.__name__}, but this model answers with {type(prediction).__name__}: pass "
                "that, or leave answer_type out"
            )
    return cast("list[AnyPrediction]", predictions)


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value
