"""The tokenizers of a page give the tokens of the library, in plain JavaScript."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from heedful.bundled import BUNDLED_ENCODER, bundled_model
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.settings import TokenizerSettings
from heedful.tokenizer.training import train_tokenizer
from tests.support.page_scripts import page_encodings

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
    choose, texts = random.Random(seed), []
    for number in range(count):
        if number % 2:
            low, high = choose.choice(RANGES), choose.choice(RANGES)
            texts.append(
                "".join(chr(choose.randrange(*choose.choice((low, high)))) for _ in range(choose.randrange(24)))
            )
        else:
            texts.append(
                "".join(choose.choice(WORDS) + choose.choice(("", " ", " ", "  ")) for _ in range(number % 14))
            )
    return [(text, texts[number - 1]) if number % 10 == 9 else text for number, text in enumerate(texts)]


def check(folder: Path, name: str, count: int) -> None:
    """Compare the tokens of random texts with the library's, and their spans where no normalizer joins characters."""
    tokenizer, texts = TOKENIZERS[name](folder), random_texts(count)
    for text, got in zip(texts, page_encodings(folder, tokenizer, texts), strict=True):
        expected = tokenizer.encode(text)
        for column in ("ids", "types", "segments", "words"):
            assert got[column] == list(getattr(expected, column)), (column, text)
        if "joined" not in name:
            assert got["offsets"] == [list(span) for span in expected.offsets], text


def shipped(folder: Path) -> Tokenizer:
    model = bundled_model(BUNDLED_ENCODER)
    assert model is not None
    return Tokenizer.load(model)


def trained(**settings: Any) -> Callable[[Path], Tokenizer]:
    """Return a function that trains a tokenizer on random texts."""

    def train(folder: Path) -> Tokenizer:
        lines = [text if isinstance(text, str) else " ".join(text) for text in random_texts(300, seed=1)]
        (folder / "corpus.txt").write_text("\n".join(line.replace("\n", " ") for line in lines), encoding="utf-8")
        return train_tokenizer([folder / "corpus.txt"], TokenizerSettings(vocab_size=2500, **settings))

    return train


def with_added_tokens(folder: Path) -> Tokenizer:
    """A byte-level vocabulary whose texts are composed (NFC), with added tokens of each kind."""
    state = trained(algorithm="bpe")(folder).tokenizer_json()
    state["normalizer"] = {"type": "NFC"}
    state["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        ],
    }
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.add_tokens(
        [
            tokenizers.AddedToken("cat", single_word=True, normalized=True),
            tokenizers.AddedToken("   ", normalized=False),
            tokenizers.AddedToken("é", normalized=True),
            tokenizers.AddedToken("do", lstrip=True, rstrip=True, normalized=False),
        ]
    )
    return Tokenizer(backend)


def of_steps(folder: Path) -> Tokenizer:
    """A Unigram vocabulary behind every other normalizer and pre-tokenizer."""
    state = trained(algorithm="unigram")(folder).tokenizer_json()
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Strip(),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.NFKC(),
            normalizers.Replace("a", "aa"),
            normalizers.Replace(tokenizers.Regex(r"\s{2,}"), " "),
            normalizers.Prepend("x"),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\d+"), "merged_with_next"),
            pre_tokenizers.Split("-", "merged_with_previous"),
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.Whitespace(),
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(prepend_scheme="first"),
        ]
    )
    return Tokenizer(backend)


TOKENIZERS = {
    "the encoder that ships": shipped,
    "wordpiece, cased": trained(algorithm="wordpiece", lower_case=False),
    "bpe": trained(algorithm="bpe"),
    "unigram, joined characters": trained(algorithm="unigram"),
    "bpe, added tokens, joined characters": with_added_tokens,
    "unigram, other steps, joined characters": of_steps,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_equals_the_library(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 400)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_equals_the_library_for_ten_thousand_texts(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 10_000)
