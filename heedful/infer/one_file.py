"""Answers in one file instead of a folder of parts: the parts are made beside it and joined."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from heedful.durable import put, remove, whole
from heedful.errors import HeedfulError

CHUNK = 1 << 20
JOINED = ("csv", "jsonl", "conll")  # formats whose parts are joined as they are, but for the header


def parts_folder(out: Path, form: str) -> Path:
    """Return the folder of the parts: `out` itself, or a folder beside the file that `out` names by its suffix."""
    if form not in JOINED or out.suffix.lower() != f".{form}" or out.is_dir():
        return out
    if out.exists():
        raise HeedfulError(f"{out}: exists already: give another file, or remove it")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise HeedfulError(f"{out}: one file is written by one process: give a folder, in which several share the work")
    return out.with_name(f"{out.name}.parts")


def join(parts: Path, out: Path, form: str, header: bytes) -> None:
    """Join the parts to one file with one header, and remove their folder."""

    def chunks() -> Iterator[bytes]:
        yield header
        for path in sorted(parts.glob(f"part-*.{form}")):
            with path.open("rb") as file:
                file.seek(len(header))
                while data := file.read(CHUNK):
                    yield data

    with whole(out) as temporary:
        put(temporary, chunks())
    remove(parts)
