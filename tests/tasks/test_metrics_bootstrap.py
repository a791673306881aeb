"""Intervals: the spread is that of the ordinary bootstrap, the truth lies in them as often as they say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import f1_score, matthews_corrcoef, precision_score, recall_score

from heedful.errors import HeedfulError
from heedful.tasks.metrics import (
    Bootstrap,
    confusion_of,
    confusion_statistics,
    entity_counts,
    f1_of,
    macro_f1,
    matthews,
    mean_interval,
)
from heedful.tasks.metrics.bootstrap import (
    POISSON_THRESHOLDS,
    _weights,
    macro_f1_of,
    precision_of,
    recall_of,
    resampled_interval,
)


def test_weights_are_poisson_and_depend_on_seed_and_id_alone() -> None:
    weights = np.stack([_weights(0, name, 1000) for name in range(400)])
    for k in range(5):
        expected = math.exp(-1) / math.factorial(k)
        assert (weights == k).mean() == pytest.approx(expected, abs=5 * math.sqrt(expected / weights.size))
    assert abs(np.corrcoef(weights[:20])[np.triu_indices(20, 1)]).max() < 0.15  # examples are independent
    assert _weights(0, "7", 1000).tolist() == weights[7].tolist()
    assert _weights(0, 7, 10).tolist() == weights[7, :10].tolist()
    assert _weights(1, 7, 1000).tolist() != weights[7].tolist()
    cumulative = stats.poisson(1).cdf(range(21))
    assert (POISSON_THRESHOLDS.astype(np.float64) / 2.0**64).tolist() == pytest.approx(cumulative)


def test_the_mean() -> None:
    scores = np.random.default_rng(0).normal(3, 2, 400)
    interval = mean_interval(scores, seed=1)
    half = 1.96 * scores.std() / 20
    assert interval["mean"] == pytest.approx(scores.mean())
    assert (interval["low"], interval["high"]) == pytest.approx((scores.mean() - half, scores.mean() + half), abs=0.04)
    assert (interval["level"], interval["replicates"], interval["count"]) == (0.95, 1000, 400)
    assert mean_interval(scores, seed=1) == interval != mean_interval(scores, seed=2)
    narrow = mean_interval(scores, seed=1, level=0.5)
    assert interval["low"] < narrow["low"] < narrow["high"] < interval["high"]
    order = np.random.default_rng(1).permutation(400)
    again = mean_interval(scores[order], seed=1, ids=order)
    assert {**again, "mean": 0} == {**interval, "mean": 0}
    assert mean_interval([0.5] * 9, seed=0)["low"] == pytest.approx(0.5)


def test_the_truth_lies_in_as_many_intervals_as_they_say() -> None:
    random = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        interval = mean_interval(random.random(60) < 0.7, seed=trial, level=0.9, replicates=200)
        inside += interval["low"] <= 0.7 <= interval["high"]
    assert 165 <= inside <= 195  # of 180 expected; the percentile interval is a little narrow


def ordinary(rows: np.ndarray, of: Any) -> list[float]:
    """The bootstrap with all examples in memory."""
    random = np.random.default_rng(0)
    drawn = random.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=1000)
    return np.quantile(of((drawn @ rows).astype(np.float64)), [0.025, 0.975]).tolist()


def test_scores_that_are_no_means() -> None:
    random = np.random.default_rng(0)
    gold = random.integers(0, 3, 300)
    predicted = np.where(random.random(300) < 0.7, gold, random.integers(0, 3, 300))
    rows = confusion_statistics(predicted, gold, 3)
    seen = Bootstrap(seed=4, statistics=9).update(range(300), rows)
    for formula, truth in (
        (macro_f1, f1_score(gold, predicted, average="macro")),
        (matthews, matthews_corrcoef(gold, predicted)),
    ):
        of = confusion_of(3, formula)
        assert of(rows.sum(0, dtype=np.float64)[None])[0] == pytest.approx(truth)
        bootstrap_interval = seen.interval(of)
        assert bootstrap_interval["low"] < truth < bootstrap_interval["high"]
        assert [bootstrap_interval["low"], bootstrap_interval["high"]] == pytest.approx(ordinary(rows, of), abs=0.02)


def test_entities() -> None:
    random = np.random.default_rng(0)
    gold = [random.choice(["O", "B-x", "I-x"], size=8).tolist() for _ in range(200)]
    predicted = [[tag if random.random() < 0.8 else "O" for tag in sentence] for sentence in gold]
    rows = entity_counts(predicted, gold, "conlleval")
    bootstrap_interval = Bootstrap(seed=4, statistics=3).update(range(200), rows).interval(f1_of)
    assert [bootstrap_interval["low"], bootstrap_interval["high"]] == pytest.approx(ordinary(rows, f1_of), abs=0.02)
    assert f1_of(np.zeros((2, 3))).tolist() == [0, 0]


def test_scores_of_labels() -> None:
    draw = np.random.default_rng(6)
    gold, predicted = draw.integers(0, 2, (2, 60, 4))
    gold[:, 3] = predicted[:, 3] = 0  # one that never occurs
    counts = np.stack([gold & predicted, gold, predicted], 2)
    times = draw.poisson(1, (50, 60))
    whole = np.einsum("ri,ic->rc", times, counts.reshape(60, -1)).astype(np.float64)
    sums = np.einsum("ri,ic->rc", times, counts.sum(1)).astype(np.float64)
    for row, macro, precision, recall in zip(
        times, macro_f1_of(whole), precision_of(sums), recall_of(sums), strict=True
    ):
        pair = [np.repeat(labels, row, 0) for labels in (gold, predicted)]
        assert macro == pytest.approx(f1_score(*pair, average="macro", zero_division=0.0))
        assert precision == pytest.approx(precision_score(*pair, average="micro"))
        assert recall == pytest.approx(recall_score(*pair, average="micro"))


def test_replicates_that_are_drawn_by_themselves() -> None:
    values = np.random.default_rng(7).normal(size=400)
    interval = resampled_interval(400, lambda times: float(times @ values / times.sum()), seed=3)
    error = values.std() / 20
    expected = [values.mean() - 1.96 * error, values.mean() + 1.96 * error]
    assert [interval["low"], interval["high"]] == pytest.approx(expected, abs=0.3 * error)
    assert (interval["level"], interval["replicates"], interval["count"]) == (0.95, 1000, 400)
    assert interval == resampled_interval(400, lambda times: float(times @ values / times.sum()), seed=3)
    with pytest.raises(HeedfulError, match="an interval of no examples is not defined"):
        resampled_interval(0, lambda times: 0.0, seed=3)


def test_what_is_refused() -> None:
    with pytest.raises(HeedfulError, match='the score of example "b" is nan'):
        mean_interval([1.0, math.nan], seed=0, ids=["a", "b"])
    with pytest.raises(HeedfulError, match="an interval of no examples is not defined"):
        mean_interval([], seed=0)
    with pytest.raises(HeedfulError, match=r"level should be between 0 and 1, like 0.95, got 95"):
        mean_interval([1.0], seed=0, level=95.0)
    with pytest.raises(HeedfulError, match=r"seed should be a whole number from 0 to 2\^64 - 1, got -1"):
        mean_interval([1.0], seed=-1)
    with pytest.raises(HeedfulError, match=r"each example should have 2 statistics, got shape \(1, 3\)"):
        Bootstrap(seed=0, statistics=2).update([0], [[1, 2, 3]])
    with pytest.raises(HeedfulError, match="1 ids for 2 rows of statistics"):
        Bootstrap(seed=0, statistics=1).update([0], [[1], [2]])
    with pytest.raises(HeedfulError, match="which a bootstrap cannot hold: scale them down"):
        mean_interval([1e9], seed=0)
