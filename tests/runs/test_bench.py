"""`heedful bench`: all precisions are measured, the result is written to the run, and data adds a metric."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

import heedful.runs.bench as bench_module
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
    """A run folder. Memory is measured in this process instead of new ones, and little is timed."""
    make_model_dir(tmp_path / "run" / "model", "single")
    (tmp_path / "run" / "settings.toml").write_text("")
    (tmp_path / "rows.csv").write_text(ROWS)
    monkeypatch.setattr(precision_gate, "SLOW_RATIO", 1e9)  # no precision is so slow that it is timed briefly
    monkeypatch.setattr(precision_gate, "ROUNDS", 1)
    monkeypatch.setattr(timing, "BATCH_TOKENS", 512)
    monkeypatch.setattr(timing, "ROUNDS", 5)
    monkeypatch.setattr(bench_module, "_resident_memory", lambda *arguments: resident_bytes())
    return tmp_path / "run"


def test_every_precision_is_measured(run: Path) -> None:
    report = bench(run, data=run.parent / "rows.csv")
    assert [result.trial.precision for result in report.results] == ["float32", "bfloat16", "int8"]
    for result in report.results:
        assert result.latency.keys() == {"16"}
        assert 0 < result.latency["16"]["p50"] <= result.latency["16"]["p99"]
        assert result.throughput > 0
        assert result.resident_bytes > 1e7
        assert result.trial.metric_value is not None
    assert report.metric == "accuracy"
    assert report.split == "train", "the split of a single file"
    accepted = [result.trial.precision for result in report.results if not result.trial.refused]
    assert report.auto_precision in accepted
    assert json.loads((run / "bench.json").read_text())["auto_precision"] == report.auto_precision


def test_the_command_prints_json_or_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(run), "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert len(report["results"]) == 3
    assert report["metric"] is None
    assert math.isfinite(report["results"][2]["trial"]["scores"])
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(run), "--data", str(run.parent / "rows.csv")])
    printed = capsys.readouterr().out
    table, verdicts = (paragraph.splitlines() for paragraph in printed.split("\n\n"))
    assert table[0].split() == ["float32", "bfloat16", "int8"]
    assert "accuracy (" in table[-1]
    assert max(map(len, table)) < 80
    assert [line.split()[0] for line in verdicts] == ["float32", "bfloat16", "int8"]
    assert printed.count("chosen by auto") == 1


def test_the_latency_and_metric_of_a_far_slower_precision_are_not_measured(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {"float32": 1.0, "bfloat16": 0.5, "int8": 9.0}
    monkeypatch.setattr(precision_gate, "median_times", lambda runs, rounds: {name: seconds[name] for name in runs})
    monkeypatch.setattr(precision_gate, "SLOW_RATIO", 3)
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(run), "--data", str(run.parent / "rows.csv")])
    table, verdicts = (paragraph.splitlines() for paragraph in capsys.readouterr().out.split("\n\n"))
    latency_row, accuracy_row = table[3].split(), table[-1].split()
    assert latency_row[:3] == ["ms,", "16", "tokens"]
    assert latency_row[-1] == "–"
    assert accuracy_row[-1] == "–"
    assert verdicts[2].startswith("int8")
    assert "it is not faster: " in verdicts[2]


def test_long_texts_are_truncated_if_the_run_truncated_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "settings.toml").write_text('long_inputs = "truncate"\n')
    seen: list[str] = []
    measure_split = evaluation.measure_split

    def record_long_inputs(task: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(task.long_inputs)
        return measure_split(task, *arguments, **options)

    monkeypatch.setattr(evaluation, "measure_split", record_long_inputs)
    bench(run, data=run.parent / "rows.csv")
    assert set(seen) == {"truncate"}


@pytest.mark.slow
def test_memory_is_measured_in_a_new_process(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path, "single")
    memory = bench_module._resident_memory(folder, "float32", None, None, "cpu")
    assert 1e8 < memory < 1e9


def test_results_that_cannot_be_written_are_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "bench.json").mkdir()  # cannot be written, as on a disk that is read-only or full
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(run)])
    printed = capsys.readouterr()
    assert "chosen by auto" in printed.out
    assert "bench.json cannot be written: Is a directory" in printed.err


def test_an_unwritable_folder_is_reported_before_the_measurements(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []

    def read_only(folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(bench_module, "check_writable", read_only)
    bench(run, log=messages.append)
    assert "bench.json cannot be written: Read-only file system" in messages[0]
    assert (run / "bench.json").exists()


def test_split_without_data_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", str(run), "--split", "test"])
    assert "--split needs --data" in capsys.readouterr().err
