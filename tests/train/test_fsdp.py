"""Sharded training: losses, gradient norms and updates equal those of one process; checkpoints of shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heedful.errors import HeedfulWarning
from heedful.train.checkpoint import CheckpointManager
from heedful.train.trainer import Trainer
from tests.support.processes import ForkServer, Job, final_weights, fork_server, read_outcome, reproducible_files
from tests.support.tiny_runs import LARGE_EPS, TASKS, make_settings, relative_error, tensors_equal


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """The fork server that starts the processes of ranks."""
    with fork_server("heedful.train.fsdp", "heedful.train.checkpoint_sharded", "torch._dynamo") as running:
        yield running


NUM_STEPS = 6


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("task", "size", "shard", "settings"),
    [
        ("packed", 2, "all", {}),
        slow("partial head", 2, 2, {}),
        slow("tag", 2, 2, {"gradient_checkpointing": True}),
        slow("packed", 4, 2, {}),
        slow("partial head", 4, 2, {}),
        slow("packed", 4, 4, {"gradient_checkpointing": True}),
        slow("classify", 3, "all", {}),
    ],
)
def test_sharded_training_equals_replicated_training(
    server: ForkServer, tmp_path: Path, task: str, size: int, shard: Any, settings: dict[str, Any]
) -> None:
    """Ranks have different numbers of micro-batches; embeddings are tied, or the head is not always used."""
    train: dict[str, Any] = {"max_steps": 6, "optimizer": LARGE_EPS, "max_tokens_per_microbatch": 45}
    loaded, objective, samples = TASKS[task](0.0)
    single = Trainer(loaded.double(), objective, samples, make_settings(train, {})[0])
    steps = list(single)
    train |= {"data_parallel_shard_degree": shard} | settings
    job = Job(output_dir=str(tmp_path / "out"), kind="updates", task=task, dropout=0.0, train=train, float64=True)
    assert server.run(job, size) == [0] * size, [(tmp_path / "out" / f"rank-{n}.log").read_text() for n in range(size)]
    assert all(tensors_equal(final_weights(job), final_weights(job, rank)) for rank in range(1, size))
    assert relative_error(final_weights(job), single.loaded.named_tensors()) < 1e-10
    for rank in range(size):
        assert read_outcome(job, rank)["losses"] == pytest.approx([step.loss for step in steps], rel=1e-10)
        assert read_outcome(job, rank)["norms"] == pytest.approx([step.grad_norm for step in steps], rel=1e-9)
        assert read_outcome(job, rank)["tokens"] == [step.tokens for step in steps]


@pytest.mark.parametrize("task", ["packed", "packed, rms"])
def test_blocks_are_gathered_in_bfloat16(server: ForkServer, tmp_path: Path, task: str) -> None:
    """Blocks compute the same as with autocast alone, except for norms; updated and saved weights stay float32."""
    train: dict[str, Any] = {"max_steps": NUM_STEPS, "optimizer": LARGE_EPS, "precision": "bfloat16"}
    loaded, objective, samples = TASKS[task](0.0)
    single = Trainer(loaded, objective, samples, make_settings(train, {})[0])
    steps = list(single)
    train |= {"data_parallel_shard_degree": "all"}
    job = Job(
        output_dir=str(tmp_path / "out"), kind="updates", task=task, dropout=0.0, train=train, gather_rounded=True
    )
    assert server.run(job, 2) == [0, 0], [(tmp_path / "out" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert tensors_equal(final_weights(job), final_weights(job, 1))
    assert relative_error(final_weights(job), single.loaded.named_tensors()) < 0.05
    assert read_outcome(job)["losses"] == pytest.approx([step.loss for step in steps], rel=0.01)
    in_blocks = {name: tensor for name, tensor in final_weights(job).items() if ".blocks." in name}
    assert in_blocks and not [name for name, value in in_blocks.items() if value.equal(value.bfloat16().float())]


def test_gathered_weights_are_waited_for_before_they_are_read(server: ForkServer, tmp_path: Path) -> None:
    """To read numbers of a GPU that waits for a lost rank would take forever."""
    train = {"max_steps": 1, "data_parallel_shard_degree": "all"}
    job = Job(output_dir=str(tmp_path / "out"), kind="gather", task="packed", dropout=0.0, train=train)
    assert server.run(job, 2) == [0, 0], [(tmp_path / "out" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert [read_outcome(job, rank)["devices"] for rank in range(2)] == [["cpu"], ["cpu"]]


# -- sharded checkpoints ---------------------------------------------------------------------------------------------


def losses(folder: str | Path) -> list[float]:
    """Return the losses in the journal of a run."""
    lines = [json.loads(line) for line in (Path(folder) / "journal.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("sizes", [(2, 1, 2), slow((3, 1, 2)), slow((4, 2, 4))])
def test_sharded_checkpoints_resume_on_other_numbers_of_ranks(
    server: ForkServer, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """Fewer and more ranks read shards, ranks with shards read full weights; checkpoints include the best weights."""
    train: dict[str, Any] = {"optimizer": LARGE_EPS, "data_parallel_shard_degree": "all", "max_steps": NUM_STEPS}
    job = Job(output_dir=str(tmp_path / "out"), folder=str(tmp_path / "run"), task="packed", dropout=0.0, train=train)
    job = replace(job, evaluate="peak")
    assert server.run(replace(job, folder=str(tmp_path / "uninterrupted"))) == [0]
    expected = final_weights(job)
    for size, stop in zip(sizes, (2, 4, 0), strict=True):
        assert server.run(replace(job, stop_step=stop), size) == [0] * size, read_outcome(job)
        layout = list((tmp_path / "run" / "state").glob("step-*/layout.json"))
        assert len(layout) > 0 or size == 1
        assert {read_outcome(job, rank)["stop_reason"] for rank in range(size)} == {
            "interrupted" if stop else "completed"
        }
    assert read_outcome(job)["resumed_from"] == 3
    assert losses(job.folder) == pytest.approx(losses(tmp_path / "uninterrupted"), rel=1e-5)
    assert relative_error(final_weights(job), expected) < 1e-5
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(("is_async", "rank"), [slow(False, 1), slow(True, 0)])
def test_a_killed_rank_of_sharded_training_resumes(
    server: ForkServer, tmp_path: Path, is_async: bool, rank: int
) -> None:
    train = {"data_parallel_shard_degree": 2, "max_steps": NUM_STEPS}
    job = Job(output_dir=str(tmp_path / "out"), folder=str(tmp_path / "run"), task="packed", train=train)
    job = replace(job, fit={"async_checkpoint": is_async})
    assert server.run(replace(job, folder=str(tmp_path / "uninterrupted")), 2) == [0, 0]
    codes = server.run(replace(job, fault="SIGKILL", fault_step=4, faulty_rank=rank), 2)
    assert codes[rank] == -9 and codes[1 - rank] == 3
    assert server.run(job, 2) == [0, 0]
    assert 2 <= read_outcome(job)["resumed_from"] <= 3
    assert reproducible_files(job.folder) == reproducible_files(tmp_path / "uninterrupted")


def test_damaged_shards_are_detected(server: ForkServer, tmp_path: Path) -> None:
    train = {"data_parallel_shard_degree": "all", "max_steps": 2}
    assert server.run(Job(output_dir=str(tmp_path), folder=str(tmp_path / "run"), task="packed", train=train), 2) == [
        0,
        0,
    ]
    newest = max((tmp_path / "run" / "state").glob("step-*"))
    names = sorted(path.name for path in newest.iterdir())
    assert names == [
        "layout.json",
        "manifest.json",
        *(f"part-0000{number}-of-00002.safetensors" for number in (1, 2)),
        "values.json",
    ]
    for number, name in enumerate(names):
        damaged = tmp_path / str(number)
        shutil.copytree(newest.parent, damaged)
        if number % 2:
            (damaged / newest.name / name).unlink()
        else:
            content = bytearray((damaged / newest.name / name).read_bytes())
            content[len(content) // 2] ^= 1
            (damaged / newest.name / name).write_bytes(content)
        with pytest.warns(HeedfulWarning, match=f"{newest.name} is damaged: .*{name}.*; step 1 is used instead"):
            saved = CheckpointManager(damaged).load()
        assert saved is not None and saved.step == 1 and len(saved.tensors) > 20
