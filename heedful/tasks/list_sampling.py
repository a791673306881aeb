"""Random documents of queries that have more of them than a list may hold, other ones in each epoch."""

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
    """The target of a query."""

    values: tuple[float, ...]  # of each document: its relevance, or a teacher's score
    windows: tuple[int, ...]  # of each document
    relevance: tuple[float, ...]  # of each document


def sampled_documents(relevance: Sequence[float], list_size: int, seed: int) -> list[int]:
    """Return indices of `list_size` documents, in order: the relevant ones, and random others.

    If too many are relevant, some of them are left out, so that there is an irrelevant one too.

    >>> sampled_documents([1, 0, 0, 0, 2, 0], 3, seed=1)
    [0, 3, 4]
    """
    shuffled = np.random.Philox(key=seed).random_raw(len(relevance)).argsort(kind="stable").tolist()
    relevant = [number for number in shuffled if relevance[number] > 0]
    irrelevant = [number for number in shuffled if relevance[number] <= 0]
    chosen = relevant[: list_size - bool(irrelevant)]
    return sorted(chosen + irrelevant[: list_size - len(chosen)])


def with_documents(sample: Sample, documents: Sequence[int]) -> Sample:
    """Return the sample of a query with some of its documents."""
    target: RankTarget = sample.target
    first_window = (0, *accumulate(target.windows))
    windows = [window for number in documents for window in range(first_window[number], first_window[number + 1])]
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
    """Samples of queries, each with at most `list_size` documents in an epoch."""

    queries: Sequence[Sample]
    list_size: int
    seed: int

    def __len__(self) -> int:
        return len(self.queries)

    def at(self, epoch: int) -> Sequence[Sample]:
        """Return the samples of an epoch; each is made when it is read."""
        return _EpochOfLists(self, epoch)


@dataclass(frozen=True, slots=True, eq=False)
class _EpochOfLists(Sequence[Sample]):
    lists: SampledLists
    epoch: int

    def __len__(self) -> int:
        return len(self.lists)

    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[place] for place in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        sample, list_size = self.lists.queries[number], self.lists.list_size
        if len(sample.target.relevance) <= list_size:
            return sample
        seed = derive_seed(self.lists.seed, Stream.LISTS, self.epoch, number)
        return with_documents(sample, sampled_documents(sample.target.relevance, list_size, seed))
