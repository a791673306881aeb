"""Answers to many inputs, with an error message for each that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.encoded_input import EncodedInput
from heedful.tasks.answering import Answer

Input = TypeVar("Input")
Output = TypeVar("Output")


def tokenize_each(
    engine: BundleEngine, inputs: Sequence[tuple[object, str | None]]
) -> tuple[list[EncodedInput], list[str | None]]:
    """The tokens of inputs, and for every one why it has none; some have an error already."""
    first, _ = engine.stages[0]
    read = iter(_apart([engine_input for engine_input, error in inputs if error is None], first.tokenize))
    asked: list[EncodedInput] = []
    errors: list[str | None] = []
    for _, error in inputs:
        outcome = next(read) if error is None else error
        if isinstance(outcome, EncodedInput):
            asked.append(outcome)
        errors.append(outcome if isinstance(outcome, str) else None)
    return asked, errors


def answer_encoded_each(engine: BundleEngine, asked: Sequence[EncodedInput], *, top_k: int = 5) -> list[Answer | str]:
    """Answer encoded inputs; an input that fails, or whose numbers are not finite, gets its error message."""
    return _apart(asked, lambda some: engine.answers(some, top_k=top_k))


def answer_each(
    engine: BundleEngine, inputs: Sequence[tuple[object, str | None]], *, top_k: int = 5
) -> list[Answer | str]:
    """Encode the inputs and answer them; an input that fails gets its error message."""
    asked, errors = tokenize_each(engine, inputs)
    answers = iter(answer_encoded_each(engine, asked, top_k=top_k))
    return [error or next(answers) for error in errors]


def _apart(values: Sequence[Input], make: Callable[[Sequence[Input]], Sequence[Output]]) -> list[Output | str]:
    """Apply `make` to all items; after an error to halves, down to the items at fault, which get its message."""
    if not values:
        return []
    try:
        return list(make(values))
    except HeedfulError as error:
        if len(values) == 1:  # there is no company in which it would have a number
            return [str(error).removeprefix("input 0: ").removeprefix("input 0 ")]
        half = len(values) // 2
        return _apart(values[:half], make) + _apart(values[half:], make)
