"""The name under which the page and figures show a model."""

from __future__ import annotations

import re
from pathlib import Path

from heedful.errors import HeedfulError
from heedful.untrusted_files import read_bytes, read_json

GENERIC_NAMES = ("model", "checkpoint", "snapshot", "")  # names of folders that do not identify a model
RUN_FILES = ("results.json", "journal.jsonl")  # files of a run folder
HEADING = re.compile(r"^# +(\S.*)$", re.MULTILINE)
MAX_TITLE_CHARS = 60
MAX_README_BYTES = 1 << 16


def model_title(source: str) -> str:
    """Return the name of a model on the hub, or the name of its folder, its run, or in its card or config.json.

    Args:
        source: A folder, or NAME[@REVISION] on the hub.

    >>> model_title("sentence-transformers/all-MiniLM-L6-v2@main")
    'all-MiniLM-L6-v2'
    """
    path = Path(source)
    if not path.is_dir():
        return _short(path.name.partition("@")[0] or source)
    path = path.absolute()
    if path.parent.name == "state":  # a training checkpoint
        return _short(f"{path.parent.parent.name} {path.name}")
    if path.name.lower() not in GENERIC_NAMES:
        return _short(path.name)
    if any((path.parent / name).is_file() for name in RUN_FILES):
        return _short(path.parent.name)
    return _short(_card_heading(path) or _config_name(path) or path.name or source)


def _card_heading(folder: Path) -> str:
    """Return the first heading of the model card if it is one word, otherwise "": a sentence is not a name."""
    try:
        text = read_bytes(folder, "README.md", max_bytes=MAX_README_BYTES).decode("utf-8", errors="replace")
    except (HeedfulError, OSError):
        return ""
    heading = HEADING.search(text)
    return heading[1].strip() if heading and " " not in heading[1].strip() else ""


def _config_name(folder: Path) -> str:
    """Return the last part of `_name_or_path` of config.json, or "" if it is missing or generic."""
    try:
        name = read_json(folder, "config.json").get("_name_or_path", "")
    except (HeedfulError, OSError, AttributeError):
        return ""
    return Path(name).name if isinstance(name, str) and Path(name).name.lower() not in GENERIC_NAMES else ""


def _short(name: str) -> str:
    return name if len(name) <= MAX_TITLE_CHARS else f"{name[: MAX_TITLE_CHARS - 1]}…"
