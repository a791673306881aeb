"""Heedful: attention models, whole. Names are loaded when they are first used, so `import heedful` costs nothing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heedful.checkpoint import Loaded as Loaded
    from heedful.checkpoint import load as load
    from heedful.checkpoint import save as save
    from heedful.errors import HeedfulError as HeedfulError
    from heedful.errors import HeedfulWarning as HeedfulWarning
    from heedful.infer.engine import Engine as Engine
    from heedful.look.notebook import look as look
    from heedful.packed import Packed as Packed
    from heedful.runs.distil import distil as distil
    from heedful.runs.evaluate import evaluate as evaluate
    from heedful.runs.finetune import finetune as finetune
    from heedful.runs.pretrain import pretrain as pretrain
    from heedful.tokenizer import Tokenizer as Tokenizer

__version__ = "0.1.0"

_HOMES = {
    "load": "heedful.checkpoint",
    "save": "heedful.checkpoint",
    "Loaded": "heedful.checkpoint",
    "Packed": "heedful.packed",
    "Tokenizer": "heedful.tokenizer",
    "Engine": "heedful.infer.engine",
    "finetune": "heedful.runs.finetune",
    "pretrain": "heedful.runs.pretrain",
    "distil": "heedful.runs.distil",
    "evaluate": "heedful.runs.evaluate",
    "look": "heedful.look",
    "HeedfulError": "heedful.errors",
    "HeedfulWarning": "heedful.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'heedful' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
