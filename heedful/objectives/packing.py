"""Rows: samples of one number of tokens, each of several whole sequences that were fitted together.

A step of so many rows has the same number of tokens every time, and nothing is padded: windows of documents and pairs
of segments are planned as ranges of the corpus, and put into rows by best fit.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heedful.data.corpus.shards import Corpus
from heedful.data.sampler import derive_seed, epoch_order
from heedful.errors import HeedfulError
from heedful.objectives.base import PerEpochSamples, Sample
from heedful.objectives.special_tokens import SpecialTokenTemplate

PLAN, FILL, HELD = 3, 4, 5  # what a seed is mixed with here
BLOCK = 2048  # sequences that are fitted together
FULL = 0.99  # the share of a row from which it is left as it is
SHORT = 0.1  # the probability that the pairs of a document are shorter
Range = tuple[int, int]
Ranges = NDArray[np.int64]  # [sequences, texts, 2]: where in the corpus each text begins and ends


class PackedRows(Sequence[Sample]):
    """Rows of at most `size` tokens, of sequences that are ranges of a corpus; targets are their labels, if any.

    `inner` is the frame of sequences after which their document goes on; None: that of all. With `pair`, the frame of
    two texts, ranges have two texts, and a sequence whose second text is empty is one text.
    """

    def __init__(
        self,
        corpus: Corpus,
        frame: SpecialTokenTemplate,
        ranges: Ranges,
        size: int,
        seed: int,
        labels: NDArray[np.int64] | None = None,
        steady: FixedShape | None = None,
        inner: SpecialTokenTemplate | None = None,
        pair: SpecialTokenTemplate | None = None,
    ) -> None:
        self.corpus, self.frame, self.ranges, self.labels = corpus, frame, ranges, labels
        self.size, self.steady, self.inner = size, steady, inner or frame
        self._goes_on = np.zeros(len(ranges), dtype=np.bool_)
        if inner is not None:
            self._goes_on = ~np.isin(ranges[:, -1, 1], corpus.segments[corpus.documents[1:]])
        widths = np.where(self._goes_on, self.inner.width, frame.width)
        self.pair = pair
        self._is_pair = np.zeros(len(ranges), dtype=np.bool_)
        if pair is not None:
            self._is_pair = ranges[:, 1, 1] > ranges[:, 1, 0]
            widths = np.where(self._is_pair, pair.width, widths)
        lengths = (ranges[:, :, 1] - ranges[:, :, 0]).sum(1) + widths
        self.tokens = int(lengths.sum())
        room, most = (size, None) if steady is None else steady.room(size)
        rows = pack_best_fit(lengths, room, seed, most)
        self._members = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        self._bounds = np.array([0, *accumulate(map(len, rows))])

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._bounds) - 1

    def __getitem__(self, number: Any) -> Any:
        """A row; `target` holds the label of each of its sequences, where there are labels."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        members = self._members[self._bounds[number] : self._bounds[number + 1]]
        filled = [
            frame.fill(
                *(self.corpus.tokens(int(start), int(stop)) for start, stop in self.ranges[member][: len(frame.kinds)])
            )
            for member, frame in ((member, self._frame_of(member)) for member in members)
        ]
        sample = Sample(
            tokens=np.concatenate([ids for ids, _ in filled]),
            types=np.concatenate([types for _, types in filled]),
            bounds=(0, *accumulate(len(ids) for ids, _ in filled)),
            target=None if self.labels is None else self.labels[members],
        )
        return sample if self.steady is None else self.steady.filled(sample, self.size)

    def _frame_of(self, member: int) -> SpecialTokenTemplate:
        """The frame of a sequence."""
        if self.pair is not None and self._is_pair[member]:
            return self.pair
        return self.inner if self._goes_on[member] else self.frame


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedShape:
    """One shape for all rows: the same number of tokens and of sequences, reached by sequences of padding."""

    sequences: int  # at most `sequences - 1` of text
    pad: int  # token id
    longest: int | None = None  # tokens of a sequence that the model has positions for; None: any number

    def room(self, size: int) -> tuple[int, int]:
        """The most tokens and sequences of text in a row of `size` tokens.

        Raises:
            HeedfulError: If `sequences` leaves no room for text.
        """
        if self.sequences < 2 or size <= self.total(size):
            raise HeedfulError(
                f"sequences_per_pack is {self.sequences}; expected a number from 2 to below the {size} of a row"
            )
        return size - self.total(size), self.sequences - 1

    def total(self, size: int) -> int:
        """Sequences of a row, with enough of padding to fill a row without text."""
        return self.sequences + (0 if self.longest is None else math.ceil(size / self.longest) - 1)

    def filled(self, sample: Sample, size: int) -> Sample:
        """The sample with padding, split evenly over its sequences of padding, whose labels are -1."""
        missing, free = self.total(size) - len(sample.bounds) + 1, size - len(sample)
        target = sample.target
        if target is not None:
            target = np.pad(target, [(0, missing), *[(0, 0)] * (target.ndim - 1)], constant_values=-1)
        return Sample(
            tokens=np.pad(sample.tokens, (0, free), constant_values=self.pad),
            types=np.pad(sample.types, (0, free)),
            bounds=(*sample.bounds, *(len(sample) + free * number // missing for number in range(1, missing + 1))),
            target=target,
            filler=free,
        )


def pack_best_fit(lengths: NDArray[np.int64], size: int, seed: int, most: int | None = None) -> list[NDArray[np.int64]]:
    """The numbers of sequences that share a row: best fit, longest first, over a random order of all of them.

    `most` is how many may share one; None: as many as fit.
    Rows that are not full yet give their sequences back to the next block, the emptiest first and no more than a block
    of them: where lengths are such that rows cannot be full, time does not grow with what is given back.

    >>> [row.tolist() for row in pack_best_fit(np.array([3, 4, 1, 4]), 6, seed=0)]
    [[0], [3], [1, 2]]
    """
    if len(lengths) and lengths.max() > size:
        raise HeedfulError(f"a sequence has {lengths.max()} tokens, but a row {size}: set row to that many at least")
    shuffled = epoch_order(len(lengths), derive_seed(seed, FILL), 0)
    rows: list[NDArray[np.int64]] = []
    rest: list[int] = []
    for start in range(0, len(shuffled), BLOCK):
        block = [*rest, *shuffled[start : start + BLOCK].tolist()]
        made, rest = _fit_block(block, lengths, size, most), []
        for row, free in sorted(made, key=lambda each: -each[1]):
            if (
                free <= (1 - FULL) * size
                or len(row) == most
                or start + BLOCK >= len(shuffled)
                or len(rest) + len(row) > BLOCK
            ):
                rows.append(np.array(row))
            else:
                rest += row
    return rows


def _fit_block(
    numbers: list[int], lengths: NDArray[np.int64], size: int, most: int | None
) -> list[tuple[list[int], int]]:
    """Rows with what is free in each."""
    full: list[tuple[int, int]] = []  # as the open ones
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # of each open row, and its number; sorted
    sizes = lengths[numbers].tolist()
    for place in sorted(range(len(numbers)), key=lambda place: -sizes[place]):
        found = bisect_left(free, (sizes[place], -1))
        left, row = free.pop(found) if found < len(free) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(numbers[place])
        if len(rows[row]) == most:
            full.append((left - sizes[place], row))
        else:
            insort(free, (left - sizes[place], row))
    return [(rows[row], left) for left, row in sorted(full + free, key=lambda each: each[1])]


# -- which documents --------------------------------------------------------------------------------------------


def held_out(corpus: Corpus, share: float) -> NDArray[np.bool_]:
    """Which documents are set aside: by their text alone, so that equal ones are on the same side."""
    mark = np.uint64(0x9E3779B97F4A7C15)
    mixed_up = (np.asarray(corpus.hashes) ^ (np.asarray(corpus.hashes) >> np.uint64(29))) * mark
    return (mixed_up >> np.uint64(11)).astype(np.float64) < share * 2.0**53


# -- windows ----------------------------------------------------------------------------------------------------


def segment_windows(corpus: Corpus, documents: NDArray[np.int64], room: int) -> Ranges:
    """Whole segments of a document up to `room` tokens, one window after the other; a longer segment is cut."""
    found: list[tuple[int, int]] = []
    for document in documents.tolist():
        bounds = segment_bounds(corpus, document)
        start, stop = bounds[0], bounds[-1]
        while start < stop:
            end = min(stop, start + room)
            if end < stop:
                whole = bounds[bisect_left(bounds, end + 1) - 1]
                end = whole if whole > start else end
            found.append((start, end))
            start = end
    return np.array(found, dtype=np.int64).reshape(-1, 1, 2)


def segment_bounds(corpus: Corpus, document: int) -> list[int]:
    """Where the segments of a document begin, and where the last one ends."""
    first, last = corpus.documents[document : document + 2].tolist()
    bounds: list[int] = corpus.segments[first : last + 1].tolist()
    return bounds


# -- pairs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentPairs(PerEpochSamples):
    """Pairs of segments with their labels, made anew for each epoch.

    `nsp`: the second part follows the first (0), or is from another document (1), as the published code of Devlin et
    al. 2019 makes them: those of 10 % of the documents aim at one shorter length, drawn for the document, a random part
    comes from anywhere in its document, what it displaced is used for the next pair, a chunk of one segment always gets
    one, so more than half are not next; what is too long loses tokens at a random end of its longer part.
    `sop`: both parts are consecutive, as written (0) or swapped (1) (Lan et al. 2020, section 3.1); a chunk of one
    segment is parted within.
    Epochs differ a little in how many rows they fill; each has as many as the first, which a later one leaves out, or
    repeats, from a place of its own.
    """

    corpus: Corpus
    documents: NDArray[np.int64]
    frame: SpecialTokenTemplate
    length: int
    size: int
    seed: int
    swapped: bool = False  # sop, else nsp
    short_seq_prob: float = SHORT
    steady: FixedShape | None = None

    def __len__(self) -> int:
        """How many rows an epoch has."""
        return len(_planned(self, 0))

    def at(self, epoch: int) -> Sequence[Sample]:
        """The rows of an epoch."""
        return _planned(self, epoch) if epoch == 0 else _Turned(_planned(self, epoch), len(self), self.seed, epoch)

    def plan(self, epoch: int) -> tuple[Ranges, NDArray[np.int64]]:
        """All pairs of an epoch and their labels."""
        room = self.frame.room(self.length)
        ranges: list[tuple[Range, Range]] = []
        labels: list[int] = []
        for place, document in enumerate(self.documents.tolist()):
            draw = Random(derive_seed(self.seed, PLAN, epoch, document))
            for pair, label in self._pairs(place, room, draw):
                ranges.append(pair)
                labels.append(label)
        return np.array(ranges, dtype=np.int64).reshape(-1, 2, 2), np.array(labels, dtype=np.int64)

    def _pairs(self, place: int, room: int, draw: Random) -> list[tuple[tuple[Range, Range], int]]:
        """Those of the document in that place."""
        bounds, found = segment_bounds(self.corpus, int(self.documents[place])), []
        first, last = 0, len(bounds) - 1  # segments
        target = draw.randint(2, room) if draw.random() < self.short_seq_prob else room
        while first < last:
            end = first + 1
            while end < last and bounds[end] - bounds[first] < target:
                end += 1
            cut = draw.randint(first + 1, end - 1) if end - first > 1 else end
            if self.swapped:
                start, stop = bounds[first], bounds[end]
                middle = bounds[cut] if cut < end else (start + stop) // 2
                one, two, label = (start, middle), (middle, stop), int(draw.random() < 0.5)
                one, two = (two, one) if label else (one, two)
            elif end - first == 1 or draw.random() < 0.5:
                one, label = (bounds[first], bounds[cut]), 1
                two, end = self._other(place, target - (one[1] - one[0]), draw), cut
            else:
                one, two, label = (bounds[first], bounds[cut]), (bounds[cut], bounds[end]), 0
            if two[0] < two[1] and one[0] < one[1]:
                found.append((truncate_pair(one, two, room, draw), label))
            first = end
        return found

    def _other(self, place: int, target: int, draw: Random) -> Range:
        """Segments from a random place of another document."""
        other = (place + 1 + draw.randrange(len(self.documents) - 1)) % len(self.documents)
        bounds = segment_bounds(self.corpus, int(self.documents[other]))
        first = draw.randrange(len(bounds) - 1)
        end = first + 1
        while end < len(bounds) - 1 and bounds[end] - bounds[first] < target:
            end += 1
        return bounds[first], bounds[end]


def truncate_pair(one: Range, two: Range, room: int, draw: Random) -> tuple[Range, Range]:
    """Both in so much room: the longer one loses a token, at a random end, until they fit."""
    ends = [list(one), list(two)]
    for _ in range(max(0, one[1] - one[0] + two[1] - two[0] - room)):
        longer = ends[0] if ends[0][1] - ends[0][0] > ends[1][1] - ends[1][0] else ends[1]
        if draw.random() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return (ends[0][0], ends[0][1]), (ends[1][0], ends[1][1])


@lru_cache(maxsize=4)
def _planned(pairs: Any, epoch: int) -> PackedRows:  # Any: what checks types at run time asks a sequence for its length
    ranges, labels = pairs.plan(epoch)
    seed = derive_seed(pairs.seed, epoch)
    return PackedRows(pairs.corpus, pairs.frame, ranges, pairs.size, seed, labels, pairs.steady)


class _Turned(Sequence[Sample]):
    """So many rows of an epoch, from a random one on, around its end."""

    def __init__(self, rows: PackedRows, count: int, seed: int, epoch: int) -> None:
        self._rows, self._count, self._first = rows, count, derive_seed(seed, HELD, epoch)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        return self._rows[(self._first + number) % len(self._rows)]
