"""Metrics of numbers: regression, token loss and calibration, compared with scipy, sklearn and exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.calibration import calibration_curve

from heedful.errors import HeedfulError
from heedful.tasks.metrics import (
    Calibration,
    RankedRegressionScores,
    RegressionScores,
    TokenLoss,
    best_temperature,
    merge_all,
)
from heedful.tasks.metrics.base import BITS, exact_products, exact_sum, from_exact, to_exact
from heedful.tasks.metrics.regression import _spearman, ranks

FLOATS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20)


@given(FLOATS)
def test_sums_are_exact(values: list[float]) -> None:
    total = exact_sum(np.array(values))
    assert Fraction(total, 1 << BITS) == sum(map(Fraction, values)) == Fraction(sum(map(to_exact, values)), 1 << BITS)
    mean = sum(map(Fraction, values)) / len(values)
    assert from_exact(total, len(values)) == float(mean)


@given(FLOATS, FLOATS)
def test_products_are_exact(x: list[float], y: list[float]) -> None:
    pairs = list(zip(x, y, strict=False))
    total = exact_products(*np.array(pairs).T)
    assert Fraction(total, 1 << (2 * BITS)) == sum(Fraction(a) * Fraction(b) for a, b in pairs)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ties", [False, True])
def test_regression(seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    gold = rng.normal(size=50)
    predicted = gold * rng.normal() + rng.normal(size=50)
    if ties:
        gold, predicted = np.round(gold), np.round(predicted, 1)
    metrics = RankedRegressionScores().update(predicted, gold).compute()
    assert metrics["pearson"] == pytest.approx(stats.pearsonr(predicted, gold).statistic, abs=1e-13)
    assert metrics["spearman"] == pytest.approx(stats.spearmanr(predicted, gold).statistic, abs=1e-13)
    assert metrics["mse"] == pytest.approx(float(np.mean((predicted - gold) ** 2)), rel=1e-14)
    assert metrics["count"] == 50 and metrics["notes"] == []
    assert ranks(gold).tolist() == stats.rankdata(gold).tolist()
    without_ranks = RegressionScores().update(torch.tensor(predicted), gold.tolist()).compute()
    assert without_ranks == {name: value for name, value in metrics.items() if name != "spearman"}


@pytest.mark.parametrize("ties", [False, True])
def test_the_interval_of_spearman_is_that_of_a_plain_bootstrap(ties: bool) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=150)
    y = x + rng.normal(size=150)
    if ties:
        x, y = x.round(), (2 * y).round() / 2
    resamples = rng.integers(0, 150, (1000, 150))  # indices of examples
    correlations = [stats.spearmanr(x[indices], y[indices])[0] for indices in resamples]
    expected = np.quantile(correlations, [0.025, 0.975]).tolist()
    interval = RankedRegressionScores().update(x, y).intervals(0)["spearman"]
    assert [interval["low"], interval["high"]] == pytest.approx(expected, abs=0.025)
    order = rng.permutation(150)
    batches = [order[start : start + 7] for start in range(0, 150, 7)]
    parts = [RankedRegressionScores().update(x[indices], y[indices]) for indices in batches]
    assert merge_all(parts).intervals(0)["spearman"] == interval, "the order does not matter"
    for predicted, gold in (([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]), ([5.0], [3.0])):
        interval = RankedRegressionScores().update(predicted, gold).intervals(0)["spearman"]
        assert (interval["low"], interval["high"]) == (0, 0), "a constant has no correlation"


def test_spearman_with_weights_equals_repeated_examples() -> None:
    rng = np.random.default_rng(8)
    x, y = rng.integers(0, 9, (2, 40))
    for _ in range(20):
        times = rng.poisson(1, 40)
        expected = stats.spearmanr(np.repeat(x, times), np.repeat(y, times))[0]
        assert _spearman(x, y, times) == pytest.approx(expected, abs=1e-12)


def test_large_and_tiny_numbers_lose_no_precision() -> None:
    rng = np.random.default_rng(0)
    gold, predicted = rng.normal(size=(2, 100)) + 1e9
    metrics = RegressionScores().update(predicted, gold).compute()
    assert metrics["pearson"] == pytest.approx(np.corrcoef(predicted - 1e9, gold - 1e9)[0, 1], abs=1e-13)
    assert metrics["mse"] == pytest.approx(float(np.mean((predicted - gold) ** 2)), rel=1e-13)
    tiny = [1e-300, 2e-300, 4e-300]  # their squares are 0 in float64
    assert RegressionScores().update(tiny, [1.0, 2.0, 4.0]).compute()["pearson"] == pytest.approx(1, abs=1e-15)


def test_half_precision_tensors() -> None:
    values = torch.tensor([0.5, 1.5, 2.5], dtype=torch.bfloat16, requires_grad=True)
    assert RegressionScores().update(values, [1, 2, 3]).compute()["pearson"] == 1


def test_a_constant_has_no_correlation() -> None:
    metrics = RankedRegressionScores().update([0.1] * 3, [1.0, 2.0, 4.0]).compute()
    assert (metrics["pearson"], metrics["spearman"]) == (0, 0) and metrics["mse"] > 0
    assert metrics["notes"] == [
        "all predictions are equal: a correlation with a constant is not defined, and reported as 0"
    ]
    assert len(RegressionScores().update([1.0], [2.0]).compute()["notes"]) == 2


@pytest.mark.parametrize("metric", [RegressionScores(), RankedRegressionScores()])
@pytest.mark.parametrize(
    ("predicted", "gold", "message"),
    [
        ([1.0, math.nan], [1.0, 2.0], 'the prediction of example "s2" is nan: .* look for a loss that diverged'),
        ([1.0, 2.0], [math.inf, 2.0], 'the gold score of example "s1" is inf'),
        (["a", "b"], [1.0, 2.0], r"the prediction should be numbers \(one number for each example\), got 'a'"),
        (
            [[1.0], [2.0]],
            [1.0, 2.0],
            r"the prediction should be one number for each example, got an array of shape \(2, 1\)",
        ),
        ([1.0, 2.0], [1.0], "2 predictions for 1 gold scores"),
    ],
)
def test_bad_input_of_regression(metric: Any, predicted: Any, gold: Any, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        metric.update(predicted, gold, ids=["s1", "s2"])


def test_loss_of_tokens() -> None:
    rng = np.random.default_rng(0)
    losses, tokens = rng.exponential(20, 30), rng.integers(0, 9, 30)
    metrics = TokenLoss().update(losses, tokens).compute()
    assert metrics["loss"] == float(sum(map(Fraction, losses)) / int(tokens.sum()))
    assert metrics["perplexity"] == math.exp(metrics["loss"])
    assert metrics["tokens"] == tokens.sum()
    huge = TokenLoss().update([1e4], [1]).compute()
    assert huge["perplexity"] == math.inf
    assert huge["notes"] == ["the perplexity exp(10000) is more than a float holds"]
    with pytest.raises(HeedfulError, match=r"the number of tokens of example at index 1 .* is 1\.5: give a whole"):
        TokenLoss().update([1.0, 1.0], [1, 1.5])
    with pytest.raises(HeedfulError, match='the loss of example "b" is nan'):
        TokenLoss().update([1.0, math.nan], [1, 1], ids=["a", "b"])
    with pytest.raises(HeedfulError, match="the loss of no examples"):
        TokenLoss().update([0.0], [0]).compute()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration(seed: int, bins: int) -> None:
    rng = np.random.default_rng(seed)
    p = np.round(rng.random(200), 1 + seed % 3)  # many of them are borders of bins
    right = rng.random(200) < p**2
    metrics = Calibration(bins=bins).update(p, right).compute()
    accuracies, confidences = calibration_curve(right, p, n_bins=bins)
    assert [row["accuracy"] for row in metrics["table"]] == pytest.approx(accuracies)
    assert [row["confidence"] for row in metrics["table"]] == pytest.approx(confidences)
    sizes = np.array([row["count"] for row in metrics["table"]])
    assert metrics["ece"] == pytest.approx(float((abs(accuracies - confidences) * sizes).sum() / 200))
    assert metrics["largest_gap"] == pytest.approx(float(abs(accuracies - confidences).max()))
    assert metrics["count"] == sizes.sum() == 200
    assert metrics["accuracy"] == pytest.approx(right.mean())
    for row in metrics["table"]:
        assert row["low"] - 1e-12 <= row["confidence"] <= row["high"] + 1e-12


def test_calibration_of_classes() -> None:
    rows = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]], dtype=torch.float64)
    metric = Calibration().update_classes(rows, [0, 1, 0])
    assert metric == Calibration().update([0.9, 0.8, 0.6], [1, 1, 0])
    assert metric.update_classes([], []) == metric
    with pytest.raises(HeedfulError, match=r"the probability of example at index 1 .* is nan"):
        metric.update_classes([[0.5, 0.5], [math.nan, 0.5]], [0, 1])
    with pytest.raises(HeedfulError, match=r'example "b" has 1\.5, which should be a probability from 0 to 1'):
        metric.update([0.5, 1.5], [1, 1], ids=["a", "b"])
    with pytest.raises(HeedfulError, match=r"example at index 0 .* has 2, which should be 0 \(wrong\) or 1"):
        metric.update([0.5], [2])


def test_best_temperature() -> None:
    """Labels are drawn from softmax(scores); with scores 2.5 times as large, the best temperature is 2.5."""
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(20_000, 3)) * 2
    calibrated = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    gold = (calibrated.cumsum(1) < generator.random((20_000, 1))).sum(1)
    overconfident = np.exp(2.5 * scores) / np.exp(2.5 * scores).sum(1, keepdims=True)
    assert best_temperature(calibrated, gold) == pytest.approx(1, abs=0.05)
    assert best_temperature(overconfident, gold) == pytest.approx(2.5, abs=0.1)
    assert best_temperature(np.array([[0.9, 0.1]]), np.array([0])) < 0.1, "all predictions are right"
    assert best_temperature(np.array([[1.0, 0.0]] * 2), np.array([0, 1])) > 19
