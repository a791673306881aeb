"""Answers as CSV, in one file, and as the lines of CoNLL with predicted tags."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from heedful.data import DataSettings
from heedful.errors import HeedfulError
from heedful.infer.batch import BatchSettings, predict_files
from heedful.infer.engine import Engine
from tests.support.model_folders import make


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """One label of three."""
    return Engine(make(tmp_path_factory.mktemp("single"), "single"))


@pytest.fixture(scope="session")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tag for each word."""
    return Engine(make(tmp_path_factory.mktemp("tag"), "tag"))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_column_for_each_value(single: Engine, tmp_path: Path) -> None:
    rows = ['=HYPERLINK("x"),1', '"two\nlines, and a comma",-1', "@cat,x", "ragged"]
    (tmp_path / "a.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    predict_files(single, tmp_path / "a.csv", tmp_path / "out", BatchSettings(format="csv", rows=2))
    first, two = (table(tmp_path / "out" / f"part-0000000{part}.csv") for part in range(2))
    assert list(first[0]) == list(two[0])
    all_rows = [*first, *two]
    assert [row["input.text"] for row in all_rows] == ['\'=HYPERLINK("x")', "two\nlines, and a comma", "'@cat", ""]
    assert [row["input.label"] for row in all_rows] == ["1", "-1", "x", ""]
    answer: Any = single(["two\nlines, and a comma"])[0]
    assert all_rows[1]["label"] == answer["label"]
    shares = {name: float(all_rows[1][f"probabilities.{name}"]) for name in answer["probabilities"]}
    assert shares == pytest.approx(answer["probabilities"], abs=2e-6)
    assert all_rows[3]["error"].startswith("has 1 cells") and not all_rows[3]["label"]
    assert [(row["file"], row["row"], row["line"]) for row in all_rows[2:]] == [
        ("a.csv", "3", "5"),
        ("a.csv", "4", "6"),
    ]


def test_lists_in_csv_are_json(tagger: Engine, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Ada lives here\n")
    predict_files(tagger, tmp_path / "a.txt", tmp_path / "a.out.csv", BatchSettings(format="csv"))
    (row,) = table(tmp_path / "a.out.csv")
    assert row["words"].startswith('[{"text": "Ada", "label": ')


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_one_file_is_the_parts_joined(
    single: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    (tmp_path / "a.txt").write_text("".join(f"the cat {number}\n" for number in range(7)))
    settings, out = BatchSettings(format=form, rows=2), tmp_path / f"out.{form}"
    done = predict_files(single, tmp_path / "a.txt", out, settings)
    assert (done.rows, done.parts, done.folder) == (7, 4, out)
    predict_files(single, tmp_path / "a.txt", tmp_path / "parts", settings)
    first, *others = (path.read_bytes().splitlines() for path in sorted((tmp_path / "parts").glob("part-*")))
    assert out.read_bytes().splitlines() == [*first, *(line for part in others for line in part[form == "csv" :])]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", out.name, "parts"]
    with pytest.raises(HeedfulError, match=f"out.{form}: exists already: give another file"):
        predict_files(single, tmp_path / "a.txt", out, settings)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HeedfulError, match="one file is written by one process"):
        predict_files(single, tmp_path / "a.txt", tmp_path / f"other.{form}", settings)


COLUMNS = "-DOCSTART- -X- O\n\nAda NNP B-PER\nlives VBZ O\n\n\n-DOCSTART- -X- O\r\n\r\nhere\tRB\tO\r\nnow\tRB\tO\r\n\n"


def test_conll_is_the_same_lines_with_a_column_more(tagger: Engine, tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_bytes(COLUMNS.encode())
    settings = BatchSettings(format="conll", rows=1)
    done = predict_files(tagger, tmp_path / "a.conll", tmp_path / "b.conll", settings)
    assert (done.rows, done.errors) == (2, 0)
    answers: Any = tagger([["Ada", "lives"], ["here", "now"]])
    first, two = ([word["label"] for word in answer["words"]] for answer in answers)
    assert (tmp_path / "b.conll").read_bytes().decode() == (
        f"-DOCSTART- -X- O O\n\nAda NNP B-PER {first[0]}\nlives VBZ O {first[1]}\n\n\n"
        f"-DOCSTART- -X- O O\r\n\r\nhere\tRB\tO\t{two[0]}\r\nnow\tRB\tO\t{two[1]}\r\n\n"
    )


def test_conll_with_a_header_and_a_sentence_that_cannot_be_read(tagger: Engine, tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_bytes(b"word tag\nAda B-PER\n\nb\0d O\n\nhere O\n")
    done = predict_files(tagger, tmp_path / "a.conll", tmp_path / "b.conll", BatchSettings(format="conll"))
    assert (done.rows, done.errors) == (3, 1) and "a.conll:4: 2: holds a NUL" in done.first_error
    lines = (tmp_path / "b.conll").read_text().split("\n")
    assert (lines[0], lines[3]) == ("word tag predicted", "b\0d O _")
    assert all(len(lines[place].split()) == 3 for place in (1, 5))


def test_conll_is_for_conll(tagger: Engine, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Ada lives here\n")
    with pytest.raises(HeedfulError, match=r"a\.txt: is no CoNLL file"):
        predict_files(tagger, tmp_path / "a.txt", tmp_path / "out", BatchSettings(format="conll"))
    with pytest.raises(HeedfulError, match="format is conll"):
        BatchSettings(format="conll", inputs=False)


def test_a_folder_of_texts_is_answered_file_by_file(single: Engine, tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / "news" / "tea").mkdir(parents=True, exist_ok=True)
        (tmp_path / "news" / "tea" / str(number)).write_text(f"From: a\n\nthe cat {number}\n")
    done = predict_files(single, tmp_path / "news", tmp_path / "a.csv", BatchSettings(format="csv", rows=2))
    rows = table(tmp_path / "a.csv")
    assert done.rows == 5 and [row["file"] for row in rows] == [f"news/tea/{number}" for number in range(5)]
    assert rows[3]["input.text"] == "From: a\n\nthe cat 3"
    assert predict_files(single, tmp_path / "news", tmp_path / "b", data=DataSettings(format="class-folders"))
