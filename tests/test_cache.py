"""The cache: its folder, who may write to it, and waiting for its locks."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from heedful import cache
from heedful.cache import CacheError
from heedful.errors import HeedfulWarning
from tests.support.other_user import OTHER_USER, change_owner, needs_root, run_as_user, shared_folder

USER = 54321  # user id without an entry in the passwd file


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private folder, under umask 0: files are private only if they are created with such a mode."""
    old_umask = os.umask(0)
    try:
        path = tmp_path / "cache"
        path.mkdir(0o700)
        yield path
    finally:
        os.umask(old_umask)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of root that USER can enter."""
    with shared_folder(USER) as path:
        yield path


def mode(path: Path) -> int:
    """Return the permission bits of a path."""
    return stat.S_IMODE(path.lstat().st_mode)


# -- the folder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HEEDFUL_CACHE": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"HEEDFUL_CACHE": "", "HOME": "/h"}, None),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/heedful"),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/heedful"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/heedful"),
        ({"HOME": "/h"}, "/h/.cache/heedful"),
    ],
)
def test_the_folder_depends_on_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str | None
) -> None:
    for name in ("HEEDFUL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.folder() == (None if expected is None else Path(expected))


def test_a_relative_cache_folder_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", "my/cache")
    with pytest.raises(CacheError, match=r"HEEDFUL_CACHE is my/cache, .*: give an absolute path"):
        cache.folder()


@pytest.mark.parametrize("home", [None, "", "somewhere"])
def test_a_user_without_a_home_folder_is_an_error(monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    for name in ("HEEDFUL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "getuid", lambda: USER)
    with pytest.raises(CacheError, match="no home folder: set HOME, or HEEDFUL_CACHE"):
        cache.folder()


# -- trust ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "writer"), [(0o770, "its group"), (0o707, "everybody"), (0o1777, "everybody")])
def test_a_folder_that_others_may_write_to_is_rejected(cache_folder: Path, bits: int, writer: str) -> None:
    cache_folder.chmod(bits)
    for function in (cache.check_folder, cache.make_private_folder):
        with pytest.raises(CacheError, match=rf"can be written by {writer} \(mode {bits:o}\): run chmod go-w "):
            function(cache_folder)


def test_a_folder_that_others_may_only_read_is_accepted(cache_folder: Path) -> None:
    cache_folder.chmod(0o755)
    cache.check_folder(cache_folder)


@pytest.mark.parametrize(("bits", "refused"), [(0o777, True), (0o775, True), (0o1777, False), (0o755, False)])
def test_a_parent_folder_may_be_shared_if_it_has_the_sticky_bit(cache_folder: Path, bits: int, refused: bool) -> None:
    inner = cache_folder / "above" / "cache"
    inner.mkdir(0o700, parents=True)
    inner.parent.chmod(bits)
    for path in (inner, inner.parent / "not there yet"):
        if refused:
            with pytest.raises(CacheError, match=r"above can be written by "):
                cache.make_private_folder(path)
        else:
            cache.make_private_folder(path)
    assert (inner.parent / "not there yet").exists() != refused


def test_links_are_followed_and_their_targets_checked(cache_folder: Path) -> None:
    (cache_folder / "real").mkdir(0o700)
    (cache_folder / "link").symlink_to("real")
    (cache_folder / "absolute").symlink_to(cache_folder / "link")
    (cache_folder / "real" / "up").symlink_to("../real/..")
    for name in ("link", "absolute", "absolute/up/link/new"):
        cache.check_folder(cache_folder / name)
    (cache_folder / "real").chmod(0o777)
    for name in ("link", "absolute", "link/new", "absolute/up/link"):
        with pytest.raises(CacheError, match=r"real can be written by everybody"):
            cache.check_folder(cache_folder / name)


def test_a_cycle_of_links_is_an_os_error(cache_folder: Path) -> None:
    (cache_folder / "a").symlink_to("b")
    (cache_folder / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        cache.check_folder(cache_folder / "a" / "cache")


def test_created_files_are_private_to_this_user(cache_folder: Path) -> None:
    cache.write_private_file(cache_folder / "x" / "y" / "file.json", b"")
    (cache_folder / "x" / "y" / f".file.json.{2**22 + 1}.part").touch()  # temporary file of a dead process
    cache.write_private_file(cache_folder / "x" / "y" / "file.json", b"text")
    with cache.lock(cache_folder / "x" / "lock", "working"):
        assert [mode(cache_folder / name) for name in ("x", "x/y")] == [0o700] * 2
        assert [mode(cache_folder / name) for name in ("x/y/file.json", "x/lock")] == [0o600] * 2
    assert cache.read_file(cache_folder / "x" / "y" / "file.json") == b"text"
    assert sorted(path.name for path in cache_folder.rglob("*")) == ["file.json", "lock", "x", "y"]


def test_a_file_in_place_of_the_folder_is_an_os_error(cache_folder: Path) -> None:
    cache.write_private_file(cache_folder / "file", b"")
    with pytest.raises(NotADirectoryError):
        cache.make_private_folder(cache_folder / "file")


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.chmod(0o660), "file can be written by its group"),
        (lambda path: path.chmod(0o602), "file can be written by everybody"),
        (replace_by_link, "file is a link; expected a file"),
        (replace_by_pipe, "file is not a regular file"),
        (replace_by_folder, "file is not a regular file"),
        pytest.param(change_owner, "file belongs to user 65534, but this is user 0", marks=needs_root),
    ],
)
def test_untrusted_files_are_rejected(cache_folder: Path, change: Callable[[Path], None], message: str) -> None:
    path = cache_folder / "file"
    cache.write_private_file(path, b"text")
    change(path)
    with pytest.raises(CacheError, match=message):
        cache.read_file(path)


def test_a_lock_file_is_not_created_through_a_link(cache_folder: Path) -> None:
    (cache_folder / "lock").symlink_to("target")
    with pytest.raises(CacheError, match="lock is a link"), cache.lock(cache_folder / "lock", "working"):
        pass
    assert not (cache_folder / "target").exists()


@needs_root
@pytest.mark.parametrize("path", ["above", "above/cache", "above/link"])
def test_a_folder_of_another_user_is_rejected_anywhere_on_the_path(cache_folder: Path, path: str) -> None:
    (cache_folder / "above").mkdir(0o700)
    (cache_folder / "above" / "cache").mkdir(0o700)
    (cache_folder / "above" / "link").symlink_to("cache")
    cache.check_folder(cache_folder / "above" / "link")
    change_owner(cache_folder / path)
    with pytest.raises(CacheError, match=rf"{path} belongs to user {OTHER_USER}, but this is user 0"):
        cache.make_private_folder(cache_folder / "above" / "link" / "new")


@needs_root
def test_a_user_trusts_its_own_files_and_those_of_root(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = {"root": (0, 0), "mine": (USER, USER), "theirs": (OTHER_USER, USER), "mixed": (USER, OTHER_USER)}
    for name, (folder_owner, file_owner) in caches.items():
        cache.write_private_file(shared / name / "file", name.encode())
        (shared / name).chmod(0o755)
        (shared / name / "file").chmod(0o644)
        change_owner(shared / name / "file", file_owner)
        change_owner(shared / name, folder_owner)
    for name in ("HEEDFUL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def read(name: str) -> str:
        try:
            return cache.read_file(shared / name / "file").decode()
        except CacheError as error:
            return str(error)

    root, mine, foreign, mixed = run_as_user(USER, lambda: [read(name) for name in caches])
    assert (root, mine) == ("root", "mine")
    assert f"theirs belongs to user {OTHER_USER}, but this is user {USER}" in foreign
    assert f"mixed/file belongs to user {OTHER_USER}" in mixed
    assert "no home folder" in run_as_user(USER, cache.folder)
    assert run_as_user(USER, lambda: cache.write_private_file(shared / "mine" / "deep" / "er", b"")) is None
    assert (shared / "mine" / "deep" / "er").stat().st_uid == USER and mode(shared / "mine" / "deep") == 0o700


# -- locks --------------------------------------------------------------------------------------------------------


@contextmanager
def lock_in_other_process(path: Path) -> Iterator[int]:
    """Hold a lock in another process until the context ends; yield its process id."""
    program = (
        "import sys; from pathlib import Path; from heedful.cache import lock\n"
        "with lock(Path(sys.argv[1]), 'working'): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        yield holder.pid


def test_waiting_for_a_lock_is_announced_and_limited(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "WARN_AFTER", 0.1)
    monkeypatch.setattr(cache, "GIVE_UP_AFTER", 0.4)
    with lock_in_other_process(cache_folder / "lock") as process_id:
        start = time.monotonic()
        with (
            pytest.warns(HeedfulWarning, match=f"waiting for process {process_id}, which is working and holds .*lock"),
            pytest.raises(CacheError, match=f"process {process_id} has been working .* start again when it is done"),
            cache.lock(cache_folder / "lock", "working"),
        ):
            pass
        assert 0.4 <= time.monotonic() - start < 30
    with warnings.catch_warnings(action="error"), cache.lock(cache_folder / "lock", "working"):
        assert (cache_folder / "lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_that_is_released_is_taken(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fake_time = SimpleNamespace(
        sleep=lambda seconds: events.append("waited") or os.close(handle), monotonic=time.monotonic
    )
    monkeypatch.setattr(cache, "time", fake_time)  # only in this module, since other threads sleep, too
    handle = os.open(cache_folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with cache.lock(cache_folder / "lock", "working"):
        events.append("held")
    assert events == ["waited", "held"]


def test_a_lock_holder_without_a_process_id_is_called_another_process(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "GIVE_UP_AFTER", 0.0)
    handle = os.open(cache_folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with (
            pytest.raises(CacheError, match="another process has been working"),
            cache.lock(cache_folder / "lock", "working"),
        ):
            pass
    finally:
        os.close(handle)
