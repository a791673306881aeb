"""Split conformal prediction: sets of labels that contain the correct label with a chosen probability.

`Classify` stores the probabilities of a dev split in its model; from them, the engine finds the least probability of
the labels in a set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MIN_SET_EXAMPLES = 20  # minimum examples in dev for prediction sets
MAX_PROBABILITIES = 1000  # maximum calibration probabilities saved with a model


def calibration_probabilities(probabilities: Sequence[float] | NDArray[np.float64]) -> tuple[float, ...]:
    """Return the probabilities of the gold labels of held-out examples, ascending and shortened for a model folder.

    More than MAX_PROBABILITIES values are divided into MAX_PROBABILITIES equal parts, and only the lowest value of each
    part is returned. Values are rounded down to 6 decimals. Neither makes prediction sets smaller.
    """
    ascending = np.sort(np.asarray(probabilities, dtype=np.float64))
    count = min(len(ascending), MAX_PROBABILITIES)
    lowest = ascending[np.arange(count) * len(ascending) // max(1, count)]
    return tuple((np.floor(lowest * 1e6) / 1e6).tolist())


def least_probability(calibration: Sequence[float], coverage: float) -> float:
    """Return the minimum probability of the labels in a prediction set (Sadinle et al. 2019, section 2).

    A set contains the correct label of a new example with a probability of at least `coverage`, if the example is
    exchangeable with the calibration examples. If there are too few of these, 0 is returned, so that sets have every
    label.

    Args:
        calibration: Probabilities of the gold labels of held-out examples, ascending.
        coverage: Probability between 0 and 1.

    >>> least_probability([0.2, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 1.0], 0.8), least_probability([0.9], 0.8)
    (0.5, 0.0)
    """
    below = math.floor((len(calibration) + 1) * (1 - coverage) + 1e-9)
    return calibration[below - 1] if below >= 1 else 0.0
