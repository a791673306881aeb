"""The KV cache of a decoder: keys and values of the rows that are decoded already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.nn.layout import Layout
from heedful.packed import Packed

GROWTH = 64  # slots by which a line grows


@dataclass(kw_only=True, slots=True, eq=False)
class KVBuffer:
    """Keys and values of one layer, in a line of slots for each sequence; unwritten slots are never attended to."""

    keys: Float[Tensor, "lines slots heads width"]
    values: Float[Tensor, "lines slots heads value_width"]

    def grow(self, slots: int) -> None:
        """Extend the lines to at least that many slots."""
        if slots > self.keys.shape[1]:
            missing = slots - self.keys.shape[1]
            self.keys, self.values = (
                torch.cat([buffer, buffer.new_zeros(len(buffer), missing, *buffer.shape[2:])], 1)
                for buffer in (self.keys, self.values)
            )

    def reorder(self, lines: Int[Tensor, " lines"]) -> None:
        """Keep these lines, in this order; one may occur several times."""
        self.keys, self.values = self.keys.index_select(0, lines), self.values.index_select(0, lines)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of all slots, lines end to end."""
        return self.keys.flatten(0, 1), self.values.flatten(0, 1)


class KVCache:
    """Keys and values of every layer for the sequences of a batch, and the rows of the encoder, if there is one."""

    def __init__(self, sequences: int, memory: Tensor | None = None, bounds: Sequence[int] = (0,)) -> None:
        """Make an empty cache.

        Args:
            sequences: Number of sequences to decode.
            memory: The encoder's rows; None: no encoder.
            bounds: Bounds of the encoder's sequences among its rows.
        """
        self.lengths = [0] * sequences  # cached rows of each sequence
        self.source = list(range(sequences))  # number of the encoder's sequence for each sequence; beams share one
        self.memory, self.memory_lengths = memory, [stop - start for start, stop in pairwise(bounds)]
        self._bounds = tuple(bounds)
        self._line_slots, self._memory_line_slots = 0, max([1, *self.memory_lengths])
        self._self_attention: dict[int, KVBuffer] = {}  # by layer
        self._cross_attention: dict[int, KVBuffer] = {}  # by layer

    def continue_positions(self, batch: Packed) -> Packed:
        """Return the batch with positions that continue those of the cached rows."""
        assert len(batch) == len(self.lengths), f"{len(batch)} sequences, but {len(self.lengths)} are cached"
        starts = torch.tensor(self.lengths).repeat_interleave(torch.tensor(batch.lengths))
        positions = batch.positions + starts.to(batch.positions.device)
        return replace(batch, positions=positions, past_lengths=tuple(self.lengths))

    def layout(self, batch: Packed) -> Layout:
        """Return the layout of self-attention, from each sequence's rows to its line of the cache."""
        totals = [length + past for length, past in zip(batch.lengths, self.lengths, strict=True)]
        self._line_slots = stride = max(self._line_slots, -(-max(totals, default=1) // GROWTH) * GROWTH)
        keys = tuple((line * stride, line * stride + total) for line, total in enumerate(totals))
        return Layout(Layout.of(batch.bounds).queries, keys, stride=stride)

    def memory_layout(self, batch: Packed) -> Layout | None:
        """Return the layout of cross-attention, or None without an encoder; beams of one source share a span."""
        if self.memory is None:
            return None
        stride, queries, keys, first = self._memory_line_slots, [], [], 0
        for source, group in groupby(zip(self.source, batch.lengths, strict=True), key=lambda pair: pair[0]):
            rows = sum(length for _, length in group)
            queries.append((first, first + rows))
            keys.append((source * stride, source * stride + self.memory_lengths[source]))
            first += rows
        in_order = [start for start, _ in keys] == [line * stride for line in range(len(self.memory_lengths))]
        return Layout(tuple(queries), tuple(keys), stride=stride if in_order else None)

    def update(self, layer: int, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values after the cached ones; returns the keys and values of all slots, end to end.

        Args:
            layout: The result of `layout` for the batch.
        """
        assert layout.stride is not None
        if layer not in self._self_attention:
            empty = (rows.new_zeros(len(self.lengths), 0, *rows.shape[1:]) for rows in (k, v))
            self._self_attention[layer] = KVBuffer(keys=next(empty), values=next(empty))
        buffer = self._self_attention[layer]
        buffer.grow(layout.stride)
        slots = layout.cached(("cache slots", k.device), lambda: _slots_of_queries(layout).to(k.device))
        keys, values = buffer.rows()
        return keys.index_copy_(0, slots, k), values.index_copy_(0, slots, v)

    def update_cross(self, layer: int, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return keys and values of the encoder's rows in one layer, projected on first use."""
        assert self.memory is not None
        if layer not in self._cross_attention:
            stride = self._memory_line_slots
            numbers = [
                line * stride + position
                for line, length in enumerate(self.memory_lengths)
                for position in range(length)
            ]
            slots = torch.tensor(numbers, dtype=torch.long, device=self.memory.device)
            k, v = (
                projected.new_zeros(len(self.memory_lengths) * stride, *projected.shape[1:]).index_copy_(
                    0, slots, projected
                )
                for projected in project(self.memory)
            )
            self._cross_attention[layer] = KVBuffer(
                keys=k.unflatten(0, (-1, stride)), values=v.unflatten(0, (-1, stride))
            )
        return self._cross_attention[layer].rows()

    def advance(self, lengths: Sequence[int]) -> None:
        """Add the numbers of rows that were written to each sequence."""
        self.lengths = [past + length for past, length in zip(self.lengths, lengths, strict=True)]

    def reorder(self, sequences: Sequence[int]) -> None:
        """Keep these sequences, in this order; one may occur several times (beam search). Others are dropped."""
        if list(sequences) == list(range(len(self.lengths))):
            return
        device = next(iter(self._self_attention.values())).keys.device if self._self_attention else None
        lines = torch.tensor(list(sequences), dtype=torch.long, device=device)
        for buffer in self._self_attention.values():
            buffer.reorder(lines)
        self.lengths = [self.lengths[number] for number in sequences]
        self.source = [self.source[number] for number in sequences]
        sources = sorted(set(self.source))
        if self.memory is not None and len(sources) < len(self.memory_lengths):
            lines = torch.tensor(sources, dtype=torch.long, device=self.memory.device)
            for buffer in self._cross_attention.values():
                buffer.reorder(lines)
            self.memory = torch.cat(
                [self.memory[self._bounds[number] : self._bounds[number + 1]] for number in sources]
            )
            self.memory_lengths = [self.memory_lengths[number] for number in sources]
            self._bounds = (0, *torch.tensor(self.memory_lengths).cumsum(0).tolist())
            self.source = [sources.index(number) for number in self.source]


def _slots_of_queries(layout: Layout) -> Int[Tensor, " rows"]:
    """Return the slot of each query row among the keys: the queries of a sequence have its last slots."""
    spans = zip(layout.queries, layout.keys, strict=True)
    slots = [torch.arange(last - (stop - start), last) for (start, stop), (_, last) in spans]
    return torch.cat([*slots, torch.arange(0)])
