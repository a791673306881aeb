"""Parsing of lists in text cells of CSV files, written as JSON or as a Python literal."""

from __future__ import annotations

import ast
import json
import re
import warnings
from io import StringIO
from itertools import pairwise
from tokenize import COMMENT, NL, STRING, generate_tokens

from heedful.data.bad_rows import CellError, shown

LIST_START = re.compile(r"""\[(\s*["'\d[\]-]|.*,)""", re.DOTALL)


def parse_list_cell(value: object, name: str) -> object:
    """Parse a list in a text cell, as JSON or as a Python literal. Any other value is returned unchanged.

    Args:
        value: value of the cell.
        name: name of the cell's column, for messages.

    Raises:
        CellError: If the text looks like a list but cannot be parsed.

    >>> [parse_list_cell(cell, "tags") for cell in ('["B-ORG", "O"]', "['B-ORG', 'O']", "B-ORG O")]
    [['B-ORG', 'O'], ['B-ORG', 'O'], 'B-ORG O']
    >>> parse_list_cell("[ Applause ]", "words")
    '[ Applause ]'
    """
    text = value.strip() if isinstance(value, str) else ""
    if not LIST_START.match(text) or text[-1] != "]":
        return value
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings(action="error"):  # an invalid escape is a warning
            parsed = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        parsed = None
    is_flat = parsed is not None and all(isinstance(element, str | int | float) for element in parsed)
    if not is_flat or _has_adjacent_strings(text):
        raise CellError(
            name,
            f"is {shown(value)}, which looks like a list but cannot be read as one: write it as JSON, like "
            '["one", "two"]',
        )
    return parsed


def _has_adjacent_strings(text: str) -> bool:
    """Whether strings follow each other without a comma, as NumPy prints them. Python would concatenate them."""
    tokens = [token for token in generate_tokens(StringIO(text).readline) if token.type not in (NL, COMMENT)]
    return any(token.type == next_token.type == STRING for token, next_token in pairwise(tokens))
