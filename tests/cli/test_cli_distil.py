"""`heedful distil`: the printed verdict, a cascade that is added to a finished run, errors, narrow terminals."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from heedful.cli import main
from heedful.cli.distil import show_verdict
from heedful.runs.distil.verdict import ServingSpeed, compare_models, quality_over_seeds
from tests.support.generated_data import write_splits
from tests.support.model_folders import make_model_dir


class Distillation(NamedTuple):
    """A finished distillation."""

    command: list[object]  # arguments of the command; the same command again prints the results of the finished run
    folder: Path  # the run folder
    out: str  # what the command printed on stdout


def run(*arguments: object) -> int:
    """Run the command in this process; return its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    return int(exit_info.value.code or 0)


@pytest.fixture(scope="module")
def distillation(tmp_path_factory: pytest.TempPathFactory) -> Distillation:
    """A classifier that was distilled into a bag of words."""
    folder = tmp_path_factory.mktemp("distil")
    teacher, data = make_model_dir(folder / "teacher", "single"), write_splits("single", folder / "data")
    settings = ("seeds=1", "train.epochs=1", "verdict.precision=float32", "verdict.baseline=none")
    command = ["distil", teacher, data, "--student", "bag", "--output", folder / "run", *settings]
    with redirect_stdout(io.StringIO()) as out:
        assert run(*command) == 0
    return Distillation(command, folder / "run", out.getvalue())


def test_the_verdict_is_printed(distillation: Distillation, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("teacher", "The student ", "ms, p50 / p99"):
        assert words in distillation.out
    assert run(*distillation.command, "--json") == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert verdict["models"]["student"]["precision"] == "float32"


def test_a_cascade_is_added_to_a_finished_run(distillation: Distillation, capsys: pytest.CaptureFixture[str]) -> None:
    cascade = distillation.folder / "cascade"
    assert run(*distillation.command, "--cascade", "--max-loss", "5") == 0
    out = capsys.readouterr().out
    assert "The cascade, on test (8 rows)" in out
    assert "In the cascade the student answers" in out
    assert f"heedful predict {cascade} TEXT" in out
    assert run("predict", cascade, "the cat sat") == 0
    assert re.search(r"answered by stage [12] of the cascade", capsys.readouterr().out)
    page = cascade.parent / "page.html"
    assert run("look", cascade, "the cat sat", "--html", page) == 0
    assert "is a cascade: what is shown is its last stage" in capsys.readouterr().err
    assert run("bench", cascade) == 2
    assert "is a cascade of models, and cannot be measured in each precision" in capsys.readouterr().err
    assert run("export", cascade, "--html", page) == 2
    assert "is a cascade of models, and cannot be exported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--student", "bag", "--min-quality", "90%"], "--student names a student"),
        (["--min-quality", "130%"], '"130%"'),
        (["--max-latency", "soon"], '"soon"'),
        (["--loss", "hard"], '"hard"'),
        (["--min-quality", "90%", "--cascade"], "search first, then give --cascade with"),
        (["--cascade", "--max-loss", "100"], "max_loss is 100.0; expected percentage points from 0 to below 100"),
        (["--lost.soft=1"], "lost.soft is neither a flag nor a setting"),
    ],
)
def test_distil_errors(
    distillation: Distillation, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    verb, teacher, data, *_ = distillation.command
    assert run(verb, teacher, data, *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_comparison_fits_a_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    accuracies = {"teacher": [0.9123], "student": [0.84, 0.85, 0.86], "baseline": [0.79, 0.8, 0.81]}  # for each seed
    models = {name: quality_over_seeds(by_seed, "float32") for name, by_seed in accuracies.items()}
    speeds = {
        name: ServingSpeed(precision="int8", p50=123.45, p99=1234.56, texts_per_second=13318, tokens_per_second=158060)
        for name in ("teacher", "student")
    }
    parameters = {"teacher": 109_486_464, "student": 9_034_504}
    verdict = compare_models("accuracy", "test", models, speeds, parameters, 0.01)
    show_verdict({"verdict": verdict})
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)  # without colours
    assert max(map(len, out.splitlines())) <= columns
    words = out.split()
    for word in ("109,486,464", "9,034,504", "91.2", "123.45", "1234.56", "158,060", "13,318", "parameters", "p99"):
        assert word in words, f"{word} is cut"
