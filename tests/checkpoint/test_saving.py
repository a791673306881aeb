"""Saving a model folder is atomic: a failed save leaves the old folder or nothing, and no other folder is replaced."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import heedful
from heedful.checkpoint import atomic_folder
from heedful.errors import HeedfulError
from tests.support.model_copies import file_contents, have_equal_weights, run_python


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_save_leaves_no_files_and_keeps_the_old_folder(
    overwrite: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, target = heedful.load(folder), tmp_path / "out"
    if overwrite:
        heedful.save(loaded, target)
    before = file_contents(tmp_path)

    def fail_with_a_full_disk(tensors: Any, path: Path, metadata: Any = None) -> None:
        save_file(tensors, path)
        path.write_bytes(path.read_bytes()[:1000])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("heedful.checkpoint.saving.save_file", fail_with_a_full_disk)
        with pytest.raises(HeedfulError, match=r"nothing of it was kept: .*No space left on device"):
            heedful.save(loaded, target, overwrite=overwrite)
    for stage in ("_sync", "_replace"):  # the last steps of a save
        with monkeypatch.context() as patch:
            patch.setattr(
                atomic_folder, stage, lambda *arguments: (_ for _ in ()).throw(OSError(5, "Input/output error"))
            )
            with pytest.raises(HeedfulError, match="Input/output error"):
                heedful.save(loaded, target, overwrite=overwrite)
    assert file_contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if overwrite else [])
    heedful.save(loaded, target, overwrite=overwrite)
    assert have_equal_weights(folder, target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_old_folder_is_restored_if_the_new_one_cannot_be_moved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, target = heedful.load(folder), tmp_path / "out"
    heedful.save(loaded, target)
    before, move, calls = file_contents(tmp_path), os.replace, []

    def replace(source: Path, goal: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        move(source, goal)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(HeedfulError, match="Input/output error"):
            heedful.save(loaded, target, overwrite=True)
    assert len(calls) == 3
    assert file_contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


FILE_SIZE_LIMIT_SCRIPT = """
import resource, sys, heedful
loaded = heedful.load(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for overwrite in (False, True):
    try:
        heedful.save(loaded, sys.argv[2 + overwrite], overwrite=overwrite)
    except heedful.HeedfulError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_file_size_limit_leaves_no_files_and_keeps_the_old_folder(folder: Path, tmp_path: Path) -> None:
    heedful.save(heedful.load(folder), tmp_path / "old")
    before = file_contents(tmp_path)
    lines = run_python(FILE_SIZE_LIMIT_SCRIPT, folder, tmp_path / "new", tmp_path / "old").splitlines()
    assert len(lines) == 2
    assert all("nothing of it was kept" in line and "File too large" in line for line in lines)
    assert file_contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("num_renames", "leftovers"), [(0, [".out.{}.part"]), (1, [".out.{}.part", ".out.old.{}.part"])]
)
def test_the_next_save_removes_files_of_a_killed_process(
    folder: Path, tmp_path: Path, num_renames: int, leftovers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, target = heedful.load(folder), tmp_path / "out"
    if num_renames:
        heedful.save(loaded, target)
    if (pid := os.fork()) == 0:
        move, calls = os.replace, []

        def replace(source: Path, goal: Path) -> None:
            calls.append(source)
            if len(calls) > num_renames:
                os.kill(os.getpid(), signal.SIGKILL)
            move(source, goal)

        monkeypatch.setattr(os, "replace", replace)
        try:
            heedful.save(loaded, target, overwrite=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [name.format(pid) for name in leftovers]
    (tmp_path / f".other.{pid}.part").touch()  # of another folder
    heedful.save(loaded, target)
    assert have_equal_weights(folder, target)
    assert sorted(os.listdir(tmp_path)) == [f".other.{pid}.part", "out"]


def test_only_a_model_folder_is_overwritten(folder: Path, tmp_path: Path) -> None:
    loaded = heedful.load(folder)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    for target in ("home", "file"):
        with pytest.raises(HeedfulError, match="exists and is not empty: give another folder, or overwrite=True"):
            heedful.save(loaded, tmp_path / target)
        with pytest.raises(HeedfulError, match="is not a model folder: it has no config"):
            heedful.save(loaded, tmp_path / target, overwrite=True)
    for settings in ('{"editor": "vim"}', "[1]", "{"):  # other programs have a config.json too
        (tmp_path / "home" / "config.json").write_text(settings)
        with pytest.raises(HeedfulError, match="is not a model folder: it has no config"):
            heedful.save(loaded, tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "letters.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    heedful.save(loaded, tmp_path / "empty")
    assert have_equal_weights(folder, tmp_path / "empty")
    (tmp_path / "link").symlink_to("empty")
    heedful.save(loaded, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert have_equal_weights(folder, tmp_path / "link")
    with pytest.raises(HeedfulError, match="cannot be written"):
        heedful.save(loaded, tmp_path / "file" / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "home", "link"]


def test_saved_files_have_the_permissions_of_the_umask(folder: Path, tmp_path: Path) -> None:
    heedful.save(heedful.load(folder), tmp_path / "out")
    (tmp_path / "plain").touch()
    for path in (tmp_path / "out").iterdir():
        assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode, path
