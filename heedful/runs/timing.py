"""Measurements on this machine: latency and throughput of a model, and memory of this process.

Every run measures its model at the end. `heedful bench` measures a model in each precision.
"""

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

LENGTHS = (16, 64, 256)  # input lengths for latency, in tokens
ROUNDS = 100  # timed forward passes per length, at most
MIN_ROUNDS = 10  # timed forward passes per length, at least
BATCH_TOKENS = 4096  # tokens of the packed batch for throughput
BATCH_LENGTH = 64  # tokens of each sequence in that batch, fewer if the model's maximum is lower


def measure_latency(loaded: ModelBundle, *, max_seconds: float = 1.0) -> JsonObject:
    """Time forward passes in the precision of the model, without tokenizing: ROUNDS for each length.

    For an encoder-decoder model, the target has the length of the source and is decoded in one pass.

    Args:
        loaded: The model.
        max_seconds: Time for each length. When it is up, a length gets no further passes beyond MIN_ROUNDS.

    Returns:
        "latency", the median and the 99th percentile in milliseconds as "p50" and "p99", by input length in tokens; and
        "throughput", the tokens per second of a packed batch. Of fewer than 100 passes, the 99th percentile is the
        slowest.
    """
    max_length = loaded.max_length or max(LENGTHS)
    vocab_size = loaded.config.model.embedding.vocabulary
    device = next(loaded.parameters()).device
    generator = torch.Generator().manual_seed(0)

    def random_batch(length: int, count: int = 1) -> Packed:
        """Return `count` sequences of `length` random tokens each."""
        ids = torch.randint(vocab_size, (count, length), generator=generator)
        return Packed.of(ids.tolist()).to(device)

    def time_passes(inputs: Packed, passes: int) -> list[float]:
        """Return the durations of forward passes in seconds, in ascending order."""
        durations: list[float] = []
        end = time.perf_counter() + max_seconds
        while len(durations) < passes + 2:  # two passes to warm up
            start = time.perf_counter()
            if start > end and len(durations) >= min(passes, MIN_ROUNDS) + 2:
                break
            loaded(inputs, inputs if loaded.needs_target else None)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            durations.append(time.perf_counter() - start)
        return sorted(durations[2:])

    training = loaded.training
    loaded.eval()
    try:
        with torch.inference_mode():
            seconds_by_length = {
                length: time_passes(random_batch(length), ROUNDS) for length in LENGTHS if length <= max_length
            }
            batch_length = min(BATCH_LENGTH, max_length)
            batch_size = BATCH_TOKENS // batch_length
            batch_seconds = statistics.median(time_passes(random_batch(batch_length, batch_size), 3))
    finally:
        loaded.train(training)
    return {
        "latency": {
            str(length): {
                "p50": round(1000 * statistics.median(seconds), 2),
                "p99": round(1000 * percentile(seconds, 99), 2),
            }
            for length, seconds in seconds_by_length.items()
        },
        "throughput": round(batch_size * batch_length / batch_seconds),
    }


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable Python's garbage collector within a `with` block, so that no collection slows a measurement down."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of sorted values by the nearest-rank method.

    >>> percentile(range(1, 101), 99), percentile(range(1, 6), 99)
    (99, 5)
    """
    rank = -(-percent * len(values) // 100)  # ceil(percent / 100 * n), from 1
    return values[rank - 1]


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, or its peak if the system reports no current value."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_memory()


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
