"""The journal of a run: a line of JSON for each thing that happened, without times, so that equal runs are equal."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heedful.atomic_io import make_folder, sync_folder
from heedful.errors import HeedfulError


class Journal:
    """Lines are appended; `rewind` forgets what came after a checkpoint, since it will happen again."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        with self._told():
            make_folder(self.path.parent)
            self._file = self.path.open("ab", buffering=0)
            sync_folder(self.path.parent)

    @property
    def size(self) -> int:
        """In bytes: what a checkpoint keeps."""
        return self._file.tell()

    def write(self, record: dict[str, Any]) -> None:
        """One line; numbers that are not finite are "NaN", "Infinity", "-Infinity", from which float() makes them."""
        text = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)
        rest = memoryview(
            f"{text}\n".encode(errors="backslashreplace")
        )  # half a surrogate pair becomes \udxxx, as JSON
        with self._told():
            while rest:
                rest = rest[self._file.write(rest) :]

    def keep(self) -> None:
        """On the disk, before a checkpoint counts on it."""
        with self._told():
            os.fsync(self._file.fileno())

    def rewind(self, size: int) -> None:
        """To what it was at a checkpoint."""
        if self.size < size:
            raise HeedfulError(
                f"{self.path} has {self.size:,} bytes, but the checkpoint was made when it had {size:,}: lines are "
                "lost. Put the file back, or start anew in another folder"
            )
        with self._told():
            self._file.truncate(size)
            self._file.seek(size)

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise HeedfulError(
                f"{self.path} cannot be written: {error.strerror or error}. Make it possible, or let the run write "
                "elsewhere, and start it again: it resumes from its newest checkpoint"
            ) from None


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal; a last one that was cut off in the middle of writing is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise HeedfulError(f"{path}:{number}: {error}; expected a line of JSON, as Heedful writes it") from None
            yield record


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
