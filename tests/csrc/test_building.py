"""Building the kernels with compilers that fail, hang or write junk, and killing builds: nothing is left behind."""

from __future__ import annotations

import os
import random
import re
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from heedful import cache
from heedful.csrc import check, kernels, library, unavailable_reason
from heedful.errors import HeedfulWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*compiling kernels:heedful.errors.HeedfulWarning")

# shell command with the path of the output, which is the last argument of a compiler
WITH_OUTPUT = 'for last; do :; done; {} "$last"'


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HEEDFUL_KERNELS")
    monkeypatch.setattr(library, "_library_or_reason", library._library_or_reason.__wrapped__)
    return tmp_path / "cache"


def make_compiler(folder: Path, script: str) -> str:
    """Write a shell script that is used as the compiler; returns its path."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def remaining_files(folder: Path) -> list[str]:
    """Return the names of the files in a cache folder, without the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != "kernels.lock") if folder.is_dir() else []


def running_commands(folder: Path) -> list[str]:
    """Return the commands of other processes that have the folder in their command or environment."""
    commands = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                command = (path / "cmdline").read_bytes()
                if str(folder).encode() in command + (path / "environ").read_bytes():
                    commands.append(command.replace(b"\0", b" ").decode())
            except OSError:  # the process has ended, or belongs to another user
                continue
    return commands


def becomes_true(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    """Wait until a condition is true; returns False after the time limit."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_built_libraries_are_private_to_this_user(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kernels_path: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", make_compiler(tmp_path, WITH_OUTPUT.format(f"cp {kernels_path}")))
    umask = os.umask(0)
    try:
        assert kernels() is not None and unavailable_reason() == ""
    finally:
        os.umask(umask)
    (path,) = folder.glob("*.so")
    modes = [stat.S_IMODE(file.stat().st_mode) for file in (folder, path, folder / "kernels.lock")]
    assert modes == [0o700, 0o700, 0o600] and remaining_files(folder) == [path.name]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (WITH_OUTPUT.format("echo junk >"), "compiled cannot be used: .* cannot be loaded: "),
        (WITH_OUTPUT.format(": >"), "compiled cannot be used: .* cannot be loaded: "),
        ("exit 0", "it wrote no library"),
        (
            "echo 'x.cpp:1: error: no such luck' >&2; exit 1",
            "could not compile the kernels: x.cpp:1: error: no such luck",
        ),
        ("kill -9 $$", "could not compile the kernels: status -9"),
    ],
)
def test_an_unusable_library_is_not_cached(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, kernels_path: Path, script: str, message: str
) -> None:
    monkeypatch.setenv("CXX", make_compiler(tmp_path, script))
    assert kernels() is None and re.search(message, unavailable_reason()), unavailable_reason()
    assert remaining_files(folder) == []
    assert becomes_true(lambda: not running_commands(folder)), running_commands(folder)
    make_compiler(tmp_path, WITH_OUTPUT.format(f"cp {kernels_path}"))
    assert kernels() is not None and unavailable_reason() == ""


def test_a_library_that_computes_wrongly_is_not_cached(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, kernels_path: Path
) -> None:
    monkeypatch.setenv("CXX", make_compiler(tmp_path, WITH_OUTPUT.format(f"cp {kernels_path}")))
    with monkeypatch.context() as patch:
        patch.setattr(check, "_gelu", lambda ops, x: x)
        assert kernels() is None and "compiled computes wrongly here: gelu in float32 is off by" in unavailable_reason()
    assert remaining_files(folder) == []
    assert kernels() is not None


def start_build(folder: Path, signal_number: signal.Signals) -> int:
    """Start a process that builds the library, with the default handler of a signal; returns its process id."""
    if (pid := os.fork()) == 0:
        try:
            if signal_number == signal.SIGINT:
                signal.signal(signal_number, signal.default_int_handler)
            elif signal_number != signal.SIGKILL:
                signal.signal(signal_number, signal.SIG_DFL)
            library.build(folder)
        finally:
            os._exit(1)
    return pid


# compiler that ignores signals and hangs with a child process; it adds a line to a file first
HANGING_SCRIPT = "trap '' TERM INT HUP; echo x >> {}; sleep 1000 & wait"


def test_a_hanging_compiler_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "COMPILE_SECONDS", 0.5)
    monkeypatch.setenv("CXX", make_compiler(tmp_path, HANGING_SCRIPT.format(tmp_path / "calls")))
    assert kernels() is None and "timed out after" in unavailable_reason()
    assert (tmp_path / "calls").exists() and remaining_files(folder) == []
    assert becomes_true(lambda: not running_commands(folder)), running_commands(folder)


def test_the_first_failing_compilation_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    first = library.sources()[0].name
    script = f"case \"$*\" in *{first}*) echo 'error: bad luck' >&2; exit 1;; esac; sleep 1000"
    monkeypatch.setenv("CXX", make_compiler(tmp_path, script))
    start = time.monotonic()
    assert kernels() is None and "bad luck" in unavailable_reason()
    assert time.monotonic() - start < 60 and remaining_files(folder) == []
    assert becomes_true(lambda: not running_commands(folder)), running_commands(folder)


@pytest.mark.parametrize(
    "signal_number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda x: x.name
)
def test_a_killed_build_leaves_no_process_and_no_file(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, signal_number: signal.Signals
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("CXX", make_compiler(tmp_path, HANGING_SCRIPT.format(calls)))
    pid = start_build(folder, signal_number)
    assert becomes_true(lambda: calls.exists() and len(calls.read_text().split()) > 1)
    assert len(running_commands(folder)) > 3
    os.kill(pid, signal_number)
    os.waitpid(pid, 0)
    assert becomes_true(lambda: not running_commands(folder)), running_commands(folder)
    assert becomes_true(lambda: remaining_files(folder) == []), remaining_files(folder)


def test_the_next_build_removes_files_of_a_build_whose_machine_stopped(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, kernels_path: Path
) -> None:
    stale = folder / f".{kernels_path.name}.{2**22 + 1}.part"  # no process has an id above 2**22
    stale.mkdir(parents=True)
    folder.chmod(0o700)
    (stale / "rows.o").write_text("")
    monkeypatch.setenv("CXX", make_compiler(tmp_path, WITH_OUTPUT.format(f"cp {kernels_path}")))
    assert kernels() is not None
    (name,) = remaining_files(folder)
    assert name.endswith(".so")


def test_without_kernels_after_waiting_too_long_for_the_build_of_another_process(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "WARN_AFTER", 0.05)
    monkeypatch.setattr(cache, "GIVE_UP_AFTER", 0.3)
    monkeypatch.setenv("CXX", make_compiler(tmp_path, "exit 1"))
    with cache.lock(folder / "kernels.lock", "compiling the kernels"):
        holder = f"process {os.getpid()}"
        with pytest.warns(HeedfulWarning, match=f"waiting for {holder}, which is compiling the kernels and holds"):
            assert kernels() is None
        with pytest.warns(HeedfulWarning, match="waiting for"):
            assert unavailable_reason().startswith(f"{holder} has been compiling the kernels for more than")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("rounds", "max_seconds"), [(60, 0.8), (15, 6.0)], ids=["quick compiler", "real compiler"])
def test_builds_killed_at_random_moments_leave_nothing_but_a_correct_library(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, kernels_path: Path, rounds: int, max_seconds: float
) -> None:
    """After each kill, no process and no file is left but a correct library; at the end, a build succeeds."""
    if max_seconds < 1:
        monkeypatch.setenv("CXX", make_compiler(tmp_path, f"sleep 0.1; {WITH_OUTPUT.format(f'cp {kernels_path}')}"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    generator, builds = random.Random(7), {"killed": 0, "finished": 0}
    for _ in range(rounds):
        signal_number = generator.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        pid = start_build(folder, signal_number)
        time.sleep(generator.uniform(0, max_seconds))
        os.kill(pid, signal_number)
        os.waitpid(pid, 0)
        assert becomes_true(lambda: not running_commands(folder)), running_commands(folder)
        only_libraries = lambda: all(name.endswith(".so") for name in remaining_files(folder))  # noqa: E731
        assert becomes_true(only_libraries), remaining_files(folder)
        assert not list((tmp_path / "tmp").iterdir())
        builds["finished" if remaining_files(folder) else "killed"] += 1
        for path in folder.glob("*.so"):
            assert check.find_error(library.load_library(path)) == ""
            path.unlink()
    assert builds["killed"] > rounds / 4, builds
    assert kernels() is not None and unavailable_reason() == ""
