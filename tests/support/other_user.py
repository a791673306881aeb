"""Files of another user, and functions that run as another user in a forked process; both need root."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

OTHER_USER = 65534  # user id of "nobody"
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can change owners of files and become another user"
)


def change_owner(path: Path, user: int = OTHER_USER) -> None:
    """Make another user the owner of a file, a folder or a link."""
    os.chown(path, user, user, follow_symlinks=False)


def run_as_user(user: int | None, work: Callable[[], Any]) -> Any:
    """Run a function in a forked process, and return its result, or its error as text.

    Args:
        user: Id of the user that runs it. If None, the current user does.
        work: Returns data for JSON.
    """
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            result = work()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        with open(write_end, "w") as file:
            json.dump(result, file)
        os._exit(0)
    os.close(write_end)
    with open(read_end) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


@contextmanager
def shared_folder(user: int) -> Iterator[Path]:
    """Context with a temporary folder that another user can enter, unlike folders of pytest."""
    with TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        if not run_as_user(user, lambda: os.access(name, os.X_OK)):
            pytest.skip("temporary folders here are not open to other users")
        yield Path(name)
