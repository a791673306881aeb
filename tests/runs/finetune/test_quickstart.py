"""quickstart replaces what an earlier one made and nothing else; the whole of it runs in test_cli.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heedful.errors import HeedfulError
from heedful.runs.finetune import quickstart as module
from heedful.runs.finetune.quickstart import MARK, MARK_CONTENT, quickstart
from heedful.runs.results import RunResult
from heedful.train.run_lock import lock_run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Runs are noted and not made."""
    folders: list[Path] = []

    def finetune(task: str, data: Path, folder: Path, reporter: Any) -> RunResult:
        assert task == "classify" and (data / "train.csv").is_file()
        assert [path.name for path in folder.iterdir()] == [MARK], "it starts in an empty folder"
        folders.append(folder)
        lines = [{"correct": False, "input": "a"}, {"correct": True, "input": "b"}, {"correct": False, "input": "c"}]
        lines += [{"correct": False, "input": name} for name in ("d", "beyond those that are shown")]
        (folder / "predictions-test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return RunResult(output_dir=folder, status="completed", results={"metric": "accuracy"})

    monkeypatch.setattr(module, "finetune", finetune)
    monkeypatch.setattr(module, "Engine", lambda folder: lambda texts: [{"label": "x"} for _ in texts])
    return folders


def test_an_earlier_one_is_replaced(tmp_path: Path, runs: list[Path]) -> None:
    folder = tmp_path / "a b"
    done = quickstart(folder)
    assert done is not None and done.results == {"metric": "accuracy"}
    assert [line["input"] for line in done.mistakes] == ["a", "c", "d"]
    assert [answer["label"] for answer in done.answers] == ["x"] * 3 and all(a["text"] for a in done.answers)
    assert (folder / MARK).read_text() == MARK_CONTENT
    assert quickstart(folder) == done and runs == [folder, folder]
    (tmp_path / "empty").mkdir()
    assert quickstart(tmp_path / "empty") is not None


def test_one_that_was_stopped_is_replaced(tmp_path: Path, runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(how: Callable[[], RunResult]) -> Any:
        def finetune(task: str, data: Path, folder: Path, reporter: Any) -> RunResult:
            (folder / "settings.toml").write_text("half of a run")
            return how()

        return finetune

    def interrupt() -> RunResult:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            module, "finetune", stopped(lambda: RunResult(output_dir=tmp_path, status="interrupted", results={}))
        )
        assert quickstart(tmp_path / "run") is None
        patch.setattr(module, "finetune", stopped(interrupt))
        with pytest.raises(KeyboardInterrupt):
            quickstart(tmp_path / "run")
    assert quickstart(tmp_path / "run") is not None and len(runs) == 1


def test_what_no_quickstart_made_stays(tmp_path: Path, runs: list[Path]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work").write_text("of years")
    for mark in (None, "*\n", b"\xff\xfe"):
        if mark is not None:
            (tmp_path / "mine" / MARK).write_bytes(mark.encode() if isinstance(mark, str) else mark)
        with pytest.raises(HeedfulError, match="mine exists, and no quickstart made it: give another folder"):
            quickstart(tmp_path / "mine")
    with pytest.raises(HeedfulError, match="work exists, and no quickstart made it"):
        quickstart(tmp_path / "mine" / "work")
    with pytest.raises(HeedfulError, match=r"work/run cannot be written: Not a directory: give another folder"):
        quickstart(tmp_path / "mine" / "work" / "run")
    assert (tmp_path / "mine" / "work").read_text() == "of years" and not runs


def test_a_running_quickstart_is_not_replaced(tmp_path: Path, runs: list[Path]) -> None:
    folder = tmp_path / "run"
    quickstart(folder)
    with lock_run(folder), pytest.raises(HeedfulError, match=re.escape("another run, pid ")):
        quickstart(folder)
    assert (folder / "predictions-test.jsonl").is_file() and len(runs) == 1


def test_a_link_is_not_replaced(tmp_path: Path, runs: list[Path]) -> None:
    quickstart(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(HeedfulError, match="link cannot be written: Cannot call rmtree on a symbolic link: give"):
        quickstart(tmp_path / "link")
    assert (tmp_path / "run" / "predictions-test.jsonl").is_file()
