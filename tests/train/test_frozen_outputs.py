"""The cache of the outputs of frozen layers: training reads what it would compute, and an old cache is not used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heedful.train import frozen_outputs, output_cache
from heedful.train.frozen_outputs import SamplesWithFrozenOutputs, cache_frozen_outputs
from heedful.train.trainer import Trainer
from tests.support.tiny_runs import copy_weights, make_trainer, records, relative_error, tensors_equal


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the outputs of 16 samples in four part files."""
    monkeypatch.setattr(output_cache, "PART_ENTRIES", 4)


def cached_trainer(folder: Path, log: list[str] | None = None, task: str = "classify", **train: Any) -> Trainer:
    """Return a trainer with frozen layers whose outputs are cached in a folder."""
    frozen_trainer = make_trainer(task, **{"freeze_layers": 1, **train})
    cache_frozen_outputs(frozen_trainer, folder, (log if log is not None else []).append)
    return frozen_trainer


@pytest.mark.parametrize("task", ["classify", "tag"])
@pytest.mark.parametrize("train", [{}, {"num_workers": 1}, {"precision": "bfloat16"}])
def test_training_is_the_same_with_and_without_a_cache(task: str, train: dict[str, Any], tmp_path: Path) -> None:
    log: list[str] = []
    read, computed = (
        cached_trainer(tmp_path / "frozen", log, task, **train),
        make_trainer(task, freeze_layers=1, **train),
    )
    assert isinstance(read.samples, SamplesWithFrozenOutputs)
    steps, expected = list(read), list(computed)
    # outputs are computed in other batches, which may round differently
    tolerance = 2e-2 if train.get("precision") else 1e-5
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in expected], rel=tolerance)
    assert relative_error(copy_weights(read), copy_weights(computed)) < (0.2 if train.get("precision") else 1e-3)
    (message,) = log
    assert message.startswith("the embeddings and the lowest layer are frozen, without dropout; their outputs for 16")


def test_training_does_not_run_frozen_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen_trainer = cached_trainer(tmp_path / "frozen")
    monkeypatch.setattr(frozen_trainer.loaded.model.embedding, "forward", None)  # a call would raise
    list(frozen_trainer)


def test_a_missing_part_is_written_again_with_the_same_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "frozen"
    first = cached_trainer(folder)
    list(first)
    parts = sorted(folder.glob("part-*"))
    before = [path.read_bytes() for path in parts]
    assert len(parts) == 4
    parts[2].unlink()
    unchanged = {path: path.stat().st_ino for path in parts[:2]}
    second = cached_trainer(folder)
    assert [path.read_bytes() for path in parts] == before
    assert {path: path.stat().st_ino for path in unchanged} == unchanged, "other parts are not written again"
    assert records(list(second)) == records(list(cached_trainer(folder))) and tensors_equal(
        copy_weights(first), copy_weights(second)
    )


def test_a_cache_of_other_weights_samples_or_layers_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "frozen"
    cached_trainer(folder)
    before = (folder / "part-000000.safetensors").read_bytes()
    other_weights = make_trainer(freeze_layers=1)
    with torch.no_grad():
        other_weights.loaded.model.embedding.tokens.weight[5] += 1
    cache_frozen_outputs(other_weights, folder, print)
    assert (folder / "part-000000.safetensors").read_bytes() != before
    cached_trainer(folder)
    assert (folder / "part-000000.safetensors").read_bytes() == before
    reordered = make_trainer(freeze_layers=1)
    reordered.stages = (reordered.stages[0]._replace(samples=list(reordered.samples)[::-1]),)
    cache_frozen_outputs(reordered, folder, print)
    assert (folder / "part-000000.safetensors").read_bytes() != before
    states = [cached_trainer(folder, freeze_layers=count).samples[3].states for count in (1, 2)]
    assert not torch.equal(*states)


def test_outputs_that_cannot_be_cached_are_computed_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (train, expected) in enumerate(
        [
            ({"cache_gb": 0.0}, "recomputed in every step: their outputs take 0.00 GB, and train.cache_gb is 0"),
            ({"max_steps": 4}, "recomputed in every step: training reads every sample once"),
        ]
    ):
        log: list[str] = []
        frozen_trainer, plain = (
            cached_trainer(tmp_path / str(number), log, **train),
            make_trainer(freeze_layers=1, **train),
        )
        assert log[0].endswith(expected)
        assert records(list(frozen_trainer)) == records(list(plain)) and tensors_equal(
            copy_weights(frozen_trainer), copy_weights(plain)
        )
        assert not (tmp_path / str(number)).exists()
    log = []
    full_disk = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=10))
    monkeypatch.setattr(frozen_outputs, "shutil", full_disk)
    assert not isinstance(cached_trainer(tmp_path / "full", log).samples, SamplesWithFrozenOutputs)
    assert log[0].endswith("full has 0.00 GB left") and not (tmp_path / "full").exists()


def test_samples_have_the_outputs_as_states(tmp_path: Path) -> None:
    frozen_trainer = cached_trainer(tmp_path / "frozen")
    plain = make_trainer(freeze_layers=1).samples
    sample = frozen_trainer.samples[-1]
    assert sample.states is not None and sample.states.shape == (len(sample), 16)
    assert (replace(sample, states=None).tokens == plain[-1].tokens).all() and sample.target == plain[-1].target
    assert [len(sample) for sample in frozen_trainer.samples[3:6]] == [len(sample) for sample in plain[3:6]]
    with pytest.raises(IndexError):
        frozen_trainer.samples[16]


def test_the_cache_leaves_space_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = frozen_outputs.frozen_outputs_bytes(make_trainer(freeze_layers=1))
    disk = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=size + 5_000_000))
    monkeypatch.setattr(frozen_outputs, "shutil", disk)
    log: list[str] = []
    for reserved, is_cached in ((5_000_001, False), (5_000_000, True), (10_000_000, True)):  # the last one is complete
        trainer = make_trainer(freeze_layers=1)
        cache_frozen_outputs(trainer, tmp_path / "frozen", log.append, reserved_bytes=reserved)
        assert isinstance(trainer.samples, SamplesWithFrozenOutputs) == is_cached
    assert log[0].endswith("frozen has 0.00 GB left, beside 0.01 GB for checkpoints")


def test_a_started_cache_is_filled_only_if_its_missing_part_fits_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "frozen"
    cached_trainer(folder)
    full_disk = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=10))
    monkeypatch.setattr(frozen_outputs, "shutil", full_disk)
    assert isinstance(cached_trainer(folder).samples, SamplesWithFrozenOutputs), "a complete cache takes no more space"
    (folder / "part-000002.safetensors").unlink()
    log: list[str] = []
    assert not isinstance(cached_trainer(folder, log).samples, SamplesWithFrozenOutputs)
    assert "recomputed in every step: the missing part of their outputs takes 0.00 GB, and" in log[0]
    assert not (folder / "part-000002.safetensors").exists()
