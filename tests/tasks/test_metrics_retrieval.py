"""Retrieval: equal to a plain computation, also if merged in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.errors import HeedfulError
from heedful.tasks.metrics import Retrieval, merge_all
from heedful.tasks.metrics import retrieval as module


def accuracy_and_mrr(vectors: Any) -> tuple[float, float]:
    """Accuracy and mean reciprocal rank, computed pair by pair."""
    ranks = []
    for index, (a, _) in enumerate(vectors):
        cosines = [a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for _, b in vectors]
        ranks.append(sum(cosine >= cosines[index] for cosine in cosines))
    return sum(rank == 1 for rank in ranks) / len(ranks), sum(1 / rank for rank in ranks) / len(ranks)


def random_pairs(count: int, width: int = 5, seed: int = 0) -> Any:
    """Pairs of vectors, [pair, side, dimension], with a cosine above that of unrelated vectors."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(count, width))
    return np.stack([a, a + rng.normal(size=(count, width))], 1)


@pytest.mark.parametrize(("count", "chunk_size"), [(1, 1024), (40, 1024), (40, 7), (40, 40), (40, 1)])
def test_retrieval_equals_a_plain_computation(monkeypatch: pytest.MonkeyPatch, count: int, chunk_size: int) -> None:
    monkeypatch.setattr(module, "CHUNK_TEXTS", chunk_size)
    vectors = random_pairs(count)
    metrics = Retrieval().update(range(count), vectors).compute()
    accuracy, mrr = accuracy_and_mrr(vectors)
    assert metrics["accuracy"] == accuracy
    assert metrics["mrr"] == pytest.approx(mrr)
    assert metrics["count"] == count
    assert count == 1 or 0.2 < accuracy < 0.9
    assert Retrieval().update(range(count), 1e3 * vectors).compute() == metrics, "only directions matter"


@given(st.integers(1, 25), st.randoms(use_true_random=False))
def test_merging_is_exact_in_any_order(count: int, random: Any) -> None:
    vectors, ids = random_pairs(count, seed=count), list(range(count))
    whole = Retrieval().update(ids, vectors).compute()
    random.shuffle(ids)
    parts, rest = [Retrieval()], ids
    while rest:
        size = random.randint(1, len(rest))
        parts.append(Retrieval().update(rest[:size], vectors[rest[:size]]))
        rest = rest[size:]
    assert merge_all(parts).compute() == whole


def test_intervals_are_those_of_means_over_pairs() -> None:
    vectors = random_pairs(300)
    metric = Retrieval().update(range(300), vectors)
    metrics, intervals = metric.compute(), metric.intervals(0)
    for name in ("accuracy", "mrr"):
        low, high = intervals[name]["low"], intervals[name]["high"]
        assert low < metrics[name] < high and 0.05 < high - low < 0.15
    expected = 1.96 * (metrics["accuracy"] * (1 - metrics["accuracy"]) / 300) ** 0.5
    assert intervals["accuracy"]["high"] - metrics["accuracy"] == pytest.approx(expected, rel=0.2)
    parts = [Retrieval().update([n], vectors[[n]]) for n in reversed(range(300))]
    assert merge_all(parts).intervals(0) == intervals


def test_with_equal_cosines_the_right_text_is_ranked_last() -> None:
    equal_vectors = np.ones((3, 2, 4))
    metrics = Retrieval().update(range(3), equal_vectors).compute()
    assert metrics == {"accuracy": 0.0, "mrr": pytest.approx(1 / 3), "count": 3}


@pytest.mark.parametrize("chunk_size", [1024, 7])
def test_equal_second_texts_do_not_compete(monkeypatch: pytest.MonkeyPatch, chunk_size: int) -> None:
    monkeypatch.setattr(module, "CHUNK_TEXTS", chunk_size)
    rng = np.random.default_rng(3)
    texts = [f"text {number}" for number in rng.integers(0, 6, 40)]
    vectors, vector_of = random_pairs(40), {text: rng.normal(size=5) for text in texts}
    vectors[:, 1] = [vector_of[text] for text in texts]
    ranks = []
    for (a, b), text in zip(vectors, texts, strict=True):
        rivals = [vector_of[other] for other in texts if other != text]
        own = a @ b / np.linalg.norm(b)
        ranks.append(1 + sum(a @ rival / np.linalg.norm(rival) >= own for rival in rivals))
    metrics = Retrieval().update(range(40), vectors, texts).compute()
    assert metrics["accuracy"] == np.mean(np.array(ranks) == 1) > 0
    assert metrics["mrr"] == pytest.approx(np.mean(1 / np.array(ranks)))
    parts = [Retrieval().update([n], vectors[[n]], [texts[n]]) for n in reversed(range(40))]
    assert merge_all(parts).compute() == metrics


def test_a_zero_vector_is_ranked_last() -> None:
    """The vector of an empty text may be zero: all its cosines are 0, so that the right text is ranked last."""
    vectors = np.stack([np.eye(4)[:3]] * 2, axis=1)
    assert Retrieval().update(range(3), vectors).compute()["accuracy"] == 1
    vectors[1, 0] = 0
    assert Retrieval().update(range(3), vectors).ranks()[1].tolist() == [1, 3, 1]


def test_bad_vectors_are_refused() -> None:
    vectors = random_pairs(3)
    for bad in (np.nan, np.inf):
        broken = vectors.copy()
        broken[1, 1] = bad
        with pytest.raises(HeedfulError, match=r"^a vector is not finite: its direction means nothing$"):
            Retrieval().update(range(3), broken)
    with pytest.raises(HeedfulError, match="of no examples is not defined"):
        Retrieval().compute()
    with pytest.raises(HeedfulError, match="their dimensions differ: 5 and 6"):
        Retrieval().update([0], random_pairs(1)).merge_state(Retrieval().update([1], random_pairs(1, width=6)))
    with pytest.raises(HeedfulError, match="there are 2 ids for 3 pairs of vectors"):
        Retrieval().update([0, 1], vectors)
