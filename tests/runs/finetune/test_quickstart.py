"""`quickstart` replaces the folder of an earlier quickstart and nothing else.

Its fine-tuning is replaced here; the tests of the command line run the whole.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from heedful.errors import HeedfulError
from heedful.runs.finetune import quickstart as quickstart_module
from heedful.runs.finetune.quickstart import MARK, MARK_CONTENT, quickstart
from heedful.runs.results import RunResult
from heedful.train.run_lock import lock_run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of runs, which are recorded instead of trained."""
    folders: list[Path] = []

    def fake_finetune(task: str, data: Path, folder: Path, reporter: Any) -> RunResult:
        assert task == "classify"
        assert (data / "train.csv").is_file()
        assert [path.name for path in folder.iterdir()] == [MARK], "files of an earlier quickstart are removed"
        folders.append(folder)
        predictions = [
            {"correct": False, "input": "first mistake"},
            {"correct": True, "input": "no mistake"},
            {"correct": False, "input": "second mistake"},
            {"correct": False, "input": "third mistake"},
            {"correct": False, "input": "fourth mistake"},
        ]
        lines = "".join(json.dumps(prediction) + "\n" for prediction in predictions)
        (folder / "predictions-test.jsonl").write_text(lines)
        return RunResult(output_dir=folder, status="completed", results={"metric": "accuracy"})

    monkeypatch.setattr(quickstart_module, "finetune", fake_finetune)
    monkeypatch.setattr(quickstart_module, "Engine", lambda folder: lambda texts: [{"label": "x"} for _ in texts])
    return folders


def test_the_result_has_three_mistakes_and_answers_to_new_texts(tmp_path: Path, runs: list[Path]) -> None:
    result = quickstart(tmp_path / "run")
    assert result is not None
    assert result.results == {"metric": "accuracy"}
    mistakes = [mistake["input"] for mistake in result.mistakes]
    assert mistakes == ["first mistake", "second mistake", "third mistake"]
    assert len(result.answers) == 3
    for answer in result.answers:
        assert answer["label"] == "x"
        assert answer["text"]


def test_an_earlier_quickstart_is_replaced(tmp_path: Path, runs: list[Path]) -> None:
    folder = tmp_path / "a b"
    result = quickstart(folder)
    assert (folder / MARK).read_text() == MARK_CONTENT
    assert quickstart(folder) == result
    assert runs == [folder, folder]


def test_an_empty_folder_is_used(tmp_path: Path, runs: list[Path]) -> None:
    assert quickstart(tmp_path) is not None
    assert runs == [tmp_path]


def test_an_interrupted_quickstart_is_replaced(
    tmp_path: Path, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def stop_after_a_signal(task: str, data: Path, folder: Path, reporter: Any) -> RunResult:
        (folder / "settings.toml").write_text("half of a run")
        return RunResult(output_dir=folder, status="interrupted", results={})

    def stop_without_warning(task: str, data: Path, folder: Path, reporter: Any) -> RunResult:
        (folder / "settings.toml").write_text("half of a run")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quickstart_module, "finetune", stop_after_a_signal)
        assert quickstart(run) is None
        patch.setattr(quickstart_module, "finetune", stop_without_warning)
        with pytest.raises(KeyboardInterrupt):
            quickstart(run)
    assert quickstart(run) is not None
    assert runs == [run]


@pytest.mark.parametrize("mark", [None, b"*\n", b"\xff\xfe"], ids=["no mark", "other mark", "no text"])
def test_a_folder_that_is_not_from_a_quickstart_is_refused(
    tmp_path: Path, runs: list[Path], mark: bytes | None
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "work").write_text("of years")
    if mark is not None:
        (folder / MARK).write_bytes(mark)
    with pytest.raises(HeedfulError, match="mine exists, and no quickstart made it: give another folder"):
        quickstart(folder)
    assert (folder / "work").read_text() == "of years"
    assert not runs


def test_a_file_is_refused(tmp_path: Path, runs: list[Path]) -> None:
    file = tmp_path / "work"
    file.write_text("of years")
    with pytest.raises(HeedfulError, match="work exists, and no quickstart made it"):
        quickstart(file)
    with pytest.raises(HeedfulError, match=r"work/run cannot be written: Not a directory: give another folder"):
        quickstart(file / "run")
    assert file.read_text() == "of years"
    assert not runs


def test_a_running_quickstart_is_not_replaced(tmp_path: Path, runs: list[Path]) -> None:
    folder = tmp_path / "run"
    quickstart(folder)
    with lock_run(folder), pytest.raises(HeedfulError, match=re.escape("another run, pid ")):
        quickstart(folder)
    assert (folder / "predictions-test.jsonl").is_file()
    assert len(runs) == 1


def test_a_link_is_not_replaced(tmp_path: Path, runs: list[Path]) -> None:
    quickstart(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(HeedfulError, match="link cannot be written: Cannot call rmtree on a symbolic link: give"):
        quickstart(tmp_path / "link")
    assert (tmp_path / "run" / "predictions-test.jsonl").is_file()
