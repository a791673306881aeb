"""Models on the hub that are named without a revision: which commit a run records, and which one it resumes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.checkpoint import hub
from heedful.errors import HeedfulWarning
from heedful.runs.distil.settings import DistilSettings
from heedful.runs.finetune.init_settings import Pretrained, Scratch
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.runs.pin_models import pin_models
from heedful.runs.results import read_results
from heedful.settings import load_mapping, to_toml
from heedful.tasks.specs.classify import ClassifySettings
from tests.support.generated_data import finetune_tiny, write_splits
from tests.support.model_folders import make_model_dir

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of the commits of one model, in place of a hub whose branch `main` is the commit FIRST."""
    snapshots = tmp_path / "snapshots"
    for commit in (FIRST, SECOND):
        make_model_dir(snapshots / commit, "bare")
    set_main(FIRST, snapshots, monkeypatch)
    return snapshots


def set_main(commit: str, snapshots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the branch `main` be a commit, and forget which commit it was before, as in a new process."""
    monkeypatch.setattr(hub, "_resolved", {})
    monkeypatch.setattr(
        hub, "_snapshot", lambda name, revision: snapshots / (commit if revision == "main" else revision)
    )


def test_a_run_records_the_commit_and_resumes_from_it(
    tmp_path: Path, snapshots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled, out = write_splits("single", tmp_path / "data"), tmp_path / "run"
    with pytest.warns(HeedfulWarning, match=f"commit {FIRST}"):
        finetune_tiny("classify", labelled, out, model="maker/model")
    assert load_mapping(out / "settings.toml")["init"]["model"] == f"maker/model@{FIRST}"
    assert read_results(out)["base"] == f"maker/model@{FIRST}"
    set_main(SECOND, snapshots, monkeypatch)
    with pytest.warns(HeedfulWarning, match=f"commit {SECOND}"):  # whose config.json is read for the defaults
        resumed = finetune_tiny("classify", labelled, out, model="maker/model")
    assert resumed.results["base"] == f"maker/model@{FIRST}"


def test_every_setting_that_names_a_model_is_pinned(tmp_path: Path, snapshots: Path) -> None:
    with pytest.warns(HeedfulWarning, match="using main"):
        pinned = pin_models(DistilSettings(task=ClassifySettings(), teacher="maker/model"), tmp_path)
    assert pinned.teacher == f"maker/model@{FIRST}"
    for init in (Scratch(), Pretrained(model="maker/model@v1"), Pretrained(model=str(tmp_path))):
        settings = FinetuneSettings(task=ClassifySettings(), init=init)
        assert pin_models(settings, tmp_path) == settings


def test_another_model_than_that_of_the_run_is_not_given_its_commit(tmp_path: Path, snapshots: Path) -> None:
    saved = FinetuneSettings(task=ClassifySettings(), init=Pretrained(model=f"maker/model-2@{SECOND}"))
    (tmp_path / "settings.toml").write_text(to_toml(saved))
    settings = FinetuneSettings(task=ClassifySettings(), init=Pretrained(model="maker/model"))
    with pytest.warns(HeedfulWarning, match="using main"):
        pinned = pin_models(settings, tmp_path)
    assert isinstance(pinned.init, Pretrained)
    assert pinned.init.model == f"maker/model@{FIRST}"
