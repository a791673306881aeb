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
        self._line_slots = 0  # slots of a line in the buffers of self-attention
        self._memory_line_slots = max([1, *self.memory_lengths])  # and in those of cross-attention
        self._self_attention: dict[int, KVBuffer] = {}  # by layer
        self._cross_attention: dict[int, KVBuffer] = {}  # by layer
        self._device_lengths: Tensor | None = None  # `lengths` on the device of the rows, once they were sent
        self._memory_layouts: dict[tuple[int, ...], Layout] = {}  # by the number of rows of each sequence

    def lengths_on(self, device: torch.device) -> Int[Tensor, " sequences"]:
        """Return `lengths` on a device; they are copied there once, and `advance` updates them there."""
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
        if (longest := max(totals, default=1)) > self._line_slots:
            self._line_slots = _rounded_slots(max(longest, self._line_slots * 3 // 2))
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
            # only the last layout is stored: the prompts' layout is used once, and all later steps have another one
            self._memory_layouts = {key: self._make_memory_layout(batch)}
        return self._memory_layouts[key]

    def _make_memory_layout(self, batch: Packed) -> Layout:
        """Make the layout of cross-attention; adjacent sequences of the same source are one span of queries in it."""
        stride = self._memory_line_slots
        queries: list[tuple[int, int]] = []
        keys: list[tuple[int, int]] = []
        first_row = 0
        for source, group in groupby(zip(self.source, batch.lengths, strict=True), key=lambda pair: pair[0]):
            rows = sum(length for _, length in group)
            queries.append((first_row, first_row + rows))
            keys.append((source * stride, source * stride + self.memory_lengths[source]))
            first_row += rows
        has_all_lines = [start for start, _ in keys] == [line * stride for line in range(len(self.memory_lengths))]
        return Layout(tuple(queries), tuple(keys), stride=stride if has_all_lines else None)

    def update(self, layer: int, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new rows after the cached ones.

        Args:
            layer: Index of the layer.
            k: Keys of the new rows.
            v: Values of the new rows.
            layout: The result of `layout` for the batch.

        Returns:
            The keys and the values of all slots of the layer, lines end to end.
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
        """Return the keys and values of the encoder's hidden states in one layer, lines end to end.

        Args:
            layer: Index of the layer.
            project: Computes keys and values from the hidden states; it is called at the first use of the layer.
        """
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
        """Count new rows, after their keys and values were written in all layers.

        Args:
            lengths: Number of new rows of each sequence.
        """
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
            source_rows = [self.memory[self._bounds[source] : self._bounds[source + 1]] for source in sources]
            self.memory = torch.cat(source_rows)
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
    """The cache of a decoding step in a CUDA graph: lines have a fixed number of slots, and lengths are on the device.

    A sequence of the maximum length overwrites its last row.
    """

    def __init__(self, cache: KVCache, max_length: int, device: torch.device) -> None:
        """Take over the buffers of a cache, and extend its lines.

        Args:
            cache: The cache, which is not used until `hand_back`.
            max_length: Maximum number of rows of a sequence; more than any sequence has now.
            device: Device of the buffers.
        """
        super().__init__(len(cache.lengths), cache.memory, cache._bounds)
        self.lengths, self.source = list(cache.lengths), cache.source  # `lengths` are those before the first step
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
        """Return the layout of self-attention to whole lines; `key_counts` limits it to the written slots."""
        stride = self._line_slots
        keys = tuple((line * stride, (line + 1) * stride) for line in range(len(batch)))
        return Layout(Layout.of(batch.bounds).queries, keys, stride=stride, key_counts=self.device_lengths + 1)

    def advance(self, lengths: Sequence[int]) -> None:
        """Count one new row of each sequence, on the device."""
        self.device_lengths.copy_((self.device_lengths + 1).clamp(max=self._max_length - 1))

    def hand_back(self, cache: KVCache, steps: int) -> None:
        """Update the lengths of the original cache, which is used again after this one has decoded `steps` steps."""
        cache.lengths = [length + steps for length in self.lengths]
        cache._line_slots, cache._device_lengths = self._line_slots, None
