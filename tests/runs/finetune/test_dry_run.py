"""A dry run: its estimates agree with a run, it refuses what a run refuses, and it writes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from heedful.errors import HeedfulError
from heedful.runs.finetune.dry_run import Estimate, _existing, dry_run
from tests.support.generated_data import SIZES, assignments, classification_rows, finetune_tiny, write_csv, write_splits
from tests.support.model_folders import make_model_dir


def estimate_for(data: Path, settings: dict[str, Any] | None = None, **arguments: Any) -> Estimate:
    """Return the estimate for a run in the folder `run` beside the data."""
    return dry_run("classify", data, data.parent / "run", assignments=assignments(settings), **arguments)


def rows_by_name(estimate: Estimate) -> dict[str, str]:
    return {name: value for name, value in estimate.table_rows() if name != "note"}


def files_with_times(folder: Path) -> dict[str, int]:
    """Return the time of the last change of each file and folder."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_an_estimate_agrees_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {})
    data = write_splits("single", tmp_path / "data")
    files = files_with_times(tmp_path)
    estimate = estimate_for(data, {"seeds": 2, "init.mlm_steps": 500, "fit.keep_checkpoints": "true"})
    assert files_with_times(tmp_path) == files, "nothing is written"
    run_settings = {"seeds": 2, "fit.keep_checkpoints": "true"}
    results = finetune_tiny("classify", data, tmp_path / "run", run_settings).results
    summary, encoding_note, *_ = estimate.notes
    assert summary.startswith("defaults for 24 examples and a fresh encoder: 2 epochs, ")
    assert "; set by hand: init.kind, " in summary
    assert "train.epochs" in summary
    assert encoding_note == results["notes"][0]
    assert f"{estimate.samples} samples of {estimate.tokens} tokens" in encoding_note
    assert estimate.examples == SIZES["train"]
    assert estimate.seeds == 2
    assert estimate.steps == results["seeds"][0]["steps"] == 4
    assert estimate.parameters == results["model"]["parameters"]
    num_epochs = 2
    assert estimate.seconds * estimate.tokens_per_second == pytest.approx(num_epochs * estimate.tokens)
    assert estimate.memory > 10**8
    assert estimate.free > 0
    run_size = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    checkpoint_size = 16 * estimate.parameters
    assert run_size < estimate.disk < run_size + 2 * checkpoint_size
    without_checkpoints = estimate_for(data, {"seeds": 2, "init.mlm_steps": 500})
    assert without_checkpoints.disk == estimate.disk - 2 * checkpoint_size, "one seed at a time has checkpoints"
    assert json.loads(json.dumps(estimate.to_dict()))["notes"] == list(estimate.notes)
    rows = rows_by_name(estimate)
    assert rows["steps"] == "2 x 4"
    assert rows["time"].startswith("2 x 0.")
    assert "GiB are free" in rows["disk"]


def test_without_dev_there_is_no_space_for_best_weights(tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data", {"train": 24})
    estimate = estimate_for(data, {"data.dev_fraction": 0})
    copies = 2 + 3 * 3  # the initial and the final model, and three checkpoints of the weights and their two moments
    assert estimate.disk == 4 * copies * estimate.parameters


def test_methods_for_few_labels_have_no_best_weights(tmp_path: Path) -> None:
    data, encoder = write_splits("single", tmp_path / "data"), make_model_dir(tmp_path / "encoder", "bare")

    def copies(*settings: str) -> float:
        """Return the estimated disk space in copies of the weights."""
        estimate = dry_run("classify", data, tmp_path / "run", model=encoder, assignments=settings)
        return estimate.disk / (4 * estimate.parameters)

    assert copies() == 2 + 3 * 4  # the best and the last model, and three checkpoints, each with the best weights
    assert copies("method=contrastive") == 1 + 3 * 3
    assert copies("method=linear") == 1


def test_a_time_budget_is_the_estimated_time(tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data", {"train": 24})
    estimate = estimate_for(data, {"train.time_budget": 1.5})
    assert estimate.steps is None
    assert estimate.seconds == 90.0
    rows = rows_by_name(estimate)
    assert rows["steps"] == "as many as fit"
    assert rows["time"].startswith("1.5 min at ")


def test_bad_rows_are_counted_and_not_written(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "a.csv", [*classification_rows(24), {"text": "x", "label": ""}])
    estimate = estimate_for(data, on_bad_row="skip")
    assert "bad rows of a.csv that are left out: 1" in estimate.notes
    assert os.listdir(tmp_path) == ["a.csv"]
    with pytest.raises(HeedfulError, match=r"a\.csv:26:label: is empty"):
        estimate_for(data)


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data")
    with pytest.raises(
        HeedfulError, match=r"data is not a run folder: it holds dev\.csv, test\.csv, train\.csv, but no"
    ):
        dry_run("classify", data, data, assignments=assignments())
    with pytest.raises(HeedfulError, match=r"train\.bogus is not a setting"):
        estimate_for(data, {"train.bogus": 1})


def test_free_space_is_that_of_the_nearest_existing_parent(tmp_path: Path) -> None:
    assert _existing(tmp_path / "a" / "b" / "c") == tmp_path
