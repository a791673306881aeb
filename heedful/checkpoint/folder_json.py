"""JSON files of a model folder, with errors that say what a model folder should hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heedful import untrusted_files
from heedful.errors import HeedfulError


class UnfinishedError(HeedfulError):
    """A run that was stopped, or goes on elsewhere."""


def read_json(path: Path, *, folder: Path | None = None, max_bytes: int | None = None) -> dict[str, Any]:
    """The object in a JSON file; duplicate keys, NaN and endless nesting are refused."""
    value = read_value(path, folder=folder, max_bytes=max_bytes)
    if not isinstance(value, dict):
        raise HeedfulError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def read_value(path: Path, *, folder: Path | None = None, max_bytes: int | None = None) -> Any:
    """The value in a JSON file that lies in `folder` (default: where it is), of at most `most` bytes.

    The default of `most` is the limit of files with this name, see untrusted_files.LIMITS.
    """
    folder = folder or path.parent
    try:
        return untrusted_files.read_json(folder, str(path.relative_to(folder)), max_bytes=max_bytes)
    except (FileNotFoundError, NotADirectoryError):
        if (path.parent / "run.lock").exists():
            raise UnfinishedError(
                f"{path.parent} is a run that is not finished and has no model yet: the command that began it resumes "
                f"it, heedful finetune, distil or pretrain with --output {path.parent} and its other options"
            ) from None
        raise HeedfulError(f"{path} does not exist: a model folder holds config.json and model.safetensors") from None
