"""Optional C++ kernels: compiled on first use if there is a compiler, and cached for later processes.

`kernels()` returns the library, or None if it is unavailable; `unavailable_reason()` returns why. The environment
variable HEEDFUL_KERNELS=off turns the kernels off.
"""

from heedful.csrc.abi import Kernels
from heedful.csrc.library import KERNELS_VARIABLE, kernels, unavailable_reason, unused_note

__all__ = ["KERNELS_VARIABLE", "Kernels", "kernels", "unavailable_reason", "unused_note"]
