"""`find_label_errors` finds labels that were flipped, and lists near duplicates with different labels first."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heedful
from heedful.data import DataSettings, LabelledExample, read
from heedful.errors import DataError, HeedfulError
from heedful.infer.engine import Engine
from heedful.runs.label_errors import confident_errors, find_label_errors

ANIMALS, TOOLS = ["cat", "dog", "horse", "cow", "sheep"], ["hammer", "saw", "drill", "wrench", "screwdriver"]
PLACES = ["in the barn", "behind the house", "near the river", "at the market", "under the old bridge", "by the road"]
FLIPPED = (4, 17, 40)  # indices of the sentences whose label is flipped


def toy() -> tuple[list[str], list[str]]:
    """Return 60 sentences about animals and tools, and the correct label of each."""
    texts = [f"the {noun} is {place}" for noun in [*ANIMALS, *TOOLS] for place in PLACES]
    return texts, ["animal"] * 30 + ["tool"] * 30


@pytest.fixture(scope="module")
def label_errors() -> heedful.LabelErrors:
    """The result for 62 sentences: three have a flipped label, and the last one contradicts its near duplicates."""
    texts, labels = toy()
    for index in FLIPPED:
        labels[index] = "tool" if labels[index] == "animal" else "animal"
    texts += ["The COW  is in the barn!", "the cow is in the barn."]
    labels += ["animal", "tool"]
    return find_label_errors({"train": (texts[:50], labels[:50]), "test": (texts[50:], labels[50:])})


def test_flipped_labels_are_found(label_errors: heedful.LabelErrors) -> None:
    texts, _ = toy()
    assert label_errors.examples == 62
    assert 0.8 < label_errors.accuracy <= 1
    first, *others = label_errors.errors
    assert (first.text, first.label, first.suggested_label) == ("the cow is in the barn.", "tool", "animal")
    assert (first.reason, first.split, first.line) == ("near-duplicate", "test", 12)
    assert {error.reason for error in others} == {"confident-learning"}
    least_probable = others[: len(FLIPPED)]
    assert {error.text for error in least_probable} == {texts[index] for index in FLIPPED}
    assert all(error.suggested_probability > error.probability for error in least_probable)
    margins = [error.probability - error.suggested_probability for error in others]
    assert margins == sorted(margins)


def test_the_corrected_file_is_read_back(label_errors: heedful.LabelErrors, tmp_path: Path) -> None:
    label_errors.to_csv(tmp_path / "errors.csv")
    with (tmp_path / "errors.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == [error.text for error in label_errors.errors]
    assert all(row["label"] == row["given_label"] for row in rows), "nothing changes before a person has looked"
    with (tmp_path / "fixed.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"label": row["suggested_label"]} for row in rows)
    texts, correct_labels = toy()
    labels = list(correct_labels)
    labels[FLIPPED[0]] = "tool"
    settings = DataSettings(dev_fraction=0.0, corrections=str(tmp_path / "fixed.csv"))
    source = read((texts, labels), LabelledExample, settings)
    assert [example.label for example in source.examples("train")] == correct_labels


def test_fine_tuned_models_take_the_place_of_the_linear_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence and its phrase are on the same side of every fold."""
    texts, correct_labels = toy()
    texts.append("screwdriver is by the road")  # the last sentence without its first word
    correct_labels.append("tool")
    labels = ["tool" if index == FLIPPED[0] else label for index, label in enumerate(correct_labels)]
    folds: list[list[int]] = []

    def predictor(examples: list[LabelledExample], classes: list[str], **options: Any) -> Any:
        assert [example.text for example in examples] == texts
        assert (options["model"], options["seed"]) == ("an encoder", 5)

        def predict(train: np.ndarray, held_out: np.ndarray) -> np.ndarray:
            folds.append(held_out.tolist())
            assert (59 in train) == (60 in train)
            return np.array(
                [[0.98 * (label == correct_labels[index]) + 0.01 for label in classes] for index in held_out]
            )

        return predict

    monkeypatch.setattr("heedful.runs.label_errors.finetuned_fold_predictor", predictor)
    label_errors = find_label_errors((texts, labels), method="finetune", model="an encoder", folds=3, seed=5)
    assert sorted(index for fold in folds for index in fold) == list(range(61))
    first = label_errors.errors[0]
    assert (first.text, first.suggested_label) == (texts[FLIPPED[0]], "animal")
    assert first.suggested_probability > 0.5


def test_unusable_methods_are_refused() -> None:
    with pytest.raises(HeedfulError, match="expected linear or finetune"):
        find_label_errors(toy(), method="cleanlab")  # type: ignore[arg-type]
    with pytest.raises(HeedfulError, match="model is an engine"):
        find_label_errors(toy(), method="finetune", model=Engine("heedful-mini-en"))
    with pytest.raises(DataError, match="expected 2 or more"):
        find_label_errors((["a b", "c d", "e f"], ["x", "x", "x"]), method="finetune")


def test_data_in_which_only_some_rows_have_a_second_text_is_refused_before_training() -> None:
    texts, labels = toy()
    messages: list[str] = []
    mixed: list[Any] = [(text, "is it alive?") for text in texts[:30]] + texts[30:]
    with pytest.raises(DataError, match='input 31 is "the hammer is in the barn", expected two texts'):
        find_label_errors((mixed, labels), method="finetune", log=messages.append)
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    rows[0]["text_pair"] = "is it alive?"
    with pytest.raises(DataError, match="2:text_pair: is missing"):
        find_label_errors(rows, method="finetune", log=messages.append)
    assert not messages


def test_pairs_have_both_texts_in_the_file(tmp_path: Path) -> None:
    texts, labels = toy()
    pairs = [(text, f"is the {text.split()[1]} alive?") for text in texts]
    labels[7] = "tool"
    label_errors = find_label_errors((pairs, labels))
    first = label_errors.errors[0]
    assert (first.text, first.text_pair) == pairs[7]
    label_errors.to_csv(tmp_path / "errors.csv")
    assert (tmp_path / "errors.csv").read_text(encoding="utf-8-sig").startswith("text,text_pair,label,given_label,")


def test_the_confident_joint_has_thresholds_of_each_class() -> None:
    probabilities = np.array([[0.6, 0.4], [0.7, 0.3], [0.45, 0.55], [0.3, 0.7], [0.2, 0.8], [0.64, 0.36]])
    targets = np.array([0, 0, 0, 1, 1, 1])
    # thresholds 0.583 and 0.62: the third example is below that of class 1, the last one reaches that of class 0
    assert confident_errors(probabilities, targets).tolist() == [False, False, False, False, False, True]


def test_data_without_one_label_each_is_refused() -> None:
    with pytest.raises(DataError, match="expected 2 or more"):
        find_label_errors((["a b", "c d", "e f"], ["x", "x", "x"]))
    with pytest.raises(DataError, match="one label"):
        find_label_errors((["a b", "c d"], [["x", "y"], ["x"]]))
    with pytest.raises(DataError, match="not near duplicates or phrases of each other: 2; expected 5"):
        find_label_errors((["one text", "one text", "other text"], ["x", "y", "x"]))
