"""What a decoder remembers while its sequences grow: keys and values of rows that came earlier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.nn.layout import Layout
from heedful.packed import Packed

STEP = 64  # places by which room grows


@dataclass(kw_only=True, slots=True, eq=False)
class KVBuffer:
    """Keys and values of one layer, a line of places for each sequence; those not written yet are never seen."""

    keys: Float[Tensor, "lines places heads width"]
    values: Float[Tensor, "lines places heads value_width"]

    def grow(self, places: int) -> None:
        """At least so many places."""
        if places > self.keys.shape[1]:
            more = places - self.keys.shape[1]
            self.keys, self.values = (
                torch.cat([each, each.new_zeros(len(each), more, *each.shape[2:])], 1)
                for each in (self.keys, self.values)
            )

    def reorder(self, lines: Int[Tensor, " lines"]) -> None:
        """These lines, in this order; one may occur several times."""
        self.keys, self.values = self.keys.index_select(0, lines), self.values.index_select(0, lines)

    def rows(self) -> tuple[Tensor, Tensor]:
        """All places end to end."""
        return self.keys.flatten(0, 1), self.values.flatten(0, 1)


class KVCache:
    """The sequences of a batch, each with a line of places in every layer, and the encoder's rows where there are any.

    `source` says which sequence of the encoder each one reads; neighbours may read the same.
    """

    def __init__(self, sequences: int, memory: Tensor | None = None, bounds: Sequence[int] = (0,)) -> None:
        self.lengths = [0] * sequences
        self.source = list(range(sequences))
        self.memory, self.memory_lengths = memory, [b - a for a, b in pairwise(bounds)]
        self._bounds = tuple(bounds)
        self._places, self._memory_places = 0, max([1, *self.memory_lengths])  # of a line
        self._own: dict[int, KVBuffer] = {}  # by layer
        self._cross: dict[int, KVBuffer] = {}

    def continue_positions(self, batch: Packed) -> Packed:
        """The same rows, counted on from those that came earlier."""
        assert len(batch) == len(self.lengths), f"{len(batch)} sequences, but {len(self.lengths)} are remembered"
        starts = torch.tensor(self.lengths).repeat_interleave(torch.tensor(batch.lengths))
        return replace(batch, positions=batch.positions + starts.to(batch.positions.device), before=tuple(self.lengths))

    def layout(self, batch: Packed) -> Layout:
        """Which places the rows of a placed batch see, of their own sequences."""
        totals = [n + m for n, m in zip(batch.lengths, self.lengths, strict=True)]
        self._places = width = max(self._places, -(-max(totals, default=1) // STEP) * STEP)
        keys = tuple((line * width, line * width + total) for line, total in enumerate(totals))
        return Layout(Layout.of(batch.bounds).queries, keys, stride=width)

    def memory_layout(self, batch: Packed) -> Layout | None:
        """Which places they see of the encoder's; sequences that read the same are one, since their order is free."""
        if self.memory is None:
            return None
        width, queries, keys, first = self._memory_places, [], [], 0
        for source, group in groupby(zip(self.source, batch.lengths, strict=True), key=lambda each: each[0]):
            rows = sum(length for _, length in group)
            queries.append((first, first + rows))
            keys.append((source * width, source * width + self.memory_lengths[source]))
            first += rows
        whole = [start for start, _ in keys] == [line * width for line in range(len(self.memory_lengths))]
        return Layout(tuple(queries), tuple(keys), stride=width if whole else None)

    def update(self, layer: int, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values behind those that came earlier; returns all places end to end."""
        assert layout.stride is not None
        if layer not in self._own:
            empty = (each.new_zeros(len(self.lengths), 0, *each.shape[1:]) for each in (k, v))
            self._own[layer] = KVBuffer(keys=next(empty), values=next(empty))
        room = self._own[layer]
        room.grow(layout.stride)
        places = layout.cached(("written", k.device), lambda: _written(layout).to(k.device))
        keys, values = room.rows()
        return keys.index_copy_(0, places, k), values.index_copy_(0, places, v)

    def update_cross(self, layer: int, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's rows, projected once."""
        assert self.memory is not None
        if layer not in self._cross:
            width = self._memory_places
            rows = [line * width + place for line, length in enumerate(self.memory_lengths) for place in range(length)]
            there = torch.tensor(rows, dtype=torch.long, device=self.memory.device)
            k, v = (
                each.new_zeros(len(self.memory_lengths) * width, *each.shape[1:]).index_copy_(0, there, each)
                for each in project(self.memory)
            )
            self._cross[layer] = KVBuffer(keys=k.unflatten(0, (-1, width)), values=v.unflatten(0, (-1, width)))
        return self._cross[layer].rows()

    def advance(self, lengths: Sequence[int]) -> None:
        """So many rows have been written to each sequence."""
        self.lengths = [n + m for n, m in zip(self.lengths, lengths, strict=True)]

    def reorder(self, numbers: Sequence[int]) -> None:
        """Go on with these sequences in this order; one may be followed several times. Others are forgotten."""
        if list(numbers) == list(range(len(self.lengths))):
            return
        device = next(iter(self._own.values())).keys.device if self._own else None
        lines = torch.tensor(list(numbers), dtype=torch.long, device=device)
        for room in self._own.values():
            room.reorder(lines)
        self.lengths = [self.lengths[number] for number in numbers]
        self.source = [self.source[number] for number in numbers]
        kept = sorted(set(self.source))
        if self.memory is not None and len(kept) < len(self.memory_lengths):
            lines = torch.tensor(kept, dtype=torch.long, device=self.memory.device)
            for room in self._cross.values():
                room.reorder(lines)
            self.memory = torch.cat([self.memory[self._bounds[each] : self._bounds[each + 1]] for each in kept])
            self.memory_lengths = [self.memory_lengths[each] for each in kept]
            self._bounds = (0, *torch.tensor(self.memory_lengths).cumsum(0).tolist())
            self.source = [kept.index(each) for each in self.source]


def _written(layout: Layout) -> Int[Tensor, " rows"]:
    """The place of each query row among the keys: the last ones of its sequence."""
    spans = zip(layout.queries, layout.keys, strict=True)
    places = [torch.arange(last - (stop - start), last) for (start, stop), (_, last) in spans]
    return torch.cat([*places, torch.arange(0)])
