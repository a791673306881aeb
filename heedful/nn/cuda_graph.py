"""Recording of CUDA graphs: the kernels that a function launches are recorded once and replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

WARMUP_RUNS = 3  # runs before the recorded one, in which plans are made and libraries allocate their workspaces

_RECORDING = Lock()  # PyTorch can record only one graph at a time in a process


def record(run: Callable[[], Tensor], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record a function on a CUDA device; returns the graph, and the tensor that each replay writes.

    The function is called WARMUP_RUNS times first. While it is recorded, nothing may be copied between host and device.
    Replays read and write the recorded memory addresses, so tensors that the function reads must not be moved or freed.

    Args:
        run: The function to record; it returns the result.
        device: The device.
        pool: Memory pool shared with graphs that are never replayed at the same time. If None, the graph has its own.
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
