"""Length distributions of the benchmarks, three for forward passes and two for training, and random token ids."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist, fmean

FEWEST = 3  # tokens of the shortest sequence: [CLS], one word, [SEP]
CLS, SEP, FIRST_WORD, VOCABULARY = 101, 102, 1000, 30522  # ids of BERT's English vocabulary, and its size


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Lognormal lengths of sequences, in tokens, clipped at both ends."""

    mean: float  # mean of the clipped lengths
    most: int  # greatest length
    sigma: float  # standard deviation of the logarithm of a length, before it is clipped
    fewest: int = FEWEST  # least length


DISTRIBUTIONS = {
    "SHORT": Distribution(mean=25, most=128, sigma=0.6),
    "MIXED": Distribution(mean=120, most=512, sigma=0.8),
    "LONG": Distribution(mean=350, most=512, sigma=0.5),
}
TRAINING = {
    "sst2": Distribution(mean=13.5, most=66, sigma=0.68, fewest=4),  # sigma and most are those of SST-2
    "mean150": Distribution(mean=150, most=512, sigma=0.8, fewest=4),
}


def draw(name: str, count: int, seed: int = 0) -> list[int]:
    """Return `count` lengths in random order, one from each of `count` equally likely ranges of the distribution."""
    distribution = (DISTRIBUTIONS | TRAINING)[name]
    generator = random.Random(f"{name} {seed}")
    log_mean = _log_mean(distribution)
    probabilities = [max((index + generator.random()) / count, 1e-9) for index in range(count)]
    lengths = [_length(distribution, log_mean, probability) for probability in probabilities]
    generator.shuffle(lengths)
    return [round(length) for length in lengths]


def sequences(name: str, count: int, seed: int = 0) -> list[list[int]]:
    """Return `count` sequences of [CLS], random words and [SEP], with the lengths that `draw` returns."""
    generator = random.Random(f"tokens {name} {seed}")
    return [
        [CLS, *(generator.randrange(FIRST_WORD, VOCABULARY) for _ in range(length - 2)), SEP]
        for length in draw(name, count, seed)
    ]


def digest(token_ids: Sequence[Sequence[int]]) -> str:
    """Return a short hash of the sequences."""
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:16]


def fill(lengths: Sequence[int], budget: int, *, longest_first: bool = True) -> list[list[int]]:
    """Return the indices of the sequences of each batch, filled up to a budget of tokens.

    Args:
        longest_first: Whether long sequences come first, as in heedful.Engine; otherwise they keep their order.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index]) if longest_first else range(len(lengths))
    batches: list[list[int]] = []
    tokens = 0
    for index in order:
        if not batches or tokens + lengths[index] > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(index)
        tokens += lengths[index]
    return batches


def _length(distribution: Distribution, log_mean: float, probability: float) -> float:
    """Return the length that is not exceeded with this probability, before it is rounded."""
    length = exp(log_mean + distribution.sigma * NormalDist().inv_cdf(probability))
    return min(max(length, distribution.fewest), distribution.most)


def _log_mean(distribution: Distribution, steps: int = 1000) -> float:
    """Search for the mean of the logarithm with which the clipped lengths have the distribution's mean."""
    low, high = log(distribution.fewest), log(distribution.most) + 2
    for _ in range(40):
        log_mean = (low + high) / 2
        mean = fmean(_length(distribution, log_mean, (step + 0.5) / steps) for step in range(steps))
        low, high = (log_mean, high) if mean < distribution.mean else (low, log_mean)
    return (low + high) / 2
