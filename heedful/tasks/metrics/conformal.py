"""Split conformal prediction: sets of labels that contain the right one with a chosen probability."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MIN_SET_EXAMPLES = 20  # of dev, for a model to answer with prediction sets
MAX_PROBABILITIES = 1000  # that are kept for a model


def calibration_probabilities(probabilities: Sequence[float] | NDArray[np.float64]) -> tuple[float, ...]:
    """Return the gold label's probabilities for held-out examples, ascending, as a model keeps them.

    Of more than MAX_PROBABILITIES the lowest of each of as many equal parts is kept, which makes sets no smaller.
    """
    ascending = np.sort(np.asarray(probabilities, dtype=np.float64))
    count = min(len(ascending), MAX_PROBABILITIES)
    lowest = ascending[np.arange(count) * len(ascending) // max(1, count)]
    return tuple((np.floor(lowest * 1e6) / 1e6).tolist())


def least_probability(calibration: Sequence[float], coverage: float) -> float:
    """Return the least probability of the labels in a prediction set (Sadinle et al. 2019, section 2).

    Sets contain the right label of a new example with at least the probability `coverage`, if it is exchangeable with
    the examples of the calibration. With too few of them every label is in the set, and 0 is returned.

    Args:
        calibration: Probabilities of the gold label for held-out examples, ascending.
        coverage: Between 0 and 1.

    >>> least_probability([0.2, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 1.0], 0.8), least_probability([0.9], 0.8)
    (0.5, 0.0)
    """
    below = math.floor((len(calibration) + 1) * (1 - coverage) + 1e-9)
    return calibration[below - 1] if below >= 1 else 0.0
