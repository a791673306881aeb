"""Cells of CSV files that Heedful writes: text that a spreadsheet would run as a formula is made text."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def escape_cell(text: str) -> str:
    """The text with a ' before it where a spreadsheet would take it for a formula (a number stays a number).

    >>> escape_cell("=cmd()"), escape_cell("-1.5"), escape_cell("fine")
    ("'=cmd()", '-1.5', 'fine')
    """
    begins = text.lstrip(" ").startswith(FORMULA)
    return "'" + text if begins and not NUMBER.fullmatch(text) else text
