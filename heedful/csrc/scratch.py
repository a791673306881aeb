"""A private scratch folder and commands for the compiler; neither outlives this process, even if it is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Start = Callable[[list[str]], "subprocess.Popen[bytes]"]  # starts a command in the background

# shell script that reads until this process ends, then kills the process group $1 and removes the folder $2
_GUARD = 'read -r _; kill -s KILL -- "-$1"; rm -rf -- "$2" || { sleep 1; rm -rf -- "$2"; }'


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Start]:
    """Make a folder that only this user can enter; yields a function that starts commands with it as their TMPDIR.

    At the end of the context, the commands and their children, which are one process group, are killed, and the folder
    is removed. If this process is killed before, a shell does so: it waits on a pipe whose other end only this process
    has open. The standard error of a command is a pipe.

    Args:
        folder: Path of the folder; it must not exist.
    """
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started: list[subprocess.Popen[bytes]] = []
    read_end, write_end = os.pipe()
    try:
        leader = subprocess.Popen(["sh", "-c", "read -r _"], stdin=read_end, process_group=0, **quiet)
        started.append(leader)
        guard = ["sh", "-c", _GUARD, "guard", str(leader.pid), str(folder)]
        started.append(subprocess.Popen(guard, stdin=read_end, process_group=0, **quiet))
        folder.mkdir(0o700)

        def start(command: list[str]) -> subprocess.Popen[bytes]:
            started.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    process_group=leader.pid,
                    env={**os.environ, "TMPDIR": str(folder)},
                )
            )
            return started[-1]

        yield start
    finally:
        # The guard ends after the commands. The leader is reaped last: until then, its id, which is that of the process
        # group, cannot be reused.
        if started:
            with suppress(ProcessLookupError):
                os.killpg(started[0].pid, signal.SIGKILL)
        for process in started[2:]:
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        shutil.rmtree(folder, ignore_errors=True)
        for process in reversed(started[:2]):
            process.kill()
            process.wait()
        os.close(read_end)
        os.close(write_end)
