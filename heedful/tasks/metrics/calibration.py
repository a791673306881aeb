"""Calibration of probabilities: temperature scaling (`best_temperature`) and the expected calibration error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64, Int64

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import (
    Ids,
    Result,
    Values,
    as_array,
    as_finite,
    as_numbers,
    exact_sum,
    example_name,
    from_exact,
    require_equal,
    require_examples,
    require_same_length,
)


def best_temperature(probabilities: Float64[np.ndarray, "n classes"], gold: Int64[np.ndarray, " n"]) -> float:
    """Return the temperature T that minimizes the mean of -log softmax(log p / T)[gold] (Guo et al. 2017, section 4.2).

    Here p is the softmax of a model's scores. Dividing the scores by T does not change which class is the most
    probable. T is between 0.05, at which the best class has almost all probability, and 20, at which all classes have
    almost the same.

    Args:
        probabilities: Probability of each class, for each example. Each row sums to 1.
        gold: Id of the gold class of each example.

    >>> p, gold = np.array([[0.99, 0.01]] * 4), np.array([0, 0, 0, 1])
    >>> round(best_temperature(p, gold), 2)  # probability 99 %, accuracy 75 %
    4.18
    """
    from scipy.optimize import minimize_scalar  # slow to import, and not needed for predictions
    from scipy.special import logsumexp

    logs = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    examples, gold_ids = np.arange(len(logs)), gold.astype(np.int64)

    def loss(log_temperature: float) -> float:
        scores = logs / math.exp(log_temperature)
        return float((logsumexp(scores, axis=1) - scores[examples, gold_ids]).mean())

    minimum = minimize_scalar(loss, bounds=(math.log(0.05), math.log(20)), method="bounded", options={"xatol": 1e-6})
    return math.exp(minimum.x)


def with_temperature(probabilities: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Return the probabilities of classes after division of the scores by a temperature: softmax(log p / T).

    >>> {label: round(p, 2) for label, p in with_temperature({"a": 0.9, "b": 0.1}, 2.0).items()}
    {'a': 0.75, 'b': 0.25}
    """
    scaled = {label: probability ** (1 / temperature) for label, probability in probabilities.items()}
    total = sum(scaled.values())
    return {label: value / total for label, value in scaled.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Expected calibration error (ECE): the mean difference of confidence and accuracy, over bins of equal width.

    ECE = Σ_m |B_m| / n |accuracy(B_m) - confidence(B_m)|. Bin m of M has the confidences in (m/M, (m+1)/M] (Naeini et
    al. 2015, Guo et al. 2017). A confidence of 0 is in the first bin.
    """

    bins: int = 15  # how many bins
    # for each bin: (examples, correct examples, sum of confidences in units of 2^-1126); (): no examples yet
    counts: tuple[tuple[int, int, int], ...] = ()

    def update(self, confidences: Values, correct: Values, ids: Ids = None) -> Calibration:
        """Add examples: the probability of each prediction, and whether it is correct."""
        p = as_numbers(confidences, "confidence", ids)
        outcomes = as_numbers(correct, "outcome", ids)
        require_same_length(len(p), len(outcomes), "confidences", "outcomes")
        for values, bad, expected in (
            (p, (p < 0) | (p > 1), "a probability from 0 to 1"),
            (outcomes, (outcomes != 0) & (outcomes != 1), "0 (wrong) or 1 (correct)"),
        ):
            if bad.any():
                index = int(bad.argmax())
                raise HeedfulError(f"{example_name(ids, index)} has {values[index]:g}, which should be {expected}")
        bin_of = np.searchsorted(np.arange(1, self.bins) / self.bins, p, side="left")
        new = tuple(
            (int((bin_of == m).sum()), int(outcomes[bin_of == m].sum()), exact_sum(p[bin_of == m]))
            for m in range(self.bins)
        )
        return self.merge_state(replace(self, counts=new))

    def update_classes(self, probabilities: Values, gold: Values, ids: Ids = None) -> Calibration:
        """Add examples by the probabilities of all classes, [examples, classes], and the id of the gold class.

        The most probable class is the prediction.
        """
        rows = as_finite(probabilities, "probability", ids, "one for each class")
        classes = as_array(gold)
        if rows.size == 0:
            return self
        if rows.ndim != 2:
            raise HeedfulError(f"each example should have a probability for each class, got shape {rows.shape}")
        require_same_length(len(rows), len(classes), "rows of probabilities", "gold classes")
        return self.update(rows.max(1), rows.argmax(1) == classes, ids)

    def merge_state(self, incoming: Calibration) -> Calibration:
        """Return the metric over the examples of both metrics."""
        require_equal(self.bins, incoming.bins, "numbers of bins")
        if not self.counts or not incoming.counts:
            return replace(self, counts=self.counts or incoming.counts)
        added = ((a + d, b + e, c + f) for (a, b, c), (d, e, f) in zip(self.counts, incoming.counts, strict=True))
        return replace(self, counts=tuple(added))

    def compute(self) -> Result:
        """Return {"ece", "largest_gap", "accuracy", "confidence", "count", "table"}. The table has no empty bins."""
        count = sum(examples for examples, _, _ in self.counts)
        require_examples(count, "the calibration")
        table = [
            {
                "low": m / self.bins,
                "high": (m + 1) / self.bins,
                "count": examples,
                "confidence": from_exact(total, examples),
                "accuracy": correct / examples,
            }
            for m, (examples, correct, total) in enumerate(self.counts)
            if examples
        ]
        gaps = [abs(row["accuracy"] - row["confidence"]) for row in table]
        return {
            "ece": math.fsum(gap * row["count"] for gap, row in zip(gaps, table, strict=True)) / count,
            "largest_gap": max(gaps),
            "accuracy": sum(correct for _, correct, _ in self.counts) / count,
            "confidence": from_exact(sum(total for _, _, total in self.counts), count),
            "count": count,
            "table": table,
        }
