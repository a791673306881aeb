"""Batches of a step: which steps a loader continues with."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from heedful.errors import HeedfulError
from heedful.train import batches
from heedful.train.batches import StepDataset, StepLoader
from tests.support.tiny_runs import trainer


def dataset() -> StepDataset:
    made = trainer()
    return StepDataset(samples=made.samples, objective=made.objective, order=made.order, rank=0, ranks=1, max_tokens=30)


def test_a_loader_reads_the_steps_of_its_dataset_in_order() -> None:
    steps = dataset()
    loader = StepLoader(steps, 2, num_workers=2)
    for number in (2, 3, 4):
        assert loader.continues(steps, number) and not loader.continues(steps, number + 1)
        expected, read = steps[number], next(loader)
        assert [micro.keys for micro, _ in read.micro_batches] == [micro.keys for micro, _ in expected.micro_batches]
        for (_, batch), (_, other) in zip(read.micro_batches, expected.micro_batches, strict=True):
            assert batch.packed.tokens.equal(other.packed.tokens) and batch.targets.equal(other.targets)


def test_a_loader_does_not_continue_another_dataset() -> None:
    steps = dataset()
    loader = StepLoader(steps, 0, num_workers=1)
    assert loader.continues(replace(steps), 0)
    assert not loader.continues(replace(steps, max_tokens=20), 0)
    assert not loader.continues(replace(steps, samples=list(steps.samples)), 0)


def test_a_system_that_cannot_fork_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(HeedfulError, match="cannot fork processes: set it to 0"):
        StepLoader(dataset(), 0, num_workers=1)


def test_signals_to_the_process_group_do_not_reach_workers() -> None:
    loader = StepLoader(dataset(), 0, num_workers=1)
    next(loader)
    (worker,) = loader._batches._workers  # type: ignore[attr-defined]
    assert os.getsid(worker.pid) == worker.pid != os.getsid(0)
