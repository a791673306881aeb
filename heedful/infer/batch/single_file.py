"""Answers in one file instead of a folder of parts: the parts are made beside it and joined."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from heedful.atomic_io import atomic_path, remove, write_synced
from heedful.errors import HeedfulError

CHUNK = 1 << 20
JOINED = ("csv", "jsonl", "conll")  # formats whose parts are joined as they are, but for the header
FILES = (*JOINED, "tsv", "json", "ndjson", "txt", "xls", "xlsx", "gz", "xz", "bz2")  # suffixes that promise one file


def parts_folder(out: Path, form: str) -> Path:
    """Return the folder of the parts: `out` itself, or a folder beside the file that `out` names by its suffix."""
    if out.is_dir():
        return out
    suffix = out.suffix.lower().removeprefix(".")
    if suffix != form or form not in JOINED:
        if suffix in FILES or out.exists():
            why = f"answers are not written as .{suffix}" if suffix in FILES else "is a file"
            why = f"ends in .{suffix}, and the format is {form}" if suffix in JOINED else why
            raise HeedfulError(f"{out}: {why}: give a folder, or a new file that ends in .csv, .jsonl or .conll")
        return out
    if out.exists():
        raise HeedfulError(f"{out}: exists already: give another file, or remove it")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise HeedfulError(f"{out}: one file is written by one process: give a folder, in which several share the work")
    return out.with_name(f"{out.name}.parts")


def join_parts(parts: Path, out: Path, form: str, header: bytes) -> None:
    """Join the parts to one file with one header, and remove their folder."""

    def chunks() -> Iterator[bytes]:
        yield header
        for path in sorted(parts.glob(f"part-*.{form}")):
            with path.open("rb") as file:
                file.seek(len(header))
                while data := file.read(CHUNK):
                    yield data

    with atomic_path(out) as temporary:
        write_synced(temporary, chunks())
    remove(parts)
