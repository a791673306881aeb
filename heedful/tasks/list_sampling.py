"""Sampling of documents for queries that have too many; each epoch samples anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from heedful.data.sampler import derive_seed
from heedful.objectives.base import PerEpochSamples, Sample
from heedful.random_streams import Stream


class RankTarget(NamedTuple):
    """The target of a query: a value, a number of windows and the relevance of each document."""

    values: tuple[float, ...]  # target of the loss: relevance, or a teacher's score
    windows: tuple[int, ...]  # number of windows
    relevance: tuple[float, ...]  # above 0: relevant


def sampled_documents(relevance: Sequence[float], list_size: int, seed: int) -> list[int]:
    """Return the indices of `list_size` documents, ascending: the relevant ones, and random irrelevant ones.

    If too many documents are relevant, some of them are left out, so that an irrelevant one is included.

    >>> sampled_documents([1, 0, 0, 0, 2, 0], 3, seed=1)
    [0, 3, 4]
    """
    shuffled = np.random.Philox(key=seed).random_raw(len(relevance)).argsort(kind="stable").tolist()
    relevant = [number for number in shuffled if relevance[number] > 0]
    irrelevant = [number for number in shuffled if relevance[number] <= 0]
    chosen = relevant[: list_size - bool(irrelevant)]
    return sorted(chosen + irrelevant[: list_size - len(chosen)])


def with_documents(sample: Sample, documents: Sequence[int]) -> Sample:
    """Return the sample of a query with only these of its documents, by index."""
    target: RankTarget = sample.target
    window_bounds = (0, *accumulate(target.windows))
    windows = [window for number in documents for window in range(window_bounds[number], window_bounds[number + 1])]
    spans = [slice(*span) for span in pairwise(sample.bounds)]
    return Sample.of(
        [sample.tokens[spans[window]].tolist() for window in windows],
        [sample.types[spans[window]].tolist() for window in windows],
        target=RankTarget(
            values=tuple(target.values[number] for number in documents),
            windows=tuple(target.windows[number] for number in documents),
            relevance=tuple(target.relevance[number] for number in documents),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledLists(PerEpochSamples):
    """Samples of queries with at most `list_size` documents, which are sampled anew in each epoch."""

    queries: Sequence[Sample]
    list_size: int
    seed: int

    def __len__(self) -> int:
        return len(self.queries)

    def at(self, epoch: int) -> Sequence[Sample]:
        """Return the samples of an epoch; documents are sampled when a sample is read."""
        return _EpochOfLists(self, epoch)


@dataclass(frozen=True, slots=True, eq=False)
class _EpochOfLists(Sequence[Sample]):
    """The samples of one epoch."""

    lists: SampledLists
    epoch: int

    def __len__(self) -> int:
        return len(self.lists)

    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        sample, list_size = self.lists.queries[number], self.lists.list_size
        if len(sample.target.relevance) <= list_size:
            return sample
        seed = derive_seed(self.lists.seed, Stream.LISTS, self.epoch, number)
        return with_documents(sample, sampled_documents(sample.target.relevance, list_size, seed))
