"""Memory settings of a server process, by which the memory of a large batch is returned to the system."""

from __future__ import annotations

import ctypes
import gc
import os

MMAP_BYTES = 1 << 20  # bytes above which malloc returns a freed block to the system
# sizes of oneDNN's caches of compiled kernels, which would otherwise hold a kernel for each number of tokens
KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "16"}
MAX_ARENAS = 2  # malloc arenas: threads of one arena cannot use free memory of another
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # parameters of mallopt, from <malloc.h>


def limit_arenas() -> None:
    """Limit the arenas of malloc (only with glibc) and the kernel caches; to be called before torch is imported."""
    for name, value in KERNEL_CACHES.items():
        os.environ.setdefault(name, value)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and hasattr(_libc(), "mallopt"):
        _libc().mallopt(_MMAP_THRESHOLD, MMAP_BYTES)
    if "MALLOC_ARENA_MAX" not in os.environ and hasattr(_libc(), "mallopt"):
        _libc().mallopt(_ARENA_MAX, MAX_ARENAS)


def freeze_gc() -> None:
    """Return free memory to the system, and exempt all current objects from garbage collection.

    A collection would spend 80 ms on them. An engine that is replaced later is still freed, since it is not in a
    reference cycle.
    """
    gc.collect()
    gc.freeze()
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
