"""The device on which a model is computed: the processor, or a GPU that CUDA reaches."""

from __future__ import annotations

import os
from typing import Literal

import torch

from heedful.errors import HeedfulError

CPU = torch.device("cpu")


def resolve_device(asked: str | torch.device) -> torch.device:
    """That device, if it is there; of several processes of one host that torchrun started, each has a GPU of its own.

    Raises HeedfulError where "cuda" is asked for and PyTorch sees no GPU, or fewer than processes.
    """
    try:
        found = torch.device(asked)
    except RuntimeError:
        raise HeedfulError(f'the device is "{asked}": give cpu, or cuda for a GPU') from None
    if found.type != "cuda":
        return found
    count, index = torch.cuda.device_count(), found.index
    if not count:
        raise HeedfulError(
            f'the device is "{asked}", but PyTorch {torch.__version__} sees no GPU: see what nvidia-smi says, install '
            "a PyTorch with CUDA, or take cpu"
        )
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= count:
        raise HeedfulError(
            f"the device is GPU {index}, but this host has {count}, counted from 0: start at most as many processes "
            "on it as it has GPUs (--nproc), or take cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def has_fast_bfloat16(device: torch.device = CPU) -> bool:
    """Whether the device has instructions for products of bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    can = torch.cpu.get_capabilities()
    return bool(can.get("amx_bf16") or can.get("avx512_bf16"))


def resolve_dtype(asked: Literal["auto", "float32", "bfloat16"], device: torch.device = CPU) -> torch.dtype:
    """bfloat16 where the device has instructions for it, unless told otherwise."""
    if asked == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    return torch.bfloat16 if asked == "bfloat16" else torch.float32


def unused_gpu_note(asked: str | None) -> str:
    """That a GPU is here and is not asked for, in words; "" otherwise."""
    if asked == "cuda" or not torch.cuda.is_available():
        return ""
    return "a GPU is here and is not used: with train.device=cuda it is"
