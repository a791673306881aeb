"""Calibration: a temperature fitted on dev or out of fold, folded into the last layer's weights; prediction sets."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import heedful
from heedful.errors import HeedfulError
from heedful.runs.results import read_predictions, read_results
from heedful.tasks.classify import MIN_CALIBRATION_EXAMPLES
from heedful.tasks.metrics.conformal import MIN_SET_EXAMPLES
from heedful.tasks.specs import SPECS

# settings with which a model overfits to 40 texts, a quarter of which have random labels
OVERFITTING = {
    "init.kind": "scratch",
    "init.width": 32,
    "init.layers": 1,
    "eval_baseline": False,
    "train.epochs": 80,
    "train.optimizer.lr": 5e-3,
    "train.precision": "float32",
    "fit.load_best_at_end": False,
    "fit.eval_every_epochs": 80.0,
}
WORDS = ("the", "cat", "dog", "sat", "ran", "mat", "on", "a", "in", "of")


def texts_and_labels(count: int, seed: int, multilabel: bool) -> tuple[list[str], list[Any]]:
    """Return texts of six words, with the label "dog" if a text has this word, else "none".

    A quarter of the labels are replaced by random ones. With `multilabel`, the label is in a list.
    """
    rng = random.Random(seed)
    texts, labels = [], []
    for _ in range(count):
        words = rng.choices(WORDS, k=6)
        label = "dog" if "dog" in words else "none"
        if rng.random() < 0.25:
            label = rng.choice(["dog", "none"])
        texts.append(" ".join(words))
        labels.append([label] if multilabel else label)
    return texts, labels


def finetune_overfitting(
    folder: Path, multilabel: bool = False, num_dev: int = 200, **settings: object
) -> heedful.RunResult:
    data = {
        "train": texts_and_labels(40, 0, multilabel),
        "dev": texts_and_labels(num_dev, 1, multilabel),
        "test": texts_and_labels(400, 2, multilabel),
    }
    return heedful.finetune("classify", data, output_dir=folder, overrides=OVERFITTING | settings)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one label for each text."""
    folder = tmp_path_factory.mktemp("run_of_one_label") / "run"
    finetune_overfitting(folder)
    return folder


@pytest.mark.parametrize(
    "multilabel",
    [pytest.param(False, id="one label"), pytest.param(True, id="any number of labels", marks=pytest.mark.slow)],
)
def test_a_temperature_improves_calibration(run_folder: Path, tmp_path: Path, multilabel: bool) -> None:
    uncalibrated_folder = tmp_path / "uncalibrated"
    uncalibrated = finetune_overfitting(uncalibrated_folder, multilabel, **{"task.calibrate": False}).results
    folder = run_folder
    if multilabel:
        folder = finetune_overfitting(tmp_path / "run", multilabel).output_dir
    results = read_results(folder)
    temperature = results["temperature"]
    assert temperature > 1.05
    assert any(f"divided by {temperature:.3g}" in note for note in results["notes"])
    assert "temperature" not in uncalibrated
    tensors, uncalibrated_tensors = (
        load_file(path / "model/model.safetensors") for path in (folder, uncalibrated_folder)
    )
    for name in ("head.out.weight", "head.out.bias"):
        assert torch.allclose(tensors[name] * temperature, uncalibrated_tensors[name], rtol=1e-5, atol=1e-7), (
            f"{name} is not divided by the temperature"
        )
    metric = results["metric"]
    for split in ("dev", "test"):
        numbers = results["splits"][split]["numbers"]
        uncalibrated_numbers = uncalibrated["splits"][split]["numbers"]
        assert numbers["loss"] < uncalibrated_numbers["loss"]
        assert numbers[metric] == uncalibrated_numbers[metric], "the temperature changed a prediction"
        if not multilabel:
            assert numbers["ece"] < 0.7 * uncalibrated_numbers["ece"]
    (answer,) = heedful.Engine(folder)(["the dog sat"])
    assert set(answer["probabilities"]) == {"dog", "none"}
    for prediction in read_predictions(folder, "test"):
        for probability in prediction["answer"]["probabilities"].values():
            assert 0 <= probability <= 1


@pytest.mark.parametrize("coverage", [0.7, 0.9])
def test_prediction_sets_contain_the_label_as_often_as_requested(run_folder: Path, coverage: float) -> None:
    texts, labels = texts_and_labels(2000, 4, multilabel=False)
    answers = heedful.predict(run_folder, texts, heedful.Classification, prediction_set=coverage)
    in_set = [label in answer.prediction_set for answer, label in zip(answers, labels, strict=True)]
    correct = [answer.label == label for answer, label in zip(answers, labels, strict=True)]
    assert all(answer.label in answer.prediction_set for answer in answers)
    # a set always contains the predicted label, so it contains the label at least as often as the prediction is correct
    expected = max(coverage, fmean(correct))
    assert fmean(in_set) == pytest.approx(expected, abs=0.08)
    if coverage == 0.9:
        assert 1 < fmean(len(answer.prediction_set) for answer in answers) < 2, "no set has both labels, or all do"


def test_without_a_coverage_there_are_no_prediction_sets(run_folder: Path) -> None:
    for answer in heedful.predict(run_folder, ["the cat sat", "the dog sat"], heedful.Classification):
        assert not answer.prediction_set


def test_a_small_dev_split_fits_no_temperature(tmp_path: Path) -> None:
    results = finetune_overfitting(
        tmp_path / "run", num_dev=MIN_CALIBRATION_EXAMPLES - 1, **{"train.epochs": 1}
    ).results
    assert "temperature" not in results
    assert not any("divided by" in note for note in results["notes"])
    assert any(f"not calibrated: dev needs {MIN_CALIBRATION_EXAMPLES} examples" in note for note in results["notes"])
    assert heedful.Engine(tmp_path / "run", prediction_set=0.9)(["the dog sat"])[0]["prediction_set"]


def test_a_very_small_dev_split_calibrates_no_prediction_sets(tmp_path: Path) -> None:
    finetune_overfitting(tmp_path / "run", num_dev=MIN_SET_EXAMPLES - 1, **{"train.epochs": 1})
    with pytest.raises(HeedfulError, match="no calibration for prediction sets"):
        heedful.Engine(tmp_path / "run", prediction_set=0.9)


def finetune_without_dev(folder: Path, num_train: int, **settings: object) -> dict[str, Any]:
    data = {"train": texts_and_labels(num_train, 0, False), "test": texts_and_labels(400, 2, False)}
    overrides = {"method": "linear", "folds": 4, "eval_baseline": False} | settings
    return heedful.finetune("classify", data, output_dir=folder, overrides=overrides).results


def test_without_dev_out_of_fold_answers_calibrate(tmp_path: Path) -> None:
    results = finetune_without_dev(tmp_path / "run", 150)
    uncalibrated = finetune_without_dev(tmp_path / "uncalibrated", 150, **{"task.calibrate": False})
    temperature = results["temperature"]
    note = f"scores are divided by {temperature:.3g}, fitted on out-of-fold probabilities of 150 rows"
    assert temperature > 1.05
    assert any(note in line for line in results["notes"])
    assert note in (tmp_path / "run/model/README.md").read_text()
    numbers, uncalibrated_numbers = results["splits"]["test"]["numbers"], uncalibrated["splits"]["test"]["numbers"]
    assert numbers["accuracy"] == uncalibrated_numbers["accuracy"]
    assert numbers["loss"] < uncalibrated_numbers["loss"]
    assert "calibration" not in results["method_comparison"], "the model has it"
    out_of_fold, raw = (run["method_comparison"]["methods"]["linear"] for run in (results, uncalibrated))
    assert out_of_fold["metric_value"] == raw["metric_value"]
    assert out_of_fold["numbers"]["loss"] < raw["numbers"]["loss"]
    least_confidence = min(point["min_confidence"] for point in raw["numbers"]["coverage"])
    calibrated = least_confidence ** (1 / temperature)
    calibrated /= calibrated + (1 - least_confidence) ** (1 / temperature)
    thresholds = [point["min_confidence"] for point in out_of_fold["numbers"]["coverage"]]
    assert min(thresholds) == pytest.approx(calibrated, abs=1e-3), "thresholds are for the calibrated model"
    assert "temperature" not in uncalibrated
    assert not heedful.load(tmp_path / "uncalibrated/model").calibration
    assert len(heedful.load(tmp_path / "run/model").calibration) == 150
    texts, labels = texts_and_labels(1000, 4, multilabel=False)
    answers = heedful.predict(tmp_path / "run", texts, heedful.Classification, prediction_set=0.9)
    in_set = [label in answer.prediction_set for answer, label in zip(answers, labels, strict=True)]
    assert fmean(in_set) == pytest.approx(0.9, abs=0.06)
    (tmp_path / "run/results.json").unlink()  # as if the run had been interrupted after the comparison
    (tmp_path / "run/seed.json").unlink()
    assert finetune_without_dev(tmp_path / "run", 150)["temperature"] == temperature


def test_a_generated_dev_split_gives_way_to_more_out_of_fold_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heedful.runs.finetune.method_choice.METHODS", ("finetune",))
    monkeypatch.setitem(SPECS, "classify", replace(SPECS["classify"], epochs=((0, 1.0),)))
    results = finetune_without_dev(tmp_path / "run", 120, method="auto", method_seconds=1e6)
    assert results["settings"]["method"] == "finetune"
    assert 0 < results["data"]["splits"]["dev"]["examples"] < 30
    assert len(heedful.load(tmp_path / "run/model").calibration) == 120
    assert any("out-of-fold probabilities of 120 rows" in note or "train needs" in note for note in results["notes"])


def test_few_out_of_fold_answers_fit_no_temperature(tmp_path: Path) -> None:
    results = finetune_without_dev(tmp_path / "run", MIN_CALIBRATION_EXAMPLES - 1)
    assert "temperature" not in results
    assert any("not calibrated: train needs 100 examples" in note for note in results["notes"])
    assert heedful.Engine(tmp_path / "run", prediction_set=0.9)(["the dog sat"])[0]["prediction_set"]
