"""Confidence intervals of scores, from a bootstrap that needs neither the examples in memory nor their order.

Each example counts Poisson(1) times in each of some replicates of the data set (Hanley and MacGibbon 2006; for merging,
Chamandy et al. 2012). How often is a function of the seed and of the example's id alone: the counter-based generator
Philox (Salmon et al. 2011) has them as key.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from numpy.typing import NDArray

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import (
    Ids,
    Result,
    Values,
    as_finite,
    as_numbers,
    require_equal,
    require_examples,
    require_same_length,
    safe_divide,
)

Sums = Float64[np.ndarray, "replicates statistics"]
Formula = Callable[[Sums], Float64[np.ndarray, " replicates"]]  # a number, from the sums of each replicate

MatrixFormula = Callable[[Shaped[np.ndarray, "*more classes classes"]], Float64[np.ndarray, "*more"]]

UNIT = 2.0**-30  # sums are integer multiples of it, so that they do not depend on the order
REPLICATES = 1000
CHUNK = 256  # examples whose weights are in memory at once
# Poisson(1) <= k, for k = 0..20, as shares of 2^64
THRESHOLDS = np.array(
    [
        min(int(math.exp(-1) * math.fsum(1 / math.factorial(i) for i in range(k + 1)) * 2.0**64), 2**64 - 1)
        for k in range(21)
    ],
    dtype=np.uint64,
)


def mean_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return the mean of scores, from the sums of (score, 1)."""
    return safe_divide(sums[:, 0], sums[:, 1])


def f1_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return 2 correct / (gold + predicted), from the sums of (correct, gold, predicted)."""
    return safe_divide(2 * sums[:, 0], sums[:, 1] + sums[:, 2])


def precision_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return correct / predicted, from the same sums."""
    return safe_divide(sums[:, 0], sums[:, 2])


def recall_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return correct / gold, from the same sums."""
    return safe_divide(sums[:, 0], sums[:, 1])


def macro_f1_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return the mean F1 of all labels, from the sums of (correct, gold, predicted) of each label in turn."""
    f1: Float64[np.ndarray, "replicates labels"] = f1_of(sums.reshape(-1, 3)).reshape(len(sums), -1)
    return np.asarray(f1.mean(1), dtype=np.float64)


def confusion_of(classes: int, formula: MatrixFormula) -> Formula:
    """Return a formula of confusion matrices (macro_f1, matthews), from the sums of confusion_statistics."""
    return partial(_of_matrices, classes, formula)  # unlike a lambda it can be pickled


def _of_matrices(classes: int, formula: MatrixFormula, sums: Sums) -> Float64[np.ndarray, " replicates"]:
    return np.asarray(formula(sums.reshape(-1, classes, classes)), dtype=np.float64)


def confusion_statistics(predicted: Values, gold: Values, classes: int) -> Int64[np.ndarray, "examples cells"]:
    """Return for each example 1 in the cell (gold, predicted) of the confusion matrix, and 0 in the others."""
    cells = as_numbers(gold, "gold label") * classes + as_numbers(predicted, "prediction")
    rows: Int64[np.ndarray, "examples cells"] = (cells[:, None] == np.arange(classes**2)).astype(np.int64)
    return rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bootstrap:
    """Sums of some statistics of the examples in each replicate: memory for replicates × statistics."""

    seed: int
    statistics: int
    replicates: int = REPLICATES
    count: int = 0
    sums: Int64[np.ndarray, "replicates statistics"] | None = None  # in units of 2^-30; None: no examples yet

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise HeedfulError(f"seed should be a whole number from 0 to 2^64 - 1, got {self.seed}")

    def update(self, ids: Sequence[object] | NDArray[Any], statistics: Values) -> Bootstrap:
        """Add examples: for each its id, unique in the data set, and a row of numbers."""
        rows = as_finite(statistics, "statistic", ids, "a row of numbers an example")
        if not len(rows):
            return self
        if rows.ndim != 2 or rows.shape[1] != self.statistics:
            raise HeedfulError(f"each example should have {self.statistics} statistics, got shape {rows.shape}")
        require_same_length(len(ids), len(rows), "ids", "rows of statistics")
        sums = np.zeros((self.replicates, self.statistics), dtype=np.int64)
        for start in range(0, len(rows), CHUNK):
            part = slice(start, start + CHUNK)
            whole = np.rint(rows[part] / UNIT)
            _need_room(whole, 21 * CHUNK)
            weights = np.stack([_weights(self.seed, name, self.replicates) for name in ids[part]], 1)
            sums = sums + weights @ whole.astype(np.int64)
            _need_room(sums)
        return self.merge_state(replace(self, sums=sums, count=len(rows)))

    def merge_state(self, incoming: Bootstrap) -> Bootstrap:
        """Return the metric over the examples of both."""
        same = [(state.seed, state.statistics, state.replicates) for state in (self, incoming)]
        require_equal(same[0], same[1], "seeds, statistics or replicates")
        if self.sums is None or incoming.sums is None:
            return replace(
                self, sums=incoming.sums if self.sums is None else self.sums, count=self.count + incoming.count
            )
        _need_room(self.sums)
        _need_room(incoming.sums)
        return replace(self, sums=self.sums + incoming.sums, count=self.count + incoming.count)

    def interval(self, of: Formula = mean_of, level: float = 0.95) -> Result:
        """Return {"low", "high", "level", "replicates", "count"}: quantiles of the replicates (Efron 1979)."""
        if not 0 < level < 1:
            raise HeedfulError(f"level should be between 0 and 1, like 0.95, got {level}")
        return _middle(self.values(of), level, self.count)

    def values(self, of: Formula = mean_of) -> Float64[np.ndarray, " replicates"]:
        """Return the number in each replicate."""
        require_examples(self.count, "an interval")
        assert self.sums is not None
        return of(self.sums * UNIT)


def mean_interval(scores: Values, *, seed: int, ids: Ids = None, level: float = 0.95, replicates: int = 1000) -> Result:
    """Return the mean of scores and its interval; without ids, examples are numbered.

    >>> found = mean_interval([1.0] * 80 + [0.0] * 20, seed=7)
    >>> found["mean"], 0.70 < found["low"] < 0.75, 0.85 < found["high"] < 0.90
    (0.8, True, True)
    """
    numbers = as_numbers(scores, "score", ids)
    require_examples(len(numbers), "an interval")
    names = range(len(numbers)) if ids is None else ids
    rows = np.stack((numbers, np.ones_like(numbers)), 1)
    interval = Bootstrap(seed=seed, statistics=2, replicates=replicates).update(names, rows).interval(level=level)
    return {"mean": math.fsum(numbers) / len(numbers)} | interval


def paired_difference(
    first: Float64[np.ndarray, " replicates"],
    second: Float64[np.ndarray, " replicates"],
    *,
    count: int,
    level: float = 0.95,
) -> Result:
    """Return the interval of first - second, from replicates of the same examples with the same seed.

    A replicate has the same weights for both, so what makes an example hard for both drops out of the difference.

    >>> found = paired_difference(np.array([0.5, 0.7]), np.array([0.4, 0.5]), count=10)
    >>> round(found["low"], 4), round(found["high"], 4)
    (0.1025, 0.1975)
    """
    require_same_length(len(first), len(second), "replicates", "replicates of the other")
    return _middle(first - second, level, count)


def _weights(seed: int, name: object, replicates: int) -> Int64[np.ndarray, " replicates"]:
    """Return how often an example counts in each replicate."""
    digest = hashlib.blake2b(str(name).encode(), digest_size=8).digest()
    key = np.array([seed, int.from_bytes(digest, "little")], dtype=np.uint64)
    return np.searchsorted(THRESHOLDS, np.random.Philox(key=key).random_raw(replicates), side="right")


def resampled_interval(
    count: int, formula: Callable[[Int64[np.ndarray, " examples"]], float], *, seed: int, level: float = 0.95
) -> Result:
    """Return the interval of a number that is not a formula of sums; each replicate is sampled by itself.

    Args:
        count: Number of examples.
        formula: The number, from how often each example counts. That depends on an example's index, not on its id.
    """
    require_examples(count, "an interval")
    keys = (np.array([seed, replicate], dtype=np.uint64) for replicate in range(REPLICATES))
    values = [
        formula(np.searchsorted(THRESHOLDS, np.random.Philox(key=key).random_raw(count), "right")) for key in keys
    ]
    return _middle(np.array(values), level, count)


def _middle(values: Float64[np.ndarray, " replicates"], level: float, count: int) -> Result:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return {"low": float(low), "high": float(high), "level": level, "replicates": len(values), "count": count}


def _need_room(sums: NDArray[Any], times: int = 1) -> None:
    if np.abs(sums).max() * float(times) >= 2.0**62:
        raise HeedfulError(
            f"the statistics add up to more than {2.0**62 * UNIT:.3g}, which a bootstrap cannot hold: scale them down"
        )
