"""Files and folders that appear complete or not at all, and that survive a power cut.

All writes go through the six smallest functions here, `_open` to `_remove`.
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

Chunk: TypeAlias = "bytes | memoryview | Tensor"  # a tensor is written as its bytes


def as_bytes(chunk: Chunk) -> memoryview:
    """Return the bytes of a chunk; for a contiguous tensor on the CPU its own memory, not a copy."""
    if isinstance(chunk, bytes | memoryview):
        return memoryview(chunk)
    import torch

    return chunk.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def checksum(chunks: Iterable[Chunk]) -> dict[str, int | str]:
    """Return the size and the SHA-256 of all chunks, end to end."""
    size, digest = 0, hashlib.sha256()
    for chunk in map(as_bytes, chunks):
        size += len(chunk)
        digest.update(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_synced(path: Path, chunks: Iterable[Chunk]) -> dict[str, int | str]:
    """Write a new file chunk by chunk, and sync it; returns the size and checksum of the chunks."""

    def written() -> Iterator[memoryview]:
        for chunk in map(as_bytes, chunks):
            _write(handle, chunk)
            yield chunk

    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
        summary = checksum(written())
        _fsync(handle)  # by the handle that wrote: another one need not hear of an error
    return summary


def make_folder(path: Path) -> None:
    """Make a folder, and its missing parents."""
    if not path.is_dir():
        make_folder(path.parent)
        try:
            _mkdir(path)
        except FileExistsError:  # another process was faster
            if not path.is_dir():
                raise
        sync_folder(path.parent)


def check_writable(folder: Path) -> None:
    """Raise the OSError that writing a file there gives; call it before long work whose results are written there."""
    part = temporary_path(folder / "probe")
    _remove(part)
    try:
        write_synced(part, [b"\0"])
    finally:
        _remove(part)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it survive a power cut."""
    with _opened(folder, os.O_RDONLY) as handle:
        _fsync(handle)


@contextmanager
def atomic_path(target: Path, *, folder: bool = False, owner: str = "") -> Iterator[Path]:
    """Context of a temporary path that becomes the target at the end, or is removed after an error.

    Args:
        target: The final path.
        folder: Make a temporary folder.
        owner: Part of the temporary name in place of the process id, for a folder that several machines write to;
            `remove_stale` leaves what such an owner has left.
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
    """Remove a file or a folder, so that half of it is never seen under its name."""
    gone = temporary_path(path.with_name(f"{path.name}.old"))
    _rename(path, gone)
    _remove(gone)


def remove_stale(folder: Path, name: str | None = None) -> None:
    """Remove temporary files that processes that died, or earlier calls of this process, have left.

    Args:
        folder: The folder.
        name: Remove those of this file alone, in a folder that others write to; None: all.
    """
    left = ".+" if name is None else rf"{re.escape(name)}(?:\.old)?"
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(rf"\.{left}\.([1-9][0-9]{{0,8}})\.part", path.name, re.DOTALL)
        if match and not _is_of_another(int(match[1])):
            _remove(path)


def temporary_path(path: Path, owner: str = "") -> Path:
    """Return the name of a file or folder until it is complete; `remove_stale` recognises it."""
    return path.with_name(f".{path.name}.{owner or os.getpid()}.part")


def _is_of_another(pid: int) -> bool:
    """Whether another process with this number is alive."""
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
    """Remove as much as can be removed now; `remove_stale` removes the rest later."""
    with suppress(OSError):
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path, ignore_errors=True)
