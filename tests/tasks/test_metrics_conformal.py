"""Conformal prediction: prediction sets contain the right label as often as requested."""

from __future__ import annotations

import numpy as np
import pytest

from heedful.tasks.metrics.conformal import MAX_PROBABILITIES, calibration_probabilities, least_probability


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95])
def test_prediction_sets_have_the_requested_coverage(coverage: float) -> None:
    rng = np.random.default_rng(0)
    is_covered = []
    for _ in range(2000):
        gold = rng.beta(4, 1, size=51)
        is_covered.append(gold[50] >= least_probability(np.sort(gold[:50]).tolist(), coverage))
    assert np.mean(is_covered) == pytest.approx(coverage, abs=0.03)


def test_with_few_examples_every_label_is_in_the_set() -> None:
    assert least_probability([0.9] * 5, 0.9) == 0.0
    assert least_probability([], 0.5) == 0.0
    assert least_probability([0.3] + [0.9] * 8, 0.9) == 0.3


def test_many_probabilities_are_stored_as_quantiles() -> None:
    gold = np.random.default_rng(1).uniform(size=12_345)
    quantiles = calibration_probabilities(gold)
    assert len(quantiles) == MAX_PROBABILITIES
    assert list(quantiles) == sorted(quantiles)
    for coverage in (0.5, 0.9, 0.99):
        exact = least_probability(np.sort(gold).tolist(), coverage)
        assert exact - 0.005 < least_probability(quantiles, coverage) <= exact
    assert calibration_probabilities([0.5, 0.25]) == (0.25, 0.5)
