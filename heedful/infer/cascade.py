"""A cascade of classifiers: each input is answered by the first stage whose confidence reaches its threshold.

The confidence is the probability of the most probable label. Inputs with a lower confidence go to the next stage, which
packs them into its own batches. Viola and Jones (2001) introduced such cascades, for windows of images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from heedful.errors import InputError
from heedful.model.config import Classes, Head
from heedful.tasks.label_answers import Answer, unique_label_names

Input = TypeVar("Input")
Stage = TypeVar("Stage")


class StagedAnswers:
    """The answers to a list of inputs, collected stage by stage.

    Attributes:
        pending: Indices of the inputs that the next stage has to answer.
    """

    def __init__(self, count: int) -> None:
        self.pending = list(range(count))
        self._answers: dict[int, Answer] = {}
        self._stage = 0

    def add(self, answers: Sequence[Answer], threshold: float) -> None:
        """Add a stage's answers to the pending inputs; those with a probability below the threshold stay pending."""
        self._stage += 1
        for number, answer in zip(self.pending, answers, strict=True):
            self._answers[number] = answer | {"stage": self._stage}
        self.pending = [number for number in self.pending if self._answers[number]["probability"] < threshold]

    def renumbered(self, error: InputError) -> InputError:
        """Return an error whose index counts all inputs, for an error whose index counts the pending ones."""
        return InputError(error.reason, self.pending[error.index])

    @property
    def answers(self) -> list[Answer]:
        """The answers in the order of the inputs, each with the number of its "stage", counted from 1."""
        return [answer for _, answer in sorted(self._answers.items())]


def in_label_order(answer: Answer, head: Head) -> Answer:
    """Return the answer of an early stage with its labels in the order of the last stage's head.

    All stages have the same labels, but a model that was trained elsewhere may list them in another order.
    """
    assert isinstance(head, Classes)
    names = unique_label_names(head.labels)
    probabilities = answer["probabilities"]
    if list(probabilities) == names:
        return answer
    answer = answer | {"probabilities": {name: probabilities[name] for name in names}}
    if "prediction_set" in answer:
        answer["prediction_set"] = [name for name in names if name in answer["prediction_set"]]
    return answer


def answer_in_stages(
    stages: Sequence[tuple[Stage, float]],
    inputs: Sequence[Input],
    ask: Callable[[Stage, list[Input]], Sequence[Answer]],
) -> list[Answer]:
    """Return the answer to each input from the first stage that is confident.

    Args:
        stages: Pairs of a stage and its threshold; the threshold of the last stage is 0.
        inputs: The inputs.
        ask: Function of a stage and some of the inputs that returns the stage's answers.

    Raises:
        InputError: If `ask` raises it; its index is changed to count all inputs.
    """
    staged = StagedAnswers(len(inputs))
    for stage, threshold in stages:
        if not staged.pending:
            break
        try:
            staged.add(ask(stage, [inputs[number] for number in staged.pending]), threshold)
        except InputError as error:
            raise staged.renumbered(error) from error.__cause__
    return staged.answers
