"""Data in the forms in which TREC, SUBJ, IMDB and 20 Newsgroups are published, trained on without converting."""

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
Given = dict[str, Path] | Path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing, one thread."""
    times = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: times)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="latin-1") as file:
        file.write(text)


def trec(folder: Path) -> Given:
    files = {"train": folder / "train_5500.label", "test": folder / "TREC_10.label"}
    for seed, path in enumerate(files.values()):
        for row in classification_rows(40, seed=seed, labels=("DESC:manner", "HUM:ind", "DESC:def")):
            put(path, f"{row['label']} caf\u00e9 {row['text']}\n")
    return files


def subj(folder: Path) -> Given:
    for row in classification_rows(40, labels=("plot", "quote")):
        put(folder / f"{row['label']}.tok.gt9.5000", row["text"] + " .\n")
    return folder


def imdb(folder: Path) -> Given:
    for split in ("train", "test"):
        for number, row in enumerate(classification_rows(40, seed=len(split), labels=("pos", "neg"))):
            put(folder / split / row["label"] / f"{number}_7.txt", row["text"])
    put(folder / "train/unsup/0_0.txt", "nobody knows")
    put(folder / "imdb.vocab", "the\n")
    return folder


def news(folder: Path) -> Given:
    for split in ("train", "test"):
        for number, row in enumerate(classification_rows(40, seed=len(split), labels=("alt.tea", "comp.cups"))):
            text = f"From: a@b.c\nSubject: caf\u00e9\n\n> what ?\n{row['text']}\n"
            put(folder / f"20news-bydate-{split}" / row["label"] / str(49960 + number), text)
    return folder


FORMS: dict[str, tuple[Callable[[Path], Given], dict[str, Any], int]] = {  # and how many labels there are
    "trec": (trec, LATIN_1, 3),
    "trec coarse": (trec, LATIN_1 | {"data.label_until": '":"'}, 2),
    "subj": (subj, {}, 2),
    "imdb": (imdb, {}, 2),
    "news": (news, LATIN_1, 2),
}
FOLDERS = {"imdb": "test", "news": "20news-bydate-test"}  # of the texts that are asked


@pytest.mark.parametrize("name", FORMS)
def test_published_forms_are_trained_on_and_measured(tmp_path: Path, name: str) -> None:
    write, settings, labels = FORMS[name]
    data = write(tmp_path / "data")
    done = finetune_tiny("classify", data, tmp_path / "run", settings)
    numbers = done.results["splits"]["dev" if name == "subj" else "test"]["numbers"]
    assert numbers["count"] > 0 and 0 <= numbers["accuracy"] <= 1
    about = read_run_json(tmp_path / "run" / "data.json")
    assert all(not Path(each).is_absolute() for each in about["files"])
    measured = evaluate(tmp_path / "run", data, split="train")
    assert len(measured.trained_on) == (2 if name in ("subj", "imdb", "news") else 1)
    assert sum(each.startswith("labels in order") and each.count('"') == 2 * labels for each in about["stated"]) == 1
    asked = data["test"] if isinstance(data, dict) else data / FOLDERS.get(name, "")
    with pytest.raises(SystemExit, match="0"):
        main(["predict", str(tmp_path / "run"), "--file", str(asked), "--output", str(tmp_path / "answers.csv")])
    with (tmp_path / "answers.csv").open(encoding="utf-8", newline="") as file:
        answers = list(csv.DictReader(file))
    assert len(answers) == 40 and not any(row["error"] for row in answers)
    how = DataSettings(dev_fraction=0.0, encoding=settings.get("data.encoding"))
    texts = {example.texts[0] for example in read(data, settings=how).examples("test" if name != "subj" else "train")}
    assert {row["input.text"] for row in answers} == texts
    again = finetune_tiny("classify", data, tmp_path / "run", settings)
    assert again.results == done.results, "the same command finds the same data"
    if name == "imdb":
        put(next((tmp_path / "data/train/pos").iterdir()), "more")
        with pytest.raises(HeedfulError, match=r"other data: train/pos changed"):
            finetune_tiny("classify", data, tmp_path / "run", settings)
