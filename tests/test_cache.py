"""The cache: where it is, whose hands it must be in, and waiting for its locks."""

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

USER = 54321  # has no entry in the passwd file


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of our own, made with no mask: only what says its mode is safe."""
    before = os.umask(0)
    try:
        path = tmp_path / "cache"
        path.mkdir(0o700)
        yield path
    finally:
        os.umask(before)


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder(USER) as path:
        yield path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# -- where it is ------------------------------------------------------------------------------------------------


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
def test_the_folder(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str | None) -> None:
    for name in ("HEEDFUL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.folder() == (None if expected is None else Path(expected))


def test_a_relative_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", "my/cache")
    with pytest.raises(CacheError, match=r"HEEDFUL_CACHE is my/cache, .*: give an absolute path"):
        cache.folder()


@pytest.mark.parametrize("home", [None, "", "somewhere"])
def test_without_a_home_folder_there_is_no_cache(monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    for name in ("HEEDFUL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "getuid", lambda: USER)
    with pytest.raises(CacheError, match="no home folder: set HOME, or HEEDFUL_CACHE"):
        cache.folder()


# -- who may write there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "whose"), [(0o770, "its group"), (0o707, "everybody"), (0o1777, "everybody")])
def test_a_folder_that_others_may_write_to_is_refused(here: Path, bits: int, whose: str) -> None:
    here.chmod(bits)
    for work in (cache.check_folder, cache.make_private_folder):
        with pytest.raises(CacheError, match=rf"can be written by {whose} \(mode {bits:o}\): run chmod go-w "):
            work(here)


def test_a_folder_that_others_may_read_is_not(here: Path) -> None:
    here.chmod(0o755)
    cache.check_folder(here)


@pytest.mark.parametrize(("bits", "refused"), [(0o777, True), (0o775, True), (0o1777, False), (0o755, False)])
def test_a_folder_above_may_be_shared_if_it_is_sticky(here: Path, bits: int, refused: bool) -> None:
    inner = here / "above" / "cache"
    inner.mkdir(0o700, parents=True)
    inner.parent.chmod(bits)
    for path in (inner, inner.parent / "not there yet"):
        if refused:
            with pytest.raises(CacheError, match=r"above can be written by "):
                cache.make_private_folder(path)
        else:
            cache.make_private_folder(path)
    assert (inner.parent / "not there yet").exists() != refused


def test_links_are_followed_and_where_they_lead_is_checked(here: Path) -> None:
    (here / "real").mkdir(0o700)
    (here / "link").symlink_to("real")
    (here / "absolute").symlink_to(here / "link")
    (here / "real" / "up").symlink_to("../real/..")
    for name in ("link", "absolute", "absolute/up/link/new"):
        cache.check_folder(here / name)
    (here / "real").chmod(0o777)
    for name in ("link", "absolute", "link/new", "absolute/up/link"):
        with pytest.raises(CacheError, match=r"real can be written by everybody"):
            cache.check_folder(here / name)


def test_links_in_a_circle_are_an_error_of_the_system(here: Path) -> None:
    (here / "a").symlink_to("b")
    (here / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        cache.check_folder(here / "a" / "cache")


def test_created_files_are_private_to_this_user(here: Path) -> None:
    cache.write_private_file(here / "x" / "y" / "file.json", b"")
    (here / "x" / "y" / f".file.json.{2**22 + 1}.part").touch()  # of a process that is not there
    cache.write_private_file(here / "x" / "y" / "file.json", b"text")
    with cache.lock(here / "x" / "lock", "working"):
        assert [mode(here / name) for name in ("x", "x/y")] == [0o700] * 2
        assert [mode(here / name) for name in ("x/y/file.json", "x/lock")] == [0o600] * 2
    assert cache.read_file(here / "x" / "y" / "file.json") == b"text"
    assert sorted(path.name for path in here.rglob("*")) == ["file.json", "lock", "x", "y"]


def test_a_file_in_place_of_the_folder_is_an_error_of_the_system(here: Path) -> None:
    cache.write_private_file(here / "file", b"")
    with pytest.raises(NotADirectoryError):
        cache.make_private_folder(here / "file")


def linked(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def filed(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.chmod(0o660), "file can be written by its group"),
        (lambda path: path.chmod(0o602), "file can be written by everybody"),
        (linked, "file is a link; expected a file"),
        (piped, "file is not a regular file"),
        (filed, "file is not a regular file"),
        pytest.param(change_owner, "file belongs to user 65534, but this is user 0", marks=needs_root),
    ],
)
def test_files_that_are_not_trusted(here: Path, change: Callable[[Path], None], message: str) -> None:
    path = here / "file"
    cache.write_private_file(path, b"text")
    change(path)
    with pytest.raises(CacheError, match=message):
        cache.read_file(path)


def test_a_lock_is_not_made_through_a_link(here: Path) -> None:
    (here / "lock").symlink_to("made")
    with pytest.raises(CacheError, match="lock is a link"), cache.lock(here / "lock", "working"):
        pass
    assert not (here / "made").exists()


@needs_root
@pytest.mark.parametrize("path", ["above", "above/cache", "above/link"])
def test_a_folder_of_another_user_is_refused_anywhere_on_the_path(here: Path, path: str) -> None:
    (here / "above").mkdir(0o700)
    (here / "above" / "cache").mkdir(0o700)
    (here / "above" / "link").symlink_to("cache")
    cache.check_folder(here / "above" / "link")
    change_owner(here / path)
    with pytest.raises(CacheError, match=rf"{path} belongs to user {OTHER_USER}, but this is user 0"):
        cache.make_private_folder(here / "above" / "link" / "new")


@needs_root
def test_another_user_trusts_what_is_its_own_or_of_root(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = {"root": (0, 0), "mine": (USER, USER), "theirs": (OTHER_USER, USER), "mixed": (USER, OTHER_USER)}
    for name, (of_folder, of_file) in caches.items():
        cache.write_private_file(shared / name / "file", name.encode())
        (shared / name).chmod(0o755)
        (shared / name / "file").chmod(0o644)
        change_owner(shared / name / "file", of_file)
        change_owner(shared / name, of_folder)
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
def held(path: Path) -> Iterator[int]:
    """Another process holds the lock for as long as its input is open."""
    program = (
        "import sys; from pathlib import Path; from heedful.cache import lock\n"
        "with lock(Path(sys.argv[1]), 'working'): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        yield holder.pid


def test_waiting_for_a_lock_is_announced_and_limited(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "WARN_AFTER", 0.1)
    monkeypatch.setattr(cache, "GIVE_UP_AFTER", 0.4)
    with held(here / "lock") as number:
        begun = time.monotonic()
        with (
            pytest.warns(HeedfulWarning, match=f"waiting for process {number}, which is working and holds .*lock"),
            pytest.raises(CacheError, match=f"process {number} has been working .* start again when it is done"),
            cache.lock(here / "lock", "working"),
        ):
            pass
        assert 0.4 <= time.monotonic() - begun < 30
    with warnings.catch_warnings(action="error"), cache.lock(here / "lock", "working"):
        assert (here / "lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_that_becomes_free_is_taken(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    release = SimpleNamespace(
        sleep=lambda seconds: events.append("waited") or os.close(handle), monotonic=time.monotonic
    )
    monkeypatch.setattr(cache, "time", release)  # of this module alone: other threads sleep, too
    handle = os.open(here / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with cache.lock(here / "lock", "working"):
        events.append("held")
    assert events == ["waited", "held"]


def test_a_lock_holder_without_a_process_id_is_another_process(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "GIVE_UP_AFTER", 0.0)
    handle = os.open(here / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with (
            pytest.raises(CacheError, match="another process has been working"),
            cache.lock(here / "lock", "working"),
        ):
            pass
    finally:
        os.close(handle)
