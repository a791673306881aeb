"""Bad rows, which are rows that cannot be used, and the policies for them: raise, skip or quarantine.

Every reader of data reports bad rows to a `RowErrors`, which applies the policy.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from heedful.errors import DataError

MAX_TEXT_CHARS = 200  # maximum characters of a bad row's text in reports
MAX_REPORTED_ROWS = 20  # maximum bad rows in a report


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be used: its position, the reason, and the beginning of its text."""

    file: str
    line: int  # from 1
    column: str  # name, position from 1, or path in JSON; "": the whole row
    reason: str  # a phrase after the position in messages, such as "has no text"
    text: str  # the beginning of the row

    def __str__(self) -> str:
        position = f"{self.file}:{self.line}"
        if self.column:
            position += f":{self.column}"
        return f"{position}: {self.reason}"


class CellError(Exception):
    """Raised for a cell that cannot be used. The reader of the row converts it to a `BadRow`."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(reason)
        self.column = column
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Raise:
    """Policy: raise DataError at the first bad row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """Policy: skip bad rows, count them, and write them to a new file, one JSON object per line."""

    file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """Policy: skip bad rows, count them, and store the first ones for a report."""


OnBadRow = Literal["raise", "skip"]  # values of --on-bad-row
BadRowPolicy = Raise | Quarantine | Skip


def remove_quarantine(path: Path) -> None:
    """Remove the quarantine file of an earlier run. A file with other contents is not removed."""
    try:
        with path.open(encoding="utf-8") as file:
            first_row = json.loads(file.readline())
        if isinstance(first_row, dict) and set(first_row) == {field.name for field in fields(BadRow)}:
            path.unlink()
    except (OSError, ValueError):
        return


class RowErrors:
    """Handles bad rows by a policy, and counts each bad row once, even if its file is read several times."""

    def __init__(self, policy: BadRowPolicy) -> None:
        self.policy = policy
        self.bad: Counter[str] = Counter()  # counts of bad rows by file
        self.first: list[BadRow] = []  # the first bad rows, at most MAX_REPORTED_ROWS
        self.repairs: Counter[str] = Counter()  # counts of repaired cells by kind of repair
        self._last_counted: dict[tuple[str, str], tuple[int, int]] = {}  # last (line, index) counted, by (file, stage)
        self._file_created = False  # whether the quarantine file was created

    def reject(self, bad: BadRow, *, index: int = 0, stage: str = "row") -> None:
        """Raise an error for a bad row, or count it and write it to the quarantine file.

        Args:
            bad: the row.
            index: ascending index of the row, which distinguishes several rows of one line.
            stage: name of the check that failed. Each check visits the rows of a file in order, and may visit them
                several times; a row is counted at its first visit only.

        Raises:
            DataError: If the policy is `Raise`, or the quarantine file cannot be written.
        """
        if isinstance(self.policy, Raise):
            raise DataError(f"{bad} (correct it, or skip such rows: --on-bad-row skip)")
        if self._is_new(bad.file, stage, (bad.line, index)):
            self.bad[bad.file] += 1
            bad = replace(bad, text=bad.text[:MAX_TEXT_CHARS])
            if len(self.first) < MAX_REPORTED_ROWS:
                self.first.append(bad)
            if isinstance(self.policy, Quarantine):
                self._write(self.policy.file, asdict(bad))

    def count_repair(self, kind: str, file: str, line: int, index: int = 0) -> None:
        """Count a repaired cell.

        Args:
            kind: kind of the repair, a phrase for messages.
            file: the file.
            line: line of the cell.
            index: ascending index of the cell, which distinguishes several cells of one line.
        """
        if self._is_new(file, kind, (line, index)):
            self.repairs[kind] += 1

    def _is_new(self, file: str, stage: str, position: tuple[int, int]) -> bool:
        """Return whether (line, index) is after all that were counted for the file and stage, and store it if so."""
        if position <= self._last_counted.get((file, stage), (0, -1)):
            return False
        self._last_counted[file, stage] = position
        return True

    def _write(self, path: Path, record: dict[str, object]) -> None:
        """Append a JSON object as one line to the quarantine file. The first call creates the file."""
        try:
            with path.open("a" if self._file_created else "x", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
        except FileExistsError:
            raise DataError(f"{path}: exists already; give a new file for bad rows") from None
        except OSError as error:
            raise DataError(f"{path}: bad rows cannot be written there: {error.strerror}") from None
        self._file_created = True


def shown(value: object) -> str:
    """Format a value for messages: as JSON of at most 80 characters, with control characters escaped."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= 80 else text[:79] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
