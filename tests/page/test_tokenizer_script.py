"""The tokenizers of a page give the tokens of the library, in plain JavaScript."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from heedful.bundled import BUNDLED_ENCODER, bundled_model
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.look.inspection import readable_token
from heedful.page.tokenizer_state import tokenizer_state
from heedful.tokenizer import Tokenizer
from tests.support.page_scripts import page_encodings, run_scripts
from tests.support.page_tokenizers import random_texts, trained
from tests.support.sentencepiece_models import train_sentencepiece


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


def sentencepiece(**options: Any) -> Callable[[Path], Tokenizer]:
    """Return a function that trains a SentencePiece model and reads it as T5's."""

    def read(folder: Path) -> Tokenizer:
        special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
        (folder / "spiece.model").write_bytes(train_sentencepiece(**special, **options))
        return Tokenizer.load(folder, FAMILIES["t5"].tokenizer_defaults)

    return read


def with_cleaning(folder: Path) -> Tokenizer:
    """A Unigram vocabulary behind SentencePiece's cleaning for machine translation."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(trained(algorithm="unigram")(folder).tokenizer_json()))
    backend.normalizer = normalizers.Nmt()
    return Tokenizer(backend)


TOKENIZERS = {
    "the encoder that ships": shipped,
    "wordpiece, cased": trained(algorithm="wordpiece", lower_case=False),
    "bpe": trained(algorithm="bpe"),
    "unigram, joined characters": trained(algorithm="unigram"),
    "bpe, added tokens, joined characters": with_added_tokens,
    "unigram, other steps, joined characters": of_steps,
    "unigram, cleaned": with_cleaning,
    "sentencepiece unigram, joined characters": sentencepiece(),
    "sentencepiece bpe, joined characters": sentencepiece(model_type="bpe", byte_fallback=True, vocab_size=560),
}


def with_pattern(tokenizer: Tokenizer, pattern: str) -> Tokenizer:
    """Return a tokenizer that splits texts at a regular expression first."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.tokenizer_json()))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return Tokenizer(backend)


def test_normal_forms_join_marks_vowels_and_half_width_characters(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["unigram, joined characters"](tmp_path)
    texts = ["5ﾋﾟz", "ｶﾞｾﾟ", "e\u0301", "\u1112\u1161\u11ab", "\u3131\u314f\u3134\u314f", "\uffa1\uffc2"]
    for text, encoding in zip(texts, page_encodings(tmp_path, tokenizer, texts), strict=True):
        assert encoding["ids"] == list(tokenizer.encode(text).ids), text


def test_classes_of_patterns_are_those_of_unicode(tmp_path: Path) -> None:
    tokenizer = with_pattern(shipped(tmp_path), r"[^\s\D]|\d{2}|\\s")
    texts = ["a12 \u0665\u0666\u0667b\u00a0c\u3000d", "a\\\\s \\s x\u00b2 \u0967 ９"]
    for text, got in zip(texts, page_encodings(tmp_path, tokenizer, texts), strict=True):
        expected = tokenizer.encode(text)
        assert (got["ids"], got["words"]) == (list(expected.ids), list(expected.words))


def test_ends_of_patterns_are_those_of_the_text_and_of_lines(tmp_path: Path) -> None:
    texts = ["a a\na a", "a\r\na", "\na", "a\n", "a\u2028a", "ab"]
    for pattern in (r"\Aa", r"a\z", "^a", "a$", "a.", "[^$.]", r"\^"):
        tokenizer = with_pattern(shipped(tmp_path), pattern)
        for text, encoding in zip(texts, page_encodings(tmp_path, tokenizer, texts), strict=True):
            assert encoding["words"] == list(tokenizer.encode(text).words), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "part"), [(r"(?i:'s)|\d", "(?"), (r"\w+", r"\\w"), (r"\s++", "++"), (r"[[:alpha:]]", "[[:")]
)
def test_patterns_that_javascript_interprets_differently_are_refused(tmp_path: Path, pattern: str, part: str) -> None:
    with pytest.raises(HeedfulError, match=re.escape(f"'{part}' is regex syntax that JavaScript")):
        tokenizer_state(with_pattern(shipped(tmp_path), pattern))


def test_other_parts_are_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(json.dumps(shipped(tmp_path).tokenizer_json()))
    backend.normalizer = normalizers.ByteLevel()
    with pytest.raises(
        HeedfulError, match="a part of the type ByteLevel, which HTML export does not support; it supports Bert"
    ):
        tokenizer_state(Tokenizer(backend))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_equals_the_library(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 400)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_equals_the_library_for_ten_thousand_texts(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 10_000)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_readable_tokens(tmp_path: Path, name: str) -> None:
    tokenizer = TOKENIZERS[name](tmp_path)
    ids = [id for id in range(tokenizer.size) if tokenizer.id(tokenizer.name(id)) == id]
    about = {"tokenizer": tokenizer_state(tokenizer)}
    (names,) = run_scripts(tmp_path, about, [ids], "(page, ids) => ids.map((id) => page.tokenizer.readable(id))")
    assert names == [readable_token(id, tokenizer) for id in ids]
