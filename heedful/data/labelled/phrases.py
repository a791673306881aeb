"""Groups of texts in which a phrase is together with the sentence that it was cut from.

The search for label errors keeps each group in one fold of its cross-validation.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

LONG_PHRASE = 5  # words from which a phrase joins several groups; shorter ones are common expressions
MAX_JOINED = 3  # maximum groups that a long phrase joins
MAX_CONTAINING = 100  # maximum texts that contain a phrase, so that it joins groups at all
_WORD = re.compile(r"\w+")

Words = tuple[str, ...]


def join_phrases(texts: Sequence[str], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Join the groups of texts that contain each other, as a run of whole words without regard to case and punctuation.

    A phrase that lies in texts of a single group joins that group. A phrase of LONG_PHRASE words or more that lies in
    texts of up to MAX_JOINED groups joins them all. Any other phrase is a common expression: joining all texts with it
    would end in a single group.

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
        roots = {root(text) for text in containing[phrase]}
        is_specific = len(roots) == 1 or (len(roots) <= MAX_JOINED and len(words[phrase]) >= LONG_PHRASE)
        if is_specific and len(containing[phrase]) <= MAX_CONTAINING:
            join((phrase, *roots))
    return np.unique([root(text) for text in range(len(texts))], return_inverse=True)[1].reshape(-1).astype(np.int64)


def phrase_words(text: str) -> Words:
    """Return the words of a text in lower case, without punctuation."""
    return tuple(_WORD.findall(text.casefold()))


def containing_texts(text_by_words: dict[Words, int]) -> dict[int, set[int]]:
    """Return the longer texts that contain each text, up to MAX_CONTAINING + 1 of them; texts in no other are left out.

    The time grows with the words of all texts, times the number of lengths of texts with the same first words.
    """
    lengths_by_beginning: defaultdict[Words, set[int]] = defaultdict(set)  # lengths of the texts with these first words
    for words in text_by_words:
        lengths_by_beginning[words[:LONG_PHRASE]].add(len(words))
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
