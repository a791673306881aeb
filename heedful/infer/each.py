"""Many inputs of which some cannot be answered: the others are, and those say why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from heedful.errors import HeedfulError
from heedful.infer.engine import Asked, Engine
from heedful.tasks.base import Answer

Given = TypeVar("Given")
Made = TypeVar("Made")
NOT_FINITE = "the model's numbers for this input are not finite"


def encode_each(engine: Engine, given: Sequence[tuple[Any, str | None]]) -> tuple[list[Asked], list[str | None]]:
    """The tokens of inputs, and for every one why it has none; some have an error already."""
    read = iter(_apart([each for each, error in given if error is None], engine.encode))
    asked: list[Asked] = []
    errors: list[str | None] = []
    for _, error in given:
        found = next(read) if error is None else error
        if isinstance(found, Asked):
            asked.append(found)
        errors.append(found if isinstance(found, str) else None)
    return asked, errors


def answers_each(engine: Engine, asked: Sequence[Asked], *, top_k: int = 5) -> list[Answer | str]:
    """An answer for each, or why there is none; what is not finite is asked again, apart from what may spoil it."""
    found = _apart(asked, lambda some: engine.answers(some, top_k=top_k))
    bad = [number for number, each in enumerate(found) if not isinstance(each, str) and not is_finite(each)]
    if len(asked) == 1 and bad:
        return [NOT_FINITE]
    half = len(bad) // 2
    for group in filter(None, (bad[:half], bad[half:])):
        again = answers_each(engine, [asked[number] for number in group], top_k=top_k)
        for number, each in zip(group, again, strict=True):
            found[number] = each
    return found


def answer_each(engine: Engine, given: Sequence[tuple[Any, str | None]], *, top_k: int = 5) -> list[Answer | str]:
    """Both."""
    asked, errors = encode_each(engine, given)
    answers = iter(answers_each(engine, asked, top_k=top_k))
    return [error or next(answers) for error in errors]


def _apart(given: Sequence[Given], make: Callable[[Sequence[Given]], Sequence[Made]]) -> list[Made | str]:
    """What is made of all together, or where that is an error, of halves, down to the ones at fault."""
    if not given:
        return []
    try:
        return list(make(given))
    except HeedfulError as error:
        if len(given) == 1:  # there is no company in which it would have a number
            return [str(error).removeprefix("input 0: ").removeprefix("input 0 ")]
        half = len(given) // 2
        return _apart(given[:half], make) + _apart(given[half:], make)


def is_finite(answer: Any) -> bool:
    """Whether all numbers of an answer are."""
    match answer:
        case float():
            return math.isfinite(answer)
        case dict():
            return all(map(is_finite, answer.values()))
        case [float(), *_]:
            return math.isfinite(sum(answer))
        case list():
            return all(map(is_finite, answer))
    return True


def finite(scores: Any) -> bool:
    """Whether every number is; of texts that were written, their log-probabilities; of tokens, their probabilities."""
    if isinstance(scores, torch.Tensor):
        return bool(scores.isfinite().all())
    if isinstance(scores, list | tuple):
        return all(math.isfinite(getattr(each, "log_probability", 0.0)) and is_finite(each) for each in scores)
    return True
