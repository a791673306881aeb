"""The precisions in which a model answers."""

from __future__ import annotations

from typing import Literal, get_args

from heedful.errors import HeedfulError

Precision = Literal["float32", "bfloat16", "int8"]
PrecisionOrAuto = Literal["auto", "float32", "bfloat16", "int8"]  # auto: the fastest here that changes little


def check_precision(asked: str) -> None:
    """Raise a HeedfulError unless it is a precision or "auto"."""
    if asked not in get_args(PrecisionOrAuto):
        raise HeedfulError(f"precision is {asked!r}: give one of {', '.join(get_args(PrecisionOrAuto))}")
