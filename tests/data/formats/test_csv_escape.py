"""escape_cell: cells that a spreadsheet would run as formulas."""

from __future__ import annotations

import pytest

from heedful.data import escape_cell
from heedful.data.formats.csv_escape import unescape_cell


@pytest.mark.parametrize(
    "text", ["=cmd()", "+1+1", "-x", "@SUM(A1)", "\t=1", "\r=1", " =1", "-", "+1,5", "-inf", "- 1", "'=x", " '=x"]
)
def test_formulas_become_text(text: str) -> None:
    assert escape_cell(text) == "'" + text
    assert unescape_cell("'" + text) == text


@pytest.mark.parametrize("text", ["", "a=b", "-1", "+1.5", "-2.5e-7", "1-2", "'tis", "it's", "fine"])
def test_other_cells_are_unchanged(text: str) -> None:
    assert escape_cell(text) == unescape_cell(text) == text
