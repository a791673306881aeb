"""Verdicts beside SciPy's t, and what they say of samples whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from heedful.runs.statistics import compare_seeds, mean_and_std, paired_t_interval


def test_intervals_are_the_t_test_s() -> None:
    ours, theirs = np.random.default_rng(0).normal(size=(2, 6)).tolist()
    interval = paired_t_interval(ours, theirs, level=0.99)
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.99)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert paired_t_interval([0.5], [0.4]).low == -np.inf, "one seed says nothing"


def test_they_err_as_seldom_as_they_say() -> None:
    draws = np.random.default_rng(1).normal(size=(400, 2, 5))
    wrong = sum(interval.above or interval.below for interval in (paired_t_interval(*draw.tolist()) for draw in draws))
    assert 6 <= wrong <= 36  # 20 expected of 400; beyond that is less likely than 1 in 1,000


def test_wording() -> None:
    far, near = ([0.9, 0.92, 0.91], [0.5, 0.51, 0.53]), ([0.5, 0.6, 0.4], [0.45, 0.4, 0.6])
    comparison = compare_seeds("a", "b", far, on="plain", comparisons=2)
    assert (
        comparison.startswith("plain: a is above b by 39.7 points (97.5 % interval +") and "2 comparisons" in comparison
    )
    assert "above with 3 of 3 seeds" in comparison and "above with 2 of 3 seeds" in compare_seeds(
        "a", "b", near, on="x"
    )
    assert compare_seeds("b", "a", far[::-1], on="x").startswith("x: b is below a by 39.7 points (95 % interval -")
    assert compare_seeds("a", "b", near, on="x").startswith("x: no difference seen between a and b (95 % interval -")
    few = compare_seeds("a", "b", ([0.9, 0.8], [0.5, 0.4]), on="x")
    assert few == "x: a +40.0 points against b, of 2 seeds, too few for a verdict: give 3 or more"


def test_equal_differences_of_coarse_numbers_are_no_certainty() -> None:
    same = ([0.51, 0.61, 0.71], [0.5, 0.6, 0.7])
    assert "a is above b" in compare_seeds("a", "b", same, on="x")
    assert "no difference seen" in compare_seeds("a", "b", same, on="x", resolution=0.01)
    assert "no difference seen" in compare_seeds("a", "b", ([1.0] * 3, [1.0] * 3), on="x", resolution=0.01)


def test_spread() -> None:
    assert mean_and_std([0.5]) == "50.0 %" and mean_and_std([1.0, 3.0], "number") == "2.00 ± 1.41"
