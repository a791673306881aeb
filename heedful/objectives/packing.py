"""Packed rows: samples of about the same number of tokens, each of several whole sequences.

Steps of equally many rows have about equally many tokens without padding: windows of documents and pairs of segments
are planned as ranges of the corpus, and packed into rows by best fit.
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
from heedful.objectives.special_tokens import Ids, SpecialTokenTemplate, Types
from heedful.random_streams import Stream

BLOCK = 2048  # sequences that are packed at a time
FULL = 0.99  # used share of a row from which it is complete
SHORT = 0.1  # probability that the pairs of a document are shorter
Range = tuple[int, int]
Ranges = NDArray[np.int64]  # [sequences, texts, 2]: begin and end of each text in the corpus


class PackedRows(Sequence[Sample]):
    """Rows of sequences that are ranges of a corpus; targets are the labels of the sequences, if any.

    Args:
        corpus: The corpus.
        template: Special tokens around a sequence.
        ranges: Bounds of the texts of each sequence; with `pair` there are two, and the second may be empty.
        size: Tokens of a row, at most.
        seed: Of the order in which sequences are packed.
        labels: One for each sequence.
        shape: The shape of all rows; None: as many sequences as fit.
        continued: The template of sequences after which their document continues; None: `template`.
        pair: The template of two texts.
    """

    def __init__(
        self,
        corpus: Corpus,
        template: SpecialTokenTemplate,
        ranges: Ranges,
        size: int,
        seed: int,
        labels: NDArray[np.int64] | None = None,
        shape: FixedShape | None = None,
        continued: SpecialTokenTemplate | None = None,
        pair: SpecialTokenTemplate | None = None,
    ) -> None:
        self.corpus, self.template, self.ranges, self.labels = corpus, template, ranges, labels
        self.size, self.shape, self.continued = size, shape, continued or template
        self._continues = np.zeros(len(ranges), dtype=np.bool_)
        if continued is not None:
            self._continues = ~np.isin(ranges[:, -1, 1], corpus.segments[corpus.documents[1:]])
        widths = np.where(self._continues, self.continued.width, template.width)
        self.pair = pair
        self._is_pair = np.zeros(len(ranges), dtype=np.bool_)
        if pair is not None:
            self._is_pair = ranges[:, 1, 1] > ranges[:, 1, 0]
            widths = np.where(self._is_pair, pair.width, widths)
        lengths = (ranges[:, :, 1] - ranges[:, :, 0]).sum(1) + widths
        self.tokens = int(lengths.sum())
        room, most = (size, None) if shape is None else shape.room(size)
        rows = pack_best_fit(lengths, room, seed, most)
        self._members = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        self._bounds = np.array([0, *accumulate(map(len, rows))])

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._bounds) - 1

    def __getitem__(self, number: Any) -> Any:
        """Return a row; its target has the label of each of its sequences, if there are labels."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        members = self._members[self._bounds[number] : self._bounds[number + 1]]
        filled = [self._sequence(member) for member in members]
        sample = Sample(
            tokens=np.concatenate([ids for ids, _ in filled]),
            types=np.concatenate([types for _, types in filled]),
            bounds=(0, *accumulate(len(ids) for ids, _ in filled)),
            target=None if self.labels is None else self.labels[members],
        )
        return sample if self.shape is None else self.shape.pad_sample(sample, self.size)

    def _sequence(self, number: int) -> tuple[Ids, Types]:
        """Tokens and types of a sequence."""
        template = self.continued if self._continues[number] else self.template
        if self.pair is not None and self._is_pair[number]:
            template = self.pair
        texts = self.ranges[number][: len(template.kinds)]
        return template.fill(*(self.corpus.tokens(int(start), int(stop)) for start, stop in texts))


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedShape:
    """One number of tokens and of sequences for all rows, which are filled up by sequences of padding."""

    sequences: int  # at most `sequences - 1` of text
    pad: int  # token id
    longest: int | None = None  # tokens of a sequence, at most; None: any number

    def room(self, size: int) -> tuple[int, int]:
        """Return the maximum numbers of tokens and sequences of text in a row of `size` tokens.

        Raises:
            HeedfulError: If `sequences` leaves no room for text.
        """
        if self.sequences < 2 or size <= self.total(size):
            raise HeedfulError(
                f"sequences_per_pack is {self.sequences}; expected a number from 2 to below the {size} of a row"
            )
        return size - self.total(size), self.sequences - 1

    def total(self, size: int) -> int:
        """Return the number of sequences of a row; those of padding can fill a row without text."""
        return self.sequences + (0 if self.longest is None else math.ceil(size / self.longest) - 1)

    def pad_sample(self, sample: Sample, size: int) -> Sample:
        """Return the sample with padding, split evenly over its sequences of padding, whose labels are -1."""
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
    """Pack sequences into rows by best fit, longest first, over blocks of a random order.

    The sequences of rows that are not full are packed again in the next block, those of the emptiest rows first, and no
    more than a block of them, so that time stays linear even if rows cannot be full.

    Args:
        lengths: Of the sequences.
        size: Tokens of a row, at most.
        seed: Of the order.
        most: Sequences of a row, at most; None: as many as fit.

    Returns:
        The numbers of the sequences of each row.

    >>> [row.tolist() for row in pack_best_fit(np.array([3, 4, 1, 4]), 6, seed=0)]
    [[0], [3], [1, 2]]
    """
    if len(lengths) and lengths.max() > size:
        raise HeedfulError(
            f"a sequence has {lengths.max()} tokens, but a row has {size}: set pack_length to {lengths.max()} or more"
        )
    shuffled = epoch_order(len(lengths), derive_seed(seed, Stream.PACKING), 0)
    rows: list[NDArray[np.int64]] = []
    rest: list[int] = []
    for start in range(0, len(shuffled), BLOCK):
        block = [*rest, *shuffled[start : start + BLOCK].tolist()]
        packed, rest = _fit_block(block, lengths, size, most), []
        for row, free in sorted(packed, key=lambda row_and_free: -row_and_free[1]):
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
    """Pack one block; returns rows, and the free tokens of each."""
    full: list[tuple[int, int]] = []  # free tokens and number of each row with `most` sequences
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # free tokens and number of each open row; sorted
    sizes = lengths[numbers].tolist()
    for place in sorted(range(len(numbers)), key=lambda place: -sizes[place]):
        best = bisect_left(free, (sizes[place], -1))
        left, row = free.pop(best) if best < len(free) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(numbers[place])
        if len(rows[row]) == most:
            full.append((left - sizes[place], row))
        else:
            insort(free, (left - sizes[place], row))
    return [(rows[row], left) for left, row in sorted(full + free, key=lambda entry: entry[1])]


# -- which documents --------------------------------------------------------------------------------------------


def held_out(corpus: Corpus, share: float) -> NDArray[np.bool_]:
    """Mark the documents of the validation split; equal documents are in the same split.

    Documents are chosen by a hash of their text. If that would leave one of the two splits without any, the document
    that is next by its hash is moved there.
    """
    mark = np.uint64(0x9E3779B97F4A7C15)
    mixed_up = (np.asarray(corpus.hashes) ^ (np.asarray(corpus.hashes) >> np.uint64(29))) * mark
    ranks = (mixed_up >> np.uint64(11)).astype(np.float64)
    held = ranks < share * 2.0**53
    if len(np.unique(ranks)) > 1 and held.all():
        held = ranks < ranks.max()
    elif len(np.unique(ranks)) > 1 and not held.any():
        held = ranks == ranks.min()
    return held


# -- windows ----------------------------------------------------------------------------------------------------


def segment_windows(corpus: Corpus, documents: NDArray[np.int64], room: int) -> Ranges:
    """Cut documents into windows of whole segments, up to `room` tokens; a longer segment is cut."""
    windows: list[tuple[int, int]] = []
    for document in documents.tolist():
        bounds = segment_bounds(corpus, document)
        start, stop = bounds[0], bounds[-1]
        while start < stop:
            end = min(stop, start + room)
            if end < stop:
                whole = bounds[bisect_left(bounds, end + 1) - 1]
                end = whole if whole > start else end
            windows.append((start, end))
            start = end
    return np.array(windows, dtype=np.int64).reshape(-1, 1, 2)


def segment_bounds(corpus: Corpus, document: int) -> list[int]:
    """Return the first token of each segment of a document, and the end of the last one."""
    first, last = corpus.documents[document : document + 2].tolist()
    bounds: list[int] = corpus.segments[first : last + 1].tolist()
    return bounds


# -- pairs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentPairs(PerEpochSamples):
    """Pairs of segments with their labels, other ones in each epoch.

    `nsp`: the second part follows the first (0), or is from another document (1), as in the published code of Devlin et
    al. 2019: the pairs of 10 % of the documents have a shorter target length, sampled for the document; a part from
    another document begins at a random segment; the text that it displaced is used for the next pair; a chunk of one
    segment always gets such a part, so that more than half of the pairs are labelled 1; a pair that is too long loses
    tokens at a random end of its longer part.
    `sop`: both parts are consecutive, as written (0) or swapped (1) (Lan et al. 2020, section 3.1); a chunk of one
    segment is split in the middle.
    Epochs fill slightly different numbers of rows. Each has as many as the first: a later one leaves out or repeats
    rows, from a random row on.
    """

    corpus: Corpus
    documents: NDArray[np.int64]
    template: SpecialTokenTemplate
    length: int
    size: int
    seed: int
    swapped: bool = False  # sop, else nsp
    short_seq_prob: float = SHORT
    shape: FixedShape | None = None

    def __len__(self) -> int:
        """Number of rows of an epoch."""
        return len(_rows_of_epoch(self, 0))

    def at(self, epoch: int) -> Sequence[Sample]:
        """Return the rows of an epoch."""
        rows = _rows_of_epoch(self, epoch)
        return rows if epoch == 0 else _RotatedRows(rows, len(self), self.seed, epoch)

    def plan(self, epoch: int) -> tuple[Ranges, NDArray[np.int64]]:
        """Return all pairs of an epoch, and their labels."""
        room = self.template.room(self.length)
        ranges: list[tuple[Range, Range]] = []
        labels: list[int] = []
        for place, document in enumerate(self.documents.tolist()):
            draw = Random(derive_seed(self.seed, Stream.SEGMENT_PAIRS, epoch, document))
            for pair, label in self._pairs(place, room, draw):
                ranges.append(pair)
                labels.append(label)
        return np.array(ranges, dtype=np.int64).reshape(-1, 2, 2), np.array(labels, dtype=np.int64)

    def _pairs(self, place: int, room: int, draw: Random) -> list[tuple[tuple[Range, Range], int]]:
        """The pairs of a document, by its index in `documents`."""
        bounds, pairs = segment_bounds(self.corpus, int(self.documents[place])), []
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
                a, b, label = (start, middle), (middle, stop), int(draw.random() < 0.5)
                a, b = (b, a) if label else (a, b)
            elif end - first == 1 or draw.random() < 0.5:
                a, label = (bounds[first], bounds[cut]), 1
                b, end = self._from_other_document(place, target - (a[1] - a[0]), draw), cut
            else:
                a, b, label = (bounds[first], bounds[cut]), (bounds[cut], bounds[end]), 0
            if a[0] < a[1] and b[0] < b[1]:
                pairs.append((truncate_pair(a, b, room, draw), label))
            first = end
        return pairs

    def _from_other_document(self, place: int, target: int, draw: Random) -> Range:
        """Segments of about `target` tokens from a random position of another document."""
        document = (place + 1 + draw.randrange(len(self.documents) - 1)) % len(self.documents)
        bounds = segment_bounds(self.corpus, int(self.documents[document]))
        first = draw.randrange(len(bounds) - 1)
        end = first + 1
        while end < len(bounds) - 1 and bounds[end] - bounds[first] < target:
            end += 1
        return bounds[first], bounds[end]


def truncate_pair(a: Range, b: Range, room: int, draw: Random) -> tuple[Range, Range]:
    """Remove tokens at random ends of the longer text until both have at most `room` tokens."""
    ends = [list(a), list(b)]
    for _ in range(max(0, a[1] - a[0] + b[1] - b[0] - room)):
        longer = ends[0] if ends[0][1] - ends[0][0] > ends[1][1] - ends[1][0] else ends[1]
        if draw.random() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return (ends[0][0], ends[0][1]), (ends[1][0], ends[1][1])


@lru_cache(maxsize=4)
def _rows_of_epoch(pairs: Any, epoch: int) -> PackedRows:  # Any: a run-time type check would ask for its length
    ranges, labels = pairs.plan(epoch)
    seed = derive_seed(pairs.seed, epoch)
    return PackedRows(pairs.corpus, pairs.template, ranges, pairs.size, seed, labels, pairs.shape)


class _RotatedRows(Sequence[Sample]):
    """`count` rows of an epoch, beginning at a random one and continuing at the first after the last."""

    def __init__(self, rows: PackedRows, count: int, seed: int, epoch: int) -> None:
        self._rows, self._count, self._first = rows, count, derive_seed(seed, Stream.VALIDATION, epoch)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        return self._rows[(self._first + number) % len(self._rows)]
