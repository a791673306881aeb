"""Sampling: the samples of each training step, and how they are split over ranks and micro-batches.

Order and random seeds are pure functions of (seed, epoch, sample), the same for any number of ranks. The gradients of
micro-batches are accumulated.
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
    """Shuffle the indices of all samples for an epoch; return them as a read-only array, [count].

    Samples are sorted by random bits, since NumPy guarantees the stream of its bit generators but not its permutations
    (NEP 19).
    """
    shuffled = np.random.Philox(key=derive_seed(seed, epoch)).random_raw(count).argsort(kind="stable")
    shuffled.flags.writeable = False
    return shuffled


class BatchPlan(NamedTuple):
    """The samples of one step, and the seeds of their random choices, such as masks."""

    epoch: int  # epoch of the seeds, from 0; repeats after `num_static_masks` epochs
    indices: NDArray[np.int64]  # indices of the samples, [batch]
    keys: tuple[int, ...]  # random seed of each sample, a function of (seed, epoch, sample)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSampler:
    """Splits shuffled epochs of samples into batches; the last batch of an epoch may be smaller."""

    num_samples: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.batch_size < 1:
            raise DataError(
                f"{self.num_samples} samples in batches of {self.batch_size}: there must be one or more of both"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in one epoch.

        >>> BatchSampler(num_samples=10, batch_size=4, seed=0).steps_per_epoch
        3
        """
        return -(-self.num_samples // self.batch_size)

    def plan(self, step: int, num_static_masks: int | None = None) -> BatchPlan:
        """Choose the samples of a step.

        Args:
            step: step from 0, counted over all epochs.
            num_static_masks: epochs after which random choices repeat; None: never.
        """
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        start = step_in_epoch * self.batch_size
        indices = epoch_order(self.num_samples, self.seed, epoch)[start : start + self.batch_size]
        seed_epoch = epoch if num_static_masks is None else epoch % num_static_masks
        keys = tuple(derive_seed(self.seed, seed_epoch, int(index)) for index in indices)
        return BatchPlan(seed_epoch, indices, keys)


# ---------------------------------------------------------------------------------------------------- micro-batches


def group(count: int, size: int) -> list[list[int]]:
    """Split range(count) into groups of `size` indices that stay in one micro-batch.

    >>> group(5, 2)
    [[0, 1], [2, 3], [4]]
    """
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def assign_to_ranks(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign units to ranks by greedy load balancing: the largest first, each to the rank with the least load.

    Args:
        sizes: tokens of each unit.
        ranks: number of ranks.

    Returns:
        The indices of each rank's units, in ascending order.

    >>> assign_to_ranks([5, 1, 4, 3], 2)
    [[0, 1], [2, 3]]
    """
    loads = [0] * ranks  # tokens
    units_by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for unit in sorted(range(len(sizes)), key=lambda unit: (-sizes[unit], unit)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[unit]
        units_by_rank[rank].append(unit)
    return [sorted(units) for units in units_by_rank]


def split_microbatches(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Split units into the fewest micro-batches of about equal load that fit a token budget.

    A unit that is larger than the budget is a micro-batch of its own.

    Args:
        sizes: tokens of each unit.
        budget: tokens of a micro-batch, at most.

    Returns:
        The indices of each micro-batch's units.

    >>> split_microbatches([3, 3, 3, 9], 8)
    [[3], [0, 2], [1]]
    """
    count = max(1, -(-sum(sizes) // budget))
    while True:
        batches = [batch for batch in assign_to_ranks(sizes, count) if batch]
        loads = [sum(sizes[unit] for unit in batch) for batch in batches]
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
