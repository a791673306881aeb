"""What is measured of a model's speed has the right shape, and leaves the model as it was."""

from __future__ import annotations

import gc
from pathlib import Path

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
    seen: list[tuple[int, int, bool]] = []
    forward = ModelBundle.forward

    def noted(self: ModelBundle, batch: Packed, target: None) -> object:
        seen.append((len(batch.bounds) - 1, len(batch.tokens), self.training))
        assert torch.is_inference_mode_enabled()
        return forward(self, batch)

    monkeypatch.setattr(ModelBundle, "forward", noted)
    single.train()
    speeds = measure_latency(single, rounds=5)
    assert single.training and not any(training for _, _, training in seen)
    single.eval()
    assert speeds.keys() == {"latency", "throughput"} and isinstance(speeds["throughput"], int)
    assert speeds["latency"].keys() == {"16"}, "this model reads 48 tokens"
    assert 0 < speeds["latency"]["16"]["p50"] <= speeds["latency"]["16"]["p99"] and speeds["throughput"] > 0
    assert seen[:7] == [(1, 16, False)] * 7 and set(seen[7:]) == {
        (timing.BATCH_TOKENS // 48, timing.BATCH_TOKENS // 48 * 48, False)
    }


def test_every_length_that_the_model_reads(single: ModelBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelBundle, "max_length", 64)
    monkeypatch.setattr(ModelBundle, "forward", lambda self, batch, target: None)
    assert measure_latency(single, rounds=2)["latency"].keys() == {"16", "64"}
    monkeypatch.setattr(ModelBundle, "max_length", None)
    assert measure_latency(single, rounds=2)["latency"].keys() == {"16", "64", "256"}
    monkeypatch.setattr(ModelBundle, "max_length", 8)
    assert measure_latency(single, rounds=2)["latency"] == {}


def test_memory_is_of_this_process() -> None:
    before = peak_memory()
    held = bytearray(300_000_000)
    held[::4096] = b"x" * len(held[::4096])
    assert peak_memory() >= max(before, 300_000_000)
    lines = Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else []
    for line in lines:
        if line.startswith("VmHWM"):
            assert peak_memory() == pytest.approx(1024 * int(line.split()[1]), rel=0.05)


def test_one_of_a_hundred_is_above_the_99th_percentile() -> None:
    assert percentile([float(number) for number in range(1, 101)], 99) == 99
    assert [percentile([1.0, 2.0], each) for each in (50, 51, 100)] == [1, 2, 2] and percentile([3.0], 99) == 3


def test_nothing_is_collected_while_speed_is_measured() -> None:
    for before in (True, False):
        (gc.enable if before else gc.disable)()
        with gc_disabled():
            assert not gc.isenabled()
        is_enabled = gc.isenabled()
        gc.enable()
        assert is_enabled is before
