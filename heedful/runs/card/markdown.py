"""Markdown of model cards: escaped text, numbers, tables and folded parts."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from heedful.runs.results import as_float

MARKS = re.compile(  # markup of Markdown: anywhere, after words, at the beginning of a line, in links
    r"[\\`*\[\]|~$]|_(?![^\W_])|^[-+=#]|(?<=^\d)[.)](?= )|(?<=^\d\d)[.)](?= )|:(?=//)|(?<=\bwww)\.",
    re.IGNORECASE,
)


def escape_markdown(text: object, most: int = 200) -> str:
    r"""Escape a text so that Markdown shows it as it is, on one line, without markup, HTML or links; cut it to `most`.

    >>> print(escape_markdown("<b>a*b</b> | macro_f1 _x_"))
    &lt;b&gt;a\*b&lt;/b&gt; \| macro_f1 _x\_
    """
    shown = " ".join("".join(character if character.isprintable() else " " for character in str(text)).split())
    shown = shown if len(shown) <= most else shown[: most - 1].rstrip() + "…"
    return html.escape(MARKS.sub(r"\\\g<0>", shown), quote=False)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table; its cells have to be Markdown already."""
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def details(lines: list[str], summary: str, fold: bool) -> list[str]:
    """Lines that are folded under a summary, if `fold`."""
    return ["<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>"] if fold else lines


def format_number(value: object) -> str:
    """Show a number with three decimal places, or three digits if it is small or large.

    >>> format_number(0.91254), format_number(0.00012345), format_number(12345.678), format_number("NaN")
    ('0.913', '0.000123', '12,346', 'NaN')
    """
    number = as_float(value)
    if number != number or abs(number) == float("inf"):
        return "NaN" if number != number else "∞" if number > 0 else "-∞"
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.3g}" if 0 < abs(number) < 0.01 else f"{number:.3f}"


def hide_local_paths(value: Any) -> Any:
    """Settings without the paths of this machine."""
    if isinstance(value, dict):
        return {name: hide_local_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [hide_local_paths(item) for item in value]
    return without_directory(value) if isinstance(value, str) else value


def without_directory(path: str) -> str:
    """The last part of a path that has a meaning on one machine only; any other text unchanged."""
    return Path(path).name if Path(path).is_absolute() or path.startswith(("./", "../", "~/")) else path
