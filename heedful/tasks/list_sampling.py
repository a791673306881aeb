"""Sampling of documents for queries with long lists of documents. `Rank` uses it for training; each epoch differs."""

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
    """The target of a query. Each field has one value per document."""

    values: tuple[float, ...]  # target of the loss: relevance, or a teacher's score
    windows: tuple[int, ...]  # how many windows the document has
    relevance: tuple[float, ...]  # above 0: relevant


def sampled_documents(relevance: Sequence[float], list_size: int, seed: int) -> list[int]:
    """Return the ascending indices of `list_size` documents: the relevant ones, and random irrelevant ones.

    If `list_size` or more documents are relevant, some are left out in favour of one irrelevant document, if any.

    >>> sampled_documents([1, 0, 0, 0, 2, 0], 3, seed=1)
    [0, 3, 4]
    """
    shuffled = np.random.Philox(key=seed).random_raw(len(relevance)).argsort(kind="stable").tolist()
    relevant = [index for index in shuffled if relevance[index] > 0]
    irrelevant = [index for index in shuffled if relevance[index] <= 0]
    chosen = relevant[: list_size - bool(irrelevant)]
    return sorted(chosen + irrelevant[: list_size - len(chosen)])


def with_documents(sample: Sample, documents: Sequence[int]) -> Sample:
    """Return the sample of a query restricted to the documents with these indices."""
    target: RankTarget = sample.target
    window_bounds = (0, *accumulate(target.windows))
    windows = [window for index in documents for window in range(window_bounds[index], window_bounds[index + 1])]
    spans = [slice(*span) for span in pairwise(sample.bounds)]
    return Sample.of(
        [sample.tokens[spans[window]].tolist() for window in windows],
        [sample.types[spans[window]].tolist() for window in windows],
        target=RankTarget(
            values=tuple(target.values[index] for index in documents),
            windows=tuple(target.windows[index] for index in documents),
            relevance=tuple(target.relevance[index] for index in documents),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledLists(PerEpochSamples):
    """Samples of queries with at most `list_size` documents each. Every epoch samples other documents."""

    queries: Sequence[Sample]
    list_size: int
    seed: int

    def __len__(self) -> int:
        return len(self.queries)

    def at(self, epoch: int) -> Sequence[Sample]:
        """Return the samples of an epoch. Documents are sampled when a sample is accessed."""
        return _EpochOfLists(self, epoch)


@dataclass(frozen=True, slots=True, eq=False)
class _EpochOfLists(Sequence[Sample]):
    """The samples of one epoch."""

    lists: SampledLists
    epoch: int

    def __len__(self) -> int:
        return len(self.lists)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        sample, list_size = self.lists.queries[index], self.lists.list_size
        if len(sample.target.relevance) <= list_size:
            return sample
        seed = derive_seed(self.lists.seed, Stream.LISTS, self.epoch, index)
        return with_documents(sample, sampled_documents(sample.target.relevance, list_size, seed))
