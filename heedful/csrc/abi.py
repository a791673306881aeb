"""The functions of the C++ library: their names, and the types of their arguments and results.

`library.py` loads them into `Kernels`. A new C++ function needs a line in `SIGNATURES` and an attribute of `Kernels`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# pointer, int64_t, int, float, double, uint64_t
_P, _I, _N, _F, _D, _U = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_float,
    ctypes.c_double,
    ctypes.c_uint64,
)
# types of the first arguments of heedful_attention and heedful_attention_gradient
_ATTENTION = [_I, _I, _I, _I, _P, _P, _I, _P, _I, _P, _I, _F, _N, _I, _D, _U, _N]
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {  # name of a function without "heedful_" -> result and argument types
    "lanes": (_I, []),
    "half": (_N, []),
    "bytes": (_N, []),
    "tiles": (_N, []),
    "compiler": (ctypes.c_char_p, []),
    "packed_words": (_I, [_I, _I, _I]),
    "pack": (None, [_P, _N, _I, _I, _N, _N, _P, _N]),
    "pack8": (None, [_P, _I, _I, _P, _N]),
    "round_rows": (None, [_P, _I, _I, _I, _N, _P, _P, _N]),
    "linear8": (None, [_P, _P, _I, _P, _I, _I, _P, _P, _P, _N, _N, _P, _N]),
    "linear": (None, [_P, _I, _I, _P, _I, _I, _P, _N, _N, _N, _P, _N]),
    "weight_gradient": (None, [_P, _I, _P, _I, _I, _I, _N, _P, _P, _P, _N]),
    "gelu": (None, [_P, _I, _N, _P, _N]),
    "gelu_gradient": (None, [_P, _P, _I, _N, _P, _N]),
    "add_norm": (None, [_I, _I, _F, _P, _P, _D, _U, _P, _N, _P, _N, _P, _N, _P, _P, _N]),
    "add_norm_gradient": (None, [_I, _I, _F, _P, _D, _U, _P, _P, _P, _P, _P, _N, _P, _P, _N]),
    "attention": (None, [*_ATTENTION, _P, _I, _P, _N]),
    "attention_gradient": (None, [*_ATTENTION, _P, _I, _P, _P, _I, _P, _P, _P, _I, _N]),
    "disentangled_attention": (None, [_I, _I, _I, _P, *[_P, _I] * 3, _F, _N, _P, _P, _I, _P, _I, _P, _I, _N]),
    "cross_entropy": (None, [_P, _I, _I, _P, _N, _P, _P, _N]),
    "scores8": (None, [_P, _P, _I, _I, _P, _P, _I, _P, _N]),
    "matches": (None, [_P, _I, _I, _P, _I, _P, _N]),
    "block_space": (_I, [_P, _I, _N]),
    "block": (None, [_P, _N, _P, _I, _I, _P, _I, _P, _P, _N]),
    "adamw": (None, [_I, _P, _P, _F, _D, _D, _D, _N]),
    "adamw_rows": (None, [_P, _P, _P, _P, _I, _P, _I, _P, _I, _P, _F, _D, _D, _D, _N]),
}

Function = Callable[..., Any]  # a ctypes function with the types of SIGNATURES


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """A loaded library. Its functions are attributes with the names of SIGNATURES; the C++ sources document them."""

    path: Path
    has_bfloat16: bool  # whether it has bfloat16 matrix products
    has_int8: bool  # whether it has int8 matrix products
    has_tiles: bool  # whether its matrix products use the tile registers of AMX
    lanes: int  # float32 values in a vector register; the last dimension of a tensor must be a multiple of it
    compiler: str  # name and version of the compiler
    pack: Function
    packed_words: Function
    linear: Function
    pack8: Function
    round_rows: Function
    linear8: Function
    weight_gradient: Function
    gelu: Function
    gelu_gradient: Function
    add_norm: Function
    add_norm_gradient: Function
    attention: Function
    attention_gradient: Function
    disentangled_attention: Function
    cross_entropy: Function
    scores8: Function
    matches: Function
    block_space: Function
    block: Function
    adamw: Function
    adamw_rows: Function
