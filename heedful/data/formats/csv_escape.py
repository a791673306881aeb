"""Escaping of CSV cells that a spreadsheet would run as formulas, for all CSV files that Heedful writes."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")


def escape_cell(text: str) -> str:
    """Prefix a text with ' if a spreadsheet would run it as a formula. Numbers stay unchanged.

    >>> escape_cell("=cmd()"), escape_cell("-1.5"), escape_cell("fine")
    ("'=cmd()", '-1.5', 'fine')
    """
    is_formula = text.lstrip(" ").startswith(FORMULA_PREFIXES) and not NUMBER.fullmatch(text)
    return "'" + text if is_formula else text
