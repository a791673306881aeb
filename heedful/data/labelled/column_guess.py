"""Guess the columns of a table without a header from its cells."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from heedful.data.bad_rows import RowErrors, Skip, shown
from heedful.data.formats.tables import HEAD_ROWS, Table

MIN_ROWS = 4  # minimum number of rows, the first included, to distinguish labels from texts
MAX_LABEL_CHARS = 60  # characters
GUESSED_ROLES = ("text", "label", "score")  # roles that can be guessed


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnGuess:
    """Candidate columns of each role in a table without a header."""

    columns: Mapping[str, tuple[int, ...]]  # role to numbers of columns, from 1
    num_values: Mapping[int, int]  # number of different cells in each column, by number of the column
    doubt: str = ""  # message if the first row may be a header; "": it is data

    @property
    def sure(self) -> dict[str, tuple[str, ...]]:
        """The columns of roles with exactly one candidate, named by number; {} if the first row may be a header."""
        if self.doubt:
            return {}
        return {role: (str(numbers[0]),) for role, numbers in self.columns.items() if len(numbers) == 1}

    def __str__(self) -> str:
        """Describe the candidates, and the options that choose them; "" without candidates."""
        descriptions = [self._describe(role, numbers) for role, numbers in self.columns.items() if numbers]
        if not descriptions:
            return ""
        text = " and ".join(descriptions)
        return f"{text[0].upper()}{text[1:]}: say {_options(self.columns)}"

    def _describe(self, role: str, numbers: Sequence[int]) -> str:
        if len(numbers) > 1:
            return f"columns {', '.join(map(str, numbers))} look like the {role}"
        values = f" ({self.num_values[numbers[0]]} values)" if role == "label" else ""
        return f"column {numbers[0]} looks like the {role}{values}"


def _options(columns: Mapping[str, Sequence[int]]) -> str:
    """Return the command-line options that choose columns."""
    return " ".join(_option(role, numbers) for role, numbers in columns.items())


def _option(role: str, numbers: Sequence[int]) -> str:
    if role == "text" and len(numbers) > 1:
        return f"--data.columns.{role}='{[*numbers]}' (joined)"
    return f"--data.columns.{role}={numbers[0] if len(numbers) == 1 else 'NUMBER'}"


def has_no_header(table: Table) -> bool:
    """Whether a table has columns without names, since its file has no header."""
    return isinstance(table.first_row, list) and table.names[:1] == ("1",)


def guess_columns(table: Table, roles: Sequence[str], used_columns: Sequence[str] = ()) -> ColumnGuess | None:
    """Guess the columns of roles from the cells of the first rows.

    Labels are short and repeat; texts have several words and are mostly different; scores are numbers that do not just
    count the rows.

    Args:
        table: the table.
        roles: roles without a column.
        used_columns: names of columns that already have a role.

    Returns:
        None if the table has a header, or one of the roles is not in GUESSED_ROLES.
    """
    if not has_no_header(table) or not {*roles} <= {*GUESSED_ROLES}:
        return None
    rows = [cells for _, cells in islice(table.rows(RowErrors(Skip())), HEAD_ROWS) if isinstance(cells, list)]
    first, *below = rows or [[]]
    candidates = [number for number in range(1, len(table.names) + 1) if str(number) not in used_columns]
    cells = {number: [row[number - 1].strip() for row in below if number <= len(row)] for number in candidates}
    is_role = {"text": _is_text, "label": _is_label, "score": _is_score}
    columns: dict[str, tuple[int, ...]] = {}
    for role in sorted(roles, key=("label", "score", "text").index):
        guessed = {number for numbers in columns.values() for number in numbers}
        columns[role] = tuple(n for n in candidates if n not in guessed and is_role[role](cells[n]))
    if [*roles] == ["text"] and len(candidates) == 1 and not columns["text"]:
        columns["text"] = (candidates[0],)
    guessed = {number for numbers in columns.values() for number in numbers}
    may_have_header = table.header is None and any(
        number <= len(first) and _looks_like_name(first[number - 1].strip(), cells[number])
        for number in candidates
        if number in guessed
    )
    doubt = ""
    if may_have_header:
        cells_of_first = ", ".join(map(shown, first[:5]))
        doubt = f"The first row, {cells_of_first}, may name the columns: set --data.header=true if it does"
        doubt += f", else columns by number: {_options(columns)}"
    return ColumnGuess(
        columns={role: columns[role] for role in roles},
        num_values={number: len({*values}) for number, values in cells.items()},
        doubt=doubt,
    )


def _is_label(values: Sequence[str]) -> bool:
    """Whether a column has labels; the values are its cells without the first row."""
    counts = Counter(values)
    return (
        len(values) >= MIN_ROWS - 1
        and len(counts) >= 2
        and 2 * len(counts) <= len(values) + 1
        and all(value and len(value) <= MAX_LABEL_CHARS for value in counts)
    )


def _is_text(values: Sequence[str]) -> bool:
    """Whether a column has texts; the values are its cells without the first row."""
    num_words = sum(len(value.split()) for value in values)
    if len(values) < MIN_ROWS - 1:
        return False
    return num_words >= 2 * len(values) > 0 and 2 * len({*values}) > len(values) and not all(map(_is_number, values))


def _is_score(values: Sequence[str]) -> bool:
    """Whether a column has scores; the values are its cells without the first row."""
    return len({*values}) > 1 and all(map(_is_number, values)) and not _are_row_numbers(values)


def _are_row_numbers(values: Sequence[str]) -> bool:
    try:
        numbers = [int(value) for value in values]
    except ValueError:
        return False
    return all(next_number - number == 1 for number, next_number in pairwise(numbers))


def _is_number(value: str) -> bool:
    try:
        return math.isfinite(float(value)) and "_" not in value
    except ValueError:
        return False


def _looks_like_name(first: str, below: Sequence[str]) -> bool:
    """Whether the first cell of a column differs from the cells below it as the name of the column would."""
    if not below or first in below:
        return False
    if all(map(_is_number, below)):
        return not _is_number(first)
    if _is_label(below):
        return min(Counter(below).values()) > 1
    return len(first.split()) == 1 and all(len(value.split()) > 2 for value in below)
