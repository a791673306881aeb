"""The precisions in which a model answers."""

from __future__ import annotations

from typing import Literal

Precision = Literal["float32", "bfloat16", "int8"]
PrecisionOrAuto = Literal["auto", "float32", "bfloat16", "int8"]  # auto: the fastest here that changes little
