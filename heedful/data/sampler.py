"""Sampling: the samples of each training step, and how they are divided among ranks and micro-batches.

The training loop calls it. Order and random seeds are pure functions of (seed, epoch, sample), and equal for any world
size. Gradients are accumulated over the micro-batches of a step.
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


def derive_seed(*parts: int) -> int:
    """Hash integers to a 63-bit seed, the same on every machine.

    >>> derive_seed(1, 2) == derive_seed(1, 2), derive_seed(1, 2) == derive_seed(2, 1)
    (True, False)
    """
    data = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the shuffled indices of all samples for an epoch, as a read-only array [count].

    Samples are sorted by random bits, since NumPy guarantees the stream of its bit generators but not its permutations
    (NEP 19).
    """
    shuffled = np.random.Philox(key=derive_seed(seed, epoch)).random_raw(count).argsort(kind="stable")
    shuffled.flags.writeable = False
    return shuffled


class BatchPlan(NamedTuple):
    """The samples of one step, and the seeds of their random choices, such as masks."""

    epoch: int  # epoch that the seeds depend on, from 0; repeats after `num_static_masks` epochs
    indices: NDArray[np.int64]  # indices of the samples, [batch]
    keys: tuple[int, ...]  # random seed of each sample, a function of (seed, epoch, sample index)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSampler:
    """Splits shuffled epochs of samples into batches. The last batch of an epoch may be smaller."""

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
        """The number of steps in one epoch.

        >>> BatchSampler(num_samples=10, batch_size=4, seed=0).steps_per_epoch
        3
        """
        return -(-self.num_samples // self.batch_size)

    def plan(self, step: int, num_static_masks: int | None = None) -> BatchPlan:
        """Choose the samples of a step.

        Args:
            step: index of the step from 0, counted over all epochs.
            num_static_masks: epochs after which the random choices repeat. If None, they never repeat.
        """
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        start = step_in_epoch * self.batch_size
        indices = epoch_order(self.num_samples, self.seed, epoch)[start : start + self.batch_size]
        seed_epoch = epoch if num_static_masks is None else epoch % num_static_masks
        keys = tuple(derive_seed(self.seed, seed_epoch, int(index)) for index in indices)
        return BatchPlan(seed_epoch, indices, keys)


# ---------------------------------------------------------------------------------------------------- micro-batches


def group(count: int, size: int) -> list[list[int]]:
    """Split range(count) into groups of `size` indices. The samples of a group stay in one micro-batch.

    >>> group(5, 2)
    [[0, 1], [2, 3], [4]]
    """
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def assign_to_ranks(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign units to ranks by greedy load balancing: the largest unit first, each to the rank with the least load.

    Args:
        sizes: tokens of each unit. A unit is a sample, or a group of samples.
        ranks: world size.

    Returns:
        The ascending indices of the units of each rank.

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

    A unit larger than the budget becomes a micro-batch that has no other unit.

    Args:
        sizes: tokens of each unit.
        budget: maximum tokens in a micro-batch.

    Returns:
        The indices of the units of each micro-batch.

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
    """Yield batches of consecutive sequences that fit a token budget. A longer sequence is alone in its batch.

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
