"""Metrics of numbers against scipy, scikit-learn and rational arithmetic."""

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
    random = np.random.default_rng(seed)
    gold = random.normal(size=50)
    predicted = gold * random.normal() + random.normal(size=50)
    if ties:
        gold, predicted = np.round(gold), np.round(predicted, 1)
    metrics = RankedRegressionScores().update(predicted, gold).compute()
    assert metrics["pearson"] == pytest.approx(stats.pearsonr(predicted, gold).statistic, abs=1e-13)
    assert metrics["spearman"] == pytest.approx(stats.spearmanr(predicted, gold).statistic, abs=1e-13)
    assert metrics["mse"] == pytest.approx(float(np.mean((predicted - gold) ** 2)), rel=1e-14)
    assert metrics["count"] == 50 and metrics["notes"] == []
    assert ranks(gold).tolist() == stats.rankdata(gold).tolist()
    constant = RegressionScores().update(torch.tensor(predicted), gold.tolist()).compute()
    assert constant == {name: value for name, value in metrics.items() if name != "spearman"}


@pytest.mark.parametrize("ties", [False, True])
def test_the_interval_of_ranks_is_that_of_a_bootstrap(ties: bool) -> None:
    draw = np.random.default_rng(2)
    x = draw.normal(size=150)
    y = x + draw.normal(size=150)
    if ties:
        x, y = x.round(), (2 * y).round() / 2
    picks = draw.integers(0, 150, (1000, 150))
    plain = np.quantile([stats.spearmanr(x[pick], y[pick])[0] for pick in picks], [0.025, 0.975])
    whole = RankedRegressionScores().update(x, y).intervals(0)["spearman"]
    assert [whole["low"], whole["high"]] == pytest.approx(plain.tolist(), abs=0.025)
    order = draw.permutation(150)
    parts = [RankedRegressionScores().update(x[order[n : n + 7]], y[order[n : n + 7]]) for n in range(0, 150, 7)]
    assert merge_all(parts).intervals(0)["spearman"] == whole, "the order does not matter"
    for pair in ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]), ([5.0], [3.0]):
        flat = RankedRegressionScores().update(*pair).intervals(0)["spearman"]
        assert (flat["low"], flat["high"]) == (0, 0)


def test_weighted_ranks_are_those_of_repeated_examples() -> None:
    draw = np.random.default_rng(8)
    x, y = draw.integers(0, 9, (2, 40))
    for _ in range(20):
        times = draw.poisson(1, 40)
        expected = stats.spearmanr(np.repeat(x, times), np.repeat(y, times))[0]
        assert _spearman(x, y, times) == pytest.approx(expected, abs=1e-12)


def test_no_digits_are_lost_far_from_zero() -> None:
    random = np.random.default_rng(0)
    gold, predicted = random.normal(size=(2, 100)) + 1e9
    metrics = RegressionScores().update(predicted, gold).compute()
    assert metrics["pearson"] == pytest.approx(np.corrcoef(predicted - 1e9, gold - 1e9)[0, 1], abs=1e-13)
    assert metrics["mse"] == pytest.approx(float(np.mean((predicted - gold) ** 2)), rel=1e-13)
    tiny = (
        RegressionScores().update([1e-300, 2e-300, 4e-300], [1.0, 2.0, 4.0]).compute()
    )  # whose squares are no doubles
    assert tiny["pearson"] == pytest.approx(1, abs=1e-15)


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
def test_what_regression_refuses(metric: Any, predicted: Any, gold: Any, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        metric.update(predicted, gold, ids=["s1", "s2"])


def test_loss_of_tokens() -> None:
    random = np.random.default_rng(0)
    losses, tokens = random.exponential(20, 30), random.integers(0, 9, 30)
    metrics = TokenLoss().update(losses, tokens).compute()
    assert metrics["loss"] == float(sum(map(Fraction, losses)) / int(tokens.sum()))
    assert metrics["perplexity"] == math.exp(metrics["loss"]) and metrics["tokens"] == tokens.sum()
    huge = TokenLoss().update([1e4], [1]).compute()
    assert huge["perplexity"] == math.inf and huge["notes"] == ["the perplexity exp(10000) is more than a float holds"]
    with pytest.raises(HeedfulError, match=r"the number of tokens of example at index 1 .* is 1\.5: give a whole"):
        TokenLoss().update([1.0, 1.0], [1, 1.5])
    with pytest.raises(HeedfulError, match='the loss of example "b" is nan'):
        TokenLoss().update([1.0, math.nan], [1, 1], ids=["a", "b"])
    with pytest.raises(HeedfulError, match="the loss of no examples"):
        TokenLoss().update([0.0], [0]).compute()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration(seed: int, bins: int) -> None:
    random = np.random.default_rng(seed)
    p = np.round(random.random(200), 1 + seed % 3)  # many on the borders of bins
    right = random.random(200) < p**2
    metrics = Calibration(bins=bins).update(p, right).compute()
    accuracies, confidences = calibration_curve(right, p, n_bins=bins)
    assert [row["accuracy"] for row in metrics["table"]] == pytest.approx(accuracies)
    assert [row["confidence"] for row in metrics["table"]] == pytest.approx(confidences)
    sizes = np.array([row["count"] for row in metrics["table"]])
    assert metrics["ece"] == pytest.approx(float((abs(accuracies - confidences) * sizes).sum() / 200))
    assert metrics["largest_gap"] == pytest.approx(float(abs(accuracies - confidences).max()))
    assert metrics["count"] == sizes.sum() == 200 and metrics["accuracy"] == pytest.approx(right.mean())
    for row in metrics["table"]:
        assert row["low"] - 1e-12 <= row["confidence"] <= row["high"] + 1e-12


def test_calibration_of_classes() -> None:
    rows = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]], dtype=torch.float64)
    one = Calibration().update_classes(rows, [0, 1, 0])
    assert one == Calibration().update([0.9, 0.8, 0.6], [1, 1, 0])
    assert one.update_classes([], []) == one
    with pytest.raises(HeedfulError, match=r"the probability of example at index 1 .* is nan"):
        one.update_classes([[0.5, 0.5], [math.nan, 0.5]], [0, 1])
    with pytest.raises(HeedfulError, match=r'example "b" has 1\.5, which should be a probability from 0 to 1'):
        one.update([0.5, 1.5], [1, 1], ids=["a", "b"])
    with pytest.raises(HeedfulError, match=r"example at index 0 .* has 2, which should be 0 \(wrong\) or 1"):
        one.update([0.5], [2])


def test_the_best_temperature_is_that_of_the_scores() -> None:
    """Labels drawn from softmax(scores) and scores that are 2.5 times as large: the temperature finds 2.5."""
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(20_000, 3)) * 2
    honest = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    gold = (honest.cumsum(1) < generator.random((20_000, 1))).sum(1)
    sure = np.exp(2.5 * scores) / np.exp(2.5 * scores).sum(1, keepdims=True)
    assert best_temperature(honest, gold) == pytest.approx(1, abs=0.05)
    assert best_temperature(sure, gold) == pytest.approx(2.5, abs=0.1)
    assert best_temperature(np.array([[0.9, 0.1]]), np.array([0])) < 0.1, "never wrong"
    assert best_temperature(np.array([[1.0, 0.0]] * 2), np.array([0, 1])) > 19
