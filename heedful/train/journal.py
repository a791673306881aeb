"""The journal of a run: a line of JSON for each event, without times, so that equal runs have equal journals."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heedful.atomic_io import make_folder, sync_folder
from heedful.errors import DataError, RunError


class Journal:
    """An append-only file of records; `rewind` removes the lines that a resumed run will write again."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        with self._translate_os_errors():
            make_folder(self.path.parent)
            self._file = self.path.open("ab", buffering=0)
            sync_folder(self.path.parent)

    @property
    def num_bytes(self) -> int:
        """Size of the file, which a checkpoint stores."""
        return self._file.tell()

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record; numbers that are not finite become "NaN", "Infinity" or "-Infinity", as float() reads."""
        text = json.dumps(_finite_json(record), ensure_ascii=False, allow_nan=False)
        # half of a surrogate pair, which UTF-8 lacks, is written as \udxxx, as in JSON
        rest = memoryview(f"{text}\n".encode(errors="backslashreplace"))
        with self._translate_os_errors():
            while rest:
                rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Sync the file to disk, before a checkpoint stores its size."""
        with self._translate_os_errors():
            os.fsync(self._file.fileno())

    def rewind(self, num_bytes: int) -> None:
        """Truncate the file to the size that a checkpoint stores.

        Raises:
            RunError: If the file is shorter.
        """
        if self.num_bytes < num_bytes:
            raise RunError(
                f"{self.path} has {self.num_bytes:,} bytes, but {num_bytes:,} when the checkpoint was made: lines are "
                "lost. Restore the file, or start again in another folder"
            )
        with self._translate_os_errors():
            self._file.truncate(num_bytes)
            self._file.seek(num_bytes)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _translate_os_errors(self) -> Iterator[None]:
        """Context in which I/O errors become RunErrors."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written: {error.strerror or error}. Make it writable, or let the run write "
                "elsewhere, and start it again: it resumes from its newest checkpoint"
            ) from None


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a journal, without an incomplete last line.

    Raises:
        DataError: If a line is not JSON.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: {error}; expected a line of JSON, as Heedful writes it") from None
            yield record


def _finite_json(value: object) -> object:
    """Replace NaN and infinities, which JSON does not have, by strings."""
    if isinstance(value, Mapping):
        return {key: _finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
