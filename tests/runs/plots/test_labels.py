"""Names that plots draw for labels: distinguishable, and in fonts that have their characters."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.font_manager as fonts
import pytest

from heedful.runs.plots.labels import BOX, FONT, MAX_COLUMNS, drawable_labels, shorten

GOTHIC = "\U00010331\U00010332"


def write_font(path: Path, name: str, character: str) -> None:
    """Write a font with one character, which is drawn as a square."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for corner in ((0, 500), (500, 500), (500, 0)):
        pen.lineTo(corner)
    pen.closePath()
    glyph = pen.glyph()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "square"])
    builder.setupCharacterMap({ord(character): "square"})
    builder.setupGlyf({".notdef": glyph, "square": glyph})
    builder.setupHorizontalMetrics({".notdef": (600, 0), "square": (600, 0)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": name, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


def test_plain_labels_stay_as_they_are() -> None:
    labels = drawable_labels(["negative", "très bon", "отлично", "a_b", "$x$"])
    assert labels.names == ("negative", "très bon", "отлично", "a_b", "$x$")
    assert labels.fonts == (FONT,)
    assert labels.note == ""


def test_labels_are_on_one_line() -> None:
    labels = drawable_labels(["\x1b[31mred\r\n\u2028line", "\u202eback", "\ud800low"])
    assert labels.names == ("[31mred line", "back", "low")


def test_long_labels_lose_their_middle() -> None:
    labels = drawable_labels(["a label that begins like others, first", "a label that begins like others, second"])
    assert labels.names == ("a label that beg…hers, first", "a label that beg…ers, second")
    assert all(len(name) <= MAX_COLUMNS for name in labels.names)
    assert shorten("中" * 30, 9) == "中中…中"


def test_labels_that_look_alike_are_numbered() -> None:
    assert drawable_labels(["a", "b", "a\n", "", " a"]).names == ("0: a", "b", "2: a", "3: ", "4: a")


@pytest.fixture
def only_matplotlib_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the fonts of this machine that do not come with matplotlib."""
    entries = [entry for entry in fonts.fontManager.ttflist if entry.fname.startswith(matplotlib.get_data_path())]
    assert FONT in {entry.name for entry in entries}
    monkeypatch.setattr(fonts.fontManager, "ttflist", entries)


@pytest.mark.usefixtures("only_matplotlib_fonts")
def test_characters_that_no_font_has_are_boxes() -> None:
    labels = drawable_labels(["plain", GOTHIC])
    assert labels.names == ("plain", f"1: {BOX * len(GOTHIC)}")
    assert "no font here" in labels.note


@pytest.mark.usefixtures("only_matplotlib_fonts")
def test_a_font_that_has_the_character_is_used(tmp_path: Path) -> None:
    write_font(tmp_path / "gothic.ttf", "A Gothic", "\U00010331")
    fonts.fontManager.addfont(tmp_path / "gothic.ttf")
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    fonts.fontManager.ttflist.append(fonts.FontEntry(fname=str(tmp_path / "broken.ttf"), name="A Broken"))
    labels = drawable_labels(["\U00010331", "\U00010331\U00010332"])
    assert labels.fonts == (FONT, "A Gothic")
    assert labels.names == ("\U00010331", f"1: \U00010331{BOX}")
