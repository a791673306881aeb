"""An empty text is answered, and a missing one is an error: by the command, in files and by the server alike."""

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
def test_the_command(folder: Path, engine: Engine, text: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = isinstance(text, bytes)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text if lines else b"")))
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(folder), "--json", *([] if lines else text)])
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
def test_files(engine: Engine, tmp_path: Path, write: Any) -> None:
    file = write(tmp_path / f"in.{write.__name__}")
    done = predict_files(engine, [file], tmp_path / "out", BatchSettings(format="jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "out" / "part-00000000.jsonl").read_text().splitlines()]
    wanted = [answer["label"] for answer in engine(["", "the cat", ""])]
    assert [row["label"] for row in rows[:3]] == wanted and done.answered == 3
    assert [row["error"] for row in rows[3:]] == ["text: is missing"] * (len(rows) - 3)
    assert "2 rows have an empty text, which is answered like any other" in done.stated


def test_the_server(folder: Path, engine: Engine) -> None:
    with background({"single": str(folder)}) as server:
        replies = ask(server.port, "/predict", {"inputs": [[""], ["the cat"]]}).json
        assert [reply[0]["label"] for reply in replies] == [answer["label"] for answer in engine(["", "the cat"])]
        assert ask(server.port, "/predict", {"inputs": ""}).json[0]["label"] == replies[0][0]["label"]
        for missing in (None, [None], [[]], {"pair": "x"}):
            assert ask(server.port, "/predict", {"inputs": missing}).status == 422
