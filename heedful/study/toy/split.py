"""Random samples for train, dev and test. A hash of a sample's key decides its split, so no key is in two splits."""

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
MAX_REPEATS = 20  # for each requested sample: maximum consecutive samples that are repeats or of a full split


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

    key: str  # decides the split; if several samples have equal keys, only the first one is used
    value: T


def split_of(key: str) -> str:
    """Return the split of a key. It depends on nothing but the key.

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
    size_of_split: Mapping[str, int] = {split: getattr(sizes, split) for split in SPLITS}
    samples: dict[str, list[T]] = {split: [] for split in SPLITS}
    used_keys: set[str] = set()
    repeats = 0  # consecutive samples that could not be used
    while any(len(samples[split]) < size_of_split[split] for split in SPLITS):
        sampled = sample(random)
        split = split_of(sampled.key)
        is_full = len(samples[split]) == size_of_split[split]
        if sampled.key in used_keys or is_full:
            repeats += 1
            if repeats > MAX_REPEATS * (1 + sum(size_of_split.values())):
                raise HeedfulError(f"{sizes} is more than there is to sample: {len(used_keys):,} exist; ask for fewer")
            continue
        repeats = 0
        used_keys.add(sampled.key)
        samples[split].append(sampled.value)
    return samples
