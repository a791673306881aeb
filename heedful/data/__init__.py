"""Data: files, folders and objects in memory as typed examples; corpora; sampling."""

from __future__ import annotations

from heedful.data.bad_rows import BadRow, BadRowPolicy, Quarantine, Raise, Skip
from heedful.data.examples import (
    AnswerSpan,
    ChoiceExample,
    Example,
    LabelledExample,
    MultiLabelExample,
    PairExample,
    QuestionExample,
    ScoredExample,
    Seq2SeqExample,
    TaggedExample,
    TextExample,
)
from heedful.data.formats.csv_escape import escape_cell
from heedful.data.labelled.check import DataReport, check
from heedful.data.labelled.data_file import DataOptions, DataSettings
from heedful.data.labelled.dataset import Dataset, dataset_for_task, read

__all__ = [
    "AnswerSpan",
    "BadRow",
    "BadRowPolicy",
    "ChoiceExample",
    "DataOptions",
    "DataReport",
    "DataSettings",
    "Dataset",
    "Example",
    "LabelledExample",
    "MultiLabelExample",
    "PairExample",
    "Quarantine",
    "QuestionExample",
    "Raise",
    "ScoredExample",
    "Seq2SeqExample",
    "Skip",
    "TaggedExample",
    "TextExample",
    "check",
    "dataset_for_task",
    "escape_cell",
    "read",
]
