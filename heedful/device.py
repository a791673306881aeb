"""The device on which a model computes, the CPU or a GPU with CUDA, and the dtype of its matrix products."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Literal

import torch

from heedful.errors import HeedfulWarning, SettingError

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # by precision setting
DEVICE_ADVICE = "use auto, cpu, or cuda for a GPU"


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """Resolve a device name to a `torch.device`. If it is a GPU, also make it the current CUDA device.

    Args:
        name: "auto": "cuda" if `has_gpu()`, else "cpu", with a warning if the GPUs are those of other processes.
            "cpu": the CPU.
            "cuda": the GPU whose index is the environment variable LOCAL_RANK, which torchrun sets (default: 0), or the
                only GPU that this process sees.
            "cuda:1": the GPU with index 1.

    Raises:
        SettingError: If the name is unknown, Heedful does not compute on the device (mps), PyTorch sees no such GPU, or
            LOCAL_RANK is not a whole number.
    """
    if name == "auto":
        name = "cuda" if has_gpu() else "cpu"
        if name == "cpu" and torch.cuda.is_available():
            facts = f"it has LOCAL_RANK={_local_rank()}, and PyTorch sees {torch.cuda.device_count()} GPUs"
            warnings.warn(f"this process computes on the CPU: {facts}", HeedfulWarning, stacklevel=2)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(f'the device is "{name}": {DEVICE_ADVICE}') from None
    check_device(device)
    if device.type != "cuda":
        return device
    count, index = torch.cuda.device_count(), device.index
    if not count:
        raise SettingError(
            f'the device is "{name}", but PyTorch {torch.__version__} sees no GPU: see what nvidia-smi prints, install '
            "a PyTorch with CUDA, or use the device cpu"
        )
    if index is None:
        index = _gpu_index(count)
    if index >= count:
        raise SettingError(
            f"the device is GPU {index}, but PyTorch sees {count} on this host (0 to {count - 1}): start at most one "
            "process for each GPU, or use the device cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def check_device(device: torch.device) -> None:
    """Raise SettingError if Heedful does not compute on this kind of device."""
    if device.type == "mps":
        raise SettingError(
            f'the device is "{device}", and Apple\'s GPUs have no float64, in which Heedful computes positions and '
            "norms: use the device cpu, or cuda on a machine with an NVIDIA GPU"
        )
    if device.type not in ("cpu", "cuda", "meta"):
        raise SettingError(f'the device is "{device}", on which Heedful does not compute: {DEVICE_ADVICE}')


def has_gpu() -> bool:
    """Return whether PyTorch sees a GPU for this process; see `resolve_device`.

    A single GPU is counted for each process, since launchers may show each one only its own; `gpu_identity` tells
    whether it is the same one.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count > 0 and _gpu_index(count) < count


def gpu_identity() -> str:
    """Return host and UUID of this process's GPU, which are equal for processes that share it; "" if it has none."""
    if not has_gpu():
        return ""
    properties = torch.cuda.get_device_properties(_gpu_index(torch.cuda.device_count()))
    return f"{socket.gethostname()}/{properties.uuid}"


def _gpu_index(count: int) -> int:
    """Return the index of this process's GPU if it sees `count` of them; an index of `count` or more: it has none."""
    local_rank = _local_rank()  # raises an error for a value that is no number, whatever the count
    return 0 if count == 1 else local_rank


def _local_rank() -> int:
    """Return the index of this process on its host, which torchrun sets; 0 without torchrun."""
    value = os.environ.get("LOCAL_RANK", "0")
    if not value.isdecimal():
        raise SettingError(
            f'the environment variable LOCAL_RANK is "{value}"; expected the index of this process on its host: unset '
            "it, or start the processes with torchrun"
        )
    return int(value)


def multiplies_bfloat16(device: torch.device = CPU) -> bool:
    """Return whether the device has instructions for matrix products of bfloat16.

    These are NVIDIA GPUs of compute capability 8.0 or higher, AMD GPUs, and x86 processors with AMX or AVX-512
    instructions for bfloat16. ARM processors with such instructions do not count, since their speed was not measured.
    """
    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 8
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def _multiplies_float32_faster(device: torch.device) -> bool:
    """Return whether the device is an Intel processor with AVX-512 instructions for bfloat16, but without AMX.

    Such an instruction replaces two for float32, but takes four times as long as one of them.
    """
    capabilities = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    is_intel = "intel" in str(capabilities.get("cpu_name", "")).lower()
    return is_intel and not capabilities.get("amx_bf16")


def auto_precision(device: torch.device = CPU) -> Literal["float32", "bfloat16", "float16"]:
    """Return the precision in which training is fastest.

    This is bfloat16 if the device has instructions for it (except for Intel processors without AMX), float16 on GPUs of
    compute capability 7 (V100, T4), whose tensor cores multiply float16 but not bfloat16, and else float32.
    """
    if multiplies_bfloat16(device) and not _multiplies_float32_faster(device):
        return "bfloat16"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 7:
        return "float16"
    return "float32"


def resolve_dtype(
    precision: Literal["auto", "float32", "bfloat16", "float16"], device: torch.device = CPU
) -> torch.dtype:
    """Return the dtype of a precision setting; "auto" is `auto_precision`.

    Raises:
        SettingError: If the precision is unknown, or it is float16 and the device a CPU.
    """
    if precision == "auto":
        precision = auto_precision(device)
    if precision not in DTYPES:
        raise SettingError(f'the precision is "{precision}": use auto, {", ".join(DTYPES)}')
    if precision == "float16" and device.type == "cpu":
        raise SettingError(
            "the precision is float16, and the device is a CPU, on which float16 is slow: set it to float32 or "
            "bfloat16, or train on a GPU"
        )
    return DTYPES[precision]


def autocast(device: torch.device | str, dtype: torch.dtype) -> torch.autocast:
    """Return torch's autocast context for bfloat16 or float16, or a disabled one for other dtypes."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(torch.device(device).type, dtype if is_half else torch.bfloat16, enabled=is_half)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, such as "NVIDIA H100 80GB HBM3", or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


class _Tf32:
    """Bookkeeping of the `tf32_products` contexts of all threads, since PyTorch has one setting for the process."""

    lock = Lock()
    open_contexts = 0  # number of contexts that have not ended
    outer_precision = ""  # PyTorch's setting before the first context was opened


@contextmanager
def tf32_products() -> Iterator[None]:
    """Within this context, compute float32 matrix products on GPUs in TF32, which has 10 bits of mantissa.

    The setting is the process's: it applies to all threads, and is restored when the last open context ends.
    """
    matmul = torch.backends.cuda.matmul
    with _Tf32.lock:
        if not _Tf32.open_contexts:
            _Tf32.outer_precision = matmul.fp32_precision
            matmul.fp32_precision = "tf32"
        _Tf32.open_contexts += 1
    try:
        yield
    finally:
        with _Tf32.lock:
            _Tf32.open_contexts -= 1
            if not _Tf32.open_contexts:
                matmul.fp32_precision = _Tf32.outer_precision
