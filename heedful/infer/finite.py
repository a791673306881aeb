"""Tests for infinite or NaN numbers in answers and scores."""

from __future__ import annotations

import math

import numpy as np
import torch

NOT_FINITE = "the model's numbers for this input are not finite"


def answer_is_finite(answer: object) -> bool:
    """Return whether every number in an answer, which is plain data, is finite."""
    match answer:
        case float():
            return math.isfinite(answer)
        case dict():
            return all(map(answer_is_finite, answer.values()))
        case list() | tuple() if answer and isinstance(answer[0], float):
            return math.isfinite(sum(answer))
        case list():
            return all(map(answer_is_finite, answer))
    return True


def replace_nonfinite(value: object) -> object:
    """Replace infinities and NaN in plain data by None, since JSON cannot represent them."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: replace_nonfinite(inner) for name, inner in value.items()}
        case list() | tuple():
            return [replace_nonfinite(inner) for inner in value]
    return value


def scores_are_finite(scores: object) -> bool:
    """Return whether the scores of a window (a tensor on the CPU, generated texts or filled masks) are finite."""
    if isinstance(scores, torch.Tensor):
        return bool(np.isfinite(scores.numpy()).all())  # for a few hundred numbers NumPy is three times as fast
    if isinstance(scores, list | tuple):
        return all(
            math.isfinite(getattr(score, "log_probability", 0.0)) and answer_is_finite(score) for score in scores
        )
    return True
