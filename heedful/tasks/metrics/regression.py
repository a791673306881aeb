"""Metrics of regression: mean squared error, Pearson's r and Spearman's rho."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float64, Int64

from heedful.tasks.metrics.base import (
    BITS,
    Ids,
    Result,
    Values,
    as_numbers,
    exact_products,
    exact_sum,
    from_exact,
    require_examples,
    require_same_length,
)
from heedful.tasks.metrics.bootstrap import resampled_interval
from heedful.tasks.metrics.row_store import RowStore


@dataclass(frozen=True, kw_only=True, slots=True)
class RegressionScores:
    """Mean squared error and Pearson's r in constant memory, from exact sums.

    r = (n Σxy - Σx Σy) / sqrt((n Σx² - (Σx)²) (n Σy² - (Σy)²)) (Pearson 1895). The sums are integers, because the
    differences would lose precision in floating point.
    """

    count: int = 0  # examples
    x: int = 0  # sum of predictions x, in units of 2^-1126
    y: int = 0  # sum of gold scores y, in units of 2^-1126
    xx: int = 0  # sums of products, in units of 2^-2252
    yy: int = 0
    xy: int = 0

    def update(self, predicted: Values, gold: Values, ids: Ids = None) -> RegressionScores:
        """Add examples by their predicted and gold scores."""
        x = as_numbers(predicted, "prediction", ids)
        y = as_numbers(gold, "gold score", ids)
        require_same_length(len(x), len(y), "predictions", "gold scores")
        new = {"xx": exact_products(x, x), "yy": exact_products(y, y), "xy": exact_products(x, y)}
        return self.merge_state(replace(self, count=len(x), x=exact_sum(x), y=exact_sum(y), **new))

    def merge_state(self, incoming: RegressionScores) -> RegressionScores:
        """Return the metric over the examples of both metrics."""
        names = ("count", "x", "y", "xx", "yy", "xy")
        return replace(self, **{name: getattr(self, name) + getattr(incoming, name) for name in names})

    def compute(self) -> Result:
        """Return {"pearson", "mse", "count", "notes"}. A correlation with a constant is reported as 0, with a note."""
        require_examples(self.count, "the error")
        notes = [
            f"all {what} are equal: a correlation with a constant is not defined, and reported as 0"
            for what, variance in zip(("predictions", "gold scores"), self._scaled_variances(), strict=True)
            if not variance
        ]
        error = from_exact(self.xx - 2 * self.xy + self.yy, self.count, 2 * BITS)
        return {"pearson": self._pearson(), "mse": error, "count": self.count, "notes": notes}

    def _scaled_variances(self) -> tuple[int, int]:
        """Return n² times the variances of x and y."""
        return self.count * self.xx - self.x**2, self.count * self.yy - self.y**2

    def _pearson(self) -> float:
        """Return Pearson's r, or 0 if predictions or gold scores are constant."""
        squared_denominator = math.prod(self._scaled_variances())
        if not squared_denominator:
            return 0.0
        scaled_covariance = self.count * self.xy - self.x * self.y  # times n²
        return math.copysign(math.sqrt(scaled_covariance**2 / squared_denominator), -1 if scaled_covariance < 0 else 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankedRegressionScores:
    """Mean squared error, Pearson's r and Spearman's rho. All scores are stored, in 16 bytes per example.

    rho is Pearson's r of the ranks, where equal values share the mean of their ranks (Spearman 1904).
    """

    moments: RegressionScores = RegressionScores()
    store: RowStore = field(default_factory=RowStore)

    def update(self, predicted: Values, gold: Values, ids: Ids = None) -> RankedRegressionScores:
        """Add examples by their predicted and gold scores."""
        moments = self.moments.update(predicted, gold, ids)
        rows = np.stack((as_numbers(predicted, "prediction", ids), as_numbers(gold, "gold score", ids)), 1)
        return replace(self, moments=moments, store=self.store.append(rows))

    def merge_state(self, incoming: RankedRegressionScores) -> RankedRegressionScores:
        """Return the metric over the examples of both metrics."""
        return replace(
            self, moments=self.moments.merge_state(incoming.moments), store=self.store.merge_state(incoming.store)
        )

    def compute(self) -> Result:
        """Return {"pearson", "spearman", "mse", "count", "notes"}."""
        scores = self.moments.compute()
        x, y = self.store.rows(2).T
        ranked = RegressionScores().update(ranks(x), ranks(y)).compute()
        return {"pearson": scores.pop("pearson"), "spearman": ranked["pearson"]} | scores

    def intervals(self, seed: int) -> dict[str, Result]:
        """Return the interval of "spearman". The scores of each bootstrap replicate are ranked anew.

        `heedful.tasks.regress.PearsonBootstrap` computes the interval of "pearson".
        """
        rows = self.store.rows(2)
        x, y = rows[np.lexsort(rows.T)].T  # sorted, so that the order of updates does not matter
        x_ranks, y_ranks = (np.unique(values, return_inverse=True)[1] for values in (x, y))  # dense, from 0
        return {"spearman": resampled_interval(len(x), lambda counts: _spearman(x_ranks, y_ranks, counts), seed=seed)}


def _spearman(
    x_ranks: Int64[np.ndarray, " examples"],
    y_ranks: Int64[np.ndarray, " examples"],
    counts: Int64[np.ndarray, " examples"],
) -> float:
    """Return rho of examples that occur `counts` times each, from their dense ranks, or 0 if a side is constant."""
    deviations = []  # of x and y: rank of each example minus the mean rank
    for dense in (x_ranks, y_ranks):
        ties = np.bincount(dense, counts)  # occurrences of each value
        mean_rank_of_value = np.cumsum(ties) - (ties - 1) / 2
        deviations.append(mean_rank_of_value[dense] - (counts.sum() + 1) / 2)
    x, y = deviations
    denominator = math.sqrt((counts * x**2).sum() * (counts * y**2).sum())
    return float(np.clip((counts * x * y).sum() / denominator, -1, 1)) if denominator else 0.0


def ranks(values: Float64[np.ndarray, " examples"]) -> Float64[np.ndarray, " examples"]:
    """Return the ascending rank of each value, from 1. Equal values share the mean of their ranks.

    >>> ranks(np.array([0.5, 0.1, 0.5])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, dense, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[dense]
