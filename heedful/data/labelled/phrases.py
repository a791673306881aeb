"""Groups of texts, so that a phrase is in the group of the sentence that it was cut from.

The search for label errors keeps each group in one fold of its cross-validation.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

LONG_PHRASE = 5  # minimum words of a phrase that may join several groups
MAX_JOINED = 3  # maximum groups that a long phrase joins
MAX_CONTAINING = 100  # a phrase that is in more texts than this joins no groups
FIRST_WORDS = 5  # number of first words by which texts are looked up
_WORD = re.compile(r"\w+")

Words = tuple[str, ...]


def join_phrases(texts: Sequence[str], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Join the group of each text with the groups of longer texts that contain it.

    A text contains a phrase if it has all words of the phrase, one after another; case and punctuation are ignored. A
    phrase in texts of a single group joins that group. A phrase of LONG_PHRASE words or more in texts of up to
    MAX_JOINED groups joins all of them. Any other phrase is a common expression and joins nothing, since that would put
    most texts into one group. Texts with equal words are always in one group.

    Args:
        texts: The texts.
        groups: Group id of each text, [texts].

    Returns:
        The group id of each text, counted from 0, [texts].

    >>> texts = ["A fine film that moves.", "fine film", "that moves", "a dull film", "film"]
    >>> join_phrases(texts, np.arange(5)).tolist()
    [0, 0, 0, 1, 2]
    """
    words = [phrase_words(text) for text in texts]
    parents = list(range(len(texts)))  # a forest of texts, with a tree for each group

    def root(text: int) -> int:
        while parents[text] != text:
            parents[text] = text = parents[parents[text]]
        return text

    def join(members: Iterable[int]) -> None:
        roots = sorted({root(member) for member in members})
        for other_root in roots[1:]:
            parents[other_root] = roots[0]

    first_by_group: dict[int, int] = {}
    first_by_words: dict[Words, int] = {}
    for text, group in enumerate(groups.tolist()):
        join((text, first_by_group.setdefault(group, text)))
        if words[text]:
            join((text, first_by_words.setdefault(words[text], text)))
    containing = containing_texts(first_by_words)
    for phrase in sorted(containing, key=lambda text: -len(words[text])):  # a sentence before its phrases
        if len(containing[phrase]) > MAX_CONTAINING:
            continue
        roots = {root(text) for text in containing[phrase]}
        if len(roots) == 1 or (len(roots) <= MAX_JOINED and len(words[phrase]) >= LONG_PHRASE):
            join((phrase, *roots))
    return np.unique([root(text) for text in range(len(texts))], return_inverse=True)[1].reshape(-1).astype(np.int64)


def phrase_words(text: str) -> Words:
    """Return the words of a text in lower case, without punctuation."""
    return tuple(_WORD.findall(text.casefold()))


def containing_texts(text_by_words: dict[Words, int]) -> dict[int, set[int]]:
    """Return the longer texts that contain each text, up to MAX_CONTAINING + 1 of them.

    The time is proportional to the number of words of all texts, and to the number of different lengths among texts
    with the same first words.

    Args:
        text_by_words: Number of each text by its words.

    Returns:
        Numbers of the longer texts, by the number of the text. A text that no other text contains is left out.
    """
    lengths_by_beginning: defaultdict[Words, set[int]] = defaultdict(set)  # lengths of the texts with these first words
    for words in text_by_words:
        lengths_by_beginning[words[:FIRST_WORDS]].add(len(words))
    beginning_sizes = sorted({len(beginning) for beginning in lengths_by_beginning})
    containing: defaultdict[int, set[int]] = defaultdict(set)
    for words, text in text_by_words.items():
        for start in range(len(words)):
            for size in beginning_sizes:
                for length in lengths_by_beginning.get(words[start : start + size], ()):
                    phrase = text_by_words.get(words[start : start + length]) if length < len(words) else None
                    if phrase is not None and len(containing[phrase]) <= MAX_CONTAINING:
                        containing[phrase].add(text)
    return containing
