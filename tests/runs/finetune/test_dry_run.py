"""A dry run tells what the run then needs, and writes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from heedful.errors import HeedfulError
from heedful.runs.finetune import dry_run as dry
from heedful.runs.finetune.dry_run import Estimate, dry_run
from tests.support.generated_data import SIZES, assignments, classification_rows, finetune_tiny, write_csv, write_splits


def estimated(arguments: Path, settings: dict[str, Any] | None = None, **more: Any) -> Estimate:
    return dry_run("classify", arguments, arguments.parent / "run", assignments=assignments(settings), **more)


def everything(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_it_is_what_the_run_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {})
    labelled, before = write_splits("single", tmp_path / "data"), everything(tmp_path)
    estimate = estimated(labelled, {"seeds": 2, "init.mlm_steps": 500, "fit.keep_checkpoints": "true"})
    assert everything(tmp_path) == before, "nothing is written"
    assert estimate.notes[0].startswith("defaults for 24 examples and a fresh encoder: 2 epochs, ")
    assert "; set by hand: init.kind, " in estimate.notes[0] and "train.epochs" in estimate.notes[0]
    done = finetune_tiny("classify", labelled, tmp_path / "run", {"seeds": 2, "fit.keep_checkpoints": "true"})
    results = done.results
    assert (estimate.examples, estimate.seeds) == (SIZES["train"], 2) and estimate.notes[1] == results["notes"][0]
    assert estimate.steps == results["seeds"][0]["steps"] == 4
    assert f"{estimate.samples} samples of {estimate.tokens} tokens" in results["notes"][0]
    assert estimate.parameters == results["model"]["parameters"]
    assert estimate.seconds * estimate.tokens_per_second == pytest.approx(estimate.tokens * 2), "two epochs"
    assert estimate.memory > 10**8 and estimate.free > 0
    used = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    one = 16 * estimate.parameters  # a checkpoint
    assert used < estimate.disk < used + 2 * one, "all that is there, the last weights, and a checkpoint in the making"
    assert estimated(labelled, {"seeds": 2, "init.mlm_steps": 500}).disk == estimate.disk - 2 * one, (
        "state of one seed at a time"
    )
    assert json.loads(json.dumps(estimate.to_dict()))["notes"] == list(estimate.notes)
    rows = {name: value for name, value in estimate.table_rows() if name != "note"}
    assert rows["steps"] == "2 x 4" and rows["time"].startswith("2 x 0.") and "GiB are free" in rows["disk"]


def test_without_dev_there_is_no_space_for_best_weights(tmp_path: Path) -> None:
    labelled = write_splits("single", tmp_path / "data", {"train": 24})
    estimate = estimated(labelled, {"data.dev_fraction": 0})
    copies = 2 + 3 * 3  # the initial and the final model, and three checkpoints of the weights and their two moments
    assert estimate.disk == 4 * copies * estimate.parameters


def test_minutes_decide_by_themselves(tmp_path: Path) -> None:
    labelled = write_splits("single", tmp_path / "data", {"train": 24})
    settings = {"train.time_budget": 1.5}
    estimate = dry_run("classify", labelled, tmp_path / "run", assignments=assignments(settings))
    assert (estimate.steps, estimate.seconds) == (None, 90.0)
    assert dict(estimate.table_rows()[3:5]) == {"steps": "as many as fit", "time": estimate.table_rows()[4][1]}
    assert estimate.table_rows()[4][1].startswith("1.5 min at ")


def test_bad_rows_are_counted_and_not_written(tmp_path: Path) -> None:
    labelled = write_csv(tmp_path / "a.csv", [*classification_rows(24), {"text": "x", "label": ""}])
    estimate = estimated(labelled, on_bad_row="skip")
    assert "bad rows of a.csv that are left out: 1" in estimate.notes and os.listdir(tmp_path) == ["a.csv"]
    with pytest.raises(HeedfulError, match=r"a\.csv:26:label: is empty"):
        estimated(labelled)


def test_it_refuses_what_the_run_would(tmp_path: Path) -> None:
    labelled = write_splits("single", tmp_path / "data")
    with pytest.raises(
        HeedfulError, match=r"data is not a run folder: it holds dev\.csv, test\.csv, train\.csv, but no"
    ):
        dry_run("classify", labelled, labelled, assignments=assignments())
    with pytest.raises(HeedfulError, match=r"train\.bogus is not a setting"):
        estimated(labelled, {"train.bogus": 1})


def test_the_disk_is_the_one_of_the_folder_to_come(tmp_path: Path) -> None:
    assert dry._existing(tmp_path / "a" / "b" / "c") == tmp_path
