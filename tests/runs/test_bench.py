"""bench: every precision measured, the verdict kept in the run, quality where there is data."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

import heedful.runs.bench as module
from heedful.cli import main
from heedful.infer.tuning import precision_gate
from heedful.runs import evaluate as evaluation
from heedful.runs import timing
from heedful.runs.bench import bench
from heedful.runs.timing import resident_bytes
from tests.support.model_folders import make_model_dir

ROWS = "text,label\n" + "".join(f"the cat {word},{label}\n" for word in "abcdefgh" for label in ("good", "bad"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder; memory is measured here, not in processes of their own, and few texts are timed."""
    make_model_dir(tmp_path / "run" / "model", "single")
    (tmp_path / "run" / "settings.toml").write_text("")
    (tmp_path / "rows.csv").write_text(ROWS)
    monkeypatch.setattr(precision_gate, "SLOW_RATIO", 1e9)  # nothing is so slow that it is left out
    monkeypatch.setattr(precision_gate, "ROUNDS", 1)
    monkeypatch.setattr(timing, "BATCH_TOKENS", 512)
    usual = module.measure_latency
    monkeypatch.setattr(module, "measure_latency", lambda loaded: usual(loaded, 5))
    monkeypatch.setattr(module, "_resident_memory", lambda *arguments: resident_bytes())
    return tmp_path / "run"


def test_every_precision_is_measured(run: Path) -> None:
    measurement = bench(run, data=run.parent / "rows.csv")
    assert [each.trial.precision for each in measurement.results] == ["float32", "bfloat16", "int8"]
    for result in measurement.results:
        assert result.latency.keys() == {"16"} and 0 < result.latency["16"]["p50"] <= result.latency["16"]["p99"]
        assert result.throughput > 0 and result.resident_bytes > 1e7 and result.trial.metric_value is not None
    assert (measurement.metric == "accuracy" and measurement.split == "rows") or measurement.split
    assert measurement.auto_precision in [
        each.trial.precision for each in measurement.results if not each.trial.refused
    ]
    assert json.loads((run / "bench.json").read_text())["auto_precision"] == measurement.auto_precision


def test_the_command_shows_and_writes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(run), "--json"])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (
        len(content["results"]) == 3
        and content["metric"] is None
        and math.isfinite(content["results"][2]["trial"]["scores"])
    )
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(run), "--data", str(run.parent / "rows.csv")])
    out = capsys.readouterr().out
    table, verdicts = (part.splitlines() for part in out.split("\n\n"))
    assert table[0].split() == ["float32", "bfloat16", "int8"] and "accuracy (" in table[-1]
    assert [line.split()[0] for line in verdicts] == ["float32", "bfloat16", "int8"]
    assert out.count("taken by auto") == 1 and max(map(len, table)) < 80


def test_what_is_far_slower_is_not_timed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"float32": 1.0, "bfloat16": 0.5, "int8": 9.0}
    monkeypatch.setattr(precision_gate, "median_times", lambda runs, rounds: {name: times[name] for name in runs})
    monkeypatch.setattr(precision_gate, "SLOW_RATIO", 3)
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(run), "--data", str(run.parent / "rows.csv")])
    table, verdicts = (part.splitlines() for part in capsys.readouterr().out.split("\n\n"))
    latency, accuracy = table[3].split(), table[-1].split()
    assert latency[:3] == ["ms,", "16", "tokens"] and latency[-1] == "–" == accuracy[-1]
    assert verdicts[2].startswith("int8") and "it is not faster: " in verdicts[2]


def test_long_texts_are_cut_where_the_run_cut_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "settings.toml").write_text('long_inputs = "truncate"\n')
    seen, usual = [], evaluation.measure_split
    seeing = lambda task, *arguments, **more: seen.append(task.long_inputs) or usual(task, *arguments, **more)  # noqa: E731
    monkeypatch.setattr(evaluation, "measure_split", seeing)
    bench(run, data=run.parent / "rows.csv")
    assert seen and set(seen) == {"truncate"}


@pytest.mark.slow
def test_memory_is_that_of_a_process_of_its_own(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path, "single")
    memory = module._resident_memory(folder, "float32", None, None, "cpu")
    assert 1e8 < memory < 1e9


def test_results_that_cannot_be_kept_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "bench.json").mkdir()  # in place of a folder that is read-only, or a disk that is full
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(run)])
    shown = capsys.readouterr()
    assert "taken by auto" in shown.out and "bench.json cannot be written: Is a directory" in shown.err


def test_a_folder_that_takes_no_file_is_told_before_the_work(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []

    def full(folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(module, "check_writable", full)
    bench(run, log=messages.append)
    assert "bench.json cannot be written: Read-only file system" in messages[0] and (run / "bench.json").exists()


def test_a_split_is_of_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", str(run), "--split", "test"])
    assert "--split needs --data" in capsys.readouterr().err
