"""Corrected labels are applied to their examples, also after a spreadsheet has saved the file of corrections."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from heedful.data import DataSettings, LabelledExample, dataset_for_task, read
from heedful.data.bad_rows import Raise
from heedful.data.labelled.corrections import read_corrections, write_review_file
from heedful.errors import DataError

DATA = (
    "text,label\n=1+1 is two,right\nthe sea is dry,right\nthe sun  is hot,wrong\n"
    "'=1 is text,wrong\n"
    '"two\nlines",right\na,right\na,wrong\n'
)
COLUMNS = ["text", "label", "given_label"]


def settings(corrections: Path) -> DataSettings:
    return DataSettings(dev_fraction=0.0, corrections=str(corrections))


def write(path: Path, *rows: tuple[str, str, str]) -> Path:
    write_review_file(path, COLUMNS, [dict(zip(COLUMNS, row, strict=True)) for row in rows])
    return path


def test_corrections_replace_labels_and_leave_examples_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(DATA)
    file = write(
        tmp_path / "fixed.csv",
        ("=1+1 is two", "wrong", "right"),
        ("the sea is dry", "", "right"),
        ("the sun is hot", "right", "wrong"),
        ("'=1 is text", "right", "wrong"),
        ("two lines", "right", "right"),
        ("a", "right", "wrong"),
        ("not in the data", "right", "wrong"),
    )
    assert "'=1+1 is two" in file.read_text(encoding="utf-8-sig"), "a spreadsheet does not run it"
    dataset = read(tmp_path / "a.csv", LabelledExample, settings(file))
    for _ in range(2):  # the second reading must not count the corrections again
        read_examples = [(example.text, example.label) for example in dataset.examples("train")]
    assert read_examples == [
        ("=1+1 is two", "wrong"),
        ("the sun  is hot", "right"),
        ("'=1 is text", "right"),
        ("two\nlines", "right"),
        ("a", "right"),
        ("a", "right"),
    ]
    assert dataset.row_errors.repairs == {"corrected by fixed.csv": 4, "left out by fixed.csv": 1}
    assert (
        "fixed.csv: 1 of 6 corrections change nothing, since no example has their text and given_label, like "
        '"not in the data" with "wrong"'
    ) in dataset.stated


def test_corrections_separated_by_semicolons(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(DATA)
    (tmp_path / "fixed.csv").write_text("﻿text;label;given_label\r\nthe sea is dry;wrong;right\r\n", encoding="utf-8")
    dataset = read(tmp_path / "a.csv", LabelledExample, settings(tmp_path / "fixed.csv"))
    assert [example.label for example in dataset.examples("train")][1] == "wrong"


def test_corrections_that_match_are_not_reported(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(DATA)
    (tmp_path / "b.csv").write_text("text,label\nb,right\n")
    file = write(tmp_path / "fixed.csv", ("a", "right", "wrong"), ("b", "", "right"), ("unchanged", "wrong", "wrong"))
    dataset = read({"train": tmp_path / "a.csv", "test": tmp_path / "b.csv"}, LabelledExample, settings(file))
    assert not [note for note in dataset.stated if "corrections change nothing" in note]


def test_the_label_0_in_json_lines_is_not_an_emptied_label(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,1\nb,0\nc,1\n")
    rows = '{"text": "a", "label": 0, "given_label": 1}\n{"text": "c", "label": null, "given_label": 1}\n'
    (tmp_path / "fixed.jsonl").write_text(rows)
    dataset = read(tmp_path / "a.csv", LabelledExample, settings(tmp_path / "fixed.jsonl"))
    assert [(example.text, example.label) for example in dataset.examples("train")] == [("a", "0"), ("b", "0")]


def test_a_file_that_cannot_be_written_is_not_left_behind(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield dict.fromkeys(COLUMNS, "x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        write_review_file(tmp_path / "fixed.csv", COLUMNS, rows())
    assert not list(tmp_path.iterdir()), "the same command can be repeated"
    with pytest.raises(DataError, match=r"there is no folder .*: create it"):
        write_review_file(tmp_path / "absent" / "fixed.csv", COLUMNS, [])


def test_folders_of_classes_and_several_files_are_corrected(tmp_path: Path) -> None:
    for label in ("good", "bad"):
        (tmp_path / "films" / "train" / label).mkdir(parents=True)
        (tmp_path / "films" / "train" / label / "0.txt").write_text(f"a {label} film")
        (tmp_path / "films" / "train" / label / "1.txt").write_text(f"one more {label} film")
    file = write(tmp_path / "fixed.csv", ("a bad film", "good", "bad"))
    dataset = read(tmp_path / "films", LabelledExample, settings(file))
    assert sorted(example.label for example in dataset.examples("train")) == ["bad", "good", "good", "good"]


def test_a_label_that_no_example_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(DATA)
    file = write(tmp_path / "typo.csv", ("a", "right", "wrong"), ("the sea is dry", "wrnog", "right"))
    with pytest.raises(DataError) as raised:
        read(tmp_path / "a.csv", LabelledExample, settings(file))
    assert str(raised.value) == (
        'typo.csv corrects "the sea is dry" to the label "wrnog", which no example has (did you mean "wrong"?): use '
        'one of "right", "wrong", or add an example with the new label to the data'
    )
    (tmp_path / "b.csv").write_text("text,label\nneither nor,wrnog\n")
    dataset = read({"train": tmp_path / "a.csv", "test": tmp_path / "b.csv"}, LabelledExample, settings(file))
    assert [example.label for example in dataset.examples("train")][1] == "wrnog", "an example of another split has it"
    spaces = write(tmp_path / "spaces.csv", ("the sea is dry", " wrong ", "right"))
    dataset = read(tmp_path / "a.csv", LabelledExample, settings(spaces))
    assert [example.label for example in dataset.examples("train")][1] == "wrong"


def test_unusable_corrections_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(DATA)
    (tmp_path / "other.csv").write_text("text,label\na,right\n")
    with pytest.raises(DataError, match="no column given_label"):
        read_corrections(tmp_path / "other.csv")
    file = write(tmp_path / "twice.csv", ("a", "wrong", "right"), ("a", "neither", "right"))
    with pytest.raises(DataError, match=r"twice\.csv:3: .* give both rows the same label"):
        read_corrections(file)
    with pytest.raises(DataError, match="exists already"):
        write(tmp_path / "twice.csv")
    scores = {"train": (["a", "b"], [["x", "y"], ["x"]])}
    fixed = write(tmp_path / "fixed.csv", ("a", "wrong", "right"))
    with pytest.raises(DataError, match="examples with one label"):
        dataset_for_task(LabelledExample, scores, settings(fixed), Raise())
