"""`heedful prune`: the printed trials, the use of the pruned model by other commands, and error messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from heedful.cli import main
from tests.support.generated_data import long_rows, write_csv
from tests.support.model_folders import make_model_dir


def run(*arguments: object) -> int:
    """Run the command in this process; return its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    return int(exit_info.value.code or 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier."""
    return make_model_dir(tmp_path_factory.mktemp("model"), "single")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of labelled texts that are long enough to be pruned."""
    return write_csv(tmp_path_factory.mktemp("data") / "rows.csv", long_rows(40, 0))


def test_the_pruning_is_printed_and_used(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts_per_second(engine: Any, task: Any, examples: Any, prunings: Sequence[Any]) -> Any:
        return {pruning: 100.0 if pruning is None else 150.0 for pruning in prunings}

    monkeypatch.setattr("heedful.runs.prune._texts_per_second", texts_per_second)
    out = tmp_path / "out"
    command = ["prune", model, data, "--max-loss", "90", "--keep-rate", "0.5", "--layer", "1", "--output", out]
    assert run(*command) == 0
    captured = capsys.readouterr()
    assert "chosen" in captured.out and "1.50 times as many texts a second in float32" in captured.out
    assert f"heedful predict {out} TEXT" in captured.out
    assert "measuring the model with all tokens" in captured.err and "one of them is more than" not in captured.err
    assert run(*command) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert run(*command, "--overwrite", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["folder"] == str(out) and report["chosen"]["layer"] == 1
    # other commands read the pruned model
    assert run("predict", out, long_rows(1, 3)[0]["text"]) == 0
    assert run("evaluate", out, "--data", data) == 0
    capsys.readouterr()
    assert run("export", out, "--html", tmp_path / "page.html") == 2
    assert "prunes tokens, and cannot be exported: give the run from which it was made" in capsys.readouterr().err
    assert run("look", out, "the cat sat", "--html", tmp_path / "look.html") == 0
    assert "prunes tokens: what is shown is the model with all of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-loss", "100"], "max_loss is 100.0; expected percentage points from 0 to below 100"),
        (["--keep-rate", "2"], "keep_rate is 2.0; expected a share of the tokens, above 0 and at most 1"),
        (["--precision", "int3"], "--precision is 'int3'"),
    ],
)
def test_prune_errors(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run("prune", model, data, "--output", tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err
