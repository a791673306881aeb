"""Data in the forms in which TREC, SUBJ, IMDB and 20 Newsgroups are published need no conversion.

Invented texts are written in these forms.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful.cli import main
from heedful.data import DataSettings, read
from heedful.errors import HeedfulError
from heedful.runs.evaluate import evaluate
from heedful.runs.run_folder import read_run_json
from tests.support.generated_data import classification_rows, finetune_tiny

LATIN_1 = {"data.encoding": "latin-1"}
Data = dict[str, Path] | Path  # files by split, or a folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the measurement of latency, and compute with one thread, so that equal runs are equal."""
    latency = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: latency)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def append(path: Path, text: str) -> None:
    """Append text in Latin-1 to a file, which is created with its folders if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="latin-1") as file:
        file.write(text)


def write_trec(folder: Path) -> Data:
    files = {"train": folder / "train_5500.label", "test": folder / "TREC_10.label"}
    for seed, path in enumerate(files.values()):
        for row in classification_rows(40, seed=seed, labels=("DESC:manner", "HUM:ind", "DESC:def")):
            append(path, f"{row['label']} caf\u00e9 {row['text']}\n")
    return files


def write_subj(folder: Path) -> Data:
    for row in classification_rows(40, labels=("plot", "quote")):
        append(folder / f"{row['label']}.tok.gt9.5000", row["text"] + " .\n")
    return folder


def write_imdb(folder: Path) -> Data:
    for split in ("train", "test"):
        for number, row in enumerate(classification_rows(40, seed=len(split), labels=("pos", "neg"))):
            append(folder / split / row["label"] / f"{number}_7.txt", row["text"])
    append(folder / "train/unsup/0_0.txt", "nobody knows")
    append(folder / "imdb.vocab", "the\n")
    return folder


def write_news(folder: Path) -> Data:
    for split in ("train", "test"):
        for number, row in enumerate(classification_rows(40, seed=len(split), labels=("alt.tea", "comp.cups"))):
            text = f"From: a@b.c\nSubject: caf\u00e9\n\n> what ?\n{row['text']}\n"
            append(folder / f"20news-bydate-{split}" / row["label"] / str(49960 + number), text)
    return folder


FORMS: dict[str, tuple[Callable[[Path], Data], dict[str, Any], int]] = {  # writer, settings, number of labels
    "trec": (write_trec, LATIN_1, 3),
    "trec coarse": (write_trec, LATIN_1 | {"data.label_until": '":"'}, 2),
    "subj": (write_subj, {}, 2),
    "imdb": (write_imdb, {}, 2),
    "news": (write_news, LATIN_1, 2),
}
TEST_FOLDERS = {"imdb": "test", "news": "20news-bydate-test"}


@pytest.mark.parametrize("name", FORMS)
def test_published_forms_are_trained_on_and_measured(tmp_path: Path, name: str) -> None:
    write_data, settings, num_labels = FORMS[name]
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    has_test = name != "subj"
    results = finetune_tiny("classify", data, run, settings).results
    numbers = results["splits"]["test" if has_test else "dev"]["numbers"]
    assert numbers["count"] > 0
    assert 0 <= numbers["accuracy"] <= 1
    data_facts = read_run_json(run / "data.json")
    assert not any(Path(file).is_absolute() for file in data_facts["files"])
    (labels_note,) = (sentence for sentence in data_facts["stated"] if sentence.startswith("labels in order"))
    assert labels_note.count('"') == 2 * num_labels, "each label in quotes"
    trained_on = evaluate(run, data, split="train").trained_on
    assert len(trained_on) == (2 if name in ("subj", "imdb", "news") else 1), "a file or folder per label, or one file"
    inputs = data["test"] if isinstance(data, dict) else data / TEST_FOLDERS.get(name, "")
    check_predictions(run, inputs, data, settings, "test" if has_test else "train")
    repeated = finetune_tiny("classify", data, run, settings).results
    assert repeated == results


def check_predictions(run: Path, inputs: Path, data: Data, settings: dict[str, Any], split: str) -> None:
    """Check that `heedful predict` answers each text of a split once."""
    predictions = run.parent / "predictions.csv"
    with pytest.raises(SystemExit, match="0"):
        main(["predict", str(run), "--file", str(inputs), "--output", str(predictions)])
    with predictions.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40
    assert not any(row["error"] for row in rows)
    dataset = read(data, settings=DataSettings(dev_fraction=0.0, encoding=settings.get("data.encoding")))
    texts = {example.texts[0] for example in dataset.examples(split)}
    assert {row["input.text"] for row in rows} == texts


def test_a_changed_file_of_a_class_is_other_data(tmp_path: Path) -> None:
    data = write_imdb(tmp_path / "data")
    finetune_tiny("classify", data, tmp_path / "run")
    append(next((tmp_path / "data/train/pos").iterdir()), "more")
    with pytest.raises(HeedfulError, match=r"other data: train/pos changed"):
        finetune_tiny("classify", data, tmp_path / "run")
