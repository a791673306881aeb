"""Writes a model folder so that it appears complete or not at all.

`saving.py`, the conversion of pickles and the ONNX export write their folders with `atomic_folder`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from heedful.atomic_io import check_writable, remove_stale, temporary_path
from heedful.errors import ModelError


@contextmanager
def atomic_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes the target at the end of the context, or is removed after an error.

    Only an empty folder or a model folder is overwritten, so that a wrong path does not cost a home directory.

    Raises:
        ModelError: If the target may not be overwritten or cannot be written.
    """
    target = Path(os.path.realpath(target))
    _check_replaceable(target, overwrite=overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent, target.name)
        temporary = temporary_path(target)
        temporary.mkdir()
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror}") from None
    try:
        yield temporary
        _sync(temporary)
        _replace(temporary, target)
        _sync_one(target.parent)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{target} could not be written, and nothing of it was kept: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Check that `atomic_folder` can write a folder, before long work whose result it writes.

    Raises:
        ModelError: If the target may not be overwritten or cannot be written.
    """
    target = Path(os.path.realpath(target))
    _check_replaceable(target, overwrite=overwrite)
    try:
        check_writable(next(parent for parent in target.parents if parent.exists()))
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror}") from None


def _check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Raise a ModelError if the target may not be overwritten."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not overwrite:
            raise ModelError(f"{target} exists and is not empty: give another folder, or overwrite=True")
        if not _is_model_config(target / "config.json"):
            raise ModelError(
                f"{target} is not a model folder: it has no config.json with a model_type, and will not be replaced"
            )


def _is_model_config(config: Path) -> bool:
    """Return whether a config.json is that of a model, since other programs use the file name too."""
    try:
        return isinstance(json.loads(config.read_bytes()).get("model_type"), str)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _replace(temporary: Path, target: Path) -> None:
    """Rename `temporary` to `target`; if that fails, the old target is restored."""
    old = temporary_path(target.with_name(f"{target.name}.old"))
    if target.exists():
        os.replace(target, old)
    try:
        os.replace(temporary, target)
    except OSError:
        if old.exists():
            os.replace(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Sync a folder and its contents to disk, with the permissions of the folder."""
    mode = folder.stat().st_mode
    for path in sorted(folder.rglob("*")):
        path.chmod(mode if path.is_dir() else mode & 0o666)  # safetensors makes files that only their owner can read
        _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    """Sync one file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
