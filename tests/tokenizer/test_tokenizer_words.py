"""Tokenizers whose tokens are whole words."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.errors import HeedfulError
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.words import count_words, word_tokenizer

TEXTS = ["The café, the end.", "the END"]


def test_count_words_and_word_tokenizer(tmp_path: Path) -> None:
    counts = count_words(TEXTS)
    assert list(counts.items()) == [("the", 3), ("cafe", 1), (",", 1), ("end", 2), (".", 1)]
    assert list(count_words(TEXTS, lower_case=False)) == ["The", "café", ",", "the", "end", ".", "END"]
    tokenizer = word_tokenizer([word for word, _ in counts.most_common(3)])
    tokenizer.save(tmp_path)
    for loaded in (tokenizer, Tokenizer.load(tmp_path)):
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.size == 4
        assert loaded.encode("The tea, THE café!").ids == (1, 0, 0, 1, 3, 0)
        assert loaded.encode(("the", "end")).types == (0, 1)
        assert loaded.encode("").ids == ()
        assert loaded.special.unknown == 0
        assert loaded.special.bos_or_cls is None
        assert loaded.special.eos_or_sep is None
    with pytest.raises(HeedfulError, match="there are no words to make a vocabulary of"):
        word_tokenizer(["[UNK]"])
