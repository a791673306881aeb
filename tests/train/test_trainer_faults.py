"""Faults in training: losses and gradients that are not finite, too little memory, and memory leaks."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from heedful.errors import HeedfulError, HeedfulWarning
from heedful.objectives import Batch
from heedful.train.trainer import DivergedError
from tests.support import processes
from tests.support.tiny_runs import (
    FAULTS,
    LARGE_EPS,
    FaultyObjective,
    RecordingObjective,
    copy_state,
    copy_weights,
    make_trainer,
    records,
    relative_error,
    tensors_equal,
)

# -- numbers that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nan loss", "nan loss only", "infinite loss", "nan gradient"])
def test_a_nonfinite_step_stops_and_leaves_weights_unchanged(fault: str) -> None:
    trainer = make_trainer()
    trainer.objective = FaultyObjective(trainer.objective, trainer, FAULTS[fault], step=6)
    for _ in range(5):
        trainer.train_step()
    before = copy_state(trainer)
    with pytest.raises(DivergedError, match=r"^step 6: the loss is .* and the norm of the gradient ") as caught:
        trainer.train_step()
    assert "The weights are those from before this step. Lower train.optimizer.lr" in str(caught.value)
    name = "encoder.blocks.0.mlp.up.weight" if fault == "nan gradient" else "embedding.tokens.weight"
    assert (f"gradients that are not finite: {name}" in str(caught.value)) == (fault != "nan loss only")
    assert caught.value.step.number == 6 and not caught.value.step.updated
    assert math.isfinite(caught.value.step.loss) == (fault == "nan gradient")
    assert math.isfinite(caught.value.step.grad_norm) == (fault == "nan loss only")
    assert caught.value.step.record["skipped"] is True
    after = copy_state(trainer)
    assert tensors_equal(before[0], after[0]) and before[1] == after[1]
    assert all(tensor.isfinite().all() for tensor in after[0].values())
    uninterrupted = make_trainer()
    list(uninterrupted)
    list(trainer)  # the fault is over
    assert tensors_equal(copy_state(trainer)[0], copy_state(uninterrupted)[0])


def test_nonfinite_steps_are_skipped_up_to_the_limit() -> None:
    trainer = make_trainer(max_nonfinite_steps=2)
    trainer.objective = FaultyObjective(trainer.objective, trainer, FAULTS["nan loss"], step=3, num_steps=2)
    updated: list[bool] = []
    before: dict[str, Tensor] = {}
    for step in trainer:
        updated.append(step.updated)
        if step.number == 2:
            before = copy_weights(trainer)
        if step.number in (3, 4):
            assert tensors_equal(before, copy_weights(trainer)) and math.isnan(step.loss) and step.record["skipped"]
    assert updated == [True] * 2 + [False] * 2 + [True] * 8
    assert {int(value) for name, value in trainer.state()[0].items() if name.endswith(".steps")} == {10}
    assert all(tensor.isfinite().all() for tensor in trainer.state()[0].values())


def test_more_nonfinite_steps_in_a_row_than_the_limit_stop() -> None:
    trainer = make_trainer(max_nonfinite_steps=2)
    trainer.objective = FaultyObjective(trainer.objective, trainer, FAULTS["nan gradient"], step=3, num_steps=3)
    with pytest.raises(DivergedError, match=r"^step 5"):
        list(trainer)
    trainer = make_trainer(max_nonfinite_steps=2)
    trainer.objective = FaultyObjective(trainer.objective, trainer, FAULTS["nan gradient"], step=3, num_steps=2)
    trainer.objective = FaultyObjective(trainer.objective, trainer, FAULTS["nan gradient"], step=6, num_steps=2)
    assert len(list(trainer)) == 12
    trainer = make_trainer(max_nonfinite_steps=2)
    trainer.objective = FaultyObjective(trainer.objective, trainer, FAULTS["nan gradient"], step=3, num_steps=3)
    for _ in range(3):
        trainer.train_step()
    resumed = make_trainer(max_nonfinite_steps=2)
    resumed.load_state(*copy_state(trainer))
    resumed.objective = FaultyObjective(resumed.objective, resumed, FAULTS["nan gradient"], step=4, num_steps=2)
    with pytest.raises(DivergedError, match=r"^step 5"):
        list(resumed)


# -- too little memory ------------------------------------------------------------------------------------------------

ALLOCATOR_ERROR = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


def out_of_memory_above(
    tokens: int, error: Callable[[], Exception] = lambda: RuntimeError(ALLOCATOR_ERROR)
) -> Callable[[Batch], None]:
    """Return a function that raises an error for a batch of more than `tokens` tokens."""

    def check(batch: Batch) -> None:
        if len(batch.packed.tokens) > tokens:
            raise error()

    return check


def test_out_of_memory_is_recognised_in_torch_messages() -> None:
    with pytest.raises(RuntimeError, match=r"DefaultCPUAllocator: can't allocate memory: you tried to allocate"):
        torch.empty(2 * 10**12, dtype=torch.float32)


@pytest.mark.parametrize(
    "error",
    [
        lambda: RuntimeError(ALLOCATOR_ERROR),
        MemoryError,
        lambda: RuntimeError("std::bad_alloc"),
        lambda: RuntimeError("could not create a primitive"),
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        lambda: RuntimeError("Triton Error [CUDA]: out of memory"),
        lambda: RuntimeError("NCCL Error 1: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 24 bytes"),
    ],
)
def test_out_of_memory_errors_of_all_kinds_are_recognised(error: Callable[[], Exception]) -> None:
    trainer, uninterrupted = make_trainer(max_tokens_per_microbatch=60), make_trainer(max_tokens_per_microbatch=60)
    trainer.train_step()
    before = copy_state(trainer)
    recorder = RecordingObjective(trainer, out_of_memory_above(20, error))
    with pytest.raises(
        HeedfulError, match=r"^step 2: memory was not enough for a micro-batch of (\d\d) tokens"
    ) as caught:
        trainer.train_step()
    (number,) = [int(word) for word in str(caught.value).split() if word.isdecimal() and int(word) > 20]
    assert (
        f"nothing was changed. Set train.max_tokens_per_microbatch below {number}, train.shrink_batch_on_oom = true or"
        in str(caught.value)
    )
    assert caught.value.__context__ is None  # a context would keep the memory alive
    after = copy_state(trainer)
    assert tensors_equal(before[0], after[0]) and before[1] == after[1]
    trainer.objective = recorder.objective
    list(trainer)
    list(uninterrupted)
    assert tensors_equal(copy_state(trainer)[0], copy_state(uninterrupted)[0])


@pytest.mark.parametrize("max_tokens", [10**6, 60, 20, 8])
def test_smaller_micro_batches_after_oom_have_the_same_loss(max_tokens: int) -> None:
    trainer, uninterrupted = (
        make_trainer("tag", 0.0, max_tokens_per_microbatch=max_tokens, shrink_batch_on_oom=True, optimizer=LARGE_EPS)
        for _ in range(2)
    )
    longest = max(map(len, trainer.samples))
    recorder = RecordingObjective(trainer, out_of_memory_above(longest))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        steps = list(trainer)
    message = r"step \d+: memory was not enough for a micro-batch of (\d+) tokens; from here on they have (\d+) at most"
    matches = [re.fullmatch(message, str(item.message)) for item in warned if item.category is HeedfulWarning]
    assert bool(matches) == (max_tokens > longest) and len(matches) == len(warned)
    assert all(match is not None and int(match[2]) == int(match[1]) // 2 for match in matches)
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in uninterrupted], rel=1e-6)
    assert relative_error(copy_weights(trainer), copy_weights(uninterrupted)) < 3e-6
    computed = [batch for batch in recorder.batches if sum(len(trainer.samples[n]) for n in batch) <= longest]
    assert sum(map(len, computed)) >= 48


@pytest.mark.parametrize("limit", [25, 18, 11, 3])
def test_oom_on_a_single_sample_stops(limit: int) -> None:
    trainer = make_trainer(
        "tag", shrink_batch_on_oom=True, max_tokens_per_microbatch=5, batch_size=16
    )  # samples are longer than the limit, which must not grow
    RecordingObjective(trainer, out_of_memory_above(limit))
    if limit >= max(map(len, trainer.samples)):
        assert len(list(trainer)) == 12
        return
    with pytest.raises(HeedfulError, match=r"\d+ tokens, which cannot be split.*train.gradient_checkpointing"):
        list(trainer)
    assert trainer.step == 0 and trainer.state()[1]["tokens"] <= 5


def test_a_resumed_run_keeps_the_smaller_micro_batches() -> None:
    trainer = make_trainer(max_tokens_per_microbatch=60, shrink_batch_on_oom=True)
    recorder = RecordingObjective(trainer, out_of_memory_above(40))
    with pytest.warns(HeedfulWarning, match="at most"):
        deque(islice(trainer, 4))
    state = copy_state(trainer)
    assert state[1]["tokens"] < 40
    trainer.objective = recorder.objective
    resumed = make_trainer(max_tokens_per_microbatch=60, shrink_batch_on_oom=True)
    resumed.load_state(*state)
    assert records(list(resumed)) == records(list(trainer))
    assert tensors_equal(copy_state(resumed)[0], copy_state(trainer)[0])


def test_other_errors_are_not_taken_for_oom() -> None:
    trainer = make_trainer(shrink_batch_on_oom=True)
    RecordingObjective(trainer, out_of_memory_above(0, lambda: RuntimeError("something else")))
    with pytest.raises(RuntimeError, match=r"^something else$"):
        trainer.train_step()
    assert not trainer.loaded.training


MEMORY_LIMIT_SCRIPT = """
import resource, sys, warnings
import torch
from pathlib import Path
from heedful.checkpoint import BundleConfig, create
from heedful.model.config import Classes, EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.errors import HeedfulError
from heedful.objectives import Sample
from heedful.tasks.classify import Classify
from heedful.train.trainer import *
torch.set_num_threads(1)
embedding = EmbeddingConfig(vocabulary=50, width=256, positions=Learned(count=256), types=2, padding=0, norm="layer")
encoder = StackConfig(width=256, layers=2, heads=4, head_width=64, inner_width=1024)
model = ModelConfig(embedding=embedding, encoder=encoder)
loaded = create(BundleConfig(family="heedful", model=model, head=Classes(labels=("a", "b"))), None, seed=1)
task = Classify(tokenizer=None, limit=256, labels=("a", "b"))
samples = [Sample.of([[7] * 256], [[0] * 256], target=number % 2) for number in range(64)]
shrink = sys.argv[1] == "shrink"
budget = 10**6
settings = TrainSettings(
    max_steps=3,
    batch_size=64,
    max_tokens_per_microbatch=budget,
    precision="float32",
    shrink_batch_on_oom=shrink,
)
trainer = Trainer(loaded, task, samples, settings)
small = Trainer(loaded, task, samples[:2], settings)
small._accumulate_gradients(small._step_batches())
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)
try:
    print([round(step.loss, 4) for step in trainer], trainer.state()[1]["tokens"])
except HeedfulError as error:
    print(trainer.step, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shrink", "stop"])
def test_training_continues_under_a_real_memory_limit(mode: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", MEMORY_LIMIT_SCRIPT, mode],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
    )
    assert process.returncode == 0, process.stderr
    if mode == "stop":
        assert process.stdout.startswith("0 step 1: memory was not enough for a micro-batch of 16,384 tokens")
    else:
        assert "from here on they have 8,192 at most" in process.stderr
        assert int(process.stdout.split()[-1]) < 16384 and process.stdout.count("0.") == 3


# -- memory leaks -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [600, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_and_open_files_stay_constant(tmp_path: Path, steps: int) -> None:
    train = {"max_steps": steps, "batch_size": 2, "schedule": {"kind": "constant"}}
    job = processes.Job(output_dir=str(tmp_path), kind="memory", train=train)
    with processes.fork_server() as server:
        assert server.run(job) == [0]
    measurements = np.array(processes.read_outcome(job)["measurements"], dtype=np.float64)
    assert len(measurements) == 19 and len(set(measurements[:, 2])) == 1
    slope = np.polyfit(measurements[:, 0], measurements[:, 1], 1)[0]
    assert slope * 10**4 < 2**20 or (steps < 10**4 and measurements[-1, 1] - measurements[0, 1] < 2**20)
