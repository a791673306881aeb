"""Duplicates: against sets, against the true Jaccard similarity, in any chunks."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from heedful.data.corpus.dedup import (
    EXACT,
    KEEP,
    NEAR,
    PERMUTATIONS,
    Deduplicator,
    lsh_bands,
    minhash_signatures,
    near_duplicate_groups,
)
from heedful.data.corpus.shards import hash_document

WORDS = [f"word{number}" for number in range(3000)]


def document(draw: random.Random, length: int = 200) -> list[str]:
    return draw.choices(WORDS, k=length)


def changed(draw: random.Random, words: list[str], count: int) -> list[str]:
    """The same with so many words replaced, far from each other."""
    words = list(words)
    for place in draw.sample(range(0, len(words), 6), count):
        words[place] = "other"
    return words


def jaccard(one: list[str], other: list[str]) -> float:
    a, b = ({tuple(words[start : start + 5]) for start in range(len(words) - 4)} for words in (one, other))
    return len(a & b) / len(a | b)


def judged(texts: list[str], tmp_path: Path, *, near: bool, size: int, similarity: float = 0.8) -> list[int]:
    judge = Deduplicator(near=near, similarity=similarity, file=tmp_path / "signatures")
    indices: list[int] = []
    for start in range(0, len(texts), size):
        some = texts[start : start + size]
        hashes = np.array([hash_document(text) for text in some], np.uint64)
        indices += judge.check(hashes, minhash_signatures(some if near else [])).tolist()
    judge.close()
    return indices


def test_exact_duplicates_are_those_of_a_set(tmp_path: Path) -> None:
    draw = random.Random(1)
    texts = [str(draw.randrange(15_000)) for _ in range(20_000)]  # the table grows a few times
    seen: set[str] = set()
    expected = [EXACT if text in seen or seen.add(text) else KEEP for text in texts]
    for size in (7, 1000, 20_000):
        assert judged(texts, tmp_path, near=False, size=size) == expected


def test_signatures_estimate_jaccard() -> None:
    draw = random.Random(2)
    for count in (0, 2, 5, 10, 30):
        one = document(draw)
        other = changed(draw, one, count)
        first, second = minhash_signatures([" ".join(one), " ".join(other).upper() + "!"])
        assert abs((first == second).mean() - jaccard(one, other)) < 4 * (0.25 / PERMUTATIONS) ** 0.5
    assert minhash_signatures([]).shape == (0, PERMUTATIONS)
    short = minhash_signatures(["two words", "Two, words", "words two", "?!", "!?"])
    assert (short[0] == short[1]).all() and (short[0] != short[2]).any() and (short[3] != short[4]).any()


def test_near_duplicates_are_those_of_the_true_similarity(tmp_path: Path) -> None:
    draw = random.Random(3)
    bases = [document(draw) for _ in range(60)]
    texts, expected = [" ".join(base) for base in bases], [KEEP] * 60
    for number, base in enumerate(bases):
        other = changed(draw, base, 2 if number % 2 else 25)  # about 0.9 and about 0.2
        assert (jaccard(base, other) > 0.88) == bool(number % 2)
        texts.append(" ".join(other))
        expected.append(NEAR if number % 2 else KEEP)
    texts.append(texts[0])
    expected.append(EXACT)
    for size in (1, 17, 200):
        assert judged(texts, tmp_path, near=True, size=size) == expected


def test_the_first_one_stays_and_the_left_out_do_not_count(tmp_path: Path) -> None:
    """A chain, each near to the one before and far from the one before that: every second stays."""
    draw = random.Random(4)
    chain = [document(draw, 400)]
    for _ in range(3):
        chain.append([*chain[-1][44:], *document(draw, 44)])
    assert jaccard(chain[0], chain[1]) > 0.78 > 0.7 > jaccard(chain[0], chain[2])
    texts = [" ".join(each) for each in chain]
    for size in (1, 2, 4):
        assert judged(texts, tmp_path, near=True, size=size, similarity=0.7) == [KEEP, NEAR, KEEP, NEAR]


def test_boilerplate_does_not_hide_what_is_alike(tmp_path: Path) -> None:
    """Many that share some shingles fill the buckets of those; the others still find each other."""
    draw = random.Random(5)
    shared = document(draw, 60)
    texts = [" ".join([*shared, *document(draw, 60)]) for _ in range(300)]
    again = [text + " end" for text in texts]
    indices = judged(texts + again, tmp_path, near=True, size=50)
    assert indices[:300] == [KEEP] * 300
    assert indices[300:].count(NEAR) > 290


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.8, 0.9, 1.0])
def test_bands_compare_what_they_should(similarity: float) -> None:
    count, rows = lsh_bands(similarity)
    assert count * rows <= PERMUTATIONS
    assert 1 - (1 - similarity**rows) ** count >= 0.95


def test_near_duplicates_share_a_group() -> None:
    draw = random.Random(3)
    originals = [document(draw) for _ in range(40)]
    near = [changed(draw, words, 2) for words in originals]  # a Jaccard similarity of about 0.9
    far = [changed(draw, words, 20) for words in originals]
    signatures = minhash_signatures(" ".join(words) for words in [*originals, *near, *far])
    groups = near_duplicate_groups(signatures, 0.8).reshape(3, 40)
    same = (groups[0] == groups[1]).mean()
    assert same >= 0.95 and len(set(groups[0].tolist())) == 40, "each original has a group of its own"
    assert not set(groups[2].tolist()) & set(groups[0].tolist())
    assert near_duplicate_groups(signatures[:0], 0.8).shape == (0,)
