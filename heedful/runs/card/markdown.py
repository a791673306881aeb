"""Markdown of model cards: escaped text, numbers, tables and folded parts."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from heedful.runs.results import as_float

MARKS = re.compile(  # what means something in Markdown: anywhere, after words, at the beginning of a line, in links
    r"[\\`*\[\]|~$]|_(?![^\W_])|^[-+=#]|(?<=^\d)[.)](?= )|(?<=^\d\d)[.)](?= )|:(?=//)|(?<=\bwww)\.",
    re.IGNORECASE,
)


def escape_markdown(text: Any, most: int = 200) -> str:
    r"""Any text as Markdown that shows it and does nothing else: no markup, HTML, link or second line; shortened.

    >>> print(plain("<b>a*b</b> | macro_f1 _x_"))
    &lt;b&gt;a\*b&lt;/b&gt; \| macro_f1 _x\_
    """
    shown = " ".join("".join(each if each.isprintable() else " " for each in str(text)).split())
    shown = shown if len(shown) <= most else shown[: most - 1].rstrip() + "…"
    return html.escape(MARKS.sub(r"\\\g<0>", shown), quote=False)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table; its cells are Markdown already."""
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def details(lines: list[str], summary: str, fold: bool) -> list[str]:
    """Lines that open by a click, where there are many."""
    return ["<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>"] if fold else lines


def format_number(value: Any) -> str:
    """Three places, or three digits of what is small or large.

    >>> number(0.91254), number(0.00012345), number(12345.678), number("NaN")
    ('0.913', '0.000123', '12,346', 'NaN')
    """
    found = as_float(value)
    if found != found or abs(found) == float("inf"):
        return "NaN" if found != found else "∞" if found > 0 else "-∞"
    if abs(found) >= 1000:
        return f"{found:,.0f}"
    return f"{found:.3g}" if 0 < abs(found) < 0.01 else f"{found:.3f}"


def hide_local_paths(value: Any) -> Any:
    """Settings without folders of this machine."""
    if isinstance(value, dict):
        return {name: hide_local_paths(each) for name, each in value.items()}
    if isinstance(value, list):
        return [hide_local_paths(each) for each in value]
    return without_directory(value) if isinstance(value, str) else value


def without_directory(path: str) -> str:
    """Of a path that has a meaning on one machine alone, the last part; any other text as it is."""
    return Path(path).name if Path(path).is_absolute() or path.startswith(("./", "../", "~/")) else path
