"""Memory: a server stays about as small as it began; what a large batch took goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import os

LARGE = 1 << 20  # bytes from which a block is the system's again as soon as it is freed
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "16"}  # one for each number of rows otherwise
ARENAS = 2  # apart from each other, for threads: what is free in one is of no use to another
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of <malloc.h>


def limit_arenas() -> None:
    """Limit memory arenas and kernel caches; call it before torch is imported. Without glibc it changes less."""
    for name, value in KERNELS.items():
        os.environ.setdefault(name, value)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and hasattr(_library(), "mallopt"):
        _library().mallopt(_MMAP_THRESHOLD, LARGE)
    if "MALLOC_ARENA_MAX" not in os.environ and hasattr(_library(), "mallopt"):
        _library().mallopt(_ARENA_MAX, ARENAS)


def freeze_gc() -> None:
    """Give back what is free now; what is there now, stays: the collector no longer looks through it (80 ms each time).

    An engine is in no cycle, so that one that is exchanged later still goes with its last user.
    """
    gc.collect()
    gc.freeze()
    if hasattr(_library(), "malloc_trim"):
        _library().malloc_trim(0)


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
