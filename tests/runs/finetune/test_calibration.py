"""Probabilities are calibrated by a temperature that is fitted on dev and becomes a part of the last layer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import heedful
from heedful.errors import HeedfulError
from heedful.runs.results import read_results

# overfits: 40 texts whose labels are wrong in a quarter of the cases, read 80 times
HOW = {
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


def rows(count: int, seed: int, several: bool) -> tuple[list[str], list[Any]]:
    """Texts of six words; the word "dog" makes the label "dog", and a quarter of the labels are drawn anew."""
    draw = random.Random(seed)
    texts, labels = [], []
    for _ in range(count):
        words = draw.choices(WORDS, k=6)
        label = "dog" if "dog" in words else "none"
        if draw.random() < 0.25:
            label = draw.choice(["dog", "none"])
        texts.append(" ".join(words))
        labels.append([label] if several else label)
    return texts, labels


def run(folder: Path, several: bool, dev: int = 200, **more: object) -> Any:
    data = {"train": rows(40, 0, several), "dev": rows(dev, 1, several), "test": rows(400, 2, several)}
    return heedful.finetune("classify", data, output_dir=folder, overrides=HOW | more)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one label for each text."""
    folder = tmp_path_factory.mktemp("run_of_one_label") / "run"
    run(folder, False)
    return folder


@pytest.mark.parametrize(
    "several",
    [pytest.param(False, id="one label"), pytest.param(True, id="any number of labels", marks=pytest.mark.slow)],
)
def test_a_temperature_makes_probabilities_honest(run_folder: Path, tmp_path: Path, several: bool) -> None:
    plain = run(tmp_path / "plain", several, **{"task.calibrate": False}).results
    folder = run_folder
    if several:
        folder = run(tmp_path / "run", several).output_dir
    results = read_results(folder)
    temperature = results["temperature"]
    assert temperature > 1.05 and any(f"divided by {temperature:.3g}" in note for note in results["notes"])
    assert "temperature" not in plain
    ours, theirs = (
        load_file(place / "model/model.safetensors")["head.out.weight"] for place in (folder, tmp_path / "plain")
    )
    assert torch.allclose(ours * temperature, theirs, rtol=1e-5), "it is a part of the last layer"
    for split in ("dev", "test"):
        numbers, before = (run_results["splits"][split]["numbers"] for run_results in (results, plain))
        assert numbers["loss"] < before["loss"]
        assert numbers[plain["metric"]] == before[plain["metric"]], "no prediction changes"
        if not several:
            assert numbers["ece"] < 0.7 * before["ece"]
    texts = rows(3, 3, several)[0]
    (answer,) = heedful.Engine(folder)(texts[:1])
    written = [json.loads(line) for line in (folder / "predictions-test.jsonl").read_text().splitlines()]
    assert all(0 <= value <= 1 for line in written for value in line["answer"]["probabilities"].values())
    assert set(answer["probabilities"]) == {"dog", "none"}


def test_prediction_sets_contain_the_label_as_often_as_asked(run_folder: Path) -> None:
    texts, labels = rows(2000, 4, False)
    for coverage in (0.7, 0.9):
        answers = heedful.predict(run_folder, texts, heedful.Classification, prediction_set=coverage)
        right = sum(label in answer.prediction_set for answer, label in zip(answers, labels, strict=True))
        accuracy = sum(answer.label == label for answer, label in zip(answers, labels, strict=True)) / len(texts)
        expected = max(coverage, accuracy)  # the most probable label is always in the set
        assert right / len(texts) == pytest.approx(expected, abs=0.08)
        assert all(answer.label in answer.prediction_set for answer in answers)
    sizes = [len(answer.prediction_set) for answer in answers]
    assert 1 < sum(sizes) / len(sizes) < 2, "some sets have both labels"
    assert not any(answer.prediction_set for answer in heedful.predict(run_folder, texts[:2], heedful.Classification))


def test_a_small_dev_split_fits_nothing(tmp_path: Path) -> None:
    results = run(tmp_path / "run", False, dev=99, **{"train.epochs": 1}).results
    assert "temperature" not in results and not any("divided by" in note for note in results["notes"])
    assert any("not calibrated: dev needs 100 examples" in note for note in results["notes"])
    assert heedful.Engine(tmp_path / "run", prediction_set=0.9)(["the dog sat"])[0]["prediction_set"]
    run(tmp_path / "small", False, dev=19, **{"train.epochs": 1})
    with pytest.raises(HeedfulError, match="no calibration for prediction sets"):
        heedful.Engine(tmp_path / "small", prediction_set=0.9)
