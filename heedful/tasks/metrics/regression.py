"""Metrics of numbers: errors and correlations, the loss of tokens, the calibration of probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import (
    BITS,
    Ids,
    Result,
    Values,
    as_array,
    as_finite,
    as_numbers,
    exact_products,
    exact_sum,
    example_name,
    from_exact,
    require_equal,
    require_examples,
    require_same_length,
)
from heedful.tasks.metrics.bootstrap import resampled_interval

Rows = Float64[np.ndarray, "_ columns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RegressionScores:
    """Mean squared error and Pearson's r in constant memory, from sums that are never rounded.

    r = (n Σxy - Σx Σy) / sqrt((n Σx² - (Σx)²) (n Σy² - (Σy)²)) (Pearson 1895), which cancels badly in floating point
    and not at all in whole numbers.
    """

    count: int = 0
    x: int = 0  # the sums of predictions and gold scores, in units of 2^-1126
    y: int = 0
    xx: int = 0  # the sums of products, in units of 2^-2252
    yy: int = 0
    xy: int = 0

    def update(self, predicted: Values, gold: Values, ids: Ids = None) -> RegressionScores:
        """Add examples: a predicted and a gold number each."""
        x, y = as_numbers(predicted, "prediction", ids), as_numbers(gold, "gold score", ids)
        require_same_length(len(x), len(y), "predictions", "gold scores")
        new = {"xx": exact_products(x, x), "yy": exact_products(y, y), "xy": exact_products(x, y)}
        return self.merge_state(replace(self, count=len(x), x=exact_sum(x), y=exact_sum(y), **new))

    def merge_state(self, incoming: RegressionScores) -> RegressionScores:
        """Return the metric over the examples of both."""
        names = ("count", "x", "y", "xx", "yy", "xy")
        return replace(self, **{name: getattr(self, name) + getattr(incoming, name) for name in names})

    def compute(self) -> Result:
        """Return {"pearson", "mse", "count", "notes"}; a correlation with a constant is 0, and noted."""
        require_examples(self.count, "the error")
        notes = [
            f"all {what} are equal: a correlation with a constant is not defined, and reported as 0"
            for what, spread in (("predictions", self._spread_x()), ("gold scores", self._spread_y()))
            if not spread
        ]
        error = from_exact(self.xx - 2 * self.xy + self.yy, self.count, 2 * BITS)
        return {"pearson": self._pearson(), "mse": error, "count": self.count, "notes": notes}

    def _spread_x(self) -> int:
        return self.count * self.xx - self.x**2

    def _spread_y(self) -> int:
        return self.count * self.yy - self.y**2

    def _pearson(self) -> float:
        both = self._spread_x() * self._spread_y()
        if not both:
            return 0.0
        shared = self.count * self.xy - self.x * self.y
        return math.copysign(math.sqrt(shared**2 / both), -1 if shared < 0 else 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowStore:
    """Values of every example, in few arrays: adding n examples one at a time copies n log n of them at most."""

    parts: tuple[Rows, ...] = ()

    def append(self, new: Rows) -> RowStore:
        """Return a store with more rows; their order is not kept."""
        parts = list(self.parts)
        while parts and len(parts[-1]) <= 2 * len(new):
            new = np.concatenate((parts.pop(), new))
        return RowStore(parts=(*parts, new)) if len(new) else self

    def merge_state(self, incoming: RowStore) -> RowStore:
        """Return the rows of both."""
        store = self
        for part in incoming.parts:
            store = store.append(part)
        return store

    def rows(self, columns: int) -> Rows:
        """Return all rows."""
        return np.concatenate((np.zeros((0, columns)), *self.parts))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankedRegressionScores:
    """Regression and Spearman's rho, which needs the rank of each value among all: 16 bytes for each example.

    rho is Pearson's r of the ranks, equal values sharing their mean (Spearman 1904). 10^7 examples take 160 MB.
    """

    numbers: RegressionScores = RegressionScores()
    store: RowStore = field(default_factory=RowStore)

    def update(self, predicted: Values, gold: Values, ids: Ids = None) -> RankedRegressionScores:
        """Add examples: a predicted and a gold number each."""
        numbers = self.numbers.update(predicted, gold, ids)
        rows = np.stack((as_numbers(predicted, "prediction", ids), as_numbers(gold, "gold score", ids)), 1)
        return replace(self, numbers=numbers, store=self.store.append(rows))

    def merge_state(self, incoming: RankedRegressionScores) -> RankedRegressionScores:
        """Return the metric over the examples of both."""
        return replace(
            self, numbers=self.numbers.merge_state(incoming.numbers), store=self.store.merge_state(incoming.store)
        )

    def compute(self) -> Result:
        """Return {"pearson", "spearman", "mse", "count", "notes"}."""
        scores = self.numbers.compute()
        x, y = self.store.rows(2).T
        ranked = RegressionScores().update(ranks(x), ranks(y)).compute()
        return {"pearson": scores.pop("pearson"), "spearman": ranked["pearson"]} | scores

    def intervals(self, seed: int) -> dict[str, Result]:
        """Return the interval of "spearman", from replicates whose examples are ranked anew."""
        rows = self.store.rows(2)
        x, y = rows[np.lexsort(rows.T)].T  # independent of the order of updates
        sides = [np.unique(values, return_inverse=True)[1] for values in (x, y)]
        return {"spearman": resampled_interval(len(x), lambda times: _spearman(sides[0], sides[1], times), seed=seed)}


def _spearman(
    x: Int64[np.ndarray, " examples"], y: Int64[np.ndarray, " examples"], times: Int64[np.ndarray, " examples"]
) -> float:
    """Return rho of examples that count `times` each, equal values having equal numbers; 0 if one side is constant."""
    away = []
    for side in (x, y):
        counts = np.bincount(side, times)
        away.append((np.cumsum(counts) - (counts - 1) / 2)[side] - (times.sum() + 1) / 2)
    both = math.sqrt((times * away[0] ** 2).sum() * (times * away[1] ** 2).sum())
    return float(np.clip((times * away[0] * away[1]).sum() / both, -1, 1)) if both else 0.0


def ranks(values: Float64[np.ndarray, " examples"]) -> Float64[np.ndarray, " examples"]:
    """Return the rank of each value from the smallest, from 1; equal values share the mean of their ranks.

    >>> ranks(np.array([0.5, 0.1, 0.5])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """The mean loss of a token, and the perplexity exp(Σ loss / Σ tokens) (Jelinek et al. 1977).

    >>> round(TokenLoss().update([2.0, 4.0], [1, 2]).compute()["perplexity"], 3)
    7.389
    """

    total: int = 0  # nats, in units of 2^-1126
    tokens: int = 0

    def update(self, losses: Values, tokens: Values, ids: Ids = None) -> TokenLoss:
        """Add sequences: the summed loss of each, and its number of tokens.

        The sum of a whole batch works too; its rounding then depends on the batch.
        """
        losses, counts = as_numbers(losses, "loss", ids), as_numbers(tokens, "number of tokens", ids)
        require_same_length(len(losses), len(counts), "losses", "numbers of tokens")
        bad = (counts < 0) | (counts % 1 != 0)
        if bad.any():
            index = int(bad.argmax())
            raise HeedfulError(
                f"the number of tokens of {example_name(ids, index)} is {counts[index]:g}: give a whole number"
            )
        return replace(self, total=self.total + exact_sum(losses), tokens=self.tokens + int(counts.sum()))

    def merge_state(self, incoming: TokenLoss) -> TokenLoss:
        """Return the metric over the examples of both."""
        return replace(self, total=self.total + incoming.total, tokens=self.tokens + incoming.tokens)

    def compute(self) -> Result:
        """Return {"loss", "perplexity", "tokens", "notes"}; the loss in nats."""
        require_examples(self.tokens, "the loss")
        loss = from_exact(self.total, self.tokens)
        try:
            perplexity, notes = math.exp(loss), []
        except OverflowError:
            perplexity, notes = math.inf, [f"the perplexity exp({loss:g}) is more than a float holds"]
        return {"loss": loss, "perplexity": perplexity, "tokens": self.tokens, "notes": notes}


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Expected calibration error over bins of equal width: confidence against accuracy.

    ECE = Σ_m |B_m| / n |accuracy(B_m) - confidence(B_m)|, bin m being (m/M, (m+1)/M] (Naeini et al. 2015, Guo et al.
    2017).
    """

    bins: int = 15
    counts: tuple[tuple[int, int, int], ...] = ()  # for each bin: examples, correct ones, confidence in 2^-1126

    def update(self, confidences: Values, correct: Values, ids: Ids = None) -> Calibration:
        """Add examples: the probability of the prediction, and whether it was correct."""
        p, right = as_numbers(confidences, "confidence", ids), as_numbers(correct, "outcome", ids)
        require_same_length(len(p), len(right), "confidences", "outcomes")
        for values, bad, expected in (
            (p, (p < 0) | (p > 1), "a probability from 0 to 1"),
            (right, (right != 0) & (right != 1), "0 or 1: was it right?"),
        ):
            if bad.any():
                index = int(bad.argmax())
                raise HeedfulError(f"{example_name(ids, index)} has {values[index]:g}, which should be {expected}")
        where = np.searchsorted(np.arange(1, self.bins) / self.bins, p, side="left")
        new = tuple(
            (int((where == m).sum()), int(right[where == m].sum()), exact_sum(p[where == m])) for m in range(self.bins)
        )
        return self.merge_state(replace(self, counts=new))

    def update_classes(self, probabilities: Values, gold: Values, ids: Ids = None) -> Calibration:
        """Add examples: the probabilities of all classes, the largest being predicted, and the gold class."""
        rows = as_finite(probabilities, "probability", ids, "one for each class")
        numbers = as_array(gold)
        if rows.size == 0:
            return self
        if rows.ndim != 2:
            raise HeedfulError(f"each example should have a probability for each class, got shape {rows.shape}")
        require_same_length(len(rows), len(numbers), "rows of probabilities", "gold classes")
        return self.update(rows.max(1), rows.argmax(1) == numbers, ids)

    def merge_state(self, incoming: Calibration) -> Calibration:
        """Return the metric over the examples of both."""
        require_equal(self.bins, incoming.bins, "numbers of bins")
        if not self.counts or not incoming.counts:
            return replace(self, counts=self.counts or incoming.counts)
        added = ((a + d, b + e, c + f) for (a, b, c), (d, e, f) in zip(self.counts, incoming.counts, strict=True))
        return replace(self, counts=tuple(added))

    def compute(self) -> Result:
        """Return {"ece", "largest_gap", "accuracy", "confidence", "count", "table" of bins with examples}."""
        count = sum(examples for examples, _, _ in self.counts)
        require_examples(count, "the calibration")
        table: list[dict[str, Any]] = [
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
