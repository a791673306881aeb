"""Packing of sequences for pre-training: a pack is a sample of several whole sequences, up to a number of tokens.

Since packs have about equal sizes, training steps with the same number of packs have about the same number of tokens,
without padding. Windows of documents and pairs of segments are planned as token ranges of the corpus. Best fit then
assigns the sequences to packs.
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
FULL = 0.99  # a pack with this share of its maximum tokens is full
SHORT_SEQ_PROB = 0.1  # probability that the pairs of a document have a shorter target length
Range = tuple[int, int]
Ranges = NDArray[np.int64]  # [sequences, texts, 2]: begin and end of each text, in tokens of the corpus


class PackedSequences(Sequence[Sample]):
    """The packs of a plan: a sequence is built from token ranges of a corpus when its pack is read.

    Args:
        corpus: The corpus.
        template: Special tokens around a sequence.
        ranges: Begin and end of the texts of each sequence. With `pair` a sequence has two texts, and the
            second one may be empty.
        size: Maximum tokens in a pack.
        seed: Seed of the order in which sequences are packed.
        labels: A label for each sequence, which becomes the target. If None, packs have no targets.
        shape: The fixed shape of all packs. If None, a pack has as many sequences as fit.
        continued: Special tokens around a sequence whose document continues after it. If None, `template` is used.
        pair: Special tokens around a sequence whose second text is not empty. If None, `template` is used.
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
        self.corpus = corpus
        self.template = template
        self.ranges = ranges
        self.labels = labels
        self.size = size
        self.shape = shape
        self.continued = continued or template
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
                f"a sequence has {lengths.max()} tokens, but a pack has {room} beside those that are reserved for "
                f"padding: raise pack_length from {size} to {size + int(lengths.max()) - room}, or shorten sequences"
            )
        packs = pack_best_fit(lengths, room, seed, max_sequences)
        # indices of the sequences of all packs, end to end; and the first element of each pack in them
        self._sequence_indices = np.concatenate(packs) if packs else np.zeros(0, dtype=np.int64)
        self._pack_bounds = np.array([0, *accumulate(map(len, packs))])

    def __len__(self) -> int:
        """Number of packs."""
        return len(self._pack_bounds) - 1

    def __getitem__(self, index: Any) -> Any:
        """Return a pack. Its target is the labels of its sequences, if there are labels."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        sequence_indices = self._sequence_indices[self._pack_bounds[index] : self._pack_bounds[index + 1]]
        sequences = [self._sequence(sequence) for sequence in sequence_indices]
        sample = Sample(
            tokens=np.concatenate([ids for ids, _ in sequences]),
            types=np.concatenate([types for _, types in sequences]),
            bounds=(0, *accumulate(len(ids) for ids, _ in sequences)),
            target=None if self.labels is None else self.labels[sequence_indices],
        )
        return sample if self.shape is None else self.shape.pad_sample(sample, self.size)

    def _sequence(self, index: int) -> tuple[Ids, Types]:
        """Return the token ids and token types of a sequence."""
        template = self.continued if self._continues[index] else self.template
        if self.pair is not None and self._is_pair[index]:
            template = self.pair
        texts = self.ranges[index][: len(template.text_types)]
        return template.fill(*(self.corpus.tokens(int(start), int(stop)) for start, stop in texts))


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedShape:
    """A fixed number of tokens and of sequences for all packs. Sequences of padding fill up a pack."""

    sequences: int  # sequences in a pack; at most `sequences - 1` of them are text
    pad: int  # token id of padding
    longest: int | None = None  # maximum tokens in a sequence, if there is a limit

    def room(self, size: int) -> tuple[int, int]:
        """Return the maximum text tokens and the maximum text sequences in a pack of `size` tokens.

        Raises:
            HeedfulError: If `sequences` leaves no room for text.
        """
        max_sequences = size - 1 - (self.total(size) - self.sequences)
        if not 2 <= self.sequences <= max_sequences:
            raise HeedfulError(
                f"sequences_per_pack is {self.sequences}; expected a number from 2 to {max_sequences} for packs of "
                f"{size} tokens"
            )
        return size - self.total(size), self.sequences - 1

    def total(self, size: int) -> int:
        """Return the number of sequences in a pack, enough for padding to fill a pack without text."""
        return self.sequences + (0 if self.longest is None else math.ceil(size / self.longest) - 1)

    def pad_sample(self, sample: Sample, size: int) -> Sample:
        """Pad a sample to the shape.

        Padding tokens are split evenly over the sequences of padding, whose labels are -1.
        """
        padding_sequences = self.total(size) - len(sample.bounds) + 1
        padding_tokens = size - len(sample)
        padding_ends = (padding_tokens * count // padding_sequences for count in range(1, padding_sequences + 1))
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
    """Pack sequences by best fit, longest first, over blocks of a random order.

    The sequences of packs that are not full are packed again in the next block, those of the emptiest packs first. At
    most `BLOCK` of them are packed again, so that the time is linear even if no pack becomes full.

    Args:
        lengths: Tokens of each sequence.
        size: Maximum tokens in a pack.
        seed: Seed of the random order.
        max_sequences: Maximum sequences in a pack. If None, only the tokens are limited.

    Returns:
        For each pack, the indices of its sequences.

    Raises:
        HeedfulError: If a sequence is longer than a pack.

    >>> [pack.tolist() for pack in pack_best_fit(np.array([3, 4, 1, 4]), 6, seed=0)]
    [[0], [3], [1, 2]]
    """
    if len(lengths) and lengths.max() > size:
        raise HeedfulError(
            f"a sequence has {lengths.max()} tokens, but a pack has {size}: set pack_length to {lengths.max()} or more"
        )
    shuffled = epoch_order(len(lengths), derive_seed(seed, Stream.PACKING), 0)
    packs: list[NDArray[np.int64]] = []
    repacked: list[int] = []  # sequences of packs that are not full
    for start in range(0, len(shuffled), BLOCK):
        block = [*repacked, *shuffled[start : start + BLOCK].tolist()]
        is_last_block = start + BLOCK >= len(shuffled)
        packed = _fit_block(block, lengths, size, max_sequences)
        repacked = []
        for pack, free_tokens in sorted(packed, key=lambda pack_and_free: -pack_and_free[1]):
            is_full = free_tokens <= (1 - FULL) * size or len(pack) == max_sequences
            if is_full or is_last_block or len(repacked) + len(pack) > BLOCK:
                packs.append(np.array(pack))
            else:
                repacked += pack
    return packs


def _fit_block(
    sequences: list[int], lengths: NDArray[np.int64], size: int, max_sequences: int | None
) -> list[tuple[list[int], int]]:
    """Pack one block of sequences; return the packs in their order of creation, each with its free tokens."""
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # free tokens and index of each pack below `max_sequences`; sorted
    closed_packs: list[tuple[int, int]] = []  # free tokens and index of each pack with `max_sequences`
    sizes = lengths[sequences].tolist()
    for index in sorted(range(len(sequences)), key=lambda index: -sizes[index]):
        best = bisect_left(open_packs, (sizes[index], -1))  # the pack with the least free tokens that suffice
        free_tokens, pack = open_packs.pop(best) if best < len(open_packs) else (size, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(sequences[index])
        free_tokens -= sizes[index]
        if len(packs[pack]) == max_sequences:
            closed_packs.append((free_tokens, pack))
        else:
            insort(open_packs, (free_tokens, pack))
    by_creation = sorted(closed_packs + open_packs, key=lambda entry: entry[1])
    return [(packs[pack], free_tokens) for free_tokens, pack in by_creation]


# -- validation split -------------------------------------------------------------------------------------------


def held_out(corpus: Corpus, share: float) -> NDArray[np.bool_]:
    """Mark the documents of the validation split. Documents with equal texts are in the same split.

    Documents are chosen by a hash of their text. If this leaves train or validation empty, the document with the
    largest or the smallest hash is moved there, unless all documents are equal.

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
    """Return the first token of each segment of a document, then the end of the last segment."""
    first, last = corpus.documents[document : document + 2].tolist()
    bounds: list[int] = corpus.segments[first : last + 1].tolist()
    return bounds


# -- pairs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentPairs(PerEpochSamples):
    """Packs of labelled pairs of segments. Each epoch has new pairs.

    The segments of a document are grouped into chunks of about the target length. Each chunk makes one pair:

    * nsp: the second part follows the first (label 0), or is from another document (label 1), as in the published code
      of Devlin et al. 2019. A part from another document begins at a random segment. The text that it replaces is used
      for the next pair. A chunk of one segment always gets a part from another document, so that more than half of the
      pairs have label 1.
    * sop: both parts of the chunk, as written (label 0) or swapped (label 1) (Lan et al. 2020, section 3.1). A chunk of
      one segment is split in the middle.

    A document has a shorter target length with probability `short_seq_prob`. A pair that is too long loses tokens at a
    random end of its longer part. Epochs fill slightly different numbers of packs. Every epoch has as many packs as the
    first one: it begins at a random pack, and leaves some packs out or repeats some.
    """

    corpus: Corpus
    documents: NDArray[np.int64]  # indices of the documents in the corpus
    template: SpecialTokenTemplate  # special tokens around a pair
    length: int  # maximum tokens in a sequence
    size: int  # maximum tokens in a pack
    seed: int
    swapped: bool = False  # True for sop, False for nsp
    short_seq_prob: float = SHORT_SEQ_PROB
    shape: FixedShape | None = None  # fixed shape of all packs; None for as many sequences as fit

    def __len__(self) -> int:
        """Number of packs in an epoch."""
        return len(_packs_of_epoch(self, 0))

    def at(self, epoch: int) -> Sequence[Sample]:
        """Return the packs of an epoch."""
        packs = _packs_of_epoch(self, epoch)
        return packs if epoch == 0 else _RotatedPacks(packs, len(self), self.seed, epoch)

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
        """Return the pairs of the document `documents[index]`, each with its label."""
        bounds = segment_bounds(self.corpus, int(self.documents[index]))
        pairs = []
        first, last = 0, len(bounds) - 1  # indices of segments; `last` is exclusive
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
                b = self._from_other_document(index, target_length - (a[1] - a[0]), rng)
                end = cut
            else:
                a, b, label = (bounds[first], bounds[cut]), (bounds[cut], bounds[end]), 0
            if a[0] < a[1] and b[0] < b[1]:
                pairs.append((truncate_pair(a, b, room, rng), label))
            first = end
        return pairs

    def _from_other_document(self, index: int, target_length: int, rng: Random) -> Range:
        """Return the token range of about `target_length` tokens from a random segment of a random other document."""
        other_index = (index + 1 + rng.randrange(len(self.documents) - 1)) % len(self.documents)
        bounds = segment_bounds(self.corpus, int(self.documents[other_index]))
        last = len(bounds) - 1
        first = rng.randrange(last)
        return bounds[first], bounds[_chunk_end(bounds, first, last, target_length)]


def _chunk_end(bounds: Sequence[int], first: int, last: int, target_length: int) -> int:
    """Return the end of a chunk: the first segment at which it has `target_length` tokens, or else `last`."""
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
def _packs_of_epoch(pairs: Any, epoch: int) -> PackedSequences:  # Any: a run-time type check would ask for its length
    """Return the packed pairs of an epoch."""
    ranges, labels = pairs.plan(epoch)
    seed = derive_seed(pairs.seed, epoch)
    return PackedSequences(pairs.corpus, pairs.template, ranges, pairs.size, seed, labels, pairs.shape)


class _RotatedPacks(Sequence[Sample]):
    """`count` packs of an epoch, beginning at a random pack and continuing with the first pack after the last one."""

    def __init__(self, packs: PackedSequences, count: int, seed: int, epoch: int) -> None:
        self._packs = packs
        self._count = count
        self._first = derive_seed(seed, Stream.VALIDATION, epoch)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._packs[(self._first + index) % len(self._packs)]
