"""How fast a model answers on this machine: latency of one input, and throughput of a packed batch."""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from heedful.checkpoint import Loaded
from heedful.packed import Packed

LENGTHS = (16, 64, 256)  # tokens
ROUNDS = 100
BATCH = 4096  # tokens of the batch for throughput, in sequences of 64


def measure_latency(loaded: Loaded, rounds: int | None = None) -> dict[str, Any]:
    """{"latency": {tokens: {"p50", "p99"}} in milliseconds, "throughput" in tokens a second}: forward passes alone.

    float32, as the folder is loaded; without tokenizing. A decoder beside the encoder reads as many tokens, at once.
    """
    limit = loaded.limit or max(LENGTHS)
    vocabulary = loaded.config.model.embedding.vocabulary
    device, generator = next(loaded.parameters()).device, torch.Generator().manual_seed(0)

    def batch(length: int, count: int = 1) -> Packed:
        ids = torch.randint(vocabulary, (count, length), generator=generator)
        return Packed.of(ids.tolist()).to(device)

    def seconds(given: Packed, times: int) -> list[float]:
        found = []
        for _ in range(times + 2):  # the first two warm up
            start = time.perf_counter()
            loaded(given, given if loaded.needs_target else None)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - start)
        return sorted(found[2:])

    training = loaded.training
    loaded.eval()
    try:
        with torch.inference_mode():
            times = {length: seconds(batch(length), rounds or ROUNDS) for length in LENGTHS if length <= limit}
            length = min(64, limit)
            many = statistics.median(seconds(batch(length, BATCH // length), 3))
    finally:
        loaded.train(training)
    return {
        "latency": {
            str(length): {
                "p50": round(1000 * statistics.median(found), 2),
                "p99": round(1000 * percentile(found, 99), 2),
            }
            for length, found in times.items()
        },
        "throughput": round(BATCH // length * length / many),
    }


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Without Python's collector, which looks at all data that a process holds, however little of it is measured."""
    before = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def percentile(values: Sequence[float], per_cent: int) -> float:
    """The least of these sorted values that so many per cent of them do not exceed (nearest rank).

    >>> percentile(range(1, 101), 99), percentile(range(1, 6), 99)
    (99, 5)
    """
    return values[-(-per_cent * len(values) // 100) - 1]


def resident_bytes() -> int:
    """The bytes of this process that are in memory now; where the system does not tell, the most it has had."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_memory()


def peak_memory() -> int:
    """The most bytes this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
