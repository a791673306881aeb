"""The tokenizers of a page give the tokens of the library, in plain JavaScript."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from heedful.bundled import BUNDLED_ENCODER, bundled_model
from heedful.tokenizer import Tokenizer
from tests.support.page_scripts import page_encodings
from tests.support.page_tokenizers import random_texts, trained


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
