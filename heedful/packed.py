"""Packed: the one batch type. All sequences of a batch lie end to end; there is no padding and no mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from heedful.errors import HeedfulError


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Rows of several sequences laid end to end.

    Sequence number b is rows bounds[b] to bounds[b + 1] (bounds stay on the host); a sequence may be empty. `keys` and
    `sees` are for two streams (Yang et al. 2019, section 2.3): rows that look on a sequence and are not part of it.
    """

    tokens: Int[Tensor, " rows"]
    positions: Int[Tensor, " rows"]  # from 0 in each sequence
    types: Int[Tensor, " rows"]  # which segment of its sequence a row belongs to
    bounds: tuple[int, ...]  # sequences + 1 row numbers, from 0 to the number of rows
    past_lengths: tuple[int, ...] | None = None  # rows of each sequence that came earlier, while decoding
    key_lengths: tuple[int, ...] | None = None  # so many first rows of each sequence are seen, the others only look on
    visibility: tuple[Bool[Tensor, "_rows _keys"], ...] | None = None  # which rows see which keys; None: all see all

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Packed:
        """Lay token ids end to end; types default to 0.

        >>> Packed.of([[101, 7592, 102], [101, 102]]).bounds
        (0, 3, 5)
        """
        lengths = [len(sequence) for sequence in sequences]
        if types is None:
            types = [[0] * length for length in lengths]
        elif [len(each) for each in types] != lengths:
            raise HeedfulError(
                f"types have lengths {[len(each) for each in types]} but the sequences have lengths {lengths}: "
                "give one type for each token"
            )
        return cls(
            tokens=_flat(sequences),
            positions=_flat([range(length) for length in lengths]),
            types=_flat(types),
            bounds=(0, *accumulate(lengths)),
        )

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self.bounds) - 1

    @property
    def lengths(self) -> list[int]:
        """How many rows each sequence has."""
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def max_length(self) -> int:
        """How many places the longest sequence has, with the rows that came earlier."""
        return max((n + m for n, m in zip(self.lengths, self.past_lengths or [0] * len(self), strict=True)), default=0)

    def spans(self) -> list[slice]:
        """The rows of each sequence."""
        return [slice(start, stop) for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """Split anything that has one entry for each row into one tensor for each sequence."""
        if rows.shape[0] != self.bounds[-1]:
            raise HeedfulError(f"{rows.shape[0]} rows were given, but this batch has {self.bounds[-1]}")
        return list(rows.split(self.lengths))

    def first_rows(self) -> Int[Tensor, " sequences"]:
        """The row number of each sequence's first token; an empty sequence has none and is refused."""
        if empty := [number for number, length in enumerate(self.lengths) if length == 0]:
            raise HeedfulError(f"sequences {empty} are empty: they have no first token to summarise them")
        return torch.tensor(self.bounds[:-1], dtype=torch.long, device=self.tokens.device)

    def last_rows(self) -> Int[Tensor, " sequences"]:
        """The row number of each sequence's last token; an empty sequence is refused."""
        self.first_rows()
        return torch.tensor(self.bounds[1:], dtype=torch.long, device=self.tokens.device) - 1

    def select(self, rows: Int[Tensor, " sequences"]) -> Packed:
        """These rows alone, one of each sequence."""
        tokens, positions, types = (each[rows] for each in (self.tokens, self.positions, self.types))
        return Packed(tokens=tokens, positions=positions, types=types, bounds=tuple(range(len(self) + 1)))

    def shift_right(self, start: int) -> Packed:
        """Each sequence one place to the right, its last token dropped: what a decoder reads to predict this one.

        >>> Packed.of([[5, 6, 7], [8]]).shifted(0).tokens.tolist()
        [0, 5, 6, 0]
        """
        tokens = torch.cat([self.tokens.new_full((1,), start), self.tokens[:-1]])[: len(self.tokens)]
        tokens[[first for first, last in pairwise(self.bounds) if first < last]] = start
        return replace(self, tokens=tokens)

    def pad_to_bucket(self) -> Packed:
        """The same with one more sequence, up to 3 % as long as all rows, so that few numbers of rows occur.

        >>> Packed.of([[7] * 130]).filled().bounds
        (0, 130, 132)
        """
        rows = self.bounds[-1]
        step = 1 << max(0, rows.bit_length() - 6)
        more = -rows % step
        return Packed(
            tokens=F.pad(self.tokens, (0, more)),
            positions=F.pad(self.positions, (0, more)),
            types=F.pad(self.types, (0, more)),
            bounds=(*self.bounds, rows + more),
            past_lengths=None if self.past_lengths is None else (*self.past_lengths, 0),
            key_lengths=None if self.key_lengths is None else (*self.key_lengths, more),
            visibility=None if self.visibility is None else (*self.visibility, self.visibility[0].new_ones(more, more)),
        )

    def to(self, device: torch.device | str) -> Packed:
        """The same batch with its tensors on the given device."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            types=self.types.to(device, non_blocking=True),
            sees=None
            if self.visibility is None
            else tuple(each.to(device, non_blocking=True) for each in self.visibility),
        )


def _flat(rows: Sequence[Sequence[int]]) -> Int[Tensor, " rows"]:
    return torch.tensor(list(chain.from_iterable(rows)), dtype=torch.long)
