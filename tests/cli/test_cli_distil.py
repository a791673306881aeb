"""heedful distil on the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from heedful.cli import main
from heedful.cli.distil import show_verdict
from heedful.runs.distil.verdict import ServingSpeed, compare_models, quality_over_seeds
from tests.support.generated_data import write_splits
from tests.support.model_folders import make_model_dir


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_the_verdict_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher, folder = make_model_dir(tmp_path / "teacher", "single"), write_splits("single", tmp_path / "data")
    wishes = "seeds=1", "train.epochs=1", "verdict.precision=float32", "verdict.baseline=none"
    command = ["distil", teacher, folder, "--student", "bag", "--output", tmp_path / "run", *wishes]
    assert run(*command) == 0
    out = capsys.readouterr().out
    assert "teacher" in out and "The student " in out and "ms, p50 / p99" in out
    assert run(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["models"]["student"]["precision"] == "float32"
    assert run(*command, "--cascade", "--max-loss", "5") == 0
    out = capsys.readouterr().out
    assert "The cascade, on test (8 rows)" in out and "In the cascade the student answers" in out
    assert f"heedful predict {tmp_path / 'run' / 'cascade'} TEXT" in out
    assert run("predict", tmp_path / "run" / "cascade", "the cat sat") == 0
    assert re.search(r"answered by stage [12] of the cascade", capsys.readouterr().out)
    assert run("bench", tmp_path / "run" / "cascade") == 2
    assert "is a cascade of models, and cannot be measured in each precision" in capsys.readouterr().err
    assert run("export", tmp_path / "run" / "cascade", "--html", tmp_path / "page.html") == 2
    assert "is a cascade of models, and cannot be exported" in capsys.readouterr().err
    assert run("look", tmp_path / "run" / "cascade", "the cat sat", "--html", tmp_path / "look.html") == 0
    assert "is a cascade: what is shown is its last stage" in capsys.readouterr().err
    for wrong, message in (
        (["--student", "bag", "--min-quality", "90%"], "--student names a student"),
        (["--min-quality", "130%"], '"130%"'),
        (["--max-latency", "soon"], '"soon"'),
        (["--loss", "hard"], '"hard"'),
        (["--min-quality", "90%", "--cascade"], "search first, then give --cascade with"),
        (["--cascade", "--max-loss", "100"], "max_loss is 100.0; expected percentage points from 0 to below 100"),
        (["--lost.soft=1"], "lost.soft is neither a flag nor a setting"),
    ):
        assert run("distil", teacher, folder, *wrong) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_comparison_fits_a_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    quality = {"teacher": [0.9123], "student": [0.84, 0.85, 0.86], "baseline": [0.79, 0.8, 0.81]}
    models = {name: quality_over_seeds(numbers, "float32") for name, numbers in quality.items()}
    speeds = {
        name: ServingSpeed(precision="int8", p50=123.45, p99=1234.56, texts_per_second=13318, tokens_per_second=158060)
        for name in ("teacher", "student")
    }
    verdict = compare_models("accuracy", "test", models, speeds, {"teacher": 109_486_464, "student": 9_034_504}, 0.01)
    show_verdict({"verdict": verdict})
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= columns
    words = out.split()
    for word in ("109,486,464", "9,034,504", "91.2", "123.45", "1234.56", "158,060", "13,318", "parameters", "p99"):
        assert word in words, f"{word} is cut"
