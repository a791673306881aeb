"""An empty text has an answer, and a missing text is an error: on the command line, in files and in the server."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from heedful.cli import main
from heedful.infer.batch import BatchSettings, predict_files
from heedful.infer.engine import Engine
from heedful.serve.run import background
from tests.support.http_client import ask
from tests.support.model_folders import make_model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three labels."""
    return make_model_dir(tmp_path_factory.mktemp("model"), "single")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """The model as a prepared engine."""
    return Engine(folder)


@pytest.mark.parametrize("text", [["", "the cat"], b"\nthe cat\n"])
def test_the_command_answers_an_empty_text(
    folder: Path, engine: Engine, text: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_stdin = isinstance(text, bytes)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text if from_stdin else b"")))
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(folder), "--json", *([] if from_stdin else text)])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not stop.value.code and [answer["input"] for answer in answers] == ["", "the cat"]
    assert [answer["label"] for answer in answers] == [answer["label"] for answer in engine(["", "the cat"])]


def csv(path: Path) -> Path:
    path.write_text('id,text\n1,\n2,the cat\n3,""\n')
    return path


def jsonl(path: Path) -> Path:
    path.write_text('{"text": ""}\n{"text": "the cat"}\n{"text": " "}\n{"text": null}\n{"id": 5}\n')
    return path


def parquet(path: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["", "the cat", " ", None]}), path)
    return path


@pytest.mark.parametrize("write", [csv, jsonl, parquet])
def test_empty_texts_in_files_are_answered_and_missing_ones_reported(
    engine: Engine, tmp_path: Path, write: Any
) -> None:
    file = write(tmp_path / f"in.{write.__name__}")
    report = predict_files(engine, [file], tmp_path / "out", BatchSettings(format="jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "out" / "part-00000000.jsonl").read_text().splitlines()]
    expected = [answer["label"] for answer in engine(["", "the cat", ""])]
    assert [row["label"] for row in rows[:3]] == expected and report.answered == 3
    assert [row["error"] for row in rows[3:]] == ["text: is missing"] * (len(rows) - 3)
    assert "2 rows have an empty text, which is answered like any other" in report.stated


def test_the_server_answers_empty_texts_and_refuses_missing_ones(folder: Path, engine: Engine) -> None:
    with background({"single": str(folder)}) as server:
        replies = ask(server.port, "/predict", {"inputs": [[""], ["the cat"]]}).json
        assert [reply[0]["label"] for reply in replies] == [answer["label"] for answer in engine(["", "the cat"])]
        assert ask(server.port, "/predict", {"inputs": ""}).json[0]["label"] == replies[0][0]["label"]
        for missing in (None, [None], [[]], {"pair": "x"}):
            assert ask(server.port, "/predict", {"inputs": missing}).status == 422
