"""Bad rows: an error at the first one, or set aside in a file and counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from heedful.errors import HeedfulError

LONGEST_TEXT = 200  # characters of a bad row that are kept
KEPT = 20  # bad rows for a report


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be used: where it stands, why, and how it begins."""

    file: str
    line: int
    column: str  # a name, a number from 1, a place in JSON; "": the whole row
    reason: str
    text: str

    def __str__(self) -> str:
        return ":".join([self.file, str(self.line), *([self.column] if self.column else [])]) + f": {self.reason}"


class CellError(Exception):
    """What is wrong with one cell of a row; whoever knows the row makes a `BadRow` of it."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(reason)
        self.column = column
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Raise:
    """The first bad row is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """Bad rows are left out and written to a new file, one JSON object a line."""

    file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """Bad rows are left out and counted, and the first of them kept for a report."""


OnBadRow = Literal["raise", "skip"]  # the first bad row is an error, or bad rows are set aside and counted
BadRowPolicy = Raise | Quarantine | Skip


def remove_quarantine(path: Path) -> None:
    """Remove what was set aside at an earlier time; a file of anything else stays."""
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
        if isinstance(first, dict) and set(first) == {field.name for field in fields(BadRow)}:
            path.unlink()
    except (OSError, ValueError):
        return


class RowErrors:
    """Meets bad rows as its policy says, and counts each of them once, however often the file is read."""

    def __init__(self, policy: BadRowPolicy) -> None:
        self.policy = policy
        self.bad: Counter[str] = Counter()  # rows set aside, by file
        self.first: list[BadRow] = []
        self.mended: Counter[str] = Counter()  # what was mended in reading, by what it was
        self._met: dict[tuple[str, str], tuple[int, int]] = {}  # the furthest place, by file and by what is looked for
        self._made = False

    def refuse(self, bad: BadRow, *, number: int = 0, stage: str = "row") -> None:
        """Raise, or write the row aside; `number` tells rows of one line apart, in their order."""
        if isinstance(self.policy, Raise):
            raise HeedfulError(f"{bad} (mend it, or have such rows set aside and counted: --on-bad-row skip)")
        if self._is_new(bad.file, stage, (bad.line, number)):
            self.bad[bad.file] += 1
            bad = replace(bad, text=bad.text[:LONGEST_TEXT])
            if len(self.first) < KEPT:
                self.first.append(bad)
            if isinstance(self.policy, Quarantine):
                self._write(self.policy.file, asdict(bad))

    def mend(self, what: str, file: str, line: int, number: int = 0) -> None:
        """Count something that was mended."""
        if self._is_new(file, what, (line, number)):
            self.mended[what] += 1

    def _is_new(self, file: str, stage: str, place: tuple[int, int]) -> bool:
        if place <= self._met.get((file, stage), (0, -1)):
            return False
        self._met[file, stage] = place
        return True

    def _write(self, path: Path, line: dict[str, Any]) -> None:
        try:
            with path.open("a" if self._made else "x", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except FileExistsError:
            raise HeedfulError(f"{path}: exists already; bad rows are set aside in a new file") from None
        except OSError as error:
            raise HeedfulError(f"{path}: bad rows cannot be set aside there: {error.strerror}") from None
        self._made = True


def shown(value: object) -> str:
    """A value as a message repeats it: short, and nothing that a terminal would obey."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= 80 else text[:79] + "…"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
