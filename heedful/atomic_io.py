"""Files and folders that are there whole or not at all, and that a power cut does not undo.

Whatever has to last goes through the six smallest functions here, `_open` to `_remove`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor  # not imported here: what only reads and writes files starts without it

Chunk: TypeAlias = "bytes | memoryview | Tensor"  # a tensor stands for its bytes


def as_bytes(chunk: Chunk) -> memoryview:
    """The bytes of a chunk; for a contiguous tensor on the CPU its own memory, not a copy."""
    if isinstance(chunk, bytes | memoryview):
        return memoryview(chunk)
    import torch

    return chunk.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def checksum(chunks: Iterable[Chunk]) -> dict[str, int | str]:
    """The size and the SHA-256 of all chunks together."""
    size, digest = 0, hashlib.sha256()
    for chunk in map(as_bytes, chunks):
        size += len(chunk)
        digest.update(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_synced(path: Path, chunks: Iterable[Chunk]) -> dict[str, int | str]:
    """Write a new file and sync it; the measure of what was to be written, one chunk in memory at a time."""

    def written() -> Iterator[memoryview]:
        for chunk in map(as_bytes, chunks):
            _write(handle, chunk)
            yield chunk

    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
        found = checksum(written())
        _fsync(handle)  # by the handle that wrote: another one need not hear of an error
    return found


def make_folder(path: Path) -> None:
    """Make a folder, and what is missing above it."""
    if not path.is_dir():
        make_folder(path.parent)
        try:
            _mkdir(path)
        except FileExistsError:  # another process was faster
            if not path.is_dir():
                raise
        sync_folder(path.parent)


def check_writable(folder: Path) -> None:
    """Raise the OSError that writing a file there gives: before work whose results are to be kept there."""
    part = temporary_path(folder / "probe")
    _remove(part)
    try:
        write_synced(part, [b"\0"])
    finally:
        _remove(part)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    with _opened(folder, os.O_RDONLY) as handle:
        _fsync(handle)


@contextmanager
def atomic_path(target: Path, *, folder: bool = False, owner: str = "") -> Iterator[Path]:
    """A temporary name, or a temporary folder, that then becomes the target for good, or disappears.

    `owner` stands in the temporary name instead of the process, for a folder that several machines write to; what such
    an owner leaves is not swept.
    """
    part = temporary_path(target, owner)
    try:
        if folder:
            _mkdir(part)
        yield part
        if folder:
            sync_folder(part)
        _rename(part, target)
    except BaseException:
        _remove(part)
        raise
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder; there is never half of it under its name."""
    gone = temporary_path(path.with_name(f"{path.name}.old"))
    _rename(path, gone)
    _remove(gone)


def remove_stale(folder: Path, name: str | None = None) -> None:
    """Remove what processes that died, or earlier calls of this one, left in the middle of something.

    With a name, what was left of that alone: in a folder that is not ours, others may call their files so too.
    """
    left = ".+" if name is None else rf"{re.escape(name)}(?:\.old)?"
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(rf"\.{left}\.([1-9][0-9]{{0,8}})\.part", path.name, re.DOTALL)
        if match and not _is_of_another(int(match[1])):
            _remove(path)


def temporary_path(path: Path, owner: str = "") -> Path:
    """What it is called before it is there; `sweep` knows it."""
    return path.with_name(f".{path.name}.{owner or os.getpid()}.part")


def _is_of_another(pid: int) -> bool:
    """Whether the number is of a living process that is not this one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    handle = _open(path, flags)
    try:
        yield handle
    finally:
        os.close(handle)


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o666)


def _write(handle: int, rest: memoryview) -> None:
    while rest:
        rest = rest[os.write(handle, rest) :]


def _fsync(handle: int) -> None:
    os.fsync(handle)


def _mkdir(path: Path) -> None:
    os.mkdir(path)


def _rename(path: Path, target: Path) -> None:
    os.replace(path, target)


def _remove(path: Path) -> None:
    """As far as it can be removed now; the rest goes with a later sweep."""
    with suppress(OSError):
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path, ignore_errors=True)
