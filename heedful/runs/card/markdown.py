"""Helpers for the Markdown of model cards: escaped text, numbers, tables and folded parts."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from heedful.runs.results import as_float

MARKUP = re.compile(  # a backslash before the last character of each match makes it plain text
    r"""
      [\\`*\[\]|~$]             # escapes, code, emphasis, links, cells of tables, strikethrough, formulas
    | _(?![^\W_])               # emphasis: the end of _word_; between letters and digits "_" has no meaning
    | ^[-+=#]                   # lists and headings
    | ^\d{1,9}[.)](?=[ ]|$)     # numbered lists
    | :(?=//)                   # URLs, which some renderers link
    | (?<=\bwww)\.              # host names, which some renderers link
    """,
    re.IGNORECASE | re.VERBOSE,
)


def escape_markdown(text: object, max_chars: int = 200) -> str:
    r"""Escape a text so that Markdown shows it literally, on one line, without markup, HTML or links.

    The text is cut to `max_chars` before it is escaped, so the result may be longer.

    >>> print(escape_markdown("<b>a*b</b> | macro_f1 _x_"))
    &lt;b&gt;a\*b&lt;/b&gt; \| macro_f1 _x\_
    """
    printable = "".join(character if character.isprintable() else " " for character in str(text))
    line = " ".join(printable.split())
    if len(line) > max_chars:
        line = line[: max_chars - 1].rstrip() + "…"
    return html.escape(MARKUP.sub(lambda match: f"{match[0][:-1]}\\{match[0][-1]}", line), quote=False)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table. Its cells must be Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def details(lines: list[str], summary: str) -> list[str]:
    """Return an HTML element that folds lines under a summary."""
    return ["<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>"]


def format_number(value: object) -> str:
    """Format a number with three decimals, below 0.01 with three significant digits, from 1,000 on as an integer.

    >>> format_number(0.91254), format_number(0.00012345), format_number(12345.678), format_number("NaN")
    ('0.913', '0.000123', '12,346', 'NaN')
    """
    number = as_float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "∞" if number > 0 else "-∞"
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.3g}" if 0 < abs(number) < 0.01 else f"{number:.3f}"


def hide_local_paths(value: Any) -> Any:
    """Return a copy of settings (nested dicts and lists) in which local paths are cut to their last components."""
    if isinstance(value, dict):
        return {name: hide_local_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [hide_local_paths(item) for item in value]
    return without_directory(value) if isinstance(value, str) else value


def without_directory(path: str) -> str:
    """Return the last component of a path that is absolute or begins with ./, ../ or ~/, or other texts unchanged."""
    return Path(path).name if Path(path).is_absolute() or path.startswith(("./", "../", "~/")) else path
