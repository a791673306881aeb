"""Retrieval against a plain computation, and merged in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.errors import HeedfulError
from heedful.tasks.metrics import Retrieval, merge_all
from heedful.tasks.metrics import retrieval as module


def plain(vectors: Any) -> tuple[float, float]:
    """Accuracy and mean reciprocal rank, one pair after the other."""
    ranks = []
    for number, (a, _) in enumerate(vectors):
        cosines = [a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for _, b in vectors]
        ranks.append(sum(cosine >= cosines[number] for cosine in cosines))
    return sum(rank == 1 for rank in ranks) / len(ranks), sum(1 / rank for rank in ranks) / len(ranks)


def drawn(count: int, width: int = 5, seed: int = 0) -> Any:
    """Pairs whose vectors are somewhat alike."""
    draw = np.random.default_rng(seed)
    a = draw.normal(size=(count, width))
    return np.stack([a, a + draw.normal(size=(count, width))], 1)


@pytest.mark.parametrize(("count", "at_once"), [(1, 1024), (40, 1024), (40, 7), (40, 40), (40, 1)])
def test_it_is_the_plain_computation(monkeypatch: pytest.MonkeyPatch, count: int, at_once: int) -> None:
    monkeypatch.setattr(module, "CHUNK_TEXTS", at_once)
    vectors = drawn(count)
    metrics = Retrieval().update(range(count), vectors).compute()
    accuracy, mrr = plain(vectors)
    assert metrics["accuracy"] == accuracy and metrics["mrr"] == pytest.approx(mrr) and metrics["count"] == count
    assert count == 1 or 0.2 < accuracy < 0.9
    assert Retrieval().update(range(count), 1e3 * vectors).compute() == metrics  # lengths do not matter


@given(st.integers(1, 25), st.randoms(use_true_random=False))
def test_merging_is_exact_in_any_order(count: int, random: Any) -> None:
    vectors, ids = drawn(count, seed=count), list(range(count))
    whole = Retrieval().update(ids, vectors).compute()
    random.shuffle(ids)
    parts, rest = [Retrieval()], ids
    while rest:
        size = random.randint(1, len(rest))
        parts.append(Retrieval().update(rest[:size], vectors[rest[:size]]))
        rest = rest[size:]
    assert merge_all(parts).compute() == whole


def test_intervals_are_those_of_means_over_pairs() -> None:
    vectors = drawn(300)
    metric = Retrieval().update(range(300), vectors)
    metrics, intervals = metric.compute(), metric.intervals(0)
    for name in ("accuracy", "mrr"):
        low, high = intervals[name]["low"], intervals[name]["high"]
        assert low < metrics[name] < high and 0.05 < high - low < 0.15
    expected = 1.96 * (metrics["accuracy"] * (1 - metrics["accuracy"]) / 300) ** 0.5
    assert intervals["accuracy"]["high"] - metrics["accuracy"] == pytest.approx(expected, rel=0.2)
    parts = [Retrieval().update([n], vectors[[n]]) for n in reversed(range(300))]
    assert merge_all(parts).intervals(0) == intervals


def test_of_equal_cosines_the_own_comes_last() -> None:
    same = np.ones((3, 2, 4))
    assert Retrieval().update(range(3), same).compute() == {"accuracy": 0.0, "mrr": pytest.approx(1 / 3), "count": 3}


@pytest.mark.parametrize("at_once", [1024, 7])
def test_second_texts_that_are_the_same_are_no_rivals(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(module, "CHUNK_TEXTS", at_once)
    draw = np.random.default_rng(3)
    texts = [f"text {number}" for number in draw.integers(0, 6, 40)]
    vectors, of = drawn(40), {text: draw.normal(size=5) for text in texts}
    vectors[:, 1] = [of[text] for text in texts]
    ranks = []
    for (a, b), text in zip(vectors, texts, strict=True):
        rivals = [of[other] for other in texts if other != text]
        own = a @ b / np.linalg.norm(b)
        ranks.append(1 + sum(a @ rival / np.linalg.norm(rival) >= own for rival in rivals))
    metrics = Retrieval().update(range(40), vectors, texts).compute()
    assert metrics["accuracy"] == np.mean(np.array(ranks) == 1) > 0
    assert metrics["mrr"] == pytest.approx(np.mean(1 / np.array(ranks)))
    parts = [Retrieval().update([n], vectors[[n]], [texts[n]]) for n in reversed(range(40))]
    assert merge_all(parts).compute() == metrics


def test_a_vector_of_zeros_finds_nothing() -> None:
    """An empty text is as far from all others, so that its own comes last; and nobody takes it for theirs."""
    vectors = np.stack([np.eye(4)[:3]] * 2, axis=1)
    assert Retrieval().update(range(3), vectors).compute()["accuracy"] == 1
    vectors[1, 0] = 0
    assert Retrieval().update(range(3), vectors).ranks()[1].tolist() == [1, 3, 1]


def test_what_has_no_direction_is_refused() -> None:
    vectors = drawn(3)
    for bad in (np.nan, np.inf):
        broken = vectors.copy()
        broken[1, 1] = bad
        with pytest.raises(HeedfulError, match=r"^a vector is not finite: its direction means nothing$"):
            Retrieval().update(range(3), broken)
    with pytest.raises(HeedfulError, match="of no examples is not defined"):
        Retrieval().compute()
    with pytest.raises(HeedfulError, match="their dimensions differ: 5 and 6"):
        Retrieval().update([0], drawn(1)).merge_state(Retrieval().update([1], drawn(1, width=6)))
    with pytest.raises(HeedfulError, match="there are 2 ids for 3 pairs of vectors"):
        Retrieval().update([0, 1], vectors)
