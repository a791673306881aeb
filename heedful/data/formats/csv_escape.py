"""Escaping of CSV cells that a spreadsheet would run as formulas, for all CSV files that Heedful writes.

Files that a person fills in are read again, without the escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
LABEL_COLUMNS = {"given_label", "suggested_label"}  # beside text and label, in files where a person fills in labels
FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")


def escape_cell(text: str) -> str:
    """Prefix a text with ' if a spreadsheet would run it as a formula. Numbers stay unchanged.

    A text that looks like an escaped one gets a further ', so that `unescape_cell` returns every text.

    >>> escape_cell("=cmd()"), escape_cell("-1.5"), escape_cell("fine"), escape_cell("'=x")
    ("'=cmd()", '-1.5', 'fine', "''=x")
    """
    is_formula = text.lstrip(" '").startswith(FORMULA_PREFIXES) and not NUMBER.fullmatch(text)
    return "'" + text if is_formula else text


def unescape_cell(cell: str) -> str:
    """Return the text of a cell, without the ' that `escape_cell` may have added.

    >>> unescape_cell("'=cmd()"), unescape_cell("'tis"), unescape_cell("=cmd()")
    ('=cmd()', "'tis", '=cmd()')
    """
    return cell[1:] if cell.startswith("'") and escape_cell(cell[1:]) == cell else cell


def is_review_header(names: Iterable[str]) -> bool:
    """Whether columns are those of a file from `heedful select` or `heedful check --label-errors`."""
    columns = {*names}
    return {"text", "label"} <= columns and bool(LABEL_COLUMNS & columns)
