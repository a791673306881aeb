"""Recording of CUDA graphs: the kernels that a function launches are recorded once and launched together later."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

WARMUP_RUNS = 3  # runs before one is recorded: kernels plan, libraries choose algorithms and allocate workspaces

_RECORDING = Lock()  # PyTorch records one graph of a process at a time


def record(run: Callable[[], Tensor], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record a function on a CUDA device; returns the graph, and the tensor that each replay writes.

    The function runs WARMUP_RUNS times before. While it is recorded, nothing may be copied between host and device.
    Tensors that it reads must stay where they are as long as the graph is replayed.

    Args:
        run: The function.
        device: The device.
        pool: Memory shared by graphs that are never replayed at the same time. If None, the graph has its own.
    """
    with _RECORDING, torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_RUNS):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()
    return graph, result
