"""Layer 5: data. Files, folders and objects become typed examples; what was found out is stated."""

from __future__ import annotations

from heedful.data.bad_rows import BadRow, BadRows, LeaveOut, SetAside, Stop
from heedful.data.examples import (
    Choices,
    Example,
    Labelled,
    MultiLabelled,
    Pair,
    Plain,
    Question,
    Rewritten,
    Scored,
    Span,
    Tagged,
)
from heedful.data.formats.csv_escape import escape_cell
from heedful.data.labelled.check import Report, check
from heedful.data.labelled.data_file import DataOptions, DataSettings
from heedful.data.labelled.dataset import Source, read, source_of

__all__ = [
    "BadRow",
    "BadRows",
    "Choices",
    "DataOptions",
    "DataSettings",
    "Example",
    "Labelled",
    "LeaveOut",
    "MultiLabelled",
    "Pair",
    "Plain",
    "Question",
    "Report",
    "Rewritten",
    "Scored",
    "SetAside",
    "Source",
    "Span",
    "Stop",
    "Tagged",
    "check",
    "escape_cell",
    "read",
    "source_of",
]
