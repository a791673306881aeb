"""Work that is done as another user: in a forked process, where this one is root."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

OTHER = 65534  # a user that this one is not
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away and becomes another user")


def give(path: Path, user: int = OTHER) -> None:
    """Give a file, a folder or a link to another user."""
    os.chown(path, user, user, follow_symlinks=False)


def as_user(user: int | None, work: Callable[[], Any]) -> Any:
    """Return what `work` returns as that user, or this one, in a process of its own; its errors come as text."""
    ends, begins = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            result = work()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        with open(begins, "w") as file:
            json.dump(result, file)
        os._exit(0)
    os.close(begins)
    with open(ends) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


@contextmanager
def shared_folder(user: int) -> Iterator[Path]:
    """A folder of root's that another user can enter, unlike those that pytest makes."""
    with TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        if not as_user(user, lambda: os.access(name, os.X_OK)):
            pytest.skip("temporary folders here are not open to other users")
        yield Path(name)
