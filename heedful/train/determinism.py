"""Deterministic algorithms on a GPU, with which two equal runs have the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from heedful.errors import SettingError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # environment variable that cuBLAS and PyTorch read once
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # with other values, results of cuBLAS differ from run to run


def prepare_determinism() -> None:
    """Set the environment variable that deterministic matrix products on a GPU need, unless it is set.

    Raises:
        SettingError: If it has another value, or a GPU was used before, since the variable is read once.
    """
    value = os.environ.get(WORKSPACE)
    if value in DETERMINISTIC_WORKSPACES:
        return
    if value is None and not _gpu_was_used():
        os.environ[WORKSPACE] = DETERMINISTIC_WORKSPACES[0]
        return
    state = "is not set, and this process has used a GPU already" if value is None else f'is "{value}"'
    raise SettingError(
        f"train.deterministic needs the environment variable {WORKSPACE}={DETERMINISTIC_WORKSPACES[0]}, which {state}: "
        "set it before Python starts",
        path="train.deterministic",
    )


def _gpu_was_used() -> bool:
    """Return whether a tensor was on a GPU in this process."""
    return torch.cuda.is_initialized() and any(
        torch.cuda.max_memory_reserved(index) > 0 for index in range(torch.cuda.device_count())
    )


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Context in which PyTorch uses deterministic algorithms only; an operation without one raises a RuntimeError."""
    memory: Any = torch.utils.deterministic
    is_enabled, warns_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills_memory = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # every number is written before it is read, and filling takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_enabled, warn_only=warns_only)
        memory.fill_uninitialized_memory = fills_memory
