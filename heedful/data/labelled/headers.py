"""Decisions whether the first row of a table is a header, if neither a setting nor known column names decide.

`data_file.py` calls `check_header` for a table without known column names whose columns are set by number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice

from heedful.data.bad_rows import RowErrors, Skip, shown
from heedful.data.formats.tables import Table
from heedful.data.labelled.columns import COLUMN_NAMES, Key, column_keys, is_header
from heedful.errors import DataError

COLUMN_NAME = re.compile(r"[^\W\d][\w.-]*(?: [\w.-]+){0,2}")  # a possible column name
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)
EXAMINED_ROWS = 20  # rows after the first one that are examined
MIN_TEXT_WORDS = 3  # minimum words in a cell that is a text and not a name


def may_be_header(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether a first row looks like column names, unlike the rows below it.

    All of its cells must be possible names. Some column must have only numbers below its name, or only texts below a
    name of one word.

    >>> may_be_header(["id", "phrase"], [["1", "Who wrote it?"], ["2", "Rain again"]])
    True
    >>> may_be_header(["greet", "hello"], [["ask", "Who wrote it?"], ["greet", "hi"]])
    False
    """
    names = [cell.strip() for cell in first]
    if len({name.casefold() for name in names}) < len(names) or not all(map(COLUMN_NAME.fullmatch, names)):
        return False
    for index, name in enumerate(names):
        cells = [row[index].strip() for row in rows if len(row) == len(names)]
        if cells and all(map(NUMBER.fullmatch, cells)):
            return True
        if cells and " " not in name and all(len(cell.split()) >= MIN_TEXT_WORDS for cell in cells):
            return True
    return False


def check_header(table: Table) -> None:
    """Raise DataError if the first row of a table without a header looks like a header that would be read as data."""
    first, *below = [cells for _, cells in islice(table.rows(RowErrors(Skip())), EXAMINED_ROWS + 1)]
    if may_be_header(list(first), [list(cells) for cells in below]):
        names = ", ".join(map(shown, first))
        raise DataError(
            f"{table.display_name}: the first row, {names}, may name the columns: set --data.header=true if it does, "
            "and header=false if it is data"
        )


def names_known_roles(first: Sequence[str], columns: Mapping[str, Key | Sequence[Key]]) -> bool:
    """Whether a first row is a header, for columns that were set by position for another file.

    The row is a header by `is_header`, or if all columns in these positions have known names, or if all cells are
    single words and one of them is the first known name of a role.

    Args:
        first: cells of the row.
        columns: positions of columns, from 1, by role.
    """
    if is_header(first, None, columns):
        return True
    names = [cell.strip().casefold() for cell in first]
    known_names = {name for role in columns for name in COLUMN_NAMES.get(role, ())}
    indices = [int(key) - 1 for keys in columns.values() for key in column_keys(keys)]
    names_at_positions = [names[index] for index in indices if index < len(names)]
    if names_at_positions and all(name in known_names for name in names_at_positions):
        return True
    preferred_names = {COLUMN_NAMES[role][0] for role in columns if role in COLUMN_NAMES}
    are_words = all(COLUMN_NAME.fullmatch(name) and " " not in name for name in names)
    return bool(preferred_names & {*names}) and are_words
