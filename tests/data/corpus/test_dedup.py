"""Deduplication: compared with Python sets and the true Jaccard similarity, whatever the size of the batches."""

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


def random_words(rng: random.Random, length: int = 200) -> list[str]:
    return rng.choices(WORDS, k=length)


def replace_words(rng: random.Random, words: list[str], count: int) -> list[str]:
    """The words with `count` of them replaced, at least 6 words apart."""
    words = list(words)
    for index in rng.sample(range(0, len(words), 6), count):
        words[index] = "other"
    return words


def jaccard(first: list[str], second: list[str]) -> float:
    """The true similarity: the overlap of the sets of 5 consecutive words."""
    a, b = ({tuple(words[start : start + 5]) for start in range(len(words) - 4)} for words in (first, second))
    return len(a & b) / len(a | b)


def verdicts(texts: list[str], tmp_path: Path, *, near: bool, batch_size: int, similarity: float = 0.8) -> list[int]:
    deduplicator = Deduplicator(near=near, similarity=similarity, file=tmp_path / "signatures")
    results: list[int] = []
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        hashes = np.array([hash_document(text) for text in batch], np.uint64)
        results += deduplicator.check(hashes, minhash_signatures(batch if near else [])).tolist()
    deduplicator.close()
    return results


def test_exact_duplicates_are_those_that_a_python_set_finds(tmp_path: Path) -> None:
    rng = random.Random(1)
    texts = [str(rng.randrange(15_000)) for _ in range(20_000)]  # the table grows a few times
    seen: set[str] = set()
    expected = []
    for text in texts:
        expected.append(EXACT if text in seen else KEEP)
        seen.add(text)
    for size in (7, 1000, 20_000):
        assert verdicts(texts, tmp_path, near=False, batch_size=size) == expected


def test_signatures_estimate_jaccard() -> None:
    rng = random.Random(2)
    for count in (0, 2, 5, 10, 30):
        words = random_words(rng)
        variant = replace_words(rng, words, count)
        first, second = minhash_signatures([" ".join(words), " ".join(variant).upper() + "!"])
        assert abs((first == second).mean() - jaccard(words, variant)) < 4 * (0.25 / PERMUTATIONS) ** 0.5
    assert minhash_signatures([]).shape == (0, PERMUTATIONS)


def test_signatures_of_texts_shorter_than_a_shingle() -> None:
    two, same_words, other_order, marks, other_marks = minhash_signatures(
        ["two words", "Two, words", "words two", "?!", "!?"]
    )
    assert (two == same_words).all()
    assert (two != other_order).any()
    assert (marks != other_marks).any()


def test_near_duplicates_are_those_by_true_jaccard_similarity(tmp_path: Path) -> None:
    rng = random.Random(3)
    bases = [random_words(rng) for _ in range(60)]
    texts, expected = [" ".join(base) for base in bases], [KEEP] * 60
    for index, base in enumerate(bases):
        is_near = index % 2 == 1
        variant = replace_words(rng, base, 2 if is_near else 25)  # a similarity of about 0.9 or about 0.2
        assert (jaccard(base, variant) > 0.88) == is_near
        texts.append(" ".join(variant))
        expected.append(NEAR if is_near else KEEP)
    texts.append(texts[0])
    expected.append(EXACT)
    for size in (1, 17, 200):
        assert verdicts(texts, tmp_path, near=True, batch_size=size) == expected


def test_documents_are_compared_only_with_documents_that_stay(tmp_path: Path) -> None:
    """Each document is near only to the one before it. As every second one is left out, the next one stays."""
    rng = random.Random(4)
    chain = [random_words(rng, 400)]
    for _ in range(3):
        chain.append([*chain[-1][44:], *random_words(rng, 44)])
    assert jaccard(chain[0], chain[1]) > 0.78 > 0.7 > jaccard(chain[0], chain[2])
    texts = [" ".join(words) for words in chain]
    for size in (1, 2, 4):
        assert verdicts(texts, tmp_path, near=True, batch_size=size, similarity=0.7) == [KEEP, NEAR, KEEP, NEAR]


def test_shared_boilerplate_does_not_hide_near_duplicates(tmp_path: Path) -> None:
    """300 documents that share their first 60 words fill the same buckets; true near duplicates are still found."""
    rng = random.Random(5)
    shared = random_words(rng, 60)
    texts = [" ".join([*shared, *random_words(rng, 60)]) for _ in range(300)]
    near_duplicates = [text + " end" for text in texts]
    results = verdicts(texts + near_duplicates, tmp_path, near=True, batch_size=50)
    assert results[:300] == [KEEP] * 300
    assert results[300:].count(NEAR) > 290


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.8, 0.9, 1.0])
def test_bands_find_pairs_at_the_threshold(similarity: float) -> None:
    bands, rows = lsh_bands(similarity)
    assert bands * rows <= PERMUTATIONS
    probability = 1 - (1 - similarity**rows) ** bands
    assert probability >= 0.95


def test_near_duplicates_share_a_group() -> None:
    rng = random.Random(3)
    originals = [random_words(rng) for _ in range(40)]
    near = [replace_words(rng, words, 2) for words in originals]  # a Jaccard similarity of about 0.9
    far = [replace_words(rng, words, 20) for words in originals]
    signatures = minhash_signatures(" ".join(words) for words in [*originals, *near, *far])
    groups_of_originals, groups_of_near, groups_of_far = near_duplicate_groups(signatures, 0.8).reshape(3, 40)
    assert (groups_of_originals == groups_of_near).mean() >= 0.95
    assert len(set(groups_of_originals.tolist())) == 40, "each original has a group of its own"
    assert not set(groups_of_far.tolist()) & set(groups_of_originals.tolist())
    assert near_duplicate_groups(signatures[:0], 0.8).shape == (0,)
