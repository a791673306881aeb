"""The cache of this machine: where it is, whether it can be trusted, and its locks.

Its files are run as code (the C++ kernels) or trusted (measurements). So it is used only if nobody but this user and
root can change it. The folder, every folder above it and every file must belong to one of the two, and neither
their group nor others may write to them. A folder above may be like /tmp, which everybody writes to but where only
owners rename (the sticky bit). Links on the way are followed if they belong to this user or root, and what they lead to
is checked in the same way. A file is never a link.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from heedful.atomic_io import atomic_path, remove_stale
from heedful.errors import HeedfulError, HeedfulWarning

VARIABLE = "HEEDFUL_CACHE"
WARN_AFTER, GIVE_UP_AFTER = 5.0, 60.0  # seconds of waiting for a lock
MAX_LINKS = 40  # in one path, as the system has it


class CacheError(HeedfulError):
    """The cache cannot be used: the message says why, and what to do."""


# -- where it is ------------------------------------------------------------------------------------------------


def folder() -> Path | None:
    """Return HEEDFUL_CACHE, else `heedful` in the user's cache; None if HEEDFUL_CACHE is empty.

    A relative XDG_CACHE_HOME is ignored, as its specification asks. Raises CacheError if HEEDFUL_CACHE is relative, or
    if there is neither that nor a home folder. Nothing is created or checked.
    """
    value = os.environ.get(VARIABLE)
    if value is not None:
        if value and not os.path.isabs(value):
            raise CacheError(f"{VARIABLE} is {value}, which depends on the working directory: give an absolute path")
        return Path(value) if value else None
    above = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(above):
        home = os.environ["HOME"] if "HOME" in os.environ else os.path.expanduser("~")
        if not os.path.isabs(home):  # what expanduser does not know stays "~"
            raise CacheError(f"this user has no home folder: set HOME, or {VARIABLE} to the path of a folder")
        above = os.path.join(home, ".cache")
    return Path(above, "heedful")


# -- whether it can be trusted ------------------------------------------------------------------------------------


def check_folder(path: Path) -> None:
    """Raise CacheError unless only this user and root can change or replace a folder and its contents.

    A missing folder passes if its parent does.
    """
    at, names, links = Path("/"), list(path.absolute().parts[:0:-1]), 0
    _check(at, at.lstat(), above=True)
    while names:
        name = names.pop()
        here = at.parent if name == ".." else at / name
        try:
            status = here.lstat()
        except FileNotFoundError:
            return
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            _check_owner(here, status)
            target = Path(os.readlink(here))
            at = Path("/") if target.is_absolute() else at
            names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            continue
        _check(here, status, above=True)
        at = here
    _check(at, status := at.lstat(), above=False)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _check(path: Path, status: os.stat_result, *, above: bool) -> None:
    _check_owner(path, status)
    if not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or (above and status.st_mode & stat.S_ISVTX):
        return
    whose = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
    raise CacheError(
        f"{path} can be written by {whose} (mode {stat.S_IMODE(status.st_mode):o}): run chmod go-w "
        f"{shlex.quote(str(path))}, or set {VARIABLE} to a folder that only you can write to"
    )


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise CacheError(
            f"{path} belongs to user {status.st_uid}, but this is user {os.geteuid()}, who trusts only its own and "
            f"root's: set {VARIABLE} to a folder of your own"
        )


def make_private_folder(path: Path) -> None:
    """Make a folder that only this user can enter, and its missing parents, and check them."""
    check_folder(path)
    for part in (*reversed(path.parents), path):
        if not part.exists():
            with suppress(FileExistsError):  # another process was faster, or check_folder says what is there
                part.mkdir(0o700)
    check_folder(path)


def open_checked_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of the cache and return its descriptor; the caller closes it.

    The file is checked through this descriptor. Raises CacheError if the file, or a folder on the way to it,
    cannot be trusted, and OSError if it cannot be opened.
    """
    check_folder(path.parent)
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)  # of a pipe: do not wait
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CacheError(f"{path} is a link; expected a file: remove it") from None
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise CacheError(f"{path} is not a regular file: remove it")
        _check(path, status, above=False)
    except BaseException:
        os.close(handle)
        raise
    return handle


# -- files in it -------------------------------------------------------------------------------------------------


def read_file(path: Path) -> bytes:
    """Return the contents of a file of the cache, checked as in `open_checked_file`."""
    with open(open_checked_file(path), "rb") as file:
        return file.read()


def write_private_file(path: Path, data: bytes) -> None:
    """Write a file of the cache that only this user can read; it appears complete."""
    make_private_folder(path.parent)
    remove_stale(path.parent, path.name)  # what a process that was killed left
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with atomic_path(path) as part, open(os.open(part, flags, 0o600), "wb") as file:
        file.write(data)


# -- locks --------------------------------------------------------------------------------------------------------


@contextmanager
def lock(path: Path, work: str) -> Iterator[None]:
    """Hold a lock of the cache, which one process has at a time.

    `work` says what its holder does, as in "building the kernels". After WARN_AFTER seconds a warning names the holder;
    after GIVE_UP_AFTER seconds, CacheError is raised.
    """
    import fcntl  # not on every system

    make_private_folder(path.parent)
    handle = open_checked_file(path, os.O_RDWR | os.O_CREAT)
    try:
        begun, warned = time.monotonic(), False
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            waited = time.monotonic() - begun
            if waited >= GIVE_UP_AFTER:
                raise CacheError(
                    f"{_holder(handle)} has been {work} for more than {GIVE_UP_AFTER:.0f} s and holds {path}: start "
                    "again when it is done, or end it"
                )
            if waited >= WARN_AFTER and not warned:
                warnings.warn(
                    f"waiting for {_holder(handle)}, which is {work} and holds {path}", HeedfulWarning, stacklevel=4
                )
                warned = True
            time.sleep(0.05)
        with suppress(OSError):  # a full disk: others wait for a process without a number
            os.ftruncate(handle, 0)
            os.pwrite(handle, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(handle)


def _holder(handle: int) -> str:
    """Describe the process that wrote its number into a lock."""
    number = os.pread(handle, 20, 0).strip()
    return f"process {int(number)}" if number.isdigit() else "another process"
