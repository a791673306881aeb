"""Coverage: the accuracy of the most confident answers, compared with direct counts."""

from __future__ import annotations

import numpy as np
import pytest

from heedful.errors import HeedfulError
from heedful.tasks.metrics import Coverage


def test_a_row_counts_the_examples_above_its_threshold() -> None:
    rng = np.random.default_rng(2)
    confidence = rng.beta(8, 1, size=2000)
    correct = rng.random(2000) < confidence
    table = Coverage().update(confidence, correct).compute()["table"]
    assert (table[0]["coverage"], table[0]["accuracy"]) == pytest.approx((1.0, correct.mean()))
    assert table[0]["min_confidence"] <= confidence.min()
    for row, percent in zip(table, range(100, 0, -5), strict=True):
        answered = confidence >= row["min_confidence"]
        assert row["count"] == answered.sum()
        assert row["coverage"] == answered.mean() >= percent / 100
        assert row["accuracy"] == pytest.approx(correct[answered].mean())
    assert table[-1]["accuracy"] > table[0]["accuracy"]


def test_equal_confidences_share_a_row() -> None:
    table = Coverage().update([1.0, 1.0, 1.0, 0.2], [1, 1, 0, 0]).compute()["table"]
    assert [(row["count"], row["coverage"]) for row in table] == [(4, 1.0), (3, 0.75)]
    assert table[1]["accuracy"] == pytest.approx(2 / 3)
    assert table[0]["min_confidence"] <= 0.2


def test_coverage_of_no_examples() -> None:
    with pytest.raises(HeedfulError):
        Coverage().compute()
