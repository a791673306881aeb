"""The precisions in which an engine computes a model."""

from __future__ import annotations

from typing import Literal, get_args

from heedful.errors import HeedfulError

Precision = Literal["float32", "bfloat16", "float16", "int8"]
PrecisionOrAuto = Literal["auto", "float32", "bfloat16", "float16", "int8"]  # auto: the fastest accurate one


def check_precision(name: str) -> None:
    """Raise a HeedfulError unless `name` is a precision or "auto"."""
    if name not in get_args(PrecisionOrAuto):
        raise HeedfulError(f"precision is {name!r}: give one of {', '.join(get_args(PrecisionOrAuto))}")
