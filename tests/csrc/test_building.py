"""Compilers that fail, hang or write junk, and builds that are killed: no process and no file stays."""

from __future__ import annotations

import os
import random
import re
import signal
import stat
import time
from pathlib import Path

import pytest

from heedful import cache
from heedful.csrc import check, kernels, library, unavailable_reason
from heedful.errors import HeedfulWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*compiling kernels:heedful.errors.HeedfulWarning")

TO_LAST = 'for last; do :; done; {} "$last"'  # what a compiler is to write comes last


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HEEDFUL_KERNELS")
    monkeypatch.setattr(library, "_library_or_reason", library._library_or_reason.__wrapped__)
    return tmp_path / "cache"


def compiler(folder: Path, text: str) -> str:
    """A compiler of our own."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def left(folder: Path) -> list[str]:
    """Names of what a build left: not its lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != "kernels.lock") if folder.is_dir() else []


def alive(folder: Path) -> list[str]:
    """The processes that have the folder in their command or in their environment, but this one."""
    messages = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                words = (path / "cmdline").read_bytes()
                if str(folder).encode() in words + (path / "environ").read_bytes():
                    messages.append(words.replace(b"\0", b" ").decode())
            except OSError:  # it has ended, or belongs to another user
                continue
    return messages


def comes(what: object, seconds: float = 20.0) -> bool:
    """Whether something becomes true."""
    assert callable(what)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if what():
            return True
        time.sleep(0.02)
    return False


def test_built_libraries_are_private_to_this_user(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kernels_path: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, TO_LAST.format(f"cp {kernels_path}")))
    before = os.umask(0)
    try:
        assert kernels() is not None and unavailable_reason() == ""
    finally:
        os.umask(before)
    (path,) = folder.glob("*.so")
    modes = [stat.S_IMODE(file.stat().st_mode) for file in (folder, path, folder / "kernels.lock")]
    assert modes == [0o700, 0o700, 0o600] and left(folder) == [path.name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TO_LAST.format("echo junk >"), "compiled cannot be used: .* cannot be loaded: "),
        (TO_LAST.format(": >"), "compiled cannot be used: .* cannot be loaded: "),
        ("exit 0", "it wrote no library"),
        (
            "echo 'x.cpp:1: error: no such luck' >&2; exit 1",
            "could not compile the kernels: x.cpp:1: error: no such luck",
        ),
        ("kill -9 $$", "could not compile the kernels: status -9"),
    ],
)
def test_an_unusable_library_is_not_cached(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, kernels_path: Path, text: str, message: str
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, text))
    assert kernels() is None and re.search(message, unavailable_reason()), unavailable_reason()
    assert left(folder) == [] and comes(lambda: not alive(folder)), alive(folder)
    compiler(tmp_path, TO_LAST.format(f"cp {kernels_path}"))
    assert kernels() is not None and unavailable_reason() == ""


def test_a_library_that_computes_wrongly_is_not_cached(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, kernels_path: Path
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, TO_LAST.format(f"cp {kernels_path}")))
    with monkeypatch.context() as patch:
        patch.setattr(check, "_gelu", lambda ops, x: x)
        assert kernels() is None and "compiled computes wrongly here: gelu in float32 is off by" in unavailable_reason()
    assert left(folder) == []
    assert kernels() is not None


def building(folder: Path, number: signal.Signals) -> int:
    """The number of a process that builds, and does with a signal what it does where nobody has changed that."""
    if (pid := os.fork()) == 0:
        try:
            if number != signal.SIGKILL:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            library.build(folder)
        finally:
            os._exit(1)
    return pid


HANGS = "trap '' TERM INT HUP; echo x >> {}; sleep 1000 & wait"  # with a child of its own


def test_a_compiler_that_hangs_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "COMPILE_SECONDS", 0.5)
    monkeypatch.setenv("CXX", compiler(tmp_path, HANGS.format(tmp_path / "calls")))
    assert kernels() is None and "timed out after" in unavailable_reason()
    assert (tmp_path / "calls").exists() and left(folder) == []
    assert comes(lambda: not alive(folder)), alive(folder)


def test_the_first_compiler_that_fails_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    first = library.sources()[0].name
    text = f"case \"$*\" in *{first}*) echo 'error: bad luck' >&2; exit 1;; esac; sleep 1000"
    monkeypatch.setenv("CXX", compiler(tmp_path, text))
    begun = time.monotonic()
    assert kernels() is None and "bad luck" in unavailable_reason()
    assert time.monotonic() - begun < 60 and left(folder) == []
    assert comes(lambda: not alive(folder)), alive(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda x: x.name)
def test_a_build_that_is_killed_leaves_no_process_and_no_file(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("CXX", compiler(tmp_path, HANGS.format(calls)))
    pid = building(folder, number)
    assert comes(lambda: calls.exists() and len(calls.read_text().split()) > 1) and len(alive(folder)) > 3
    os.kill(pid, number)
    os.waitpid(pid, 0)
    assert comes(lambda: not alive(folder)), alive(folder)
    assert comes(lambda: left(folder) == []), left(folder)


def test_what_a_build_left_whose_machine_stopped_is_removed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, kernels_path: Path
) -> None:
    old = folder / f".{kernels_path.name}.{2**22 + 1}.part"  # of a process that is not there
    old.mkdir(parents=True)
    folder.chmod(0o700)
    (old / "rows.o").write_text("")
    monkeypatch.setenv("CXX", compiler(tmp_path, TO_LAST.format(f"cp {kernels_path}")))
    assert kernels() is not None and [name.rpartition(".")[2] for name in left(folder)] == ["so"]


def test_a_build_of_another_process_is_waited_for_and_then_done_without(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "WARN_AFTER", 0.05)
    monkeypatch.setattr(cache, "GIVE_UP_AFTER", 0.3)
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 1"))
    with cache.lock(folder / "kernels.lock", "compiling the kernels"):
        note = f"process {os.getpid()}"
        with pytest.warns(HeedfulWarning, match=f"waiting for {note}, which is compiling the kernels and holds"):
            assert kernels() is None
        with pytest.warns(HeedfulWarning, match="waiting for"):
            assert unavailable_reason().startswith(f"{note} has been compiling the kernels for more than")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("rounds", "longest"), [(60, 0.8), (15, 6.0)], ids=["quick compiler", "real compiler"])
def test_builds_that_are_killed_at_random_moments(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, kernels_path: Path, rounds: int, longest: float
) -> None:
    """Whatever moment it is, nothing stays but a library that is right, and the next build works."""
    if longest < 1:
        monkeypatch.setenv("CXX", compiler(tmp_path, f"sleep 0.1; {TO_LAST.format(f'cp {kernels_path}')}"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    draw, ended = random.Random(7), {"in the middle": 0, "in time": 0}
    for _ in range(rounds):
        number = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        pid = building(folder, number)
        time.sleep(draw.uniform(0, longest))
        os.kill(pid, number)
        os.waitpid(pid, 0)
        assert comes(lambda: not alive(folder)), alive(folder)
        assert comes(lambda: not [name for name in left(folder) if not name.endswith(".so")]), left(folder)
        assert not list((tmp_path / "tmp").iterdir())
        ended["in time" if left(folder) else "in the middle"] += 1
        for path in folder.glob("*.so"):
            assert check.find_error(library.load_library(path)) == ""
            path.unlink()
    assert ended["in the middle"] > rounds / 4, ended
    assert kernels() is not None and unavailable_reason() == ""
