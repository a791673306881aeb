"""Phrases are grouped with the sentence that they were cut from, and common expressions with nothing."""

from __future__ import annotations

import numpy as np
import pytest

from heedful.data.labelled import phrases
from heedful.data.labelled.phrases import join_phrases


def joined(*texts: str, groups: list[int] | None = None) -> list[int]:
    """Return the group of each text; without `groups`, each text is a group of its own at first."""
    return join_phrases(texts, np.array(range(len(texts)) if groups is None else groups)).tolist()


def test_phrases_of_a_phrase_are_in_the_group_of_the_sentence() -> None:
    assert joined("clever", "a clever script , well acted", "script, well", "Well", "dull") == [0, 0, 0, 0, 1]
    assert joined("the scriptwriter", "script") == [0, 1], "whole words alone count"
    assert joined("", "  ", "a text", "!") == [0, 1, 2, 3], "texts without words lie in no text"


def test_equal_words_are_one_group() -> None:
    assert joined("Well acted!", "well acted", "acted well") == [0, 0, 1]


def test_a_common_expression_joins_nothing() -> None:
    sentences = [f"the {noun} is one of the best of the year" for noun in ("play", "book", "song", "film")]
    assert joined(*sentences, "the best") == [0, 1, 2, 3, 4]
    assert joined(*sentences[:3], "is one of the best") == [0, 0, 0, 0], "a long phrase joins up to three groups"
    assert joined(*sentences, "is one of the best") == [0, 1, 2, 3, 4]


def test_groups_that_texts_have_already_are_joined_whole() -> None:
    assert joined("a fine day at sea", "one more", "fine day", groups=[7, 3, 3]) == [0, 0, 0]
    assert joined("a fine day", "rain", "snow", groups=[5, 5, 2]) == [0, 0, 1]


def test_a_phrase_of_very_many_texts_joins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a b c d", "a b c", "a b", "a"]
    assert joined(*texts) == [0, 0, 0, 0]
    monkeypatch.setattr(phrases, "MAX_CONTAINING", 2)
    assert joined(*texts) == [0, 0, 0, 1]


def test_a_phrase_is_found_at_every_position() -> None:
    words = [f"w{number}" for number in range(12)]
    for start in range(12):
        for end in range(start + 1, 13):
            assert joined(" ".join(words), " ".join(words[start:end]), "something else") == [0, 0, 1]
