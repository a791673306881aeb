"""The commands `heedful index` and `heedful search`: output, and error messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from heedful.cli import main


def run(*arguments: str) -> None:
    """Run the command in this process; it must succeed."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert not exit_info.value.code


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder "notes" of the current folder, with three documents."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/ship.txt").write_text("The ship left the harbour at dawn.")
    (tmp_path / "notes/bread.md").write_text("Bread is baked in a hot oven.")
    (tmp_path / "notes/rows.csv").write_text("id,title,text\nr1,Winter,Snow fell on the hills.\n")
    return tmp_path / "notes"


def test_index_and_search(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("index", "notes")
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["added 3, replaced 0, unchanged 0", "index: 3 documents, 3 passages"]
    assert 'heedful search index "YOUR QUERY"' in printed.err
    run("search", "index", "harbours", "--method", "words")
    assert re.fullmatch(
        r"1\. ship\.txt  \(\d\.\d{4}\)\n   The ship left the harbour at dawn\.\n", capsys.readouterr().out
    )
    run("search", "index", "winter", "-k", "1", "--json")
    (hit,) = json.loads(capsys.readouterr().out)
    assert hit["id"] == "r1" and hit["title"] == "Winter" and hit["passage"] == "Winter\nSnow fell on the hills."
    run("search", "index", "zebra", "--method", "words")
    assert capsys.readouterr().out == "no document has a word of the query\n"
    (notes / "bread.md").write_text("Cake is baked.")
    run("index", "notes", "--delete", "ship.txt", "--rebuild", "--json")
    counts = {"added": 0, "replaced": 1, "unchanged": 2, "deleted": 1}
    assert json.loads(capsys.readouterr().out) == counts | {"documents": 2, "passages": 2, "output": "index"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["index"], "no documents are given: name files or folders of texts"),
        (["index", "missing"], "missing: there is no such file"),
        (["index", "--delete", "x"], "index holds no index: name files or folders of texts to make one"),
        (["index", "notes", "--vectors", "int4"], r'the format of the vectors is .int4. \(did you mean "int8"\?\)'),
        (["index", "notes", "--model", "missing/model"], "missing/model"),
        (["search", "notes", "x"], r"notes holds no index: it has no index\.json"),
    ],
)
def test_errors(notes: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2 and re.search(message, capsys.readouterr().err)


def test_settings_of_an_index_cannot_be_changed(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("index", "notes", "--vectors", "binary", "--model", "heedful-mini-en")
    run("index", "notes", "--vectors", "binary", "--model", "heedful-mini-en")
    with pytest.raises(SystemExit):
        main(["index", "notes", "--vectors", "int8"])
    assert "--vectors is int8, but index was made with binary: leave it out" in capsys.readouterr().err
