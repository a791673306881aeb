"""Tokenizers: texts to token ids and back, with the `tokenizers` library. They are loaded from a folder or trained.

The names below are imported when they are first used, so that settings need neither torch nor the library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.tokenizer.encoding import Encoding as Encoding
    from heedful.tokenizer.encoding import PreTokenized as PreTokenized
    from heedful.tokenizer.encoding import TokenizerInput as TokenizerInput
    from heedful.tokenizer.encoding import Truncate as Truncate
    from heedful.tokenizer.settings import SpecialNames as SpecialNames
    from heedful.tokenizer.settings import TokenizerSettings as TokenizerSettings
    from heedful.tokenizer.tokenizer import SpecialIds as SpecialIds
    from heedful.tokenizer.tokenizer import Tokenizer as Tokenizer
    from heedful.tokenizer.training import train_tokenizer as train_tokenizer

_MODULES = {
    "SpecialIds": "tokenizer",
    "Tokenizer": "tokenizer",
    "Encoding": "encoding",
    "TokenizerInput": "encoding",
    "Truncate": "encoding",
    "PreTokenized": "encoding",
    "SpecialNames": "settings",
    "TokenizerSettings": "settings",
    "train_tokenizer": "training",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(_MODULES)
