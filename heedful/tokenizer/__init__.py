"""Texts to token ids and back, over the `tokenizers` library: load, train, pairs, windows, offsets, word numbers.

Names are loaded when they are first used: settings need neither torch nor the library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heedful.tokenizer.encoding import Encoded as Encoded
    from heedful.tokenizer.encoding import Item as Item
    from heedful.tokenizer.encoding import Truncate as Truncate
    from heedful.tokenizer.encoding import Words as Words
    from heedful.tokenizer.settings import SpecialNames as SpecialNames
    from heedful.tokenizer.settings import TokenizerSettings as TokenizerSettings
    from heedful.tokenizer.tokenizer import Special as Special
    from heedful.tokenizer.tokenizer import Tokenizer as Tokenizer
    from heedful.tokenizer.training import train as train

_HOMES = {
    "Special": "tokenizer",
    "Tokenizer": "tokenizer",
    "Encoded": "encoding",
    "Item": "encoding",
    "Truncate": "encoding",
    "Words": "encoding",
    "SpecialNames": "settings",
    "TokenizerSettings": "settings",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
