"""Bootstrap intervals: equal to those of a plain bootstrap, and they contain the true value as often as they should."""

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


def test_bootstrap_weights_are_poisson_and_depend_on_seed_and_id() -> None:
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
    in_other_order = mean_interval(scores[order], seed=1, ids=order)
    assert {**in_other_order, "mean": 0} == {**interval, "mean": 0}, "only the mean depends on the order, by rounding"
    assert mean_interval([0.5] * 9, seed=0)["low"] == pytest.approx(0.5)


def test_intervals_contain_the_true_value_as_often_as_their_level() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        interval = mean_interval(rng.random(60) < 0.7, seed=trial, level=0.9, replicates=200)
        inside += interval["low"] <= 0.7 <= interval["high"]
    assert 165 <= inside <= 195  # of 180 expected; the percentile interval is a little narrow


def plain_bootstrap_interval(rows: np.ndarray, statistic: Any) -> list[float]:
    """The 95 % interval of a bootstrap that resamples whole examples with a multinomial distribution."""
    rng = np.random.default_rng(0)
    counts = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=1000)
    return np.quantile(statistic((counts @ rows).astype(np.float64)), [0.025, 0.975]).tolist()


def test_intervals_of_scores_that_are_not_means() -> None:
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 3, 300)
    predicted = np.where(rng.random(300) < 0.7, gold, rng.integers(0, 3, 300))
    rows = confusion_statistics(predicted, gold, 3)
    bootstrap = Bootstrap(seed=4, statistics=9).update(range(300), rows)
    for formula, truth in (
        (macro_f1, f1_score(gold, predicted, average="macro")),
        (matthews, matthews_corrcoef(gold, predicted)),
    ):
        statistic = confusion_of(3, formula)
        assert statistic(rows.sum(0, dtype=np.float64)[None])[0] == pytest.approx(truth)
        interval = bootstrap.interval(statistic)
        assert interval["low"] < truth < interval["high"]
        assert [interval["low"], interval["high"]] == pytest.approx(plain_bootstrap_interval(rows, statistic), abs=0.02)


def test_entities() -> None:
    rng = np.random.default_rng(0)
    gold = [rng.choice(["O", "B-x", "I-x"], size=8).tolist() for _ in range(200)]
    predicted = [[tag if rng.random() < 0.8 else "O" for tag in sentence] for sentence in gold]
    rows = entity_counts(predicted, gold, "conlleval")
    interval = Bootstrap(seed=4, statistics=3).update(range(200), rows).interval(f1_of)
    assert [interval["low"], interval["high"]] == pytest.approx(plain_bootstrap_interval(rows, f1_of), abs=0.02)
    assert f1_of(np.zeros((2, 3))).tolist() == [0, 0]


def test_statistics_of_multiple_labels_agree_with_sklearn() -> None:
    rng = np.random.default_rng(6)
    gold, predicted = rng.integers(0, 2, (2, 60, 4))
    gold[:, 3] = predicted[:, 3] = 0  # a label that never occurs
    counts = np.stack([gold & predicted, gold, predicted], 2)
    counts_of_examples = rng.poisson(1, (50, 60))
    whole = np.einsum("ri,ic->rc", counts_of_examples, counts.reshape(60, -1)).astype(np.float64)
    sums = np.einsum("ri,ic->rc", counts_of_examples, counts.sum(1)).astype(np.float64)
    for resample, macro, precision, recall in zip(
        counts_of_examples, macro_f1_of(whole), precision_of(sums), recall_of(sums), strict=True
    ):
        resampled = [np.repeat(labels, resample, 0) for labels in (gold, predicted)]
        assert macro == pytest.approx(f1_score(*resampled, average="macro", zero_division=0.0))
        assert precision == pytest.approx(precision_score(*resampled, average="micro"))
        assert recall == pytest.approx(recall_score(*resampled, average="micro"))


def test_resampled_interval() -> None:
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
