"""Random samples split into train, dev and test by a hash of their key, so that no key is in two splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Generic, TypeVar

from heedful.errors import HeedfulError

T = TypeVar("T")
SPLITS = ("train", "dev", "test")
TENTHS = {8: "dev", 9: "test"}  # split of a key by its hash modulo 10; others are train
MAX_REPEATS = 20  # maximum consecutive samples that cannot be used, for each requested sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The number of samples in each split."""

    train: int
    dev: int
    test: int

    def __post_init__(self) -> None:
        for name in SPLITS:
            if getattr(self, name) < 0:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected a whole number from 0")


@dataclass(frozen=True, slots=True)
class Sampled(Generic[T]):
    """A sample and its key."""

    key: str  # determines the split; of samples with equal keys only the first one is used
    value: T


def split_of(key: str) -> str:
    """Return the split of a key: a pure function, independent of seeds and sizes.

    >>> sorted({split_of(str(key)) for key in range(100)})
    ['dev', 'test', 'train']
    """
    digest = blake2b(key.encode(), digest_size=8).digest()
    return TENTHS.get(int.from_bytes(digest, "big") % 10, "train")


def sample_splits(sample: Callable[[Random], Sampled[T]], sizes: Sizes, seed: int) -> dict[str, list[T]]:
    """Return samples with different keys for each split. The same seed gives the same samples on every machine.

    Args:
        sample: Returns a random sample.
        sizes: Number of samples of each split.
        seed: Random seed.

    Raises:
        HeedfulError: If there are not enough different samples.
    """
    random = Random(seed)
    wanted: Mapping[str, int] = {name: getattr(sizes, name) for name in SPLITS}
    splits: dict[str, list[T]] = {name: [] for name in SPLITS}
    seen: set[str] = set()
    repeats = 0
    while any(len(splits[name]) < wanted[name] for name in SPLITS):
        sampled = sample(random)
        split = split_of(sampled.key)
        if sampled.key in seen or len(splits[split]) == wanted[split]:
            repeats += 1
            if repeats > MAX_REPEATS * (1 + sum(wanted.values())):
                raise HeedfulError(f"{sizes} is more than there is to sample: {len(seen):,} exist; ask for fewer")
            continue
        repeats = 0
        seen.add(sampled.key)
        splits[split].append(sampled.value)
    return splits
