"""Label names for plots: short, on one line, in fonts of this machine, and distinguishable."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FONT = "DejaVu Sans"  # comes with matplotlib
FALLBACK = "Last Resort High-Efficiency"  # comes with matplotlib: placeholder boxes for all characters
BOX, DOTS = "□", "…"
LONGEST = 28  # columns; a wide character, such as a Chinese one, takes two


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawableLabels:
    """Names to draw for labels, and fonts: a character is drawn in the first one that has it."""

    names: tuple[str, ...]
    fonts: tuple[str, ...]
    note: str  # about characters that no font has; "" if all can be drawn


def drawable_labels(labels: Iterable[str]) -> DrawableLabels:
    """Shorten long labels, and replace characters that no font has by a box.

    A label with a box, or that looks like another one, begins with its number, from 0.
    """
    short = [shortened(_printable(label)) for label in labels]
    fonts, missing = _fonts(set().union(*short))
    boxed = ["".join(BOX if character in missing else character for character in name) for name in short]
    alike = Counter(boxed)
    names = [
        f"{number}: {name}" if BOX in name or alike[name] > 1 or not name else name for number, name in enumerate(boxed)
    ]
    note = f"{BOX}: no font here has this character; labels are numbered from 0" if missing else ""
    return DrawableLabels(names=tuple(names), fonts=fonts, note=note)


def shortened(text: str, most: int = LONGEST) -> str:
    """Shorten a text to `most` columns, by leaving out its middle.

    >>> shortened("a label that nobody wants to read", 16)
    'a label t…o read'
    """
    if sum(map(_columns, text)) <= most:
        return text
    head = _fitting(text, most * 3 // 5)
    tail = _fitting(text[::-1], most - 1 - most * 3 // 5)[::-1]
    return head.rstrip() + DOTS + tail


def _printable(label: str) -> str:
    """The label on one line, without control characters."""
    return " ".join("".join(character if character.isprintable() else " " for character in label).split())


def _columns(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _fitting(text: str, most: int) -> str:
    """The beginning of the text, up to `most` columns."""
    end = width = 0
    while end < len(text) and (width := width + _columns(text[end])) <= most:
        end += 1
    return text[:end]


def _fonts(needed: set[str]) -> tuple[tuple[str, ...], set[str]]:
    """Fonts that together have the characters, and the characters that no font has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    missing = needed - _covered(findfont(FONT), needed)
    fonts = [FONT]
    files = {
        entry.name: entry.fname for entry in fontManager.ttflist if entry.style == "normal" and entry.name != FALLBACK
    }
    for name in sorted(files):
        if not missing:
            break
        if _covered(files[name], missing):
            used = findfont(FontProperties(family=[name]))  # matplotlib may take another file of that name
            if covered := _covered(used, missing):
                fonts.append(name)
                missing -= covered
    return tuple(fonts), missing


def _covered(path: str, characters: Sequence[str] | set[str]) -> set[str]:
    """The characters that a font has; none if it cannot be read or scaled."""
    from matplotlib.font_manager import get_font

    try:
        font = get_font(path)
        return {character for character in characters if font.scalable and font.get_char_index(ord(character))}
    except (OSError, RuntimeError):
        return set()
