"""The lock of a run folder, which prevents a second run in the same folder."""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from heedful.errors import HeedfulWarning, RunError

LOCK = "run.lock"

_handles: set[int] = set()  # file descriptors of the locks that this process holds


def _close_handles() -> None:
    """Close the lock files in a forked process."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_close_handles)  # a forked worker that outlives its run must not hold the lock


@contextmanager
def lock_run(folder: Path, *, name: str = LOCK, holder: str = "run") -> Iterator[None]:
    """Hold the lock of a folder, which is created if it is missing; the lock dies with the process.

    Args:
        folder: A folder that only one process may write at a time, such as that of a run.
        name: Name of the lock file.
        holder: Kind of thing that holds the lock, for messages.

    Raises:
        RunError: If another process holds the lock, or the folder cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise RunError(f"{folder} cannot hold a {holder}: {error.strerror}") from None
    _handles.add(handle)
    try:
        _lock(handle, folder, holder)
        yield
    finally:
        if handle in _handles:
            _handles.remove(handle)
            os.close(handle)


def _lock(handle: int, folder: Path, holder: str) -> None:
    """Lock the file, and write this process into it, for the message of a second process."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(handle, 300, 0).decode(errors="replace").strip()
        raise RunError(
            f"another {holder}, {owner if owner.isprintable() else repr(owner)}, holds {folder}: wait for it, stop it, "
            f"or give this {holder} another folder"
        ) from None
    except OSError as error:
        message = f"{folder} cannot be locked: {error.strerror}; a second {holder} in it would not be noticed"
        warnings.warn(message, HeedfulWarning, stacklevel=2)
        return
    with suppress(OSError):  # the lock works without the message
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()}, host {socket.gethostname()}\n".encode(), 0)
