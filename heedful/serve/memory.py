"""Memory settings of a server process, which return the memory of a large batch to the system."""

from __future__ import annotations

import ctypes
import gc
import os

MMAP_BYTES = 1 << 20  # larger blocks are returned to the system when they are freed
# sizes of the caches of oneDNN's compiled kernels, which would otherwise store a kernel for each token count
KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "16"}
MAX_ARENAS = 2  # malloc arenas; free memory of one arena cannot be used by threads of another
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # parameters of mallopt, from <malloc.h>


def limit_arenas() -> None:
    """Limit malloc arenas (with glibc only) and kernel caches. Call this before torch is imported."""
    for name, value in KERNEL_CACHES.items():
        os.environ.setdefault(name, value)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and hasattr(_libc(), "mallopt"):
        _libc().mallopt(_MMAP_THRESHOLD, MMAP_BYTES)
    if "MALLOC_ARENA_MAX" not in os.environ and hasattr(_libc(), "mallopt"):
        _libc().mallopt(_ARENA_MAX, MAX_ARENAS)


def freeze_gc() -> None:
    """Return free memory to the system, and exempt all current objects from garbage collection.

    Each collection would spend 80 ms on them. An engine that is replaced later is still freed, since it is not in a
    reference cycle.
    """
    gc.collect()
    gc.freeze()
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
