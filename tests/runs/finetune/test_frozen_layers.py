"""Fine-tuning and distillation with frozen layers: log messages, unchanged weights, and resuming."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heedful.checkpoint import load
from heedful.errors import HeedfulError, SettingError
from heedful.runs.distil.run import distil
from heedful.runs.finetune.dry_run import dry_run
from heedful.runs.finetune.run import finetune
from heedful.runs.pretrain.settings import ModelSettings, PretrainSettings
from heedful.train import frozen_outputs
from heedful.train.settings import TrainSettings
from tests.support.distillation import NO_BASELINE
from tests.support.generated_data import finetune_tiny, write_splits
from tests.support.model_folders import make_model_dir
from tests.support.reporters import Messages


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing; one thread, so that equal runs are equal."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("bare"), "bare")


SETTINGS = {"train.freeze_layers": 1, "train.epochs": 3, "eval_baseline": "false"}


def frozen_as_in(folder: Path, bare: Path) -> bool:
    before, after = load(bare).named_tensors(), load(folder / "model").named_tensors()
    names = [name for name in before if name.startswith(("embedding.", "encoder.blocks.0."))]
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("encoder.blocks.1."))
    return all(torch.equal(before[name], after[name]) for name in names)


def test_seeds_share_the_cache_which_is_removed(tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    write = frozen_outputs.CachedOutputs.write_part
    monkeypatch.setattr(
        frozen_outputs.CachedOutputs, "write_part", lambda self, part, b: (parts.append(part), write(self, part, b))[1]
    )
    log, folder = Messages(), tmp_path / "run"
    done = finetune_tiny(
        "classify", write_splits("single", tmp_path / "data"), folder, SETTINGS | {"seeds": 2}, model=bare, reporter=log
    )
    assert done.status == "completed" and parts == [0]
    log_messages = [text for text in log.messages if "frozen" in text]
    assert len(log_messages) == 2 and "lowest layer are frozen, without dropout; their outputs for" in log_messages[0]
    assert not (folder / "frozen").exists() and frozen_as_in(folder, bare)


def test_a_run_that_was_interrupted_gives_the_same_bits(tmp_path: Path, bare: Path) -> None:
    source = write_splits("single", tmp_path / "data")
    finetune_tiny("classify", source, tmp_path / "whole", SETTINGS, model=bare)
    stopped = finetune_tiny("classify", source, tmp_path / "run", SETTINGS, model=bare, reporter=Messages(stop_after=3))
    assert stopped.status == "interrupted" and (tmp_path / "run" / "frozen" / "about.json").exists()
    assert finetune_tiny("classify", source, tmp_path / "run", SETTINGS, model=bare).status == "completed"
    expected = load(tmp_path / "whole" / "model").named_tensors()
    actual = load(tmp_path / "run" / "model").named_tensors()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_other_tasks_and_the_contrastive_method_freeze_layers_too(tmp_path: Path, bare: Path) -> None:
    for task, kind, more in (
        ("tag", "tag", {}),
        ("qa", "qa", {}),
        ("embed", "together", {"task.group_size": 4}),
        ("multiple-choice", "choose 2", {}),
        ("classify", "multiple", {"method": "contrastive"}),
    ):
        folder, log = tmp_path / kind, Messages()
        finetune_tiny(
            task, write_splits(kind, tmp_path / f"{kind} data"), folder, SETTINGS | more, model=bare, reporter=log
        )
        assert any("computed once" in text for text in log.messages), kind
        assert frozen_as_in(folder, bare), kind


@pytest.mark.slow
def test_distillation_freezes_layers_of_the_student(tmp_path: Path) -> None:
    teacher, log = make_model_dir(tmp_path / "teacher", "single"), Messages()
    source, how = write_splits("single", tmp_path / "data"), ["train.freeze_layers=1", *NO_BASELINE]
    distil(teacher, source, tmp_path / "run", student="layers=2", loss="tinybert", assignments=how, reporter=log)
    assert any(text.endswith("are frozen, without dropout, and recomputed in every step") for text in log.messages)
    assert frozen_as_in(tmp_path / "run", tmp_path / "run" / "start")


def test_distillation_refuses_what_it_cannot_freeze(tmp_path: Path) -> None:
    teacher, source = make_model_dir(tmp_path / "teacher", "single"), write_splits("single", tmp_path / "data")
    for how, student, expected in (
        (["freeze_layers=1", "cache_gb=3"], "layers=2", "train.cache_gb would change nothing: only finetune caches"),
        (["freeze_layers=3"], "layers=2", "the model has 2 layers: give 2 or fewer"),
        (["freeze_layers=1"], "tiny", "training starts from random weights"),
    ):
        with pytest.raises(HeedfulError, match=expected):
            distil(teacher, source, tmp_path / "no", student=student, assignments=how)
    assert not (tmp_path / "no" / "settings.toml").exists()


def test_what_cannot_be_frozen_is_refused_before_anything_is_written(tmp_path: Path, bare: Path) -> None:
    source = write_splits("single", tmp_path / "data")
    for model, how, expected in (
        (bare, ["freeze_layers=3"], "train.freeze_layers is 3, but the model has 2 layers"),
        ("", ["freeze_layers=1", "init.kind=scratch"], "training starts from random weights"),
        (bare, ["freeze_layers=1", "method=linear"], "train.freeze_layers would change nothing: method is linear"),
    ):
        with pytest.raises(HeedfulError, match=expected):
            finetune("classify", source, tmp_path / "no", model=model, assignments=how)
    assert not (tmp_path / "no").exists()


def test_pretraining_freezes_layers_of_a_trained_model_alone() -> None:
    train = TrainSettings(epochs=1, freeze_layers=1)
    PretrainSettings(train=train, model=ModelSettings(init_from="folder"))
    with pytest.raises(HeedfulError, match=r"or set model\.init_from"):
        PretrainSettings(train=train)
    with pytest.raises(SettingError, match="cache_gb would change nothing"):
        PretrainSettings(train=replace(train, cache_gb=1), model=ModelSettings(init_from="folder"))


def test_a_dry_run_counts_the_cache(tmp_path: Path, bare: Path) -> None:
    source = write_splits("single", tmp_path / "data")
    plain, frozen, uncached = (
        dry_run("classify", source, tmp_path / "run", model=bare, assignments=["epochs=3", *how])
        for how in ([], ["freeze_layers=1"], ["freeze_layers=1", "cache_gb=0"])
    )
    assert frozen.disk - plain.disk == 4 * 32 * frozen.tokens and uncached.disk == plain.disk
