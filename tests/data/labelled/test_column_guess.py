"""Files without a header: columns are chosen by their content if that is clear; otherwise the error proposes some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heedful.data import DataSettings, LabelledExample, ScoredExample, Skip, TextExample, read
from heedful.data.bad_rows import RowErrors
from heedful.data.inputs.input_files import open_inputs
from heedful.data.labelled.column_guess import has_no_header
from heedful.data.labelled.data_file import open_table
from heedful.errors import HeedfulError

MESSAGES = "ham,see you at the door\nspam,win a prize now\nham,is it open today\nspam,a free prize\nham,it rains\n"
NEWS = "".join(f'"{number % 4 + 1}","title number {number}","a longer text of news {number}"\n' for number in range(12))


def write_and_read(path: Path, data: str, kind: Any = None, **settings: Any) -> Any:
    path.write_text(data, encoding="utf-8")
    return read(path, kind, DataSettings(dev_fraction=0.0, **settings))


@pytest.mark.parametrize("kind", [None, LabelledExample])
def test_a_label_and_a_text_column_are_found_and_reported(tmp_path: Path, kind: Any) -> None:
    dataset = write_and_read(tmp_path / "a.csv", MESSAGES, kind)
    assert next(dataset.examples("train")) == LabelledExample(label="ham", text="see you at the door")
    (columns_note,) = (note for note in dataset.stated if note.startswith("columns:"))
    assert columns_note.startswith(
        "columns: text=column 2, label=column 1, by what is in their cells; columns.text=NUMBER and"
    )
    numbered = "".join(f"{number},{line}\n" for number, line in enumerate(MESSAGES.splitlines(), start=1))
    dataset = write_and_read(tmp_path / "b.csv", numbered, kind)
    assert next(dataset.examples("train")).label == "ham"
    assert any("not used: column 1" in note for note in dataset.stated)
    tabs = write_and_read(tmp_path / "SMSSpamCollection", MESSAGES.replace(",", "\t"), kind)
    assert next(tabs.examples("train")) == next(dataset.examples("train"))


def test_several_text_columns_are_proposed_in_one_message(tmp_path: Path) -> None:
    message = (
        r"No header was recognised; .* Columns 2, 3 look like the text and column 1 looks like the label \(4 values\): "
        r"say --data.columns\.text='\[2, 3\]' \(joined\) --data.columns\.label=1"
    )
    with pytest.raises(HeedfulError, match=message):
        write_and_read(tmp_path / "a.csv", NEWS, LabelledExample)
    with pytest.raises(HeedfulError, match=message):
        write_and_read(tmp_path / "a.csv", NEWS)
    dataset = write_and_read(tmp_path / "a.csv", NEWS, LabelledExample, columns={"text": (2, 3)})
    assert next(dataset.examples("train")) == LabelledExample(label="1", text="title number 0 a longer text of news 0")
    dataset = write_and_read(tmp_path / "a.csv", NEWS, LabelledExample, columns={"text": 3, "label": 1})
    assert not any("by what is in" in note for note in dataset.stated)


@pytest.mark.parametrize(
    "data",
    [
        "Klasse,Kommentar\n" + MESSAGES,
        "Kommentar\tKlasse\n" + "".join(f"a text of number {n}\t{n % 2}\n" for n in range(9)),
        "Wert,Kommentar\n" + "".join(f"{n * n}.5,a text of number {n}\n" for n in range(9)),
    ],
)
def test_a_first_row_that_may_be_a_header_needs_a_setting(tmp_path: Path, data: str) -> None:
    path, kind = tmp_path / ("a.tsv" if "\t" in data else "a.csv"), ScoredExample if "Wert" in data else LabelledExample
    with pytest.raises(
        HeedfulError, match=r"The first row, .* may name the columns: set --data.header=true if it does"
    ):
        write_and_read(path, data, kind)
    if kind is LabelledExample:
        dataset = write_and_read(path, data, kind, header=False)
        assert "Klasse" in dataset.labels, "with header=False the first row is data"


def test_scores_and_texts_alone(tmp_path: Path) -> None:
    rows = "".join(f"{n},a text of number {n},{n % 7}.5\n" for n in range(20))
    assert next(write_and_read(tmp_path / "a.csv", rows, ScoredExample).examples("train")) == ScoredExample(
        score=0.5, text="a text of number 0"
    )
    rows = "".join(f"a text of number {n}\n" for n in range(5))
    assert next(write_and_read(tmp_path / "b.csv", rows, TextExample).examples("train")) == TextExample(
        text="a text of number 0"
    )
    with pytest.raises(HeedfulError, match=r"a row is \"a\", \"1\". Say --data.columns"):
        write_and_read(tmp_path / "c.csv", "a,1\nb,2\n", LabelledExample)


def test_the_text_column_of_inputs_without_labels_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(MESSAGES)
    (inputs,) = open_inputs([tmp_path / "a.csv"], "sequence_classification", DataSettings(), exclude=tmp_path / "out")
    assert [inputs.engine_input(row)[0] for row in inputs.rows()][:2] == ["see you at the door", "win a prize now"]
    assert any("text=column 2, by what is in their cells" in note for note in inputs.notes)


@pytest.mark.parametrize(
    ("data", "header", "expected"),
    [
        ("1,text,label\n5,hello there,good\n", None, False),
        ("1,2\nhello there,good\n", True, False),
        ("1,2\nhello there,good\n", False, True),
        ("5,hello there,good\n6,see you,bad\n", None, True),
    ],
)
def test_has_no_header(tmp_path: Path, data: str, header: bool | None, expected: bool) -> None:
    """A file has no header only if all names are positions, and the header was not set."""
    (tmp_path / "a.csv").write_text(data)
    table = open_table(tmp_path / "a.csv", DataSettings(header=header), RowErrors(Skip()))
    assert has_no_header(table) is expected


def test_a_test_file_without_labels_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(MESSAGES)
    (tmp_path / "test.csv").write_text("see you at the door\nwin a prize\nit rains again\nit is open today\n")
    dataset = read(tmp_path, LabelledExample, DataSettings(dev_fraction=0.0))
    assert dataset.splits == ("train",)
    assert "test: has no label, so it is left out" in dataset.stated
