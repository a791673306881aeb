"""Answers in one file: the parts are written into a folder beside the file, and joined at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from heedful.atomic_io import atomic_path, write_synced
from heedful.errors import HeedfulError

READ_BYTES = 1 << 20  # bytes of a part to read at once
JOINABLE = ("csv", "jsonl", "conll")  # formats whose parts can be joined, if only the first keeps its header
# suffixes that name a file, not a folder
FILE_SUFFIXES = (*JOINABLE, "tsv", "json", "ndjson", "txt", "xls", "xlsx", "gz", "xz", "bz2")


def parts_folder(out: Path, file_format: str) -> Path:
    """Return the folder for the parts: `out` if it is a folder, or "OUT.parts" beside it if it is a file.

    Args:
        out: A folder, or a new file whose suffix is the format.
        file_format: Format of the answers.

    Raises:
        HeedfulError: If `out` is an existing file, or its suffix is that of another format.
    """
    if out.is_dir():
        return out
    suffix = out.suffix.lower().removeprefix(".")
    if suffix != file_format or file_format not in JOINABLE:
        if suffix in JOINABLE:
            reason = f"ends in .{suffix}, and the format is {file_format}"
        elif suffix in FILE_SUFFIXES:
            reason = f"answers are not written as .{suffix}"
        elif out.exists():
            reason = "is a file"
        else:
            return out
        raise HeedfulError(f"{out}: {reason}: give a folder, or a new file that ends in .csv, .jsonl or .conll")
    check_output_is_new(out)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise HeedfulError(f"{out}: one file is written by one process: give a folder, in which several share the work")
    return out.with_name(f"{out.name}.parts")


def check_output_is_new(out: Path) -> None:
    """Raise a HeedfulError if the file exists."""
    if out.exists():
        raise HeedfulError(f"{out}: exists already: give another file, or remove it")


def join_parts(parts: Path, out: Path, file_format: str, header: bytes) -> None:
    """Join the parts in a folder into one file.

    Args:
        parts: Folder of the parts.
        out: The file, which appears only when it is complete.
        file_format: Format of the parts.
        header: Bytes with which every part begins; the file has them once.
    """

    def chunks() -> Iterator[bytes]:
        yield header
        for path in sorted(parts.glob(f"part-*.{file_format}")):
            with path.open("rb") as file:
                file.seek(len(header))
                while data := file.read(READ_BYTES):
                    yield data

    with atomic_path(out) as temporary:
        write_synced(temporary, chunks())
