"""Inputs for prediction in the file formats of training data: CoNLL and SQuAD without labels, folders of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heedful.data import DataSettings, Skip
from heedful.data.bad_rows import RowErrors
from heedful.data.inputs.input_files import open_inputs, settings_for_inputs
from heedful.data.inputs.tables import open_input_table
from heedful.data.labelled.class_folders import list_text_files
from heedful.errors import HeedfulError
from heedful.infer.batch.writers import input_arrow_types

COLUMNS = "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\nbad\n\nPeter NNP B-PER\n\n-DOCSTART- -X- O\n\nhere RB O"


def read_cells(path: Path, **settings: Any) -> list[Any]:
    """The cells of every row of a file."""
    table = open_input_table(path, DataSettings(**settings), RowErrors(Skip()))
    return [cells for _, cells in table.rows(RowErrors(Skip()))]


@pytest.mark.parametrize("name", ["a.conll", "eng.testb", "a.txt"])
def test_the_rows_of_a_conll_file_contain_all_its_lines(tmp_path: Path, name: str) -> None:
    text = COLUMNS.replace("bad\n\n", "")
    (tmp_path / name).write_text(text)
    rows = read_cells(tmp_path / name)
    assert [row["words"] for row in rows] == [["EU", "rejects"], ["Peter"], ["here"]]
    assert "".join(row["lines"] for row in rows) == text


def test_conll_needs_no_tags(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("Ada\nhere\n\nPeter\n")
    assert [row["words"] for row in read_cells(tmp_path / "a.conll")] == [["Ada", "here"], ["Peter"]]
    (tmp_path / "a.conll").write_text("1\tAda\n2\there\n\n1\tPeter\n")
    assert [row["words"] for row in read_cells(tmp_path / "a.conll", columns={"words": 2})] == [
        ["Ada", "here"],
        ["Peter"],
    ]
    for border in ("", "-DOCSTART- -X-\n\n"):
        (tmp_path / "a.conll").write_text(f"{border}word tag\nAda B-PER\n\nhere O\n")
        assert [row["words"] for row in read_cells(tmp_path / "a.conll")] == [["Ada"], ["here"]], border


def test_a_bad_sentence_keeps_its_lines_and_its_position(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text(COLUMNS)
    (inputs,) = open_inputs(
        [path], "token_classification", DataSettings(columns={"words": 2}), exclude=tmp_path / "out"
    )
    values = [(row.line, row.error or inputs.engine_input(row)[0]) for row in inputs.rows()]
    assert values == [
        (3, ["NNP", "VBZ"]),
        (7, "has 1 columns, and the words are in column 2"),
        (9, ["NNP"]),
        (13, ["RB"]),
    ]
    assert "".join(row.cells["lines"] for row in inputs.rows() if isinstance(row.cells, dict)) == COLUMNS
    assert any("words in column 2" in note for note in inputs.notes)


def test_squad_needs_no_answers(tmp_path: Path) -> None:
    questions = [{"id": "q1", "question": "Who?"}, {"question": "Where?", "answers": []}, {"id": "q3"}]
    path = tmp_path / "test.json"
    path.write_text(
        json.dumps({"data": [{"title": "T", "paragraphs": [{"context": "Ada is here.", "qas": questions}]}]})
    )
    (inputs,) = open_inputs([path], "question_answering", DataSettings(), exclude=tmp_path / "out")
    values = [row.error or inputs.engine_input(row)[0] for row in inputs.rows()]
    assert values == [
        {"question": "Who?", "context": "Ada is here."},
        {"question": "Where?", "context": "Ada is here."},
        "data[0].paragraphs[0].qas[2].question: is missing",
    ]
    assert [row["id"] for row in read_cells(path)] == ["q1", ""]


def test_a_text_in_each_file_of_a_folder(tmp_path: Path) -> None:
    for name, text in {"tea/1": "a\nb\n", "tea/2": "c", "cups/3": "d\0d d d d"}.items():
        (tmp_path / "news" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "news" / name).write_text(text)
    (inputs,) = open_inputs([tmp_path / "news"], "sequence_classification", DataSettings(), exclude=tmp_path / "out")
    assert [(inputs.file_name(row), row.error or inputs.engine_input(row)[0]) for row in inputs.rows()] == [
        ("news/cups/3", "2: holds a NUL character: the file is damaged or no text"),
        ("news/tea/1", "a\nb"),
        ("news/tea/2", "c"),
    ]
    assert inputs.fraction_read == 1.0
    (tmp_path / "news" / "tea" / "3").write_text("d\0d d d d")
    (inputs,) = open_inputs([tmp_path / "news"], "sequence_classification", DataSettings(), exclude=None)
    assert [(row.cells is None, inputs.fraction_read) for row in inputs.rows()] == [
        (True, 0.25),
        (False, 0.5),
        (False, 0.75),
        (True, 1.0),
    ], "bad rows count, also at the end"
    (tmp_path / "news" / "tea" / "3").unlink()
    (tmp_path / "news" / "tea" / "loop").symlink_to(tmp_path / "news")
    assert len(list(list_text_files(tmp_path / "news"))) == 1, "files beside a folder are passed over"
    (tmp_path / "news" / "tea" / "loop").unlink()
    with pytest.raises(HeedfulError, match="is inside the folder of texts"):
        open_inputs([tmp_path / "news"], "sequence_classification", DataSettings(), exclude=tmp_path / "news" / "out")
    (tmp_path / "news" / "a.txt").write_text("a\nb\n")
    for folder, texts in ((tmp_path / "news" / "tea", ["a\nb", "c"]), (tmp_path / "news" / "tea" / "1", ["a\nb"])):
        settings = DataSettings(format="class-folders")
        (inputs,) = open_inputs([folder], "sequence_classification", settings, exclude=tmp_path / "out")
        assert [inputs.engine_input(row)[0] for row in inputs.rows()] == texts


def test_answers_beside_class_files_are_not_read(tmp_path: Path) -> None:
    """Outputs of an earlier run of the same command may lie there."""
    (tmp_path / "news" / "out").mkdir(parents=True)
    for name in ("plot.tok", "quote.tok", "out/part.txt"):
        (tmp_path / "news" / name).write_text("a\nb\n")
    settings = DataSettings(format="class-files")
    tables = open_inputs([tmp_path / "news"], "sequence_classification", settings, exclude=tmp_path / "news" / "out")
    assert [inputs.name for inputs in tables] == ["plot.tok", "quote.tok"]


def test_a_file_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n")
    (inputs,) = open_inputs([tmp_path / "a.csv"], "sequence_classification", DataSettings(), exclude=None)
    assert inputs.table is None
    assert inputs.file_format == "csv"
    assert inputs.roles == ()
    assert list(inputs.rows()) == [] and inputs.fraction_read == 1.0
    assert any("has a header and no rows" in text for text in inputs.notes)


def test_a_header_may_begin_with_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,text,label\n5,hello there,good\n")
    (inputs,) = open_inputs([tmp_path / "a.csv"], "sequence_classification", DataSettings(), exclude=None)
    assert [inputs.engine_input(row)[0] for row in inputs.rows()] == ["hello there"]
    assert inputs.first_cells == []
    assert not any("by what is in their cells" in text for text in inputs.notes)


def test_columns_without_names_have_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,,\na,1,2\n")
    (inputs,) = open_inputs([tmp_path / "a.csv"], "sequence_classification", DataSettings(), exclude=None)
    assert [*input_arrow_types([inputs])] == ["text", "column 2", "column 3"]
    assert [inputs.cells_by_name(row.cells or []) for row in inputs.rows()] == [
        {"text": "a", "column 2": "1", "column 3": "2"}
    ]
    (tmp_path / "b.jsonl").write_text('{"": 1, "text": "a"}\n{"text": "b", "": 2}\n')
    (inputs,) = open_inputs([tmp_path / "b.jsonl"], "sequence_classification", DataSettings(), exclude=None)
    assert [inputs.cells_by_name(row.cells or []) for row in inputs.rows()] == [
        {"column 1": 1, "text": "a"},
        {"text": "b", "column 1": 2},
    ]


def test_the_format_of_a_run_applies_to_folders_and_unknown_suffixes(tmp_path: Path) -> None:
    (tmp_path / "pos").mkdir()
    (tmp_path / "pos" / "1.txt").write_text("a\nb\n")
    (tmp_path / "plot.tok").write_text("a\nb\n")
    (tmp_path / "a.csv").write_text("text\na\n")
    folders, files = DataSettings(format="class-folders"), DataSettings(format="class-files")

    def format_for(training: DataSettings, name: str) -> str | None:
        return settings_for_inputs(training, "sequence_classification", [tmp_path / name], DataSettings()).format

    assert format_for(folders, "pos") == "class-folders"
    assert format_for(folders, "a.csv") is None
    assert format_for(files, "plot.tok") == "class-files"
    (inputs,) = open_inputs([tmp_path / "plot.tok"], "sequence_classification", files, exclude=tmp_path / "out")
    assert [inputs.engine_input(row)[0] for row in inputs.rows()] == ["a", "b"]
