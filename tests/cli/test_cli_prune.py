"""heedful prune on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from heedful.cli import main
from tests.support.generated_data import long_rows, write_csv
from tests.support.model_folders import make_model_dir


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_the_pruning_is_printed_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts_per_second(engine: Any, task: Any, examples: Any, prunings: Sequence[Any]) -> Any:
        return {pruning: 100.0 if pruning is None else 150.0 for pruning in prunings}

    monkeypatch.setattr("heedful.runs.prune._texts_per_second", texts_per_second)
    model, rows, out = (
        make_model_dir(tmp_path / "model", "single"),
        write_csv(tmp_path / "rows.csv", long_rows(40, 0)),
        tmp_path / "out",
    )
    command = ["prune", model, rows, "--max-loss", "90", "--keep-rate", "0.5", "--layer", "1", "--output", out]
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
    assert run("predict", out, long_rows(1, 3)[0]["text"]) == 0
    assert run("evaluate", out, "--data", rows) == 0
    capsys.readouterr()
    assert run("export", out, "--html", tmp_path / "page.html") == 2
    assert "prunes tokens, and cannot be exported: give the run from which it was made" in capsys.readouterr().err
    assert run("look", out, "the cat sat", "--html", tmp_path / "look.html") == 0
    assert "prunes tokens: what is shown is the model with all of them" in capsys.readouterr().err
    for wrong, message in (
        (["--max-loss", "100"], "max_loss is 100.0; expected percentage points from 0 to below 100"),
        (["--keep-rate", "2"], "keep_rate is 2.0; expected a share of the tokens, above 0 and at most 1"),
        (["--precision", "int3"], "--precision is 'int3'"),
    ):
        assert run("prune", model, rows, "--output", tmp_path / "other", *wrong) == 2
        assert message in capsys.readouterr().err
