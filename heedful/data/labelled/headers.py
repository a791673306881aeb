"""Tell a header from a row of data where neither a setting nor the names of columns decide it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice

from heedful.data.bad_rows import RowErrors, Skip, shown
from heedful.data.formats.tables import Table
from heedful.data.labelled.columns import COLUMN_NAMES, Key, column_keys, is_header
from heedful.errors import HeedfulError

NAME = re.compile(r"[^\W\d][\w.-]*(?: [\w.-]+){0,2}")  # how a column may be called
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)
LOOKED_AT = 20  # rows below the first one
WORDS = 3  # from how many words on a cell is a text rather than a name


def may_be_header(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a first row looks like names of columns, unlike the rows below it.

    All its cells could be names, and below one of them stand numbers alone, or texts alone where it is one word.

    >>> may_be_header(["id", "phrase"], [["1", "Who wrote it?"], ["2", "Rain again"]])
    True
    >>> may_be_header(["greet", "hello"], [["ask", "Who wrote it?"], ["greet", "hi"]])
    False
    """
    names = [cell.strip() for cell in first]
    if len({name.casefold() for name in names}) < len(names) or not all(map(NAME.fullmatch, names)):
        return False
    for place, name in enumerate(names):
        cells = [row[place].strip() for row in rows if len(row) == len(names)]
        if cells and all(map(NUMBER.fullmatch, cells)):
            return True
        if cells and " " not in name and all(len(cell.split()) >= WORDS for cell in cells):
            return True
    return False


def check_header(table: Table) -> None:
    """Refuse a table without a header whose first row may be one: it would be read as data."""
    first, *below = [cells for _, cells in islice(table.rows(RowErrors(Skip())), LOOKED_AT + 1)]
    if may_be_header(list(first), [list(cells) for cells in below]):
        names = ", ".join(map(shown, first))
        raise HeedfulError(
            f"{table.shown}: the first row, {names}, may name the columns: say --data.header=true if it does, and "
            "header=false if it is data"
        )


def names_known_roles(first: Sequence[str], columns: Mapping[str, Key | Sequence[Key]]) -> bool:
    """Return whether a first row is a header that names roles, whatever numbers the columns of another file had.

    It is one where `is_header` says so, where names of roles stand at all these numbers, or where all cells are single
    words and one of them is the usual name of a role.
    """
    if is_header(first, None, columns):
        return True
    names = [cell.strip().casefold() for cell in first]
    known = {name for role in columns for name in COLUMN_NAMES.get(role, ())}
    numbers = [int(key) - 1 for keys in columns.values() for key in column_keys(keys)]
    there = [names[number] for number in numbers if number < len(names)]
    if there and all(name in known for name in there):
        return True
    usual = {COLUMN_NAMES[role][0] for role in columns if role in COLUMN_NAMES}
    return bool(usual & {*names}) and all(NAME.fullmatch(name) and " " not in name for name in names)
