"""Layer 5: data. Files and objects as typed examples, corpora, and the order of samples in training.

The public names below are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heedful.data.bad_rows import BadRow as BadRow
    from heedful.data.bad_rows import BadRowPolicy as BadRowPolicy
    from heedful.data.bad_rows import Quarantine as Quarantine
    from heedful.data.bad_rows import Raise as Raise
    from heedful.data.bad_rows import Skip as Skip
    from heedful.data.examples import AnswerSpan as AnswerSpan
    from heedful.data.examples import ChoiceExample as ChoiceExample
    from heedful.data.examples import Example as Example
    from heedful.data.examples import LabelledExample as LabelledExample
    from heedful.data.examples import MultiLabelExample as MultiLabelExample
    from heedful.data.examples import PairExample as PairExample
    from heedful.data.examples import QuestionExample as QuestionExample
    from heedful.data.examples import RankExample as RankExample
    from heedful.data.examples import ScoredExample as ScoredExample
    from heedful.data.examples import Seq2SeqExample as Seq2SeqExample
    from heedful.data.examples import TaggedExample as TaggedExample
    from heedful.data.examples import TextExample as TextExample
    from heedful.data.formats.csv_escape import escape_cell as escape_cell
    from heedful.data.labelled.check import DataReport as DataReport
    from heedful.data.labelled.check import check as check
    from heedful.data.labelled.data_file import DataOptions as DataOptions
    from heedful.data.labelled.data_file import DataSettings as DataSettings
    from heedful.data.labelled.dataset import Dataset as Dataset
    from heedful.data.labelled.dataset import dataset_for_task as dataset_for_task
    from heedful.data.labelled.dataset import read as read

_MODULES = {
    **dict.fromkeys(("BadRow", "BadRowPolicy", "Quarantine", "Raise", "Skip"), "heedful.data.bad_rows"),
    **dict.fromkeys(("AnswerSpan", "ChoiceExample", "Example", "LabelledExample"), "heedful.data.examples"),
    **dict.fromkeys(("MultiLabelExample", "PairExample", "QuestionExample"), "heedful.data.examples"),
    **dict.fromkeys(("RankExample", "ScoredExample", "Seq2SeqExample"), "heedful.data.examples"),
    **dict.fromkeys(("TaggedExample", "TextExample"), "heedful.data.examples"),
    "escape_cell": "heedful.data.formats.csv_escape",
    **dict.fromkeys(("DataReport", "check"), "heedful.data.labelled.check"),
    **dict.fromkeys(("DataOptions", "DataSettings"), "heedful.data.labelled.data_file"),
    **dict.fromkeys(("Dataset", "dataset_for_task", "read"), "heedful.data.labelled.dataset"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'heedful.data' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(_MODULES)
