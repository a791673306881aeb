"""Texts to token ids and back, over the `tokenizers` library: load, train, pairs, windows, offsets, word numbers."""

from heedful.tokenizer.core import Special, Tokenizer
from heedful.tokenizer.encoded import Encoded, Item, Truncate, Words
from heedful.tokenizer.training import SpecialNames, TokenizerSettings, train

__all__ = [
    "Encoded",
    "Item",
    "Special",
    "SpecialNames",
    "Tokenizer",
    "TokenizerSettings",
    "Truncate",
    "Words",
    "train",
]
