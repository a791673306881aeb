"""Draws dealt to train, dev and test by what they are, so that no draw and nothing of its kind is in two of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Generic, TypeVar

from heedful.errors import HeedfulError

T = TypeVar("T")
SPLITS = ("train", "dev", "test")
TENTHS = {8: "dev", 9: "test"}  # of all that can be drawn; the other eight are train's
PATIENCE = 20  # draws in a row that give nothing new


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How many draws each split gets."""

    train: int
    dev: int
    test: int

    def __post_init__(self) -> None:
        for name in SPLITS:
            if getattr(self, name) < 0:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected a whole number from 0")


@dataclass(frozen=True, slots=True)
class Sampled(Generic[T]):
    """What was drawn, and what decides its split and whether it is new."""

    key: str
    value: T


def split_of(key: str) -> str:
    """The split of everything with that key, whatever is drawn beside it.

    >>> sorted({split_of(str(number)) for number in range(100)})
    ['dev', 'test', 'train']
    """
    digest = blake2b(key.encode(), digest_size=8).digest()
    return TENTHS.get(int.from_bytes(digest, "big") % 10, "train")


def sample_splits(draw: Callable[[Random], Sampled[T]], sizes: Sizes, seed: int) -> dict[str, list[T]]:
    """So many draws with different keys for each split; the same for the same seed, on every machine."""
    random = Random(seed)
    wanted: Mapping[str, int] = {name: getattr(sizes, name) for name in SPLITS}
    found: dict[str, list[T]] = {name: [] for name in SPLITS}
    seen: set[str] = set()
    idle = 0
    while any(len(found[name]) < wanted[name] for name in SPLITS):
        drawn = draw(random)
        split = split_of(drawn.key)
        if drawn.key in seen or len(found[split]) == wanted[split]:
            idle += 1
            if idle > PATIENCE * (1 + sum(wanted.values())):
                raise HeedfulError(f"{sizes} is more than there is to draw: {len(seen):,} were found; ask for fewer")
            continue
        idle = 0
        seen.add(drawn.key)
        found[split].append(drawn.value)
    return found
