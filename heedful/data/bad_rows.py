"""Rows that cannot be used: raise at the first one, or skip them, count them and write them to a quarantine file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from heedful.errors import DataError

LONGEST_TEXT = 200  # characters of a bad row that are kept
KEPT = 20  # bad rows for a report


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be used: its file, line and column, the reason, and its beginning."""

    file: str
    line: int
    column: str  # name, number from 1, or path in JSON; "": the whole row
    reason: str
    text: str

    def __str__(self) -> str:
        return ":".join([self.file, str(self.line), *([self.column] if self.column else [])]) + f": {self.reason}"


class CellError(Exception):
    """Raised for one cell; the reader of the row turns it into a `BadRow`."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(reason)
        self.column = column
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Raise:
    """Policy: the first bad row raises DataError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """Policy: skip bad rows and append them to a new file, one JSON object per line."""

    file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """Policy: skip bad rows, count them, and keep the first ones for a report."""


OnBadRow = Literal["raise", "skip"]  # the setting of the command line
BadRowPolicy = Raise | Quarantine | Skip


def remove_quarantine(path: Path) -> None:
    """Remove the quarantine file of an earlier run; a file with other content is left alone."""
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
        if isinstance(first, dict) and set(first) == {field.name for field in fields(BadRow)}:
            path.unlink()
    except (OSError, ValueError):
        return


class RowErrors:
    """Handles bad rows by a policy, and counts each row once, however often its file is read."""

    def __init__(self, policy: BadRowPolicy) -> None:
        self.policy = policy
        self.bad: Counter[str] = Counter()  # bad rows by file
        self.first: list[BadRow] = []
        self.repairs: Counter[str] = Counter()  # repaired cells by kind of repair
        self._last_counted: dict[tuple[str, str], tuple[int, int]] = {}  # last (line, number) counted, by (file, stage)
        self._file_created = False

    def reject(self, bad: BadRow, *, number: int = 0, stage: str = "row") -> None:
        """Raise, or count the row and write it to the quarantine file.

        Args:
            bad: the row.
            number: position among the rows of one line.
            stage: check that failed; a row is counted once per stage.

        Raises:
            DataError: If the policy is `Raise`, or the quarantine file cannot be written.
        """
        if isinstance(self.policy, Raise):
            raise DataError(f"{bad} (correct it, or skip such rows: --on-bad-row skip)")
        if self._is_new(bad.file, stage, (bad.line, number)):
            self.bad[bad.file] += 1
            bad = replace(bad, text=bad.text[:LONGEST_TEXT])
            if len(self.first) < KEPT:
                self.first.append(bad)
            if isinstance(self.policy, Quarantine):
                self._write(self.policy.file, asdict(bad))

    def count_repair(self, what: str, file: str, line: int, number: int = 0) -> None:
        """Count a repaired cell under the kind of its repair."""
        if self._is_new(file, what, (line, number)):
            self.repairs[what] += 1

    def _is_new(self, file: str, stage: str, place: tuple[int, int]) -> bool:
        if place <= self._last_counted.get((file, stage), (0, -1)):
            return False
        self._last_counted[file, stage] = place
        return True

    def _write(self, path: Path, line: dict[str, object]) -> None:
        try:
            with path.open("a" if self._file_created else "x", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except FileExistsError:
            raise DataError(f"{path}: exists already; bad rows are set aside in a new file") from None
        except OSError as error:
            raise DataError(f"{path}: bad rows cannot be set aside there: {error.strerror}") from None
        self._file_created = True


def shown(value: object) -> str:
    """A value as a message repeats it: short, and nothing that a terminal would obey."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= 80 else text[:79] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
