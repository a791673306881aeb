"""Label names for plots: short, on one line, distinguishable, in characters that the fonts of this machine have.

A label is the name of a class in the data. Plots draw the name that `drawable_labels` returns for it.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FONT = "DejaVu Sans"  # comes with matplotlib
LAST_RESORT = "Last Resort High-Efficiency"  # comes with matplotlib; has a placeholder box for every character
BOX = "□"  # replaces a character that no font has
DOTS = "…"  # replaces the middle of a name that is cut
MAX_COLUMNS = 28  # maximum width of a name; a wide character, such as a Chinese one, has two columns, others have one


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawableLabels:
    """Names to draw instead of labels, and their fonts."""

    names: tuple[str, ...]
    fonts: tuple[str, ...]  # each character is drawn in the first font that has it
    note: str  # sentence about characters that no font has, for the title; "": fonts have all characters


def drawable_labels(labels: Iterable[str]) -> DrawableLabels:
    """Return the names to draw for labels: long ones shortened, and characters that no font has replaced by a box.

    A name begins with the index of its label, from 0, if it would otherwise be empty, contain a box, or equal the name
    of another label.
    """
    short_names = [shorten(_printable(label)) for label in labels]
    fonts, missing = _find_fonts(set().union(*short_names))
    names = ["".join(BOX if character in missing else character for character in name) for name in short_names]
    occurrences = Counter(names)
    for index, name in enumerate(names):
        if not name or BOX in name or occurrences[name] > 1:
            names[index] = f"{index}: {name}"
    note = f"{BOX}: no font here has this character; labels are numbered from 0" if missing else ""
    return DrawableLabels(names=tuple(names), fonts=fonts, note=note)


def shorten(text: str, max_columns: int = MAX_COLUMNS) -> str:
    """Shorten a text to at most `max_columns` by replacing its middle by DOTS.

    >>> shorten("a label that nobody wants to read", 16)
    'a label t…o read'
    """
    if sum(map(_columns, text)) <= max_columns:
        return text
    head_columns = max_columns * 3 // 5
    head = _first_columns(text, head_columns)
    tail = _first_columns(text[::-1], max_columns - 1 - head_columns)[::-1]
    return head.rstrip() + DOTS + tail


def _printable(label: str) -> str:
    """Return a label on one line, without characters that are not printable."""
    return " ".join("".join(character if character.isprintable() else " " for character in label).split())


def _columns(character: str) -> int:
    """Return the width of a character in columns, 1 or 2."""
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _first_columns(text: str, max_columns: int) -> str:
    """Return the longest beginning of a text that has at most `max_columns` columns."""
    width = 0
    for end, character in enumerate(text):
        width += _columns(character)
        if width > max_columns:
            return text[:end]
    return text


def _find_fonts(characters: set[str]) -> tuple[tuple[str, ...], set[str]]:
    """Return names of fonts of this machine that together have the characters, and the characters that no font has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    missing = characters - _covered(findfont(FONT), characters)
    fonts = [FONT]
    files = {
        entry.name: entry.fname
        for entry in fontManager.ttflist
        if entry.style == "normal" and entry.name != LAST_RESORT
    }
    for name in sorted(files):
        if not missing:
            break
        if _covered(files[name], missing):
            path = findfont(FontProperties(family=[name]))  # matplotlib may choose another file of that name
            if covered := _covered(path, missing):
                fonts.append(name)
                missing -= covered
    return tuple(fonts), missing


def _covered(path: str, characters: Sequence[str] | set[str]) -> set[str]:
    """Return those of the characters that the font in a file has. A font that cannot be read or scaled has none."""
    from matplotlib.font_manager import get_font

    try:
        font = get_font(path)
        return {character for character in characters if font.scalable and font.get_char_index(ord(character))}
    except (OSError, RuntimeError):
        return set()
