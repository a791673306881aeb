"""Files and folders that appear complete or not at all, and that survive a power cut.

Corpora, run folders, checkpoints, caches and tokenizers are written with these functions. They change the disk only by
the last six functions of this module, `_open` to `_remove`, which tests replace to simulate failures.
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
    from torch import Tensor  # for type checkers only: programs that only read and write files start without PyTorch

Chunk: TypeAlias = "bytes | memoryview | Tensor"  # a tensor is written as its bytes


def as_bytes(chunk: Chunk) -> memoryview:
    """Return the bytes of a chunk; for a contiguous tensor on the CPU, they are its memory and not a copy."""
    if isinstance(chunk, bytes | memoryview):
        return memoryview(chunk)
    import torch

    return chunk.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def checksum(chunks: Iterable[Chunk]) -> dict[str, int | str]:
    """Return the size and the SHA-256 of all chunks together, under "bytes" and "sha256"."""
    size, digest = 0, hashlib.sha256()
    for chunk in map(as_bytes, chunks):
        size += len(chunk)
        digest.update(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_synced(path: Path, chunks: Iterable[Chunk]) -> dict[str, int | str]:
    """Write a new file chunk by chunk, and sync it; returns the `checksum` of the chunks."""

    def write_chunks() -> Iterator[memoryview]:
        for chunk in map(as_bytes, chunks):
            _write(handle, chunk)
            yield chunk

    with _open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
        summary = checksum(write_chunks())
        _fsync(handle)  # errors of writes are reported to the handle that wrote
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
    """Raise OSError if a file cannot be written to a folder; called before long work whose results are saved there."""
    temporary = temporary_path(folder / "probe")
    _remove(temporary)
    try:
        write_synced(temporary, [b"\0"])
    finally:
        _remove(temporary)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it survive a power cut."""
    with _open_file(folder, os.O_RDONLY) as handle:
        _fsync(handle)


@contextmanager
def atomic_path(target: Path, *, folder: bool = False, owner: str = "") -> Iterator[Path]:
    """Yield a temporary path that becomes the target at the end of the context, or is removed after an error.

    Args:
        target: The final path.
        folder: Whether to make a temporary folder.
        owner: Replaces the process id in the temporary name, if several machines write to the folder; `remove_stale`
            does not remove such files.
    """
    temporary = temporary_path(target, owner)
    try:
        if folder:
            _mkdir(temporary)
        yield temporary
        if folder:
            sync_folder(temporary)
        _rename(temporary, target)
    except BaseException:
        _remove(temporary)
        raise
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Rename a file or a folder and then remove it, so that no incomplete folder ever has its name."""
    old = temporary_path(path.with_name(f"{path.name}.old"))
    _rename(path, old)
    _remove(old)


def remove_stale(folder: Path, name: str | None = None) -> None:
    """Remove temporary files of processes that have ended, and of earlier calls in this process.

    Args:
        folder: The folder.
        name: Name of the file whose temporary files are removed. If None, those of all files, which is only for
            folders that no other program uses.
    """
    name_pattern = ".+" if name is None else rf"{re.escape(name)}(?:\.old)?"
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(rf"\.{name_pattern}\.([1-9][0-9]{{0,8}})\.part", path.name, re.DOTALL)
        if match and not _is_other_process(int(match[1])):
            _remove(path)


def temporary_path(path: Path, owner: str = "") -> Path:
    """Return the path of a file or folder while it is written; `remove_stale` recognises it."""
    return path.with_name(f".{path.name}.{owner or os.getpid()}.part")


def _is_other_process(pid: int) -> bool:
    """Return whether another process with this id is alive."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


@contextmanager
def _open_file(path: Path, flags: int) -> Iterator[int]:
    """Yield the descriptor of a file or folder, which is closed at the end of the context."""
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
