"""The length distributions, three of forward and two of training benchmarks, and random token ids of those lengths."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist, fmean

FEWEST = 3  # [CLS], one token, [SEP]
CLS, SEP, FIRST_WORD, VOCABULARY = 101, 102, 1000, 30522  # of BERT's English vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Lognormal lengths with a given spread of the logarithm, cut at both ends; `mean` is that of the cut lengths."""

    mean: float
    most: int
    sigma: float
    fewest: int = FEWEST


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
    """That many lengths in random order: one from each of `count` equally likely ranges, so that few are enough."""
    kind, generator = (DISTRIBUTIONS | TRAINING)[name], random.Random(f"{name} {seed}")
    middle = _middle(kind)
    shares = [max((number + generator.random()) / count, 1e-9) for number in range(count)]
    drawn = [_length(kind, middle, share) for share in shares]
    generator.shuffle(drawn)
    return [round(length) for length in drawn]


def sequences(name: str, count: int, seed: int = 0) -> list[list[int]]:
    """[CLS], random words, [SEP], of the lengths that `draw` gives."""
    generator = random.Random(f"tokens {name} {seed}")
    return [
        [CLS, *(generator.randrange(FIRST_WORD, VOCABULARY) for _ in range(length - 2)), SEP]
        for length in draw(name, count, seed)
    ]


def digest(token_ids: Sequence[Sequence[int]]) -> str:
    """A short name for exactly these sequences."""
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:16]


def fill(lengths: Sequence[int], budget: int, *, longest_first: bool = True) -> list[list[int]]:
    """The numbers of each batch, filled up to a budget of tokens; longest first is how heedful.Engine does it."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number]) if longest_first else range(len(lengths))
    batches: list[list[int]] = []
    rows = 0
    for number in order:
        if not batches or rows + lengths[number] > budget:
            batches.append([])
            rows = 0
        batches[-1].append(number)
        rows += lengths[number]
    return batches


def _length(kind: Distribution, middle: float, share: float) -> float:
    return min(max(exp(middle + kind.sigma * NormalDist().inv_cdf(share)), kind.fewest), kind.most)


def _middle(kind: Distribution, steps: int = 1000) -> float:
    """The mean of the logarithm with which the cut lengths have the mean that is asked for."""
    low, high = log(kind.fewest), log(kind.most) + 2
    for _ in range(40):
        middle = (low + high) / 2
        mean = fmean(_length(kind, middle, (step + 0.5) / steps) for step in range(steps))
        low, high = (middle, high) if mean < kind.mean else (low, middle)
    return (low + high) / 2
