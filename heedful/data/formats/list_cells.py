"""Lists that cells of text hold, as JSON or as Python writes them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from io import StringIO
from itertools import pairwise
from tokenize import COMMENT, NL, STRING, generate_tokens
from typing import Any

from heedful.data.bad_rows import CellError, shown

LIST = re.compile(r"""\[(\s*["'\d[\]-]|.*,)""", re.DOTALL)  # how one begins in a cell of text


def parse_list_cell(value: Any, name: str) -> Any:
    """The list that a cell of text holds between brackets, as JSON or as Python writes it; any other value as it is.

    >>> listed('["B-ORG", "O"]', "tags"), listed("['B-ORG', 'O']", "tags"), listed("B-ORG O", "tags")
    (['B-ORG', 'O'], ['B-ORG', 'O'], 'B-ORG O')
    >>> listed("[ Applause ]", "words")
    '[ Applause ]'
    """
    text = value.strip() if isinstance(value, str) else ""
    if not LIST.match(text) or text[-1] != "]":
        return value
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings(action="error"):  # of escapes that mean nothing
            found = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        found = None
    if found is None or any(not isinstance(each, str | int | float) for each in found) or _runs_on(text):
        raise CellError(
            name, f'is {shown(value)}, which looks like a list and is none: write it as JSON, like ["one", "two"]'
        )
    return found


def _runs_on(text: str) -> bool:
    """Whether texts follow each other without a comma, as NumPy writes them; Python would make one of them."""
    tokens = [token for token in generate_tokens(StringIO(text).readline) if token.type not in (NL, COMMENT)]
    return any(one.type == two.type == STRING for one, two in pairwise(tokens))
