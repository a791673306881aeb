"""Guesses of the roles of columns from their cells, for tables without a header. `columns.py` calls `guess_columns`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from heedful.data.bad_rows import RowErrors, Skip, shown
from heedful.data.formats.tables import HEAD_ROWS, Table

MIN_ROWS = 4  # minimum rows, including the first, for telling labels and texts apart
MAX_LABEL_CHARS = 60  # maximum characters of a label
GUESSED_ROLES = ("text", "label", "score")  # roles that can be guessed


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnGuess:
    """Candidate columns of each role in a table without a header."""

    columns: Mapping[str, tuple[int, ...]]  # positions of candidate columns, from 1, by role
    num_values: Mapping[int, int]  # count of different cells by position of the column
    doubt: str = ""  # message if the first row may be a header; "": it is data

    @property
    def sure(self) -> dict[str, tuple[str, ...]]:
        """The position, as text, of each role with exactly one candidate; {} if the first row may be a header."""
        if self.doubt:
            return {}
        return {role: (str(positions[0]),) for role, positions in self.columns.items() if len(positions) == 1}

    def __str__(self) -> str:
        """Describe the candidates and the options that choose them, or return "" without candidates."""
        descriptions = [self._describe(role, positions) for role, positions in self.columns.items() if positions]
        if not descriptions:
            return ""
        text = " and ".join(descriptions)
        return f"{text[0].upper()}{text[1:]}: say {_options(self.columns)}"

    def _describe(self, role: str, positions: Sequence[int]) -> str:
        if len(positions) > 1:
            return f"columns {', '.join(map(str, positions))} look like the {role}"
        values = f" ({self.num_values[positions[0]]} values)" if role == "label" else ""
        return f"column {positions[0]} looks like the {role}{values}"


def _options(columns: Mapping[str, Sequence[int]]) -> str:
    """Return the command-line options that choose columns."""
    return " ".join(_option(role, positions) for role, positions in columns.items())


def _option(role: str, positions: Sequence[int]) -> str:
    if role == "text" and len(positions) > 1:
        return f"--data.columns.{role}='{[*positions]}' (joined)"
    return f"--data.columns.{role}={positions[0] if len(positions) == 1 else 'NUMBER'}"


def has_no_header(table: Table) -> bool:
    """Whether the names of a table's columns are their positions because the file has no header."""
    positions = tuple(str(position) for position in range(1, len(table.names) + 1))
    return isinstance(table.first_row, list) and table.header is not True and table.names == positions


def guess_columns(table: Table, roles: Sequence[str], used_columns: Sequence[str] = ()) -> ColumnGuess | None:
    """Guess the columns of roles from the cells of the first rows.

    Labels are short and repeat. Texts have several words and are mostly different. Scores are numbers other than row
    numbers.

    Args:
        table: the table.
        roles: roles without a column.
        used_columns: names of columns that already have a role.

    Returns:
        The guess, or None if the table has a header or one of the roles is not in GUESSED_ROLES.
    """
    if not has_no_header(table) or not {*roles} <= {*GUESSED_ROLES}:
        return None
    rows = [cells for _, cells in islice(table.rows(RowErrors(Skip())), HEAD_ROWS) if isinstance(cells, list)]
    first, *below = rows or [[]]
    candidates = [position for position in range(1, len(table.names) + 1) if str(position) not in used_columns]
    cells: dict[int, list[str]] = {}  # cells of each candidate column below the first row, by position
    for position in candidates:
        cells[position] = [row[position - 1].strip() for row in below if position <= len(row)]
    is_role = {"text": _is_text, "label": _is_label, "score": _is_score}
    columns: dict[str, tuple[int, ...]] = {}
    guessed: set[int] = set()  # positions of columns with a role
    for role in sorted(roles, key=("label", "score", "text").index):
        free = [position for position in candidates if position not in guessed]
        columns[role] = tuple(position for position in free if is_role[role](cells[position]))
        guessed |= {*columns[role]}
    if [*roles] == ["text"] and len(candidates) == 1 and not columns["text"]:
        columns["text"] = (candidates[0],)
        guessed.add(candidates[0])
    guessed_in_first = [position for position in candidates if position in guessed and position <= len(first)]
    has_names = any(_looks_like_name(first[position - 1].strip(), cells[position]) for position in guessed_in_first)
    doubt = ""
    if has_names and table.header is None:
        cells_of_first = ", ".join(map(shown, first[:5]))
        doubt = f"The first row, {cells_of_first}, may name the columns: set --data.header=true if it does"
        doubt += f", else columns by number: {_options(columns)}"
    return ColumnGuess(
        columns={role: columns[role] for role in roles},
        num_values={position: len({*values}) for position, values in cells.items()},
        doubt=doubt,
    )


def _is_label(values: Sequence[str]) -> bool:
    """Whether a column has labels, by its cells below the first row."""
    counts = Counter(values)
    return (
        len(values) >= MIN_ROWS - 1
        and len(counts) >= 2
        and 2 * len(counts) <= len(values) + 1
        and all(value and len(value) <= MAX_LABEL_CHARS for value in counts)
    )


def _is_text(values: Sequence[str]) -> bool:
    """Whether a column has texts, by its cells below the first row."""
    if len(values) < MIN_ROWS - 1:
        return False
    num_words = sum(len(value.split()) for value in values)
    have_several_words = num_words >= 2 * len(values)
    are_mostly_different = 2 * len({*values}) > len(values)
    return have_several_words and are_mostly_different and not all(map(_is_number, values))


def _is_score(values: Sequence[str]) -> bool:
    """Whether a column has scores, by its cells below the first row."""
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
    """Whether the first cell of a column looks like the name of the column, unlike the cells below it."""
    if not below or first in below:
        return False
    if all(map(_is_number, below)):
        return not _is_number(first)
    if _is_label(below):
        return min(Counter(below).values()) > 1
    return len(first.split()) == 1 and all(len(value.split()) > 2 for value in below)
