"""Texts that tokenizers treat in special ways, and tokenizers that are trained on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heedful.tokenizer import Tokenizer
from heedful.tokenizer.settings import TokenizerSettings
from heedful.tokenizer.training import train_tokenizer

WORDS = (
    "the a cat Running [MASK] [SEP] [mask] <mask> café naïve über Straße 北京 日本語 한국어 don't we'll 1234 3.14 \t "
    "\n \r\n İ Σίσυφος ẞ ﬁ ½ é e\u0301 हिन्दी ไทย مرحبا שלום 👍🏽 🙂 \u200d \u200b \u00a0 \u3000 \ufffd \x00 \x7f -- "
    "( ) \" ' ` “ ” $5 +1 hyphen-ated foo_bar a/b x^2 pneumonoultramicroscopicsilicovolcanoconiosis" + "z" * 120
).split(" ")
RANGES = (
    *((0x20, 0x7F), (0xA0, 0x250), (0x300, 0x378), (0x400, 0x500), (0x5D0, 0x5EB), (0x620, 0x660), (0x904, 0x950)),
    *((0xE01, 0xE3B), (0x1100, 0x1200), (0x1E00, 0x1F00), (0x2000, 0x2065), (0x2100, 0x2190), (0x3040, 0x3097)),
    *((0x4E00, 0x5000), (0xAC00, 0xAE00), (0xF900, 0xFA00), (0xFB00, 0xFB07), (0xFE30, 0xFE50), (0xFF01, 0xFFBF)),
    *((0x1D400, 0x1D455), (0x1F600, 0x1F640), (0x20000, 0x20100)),
)


def random_texts(count: int, seed: int = 0) -> list[Any]:
    """Return texts of words that tokenizers treat in special ways, texts of random characters, and pairs."""
    rng, texts = random.Random(seed), []
    for number in range(count):
        if number % 2:
            low, high = rng.choice(RANGES), rng.choice(RANGES)
            texts.append("".join(chr(rng.randrange(*rng.choice((low, high)))) for _ in range(rng.randrange(24))))
        else:
            texts.append("".join(rng.choice(WORDS) + rng.choice(("", " ", " ", "  ")) for _ in range(number % 14)))
    return [(text, texts[number - 1]) if number % 10 == 9 else text for number, text in enumerate(texts)]


def trained(**settings: Any) -> Callable[[Path], Tokenizer]:
    """Return a function that trains a tokenizer on random texts."""

    def train(folder: Path) -> Tokenizer:
        lines = [text if isinstance(text, str) else " ".join(text) for text in random_texts(300, seed=1)]
        (folder / "corpus.txt").write_text("\n".join(line.replace("\n", " ") for line in lines), encoding="utf-8")
        return train_tokenizer([folder / "corpus.txt"], TokenizerSettings(vocab_size=2500, **settings))

    return train
