"""The interface of metrics, and helpers for them: checks of inputs, exact sums, and formatting of values.

A metric has `update(examples)`, `merge_state(metric)` and `compute()`, which returns plain data. Metrics are immutable:
`update` and `merge_state` return a new metric. `merge_state` is associative and commutative to the last bit, because
counts are integers and sums of floats are computed without rounding. A result does not depend on the order of the
examples, the batch size, or the world size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from math import inf, isfinite, isnan
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from heedful.errors import HeedfulError

Result = dict[str, Any]  # plain data by name: numbers, texts, and lists and dicts of these
Values = Sequence[Any] | NDArray[Any] | Tensor
Ids = Sequence[object] | NDArray[Any] | None  # ids of examples, for error messages; None: indices within the update

# frexp gives each double a significand of 53 bits; the smallest double, 2^-1074, is 2^52 times 2^-1126
BITS = 1126
HALF_BITS = 27  # bits in the lower half of a significand; products of halves fit into 64 bits


@runtime_checkable
class Mergeable(Protocol):
    """A state that each process accumulates independently."""

    def merge_state(self, incoming: Self) -> Self:
        """Return the state over the examples of both states."""


@runtime_checkable
class Metric(Mergeable, Protocol):
    """An accumulator over examples. Each metric also has an `update` with its own arguments."""

    def compute(self) -> Result:
        """Return the values over all examples so far, as fractions, not percentages."""


@runtime_checkable
class HasIntervals(Metric, Protocol):
    """A metric that stores examples and can bootstrap its own confidence intervals."""

    def intervals(self, seed: int) -> dict[str, Result]:
        """Return confidence intervals by metric name, from the quantiles of bootstrap replicates."""


M = TypeVar("M", bound=Mergeable)


def merge_all(metrics: Iterable[M]) -> M:
    """Merge the metrics of all processes."""
    return reduce(lambda merged, metric: merged.merge_state(metric), metrics)


CORRELATIONS = ("pearson", "spearman", "matthews")  # metrics with values from -1 to 1
UNBOUNDED = ("loss", "mse", "perplexity", "best_exact_threshold", "best_f1_threshold")


def metric_bounds(name: str) -> tuple[float, float]:
    """Return the smallest and the largest value that a metric can have.

    >>> metric_bounds("accuracy"), metric_bounds("matthews"), metric_bounds("mlm_loss")
    ((0.0, 1.0), (-1.0, 1.0), (-inf, inf))
    """
    if name in UNBOUNDED or name.endswith("_loss"):
        return -inf, inf
    return (-1.0 if name in CORRELATIONS else 0.0), 1.0


def format_metric(name: str, value: float) -> str:
    """Format a value of a metric: as a percentage if the metric is from 0 to 1, else as a plain number.

    >>> format_metric("accuracy", 0.5), format_metric("loss", 0.5), format_metric("accuracy", float("nan"))
    ('50.0 %', '0.5000', 'NaN')
    """
    if not isfinite(value):
        return "NaN" if isnan(value) else "∞" if value > 0 else "-∞"
    return f"{100 * value:.1f} %" if metric_bounds(name) == (0.0, 1.0) else f"{value:.4f}"


def format_difference(name: str, *values: float, sign: str = "+") -> str:
    """Format a difference between values of a metric, or both ends of an interval of differences.

    Differences of metrics from 0 to 1 are in percentage points.

    >>> format_difference("accuracy", 0.011), format_difference("loss", -0.1, 0.2)
    ('+1.1 points', '-0.1000 to +0.2000')
    """
    is_share = metric_bounds(name) == (0.0, 1.0)
    numbers = [f"{100 * value:{sign}.1f}" if is_share else f"{value:{sign}.4f}" for value in values]
    return " to ".join(numbers) + (" points" if is_share else "")


def ratio(numerator: int, denominator: int) -> float:
    """Return the quotient, or 0 if the denominator is 0."""
    return numerator / denominator if denominator else 0.0


def safe_divide(
    numerator: NDArray[Any] | np.float64, denominator: NDArray[Any] | np.float64
) -> Float64[np.ndarray, ...]:
    """Return the quotient of arrays, with 0 where the denominator is not positive."""
    quotient: Float64[np.ndarray, ...] = np.divide(
        numerator, denominator, out=np.zeros(np.shape(denominator)), where=denominator > 0
    )
    return quotient


def f1_scores(correct: int, gold: int, predicted: int) -> dict[str, float]:
    """Return precision, recall and F1 = 2 correct / (gold + predicted) from counts (van Rijsbergen 1979)."""
    return {
        "precision": ratio(correct, predicted),
        "recall": ratio(correct, gold),
        "f1": ratio(2 * correct, gold + predicted),
    }


def require_examples(count: int, what: str) -> None:
    """Raise HeedfulError if there are no examples; `what` is the name of the metric in the message."""
    if not count:
        raise HeedfulError(
            f"{what} of no examples is not defined: the data set is empty, or all examples were left out"
        )


def require_equal(left: object, right: object, what: str) -> None:
    """Raise HeedfulError if two metrics that are merged differ in the setting that `what` names."""
    if left != right:
        raise HeedfulError(f"these cannot be merged, their {what} differ: {left!r} and {right!r}")


def require_same_length(count: int, expected: int, what: str, than: str) -> None:
    """Raise HeedfulError unless two lists, which `what` and `than` name, have the same length."""
    if count != expected:
        raise HeedfulError(f"there are {count} {what} for {expected} {than}: each example needs one of each")


def example_name(ids: Ids, index: int) -> str:
    """Return the name of an example for an error message.

    >>> example_name(["q7", "q8"], 1), example_name(None, 1)
    ('example "q8"', 'example at index 1 of this update')
    """
    return f"example at index {index} of this update" if ids is None else f'example "{ids[index]}"'


def as_array(values: Values) -> NDArray[Any]:
    """Convert a list, an array or a tensor on any device to an array."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.double() if values.is_floating_point() else values).numpy()
    try:
        return np.asarray(values)
    except ValueError as error:
        raise HeedfulError(f"the examples have different numbers of values: {error}") from None


def as_finite(values: Values, what: str, ids: Ids, shape: str = "one number for each example") -> NDArray[Any]:
    """Convert numbers of any shape to doubles.

    Raises:
        HeedfulError: If a value is NaN, infinite or not a number. The message names its example.
    """
    array = as_array(values)
    if array.size == 0:
        return array.astype(np.float64)
    if array.dtype.kind not in "biuf":
        raise HeedfulError(f"the {what} should be numbers ({shape}), got {array.ravel()[:1].tolist()[0]!r}")
    array = array.astype(np.float64)
    bad = ~np.isfinite(array).reshape(len(array) if array.ndim else 1, -1)
    if bad.any():
        index = int(bad.any(1).argmax())
        raise not_finite_error(array.reshape(bad.shape)[index][bad[index]][0], what, example_name(ids, index))
    return array


def not_finite_error(value: float, what: str, name: str) -> HeedfulError:
    """Return the error for a NaN or an infinity."""
    return HeedfulError(
        f"the {what} of {name} is {value}: a metric over it would mean nothing; "
        "look for a loss that diverged or half precision that overflowed"
    )


def as_numbers(values: Values, what: str, ids: Ids = None) -> Float64[np.ndarray, " examples"]:
    """Convert values to one finite double for each example."""
    array = as_finite(values, what, ids)
    if array.ndim != 1:
        raise HeedfulError(f"the {what} should be one number for each example, got an array of shape {array.shape}")
    return array


def exact_sum(values: Float64[np.ndarray, " examples"]) -> int:
    """Return the sum without rounding, as an integer in units of 2^-1126. `from_exact` converts it to a float.

    >>> values = np.array([1e300, 1.0, -1e300, 2.0**-1074])
    >>> from_exact(exact_sum(values) - exact_sum(np.array([1.0])))
    5e-324
    """
    significands, shifts = _significands(values)
    return _shifted_sum(significands, shifts)


def to_exact(value: float) -> int:
    """Convert a value to an integer in units of 2^-1126, without rounding."""
    numerator, denominator = value.as_integer_ratio()  # the denominator is a power of 2
    return numerator << (BITS + 1 - denominator.bit_length())


def exact_products(x: Float64[np.ndarray, " examples"], y: Float64[np.ndarray, " examples"]) -> int:
    """Return the sum of the products x y without rounding, as an integer in units of 2^-2252.

    For significands x = h 2^27 + l and y = h' 2^27 + l', the product is h h' 2^54 + (h l' + l h') 2^27 + l l'.
    """
    (x_significands, x_shifts), (y_significands, y_shifts) = _significands(x), _significands(y)
    x_high, y_high = x_significands >> HALF_BITS, y_significands >> HALF_BITS
    x_low, y_low = x_significands & ((1 << HALF_BITS) - 1), y_significands & ((1 << HALF_BITS) - 1)
    shifts = x_shifts + y_shifts
    return (
        _shifted_sum(x_high * y_high, shifts + 2 * HALF_BITS)
        + _shifted_sum(x_high * y_low + x_low * y_high, shifts + HALF_BITS)
        + _shifted_sum(x_low * y_low, shifts)
    )


def from_exact(total: int, count: int = 1, bits: int = BITS) -> float:
    """Return total / count as the nearest double. `total` is in units of 2^-bits; sums of products need 2 * BITS."""
    return total / (count << bits)


def _significands(
    values: Float64[np.ndarray, " examples"],
) -> tuple[Int64[np.ndarray, " examples"], Int64[np.ndarray, " examples"]]:
    """Return integer significands w and shifts s, with value = w 2^(s - 1126)."""
    fractions, exponents = np.frexp(values)
    return (fractions * 2.0**53).astype(np.int64), exponents.astype(np.int64) + (BITS - 53)


def _shifted_sum(significands: Int64[np.ndarray, " examples"], shifts: Int64[np.ndarray, " examples"]) -> int:
    """Return the sum of w 2^s as one integer. Both 32-bit halves of w are summed separately, to avoid overflow."""
    total = 0
    for shift in np.unique(shifts):
        group = significands[shifts == shift]
        total += int((group >> 32).sum()) << (int(shift) + 32)
        total += int((group & 0xFFFFFFFF).sum()) << int(shift)
    return total
