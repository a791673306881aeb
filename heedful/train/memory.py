"""The process's memory: what training frees is kept for the next step."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def keep_freed() -> bool:
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
