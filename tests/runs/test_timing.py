"""Measurements of speed and memory: which batches are timed, and that the model is left as it was."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from heedful.checkpoint import ModelBundle, load
from heedful.packed import Packed
from heedful.runs import timing
from heedful.runs.timing import gc_disabled, measure_latency, peak_memory, percentile
from tests.support.model_folders import make_model_dir


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> ModelBundle:
    return load(make_model_dir(tmp_path_factory.mktemp("model"), "single"))


def test_latency_and_throughput(single: ModelBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[tuple[int, int]] = []  # (number of sequences, number of tokens) of each forward pass
    forward = ModelBundle.forward

    def recorded_forward(self: ModelBundle, batch: Packed, target: None) -> object:
        batches.append((len(batch.bounds) - 1, len(batch.tokens)))
        assert torch.is_inference_mode_enabled()
        assert not self.training
        return forward(self, batch)

    monkeypatch.setattr(ModelBundle, "forward", recorded_forward)
    single.train()
    monkeypatch.setattr(timing, "ROUNDS", 5)
    speeds = measure_latency(single)
    assert single.training, "the model is in training mode again"
    single.eval()
    assert speeds.keys() == {"latency", "throughput"}
    assert isinstance(speeds["throughput"], int)
    assert speeds["throughput"] > 0
    assert speeds["latency"].keys() == {"16"}, "this model reads 48 tokens, so 64 and 256 are left out"
    latency = speeds["latency"]["16"]
    assert 0 < latency["p50"] <= latency["p99"]
    assert batches[:7] == [(1, 16)] * 7, "two passes to warm up, and five timed ones"
    num_sequences = timing.BATCH_TOKENS // 48
    assert set(batches[7:]) == {(num_sequences, num_sequences * 48)}, "the batch for throughput"


def test_every_length_that_the_model_reads(single: ModelBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 2)
    monkeypatch.setattr(ModelBundle, "max_length", 64)
    monkeypatch.setattr(ModelBundle, "forward", lambda self, batch, target: None)
    assert measure_latency(single)["latency"].keys() == {"16", "64"}
    monkeypatch.setattr(ModelBundle, "max_length", None)
    assert measure_latency(single)["latency"].keys() == {"16", "64", "256"}
    monkeypatch.setattr(ModelBundle, "max_length", 8)
    assert measure_latency(single)["latency"] == {}


def test_slow_passes_end_when_time_is_up(single: ModelBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 100)
    monkeypatch.setattr(timing, "BATCH_TOKENS", 4096)
    now = itertools.count(step=0.25)  # seconds; the clock is read twice for each pass
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    passes: list[int] = []  # tokens of each pass
    monkeypatch.setattr(ModelBundle, "max_length", None)
    monkeypatch.setattr(ModelBundle, "forward", lambda self, batch, target: passes.append(len(batch.tokens)))
    measure_latency(single)
    assert [passes.count(length) for length in timing.LENGTHS] == [12] * 3
    passes.clear()
    measure_latency(single, max_seconds=20.0)
    assert [passes.count(length) for length in timing.LENGTHS] == [40] * 3
    passes.clear()
    measure_latency(single, max_seconds=1e9)
    assert [passes.count(length) for length in timing.LENGTHS] == [102] * 3


def test_memory_is_of_this_process() -> None:
    before = peak_memory()
    block = bytearray(300_000_000)
    block[::4096] = b"x" * len(block[::4096])  # writes to each page, so that it is in memory
    assert peak_memory() >= max(before, 300_000_000)
    status = Path("/proc/self/status")  # on Linux
    for line in status.read_text().splitlines() if status.exists() else []:
        if line.startswith("VmHWM"):  # peak resident memory in KiB
            assert peak_memory() == pytest.approx(1024 * int(line.split()[1]), rel=0.05)


def test_one_of_a_hundred_is_above_the_99th_percentile() -> None:
    assert percentile([float(number) for number in range(1, 101)], 99) == 99
    assert percentile([1.0, 2.0], 50) == 1
    assert percentile([1.0, 2.0], 51) == 2
    assert percentile([1.0, 2.0], 100) == 2
    assert percentile([3.0], 99) == 3


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_while_speed_is_measured(was_enabled: bool) -> None:
    if not was_enabled:
        gc.disable()
    try:
        with gc_disabled():
            assert not gc.isenabled()
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
