"""--overwrite: only a run is replaced, and it is kept until the new one has written its results."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.errors import HeedfulError
from heedful.runs.overwrite import overwriting
from heedful.runs.results import RESULTS
from heedful.runs.run_folder import SETTINGS
from heedful.train.ranks import SINGLE_PROCESS
from heedful.train.run_lock import LOCK, lock_run


def write_run(folder: Path, content: str, *names: str) -> Path:
    """Write a lock and the named files, each with the same content, to a folder."""
    folder.mkdir(exist_ok=True)
    for name in (LOCK, *names):
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run."""
    return write_run(tmp_path / "run", "old", SETTINGS, RESULTS)


def aside(run: Path) -> Path:
    """Return the folder to which the old run is moved."""
    return run.with_name(".run.replaced")


def test_the_old_run_is_removed_when_the_new_one_has_results(run: Path) -> None:
    with overwriting(run, SINGLE_PROCESS, lambda text: pytest.fail(text)):
        assert not run.exists()
        assert (aside(run) / RESULTS).read_text() == "old"
        write_run(run, "new", SETTINGS, RESULTS)
    assert (run / RESULTS).read_text() == "new"
    assert not aside(run).exists()


def test_the_old_run_is_put_back_when_the_new_one_does_not_begin(run: Path) -> None:
    notes: list[str] = []
    with overwriting(run, SINGLE_PROCESS, notes.append):
        write_run(run, "new")  # only a lock, as after an error when the data is read
    assert (run / RESULTS).read_text() == "old"
    assert not aside(run).exists()
    assert "put back" in notes[0]


def test_a_new_run_that_was_interrupted_is_resumed(run: Path) -> None:
    notes: list[str] = []
    with overwriting(run, SINGLE_PROCESS, notes.append):
        write_run(run, "new", SETTINGS)
    assert (aside(run) / RESULTS).read_text() == "old"
    assert str(aside(run)) in notes[0]
    with overwriting(run, SINGLE_PROCESS, notes.append):
        assert (run / SETTINGS).read_text() == "new", "the same command finds the new run"
        write_run(run, "new", RESULTS)
    assert not aside(run).exists()


@pytest.mark.parametrize("names", [("thesis.tex",), ("a", "b", "c", "d"), (SETTINGS,)])
def test_a_folder_that_is_not_a_run_is_refused_and_untouched(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("mine")
    with pytest.raises(HeedfulError, match="is not a run folder"), overwriting(folder, SINGLE_PROCESS, print):
        pytest.fail("nothing runs")
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_a_run_in_which_a_process_trains_is_refused(run: Path) -> None:
    with lock_run(run), pytest.raises(HeedfulError, match="another run"), overwriting(run, SINGLE_PROCESS, print):
        pytest.fail("nothing runs")
    assert (run / RESULTS).exists()


def test_a_search_for_a_student_is_replaced_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "old", "search.json")
    with overwriting(folder, SINGLE_PROCESS, print):
        assert not folder.exists()
        write_run(folder, "new", "search.json")
        write_run(folder / "best", "new", RESULTS)
    assert (folder / "search.json").read_text() == "new"
    assert not aside(folder).exists()


def test_an_empty_or_missing_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "missing", tmp_path / "empty"):
        with overwriting(folder, SINGLE_PROCESS, lambda text: pytest.fail(text)):
            write_run(folder, "new", SETTINGS, RESULTS)
        assert (folder / RESULTS).read_text() == "new"
