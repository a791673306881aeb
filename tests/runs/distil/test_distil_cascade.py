"""Cascades of student and teacher: thresholds keep the allowed loss, and the report is that of the saved folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heedful
from heedful.checkpoint import load
from heedful.data import read
from heedful.errors import DataError, HeedfulError, ModelError, SettingError
from heedful.infer.engine import Engine
from heedful.runs.card.cascade import cascade_sentence, cascade_table
from heedful.runs.data_settings import data_settings_for
from heedful.runs.distil.cascade import UNREACHABLE, fit_thresholds, split_rows
from heedful.runs.distil.run import distil
from heedful.runs.evaluate import evaluate
from tests.support.distillation import NO_BASELINE, RecordingReporter
from tests.support.generated_data import write_splits
from tests.support.model_folders import make_model_dir

pytestmark = pytest.mark.usefixtures("quick")

QUICK = (*NO_BASELINE, "verdict.rounds=1")
SIZES = {"train": 24, "dev": 40, "test": 40}


# -- thresholds -------------------------------------------------------------------------------------------------------


def cascade_accuracy(confidences: Any, correct: Any, thresholds: tuple[float, ...]) -> float:
    """The accuracy of a cascade, row by row."""
    right = 0
    for row in range(correct.shape[1]):
        stage = next((n for n, t in enumerate(thresholds) if confidences[n, row] >= t), len(thresholds))
        right += bool(correct[stage, row])
    return right / correct.shape[1]


@pytest.mark.parametrize("early", [1, 2, 3])
@pytest.mark.parametrize("max_loss", [0.0, 0.005, 0.03, 0.2])
def test_thresholds_keep_the_allowed_loss(early: int, max_loss: float) -> None:
    chosen = []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        confidences = draw.uniform(0.3, 1, (early, 400)).round(2)  # with ties
        skill = np.concatenate([confidences + 0.1, np.full((1, 400), 0.92)])
        correct = draw.uniform(size=(early + 1, 400)) < skill
        thresholds = fit_thresholds(confidences, correct, max_loss)
        accuracy = cascade_accuracy(confidences, correct, thresholds)
        assert accuracy >= correct[-1].mean() - max_loss - 1e-12
        chosen.append((confidences[0] >= thresholds[0]).mean())
    assert np.mean(chosen) > 0.1, "hardly a row is answered early"


def test_a_lower_threshold_would_lose_more() -> None:
    for seed in range(20):
        draw = np.random.default_rng(seed)
        confidences = draw.uniform(0.3, 1, (1, 400)).round(2)
        correct = draw.uniform(size=(2, 400)) < np.concatenate([confidences, np.full((1, 400), 0.95)])
        (threshold,) = fit_thresholds(confidences, correct, 0.02)
        below = confidences[confidences < threshold].max()
        assert cascade_accuracy(confidences, correct, (below,)) < correct[-1].mean() - 0.02


def test_the_ends_of_thresholds() -> None:
    confidences = np.array([[1.0, 1.0, 0.5, 0.5]])
    right, wrong = np.ones(4, bool), np.zeros(4, bool)
    assert fit_thresholds(confidences, np.stack([right, wrong]), 0.0) == (0.0,)
    assert fit_thresholds(confidences, np.stack([wrong, right]), 0.0) == (UNREACHABLE,)
    assert fit_thresholds(confidences, np.stack([wrong, right]), 0.5) == (0.75,)
    assert fit_thresholds(confidences, np.stack([wrong, right]), 0.49) == (UNREACHABLE,), (
        "rows of equal confidence go together"
    )


def test_rows_of_thresholds_are_not_reported(tmp_path: Path) -> None:
    folder = write_splits("single", tmp_path / "data")
    source = read(folder)
    fitted, reported, about = split_rows(source, ("train", "dev", "test"), 0)
    assert (about["fitted_on"], about["reported_on"]) == ("dev", "test")
    assert fitted == list(source.examples("dev")) and reported == list(source.examples("test"))
    fitted, reported, about = split_rows(source, ("train", "dev"), 0)
    assert (about["fitted_on"], about["reported_on"]) == ("half of dev", "the other half of dev")
    lines = [example.line for example in (*fitted, *reported)]
    assert sorted(lines) == sorted(example.line for example in source.examples("dev"))
    assert len(fitted) == len(reported) == 4
    assert split_rows(source, ("train", "dev"), 0)[0] == fitted != split_rows(source, ("train", "dev"), 1)[0]
    single = read(write_splits("single", tmp_path / "single", {"train": 24, "dev": 1}))
    with pytest.raises(DataError, match="dev has 1 rows: some are needed to choose by, and others to report on"):
        split_rows(single, ("train", "dev"), 0)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.004, 0.002, "the reported rows confirm it"),
        (-0.020, 0.002, "too few rows are reported to confirm it"),
        (-0.020, -0.006, "more is lost on the reported rows; give more held-out rows, or allow less"),
    ],
)
def test_the_sentence_says_whether_the_loss_is_kept(low: float, high: float, verdict: str) -> None:
    stages = [
        {"name": name, "share": share, "accuracy": 0.9, "texts_per_second": speed}
        for name, share, speed in (("student", 0.8, 1000.0), ("teacher", 0.2, 100.0))
    ]
    report = {
        **{"metric": "accuracy", "stages": stages, "cascade": {"accuracy": 0.89, "texts_per_second": 350.0}},
        **{"delta_vs_teacher": {"difference": (low + high) / 2, "low": low, "high": high}, "max_loss": 0.5},
        **{"reported_on": "test", "fitted_on": "dev", "fitted_rows": 990},
    }
    sentence = cascade_sentence(report)
    assert sentence.endswith(f"for a loss of at most 0.5 percentage points: {verdict}.")
    assert "the student answers 80.0 %, the teacher answers 20.0 % of the texts: 89.0 % accuracy on test" in sentence
    assert "with 3.5 times as many texts a second" in sentence


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_cascade_that_is_used_as_one_model(teacher: Path, tmp_path: Path) -> None:
    folder, recorder = write_splits("single", tmp_path / "data", SIZES), RecordingReporter()
    done = heedful.distil(
        teacher, folder, tmp_path / "run", student="bag", cascade=True, max_loss=2, reporter=recorder, seeds=1,
        epochs=2,
        overrides={"verdict.precision": "float32", "verdict.baseline": "none", "verdict.texts": 8, "verdict.rounds": 1},
    )  # fmt: skip
    report = done.results["cascade"]
    assert report == json.loads((tmp_path / "run" / "cascade.json").read_text())
    assert report["max_loss"] == 2 and report["reported_on"] == "test" and report["fitted_on"] == "dev"
    assert [stage["name"] for stage in report["stages"]] == ["student", "teacher"]
    place = tmp_path / "run" / "cascade"
    (early,) = load(place).early_stages
    assert early.threshold == report["stages"][0]["threshold"]
    source = read(folder)
    scored = evaluate(place, folder, split="test")
    assert scored.numbers["accuracy"] == pytest.approx(report["cascade"]["accuracy"])
    assert scored.intervals["accuracy"]["low"] == pytest.approx(report["cascade"]["interval"]["low"])
    for stage, model in zip(report["stages"], (tmp_path / "run" / "model", teacher), strict=True):
        assert evaluate(model, folder, split="test").numbers["accuracy"] == pytest.approx(stage["accuracy"])
    answers = Engine(place)([example.text for example in source.examples("test")])
    for number, stage in enumerate(report["stages"], start=1):
        assert stage["share"] == pytest.approx(sum(a["stage"] == number for a in answers) / len(answers))
    on_dev = [evaluate(model, folder, split="dev").numbers["accuracy"] for model in (place, teacher)]
    assert on_dev[0] >= on_dev[1] - 0.02
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "## The cascade" in card and "<h2>The cascade</h2>" in (tmp_path / "run" / "report.html").read_text()
    assert any(
        "fitted on 40 rows, and one row is more than the allowed loss of 2 points" in t for t in recorder.messages
    )


def test_a_finished_run_gets_a_cascade_without_training(teacher: Path, labelled: Path, tmp_path: Path) -> None:
    folder, run = labelled, tmp_path / "run"
    first = distil(teacher, folder, run, student="bag", assignments=QUICK)
    assert "cascade" not in first.results
    weights = (run / "model" / "model.safetensors").read_bytes()
    verdict = (run / "verdict.json").read_bytes()
    other = make_model_dir(tmp_path / "other", "single")
    for message in ("fitting the thresholds", "measuring the cascade"):  # an interrupted one is built again
        with pytest.raises(KeyError, match="the power failed"):
            distil(
                teacher, folder, run, student="bag", cascade=True, reporter=RecordingReporter(after_message=message),
                assignments=(*QUICK, f'cascade.stages=["{other}"]'),
            )  # fmt: skip
        assert not (run / "cascade.json").exists()
    recorder = RecordingReporter()
    more = distil(
        teacher, folder, run, student="bag", cascade=True, reporter=recorder,
        assignments=(*QUICK, f'cascade.stages=["{other}"]'),
    )  # fmt: skip
    report = more.results["cascade"]
    assert [stage["name"] for stage in report["stages"]] == ["student", "other", "teacher"]
    assert sum(stage["share"] for stage in report["stages"]) == pytest.approx(1)
    assert report["max_loss"] == 0.5, "the default"
    assert any("one row is more than the allowed loss of 0.5 points" in text for text in recorder.messages)
    assert len(load(run / "cascade").early_stages) == 2
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    assert (run / "verdict.json").read_bytes() == verdict
    again = distil(teacher, folder, run, student="bag", cascade=True, assignments=(*QUICK, "cascade.max_loss=90"))
    assert [stage["name"] for stage in again.results["cascade"]["stages"]] == ["student", "teacher"]
    assert again.results["cascade"]["stages"][0]["share"] == 1.0
    head, rows = cascade_table(again.results["cascade"])
    assert head[1] == "answers" and [row[0] for row in rows] == ["student", "teacher", "cascade"]
    assert [row[1] for row in rows] == ["100.0 %", "0.0 %", ""]


def test_cascades_that_cannot_be_built_are_refused_before_training(
    teacher: Path, labelled: Path, tmp_path: Path
) -> None:
    folder = labelled
    for name, kind, message in (
        ("tag", "tag", r"cannot be a stage of a cascade \(token_classification\)"),
        ("multiple", "multiple", r"cannot be a stage of a cascade \(multi_label_classification\)"),
        ("regression", "regression", r"cannot be a stage of a cascade \(regression\)"),
        ("masked", "masked", "a cascade is for classifiers, and .* is a masked language model: leave --cascade"),
    ):
        with pytest.raises(HeedfulError, match=message):
            distil(make_model_dir(tmp_path / name, kind), folder, tmp_path / "run", student="bag", cascade=True)
    with pytest.raises(ModelError, match="is neither a folder here nor a name on the hub"):
        distil(tmp_path / "missing teacher", folder, tmp_path / "run", student="bag", cascade=True)
    with pytest.raises(ModelError, match="is neither a folder here nor a name on the hub"):
        distil(
            teacher, folder, tmp_path / "run", student="bag",
            overrides={"cascade.stages": [str(tmp_path / "missing stage")]},
        )  # fmt: skip
    with pytest.raises(SettingError, match=r"max_loss is -1\.0; expected percentage points from 0"):
        distil(teacher, folder, tmp_path / "run", student="bag", assignments=["cascade.max_loss=-1"])
    assert not (tmp_path / "run").exists()


def test_thresholds_without_a_test_split_are_fitted_on_half_of_dev(teacher: Path, tmp_path: Path) -> None:
    folder = write_splits("single", tmp_path / "data", {"train": 24, "dev": 40})
    settings = (*QUICK, "long_inputs=truncate", "data.max_row_bytes=5000")
    done = distil(teacher, folder, tmp_path / "run", student="bag", cascade=True, assignments=settings)
    report = done.results["cascade"]
    data_settings, long_inputs = data_settings_for(tmp_path / "run" / "cascade", folder)
    assert (data_settings.max_row_bytes, long_inputs) == (5000, "truncate"), "data are not read as for the run"
    assert (report["fitted_on"], report["reported_on"]) == ("half of dev", "the other half of dev")
    assert report["fitted_rows"] == report["reported_rows"] == 20
    with pytest.raises(ModelError, match="is a cascade of models, and cannot be a teacher: give one of its stages"):
        distil(tmp_path / "run" / "cascade", folder, tmp_path / "again", student="bag", assignments=QUICK)
