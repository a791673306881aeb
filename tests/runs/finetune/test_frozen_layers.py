"""Fine-tuning and distillation with frozen layers: log messages, unchanged weights, and resuming."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful.checkpoint import load
from heedful.errors import HeedfulError, SettingError
from heedful.runs.distil.run import distil
from heedful.runs.finetune.dry_run import Estimate, dry_run
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
    """Leave out the measurement of latency, and compute with one thread, so that equal runs are equal."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("bare"), "bare")


SETTINGS = {"train.freeze_layers": 1, "train.epochs": 3, "eval_baseline": "false"}


def assert_lowest_layer_unchanged(folder: Path, initial_model: Path) -> None:
    """Check that training changed the weights of the second layer, but not of the embedding and the first layer."""
    initial, trained = load(initial_model).named_tensors(), load(folder / "model").named_tensors()
    encoder_names = [name for name in initial if name.startswith(("embedding.", "encoder."))]  # heads may differ
    changed = {name for name in encoder_names if not torch.equal(initial[name], trained[name])}
    assert any(name.startswith("encoder.blocks.1.") for name in changed)
    assert not any(name.startswith(("embedding.", "encoder.blocks.0.")) for name in changed)


def test_seeds_share_the_cache_which_is_removed(tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_parts: list[int] = []
    write_part = frozen_outputs.CachedOutputs.write_part

    def write_and_record(self: frozen_outputs.CachedOutputs, part: int, data: bytes) -> None:
        written_parts.append(part)
        write_part(self, part, data)

    monkeypatch.setattr(frozen_outputs.CachedOutputs, "write_part", write_and_record)
    recorder, run, data = Messages(), tmp_path / "run", write_splits("single", tmp_path / "data")
    settings = SETTINGS | {"seeds": 2}
    assert finetune_tiny("classify", data, run, settings, model=bare, reporter=recorder).status == "completed"
    assert written_parts == [0], "once for both seeds"
    first, _second = (message for message in recorder.messages if "frozen" in message)
    assert "lowest layer are frozen, without dropout; their outputs for" in first
    assert not (run / "frozen").exists()
    assert_lowest_layer_unchanged(run, bare)


def test_a_resumed_run_has_the_same_weights(tmp_path: Path, bare: Path) -> None:
    data, uninterrupted, resumed = write_splits("single", tmp_path / "data"), tmp_path / "one", tmp_path / "two"
    finetune_tiny("classify", data, uninterrupted, SETTINGS, model=bare)
    stop = Messages(stop_after=3)
    assert finetune_tiny("classify", data, resumed, SETTINGS, model=bare, reporter=stop).status == "interrupted"
    assert (resumed / "frozen" / "about.json").exists()
    assert finetune_tiny("classify", data, resumed, SETTINGS, model=bare).status == "completed"
    tensors, expected = (load(run / "model").named_tensors() for run in (resumed, uninterrupted))
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kind", "settings"),
    [
        ("tag", "tag", {}),
        ("qa", "qa", {}),
        ("embed", "together", {"task.group_size": 4}),
        ("multiple-choice", "choose 2", {}),
        ("classify", "multiple", {"method": "contrastive"}),
    ],
)
def test_other_tasks_and_the_contrastive_method_freeze_layers_too(
    tmp_path: Path, bare: Path, task: str, kind: str, settings: dict[str, Any]
) -> None:
    run, recorder, data = tmp_path / "run", Messages(), write_splits(kind, tmp_path / "data")
    finetune_tiny(task, data, run, SETTINGS | settings, model=bare, reporter=recorder)
    assert any("computed once" in message for message in recorder.messages)
    assert_lowest_layer_unchanged(run, bare)


@pytest.mark.slow
def test_distillation_freezes_layers_of_the_student(tmp_path: Path) -> None:
    teacher, recorder, run = make_model_dir(tmp_path / "teacher", "single"), Messages(), tmp_path / "run"
    data, assignments = write_splits("single", tmp_path / "data"), ["train.freeze_layers=1", *NO_BASELINE]
    distil(teacher, data, run, student="layers=2", loss="tinybert", assignments=assignments, reporter=recorder)
    ending = "are frozen, without dropout, and recomputed in every step"
    assert any(message.endswith(ending) for message in recorder.messages)
    assert_lowest_layer_unchanged(run, run / "start")


@pytest.mark.parametrize(
    ("student", "assignments", "message"),
    [
        ("layers=2", ["freeze_layers=1", "cache_gb=3"], "train.cache_gb would change nothing: only finetune caches"),
        ("layers=2", ["freeze_layers=3"], "the model has 2 layers: give 2 or fewer"),
        ("tiny", ["freeze_layers=1"], "training starts from random weights"),
    ],
)
def test_distillation_refuses_layers_that_cannot_be_frozen(
    tmp_path: Path, student: str, assignments: list[str], message: str
) -> None:
    teacher, data = make_model_dir(tmp_path / "teacher", "single"), write_splits("single", tmp_path / "data")
    with pytest.raises(HeedfulError, match=message):
        distil(teacher, data, tmp_path / "run", student=student, assignments=assignments)
    assert not (tmp_path / "run" / "settings.toml").exists()


@pytest.mark.parametrize(
    ("has_model", "assignments", "message"),
    [
        (True, ["freeze_layers=3"], "train.freeze_layers is 3, but the model has 2 layers"),
        (False, ["freeze_layers=1", "init.kind=scratch"], "training starts from random weights"),
        (True, ["freeze_layers=1", "method=linear"], "train.freeze_layers would change nothing: method is linear"),
    ],
)
def test_finetuning_refuses_layers_that_cannot_be_frozen(
    tmp_path: Path, bare: Path, has_model: bool, assignments: list[str], message: str
) -> None:
    data, model = write_splits("single", tmp_path / "data"), bare if has_model else ""
    with pytest.raises(HeedfulError, match=message):
        finetune("classify", data, tmp_path / "run", model=model, assignments=assignments)
    assert not (tmp_path / "run").exists()


def test_pretraining_freezes_layers_only_of_a_trained_model() -> None:
    train = TrainSettings(epochs=1, freeze_layers=1)
    PretrainSettings(train=train, model=ModelSettings(init_from="folder"))
    with pytest.raises(HeedfulError, match=r"or set model\.init_from"):
        PretrainSettings(train=train)
    with pytest.raises(SettingError, match="cache_gb would change nothing"):
        PretrainSettings(train=replace(train, cache_gb=1), model=ModelSettings(init_from="folder"))


def test_the_disk_space_of_a_dry_run_includes_the_cache(tmp_path: Path, bare: Path) -> None:
    data = write_splits("single", tmp_path / "data")

    def estimate(*assignments: str) -> Estimate:
        return dry_run("classify", data, tmp_path / "run", model=bare, assignments=["epochs=3", *assignments])

    unfrozen, frozen, uncached = estimate(), estimate("freeze_layers=1"), estimate("freeze_layers=1", "cache_gb=0")
    hidden_state_bytes = 4 * 32
    assert frozen.disk - unfrozen.disk == hidden_state_bytes * frozen.tokens
    assert uncached.disk == unfrozen.disk
