"""Samples, losses and updates do not depend on the number of ranks, so that a run may change it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heedful.checkpoint import save
from heedful.train.trainer import Trainer
from tests.support.corpora import make_corpus, make_documents, train_on
from tests.support.generated_data import classification_rows, write_csv
from tests.support.processes import ForkServer, Job, final_weights, fork_server, read_outcome
from tests.support.tiny_runs import LARGE_EPS, TASKS, make_settings, relative_error, tensors_equal

MODULES = ("heedful.runs.pretrain.run", "heedful.runs.finetune.run")  # imported by the fork server
STABLE = {"train.optimizer.lr": 2e-2, "train.optimizer.eps": 1e-2, "train.precision": "float32"}
PRETRAIN_SETTINGS = {
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "max_seq_length": 32,
    "pack_length": 64,
    "eval_fraction": 0.1,
    "eval_every_steps": 25,
    "train.max_steps": 50,
    "train.batch_size": 7,
    "train.max_tokens_per_microbatch": 130,
}
FINETUNE_SETTINGS = {
    "train.max_steps": 50,
    "train.batch_size": 6,
    "train.max_tokens_per_microbatch": 40,
    "fit.eval_every_epochs": 4,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """The fork server that starts the processes of ranks."""
    with fork_server(*MODULES) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("task", ["packed", pytest.param("partial head", marks=pytest.mark.slow)])
def test_one_two_and_four_ranks_agree_in_float64(server: ForkServer, tmp_path: Path, task: str) -> None:
    """Packed rows of different lengths in micro-batches; some ranks have no sample or no gradient in a step."""
    train = {"max_steps": 6, "optimizer": LARGE_EPS, "max_tokens_per_microbatch": 45}
    loaded, objective, samples = TASKS[task](0.0)
    single = Trainer(loaded.double(), objective, samples, make_settings(train, {})[0])
    steps = list(single)
    for size in (2, 4):
        job = Job(
            output_dir=str(tmp_path / str(size)), kind="updates", task=task, dropout=0.0, train=train, float64=True
        )
        assert server.run(job, size) == [0] * size
        assert all(tensors_equal(final_weights(job), final_weights(job, rank)) for rank in range(1, size))
        assert next(iter(final_weights(job).values())).dtype == torch.float64
        assert relative_error(final_weights(job), single.loaded.named_tensors()) < 1e-10
        assert read_outcome(job)["losses"] == pytest.approx([step.loss for step in steps], rel=1e-10)
        assert read_outcome(job)["tokens"] == [step.tokens for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pretrain", pytest.param("finetune", marks=pytest.mark.slow)])
def test_a_run_of_two_ranks_resumes_on_one_and_on_four(server: ForkServer, tmp_path: Path, kind: str) -> None:
    if kind == "pretrain":
        texts = make_documents(90)
        data, settings = make_corpus(tmp_path, texts, train_on(texts)).folder, PRETRAIN_SETTINGS
    else:
        data = write_csv(tmp_path / "a.csv", classification_rows(28))
        save(TASKS["classify"](0.0)[0], tmp_path / "base")
        settings = FINETUNE_SETTINGS | {"init.model": tmp_path / "base"}
    assignments = tuple(f"{name}={value}" for name, value in (settings | STABLE).items())
    job = Job(
        output_dir=str(tmp_path / "out"),
        kind=kind,
        folder=str(tmp_path / "run"),
        data=str(data),
        assignments=assignments,
    )
    assert server.run(replace(job, folder=str(tmp_path / "uninterrupted"))) == [0], read_outcome(job)
    for size, stop in ((2, 17), (1, 31), (4, 0)):
        assert server.run(replace(job, stop_step=stop), size) == [0] * size
        assert {read_outcome(job, rank)["stop_reason"] for rank in range(size)} == {
            "interrupted" if stop else "completed"
        }
    lines, expected = (
        [json.loads(line) for line in (tmp_path / name / "journal.jsonl").read_text().splitlines()]
        for name in ("run", "uninterrupted")
    )
    losses, expected_losses = (
        [record["loss"] for record in records if "loss" in record] for records in (lines, expected)
    )
    assert len(losses) == 50 and losses == pytest.approx(expected_losses, rel=1e-5)
