"""Accuracy over coverage: the accuracy of a classifier that abstains below a confidence threshold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from heedful.tasks.metrics.base import Ids, Result, Values, as_numbers, require_examples, require_same_length

STEP = 0.05  # distance of two thresholds, in log(p / (1 - p))
THRESHOLDS: NDArray[np.float64] = np.unique(np.round(1 / (1 + np.exp(-STEP * np.arange(-100, 281))), 6))
COVERAGES = tuple(percent / 100 for percent in range(100, 0, -5))  # coverages in the table


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Accuracy of the answers above a confidence threshold, for several shares of answers (El-Yaniv and Wiener 2010).

    Thresholds of the confidence p are equally spaced in log(p / (1 - p)), so that there are many near 1.
    """

    # (examples, correct examples) below the first threshold, then from each threshold to the next; (): no examples yet
    counts: tuple[tuple[int, int], ...] = ()

    def update(self, confidences: Values, correct: Values, ids: Ids = None) -> Coverage:
        """Add examples: the probability of each prediction, and whether it is correct."""
        p = as_numbers(confidences, "confidence", ids)
        outcomes = as_numbers(correct, "outcome", ids)
        require_same_length(len(p), len(outcomes), "confidences", "outcomes")
        bin_of = np.searchsorted(THRESHOLDS, p, side="right")
        bin_count = len(THRESHOLDS) + 1
        examples = np.bincount(bin_of, minlength=bin_count)
        correct_examples = np.bincount(bin_of, weights=outcomes, minlength=bin_count).astype(np.int64)
        pairs = zip(examples.tolist(), correct_examples.tolist(), strict=True)
        return self.merge_state(replace(self, counts=tuple(pairs)))

    def merge_state(self, incoming: Coverage) -> Coverage:
        """Return the metric over the examples of both metrics."""
        if not self.counts or not incoming.counts:
            return replace(self, counts=self.counts or incoming.counts)
        added = ((a + c, b + d) for (a, b), (c, d) in zip(self.counts, incoming.counts, strict=True))
        return replace(self, counts=tuple(added))

    def compute(self) -> Result:
        """Return {"count", "table"}. Rows of the table have "min_confidence", "coverage", "count" and "accuracy".

        For each coverage of 100 %, 95 %, ..., 5 % there is a row with the highest threshold that reaches the coverage.
        """
        total = sum(count for count, _ in self.counts)
        require_examples(total, "accuracy over coverage")
        counts = np.array(self.counts, np.int64)[::-1].cumsum(axis=0)[::-1]  # counts at or above each threshold
        thresholds = np.concatenate([[0.0], THRESHOLDS])
        rows = {}
        for coverage in COVERAGES:
            index = int(np.flatnonzero(counts[:, 0] >= np.ceil(coverage * total - 1e-9))[-1])
            count, correct_count = counts[index].tolist()
            rows[index] = {
                "min_confidence": float(thresholds[index]),
                "coverage": count / total,
                "count": count,
                "accuracy": correct_count / count,
            }
        return {"count": total, "table": list(rows.values())}
