"""Kernels in C++, optional: built where a compiler is, when they are first wanted, and kept for the next process.

`kernels()` gives the library, or None; `why()` says in a line why there is none. HEEDFUL_KERNELS=off turns them off.
"""

from heedful.csrc.abi import Kernels
from heedful.csrc.library import KERNELS_VARIABLE, kernels, unavailable_reason, unused_note

__all__ = ["KERNELS_VARIABLE", "Kernels", "kernels", "unavailable_reason", "unused_note"]
