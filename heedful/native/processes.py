"""Commands that end with this process, however it ends, and what they wrote is removed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Start = Callable[[list[str]], "subprocess.Popen[bytes]"]

# Its input ends when this process does. $1 is the group, $2 the folder.
_GUARD = 'read -r _; kill -s KILL -- "-$1"; rm -rf -- "$2" || { sleep 1; rm -rf -- "$2"; }'


@contextmanager
def process_group(scratch: Path) -> Iterator[Start]:
    """Yield a function that starts a command; at the end all of them and their children are killed.

    They are one process group. A shell watches a pipe that this process alone holds open. If this process dies, by
    whatever signal, the pipe closes, and the shell kills the group and removes the folder `scratch`, which is their
    TMPDIR. Their standard error is a pipe.
    """
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started: list[subprocess.Popen[bytes]] = []
    ends, held = os.pipe()
    try:
        leader = subprocess.Popen(["sh", "-c", "read -r _"], stdin=ends, process_group=0, **quiet)
        started.append(leader)
        words = ["sh", "-c", _GUARD, "guard", str(leader.pid), str(scratch)]
        guard = subprocess.Popen(words, stdin=ends, process_group=0, **quiet)
        started.append(guard)

        def start(command: list[str]) -> subprocess.Popen[bytes]:
            started.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    process_group=leader.pid,
                    env={**os.environ, "TMPDIR": str(scratch)},
                )
            )
            return started[-1]

        yield start
    finally:
        # The leader is waited for last: until then no other group can have its number.
        if started:
            with suppress(ProcessLookupError):
                os.killpg(started[0].pid, signal.SIGKILL)
        for each in reversed(started):
            each.kill()
            each.wait()
            if each.stderr is not None:
                each.stderr.close()
        os.close(ends)
        os.close(held)
