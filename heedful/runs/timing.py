"""How fast a model answers on this machine: latency of one input, and throughput of a packed batch."""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from heedful.checkpoint import ModelBundle
from heedful.packed import Packed
from heedful.runs.results import JsonObject

LENGTHS = (16, 64, 256)  # tokens
ROUNDS = 100
BATCH = 4096  # tokens of the batch for throughput, in sequences of 64


def measure_latency(loaded: ModelBundle, rounds: int | None = None) -> JsonObject:
    """Time forward passes in the precision of the model, without tokenizing.

    A decoder beside an encoder reads as many tokens, in one pass.

    Returns:
        "latency": p50 and p99 in milliseconds by number of tokens; "throughput": tokens a second of a packed batch.
    """
    limit = loaded.max_length or max(LENGTHS)
    vocab_size = loaded.config.model.embedding.vocabulary
    device, generator = next(loaded.parameters()).device, torch.Generator().manual_seed(0)

    def batch(length: int, count: int = 1) -> Packed:
        ids = torch.randint(vocab_size, (count, length), generator=generator)
        return Packed.of(ids.tolist()).to(device)

    def seconds(inputs: Packed, times: int) -> list[float]:
        durations = []
        for _ in range(times + 2):  # two warm-up rounds
            start = time.perf_counter()
            loaded(inputs, inputs if loaded.needs_target else None)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            durations.append(time.perf_counter() - start)
        return sorted(durations[2:])

    training = loaded.training
    loaded.eval()
    try:
        with torch.inference_mode():
            times = {length: seconds(batch(length), rounds or ROUNDS) for length in LENGTHS if length <= limit}
            length = min(64, limit)
            batch_seconds = statistics.median(seconds(batch(length, BATCH // length), 3))
    finally:
        loaded.train(training)
    return {
        "latency": {
            str(tokens): {
                "p50": round(1000 * statistics.median(durations), 2),
                "p99": round(1000 * percentile(durations, 99), 2),
            }
            for tokens, durations in times.items()
        },
        "throughput": round(BATCH // length * length / batch_seconds),
    }


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable Python's garbage collector, which visits all data of the process during a measurement."""
    before = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def percentile(values: Sequence[float], percent: int) -> float:
    """Percentile of sorted values by the nearest-rank method.

    >>> percentile(range(1, 101), 99), percentile(range(1, 6), 99)
    (99, 5)
    """
    return values[-(-percent * len(values) // 100) - 1]


def resident_bytes() -> int:
    """Resident memory of this process in bytes; its peak where the system does not report the current value."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_memory()


def peak_memory() -> int:
    """Peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
