"""Answers to many inputs, with an error message in place of the answer to an input that fails."""

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
    """Tokenize inputs such that an invalid input does not affect the others.

    Args:
        engine: The engine.
        inputs: For each input (input, None), or (None, error message) if it could not be read.

    Returns:
        The encoded inputs, without those that failed, and for every input its error message or None.
    """
    first_stage, _ = engine.stages[0]
    readable = [engine_input for engine_input, error in inputs if error is None]
    results = iter(_apply_to_parts(readable, first_stage.tokenize))
    encoded_inputs: list[EncodedInput] = []
    errors: list[str | None] = []
    for _, error in inputs:
        result = next(results) if error is None else error
        if isinstance(result, EncodedInput):
            encoded_inputs.append(result)
        errors.append(result if isinstance(result, str) else None)
    return encoded_inputs, errors


def answer_encoded_each(
    engine: BundleEngine, encoded_inputs: Sequence[EncodedInput], *, top_k: int = 5
) -> list[Answer | str]:
    """Return the answer to each encoded input, or its error message."""
    return _apply_to_parts(encoded_inputs, lambda part: engine.answers(part, top_k=top_k))


def answer_each(
    engine: BundleEngine, inputs: Sequence[tuple[object, str | None]], *, top_k: int = 5
) -> list[Answer | str]:
    """Return the answer to each input, or its error message; see `tokenize_each` for `inputs`."""
    encoded_inputs, errors = tokenize_each(engine, inputs)
    answers = iter(answer_encoded_each(engine, encoded_inputs, top_k=top_k))
    return [error or next(answers) for error in errors]


def _apply_to_parts(
    values: Sequence[Input], function: Callable[[Sequence[Input]], Sequence[Output]]
) -> list[Output | str]:
    """Return function(values); if it fails, split the values in halves until only the values at fault fail.

    The result of a value at fault is its error message.
    """
    if not values:
        return []
    try:
        return list(function(values))
    except HeedfulError as error:
        if len(values) == 1:  # the error's "input 0" is no number that the caller knows
            return [str(error).removeprefix("input 0: ").removeprefix("input 0 ")]
        half = len(values) // 2
        return _apply_to_parts(values[:half], function) + _apply_to_parts(values[half:], function)
