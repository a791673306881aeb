"""The cache of this machine: where it is, checks that only this user and root can change it, and locks.

`csrc` caches the compiled C++ kernels here, and `infer` its measurements. The kernels are run as code, so the cache is
used only if nobody but this user and root can change it. The folder, all its parent folders and all files must belong
to one of the two, and neither their group nor others may write to them. Parent folders with the sticky bit, like /tmp,
are an exception, since only the owner of a file can rename it there. Links in the path are followed if they belong to
this user or root, and their targets are checked too. Files must not be links.
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

VARIABLE = "HEEDFUL_CACHE"  # environment variable with the path of the cache folder
WARN_AFTER, GIVE_UP_AFTER = 5.0, 60.0  # seconds of waiting for a lock until a warning, and until an error
MAX_LINKS = 40  # maximum links in a path, as in Linux


class CacheError(HeedfulError):
    """The cache cannot be used, because of its path, its permissions or another process."""


# -- the folder -------------------------------------------------------------------------------------------------


def folder() -> Path | None:
    """Return the cache folder: HEEDFUL_CACHE or, if it is not set, `heedful` in the user's cache folder.

    If HEEDFUL_CACHE is empty, there is no cache, and the result is None. A relative XDG_CACHE_HOME is ignored, as its
    specification requires. The folder is neither created nor checked.

    Raises:
        CacheError: If HEEDFUL_CACHE is relative, or if it is not set and the user has no home folder.
    """
    value = os.environ.get(VARIABLE)
    if value is not None:
        if value and not os.path.isabs(value):
            raise CacheError(f"{VARIABLE} is {value}, which depends on the working directory: give an absolute path")
        return Path(value) if value else None
    user_cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(user_cache):
        home = os.environ["HOME"] if "HOME" in os.environ else os.path.expanduser("~")
        if not os.path.isabs(home):  # expanduser returns "~" if it does not know the home folder
            raise CacheError(f"this user has no home folder: set HOME, or {VARIABLE} to the path of a folder")
        user_cache = os.path.join(home, ".cache")
    return Path(user_cache, "heedful")


# -- trust --------------------------------------------------------------------------------------------------------


def check_folder(path: Path) -> None:
    """Raise a CacheError unless only this user and root can change or replace a folder and its contents.

    A missing folder passes the check if its parent folder does.
    """
    parent, links = Path("/"), 0
    names = list(path.absolute().parts[:0:-1])  # names to follow from `parent`, the next one last
    _check(parent, parent.lstat(), is_parent=True)
    while names:
        name = names.pop()
        current = parent.parent if name == ".." else parent / name
        try:
            status = current.lstat()
        except FileNotFoundError:
            return
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            _check_owner(current, status)
            target = Path(os.readlink(current))
            parent = Path("/") if target.is_absolute() else parent
            names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            continue
        _check(current, status, is_parent=True)
        parent = current
    _check(parent, status := parent.lstat(), is_parent=False)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _check(path: Path, status: os.stat_result, *, is_parent: bool) -> None:
    """Raise a CacheError unless only this user and root can write to a path, or a parent folder has the sticky bit."""
    _check_owner(path, status)
    if not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or (is_parent and status.st_mode & stat.S_ISVTX):
        return
    writer = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
    raise CacheError(
        f"{path} can be written by {writer} (mode {stat.S_IMODE(status.st_mode):o}): run chmod go-w "
        f"{shlex.quote(str(path))}, or set {VARIABLE} to a folder that only you can write to"
    )


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raise a CacheError unless a path belongs to this user or root."""
    if status.st_uid not in (0, os.geteuid()):
        raise CacheError(
            f"{path} belongs to user {status.st_uid}, but this is user {os.geteuid()}, who trusts only its own and "
            f"root's: set {VARIABLE} to a folder of your own"
        )


def make_private_folder(path: Path) -> None:
    """Make a folder and its missing parents, with access for this user only, and check them."""
    check_folder(path)
    for current in (*reversed(path.parents), path):
        if not current.exists():
            with suppress(FileExistsError):  # another process made it, or it is a file, which check_folder rejects
                current.mkdir(0o700)
    check_folder(path)


def open_checked_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open and check a file of the cache; return its file descriptor, which the caller must close.

    Raises:
        CacheError: If the file or one of its parent folders cannot be trusted.
        OSError: If the file cannot be opened.
    """
    check_folder(path.parent)
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its other end
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CacheError(f"{path} is a link; expected a file: remove it") from None
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise CacheError(f"{path} is not a regular file: remove it")
        _check(path, status, is_parent=False)
    except BaseException:
        os.close(handle)
        raise
    return handle


# -- files ---------------------------------------------------------------------------------------------------


def read_file(path: Path) -> bytes:
    """Return the contents of a file of the cache after the checks of `open_checked_file`."""
    with open(open_checked_file(path), "rb") as file:
        return file.read()


def write_private_file(path: Path, data: bytes) -> None:
    """Write a file of the cache, readable for this user only; it appears complete or not at all."""
    make_private_folder(path.parent)
    remove_stale(path.parent, path.name)  # temporary files of killed processes
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with atomic_path(path) as temporary, open(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)


# -- locks --------------------------------------------------------------------------------------------------------


@contextmanager
def lock(path: Path, work: str) -> Iterator[None]:
    """Hold a lock of the cache, which only one process can hold at a time.

    After WARN_AFTER seconds, a warning names the process that holds the lock.

    Args:
        path: The lock file.
        work: What a holder of the lock does, for messages, such as "building the kernels".

    Raises:
        CacheError: If another process still holds the lock after GIVE_UP_AFTER seconds.
    """
    import fcntl  # not on every system

    make_private_folder(path.parent)
    handle = open_checked_file(path, os.O_RDWR | os.O_CREAT)
    try:
        started_at = time.monotonic()
        has_warned = False
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            waited = time.monotonic() - started_at
            if waited >= GIVE_UP_AFTER:
                raise CacheError(
                    f"{_holder(handle)} has been {work} for more than {GIVE_UP_AFTER:.0f} s and holds {path}: start "
                    "again when it is done, or end it"
                )
            if waited >= WARN_AFTER and not has_warned:
                warnings.warn(
                    f"waiting for {_holder(handle)}, which is {work} and holds {path}", HeedfulWarning, stacklevel=4
                )
                has_warned = True
            time.sleep(0.05)
        with suppress(OSError):  # if the disk is full, messages of other processes do not name this process
            os.ftruncate(handle, 0)
            os.pwrite(handle, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(handle)


def _holder(handle: int) -> str:
    """Return "process N" for the process that wrote its id N into a lock file, or "another process"."""
    pid = os.pread(handle, 20, 0).strip()
    return f"process {int(pid)}" if pid.isdigit() else "another process"
