"""heedful distil on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.cli import main
from heedful.runs import timing
from tests.support.generated_data import data
from tests.support.model_folders import make


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_the_verdict_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heedful.runs.run.draw_run_plots", lambda folder: [])
    monkeypatch.setattr(timing, "ROUNDS", 2)
    teacher, folder = make(tmp_path / "teacher", "single"), data("single", tmp_path / "data")
    wishes = "seeds=1", "train.epochs=1", "verdict.precision=float32", "verdict.baseline=none"
    command = ["distil", teacher, folder, "--student", "bag", "--output", tmp_path / "run", *wishes]
    assert run(*command) == 0
    out = capsys.readouterr().out
    assert "teacher" in out and "The student " in out and "ms, p50 / p99" in out
    assert run(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["models"]["student"]["precision"] == "float32"
    for wrong, message in (
        (["--student", "bag", "--min-quality", "90%"], "--student names a student"),
        (["--min-quality", "130%"], '"130%"'),
        (["--max-latency", "soon"], '"soon"'),
        (["--loss", "hard"], '"hard"'),
        (["--lost.soft=1"], "lost.soft is neither a flag nor a setting"),
    ):
        assert run("distil", teacher, folder, *wrong) == 2
        assert message in capsys.readouterr().err
