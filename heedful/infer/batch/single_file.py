"""Answers in one file instead of a folder of parts: the parts are written beside the file, and joined."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from heedful.atomic_io import atomic_path, remove, write_synced
from heedful.errors import HeedfulError

READ_BYTES = 1 << 20  # bytes of a part that are read at once
JOINABLE = ("csv", "jsonl", "conll")  # formats whose parts can be joined, without repeating the header
FILE_SUFFIXES = (*JOINABLE, "tsv", "json", "ndjson", "txt", "xls", "xlsx", "gz", "xz", "bz2")  # a file is meant


def parts_folder(out: Path, form: str) -> Path:
    """Return the folder for the parts: `out` itself if it is a folder, or else `out`.parts beside the file.

    Args:
        out: Path of a folder, or of a new file whose suffix is the format.
        form: The format.

    Raises:
        HeedfulError: If the path names an existing file, or a file in another format.
    """
    if out.is_dir():
        return out
    suffix = out.suffix.lower().removeprefix(".")
    if suffix != form or form not in JOINABLE:
        if suffix in JOINABLE:
            reason = f"ends in .{suffix}, and the format is {form}"
        elif suffix in FILE_SUFFIXES:
            reason = f"answers are not written as .{suffix}"
        elif out.exists():
            reason = "is a file"
        else:
            return out
        raise HeedfulError(f"{out}: {reason}: give a folder, or a new file that ends in .csv, .jsonl or .conll")
    if out.exists():
        raise HeedfulError(f"{out}: exists already: give another file, or remove it")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise HeedfulError(f"{out}: one file is written by one process: give a folder, in which several share the work")
    return out.with_name(f"{out.name}.parts")


def join_parts(parts: Path, out: Path, form: str, header: bytes) -> None:
    """Join parts into one file, and remove their folder.

    Args:
        parts: Folder of the parts.
        out: The file, which appears when it is complete.
        form: Format of the parts.
        header: First bytes of each part, which the file has once.
    """

    def chunks() -> Iterator[bytes]:
        yield header
        for path in sorted(parts.glob(f"part-*.{form}")):
            with path.open("rb") as file:
                file.seek(len(header))
                while data := file.read(READ_BYTES):
                    yield data

    with atomic_path(out) as temporary:
        write_synced(temporary, chunks())
    remove(parts)
