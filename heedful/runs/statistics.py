"""Whether two things differ, told from numbers of several seeds, in words; no difference seen is an answer too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, inf, lgamma, log, sqrt
from statistics import fmean, stdev
from typing import Literal

Unit = Literal["share", "number"]  # a share is told in per cent, and differences of shares in points
TINY = 1e-300
ENOUGH = 3  # seeds from which a verdict is given


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Where a mean lies."""

    mean: float
    low: float
    high: float

    @property
    def above(self) -> bool:
        """All of it is above 0."""
        return self.low > 0

    @property
    def below(self) -> bool:
        """All of it is below 0."""
        return self.high < 0


def paired_t_interval(
    ours: Sequence[float], theirs: Sequence[float], *, level: float = 0.95, resolution: float = 0.0
) -> Interval:
    """mean d ± t s / sqrt(n) of the differences d seed by seed, with Student's t of n - 1 degrees (Student 1908).

    What a seed decides for both, their data and their order, drops out of the differences. One seed says nothing.
    `grain` is the least that a number can change by, 1 / n of a share of n: s counts as that much at least, since equal
    differences of coarse numbers are no certainty.

    >>> paired([3.0, 4.0, 5.0], [1.0, 2.0, 3.0])
    Interval(mean=2.0, low=2.0, high=2.0)
    """
    differences = [our - their for our, their in zip(ours, theirs, strict=True)]
    mean = fmean(differences)
    if len(differences) < 2:
        return Interval(mean=mean, low=-inf, high=inf)
    half = (
        t_quantile(0.5 + level / 2, len(differences) - 1) * max(stdev(differences), resolution) / sqrt(len(differences))
    )
    return Interval(mean=mean, low=mean - half, high=mean + half)


def compare_seeds(
    ours: str,
    theirs: str,
    numbers: tuple[Sequence[float], Sequence[float]],
    *,
    on: str,
    unit: Unit = "share",
    comparisons: int = 1,
    resolution: float = 0.0,
) -> str:
    """A sentence on two arms with numbers of the same seeds.

    With several comparisons each is made at 1 - 0.05 / comparisons, so that all of them together err in at most one of
    twenty studies (Bonferroni).
    """
    found, seeds = paired_t_interval(*numbers, level=1 - 0.05 / comparisons, resolution=resolution), len(numbers[0])
    by = _told(abs(found.mean), unit)
    if seeds < ENOUGH:
        told = f"{seeds} seed{'s' if seeds > 1 else ''}, too few for a verdict: give {ENOUGH} or more"
        return f"{on}: {ours} {_signed(found.mean, unit)} against {theirs}, of {told}"
    more = sum(our > their for our, their in zip(*numbers, strict=True))
    within = f"{100 - 5 / comparisons:.3g} % interval {_signed(found.low, unit)} to {_signed(found.high, unit)}"
    within += f", above with {more} of {seeds} seeds"
    within += f", {comparisons} comparisons" if comparisons > 1 else ""
    if found.above or found.below:
        return f"{on}: {ours} is {'above' if found.above else 'below'} {theirs} by {by} ({within})"
    return f"{on}: no difference seen between {ours} and {theirs} ({within})"


def mean_and_std(numbers: Sequence[float], unit: Unit = "share") -> str:
    """The mean, and after ± the standard deviation.

    >>> spread([0.5, 0.7]), spread([1.25], "number")
    ('60.0 ± 14.1 %', '1.25')
    """
    mean = fmean(numbers)
    deviation = stdev(numbers) if len(numbers) > 1 else None
    if unit == "share":
        return f"{100 * mean:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}") + " %"
    return f"{mean:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def seed_count(seeds: int) -> str:
    """In words.

    >>> counted(1), counted(3)
    ('one seed', '3 seeds')
    """
    return f"{seeds} seeds" if seeds > 1 else "one seed"


def _told(value: float, unit: Unit) -> str:
    return f"{100 * value:.1f} points" if unit == "share" else f"{value:.2f}"


def _signed(value: float, unit: Unit) -> str:
    return f"{100 * value:+.1f}" if unit == "share" else f"{value:+.2f}"


# -- Student's t ------------------------------------------------------------------------------------------------------


@cache
def t_quantile(share: float, degrees: int) -> float:
    """The number below which that share of Student's t lies, by halving; shares from one half on.

    >>> round(t_quantile(0.975, 4), 4), round(t_quantile(0.995, 9), 4)
    (2.7764, 3.2498)
    """
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if 1 - 0.5 * _beta(degrees / (degrees + middle**2), degrees / 2, 0.5) < share:
            low = middle
        else:
            high = middle
    return high


def _beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), the regularised incomplete beta function, by its continued fraction (DLMF 8.17.22)."""
    if not 0 < x < 1:
        return min(1.0, max(0.0, x))
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(1 - x)) / a
    fraction = c = 1.0
    d = 0.0
    for step in range(400):  # Lentz's way to go from the left
        m = step // 2
        if step == 0:
            part = 1.0
        elif step % 2:
            part = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            part = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / ((1 + part * d) or TINY)
        c = (1 + part / c) or TINY
        fraction *= c * d
        if abs(c * d - 1) < 1e-15 and step:
            break
    return front * (fraction - 1)
