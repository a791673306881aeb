"""Which samples a step takes: a pure function of (seed, epoch, sample), the same on every number of ranks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heedful.errors import HeedfulError


def derive_seed(*numbers: int) -> int:
    """63 bits of some whole numbers, the same on every machine: a seed for whatever they name.

    >>> mixed(1, 2) == mixed(1, 2), mixed(1, 2) == mixed(2, 1)
    (True, False)
    """
    data = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The numbers of the samples in the order of an epoch.

    They are sorted by random bits: those of numpy's bit generators never change, unlike its permutations (NEP 19).
    """
    shuffled = np.random.Philox(key=derive_seed(seed, epoch)).random_raw(count).argsort(kind="stable")
    shuffled.flags.writeable = False
    return shuffled


class BatchPlan(NamedTuple):
    """What one step takes."""

    epoch: int  # from 0, whose samples and draws these are; below `versions`, where those return
    numbers: NDArray[np.int64]  # of the samples
    keys: tuple[int, ...]  # one for each sample, of (seed, epoch, sample) alone


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSampler:
    """Epochs of `count` samples in batches; the last batch of an epoch may be smaller."""

    count: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.batch < 1:
            raise HeedfulError(f"{self.count} samples in batches of {self.batch}: there must be one or more of both")

    @property
    def steps(self) -> int:
        """Of one epoch.

        >>> Order(count=10, batch=4, seed=0).steps
        3
        """
        return -(-self.count // self.batch)

    def turn(self, step: int, versions: int | None = None) -> BatchPlan:
        """The samples of a step, counted from 0 over all epochs; after `versions` epochs all that is drawn returns."""
        epoch, place = divmod(step, self.steps)
        numbers = epoch_order(self.count, self.seed, epoch)[place * self.batch : (place + 1) * self.batch]
        drawn = epoch if versions is None else epoch % versions
        return BatchPlan(drawn, numbers, tuple(derive_seed(self.seed, drawn, int(number)) for number in numbers))


# ---------------------------------------------------------------------------------------------------- micro-batches


def group(count: int, together: int) -> list[list[int]]:
    """Numbers below `count` in groups that stay together.

    >>> units(5, 2)
    [[0, 1], [2, 3], [4]]
    """
    return [list(range(start, min(start + together, count))) for start in range(0, count, together)]


def assign_to_ranks(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The numbers of the units that each rank takes: the largest first, each to the rank that has least so far.

    >>> share([5, 1, 4, 3], 2)
    [[0, 1], [2, 3]]
    """
    loads, taken = [0] * ranks, [[] for _ in range(ranks)]  # type: tuple[list[int], list[list[int]]]
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[number]
        taken[rank].append(number)
    return [sorted(numbers) for numbers in taken]


def split_microbatches(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Units in as few micro-batches as their tokens need, of about equal load; one unit may exceed the budget alone.

    >>> cut([3, 3, 3, 9], 8)
    [[3], [0, 2], [1]]
    """
    count = max(1, -(-sum(sizes) // budget))
    while True:
        batches = [batch for batch in assign_to_ranks(sizes, count) if batch]
        loads = [sum(sizes[number] for number in batch) for batch in batches]
        if all(load <= budget or len(batch) == 1 for load, batch in zip(loads, batches, strict=True)):
            return batches
        count += 1
