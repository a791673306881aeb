"""Paired t-intervals agree with SciPy's, and verdicts are right for samples from known distributions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from heedful.runs.statistics import compare_seeds, mean_and_std, paired_t_interval


def test_intervals_are_the_t_test_s() -> None:
    first, second = np.random.default_rng(0).normal(size=(2, 6)).tolist()
    interval = paired_t_interval(first, second, level=0.99)
    expected = stats.ttest_rel(first, second).confidence_interval(0.99)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert paired_t_interval([0.5], [0.4]).low == -np.inf, "the interval of one seed is infinite"


def test_they_err_as_seldom_as_they_say() -> None:
    """Both arms have the same distribution, so every verdict is wrong, and 5 % of the intervals should give one."""
    experiments = np.random.default_rng(1).normal(size=(400, 2, 5))  # [experiments, arms, seeds]
    intervals = [paired_t_interval(*arms.tolist()) for arms in experiments]
    wrong_verdicts = sum(interval.above or interval.below for interval in intervals)
    assert 6 <= wrong_verdicts <= 36  # 20 are expected; a number outside has a probability below 1 in 1,000


def test_wording() -> None:
    far = ([0.9, 0.92, 0.91], [0.5, 0.51, 0.53])
    above = compare_seeds("a", "b", far, on="plain", comparisons=2)
    assert above.startswith("plain: a is above b by 39.7 points (97.5 % interval +")
    assert "above with 3 of 3 seeds" in above
    assert "2 comparisons" in above
    below = compare_seeds("b", "a", far[::-1], on="x")
    assert below.startswith("x: b is below a by 39.7 points (95 % interval -")
    near = ([0.5, 0.6, 0.4], [0.45, 0.4, 0.6])
    no_difference = compare_seeds("a", "b", near, on="x")
    assert no_difference.startswith("x: no difference seen between a and b (95 % interval -")
    assert "above with 2 of 3 seeds" in no_difference
    few = compare_seeds("a", "b", ([0.9, 0.8], [0.5, 0.4]), on="x")
    assert few == "x: a +40.0 points against b, of 2 seeds, too few for a verdict: give 3 or more"


def test_equal_differences_of_coarse_numbers_are_no_certainty() -> None:
    equal_differences = ([0.51, 0.61, 0.71], [0.5, 0.6, 0.7])
    assert "a is above b" in compare_seeds("a", "b", equal_differences, on="x")
    assert "no difference seen" in compare_seeds("a", "b", equal_differences, on="x", resolution=0.01)
    assert "no difference seen" in compare_seeds("a", "b", ([1.0] * 3, [1.0] * 3), on="x", resolution=0.01)


def test_means_are_formatted_with_their_standard_deviation() -> None:
    assert mean_and_std([0.5]) == "50.0 %"
    assert mean_and_std([1.0, 3.0], "number") == "2.00 ± 1.41"
