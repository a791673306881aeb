"""Packing of sequences into rows: samples of about equally many tokens, each of several whole sequences.

Steps of equally many rows then have about equally many tokens, without padding. Windows of documents and pairs of
segments are planned as token ranges of the corpus, and packed into rows by best fit.
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
FULL = 0.99  # share of a row's tokens from which the row counts as full
SHORT_SEQ_PROB = 0.1  # probability that the pairs of a document have a shorter target length
Range = tuple[int, int]
Ranges = NDArray[np.int64]  # [sequences, texts, 2]: begin and end of each text, in tokens of the corpus


class PackedRows(Sequence[Sample]):
    """Rows of packed sequences; each sequence is made of token ranges of a corpus.

    Args:
        corpus: The corpus.
        template: Special tokens around a sequence.
        ranges: Begin and end of the texts of each sequence. With `pair` a sequence has two texts; the second may be
            empty.
        size: Maximum tokens in a row.
        seed: Seed of the order in which sequences are packed.
        labels: A label for each sequence, which becomes the target; None: there are no targets.
        shape: The shape of all rows; None: a row has as many sequences as fit.
        continued: Special tokens around a sequence whose document continues after it; None: `template`.
        pair: Special tokens around a sequence of two texts.
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
            document_ends = corpus.segments[corpus.documents[1:]]
            self._continues = ~np.isin(ranges[:, -1, 1], document_ends)
        special_tokens = np.where(self._continues, self.continued.width, template.width)
        self.pair = pair
        self._is_pair = np.zeros(len(ranges), dtype=np.bool_)
        if pair is not None:
            self._is_pair = ranges[:, 1, 1] > ranges[:, 1, 0]
            special_tokens = np.where(self._is_pair, pair.width, special_tokens)
        lengths = (ranges[:, :, 1] - ranges[:, :, 0]).sum(1) + special_tokens
        self.tokens = int(lengths.sum())
        room, max_sequences = (size, None) if shape is None else shape.room(size)
        if shape is not None and len(lengths) and lengths.max() > room:
            raise HeedfulError(
                f"a sequence has {lengths.max()} tokens, but a row has {room} beside those that are reserved for "
                f"padding: raise pack_length from {size} to {size + int(lengths.max()) - room}, or shorten sequences"
            )
        rows = pack_best_fit(lengths, room, seed, max_sequences)
        # the numbers of all rows' sequences end to end, and where each row begins in them
        self._sequence_numbers = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        self._row_bounds = np.array([0, *accumulate(map(len, rows))])

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._row_bounds) - 1

    def __getitem__(self, number: Any) -> Any:
        """Return a row; its target is the labels of its sequences, if there are labels."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        sequence_numbers = self._sequence_numbers[self._row_bounds[number] : self._row_bounds[number + 1]]
        sequences = [self._sequence(sequence) for sequence in sequence_numbers]
        sample = Sample(
            tokens=np.concatenate([ids for ids, _ in sequences]),
            types=np.concatenate([types for _, types in sequences]),
            bounds=(0, *accumulate(len(ids) for ids, _ in sequences)),
            target=None if self.labels is None else self.labels[sequence_numbers],
        )
        return sample if self.shape is None else self.shape.pad_sample(sample, self.size)

    def _sequence(self, number: int) -> tuple[Ids, Types]:
        """Return the token ids and types of a sequence."""
        template = self.continued if self._continues[number] else self.template
        if self.pair is not None and self._is_pair[number]:
            template = self.pair
        texts = self.ranges[number][: len(template.text_types)]
        return template.fill(*(self.corpus.tokens(int(start), int(stop)) for start, stop in texts))


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedShape:
    """One number of tokens and one number of sequences for all rows, which sequences of padding fill up."""

    sequences: int  # sequences in a row; at most `sequences - 1` of them are text
    pad: int  # token id of padding
    longest: int | None = None  # maximum tokens in a sequence; None: no limit

    def room(self, size: int) -> tuple[int, int]:
        """Return the maximum numbers of text tokens and of text sequences in a row of `size` tokens.

        Raises:
            HeedfulError: If `sequences` leaves no room for text.
        """
        most = size - 1 - (self.total(size) - self.sequences)
        if not 2 <= self.sequences <= most:
            raise HeedfulError(
                f"sequences_per_pack is {self.sequences}; expected a number from 2 to {most} for rows of {size} tokens"
            )
        return size - self.total(size), self.sequences - 1

    def total(self, size: int) -> int:
        """Return the number of sequences in a row, with enough sequences of padding to fill a row without text."""
        return self.sequences + (0 if self.longest is None else math.ceil(size / self.longest) - 1)

    def pad_sample(self, sample: Sample, size: int) -> Sample:
        """Return the sample filled up to the shape.

        Padding tokens are split evenly over the sequences of padding, whose labels are -1.
        """
        padding_sequences = self.total(size) - len(sample.bounds) + 1
        padding_tokens = size - len(sample)
        padding_ends = (padding_tokens * number // padding_sequences for number in range(1, padding_sequences + 1))
        target = sample.target
        if target is not None:
            other_axes = [(0, 0)] * (target.ndim - 1)
            target = np.pad(target, [(0, padding_sequences), *other_axes], constant_values=-1)
        return Sample(
            tokens=np.pad(sample.tokens, (0, padding_tokens), constant_values=self.pad),
            types=np.pad(sample.types, (0, padding_tokens)),
            bounds=(*sample.bounds, *(len(sample) + end for end in padding_ends)),
            target=target,
            filler=padding_tokens,
        )


def pack_best_fit(
    lengths: NDArray[np.int64], size: int, seed: int, max_sequences: int | None = None
) -> list[NDArray[np.int64]]:
    """Pack sequences into rows by best fit, longest first, over blocks of a random order.

    The sequences of rows that are not full are packed again in the next block, those of the emptiest rows first. At
    most one block of them is packed again, so that the time is linear even if rows cannot become full.

    Args:
        lengths: Tokens of each sequence.
        size: Maximum tokens in a row.
        seed: Seed of the random order.
        max_sequences: Maximum sequences in a row; None: no limit.

    Returns:
        The numbers of the sequences of each row.

    Raises:
        HeedfulError: If a sequence is longer than a row.

    >>> [row.tolist() for row in pack_best_fit(np.array([3, 4, 1, 4]), 6, seed=0)]
    [[0], [3], [1, 2]]
    """
    if len(lengths) and lengths.max() > size:
        raise HeedfulError(
            f"a sequence has {lengths.max()} tokens, but a row has {size}: set pack_length to {lengths.max()} or more"
        )
    shuffled = epoch_order(len(lengths), derive_seed(seed, Stream.PACKING), 0)
    rows: list[NDArray[np.int64]] = []
    repacked: list[int] = []  # sequences of rows that are not full
    for start in range(0, len(shuffled), BLOCK):
        block = [*repacked, *shuffled[start : start + BLOCK].tolist()]
        is_last_block = start + BLOCK >= len(shuffled)
        packed, repacked = _fit_block(block, lengths, size, max_sequences), []
        for row, free in sorted(packed, key=lambda row_and_free: -row_and_free[1]):
            is_full = free <= (1 - FULL) * size or len(row) == max_sequences
            if is_full or is_last_block or len(repacked) + len(row) > BLOCK:
                rows.append(np.array(row))
            else:
                repacked += row
    return rows


def _fit_block(
    numbers: list[int], lengths: NDArray[np.int64], size: int, max_sequences: int | None
) -> list[tuple[list[int], int]]:
    """Pack one block of sequences; return the rows in their order of creation, each with its free tokens."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # free tokens and index of each row that takes more sequences; sorted
    closed_rows: list[tuple[int, int]] = []  # free tokens and index of each row with `max_sequences`
    sizes = lengths[numbers].tolist()
    for index in sorted(range(len(numbers)), key=lambda index: -sizes[index]):
        best = bisect_left(open_rows, (sizes[index], -1))  # the row with the least free tokens that suffice
        free, row = open_rows.pop(best) if best < len(open_rows) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(numbers[index])
        free -= sizes[index]
        if len(rows[row]) == max_sequences:
            closed_rows.append((free, row))
        else:
            insort(open_rows, (free, row))
    return [(rows[row], free) for free, row in sorted(closed_rows + open_rows, key=lambda entry: entry[1])]


# -- validation split -------------------------------------------------------------------------------------------


def held_out(corpus: Corpus, share: float) -> NDArray[np.bool_]:
    """Mark the documents of the validation split; documents with equal texts are in the same split.

    Documents are chosen by a hash of their text. If that would leave a split empty, the document with the largest or
    the smallest hash is moved there, unless all documents are equal.

    Args:
        corpus: The corpus.
        share: Share of the documents in the validation split, from 0 to 1.
    """
    multiplier = np.uint64(0x9E3779B97F4A7C15)
    hashes = np.asarray(corpus.hashes)
    mixed = (hashes ^ (hashes >> np.uint64(29))) * multiplier
    ranks = (mixed >> np.uint64(11)).astype(np.float64)  # below 2^53
    is_held_out = ranks < share * 2.0**53
    if len(np.unique(ranks)) > 1:
        if is_held_out.all():
            is_held_out = ranks < ranks.max()
        elif not is_held_out.any():
            is_held_out = ranks == ranks.min()
    return is_held_out


# -- windows ----------------------------------------------------------------------------------------------------


def segment_windows(corpus: Corpus, documents: NDArray[np.int64], room: int) -> Ranges:
    """Cut documents into windows of whole segments with at most `room` tokens, [windows, 1, 2].

    A segment of more than `room` tokens is cut.
    """
    windows: list[tuple[int, int]] = []
    for document in documents.tolist():
        bounds = segment_bounds(corpus, document)
        start, stop = bounds[0], bounds[-1]
        while start < stop:
            end = min(stop, start + room)
            if end < stop:
                last_segment_end = bounds[bisect_left(bounds, end + 1) - 1]
                end = last_segment_end if last_segment_end > start else end
            windows.append((start, end))
            start = end
    return np.array(windows, dtype=np.int64).reshape(-1, 1, 2)


def segment_bounds(corpus: Corpus, document: int) -> list[int]:
    """Return the first token of each segment of a document, and the end of its last segment."""
    first, last = corpus.documents[document : document + 2].tolist()
    bounds: list[int] = corpus.segments[first : last + 1].tolist()
    return bounds


# -- pairs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentPairs(PerEpochSamples):
    """Rows of labelled pairs of segments; each epoch has new pairs.

    The segments of a document are grouped into chunks of about the target length. Each chunk makes one pair:

    * nsp: the second part follows the first (label 0), or is from another document (label 1), as in the published code
      of Devlin et al. 2019. A part from another document begins at a random segment; the text that it replaces is used
      for the next pair. A chunk of one segment always gets a part from another document, so that more than half of the
      pairs have label 1.
    * sop: both parts of the chunk, as written (label 0) or swapped (label 1) (Lan et al. 2020, section 3.1). A chunk of
      one segment is split in the middle.

    A document has a shorter target length with probability `short_seq_prob`. A pair that is too long loses tokens at a
    random end of its longer part. Epochs fill slightly different numbers of rows; every epoch has as many rows as the
    first one, and leaves out or repeats some from a random row on.
    """

    corpus: Corpus
    documents: NDArray[np.int64]  # numbers of the documents
    template: SpecialTokenTemplate  # special tokens around a pair
    length: int  # maximum tokens in a sequence
    size: int  # maximum tokens in a row
    seed: int
    swapped: bool = False  # True: sop; False: nsp
    short_seq_prob: float = SHORT_SEQ_PROB
    shape: FixedShape | None = None  # the shape of all rows; None: as many sequences as fit

    def __len__(self) -> int:
        """Number of rows in an epoch."""
        return len(_rows_of_epoch(self, 0))

    def at(self, epoch: int) -> Sequence[Sample]:
        """Return the rows of an epoch."""
        rows = _rows_of_epoch(self, epoch)
        return rows if epoch == 0 else _RotatedRows(rows, len(self), self.seed, epoch)

    def plan(self, epoch: int) -> tuple[Ranges, NDArray[np.int64]]:
        """Return the token ranges of all pairs of an epoch, [pairs, 2, 2], and their labels, [pairs]."""
        room = self.template.room(self.length)
        ranges: list[tuple[Range, Range]] = []
        labels: list[int] = []
        for index, document in enumerate(self.documents.tolist()):
            rng = Random(derive_seed(self.seed, Stream.SEGMENT_PAIRS, epoch, document))
            for pair, label in self._pairs(index, room, rng):
                ranges.append(pair)
                labels.append(label)
        return np.array(ranges, dtype=np.int64).reshape(-1, 2, 2), np.array(labels, dtype=np.int64)

    def _pairs(self, index: int, room: int, rng: Random) -> list[tuple[tuple[Range, Range], int]]:
        """Return the pairs of a document with their labels; `index` is its index in `documents`."""
        bounds, pairs = segment_bounds(self.corpus, int(self.documents[index])), []
        first, last = 0, len(bounds) - 1  # segments
        target_length = rng.randint(2, room) if rng.random() < self.short_seq_prob else room
        while first < last:
            end = _chunk_end(bounds, first, last, target_length)
            cut = rng.randint(first + 1, end - 1) if end - first > 1 else end
            if self.swapped:
                start, stop = bounds[first], bounds[end]
                middle = bounds[cut] if cut < end else (start + stop) // 2
                a, b, label = (start, middle), (middle, stop), int(rng.random() < 0.5)
                a, b = (b, a) if label else (a, b)
            elif end - first == 1 or rng.random() < 0.5:
                a, label = (bounds[first], bounds[cut]), 1
                b, end = self._from_other_document(index, target_length - (a[1] - a[0]), rng), cut
            else:
                a, b, label = (bounds[first], bounds[cut]), (bounds[cut], bounds[end]), 0
            if a[0] < a[1] and b[0] < b[1]:
                pairs.append((truncate_pair(a, b, room, rng), label))
            first = end
        return pairs

    def _from_other_document(self, index: int, target_length: int, rng: Random) -> Range:
        """Return segments of about `target_length` tokens, from a random segment of a random other document on."""
        other_index = (index + 1 + rng.randrange(len(self.documents) - 1)) % len(self.documents)
        bounds = segment_bounds(self.corpus, int(self.documents[other_index]))
        last = len(bounds) - 1
        first = rng.randrange(last)
        return bounds[first], bounds[_chunk_end(bounds, first, last, target_length)]


def _chunk_end(bounds: Sequence[int], first: int, last: int, target_length: int) -> int:
    """Return the end of a chunk: the first segment after `first` at which it has `target_length` tokens, or `last`."""
    end = first + 1
    while end < last and bounds[end] - bounds[first] < target_length:
        end += 1
    return end


def truncate_pair(a: Range, b: Range, room: int, rng: Random) -> tuple[Range, Range]:
    """Remove tokens one by one at random ends of the longer text, until the pair has at most `room` tokens."""
    ranges = [list(a), list(b)]
    for _ in range(max(0, a[1] - a[0] + b[1] - b[0] - room)):
        longer = ranges[0] if ranges[0][1] - ranges[0][0] > ranges[1][1] - ranges[1][0] else ranges[1]
        if rng.random() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return (ranges[0][0], ranges[0][1]), (ranges[1][0], ranges[1][1])


@lru_cache(maxsize=4)
def _rows_of_epoch(pairs: Any, epoch: int) -> PackedRows:  # Any: a run-time type check would ask for its length
    """Return the packed pairs of an epoch."""
    ranges, labels = pairs.plan(epoch)
    seed = derive_seed(pairs.seed, epoch)
    return PackedRows(pairs.corpus, pairs.template, ranges, pairs.size, seed, labels, pairs.shape)


class _RotatedRows(Sequence[Sample]):
    """`count` rows of an epoch from a random row on; the first row follows the last one."""

    def __init__(self, rows: PackedRows, count: int, seed: int, epoch: int) -> None:
        self._rows, self._count, self._first = rows, count, derive_seed(seed, Stream.VALIDATION, epoch)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self._count:
            raise IndexError(number)
        return self._rows[(self._first + number) % len(self._rows)]
