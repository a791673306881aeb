"""Comparison of two arms of an experiment over several seeds by a paired t-test, with the result as a sentence.

An arm is a variant that an experiment compares with others, such as a model. Verdicts of distillation and conclusions
of studies use this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Literal

from scipy.special import stdtrit

# how values are formatted; share: as percentages, with differences in percentage points; number: with two decimals
Unit = Literal["share", "number"]
MIN_SEEDS = 3  # minimum seeds for a verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def above(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low > 0

    @property
    def below(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.high < 0


def paired_t_interval(
    first: Sequence[float], second: Sequence[float], *, level: float = 0.95, resolution: float = 0.0
) -> Interval:
    """Return the confidence interval mean(d) ± t s / sqrt(n) of the n differences d between two arms (Student 1908).

    There is one difference per seed, and s is the standard deviation of the differences. t is the quantile of Student's
    distribution with n - 1 degrees of freedom. Effects of a seed on both arms, such as the order of the data, cancel in
    the differences. With one seed the interval is infinite.

    Args:
        first: Values of the first arm, one per seed.
        second: Values of the second arm, with the same seeds.
        level: Confidence level.
        resolution: Smallest possible difference of values, such as 1 / n for a share of n examples. s is at least the
            resolution, since coarse values may be equal by chance.

    >>> paired_t_interval([3.0, 4.0, 5.0], [1.0, 2.0, 3.0])
    Interval(mean=2.0, low=2.0, high=2.0)
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean, count = fmean(differences), len(differences)
    if count < 2:
        return Interval(mean=mean, low=-inf, high=inf)
    half_width = float(stdtrit(count - 1, 0.5 + level / 2)) * max(stdev(differences), resolution) / sqrt(count)
    return Interval(mean=mean, low=mean - half_width, high=mean + half_width)


def compare_seeds(
    first: str,
    second: str,
    numbers: tuple[Sequence[float], Sequence[float]],
    *,
    on: str,
    unit: Unit = "share",
    comparisons: int = 1,
    resolution: float = 0.0,
) -> str:
    """Return a sentence that says whether the values of two arms differ significantly.

    Args:
        first: Name of the first arm.
        second: Name of the second arm.
        numbers: Values of the first and of the second arm, with the same seeds.
        on: Name of the metric and the data, with which the sentence begins.
        unit: Unit of the values.
        comparisons: How many comparisons the study makes. The confidence level of each is 1 - 0.05 / comparisons, so
            that at most one study of twenty has a wrong verdict (Bonferroni).
        resolution: See `paired_t_interval`.
    """
    interval = paired_t_interval(*numbers, level=1 - 0.05 / comparisons, resolution=resolution)
    seeds = len(numbers[0])
    if seeds < MIN_SEEDS:
        few = f"{seeds} seed{'s' if seeds > 1 else ''}, too few for a verdict: give {MIN_SEEDS} or more"
        points = " points" if unit == "share" else ""
        return f"{on}: {first} {_signed(interval.mean, unit)}{points} against {second}, of {few}"
    higher_seeds = sum(a > b for a, b in zip(*numbers, strict=True))  # seeds with which the first arm is better
    level = f"{100 - 5 / comparisons:.3g} %"
    evidence = f"{level} interval {_signed(interval.low, unit)} to {_signed(interval.high, unit)}"
    evidence += f", above with {higher_seeds} of {seeds} seeds"
    evidence += f", {comparisons} comparisons" if comparisons > 1 else ""
    if not interval.above and not interval.below:
        return f"{on}: no difference seen between {first} and {second} ({evidence})"
    direction = "above" if interval.above else "below"
    return f"{on}: {first} is {direction} {second} by {_format_difference(abs(interval.mean), unit)} ({evidence})"


def mean_and_std(numbers: Sequence[float], unit: Unit = "share") -> str:
    """Format the mean of values, with ± and the standard deviation if there are several values.

    >>> mean_and_std([0.5, 0.7]), mean_and_std([1.25], "number")
    ('60.0 ± 14.1 %', '1.25')
    """
    if unit == "share":
        std = f" ± {100 * stdev(numbers):.1f}" if len(numbers) > 1 else ""
        return f"{100 * fmean(numbers):.1f}{std} %"
    std = f" ± {stdev(numbers):.2f}" if len(numbers) > 1 else ""
    return f"{fmean(numbers):.2f}{std}"


def seed_count(seeds: int) -> str:
    """Format how many seeds there are.

    >>> seed_count(1), seed_count(3)
    ('one seed', '3 seeds')
    """
    return f"{seeds} seeds" if seeds > 1 else "one seed"


def _format_difference(value: float, unit: Unit) -> str:
    """Format a difference without its sign, shares in percentage points."""
    return f"{100 * value:.1f} points" if unit == "share" else f"{value:.2f}"


def _signed(value: float, unit: Unit) -> str:
    """Format a difference with its sign, shares in percentage points without the word "points"."""
    return f"{100 * value:+.1f}" if unit == "share" else f"{value:+.2f}"
