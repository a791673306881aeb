"""Sampling: which samples a step takes, and how they are split over ranks and micro-batches.

Everything is a pure function of (seed, epoch, sample), the same for any number of ranks. Micro-batches are what
gradient accumulation adds up.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from heedful.errors import DataError

SequenceT = TypeVar("SequenceT", bound=Sized)


def derive_seed(*numbers: int) -> int:
    """Hash whole numbers to a 63-bit seed, the same on every machine.

    >>> derive_seed(1, 2) == derive_seed(1, 2), derive_seed(1, 2) == derive_seed(2, 1)
    (True, False)
    """
    data = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Shuffled indices of all samples in an epoch, [count].

    Samples are sorted by random bits: numpy guarantees the stream of its bit generators, not its permutations (NEP 19).
    """
    shuffled = np.random.Philox(key=derive_seed(seed, epoch)).random_raw(count).argsort(kind="stable")
    shuffled.flags.writeable = False
    return shuffled


class BatchPlan(NamedTuple):
    """The samples of one step."""

    epoch: int  # from 0; epoch that seeds random choices (masks), modulo `num_static_masks`
    numbers: NDArray[np.int64]  # indices of samples, [batch]
    keys: tuple[int, ...]  # random seed of each sample, a function of (seed, epoch, sample)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSampler:
    """Shuffled epochs of `num_samples` samples in batches; the last batch of an epoch may be smaller."""

    count: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.batch < 1:
            raise DataError(f"{self.count} samples in batches of {self.batch}: there must be one or more of both")

    @property
    def steps(self) -> int:
        """Number of steps in one epoch.

        >>> BatchSampler(count=10, batch=4, seed=0).steps
        3
        """
        return -(-self.count // self.batch)

    def turn(self, step: int, versions: int | None = None) -> BatchPlan:
        """The samples of a step.

        Args:
            step: step from 0, counted over all epochs.
            num_static_masks: epochs after which random choices repeat; None: never.
        """
        epoch, place = divmod(step, self.steps)
        numbers = epoch_order(self.count, self.seed, epoch)[place * self.batch : (place + 1) * self.batch]
        drawn = epoch if versions is None else epoch % versions
        return BatchPlan(drawn, numbers, tuple(derive_seed(self.seed, drawn, int(number)) for number in numbers))


# ---------------------------------------------------------------------------------------------------- micro-batches


def group(count: int, size: int) -> list[list[int]]:
    """Split range(count) into groups of `size` indices that stay in one micro-batch.

    >>> group(5, 2)
    [[0, 1], [2, 3], [4]]
    """
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def assign_to_ranks(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign units to ranks by greedy load balancing: the largest first, each to the rank with the least load.

    >>> assign_to_ranks([5, 1, 4, 3], 2)
    [[0, 1], [2, 3]]
    """
    loads, taken = [0] * ranks, [[] for _ in range(ranks)]  # type: tuple[list[int], list[list[int]]]
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[number]
        taken[rank].append(number)
    return [sorted(numbers) for numbers in taken]


def split_microbatches(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Split units into the fewest micro-batches of about equal load that fit a token budget.

    A unit that is larger than the budget gets a micro-batch of its own.

    >>> split_microbatches([3, 3, 3, 9], 8)
    [[3], [0, 2], [1]]
    """
    count = max(1, -(-sum(sizes) // budget))
    while True:
        batches = [batch for batch in assign_to_ranks(sizes, count) if batch]
        loads = [sum(sizes[number] for number in batch) for batch in batches]
        if all(load <= budget or len(batch) == 1 for load, batch in zip(loads, batches, strict=True)):
            return batches
        count += 1


def consecutive_batches(sequences: Iterable[SequenceT], budget: int) -> Iterator[list[SequenceT]]:
    """Yield batches of consecutive sequences that fit a token budget; a longer sequence is a batch of its own.

    >>> list(consecutive_batches(["aa", "bbb", "cccccc", "d"], 5))
    [['aa', 'bbb'], ['cccccc'], ['d']]
    """
    batch: list[SequenceT] = []
    for sequence in sequences:
        if batch and sum(map(len, batch)) + len(sequence) > budget:
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch
