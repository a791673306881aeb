"""Batches of a step: the steps that a loader continues with, workers, and a thread that prepares the next step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from heedful.errors import HeedfulError, HeedfulWarning
from heedful.objectives import Batch, Sample
from heedful.train import batches
from heedful.train.batches import StepDataset, StepLoader, pin_batch
from heedful.train.trainer import Stage, Trainer
from tests.support.tiny_runs import (
    TASKS,
    RecordingObjective,
    copy_state,
    make_settings,
    make_trainer,
    records,
    tensors_equal,
)


def dataset(task: str = "classify") -> StepDataset:
    """Return the batches of all steps of a task."""
    training = make_trainer(task)
    return StepDataset(
        samples=training.samples, objective=training.objective, order=training.order, rank=0, ranks=1, max_tokens=30
    )


def test_a_loader_reads_the_steps_of_its_dataset_in_order() -> None:
    steps = dataset()
    loader = StepLoader(steps, 2, num_workers=2)
    for number in (2, 3, 4):
        assert loader.continues(steps, number) and not loader.continues(steps, number + 1)
        expected, read = steps[number], next(loader)
        assert [micro.keys for micro, _ in read.micro_batches] == [micro.keys for micro, _ in expected.micro_batches]
        for (_, batch), (_, expected_batch) in zip(read.micro_batches, expected.micro_batches, strict=True):
            assert batch.packed.tokens.equal(expected_batch.packed.tokens) and batch.targets.equal(
                expected_batch.targets
            )


def test_a_loader_does_not_continue_another_dataset() -> None:
    steps = dataset()
    loader = StepLoader(steps, 0, num_workers=1)
    assert loader.continues(replace(steps), 0)
    assert not loader.continues(replace(steps, max_tokens=20), 0)
    assert not loader.continues(replace(steps, samples=list(steps.samples)), 0)


def test_workers_need_a_system_that_can_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(HeedfulError, match="cannot fork processes: set it to 0"):
        StepLoader(dataset(), 0, num_workers=1)


def test_signals_to_the_process_group_do_not_reach_workers() -> None:
    loader = StepLoader(dataset(), 0, num_workers=1)
    next(loader)
    (worker,) = loader._worker_batches._workers  # type: ignore[attr-defined]
    assert os.getsid(worker.pid) == worker.pid != os.getsid(0)


# -- a thread that prepares the next step -------------------------------------------------------------------------


def prefetching_trainer(task: str = "classify", **train: Any) -> Trainer:
    """Return a trainer on the CPU that prepares batches in a thread, as trainers on GPUs do."""
    training = make_trainer(task, **train)
    training._prefetches = True
    return training


class ThreadRecorder(RecordingObjective):
    """An objective that records the thread in which each batch is made, and calls `before` before that."""

    def __init__(self, trainer: Trainer, before: Any = lambda: None) -> None:
        super().__init__(trainer)
        self.threads: list[str] = []
        self.before_batch = before
        self.term_weights, self.num_static_masks = self.objective.term_weights, self.objective.num_static_masks

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        self.threads.append(threading.current_thread().name)
        self.before_batch()
        return super().batch(samples, keys)


def batch_threads() -> list[str]:
    """Return the names of running threads that prepare batches."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.fixture(autouse=True)
def _check_that_threads_end() -> Iterator[None]:
    yield
    assert not batch_threads()


@pytest.mark.parametrize("task", ["classify", "tag", "packed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_training_with_the_thread_has_the_same_bits(task: str, workers: int) -> None:
    plain, prefetching = make_trainer(task), prefetching_trainer(task, num_workers=workers)
    recorder = ThreadRecorder(prefetching)
    steps = list(prefetching)
    assert records(steps) == records(list(plain))
    assert tensors_equal(copy_state(prefetching)[0], copy_state(plain)[0])
    if not workers:  # the main thread makes only the first step, and nobody a step after the last one
        first = len([name for name in recorder.threads if name == "MainThread"])
        assert {*recorder.threads[:first]} == {"MainThread"} and {*recorder.threads[first:]} == {"batches_0"}
        expected = ThreadRecorder(plain_trainer := make_trainer(task))
        list(plain_trainer)
        assert recorder.batches == expected.batches and recorder.keys == expected.keys
    assert prefetching._loader is None and not batch_threads()


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_run_continues_after_its_last_step(stop: int) -> None:
    """Batches that were prepared ahead of time are not part of a checkpoint."""
    uninterrupted, prefetching = make_trainer("packed"), prefetching_trainer("packed")
    expected = records(list(uninterrupted))
    steps = iter(prefetching)
    first = list(islice(steps, stop))
    state = copy_state(prefetching)
    steps.close()  # type: ignore[attr-defined]
    for resumed in (prefetching_trainer("packed"), make_trainer("packed")):
        resumed.load_state(*state)
        assert records(first) + records(list(resumed)) == expected
        assert tensors_equal(copy_state(resumed)[0], copy_state(uninterrupted)[0])


def test_stages_are_the_same_with_the_thread() -> None:
    outcomes = []
    for prefetches in (False, True):
        loaded, objective, samples = TASKS["classify"](0.1)
        later = [Stage(0.3, samples[:7], 3), Stage(0.7, samples[4:], 2)]
        training = Trainer(loaded, objective, samples, make_settings({}, {})[0], later_stages=later)
        training._prefetches = prefetches
        outcomes.append((records(list(training)), copy_state(training)[0]))
    assert outcomes[0][0] == outcomes[1][0] and tensors_equal(outcomes[0][1], outcomes[1][1])


class UnreadableError(ValueError):
    """An error that only these tests raise."""


def test_an_error_in_the_thread_is_raised_in_its_step() -> None:
    training, faulty = prefetching_trainer(), False

    def fail() -> None:
        if faulty:
            raise UnreadableError(threading.current_thread().name)

    ThreadRecorder(training, fail)
    steps = iter(training)
    next(steps)  # the thread prepares the second step
    assert training._loader is not None and training._loader._pending is not None
    training._loader._pending.result()
    faulty = True
    next(steps)
    with pytest.raises(UnreadableError, match="batches_0"):
        next(steps)
    assert training.step == 2 and training._loader is None
    faulty = False
    list(training)  # now without a fault
    uninterrupted = make_trainer()
    list(uninterrupted)
    assert tensors_equal(copy_state(training)[0], copy_state(uninterrupted)[0])


def test_ctrl_c_while_waiting_for_a_batch() -> None:
    training, is_slow = prefetching_trainer(), threading.Event()

    def wait() -> None:
        if is_slow.is_set():
            time.sleep(0.3)

    ThreadRecorder(training, wait)
    steps = iter(training)
    next(steps)
    is_slow.set()
    next(steps)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        list(steps)
    timer.join()
    assert not batch_threads() and training._loader is None
    is_slow.clear()
    state = copy_state(training)
    resumed, uninterrupted = make_trainer(), make_trainer()
    resumed.load_state(*state)
    for trainer in (training, resumed, uninterrupted):
        list(trainer)
    assert tensors_equal(copy_state(training)[0], copy_state(uninterrupted)[0]) and tensors_equal(
        copy_state(resumed)[0], copy_state(uninterrupted)[0]
    )


def test_smaller_micro_batches_after_oom_with_the_thread() -> None:
    outcomes = []
    for create in (make_trainer, prefetching_trainer):
        training: Trainer = create("tag", max_tokens_per_microbatch=60, shrink_batch_on_oom=True)

        def fail(batch: Batch, training: Trainer = training) -> None:
            if training.step == 1 and len(batch.packed.tokens) > 40:
                raise MemoryError

        RecordingObjective(training, fail)
        with pytest.warns(HeedfulWarning, match="step 2: memory was not enough"):
            steps = list(training)
        outcomes.append((records(steps), copy_state(training)[0]))
    assert outcomes[0][0] == outcomes[1][0] and tensors_equal(outcomes[0][1], outcomes[1][1])


def test_leaving_the_loop_early_ends_the_thread() -> None:
    training = prefetching_trainer()
    for step in training:
        if step.number == 3:
            break
    assert training._loader is None and not batch_threads()


def test_a_pinned_batch_has_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", copy)
    for task in ("classify", "packed"):
        ((_, batch), *_), copies[:] = dataset(task)[0].micro_batches, []
        result = pin_batch(batch)
        assert len(copies) == 5 + (batch.rows is not None)  # tokens, positions, types, targets, weights
        assert result.packed.tokens.equal(batch.packed.tokens) and result.targets.equal(batch.targets)
        assert result.packed.bounds == batch.packed.bounds and result.groups == batch.groups
        assert result.packed.extremes == batch.packed.id_extremes()
        assert result.weight_sum == batch.total_weight
