"""The process's memory: freed memory is kept for the next step, and returned to the system now and then."""

from __future__ import annotations

import ctypes
import sys
import time

RELEASE_EVERY = 30.0  # seconds
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def disable_malloc_trim() -> bool:
    """Let this process keep freed memory instead of giving it back; False where the C library is not glibc.

    A step frees its large tensors, and the next one asks for the same again. glibc gives large pieces back at once, and
    the kernel has to fill them with zeros anew, page by page: a fifth of the time of steps of a few hundred tokens.
    It is a setting of the whole process, so a program sets it, not a library on its own: the command line does.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, 2**31 - 1), mallopt(M_TOP_PAD, 64 << 20)])


class MemoryTrimmer:
    """Returns freed memory to the system every 30 seconds, for a process that `keep_freed` made keep it.

    Steps of different sizes fragment the heap: without this the memory of a run grows for hours although the tensors
    in use do not (distillation of an encoder, 2 x 64: 460 MB in use; resident memory 1.0 GB after 10 steps, 1.6 GB
    after 50).
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
        self._released_at = time.monotonic()

    def release(self) -> bool:
        """Whether memory was returned; called after each step, it does so only when 30 seconds have passed."""
        if self._trim is None or time.monotonic() - self._released_at < RELEASE_EVERY:
            return False
        self._released_at = time.monotonic()
        return bool(self._trim(0))
