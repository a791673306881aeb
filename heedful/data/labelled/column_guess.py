"""Guess the columns of a table without a header from its cells."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from heedful.data.bad_rows import RowErrors, Skip, shown
from heedful.data.formats.tables import HEAD_ROWS, Table

FEWEST = 4  # least number of rows to distinguish labels from texts
LONGEST_LABEL = 60  # characters
ROLES = ("text", "label", "score")  # roles that can be guessed


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnGuess:
    """Candidate columns of each role, by number from 1."""

    columns: Mapping[str, tuple[int, ...]]
    values: Mapping[int, int]  # number of different cells in each column
    doubt: str = ""  # message if the first row may be a header; "": it is data

    @property
    def sure(self) -> dict[str, tuple[str, ...]]:
        """Roles with exactly one candidate, by the column's name in a table without a header."""
        if self.doubt:
            return {}
        return {role: (str(numbers[0]),) for role, numbers in self.columns.items() if len(numbers) == 1}

    def __str__(self) -> str:
        """Describe the columns, and the settings that choose them."""
        looks = [self._describe(role, numbers) for role, numbers in self.columns.items() if numbers]
        if not looks:
            return ""
        settings = [_setting(role, numbers) for role, numbers in self.columns.items()]
        text = " and ".join(looks)
        return f"{text[0].upper()}{text[1:]}: say {' '.join(settings)}"

    def _describe(self, role: str, numbers: Sequence[int]) -> str:
        several = "columns" if len(numbers) > 1 else "column"
        values = f" ({self.values[numbers[0]]} values)" if role == "label" and len(numbers) == 1 else ""
        look = "look" if len(numbers) > 1 else "looks"
        return f"{several} {', '.join(map(str, numbers))} {look} like the {role}{values}"


def _setting(role: str, numbers: Sequence[int]) -> str:
    if role == "text" and len(numbers) > 1:
        return f"--data.columns.{role}='{[*numbers]}' (joined)"
    return f"--data.columns.{role}={numbers[0] if len(numbers) == 1 else 'NUMBER'}"


def has_no_header(table: Table) -> bool:
    """Whether a table of cells has no header."""
    return isinstance(table.first_row, list) and table.names[:1] == ("1",)


def guess_columns(table: Table, roles: Sequence[str], taken: Sequence[str] = ()) -> ColumnGuess | None:
    """Guess the columns of roles.

    Labels are short and repeat; texts have several words and are mostly different; a score is a number that does not
    count the rows.

    Args:
        table: the table.
        roles: roles without a column.
        taken: names of columns that already have a role.

    Returns:
        None if the table has a header, or a role cannot be guessed.
    """
    if not has_no_header(table) or not {*roles} <= {*ROLES}:
        return None
    rows = [cells for _, cells in islice(table.rows(RowErrors(Skip())), HEAD_ROWS) if isinstance(cells, list)]
    first, *below = rows or [[]]
    free = [number for number in range(len(table.names)) if str(number + 1) not in taken]
    cells = {number: [row[number].strip() for row in below if number < len(row)] for number in free}
    is_role = {"text": _is_text, "label": _is_label, "score": _is_score}
    columns: dict[str, tuple[int, ...]] = {}
    for role in sorted(roles, key=("label", "score", "text").index):
        used = {number for numbers in columns.values() for number in numbers}
        columns[role] = tuple(n + 1 for n in free if n + 1 not in used and is_role[role](cells[n]))
    if [*roles] == ["text"] and len(free) == 1 and not columns["text"]:
        columns["text"] = (free[0] + 1,)
    doubts = [n for n in free if table.header is None and n < len(first) and _differs(first[n].strip(), cells[n])]
    doubtful = {n + 1 for n in doubts} & {number for numbers in columns.values() for number in numbers}
    doubt = f"The first row, {', '.join(map(shown, first[:5]))}, may name the columns: set "
    doubt += "--data.header=true if it does"
    return ColumnGuess(
        columns={role: columns[role] for role in roles},
        values={number + 1: len({*values}) for number, values in cells.items()},
        doubt=f"{doubt}, else columns by number: {_settings(columns)}" if doubtful else "",
    )


def _settings(columns: Mapping[str, Sequence[int]]) -> str:
    return " ".join(_setting(role, numbers) for role, numbers in columns.items())


def _is_label(values: Sequence[str]) -> bool:
    counts = Counter(values)
    return (
        len(values) >= FEWEST - 1
        and len(counts) >= 2
        and 2 * len(counts) <= len(values) + 1  # without the first row
        and all(value and len(value) <= LONGEST_LABEL for value in counts)
    )


def _is_text(values: Sequence[str]) -> bool:
    words = sum(len(value.split()) for value in values)
    if len(values) < FEWEST - 1:  # without the first row
        return False
    return words >= 2 * len(values) > 0 and 2 * len({*values}) > len(values) and not all(map(_is_number, values))


def _is_score(values: Sequence[str]) -> bool:
    return len({*values}) > 1 and all(map(_is_number, values)) and not _are_row_numbers(values)


def _are_row_numbers(values: Sequence[str]) -> bool:
    try:
        numbers = [int(value) for value in values]
    except ValueError:
        return False
    return all(following - number == 1 for number, following in pairwise(numbers))


def _is_number(value: str) -> bool:
    try:
        return math.isfinite(float(value)) and "_" not in value
    except ValueError:
        return False


def _differs(first: str, below: Sequence[str]) -> bool:
    """Whether the first cell of a column differs from those below it as a name would."""
    if not below or first in below:
        return False
    if all(map(_is_number, below)):
        return not _is_number(first)
    if _is_label(below):
        return min(Counter(below).values()) > 1
    return len(first.split()) == 1 and all(len(value.split()) > 2 for value in below)
