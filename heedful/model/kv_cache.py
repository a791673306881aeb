"""The KV cache of a decoder: keys and values of the tokens that are decoded already.

A cache has a line for each sequence, which is an array of slots: one slot holds the key and value of one token. Lines
have equal lengths; slots after the last token are unwritten and never attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.nn.layout import Layout
from heedful.packed import Packed, send

GROWTH = 64  # lines have a multiple of this number of slots; each time they are full, they grow by half at least


@dataclass(kw_only=True, slots=True, eq=False)
class KVBuffer:
    """Keys and values of one layer."""

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
        """Select these lines, in this order; a line may occur several times."""
        self.keys = self.keys.index_select(0, lines)
        self.values = self.values.index_select(0, lines)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of all slots, lines end to end."""
        return self.keys.flatten(0, 1), self.values.flatten(0, 1)


class KVCache:
    """Keys and values of every layer for the sequences of a batch, and the hidden states of the encoder, if any."""

    def __init__(self, sequences: int, memory: Tensor | None = None, bounds: Sequence[int] = (0,)) -> None:
        """Make an empty cache.

        Args:
            sequences: How many sequences to decode.
            memory: The encoder's hidden states. None without an encoder.
            bounds: Bounds of the encoder's sequences in `memory`.
        """
        self.lengths = [0] * sequences  # cached rows of each sequence
        self.source = list(range(sequences))  # index of the encoder's sequence for each sequence; beams share one
        self.memory = memory
        self.memory_lengths = [stop - start for start, stop in pairwise(bounds)]
        self._bounds = tuple(bounds)
        self._line_slots = 0
        self._memory_line_slots = max([1, *self.memory_lengths])
        self._self_attention: dict[int, KVBuffer] = {}  # by layer
        self._cross_attention: dict[int, KVBuffer] = {}  # by layer
        self._device_lengths: Tensor | None = None  # `lengths` on the device of the rows, once they were sent
        self._memory_layouts: dict[tuple[int, ...], Layout] = {}  # by the number of rows of each sequence

    def lengths_on(self, device: torch.device) -> Int[Tensor, " sequences"]:
        """Return `lengths` on a device; they are copied there once, and counted on there."""
        if self._device_lengths is None:
            self._device_lengths = send(self.lengths, device)
        return self._device_lengths

    def continue_positions(self, batch: Packed) -> Packed:
        """Return the batch with positions that continue those of the cached rows."""
        assert len(batch) == len(self.lengths), f"{len(batch)} sequences, but {len(self.lengths)} are cached"
        starts = self.lengths_on(batch.positions.device)
        if not _has_single_rows(batch):
            counts = send(batch.lengths, starts.device)
            starts = starts.repeat_interleave(counts, output_size=batch.bounds[-1])
        return replace(batch, positions=batch.positions + starts, past_lengths=tuple(self.lengths))

    def layout(self, batch: Packed) -> Layout:
        """Return the layout of self-attention, from each sequence's rows to its line of the cache."""
        totals = [length + past for length, past in zip(batch.lengths, self.lengths, strict=True)]
        if (needed := max(totals, default=1)) > self._line_slots:
            self._line_slots = _rounded_slots(max(needed, self._line_slots * 3 // 2))
        stride = self._line_slots
        keys = tuple((line * stride, line * stride + total) for line, total in enumerate(totals))
        layout = Layout(Layout.of(batch.bounds).queries, keys, stride=stride)
        if _has_single_rows(batch):
            device = batch.tokens.device
            layout.cached(("key lengths", device), lambda: self.lengths_on(device) + 1)
        return layout

    def memory_layout(self, batch: Packed) -> Layout | None:
        """Return the layout of cross-attention, or None without an encoder. Beams of one source share a span."""
        if self.memory is None:
            return None
        key = tuple(batch.lengths)
        if key not in self._memory_layouts:
            self._memory_layouts = {key: self._make_memory_layout(batch)}  # that of a prompt is used once
        return self._memory_layouts[key]

    def _make_memory_layout(self, batch: Packed) -> Layout:
        """Make the layout of cross-attention."""
        stride, queries, keys, first = self._memory_line_slots, [], [], 0
        for source, group in groupby(zip(self.source, batch.lengths, strict=True), key=lambda pair: pair[0]):
            rows = sum(length for _, length in group)
            queries.append((first, first + rows))
            keys.append((source * stride, source * stride + self.memory_lengths[source]))
            first += rows
        in_order = [start for start, _ in keys] == [line * stride for line in range(len(self.memory_lengths))]
        return Layout(tuple(queries), tuple(keys), stride=stride if in_order else None)

    def update(self, layer: int, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new rows after the cached ones; returns those of all slots, end to end.

        Args:
            layout: The result of `layout` for the batch.
        """
        assert layout.stride is not None
        if layer not in self._self_attention:
            empty = (rows.new_zeros(len(self.lengths), 0, *rows.shape[1:]) for rows in (k, v))
            self._self_attention[layer] = KVBuffer(keys=next(empty), values=next(empty))
        buffer = self._self_attention[layer]
        buffer.grow(layout.stride)
        slots = layout.cached(("cache slots", k.device), lambda: _slots_of_queries(layout, k.device))
        keys, values = buffer.rows()
        return keys.index_copy_(0, slots, k), values.index_copy_(0, slots, v)

    def update_cross(self, layer: int, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return keys and values of the encoder's hidden states in one layer, projected on first use."""
        assert self.memory is not None
        if layer not in self._cross_attention:
            stride = self._memory_line_slots
            slot_list = [
                line * stride + position
                for line, length in enumerate(self.memory_lengths)
                for position in range(length)
            ]
            slots = send(slot_list, self.memory.device)
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
        """Add to each sequence the count of its rows that were written."""
        self.lengths = [past + length for past, length in zip(self.lengths, lengths, strict=True)]
        if self._device_lengths is not None:
            self._device_lengths = self._device_lengths + lengths[0] if len({*lengths}) == 1 else None

    def reorder(self, sequences: Sequence[int]) -> None:
        """Select these sequences, in this order; one may occur several times (beam search). Others are dropped."""
        if list(sequences) == list(range(len(self.lengths))):
            return
        if self._self_attention:
            lines = send(sequences, next(iter(self._self_attention.values())).keys.device)
            for buffer in self._self_attention.values():
                buffer.reorder(lines)
        self.lengths = [self.lengths[sequence] for sequence in sequences]
        self._device_lengths, self._memory_layouts = None, {}
        self.source = [self.source[sequence] for sequence in sequences]
        sources = sorted(set(self.source))
        if self.memory is not None and len(sources) < len(self.memory_lengths):
            lines = send(sources, self.memory.device)
            for buffer in self._cross_attention.values():
                buffer.reorder(lines)
            self.memory = torch.cat(
                [self.memory[self._bounds[source] : self._bounds[source + 1]] for source in sources]
            )
            self.memory_lengths = [self.memory_lengths[source] for source in sources]
            self._bounds = (0, *torch.tensor(self.memory_lengths).cumsum(0).tolist())
            self.source = [sources.index(source) for source in self.source]


def _has_single_rows(batch: Packed) -> bool:
    """Return whether each sequence has one row, as in all steps but the first one."""
    return batch.bounds == tuple(range(len(batch) + 1))


def _rounded_slots(slots: int) -> int:
    """Return the number of slots of a line that holds at least that many."""
    return -(-slots // GROWTH) * GROWTH


def _slots_of_queries(layout: Layout, device: torch.device) -> Int[Tensor, " rows"]:
    """Return the slot of each query row: the queries of a sequence have its last written slots."""
    if all(stop - start == 1 for start, stop in layout.queries) and layout.stride is not None:
        lines = torch.arange(len(layout.queries), device=device)
        return lines * layout.stride + layout.key_lengths(device) - 1
    spans = zip(layout.queries, layout.keys, strict=True)
    slots = [torch.arange(last - (stop - start), last) for (start, stop), (_, last) in spans]
    return torch.cat([*slots, torch.arange(0)]).to(device)


class FixedKVCache(KVCache):
    """The cache of a batch in a CUDA graph: lines with a fixed number of slots, and lengths that the device counts.

    A sequence of the maximum length writes its last row again.
    """

    def __init__(self, cache: KVCache, max_length: int, device: torch.device) -> None:
        """Give the lines of a cache room for sequences of `max_length` rows, which is more than any has now."""
        super().__init__(len(cache.lengths), cache.memory, cache._bounds)
        self.lengths, self.source = list(cache.lengths), cache.source  # at the beginning
        self._max_length, self._line_slots = max_length, max(_rounded_slots(max_length), cache._line_slots)
        self._memory_line_slots = cache._memory_line_slots
        self._self_attention, self._cross_attention = cache._self_attention, cache._cross_attention
        for buffer in self._self_attention.values():
            buffer.grow(self._line_slots)
        self.device_lengths = send(self.lengths, device)

    def continue_positions(self, batch: Packed) -> Packed:
        """Return the batch with positions that continue those of the cached rows."""
        return replace(batch, positions=self.device_lengths, past_lengths=(self._max_length - 1,) * len(batch))

    def layout(self, batch: Packed) -> Layout:
        """Return the layout of self-attention to all slots of a line, as many as the device counts."""
        stride = self._line_slots
        keys = tuple((line * stride, (line + 1) * stride) for line in range(len(batch)))
        return Layout(Layout.of(batch.bounds).queries, keys, stride=stride, key_counts=self.device_lengths + 1)

    def advance(self, lengths: Sequence[int]) -> None:
        """Count a row that was written to each sequence, on the device."""
        self.device_lengths.copy_((self.device_lengths + 1).clamp(max=self._max_length - 1))

    def hand_back(self, cache: KVCache, steps: int) -> None:
        """Let the cache from which this one was made continue, after `steps` steps."""
        cache.lengths = [length + steps for length in self.lengths]
        cache._line_slots, cache._device_lengths = self._line_slots, None
