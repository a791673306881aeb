"""Answers as CSV, in a single file, and as CoNLL files with predicted tags."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from heedful.data import DataSettings
from heedful.errors import HeedfulError
from heedful.infer.batch import BatchSettings, predict_files
from heedful.infer.engine import Engine
from tests.support.model_folders import make_model_dir


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine that predicts one of three labels."""
    return Engine(make_model_dir(tmp_path_factory.mktemp("single"), "single"))


@pytest.fixture(scope="session")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine that predicts a tag for each word."""
    return Engine(make_model_dir(tmp_path_factory.mktemp("tag"), "tag"))


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_column_for_each_value(single: Engine, tmp_path: Path) -> None:
    rows = ['=HYPERLINK("x"),1', '"two\nlines, and a comma",-1', "@cat,x", "ragged"]
    (tmp_path / "a.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    predict_files(single, tmp_path / "a.csv", tmp_path / "out", BatchSettings(format="csv", rows=2))
    first, second = (read_csv(tmp_path / "out" / f"part-0000000{part}.csv") for part in range(2))
    assert list(first[0]) == list(second[0])
    all_rows = [*first, *second]
    assert [row["input.text"] for row in all_rows] == ['\'=HYPERLINK("x")', "two\nlines, and a comma", "'@cat", ""]
    assert [row["input.label"] for row in all_rows] == ["1", "-1", "x", ""]
    answer: Any = single(["two\nlines, and a comma"])[0]
    assert all_rows[1]["label"] == answer["label"]
    probabilities = {name: float(all_rows[1][f"probabilities.{name}"]) for name in answer["probabilities"]}
    assert probabilities == pytest.approx(answer["probabilities"], abs=2e-6)
    assert all_rows[3]["error"].startswith("has 1 cells") and not all_rows[3]["label"]
    assert [(row["file"], row["row"], row["line"]) for row in all_rows[2:]] == [
        ("a.csv", "3", "5"),
        ("a.csv", "4", "6"),
    ]


def test_lists_in_csv_are_json(tagger: Engine, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Ada lives here\n")
    predict_files(tagger, tmp_path / "a.txt", tmp_path / "a.out.csv", BatchSettings(format="csv"))
    (row,) = read_csv(tmp_path / "a.out.csv")
    assert row["words"].startswith('[{"text": "Ada", "label": ')


@pytest.mark.parametrize("file_format", ["csv", "jsonl"])
def test_a_single_file_consists_of_the_joined_parts(
    single: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: Any
) -> None:
    (tmp_path / "a.txt").write_text("".join(f"the cat {number}\n" for number in range(7)))
    settings, out = BatchSettings(format=file_format, rows=2), tmp_path / f"out.{file_format}"
    summary = predict_files(single, tmp_path / "a.txt", out, settings)
    assert (summary.rows, summary.parts, summary.folder) == (7, 4, out)
    predict_files(single, tmp_path / "a.txt", tmp_path / "parts", settings)
    first_part, *other_parts = (path.read_bytes().splitlines() for path in sorted((tmp_path / "parts").glob("part-*")))
    assert out.read_bytes().splitlines() == [
        *first_part,
        *(line for part in other_parts for line in part[file_format == "csv" :]),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", out.name, "parts"]
    with pytest.raises(HeedfulError, match=f"out.{file_format}: exists already: give another file"):
        predict_files(single, tmp_path / "a.txt", out, settings)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HeedfulError, match="one file is written by one process"):
        predict_files(single, tmp_path / "a.txt", tmp_path / f"other.{file_format}", settings)


CONLL = "-DOCSTART- -X- O\n\nAda NNP B-PER\nlives VBZ O\n\n\n-DOCSTART- -X- O\r\n\r\nhere\tRB\tO\r\nnow\tRB\tO\r\n\n"


def test_conll_output_adds_a_column_to_the_input_lines(tagger: Engine, tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_bytes(CONLL.encode())
    settings = BatchSettings(format="conll", rows=1)
    summary = predict_files(tagger, tmp_path / "a.conll", tmp_path / "b.conll", settings)
    assert (summary.rows, summary.errors) == (2, 0)
    answers: Any = tagger([["Ada", "lives"], ["here", "now"]])
    first, second = ([word["label"] for word in answer["words"]] for answer in answers)
    assert (tmp_path / "b.conll").read_bytes().decode() == (
        f"-DOCSTART- -X- O O\n\nAda NNP B-PER {first[0]}\nlives VBZ O {first[1]}\n\n\n"
        f"-DOCSTART- -X- O O\r\n\r\nhere\tRB\tO\t{second[0]}\r\nnow\tRB\tO\t{second[1]}\r\n\n"
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_sentences_of_several_conll_files_stay_apart(tagger: Engine, tmp_path: Path, rows: int) -> None:
    """Some files end without a blank line, or even without a newline."""
    contents = ("Ada O\nlives O", "here O\n", "now O\n\n", "then O\n-DOCSTART- O")
    files = [tmp_path / f"{number}.conll" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    out = tmp_path / "out.conll"
    assert predict_files(tagger, files, out, BatchSettings(format="conll", rows=rows)).rows == 4
    lines = [line.rpartition(" ")[0] for line in out.read_text().split("\n")]
    assert lines == ["Ada O", "lives O", "", "here O", "", "now O", "", "then O", "-DOCSTART- O", ""]


def test_conll_with_a_header_and_a_sentence_that_cannot_be_read(tagger: Engine, tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_bytes(b"word tag\nAda B-PER\n\nb\0d O\n\nhere O\n")
    summary = predict_files(tagger, tmp_path / "a.conll", tmp_path / "b.conll", BatchSettings(format="conll"))
    assert (summary.rows, summary.errors) == (3, 1) and "a.conll:4: 2: holds a NUL" in summary.first_error
    lines = (tmp_path / "b.conll").read_text().split("\n")
    assert (lines[0], lines[3]) == ("word tag predicted", "b\0d O _")
    assert all(len(lines[index].split()) == 3 for index in (1, 5))


def test_lines_that_conll_output_lacks_are_listed(tagger: Engine, tmp_path: Path) -> None:
    """Lines 3 to 5 begin a sentence of more than 20 characters. The sentence from line 10 on cannot be read."""
    text = "Ada O\n\none O\ntwo O\nthree O\nfour O\n\nhere O\n\nb\0d O\nnow O\n"
    (tmp_path / "a.conll").write_text(text)
    (tmp_path / "b.conll").write_text("b\0d O\n\nhere O\n")
    files, settings = [tmp_path / "a.conll", tmp_path / "b.conll"], BatchSettings(format="conll", rows=2)
    data = DataSettings(max_row_bytes=200)
    for _ in range(2):  # the second call finds all parts
        summary = predict_files(tagger, files, tmp_path / "out", settings, data=data)
        assert (summary.rows, summary.errors) == (6, 3)
        assert summary.stated[-1].endswith("or cannot be read and ends the file: a.conll:3-5, a.conll:10-end")
    parts = [path.read_text() for path in sorted((tmp_path / "out").glob("part-*"))]
    lines = [line for line in "".join(parts).split("\n") if line]
    assert [line.rpartition(" ")[0] for line in lines] == ["Ada O", "four O", "here O", "b\0d O", "here O"]
    assert [line.endswith(" _") for line in lines] == [False, True, False, True, False]
    whole = predict_files(tagger, tmp_path / "b.conll", tmp_path / "c.conll", settings)
    assert not any("missing from the output" in sentence for sentence in whole.stated)


def test_conll_output_needs_conll_input(tagger: Engine, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Ada lives here\n")
    with pytest.raises(HeedfulError, match=r"a\.txt: is no CoNLL file"):
        predict_files(tagger, tmp_path / "a.txt", tmp_path / "out", BatchSettings(format="conll"))
    with pytest.raises(HeedfulError, match="format is conll"):
        BatchSettings(format="conll", inputs=False)


def test_each_file_of_a_folder_of_texts_is_a_row(single: Engine, tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / "news" / "tea").mkdir(parents=True, exist_ok=True)
        (tmp_path / "news" / "tea" / str(number)).write_text(f"From: a\n\nthe cat {number}\n")
    summary = predict_files(single, tmp_path / "news", tmp_path / "a.csv", BatchSettings(format="csv", rows=2))
    rows = read_csv(tmp_path / "a.csv")
    assert summary.rows == 5 and [row["file"] for row in rows] == [f"news/tea/{number}" for number in range(5)]
    assert rows[3]["input.text"] == "From: a\n\nthe cat 3"
    assert predict_files(single, tmp_path / "news", tmp_path / "b", data=DataSettings(format="class-folders"))
