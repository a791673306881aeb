"""inherit_settings: which data settings of a training run apply to the files that a trained model reads later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heedful.data import DataSettings, read
from heedful.data.inputs.inherited_settings import inherit_settings, list_data_files
from heedful.errors import HeedfulError

TRAINED = DataSettings(
    columns={"text": 2, "label": 1},
    encoding="latin-1",
    header=False,
    delimiter=";",
    quoting="literal",
    dev_fraction=0.0,
)


def inherited_for_file(
    tmp_path: Path, name: str, data: bytes, training_names: tuple[str, ...], training_settings: Any = TRAINED
) -> DataSettings:
    """The settings for a new file of this name and content, after training on files with `training_names`."""
    (tmp_path / name).write_bytes(data)
    return inherit_settings(training_settings, training_names, [tmp_path / name])


def test_a_file_of_the_training_format_inherits_all_settings(tmp_path: Path) -> None:
    assert inherited_for_file(tmp_path, "a.csv", b"x;Who wrote it?\ny;caf\xe9\n", ("train.csv",)) == TRAINED
    assert inherited_for_file(tmp_path, "a.csv.gz", b"", ("train.csv",)) == TRAINED


@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl", "a.json", "a.parquet", "a.txt"])
def test_a_file_of_another_format_inherits_only_column_names(tmp_path: Path, name: str) -> None:
    assert inherited_for_file(tmp_path, name, b"", ("train.csv",)) == DataSettings(dev_fraction=0.0)
    named = DataSettings(columns={"text": ("title", "body"), "label": 1}, dev_fraction=0.0)
    assert inherited_for_file(tmp_path, name, b"", ("train.csv",), named).columns == {"text": ("title", "body")}


def test_a_format_setting_is_inherited_by_files_with_the_same_suffix(tmp_path: Path) -> None:
    training_settings = DataSettings(format="tsv", columns={"text": 2}, encoding="latin-1", dev_fraction=0.0)
    assert inherited_for_file(tmp_path, "a.csv", b"", ("train.csv",), training_settings) == training_settings
    assert inherited_for_file(tmp_path, "a.data", b"", ("train.data",), training_settings) == training_settings
    assert inherited_for_file(tmp_path, "a.jsonl", b"", ("train.csv",), training_settings) == DataSettings(
        dev_fraction=0.0
    )
    assert inherited_for_file(tmp_path, "a.jsonl", b"", (), training_settings) == DataSettings(dev_fraction=0.0)


@pytest.mark.parametrize(
    ("first", "columns"),
    [
        (b"id;text\n1;Rain\n", None),
        (b"label;text\nx;Rain\n", None),
        (b"text;label\nRain;x\n", None),
        (b"x;text\ny;z\n", None),
        (b"text;author\nRain;x\n", None),
        (b"score;Who wrote it?\ny;z\n", {"text": 2, "label": 1}),  # "score" may be a label here
    ],
)
def test_column_numbers_are_not_inherited_by_a_file_with_a_header(tmp_path: Path, first: bytes, columns: Any) -> None:
    settings = inherited_for_file(tmp_path, "a.csv", first, ("train.csv",))
    assert settings.columns == columns
    assert settings.header == (None if columns is None else False)


def test_a_file_in_utf8_is_not_read_in_another_encoding(tmp_path: Path) -> None:
    assert inherited_for_file(tmp_path, "a.csv", "x;café\n".encode(), ("train.csv",)).encoding is None
    assert inherited_for_file(tmp_path, "a.csv", b"x;cafe\n", ("train.csv",)).encoding == "latin-1"
    half = "x;" + "é" * 40_000  # the first 64 kB end inside a character
    assert inherited_for_file(tmp_path, "a.csv", half.encode(), ("train.csv",)).encoding is None


def test_a_first_row_that_may_be_a_header_is_refused(tmp_path: Path) -> None:
    for first, is_clear in (("id,phrase", False), ("42,Who wrote it?", True)):
        (tmp_path / "a.csv").write_text(f"{first}\n1,Who wrote Hamlet?\n2,What is rain?\n")
        settings = DataSettings(columns={"text": 2, "label": 1}, dev_fraction=0.0)
        if not is_clear:
            with pytest.raises(HeedfulError, match="may name the columns"):
                read(tmp_path / "a.csv", settings=settings)
        for header in (True, False, *([None] if is_clear else [])):
            dataset = read(tmp_path / "a.csv", settings=replace(settings, header=header))
            assert len(list(dataset.examples("train"))) == (2 if header else 3)


def test_list_data_files(tmp_path: Path) -> None:
    for name in ("train.csv", "dev.csv", "notes.md"):
        (tmp_path / name).touch()
    assert list_data_files(tmp_path) == [tmp_path / "train.csv", tmp_path / "dev.csv"]
    by_split = {"train": ["a.csv", tmp_path / "b.csv"], "dev": "c.csv"}
    assert list_data_files(by_split) == [Path("a.csv"), tmp_path / "b.csv", Path("c.csv")]
    assert list_data_files(object()) == []
