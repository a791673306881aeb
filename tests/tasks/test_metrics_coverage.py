"""Accuracy over coverage against a count over all examples, in any parts."""

from __future__ import annotations

import numpy as np
import pytest

from heedful.errors import HeedfulError
from heedful.tasks.metrics import Coverage


def test_each_row_counts_the_examples_from_its_threshold_on() -> None:
    draw = np.random.default_rng(2)
    confidence = draw.beta(8, 1, size=2000)
    correct = draw.random(2000) < confidence
    table = Coverage().update(confidence, correct).compute()["table"]
    assert (table[0]["min_confidence"], table[0]["coverage"], table[0]["accuracy"]) == pytest.approx(
        (table[0]["min_confidence"], 1.0, correct.mean())
    )
    assert table[0]["min_confidence"] <= confidence.min()
    for row, percent in zip(table, range(100, 0, -5), strict=True):
        answered = confidence >= row["min_confidence"]
        assert row["count"] == answered.sum() and row["coverage"] == answered.mean() >= percent / 100
        assert row["accuracy"] == pytest.approx(correct[answered].mean())
    assert table[-1]["accuracy"] > table[0]["accuracy"]


def test_equal_confidences_share_a_row() -> None:
    table = Coverage().update([1.0, 1.0, 1.0, 0.2], [1, 1, 0, 0]).compute()["table"]
    assert [(row["count"], row["coverage"]) for row in table] == [(4, 1.0), (3, 0.75)]
    assert table[1]["accuracy"] == pytest.approx(2 / 3) and table[0]["min_confidence"] <= 0.2


def test_nothing_has_no_accuracy() -> None:
    with pytest.raises(HeedfulError):
        Coverage().compute()
