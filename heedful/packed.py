"""`Packed`, the batch type of every model: the sequences of a batch are concatenated, without padding or mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from heedful.errors import DataError

IdExtremes = tuple[tuple[int, int], tuple[int, int]]  # (smallest token, largest token), (smallest type, largest type)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """The tokens of several sequences, concatenated: one row for each token.

    Sequence b is the rows bounds[b] to bounds[b + 1] - 1 and may be empty; flash-attention calls `bounds` cu_seqlens.
    `key_lengths` and `visibility` are for two-stream attention (Yang et al. 2019, section 2.3), in which some rows of a
    sequence are queries but not keys. If `visibility` is None, each row attends to all keys of its sequence.
    """

    tokens: Int[Tensor, " rows"]
    positions: Int[Tensor, " rows"]  # position of each row in its sequence, from 0
    types: Int[Tensor, " rows"]  # token type (segment) of each row
    bounds: tuple[int, ...]  # sequence boundaries on the host: sequences + 1 row indices, from 0 to the number of rows
    past_lengths: tuple[int, ...] | None = None  # cached rows of each sequence; None: there is no KV cache
    key_lengths: tuple[int, ...] | None = None  # number of first rows of each sequence that are keys; None: all
    visibility: tuple[Bool[Tensor, "_rows _keys"], ...] | None = None  # by sequence, True: a row attends to a key
    states: Float[Tensor, "rows _width"] | None = None  # stored outputs of the frozen layers; None: not stored
    extremes: IdExtremes | None = None  # `id_extremes` of a batch that was moved from the CPU

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Packed:
        """Pack sequences of token ids.

        Args:
            sequences: Token ids of each sequence.
            types: Token types of each sequence. If None, all are 0.

        Raises:
            DataError: If the lengths of `types` differ from those of `sequences`.

        >>> Packed.of([[101, 7592, 102], [101, 102]]).bounds
        (0, 3, 5)
        """
        lengths = [len(sequence) for sequence in sequences]
        if types is None:
            types = [[0] * length for length in lengths]
        elif (type_lengths := [len(sequence_types) for sequence_types in types]) != lengths:
            raise DataError(
                f"types have lengths {type_lengths} but the sequences have lengths {lengths}: give one type for each "
                "token"
            )
        return cls(
            tokens=_flatten(sequences),
            positions=_positions(lengths),
            types=_flatten(types),
            bounds=(0, *accumulate(lengths)),
        )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.bounds) - 1

    @property
    def lengths(self) -> list[int]:
        """Number of rows of each sequence."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    @property
    def max_length(self) -> int:
        """Length of the longest sequence, its rows in the KV cache included."""
        past_lengths = self.past_lengths or [0] * len(self)
        return max((length + past for length, past in zip(self.lengths, past_lengths, strict=True)), default=0)

    def spans(self) -> list[slice]:
        """Return the rows of each sequence as a slice."""
        return [slice(start, stop) for start, stop in pairwise(self.bounds)]

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """Split a tensor [rows, ...] into one tensor for each sequence; raises DataError for another number of rows."""
        if rows.shape[0] != self.bounds[-1]:
            raise DataError(f"the tensor has {rows.shape[0]} rows, but this batch has {self.bounds[-1]}")
        return list(rows.split(self.lengths))

    def first_rows(self) -> Int[Tensor, " sequences"]:
        """Return the row index of each sequence's first token; raises DataError for an empty sequence."""
        if empty := [sequence for sequence, length in enumerate(self.lengths) if length == 0]:
            raise DataError(f"sequences {empty} are empty: they have no first token to summarise them")
        return send(self.bounds[:-1], self.tokens.device)

    def last_rows(self) -> Int[Tensor, " sequences"]:
        """Return the row index of each sequence's last token; raises DataError for an empty sequence."""
        self.first_rows()
        return send(self.bounds[1:], self.tokens.device) - 1

    def select(self, rows: Int[Tensor, " sequences"]) -> Packed:
        """Return a batch in which each sequence consists of one of its rows, selected by row index."""
        tokens, positions, types = (column[rows] for column in (self.tokens, self.positions, self.types))
        return Packed(tokens=tokens, positions=positions, types=types, bounds=tuple(range(len(self) + 1)))

    def without_first(self, counts: Sequence[int]) -> tuple[Int[Tensor, " some"], Packed]:
        """Remove the first rows of each sequence; returns the indices of the remaining rows, and their batch.

        Args:
            counts: Number of rows to remove from each sequence; a sequence with fewer rows becomes empty.

        >>> rows, batch = Packed.of([[5, 6, 7], [8]]).without_first([1, 2])
        >>> rows.tolist(), batch.bounds
        ([1, 2], (0, 2, 2))
        """
        spans = [
            range(min(start + count, stop), stop)
            for count, (start, stop) in zip(counts, pairwise(self.bounds), strict=True)
        ]
        rows = _flatten(spans).to(self.tokens.device)
        tokens, positions, types = (column[rows] for column in (self.tokens, self.positions, self.types))
        bounds = (0, *accumulate(map(len, spans)))
        return rows, Packed(tokens=tokens, positions=positions, types=types, bounds=bounds)

    def shift_right(self, start: int | None) -> Packed:
        """Return decoder inputs for these targets: each sequence begins with `start` and loses its last token.

        Args:
            start: First token of all sequences. If None, each sequence begins with its last token.

        >>> Packed.of([[5, 6, 7], [8]]).shift_right(0).tokens.tolist()
        [0, 5, 6, 0]
        >>> Packed.of([[5, 6, 7], [8]]).shift_right(None).tokens.tolist()
        [7, 5, 6, 8]
        """
        tokens = torch.cat([self.tokens[:1], self.tokens[:-1]])[: len(self.tokens)]
        not_empty = [(first, stop - 1) for first, stop in pairwise(self.bounds) if first < stop]
        first_rows, last_rows = [first for first, _ in not_empty], [last for _, last in not_empty]
        tokens[first_rows] = self.tokens[last_rows] if start is None else start
        return replace(self, tokens=tokens)

    def pad_to_bucket(self) -> Packed:
        """Append a padding sequence that rounds the number of rows up, by at most 3 %.

        Batches then have few different numbers of rows, for which libraries prepare their matrix products.

        >>> Packed.of([[7] * 130]).pad_to_bucket().bounds
        (0, 130, 132)
        """
        rows = self.bounds[-1]
        bucket_size = 1 << max(0, rows.bit_length() - 6)
        padding = -rows % bucket_size
        return Packed(
            tokens=F.pad(self.tokens, (0, padding)),
            positions=F.pad(self.positions, (0, padding)),
            types=F.pad(self.types, (0, padding)),
            bounds=(*self.bounds, rows + padding),
            past_lengths=None if self.past_lengths is None else (*self.past_lengths, 0),
            key_lengths=None if self.key_lengths is None else (*self.key_lengths, padding),
            visibility=None
            if self.visibility is None
            else (*self.visibility, self.visibility[0].new_ones(padding, padding)),
            states=None if self.states is None else F.pad(self.states, (0, 0, 0, padding)),
        )

    def id_extremes(self) -> IdExtremes | None:
        """Return the smallest and the largest token and type; None without rows, or if they were never on the CPU.

        The embedding layer compares these ids with the sizes of its tables, because an id beyond a table ends the
        process on a GPU. They are stored before a batch moves to a GPU, since reading them there would wait for it.
        """
        if self.extremes is not None or self.tokens.device.type != "cpu" or not len(self.tokens):
            return self.extremes
        (low, high), (low_type, high_type) = ((int(x) for x in ids.aminmax()) for ids in (self.tokens, self.types))
        return (low, high), (low_type, high_type)

    def to(self, device: torch.device | str) -> Packed:
        """Return the batch with its tensors on a device."""
        return replace(
            self,
            extremes=None if torch.device(device).type == "cpu" else self.id_extremes(),
            tokens=self.tokens.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            types=self.types.to(device, non_blocking=True),
            states=None if self.states is None else self.states.to(device, non_blocking=True),
            visibility=None
            if self.visibility is None
            else tuple(visible.to(device, non_blocking=True) for visible in self.visibility),
        )


def send(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.long) -> Int[Tensor, " values"]:
    """Copy integers to a tensor on a device, without waiting for the copy to end."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _flatten(sequences: Sequence[Sequence[int]]) -> Int[Tensor, " rows"]:
    """Concatenate sequences of integers."""
    integers = np.fromiter(chain.from_iterable(sequences), np.int64, sum(map(len, sequences)))
    return torch.from_numpy(integers)  # three times as fast as torch.tensor of a list


def _positions(lengths: Sequence[int]) -> Int[Tensor, " rows"]:
    """Return the position of each row in its sequence.

    >>> _positions([3, 1]).tolist()
    [0, 1, 2, 0]
    """
    counts = np.array(lengths, np.int64)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy(np.arange(len(starts)) - starts)
