"""Heedful: train, distil, inspect and serve attention models. Names are imported lazily, when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from heedful._version import __version__ as __version__

if TYPE_CHECKING:
    from heedful.api import distil as distil
    from heedful.api import finetune as finetune
    from heedful.api import predict as predict
    from heedful.api import pretrain as pretrain
    from heedful.checkpoint import ModelBundle as ModelBundle
    from heedful.checkpoint import load as load
    from heedful.checkpoint import save as save
    from heedful.errors import HeedfulError as HeedfulError
    from heedful.errors import HeedfulWarning as HeedfulWarning
    from heedful.infer.engine import Engine as Engine
    from heedful.look.notebook import look as look
    from heedful.packed import Packed as Packed
    from heedful.runs.distil.settings import DistilSettings as DistilSettings
    from heedful.runs.evaluate import Evaluated as Evaluated
    from heedful.runs.evaluate import evaluate as evaluate
    from heedful.runs.finetune.settings import FinetuneSettings as FinetuneSettings
    from heedful.runs.label_errors import LabelErrors as LabelErrors
    from heedful.runs.label_errors import find_label_errors as find_label_errors
    from heedful.runs.pretrain.settings import PretrainSettings as PretrainSettings
    from heedful.runs.results import RunResult as RunResult
    from heedful.runs.text_selection import SelectedTexts as SelectedTexts
    from heedful.runs.text_selection import select_texts as select_texts
    from heedful.runs.tune import tune as tune
    from heedful.search.index import SearchHit as SearchHit
    from heedful.search.index import SearchIndex as SearchIndex
    from heedful.tasks.predictions import Classification as Classification
    from heedful.tasks.predictions import Embedding as Embedding
    from heedful.tasks.predictions import Entity as Entity
    from heedful.tasks.predictions import FillMask as FillMask
    from heedful.tasks.predictions import GeneratedText as GeneratedText
    from heedful.tasks.predictions import MultiLabelClassification as MultiLabelClassification
    from heedful.tasks.predictions import MultipleChoice as MultipleChoice
    from heedful.tasks.predictions import NextSentence as NextSentence
    from heedful.tasks.predictions import Prediction as Prediction
    from heedful.tasks.predictions import Regression as Regression
    from heedful.tasks.predictions import Similarity as Similarity
    from heedful.tasks.predictions import Span as Span
    from heedful.tasks.predictions import TokenClassification as TokenClassification
    from heedful.tokenizer import Tokenizer as Tokenizer

_MODULES = {
    "load": "heedful.checkpoint",
    "save": "heedful.checkpoint",
    "ModelBundle": "heedful.checkpoint",
    "Packed": "heedful.packed",
    "Tokenizer": "heedful.tokenizer",
    "Engine": "heedful.infer.engine",
    "finetune": "heedful.api",
    "pretrain": "heedful.api",
    "distil": "heedful.api",
    "predict": "heedful.api",
    "find_label_errors": "heedful.runs.label_errors",
    "LabelErrors": "heedful.runs.label_errors",
    "select_texts": "heedful.runs.text_selection",
    "SelectedTexts": "heedful.runs.text_selection",
    "tune": "heedful.runs.tune",
    "SearchIndex": "heedful.search.index",
    "SearchHit": "heedful.search.index",
    "RunResult": "heedful.runs.results",
    "Evaluated": "heedful.runs.evaluate",
    "FinetuneSettings": "heedful.runs.finetune.settings",
    "PretrainSettings": "heedful.runs.pretrain.settings",
    "DistilSettings": "heedful.runs.distil.settings",
    "Classification": "heedful.tasks.predictions",
    "Embedding": "heedful.tasks.predictions",
    "Entity": "heedful.tasks.predictions",
    "FillMask": "heedful.tasks.predictions",
    "GeneratedText": "heedful.tasks.predictions",
    "MultiLabelClassification": "heedful.tasks.predictions",
    "MultipleChoice": "heedful.tasks.predictions",
    "NextSentence": "heedful.tasks.predictions",
    "Prediction": "heedful.tasks.predictions",
    "Regression": "heedful.tasks.predictions",
    "Similarity": "heedful.tasks.predictions",
    "Span": "heedful.tasks.predictions",
    "TokenClassification": "heedful.tasks.predictions",
    "evaluate": "heedful.runs.evaluate",
    "look": "heedful.look",
    "HeedfulError": "heedful.errors",
    "HeedfulWarning": "heedful.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'heedful' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*_MODULES, "__version__"])
