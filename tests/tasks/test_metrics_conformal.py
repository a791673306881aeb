"""Prediction sets contain the right label as often as was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from heedful.tasks.metrics.conformal import MAX_PROBABILITIES, calibration_probabilities, least_probability


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95])
def test_sets_cover_new_examples_as_often_as_asked(coverage: float) -> None:
    stream = np.random.default_rng(0)
    rates = []
    for _ in range(2000):
        gold = stream.beta(4, 1, size=51)
        rates.append(gold[50] >= least_probability(np.sort(gold[:50]).tolist(), coverage))
    assert np.mean(rates) == pytest.approx(coverage, abs=0.03)


def test_too_few_examples_put_every_label_in_the_set() -> None:
    assert least_probability([0.9] * 5, 0.9) == 0.0
    assert least_probability([], 0.5) == 0.0
    assert least_probability([0.3] + [0.9] * 8, 0.9) == 0.3


def test_many_examples_are_kept_as_quantiles_that_make_no_set_smaller() -> None:
    gold = np.random.default_rng(1).uniform(size=12_345)
    kept = calibration_probabilities(gold)
    assert len(kept) == MAX_PROBABILITIES and list(kept) == sorted(kept)
    for coverage in (0.5, 0.9, 0.99):
        exact = least_probability(np.sort(gold).tolist(), coverage)
        assert exact - 0.005 < least_probability(kept, coverage) <= exact
    assert calibration_probabilities([0.5, 0.25]) == (0.25, 0.5)
