"""Settings of a run's data that hold for other files."""

from __future__ import annotations

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


def for_file(tmp_path: Path, name: str, data: bytes, names: tuple[str, ...], trained: Any = TRAINED) -> DataSettings:
    """The settings that hold for one file."""
    (tmp_path / name).write_bytes(data)
    return inherit_settings(trained, names, [tmp_path / name])


def test_all_holds_for_a_file_like_those_of_the_run(tmp_path: Path) -> None:
    assert for_file(tmp_path, "a.csv", b"x;Who wrote it?\ny;caf\xe9\n", ("train.csv",)) == TRAINED
    assert for_file(tmp_path, "a.csv.gz", b"", ("train.csv",)) == TRAINED


@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl", "a.json", "a.parquet", "a.txt"])
def test_nothing_holds_for_another_format(tmp_path: Path, name: str) -> None:
    assert for_file(tmp_path, name, b"", ("train.csv",)) == DataSettings(dev_fraction=0.0)
    named = DataSettings(columns={"text": ("title", "body"), "label": 1}, dev_fraction=0.0)
    assert for_file(tmp_path, name, b"", ("train.csv",), named).columns == {"text": ("title", "body")}


def test_a_format_that_was_set_holds_for_names_like_the_runs(tmp_path: Path) -> None:
    trained = DataSettings(format="tsv", columns={"text": 2}, encoding="latin-1", dev_fraction=0.0)
    assert for_file(tmp_path, "a.csv", b"", ("train.csv",), trained) == trained
    assert for_file(tmp_path, "a.data", b"", ("train.data",), trained) == trained
    assert for_file(tmp_path, "a.jsonl", b"", ("train.csv",), trained) == DataSettings(dev_fraction=0.0)
    assert for_file(tmp_path, "a.jsonl", b"", (), trained) == DataSettings(dev_fraction=0.0)


@pytest.mark.parametrize(
    ("first", "columns"),
    [
        (b"id;text\n1;Rain\n", None),
        (b"label;text\nx;Rain\n", None),
        (b"text;label\nRain;x\n", None),
        (b"x;text\ny;z\n", None),
        (b"text;author\nRain;x\n", None),
        (b"score;Who wrote it?\ny;z\n", {"text": 2, "label": 1}),  # a label may be called so
    ],
)
def test_numbers_give_way_to_names(tmp_path: Path, first: bytes, columns: Any) -> None:
    settings = for_file(tmp_path, "a.csv", first, ("train.csv",))
    assert settings.columns == columns and settings.header == (None if columns is None else False)


def test_a_file_in_utf8_is_not_read_in_another_encoding(tmp_path: Path) -> None:
    assert for_file(tmp_path, "a.csv", "x;café\n".encode(), ("train.csv",)).encoding is None
    assert for_file(tmp_path, "a.csv", b"x;cafe\n", ("train.csv",)).encoding == "latin-1"
    half = "x;" + "é" * 40_000  # the first 64 kB end inside a character
    assert for_file(tmp_path, "a.csv", half.encode(), ("train.csv",)).encoding is None


def test_a_first_row_that_may_be_a_header_is_refused(tmp_path: Path) -> None:
    for first, ok in (("id,phrase", False), ("42,Who wrote it?", True)):
        (tmp_path / "a.csv").write_text(f"{first}\n1,Who wrote Hamlet?\n2,What is rain?\n")
        settings = DataSettings(columns={"text": 2, "label": 1}, dev_fraction=0.0)
        if not ok:
            with pytest.raises(HeedfulError, match="may name the columns"):
                read(tmp_path / "a.csv", settings=settings)
        for header in (True, False, *([None] if ok else [])):
            source = read(tmp_path / "a.csv", settings=DataSettings(**{**_as(settings), "header": header}))
            assert len(list(source.examples("train"))) == (2 if header else 3)


def _as(settings: DataSettings) -> dict[str, Any]:
    return {"columns": settings.columns, "dev_fraction": settings.dev_fraction}


def test_files_that_data_consist_of(tmp_path: Path) -> None:
    for name in ("train.csv", "dev.csv", "notes.md"):
        (tmp_path / name).touch()
    assert list_data_files(tmp_path) == [tmp_path / "train.csv", tmp_path / "dev.csv"]
    assert list_data_files({"train": ["a.csv", tmp_path / "b.csv"], "dev": "c.csv"}) == [
        *(Path("a.csv"), tmp_path / "b.csv", Path("c.csv"))
    ]
    assert list_data_files(object()) == []
