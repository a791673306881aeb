"""JSON files of a model folder, with error messages for users who give a wrong folder.

`checkpoint` reads config.json and its other JSON files with these functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heedful import untrusted_files
from heedful.errors import ModelError, RunError


class UnfinishedError(RunError):
    """The folder is that of a run that was interrupted or is still running."""


def read_folder_json(path: Path, *, folder: Path | None = None, max_bytes: int | None = None) -> dict[str, Any]:
    """Read a JSON file that holds an object; raises ModelError for another value. `read_value` has the arguments."""
    value = read_value(path, folder=folder, max_bytes=max_bytes)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def read_value(path: Path, *, folder: Path | None = None, max_bytes: int | None = None) -> Any:
    """Read a JSON file; duplicate keys, NaN and endless nesting are errors.

    Args:
        folder: Folder that the file, with links followed, must be in. If None, its parent folder.
        max_bytes: Size limit. If None, the limit in untrusted_files.LIMITS for files with this name.

    Raises:
        UnfinishedError: If the file is missing in the folder of an unfinished run.
        ModelError: If it is missing, or cannot be read or parsed.
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
        raise ModelError(f"{path} does not exist: a model folder holds config.json and model.safetensors") from None
