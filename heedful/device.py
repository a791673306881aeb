"""The device on which a model computes: the CPU, or a GPU that CUDA reaches."""

from __future__ import annotations

import os
from typing import Literal

import torch

from heedful.errors import SettingError

CPU = torch.device("cpu")


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device of that name, which must exist; "cuda" is the GPU of this process's LOCAL_RANK.

    Raises:
        SettingError: If the name is unknown, or PyTorch sees no such GPU.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(f'the device is "{name}": give cpu, or cuda for a GPU') from None
    if device.type != "cuda":
        return device
    count, index = torch.cuda.device_count(), device.index
    if not count:
        raise SettingError(
            f'the device is "{name}", but PyTorch {torch.__version__} sees no GPU: see what nvidia-smi prints, install '
            "a PyTorch with CUDA, or take cpu"
        )
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= count:
        raise SettingError(
            f"the device is GPU {index}, but this host has {count}, counted from 0: start at most as many processes "
            "on it as it has GPUs (--nproc), or take cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def has_fast_bfloat16(device: torch.device = CPU) -> bool:
    """Return whether the device has instructions for bfloat16 matrix products."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def resolve_dtype(precision: Literal["auto", "float32", "bfloat16"], device: torch.device = CPU) -> torch.dtype:
    """Return the dtype of a precision setting; "auto" is bfloat16 where the device has instructions for it."""
    if precision == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def unused_gpu_note(device: str | None) -> str:
    """Return a note that this host has a GPU which the device setting does not use, or an empty string."""
    if device == "cuda" or not torch.cuda.is_available():
        return ""
    return "a GPU is here and is not used: with train.device=cuda it is"
