"""Confidence intervals of metrics by a bootstrap that needs neither all examples in memory nor a fixed order.

Each example occurs Poisson(1) times in each replicate of the data set (Hanley and MacGibbon 2006; for merging, Chamandy
et al. 2012). How often it occurs depends only on the seed and on the example's id, which are the key of the
counter-based random generator Philox (Salmon et al. 2011).
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
Formula = Callable[[Sums], Float64[np.ndarray, " replicates"]]  # computes a metric from the sums of each replicate
MatrixFormula = Callable[[Shaped[np.ndarray, "*more classes classes"]], Float64[np.ndarray, "*more"]]

UNIT = 2.0**-30  # summands are rounded to multiples of this unit, so that sums do not depend on the order
REPLICATES = 1000
CHUNK_EXAMPLES = 256  # examples whose weights are in memory at a time
# probabilities of Poisson(1) <= k for k = 0..20, times 2^64
POISSON_THRESHOLDS = np.array(
    [
        min(int(math.exp(-1) * math.fsum(1 / math.factorial(i) for i in range(k + 1)) * 2.0**64), 2**64 - 1)
        for k in range(21)
    ],
    dtype=np.uint64,
)


def mean_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return the mean score, from the sums of (score, 1)."""
    return safe_divide(sums[:, 0], sums[:, 1])


def f1_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return 2 correct / (gold + predicted), from the sums of (correct, gold, predicted)."""
    return safe_divide(2 * sums[:, 0], sums[:, 1] + sums[:, 2])


def precision_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return correct / predicted, from the sums of (correct, gold, predicted)."""
    return safe_divide(sums[:, 0], sums[:, 2])


def recall_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return correct / gold, from the sums of (correct, gold, predicted)."""
    return safe_divide(sums[:, 0], sums[:, 1])


def macro_f1_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return the mean F1 over labels, from the sums of (correct, gold, predicted) of each label in turn."""
    f1: Float64[np.ndarray, "replicates labels"] = f1_of(sums.reshape(-1, 3)).reshape(len(sums), -1)
    return np.asarray(f1.mean(1), dtype=np.float64)


def confusion_of(classes: int, formula: MatrixFormula) -> Formula:
    """Return a formula that applies a function such as `macro_f1` to the sums of `confusion_statistics`."""
    return partial(_apply_to_matrices, classes, formula)  # can be pickled, unlike a lambda


def _apply_to_matrices(classes: int, formula: MatrixFormula, sums: Sums) -> Float64[np.ndarray, " replicates"]:
    return np.asarray(formula(sums.reshape(-1, classes, classes)), dtype=np.float64)


def confusion_statistics(predicted: Values, gold: Values, classes: int) -> Int64[np.ndarray, "examples cells"]:
    """Return the flattened confusion matrix of each example: 1 in the cell (gold, predicted), else 0."""
    cells = as_numbers(gold, "gold label") * classes + as_numbers(predicted, "prediction")
    rows: Int64[np.ndarray, "examples cells"] = (cells[:, None] == np.arange(classes**2)).astype(np.int64)
    return rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bootstrap:
    """Sums of statistics over the examples of each replicate. Memory: replicates × statistics × 8 bytes."""

    seed: int  # seed of the weights, from 0 to 2^64 - 1
    statistics: int  # statistics per example
    replicates: int = REPLICATES
    count: int = 0  # examples
    sums: Int64[np.ndarray, "replicates statistics"] | None = None  # sums in units of 2^-30; None: no examples yet

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise HeedfulError(f"seed should be a whole number from 0 to 2^64 - 1, got {self.seed}")

    def update(self, ids: Sequence[object] | NDArray[Any], statistics: Values) -> Bootstrap:
        """Add examples.

        Args:
            ids: Id of each example, unique in the data set.
            statistics: The statistics of each example, [examples, statistics].
        """
        rows = as_finite(statistics, "statistic", ids, "a row of numbers an example")
        if not len(rows):
            return self
        if rows.ndim != 2 or rows.shape[1] != self.statistics:
            raise HeedfulError(f"each example should have {self.statistics} statistics, got shape {rows.shape}")
        require_same_length(len(ids), len(rows), "ids", "rows of statistics")
        sums = np.zeros((self.replicates, self.statistics), dtype=np.int64)
        for start in range(0, len(rows), CHUNK_EXAMPLES):
            part = slice(start, start + CHUNK_EXAMPLES)
            units = np.rint(rows[part] / UNIT)
            _check_range(units, 21 * CHUNK_EXAMPLES)
            weights = np.stack([_weights(self.seed, name, self.replicates) for name in ids[part]], 1)
            sums = sums + weights @ units.astype(np.int64)
            _check_range(sums)
        return self.merge_state(replace(self, sums=sums, count=len(rows)))

    def merge_state(self, incoming: Bootstrap) -> Bootstrap:
        """Return the bootstrap over the examples of both bootstraps."""
        settings = [(state.seed, state.statistics, state.replicates) for state in (self, incoming)]
        require_equal(settings[0], settings[1], "seeds, statistics or replicates")
        if self.sums is None or incoming.sums is None:
            return replace(
                self, sums=incoming.sums if self.sums is None else self.sums, count=self.count + incoming.count
            )
        _check_range(self.sums)
        _check_range(incoming.sums)
        return replace(self, sums=self.sums + incoming.sums, count=self.count + incoming.count)

    def interval(self, formula: Formula = mean_of, level: float = 0.95) -> Result:
        """Return {"low", "high", "level", "replicates", "count"}, from quantiles of the replicates (Efron 1979)."""
        if not 0 < level < 1:
            raise HeedfulError(f"level should be between 0 and 1, like 0.95, got {level}")
        return _quantile_interval(self.values(formula), level, self.count)

    def values(self, formula: Formula = mean_of) -> Float64[np.ndarray, " replicates"]:
        """Return the metric in each replicate."""
        require_examples(self.count, "an interval")
        assert self.sums is not None
        return formula(self.sums * UNIT)


def mean_interval(scores: Values, *, seed: int, ids: Ids = None, level: float = 0.95, replicates: int = 1000) -> Result:
    """Return the mean of scores and its interval. Without ids, the index of each example is its id.

    >>> result = mean_interval([1.0] * 80 + [0.0] * 20, seed=7)
    >>> result["mean"], 0.70 < result["low"] < 0.75, 0.85 < result["high"] < 0.90
    (0.8, True, True)
    """
    values = as_numbers(scores, "score", ids)
    require_examples(len(values), "an interval")
    names = range(len(values)) if ids is None else ids
    statistics = np.stack((values, np.ones_like(values)), 1)
    bootstrap = Bootstrap(seed=seed, statistics=2, replicates=replicates).update(names, statistics)
    return {"mean": math.fsum(values) / len(values)} | bootstrap.interval(level=level)


def paired_difference(
    first: Float64[np.ndarray, " replicates"],
    second: Float64[np.ndarray, " replicates"],
    *,
    count: int,
    level: float = 0.95,
) -> Result:
    """Return the interval of first - second, from replicates of the same examples with the same seed.

    In a replicate, an example has the same weight on both sides, so the difficulty of examples cancels out.

    >>> result = paired_difference(np.array([0.5, 0.7]), np.array([0.4, 0.5]), count=10)
    >>> round(result["low"], 4), round(result["high"], 4)
    (0.1025, 0.1975)
    """
    require_same_length(len(first), len(second), "replicates", "replicates of the other")
    return _quantile_interval(first - second, level, count)


def _weights(seed: int, name: object, replicates: int) -> Int64[np.ndarray, " replicates"]:
    """Return how often an example occurs in each replicate."""
    digest = hashlib.blake2b(str(name).encode(), digest_size=8).digest()
    key = np.array([seed, int.from_bytes(digest, "little")], dtype=np.uint64)
    return np.searchsorted(POISSON_THRESHOLDS, np.random.Philox(key=key).random_raw(replicates), side="right")


def resampled_interval(
    count: int, formula: Callable[[Int64[np.ndarray, " examples"]], float], *, seed: int, level: float = 0.95
) -> Result:
    """Return the interval of a metric that cannot be computed from sums.

    Args:
        count: How many examples there are.
        formula: Computes the metric of a replicate from how often each example occurs in the replicate.
        seed: Seed of the replicates. How often an example occurs depends on its index, not on an id.
        level: Share of the replicates in the interval.
    """
    require_examples(count, "an interval")
    values = []
    for replicate in range(REPLICATES):
        generator = np.random.Philox(key=np.array([seed, replicate], dtype=np.uint64))
        weights = np.searchsorted(POISSON_THRESHOLDS, generator.random_raw(count), side="right")
        values.append(formula(weights))
    return _quantile_interval(np.array(values), level, count)


def _quantile_interval(values: Float64[np.ndarray, " replicates"], level: float, count: int) -> Result:
    """Return the interval that contains a share `level` of the replicates, with equal shares below and above."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return {"low": float(low), "high": float(high), "level": level, "replicates": len(values), "count": count}


def _check_range(sums: NDArray[Any], times: int = 1) -> None:
    """Raise HeedfulError if a sum times `times` could overflow 64 bits."""
    if np.abs(sums).max() * float(times) >= 2.0**62:
        raise HeedfulError(
            f"the statistics add up to more than {2.0**62 * UNIT:.3g}, which a bootstrap cannot hold: scale them down"
        )
