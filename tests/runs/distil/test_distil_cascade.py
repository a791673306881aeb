"""Cascades of student and teacher: thresholds within the allowed loss, the saved cascade and its measurements."""

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
    """Compute the accuracy of a cascade row by row. The arguments are as in `fit_thresholds`."""
    num_correct = 0
    for row in range(correct.shape[1]):
        stage = len(thresholds)  # the last stage, unless an earlier one is confident
        for early_stage, threshold in enumerate(thresholds):
            if confidences[early_stage, row] >= threshold:
                stage = early_stage
                break
        num_correct += bool(correct[stage, row])
    return num_correct / correct.shape[1]


@pytest.mark.parametrize("num_early", [1, 2, 3])
@pytest.mark.parametrize("max_loss", [0.0, 0.005, 0.03, 0.2])
def test_a_cascade_does_not_lose_more_than_allowed(num_early: int, max_loss: float) -> None:
    early_shares = []  # of the rows that the first stage answers
    for seed in range(20):
        rng = np.random.default_rng(seed)
        confidences = rng.uniform(0.3, 1, (num_early, 400)).round(2)  # with ties
        correct_probabilities = np.concatenate([confidences + 0.1, np.full((1, 400), 0.92)])
        correct = rng.uniform(size=(num_early + 1, 400)) < correct_probabilities
        thresholds = fit_thresholds(confidences, correct, max_loss)
        accuracy = cascade_accuracy(confidences, correct, thresholds)
        assert accuracy >= correct[-1].mean() - max_loss - 1e-12
        early_shares.append((confidences[0] >= thresholds[0]).mean())
    assert np.mean(early_shares) > (0.1 if max_loss > 0.01 else 0.0)


def test_with_a_lower_threshold_the_cascade_loses_more_than_allowed() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        confidences = rng.uniform(0.3, 1, (1, 400)).round(2)
        correct_probabilities = np.concatenate([confidences, np.full((1, 400), 0.95)])
        correct = rng.uniform(size=(2, 400)) < correct_probabilities
        (threshold,) = fit_thresholds(confidences, correct, 0.02)
        next_lower = confidences[confidences < threshold].max()
        is_lost = np.where(confidences[0] >= next_lower, correct[1].astype(int) - correct[0], 0)
        assert is_lost.mean() + 1.645 * is_lost.std() / 20 > 0.02, "the bound of the mean of 400 rows"


def test_the_loss_on_other_rows_seldom_exceeds_the_limit() -> None:
    exceeded = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        confidences = rng.uniform(0.3, 1, (1, 10_400))
        correct = rng.uniform(size=(2, 10_400)) < np.concatenate([confidences, np.full((1, 10_400), 0.9)])
        thresholds = fit_thresholds(confidences[:, :400], correct[:, :400], 0.02)
        accuracy = cascade_accuracy(confidences[:, 400:], correct[:, 400:], thresholds)
        exceeded += accuracy < correct[1, 400:].mean() - 0.02
    assert exceeded < 15, "about one in twenty"


def test_a_stage_may_answer_all_rows_or_no_row() -> None:
    confidences = np.array([[1.0, 1.0, 0.5, 0.5]])
    right, wrong = np.ones(4, bool), np.zeros(4, bool)
    student_right, teacher_right = np.stack([right, wrong]), np.stack([wrong, right])
    assert fit_thresholds(confidences, student_right, 0.0) == (0.0,)
    assert fit_thresholds(confidences, teacher_right, 0.0) == (UNREACHABLE,)
    # two of four rows are lost, and their standard error is one row: the bound is 3.645 rows
    assert fit_thresholds(confidences, teacher_right, 3.65 / 4) == (0.75,)
    assert fit_thresholds(confidences, teacher_right, 3.64 / 4) == (UNREACHABLE,)


def test_thresholds_are_fitted_on_dev_and_reported_on_test(tmp_path: Path) -> None:
    dataset = read(write_splits("single", tmp_path / "data"))
    fitted, reported, description = split_rows(dataset, ("train", "dev", "test"), 0)
    assert fitted == list(dataset.examples("dev"))
    assert reported == list(dataset.examples("test"))
    assert description["fitted_on"] == "dev"
    assert description["reported_on"] == "test"


def test_thresholds_are_fitted_and_reported_on_halves_of_a_single_split(tmp_path: Path) -> None:
    dataset = read(write_splits("single", tmp_path / "data"))
    fitted, reported, description = split_rows(dataset, ("train", "dev"), 0)
    assert description["fitted_on"] == "half of dev"
    assert description["reported_on"] == "the other half of dev"
    assert len(fitted) == len(reported) == 4
    lines = [example.line for example in (*fitted, *reported)]
    assert sorted(lines) == sorted(example.line for example in dataset.examples("dev"))
    same_seed, _, _ = split_rows(dataset, ("train", "dev"), 0)
    other_seed, _, _ = split_rows(dataset, ("train", "dev"), 1)
    assert same_seed == fitted
    assert other_seed != fitted
    single_row = read(write_splits("single", tmp_path / "single", {"train": 24, "dev": 1}))
    with pytest.raises(
        DataError, match=r"dev has too few rows \(1\): some are needed to choose by, and others to report on"
    ):
        split_rows(single_row, ("train", "dev"), 0)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.004, 0.002, "the reported rows confirm it"),
        (-0.020, 0.002, "too few rows are reported to confirm it"),
        (-0.020, -0.006, "more is lost on the reported rows; give more held-out rows, or allow less"),
    ],
)
def test_the_sentence_says_whether_the_loss_is_within_the_limit(low: float, high: float, verdict: str) -> None:
    student = {"name": "student", "share": 0.8, "accuracy": 0.9, "texts_per_second": 1000.0}
    teacher = {"name": "teacher", "share": 0.2, "accuracy": 0.9, "texts_per_second": 100.0}
    report = {
        "metric": "accuracy",
        "stages": [student, teacher],
        "cascade": {"accuracy": 0.89, "texts_per_second": 350.0},
        "delta_vs_teacher": {"difference": (low + high) / 2, "low": low, "high": high},
        "max_loss": 0.5,
        "reported_on": "test",
        "fitted_on": "dev",
        "fitted_rows": 990,
    }
    sentence = cascade_sentence(report)
    assert sentence.endswith(f"for a loss of at most 0.5 points: {verdict}.")
    assert "the student answers 80.0 %, the teacher answers 20.0 % of the texts: 89.0 % accuracy on test" in sentence
    assert "with 3.5 times as many texts a second" in sentence


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_saved_cascade_is_used_as_one_model(teacher: Path, tmp_path: Path) -> None:
    data, run, recorder = write_splits("single", tmp_path / "data", SIZES), tmp_path / "run", RecordingReporter()
    result = heedful.distil(
        teacher, data, run, student="bag", cascade=True, max_loss=2, reporter=recorder, seeds=1, epochs=2,
        overrides={"verdict.precision": "float32", "verdict.baseline": "none", "verdict.texts": 8, "verdict.rounds": 1},
    )  # fmt: skip
    report = result.results["cascade"]
    assert report == json.loads((run / "cascade.json").read_text())
    assert report["max_loss"] == 2
    assert report["fitted_on"] == "dev"
    assert report["reported_on"] == "test"
    student, _ = report["stages"]
    assert [stage["name"] for stage in report["stages"]] == ["student", "teacher"]
    cascade = run / "cascade"
    (early_stage,) = load(cascade).early_stages
    assert early_stage.threshold == student["threshold"]
    evaluation = evaluate(cascade, data, split="test")
    assert evaluation.numbers["accuracy"] == pytest.approx(report["cascade"]["accuracy"])
    assert evaluation.intervals["accuracy"]["low"] == pytest.approx(report["cascade"]["interval"]["low"])
    for stage, model in zip(report["stages"], (run / "model", teacher), strict=True):
        assert evaluate(model, data, split="test").numbers["accuracy"] == pytest.approx(stage["accuracy"])
    answers = Engine(cascade)([example.text for example in read(data).examples("test")])
    answering_stages = [answer["stage"] for answer in answers]
    for number, stage in enumerate(report["stages"], start=1):
        assert stage["share"] == pytest.approx(answering_stages.count(number) / len(answers))
    cascade_accuracy_on_dev, teacher_accuracy_on_dev = (
        evaluate(model, data, split="dev").numbers["accuracy"] for model in (cascade, teacher)
    )
    assert cascade_accuracy_on_dev >= teacher_accuracy_on_dev - 0.02
    assert "## The cascade" in (run / "model" / "README.md").read_text()
    assert "<h2>The cascade</h2>" in (run / "report.html").read_text()
    message = "fitted on 40 rows, and one row is more than the allowed loss of 2 points"
    assert any(message in text for text in recorder.messages)


def test_a_finished_run_gets_a_cascade_without_training(teacher: Path, labelled: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "cascade" not in distil(teacher, labelled, run, student="bag", assignments=QUICK).results
    weights = (run / "model" / "model.safetensors").read_bytes()
    verdict = (run / "verdict.json").read_bytes()
    middle_stage = make_model_dir(tmp_path / "middle", "single")
    assignments = (*QUICK, f'cascade.stages=["{middle_stage}"]')
    for message in ("fitting the thresholds", "measuring the cascade"):  # an interrupted cascade is built again
        killer = RecordingReporter(after_message=message)
        with pytest.raises(KeyError, match="the power failed"):
            distil(teacher, labelled, run, student="bag", cascade=True, reporter=killer, assignments=assignments)
        assert not (run / "cascade.json").exists()
    recorder = RecordingReporter()
    result = distil(teacher, labelled, run, student="bag", cascade=True, reporter=recorder, assignments=assignments)
    report = result.results["cascade"]
    assert [stage["name"] for stage in report["stages"]] == ["student", "middle", "teacher"]
    assert sum(stage["share"] for stage in report["stages"]) == pytest.approx(1)
    assert report["max_loss"] == 0.5, "the default"
    assert any("one row is more than the allowed loss of 0.5 points" in text for text in recorder.messages)
    assert len(load(run / "cascade").early_stages) == 2
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    assert (run / "verdict.json").read_bytes() == verdict


def test_other_settings_of_the_cascade_replace_it(teacher: Path, labelled: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    middle_stage = make_model_dir(tmp_path / "middle", "single")
    first = (*QUICK, f'cascade.stages=["{middle_stage}"]')
    distil(teacher, labelled, run, student="bag", cascade=True, assignments=first)
    second = (*QUICK, "cascade.max_loss=90")
    report = distil(teacher, labelled, run, student="bag", cascade=True, assignments=second).results["cascade"]
    assert [stage["name"] for stage in report["stages"]] == ["student", "teacher"]
    assert report["stages"][0]["share"] == 1.0
    header, rows = cascade_table(report)
    assert header[1] == "answers"
    assert [row[:2] for row in rows] == [["student", "100.0 %"], ["teacher", "0.0 %"], ["cascade", ""]]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tag", r"cannot be a stage of a cascade \(token_classification\)"),
        ("multiple", r"cannot be a stage of a cascade \(multi_label_classification\)"),
        ("regression", r"cannot be a stage of a cascade \(regression\)"),
        ("masked", "a cascade is for classifiers, and .* is a masked language model: leave --cascade"),
    ],
)
def test_teachers_that_cannot_be_a_stage_are_refused_before_training(
    kind: str, message: str, labelled: Path, tmp_path: Path
) -> None:
    teacher = make_model_dir(tmp_path / kind, kind)
    with pytest.raises(HeedfulError, match=message):
        distil(teacher, labelled, tmp_path / "run", student="bag", cascade=True)
    assert not (tmp_path / "run").exists()


def test_a_single_row_to_fit_and_to_report_on_is_refused_before_training(teacher: Path, tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data", {"train": 24, "dev": 1})
    with pytest.raises(DataError, match=r"dev has too few rows \(1\): some are needed to choose by"):
        distil(teacher, data, tmp_path / "run", student="bag", cascade=True, assignments=QUICK)
    assert not (tmp_path / "run").exists()


def test_missing_models_and_wrong_limits_are_refused_before_training(
    teacher: Path, labelled: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(ModelError, match="is neither a folder here nor a name on the hub"):
        distil(tmp_path / "missing teacher", labelled, run, student="bag", cascade=True)
    stages = {"cascade.stages": [str(tmp_path / "missing stage")]}
    with pytest.raises(ModelError, match="is neither a folder here nor a name on the hub"):
        distil(teacher, labelled, run, student="bag", overrides=stages)
    with pytest.raises(SettingError, match=r"max_loss is -1\.0; expected percentage points from 0"):
        distil(teacher, labelled, run, student="bag", assignments=["cascade.max_loss=-1"])
    assert not run.exists()


def test_a_cascade_without_a_test_split(teacher: Path, tmp_path: Path) -> None:
    data, run = write_splits("single", tmp_path / "data", {"train": 24, "dev": 40}), tmp_path / "run"
    assignments = (*QUICK, "long_inputs=truncate", "data.max_row_bytes=5000")
    report = distil(teacher, data, run, student="bag", cascade=True, assignments=assignments).results["cascade"]
    assert report["fitted_on"] == "half of dev"
    assert report["reported_on"] == "the other half of dev"
    assert report["fitted_rows"] == report["reported_rows"] == 20
    data_settings, long_inputs = data_settings_for(run / "cascade", data)
    assert data_settings.max_row_bytes == 5000, "as for the run"
    assert long_inputs == "truncate", "as for the run"
    with pytest.raises(ModelError, match="is a cascade of models, and cannot be a teacher: give one of its stages"):
        distil(run / "cascade", data, tmp_path / "other run", student="bag", assignments=QUICK)
