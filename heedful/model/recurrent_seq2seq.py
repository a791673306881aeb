"""A recurrent encoder and decoder, with or without attention of the decoder to the encoder's hidden states (`rows`).

A `RecurrentSeq2SeqModel` has the interface of a `Transformer` with encoder and decoder; its cache holds the decoder's
state. `build.py` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from heedful.errors import DataError, ModelError
from heedful.model.attention import ExecutionOptions, select_rows
from heedful.model.classic import BidirectionalRnn, Bounds, Rows, time_major_order
from heedful.model.classic_config import (
    ClassicConfig,
    GlobalAttention,
    HardAttention,
    LocalM,
    LocalP,
    Recurrent,
    RecurrentSeq2Seq,
    SourceAttentionConfigs,
)
from heedful.model.embedding import EmbeddingLayer
from heedful.model.kv_cache import KVCache
from heedful.model.stack import Transformer
from heedful.model.trace import Trace, TraceItem
from heedful.nn.dropout import dropout
from heedful.nn.layout import Layout
from heedful.nn.local_attention import LocalPredictive, local_monotonic
from heedful.nn.scores import (
    Additive,
    General,
    Location,
    Score,
    cosine,
    dot,
    hard_weights,
    sample_weights,
    scaled_dot,
    soft_weights,
)
from heedful.packed import Packed

Lines = Float[Tensor, "lines slots width"]  # rows of each sequence, then padding, which is never attended to
State = tuple[Tensor, ...]  # (h,) of a GRU or (h, c) of an LSTM, [layers, sequences, width] each


# -- attention to the source ----------------------------------------------------------------------------------------


class EncodedSource(NamedTuple):
    """Keys and values for attention to the source, in a padded line for each sequence."""

    keys: Float[Tensor, "lines slots key_width"]
    values: Float[Tensor, "lines slots width"]  # the encoder's hidden states
    lengths: tuple[int, ...]  # tokens of each sequence

    def is_row(self) -> Bool[Tensor, "lines slots"]:
        """Return which slots hold a hidden state, not padding."""
        lengths = torch.tensor(self.lengths, device=self.keys.device)
        return torch.arange(self.keys.shape[1], device=self.keys.device) < lengths[:, None]

    def layout(self, queries: int) -> Layout:
        """Return the layout of attention from `queries` queries for each sequence to its line."""
        lines, slots = self.keys.shape[:2]
        spans = tuple((line * slots, line * slots + length) for line, length in enumerate(self.lengths))
        return Layout(Layout.of(range(0, lines * queries + 1, queries)).queries, spans)

    def select(self, lines: Sequence[int]) -> EncodedSource:
        """Return these lines, in this order."""
        index = torch.tensor(list(lines), dtype=torch.long, device=self.keys.device)
        lengths = tuple(self.lengths[line] for line in lines)
        return EncodedSource(self.keys.index_select(0, index), self.values.index_select(0, index), lengths)

    def first(self, count: int) -> EncodedSource:
        """Return the first `count` lines."""
        return EncodedSource(self.keys[:count], self.values[:count], self.lengths[:count])

    def with_identity_values(self) -> EncodedSource:
        """Return a source whose values are unit vectors, so that their weighted sum is the vector of weights."""
        slots = self.keys.shape[1]
        identity = torch.eye(slots, dtype=self.values.dtype, device=self.values.device)
        return self._replace(values=identity.expand(len(self.keys), -1, -1))


class SourceAttention(nn.Module):
    """Attention of the decoder's states to the encoder's hidden states."""

    def __init__(self, config: SourceAttentionConfigs, width: int) -> None:
        super().__init__()
        self.config = config
        longest = config.longest if isinstance(config, GlobalAttention | HardAttention) else 1
        score_makers: dict[str, Callable[[], Score]] = {
            "cosine": lambda: cosine,
            "additive": lambda: Additive(width=width, key_width=width, inner_width=width // 2),
            "location": lambda: Location(width=width, longest=longest),
            "general": lambda: General(width=width, key_width=width),
            "dot": lambda: dot,
            "scaled_dot": lambda: scaled_dot,
        }
        self.score = score_makers[config.score]()
        self.local = None  # local-p attention, which predicts the centre of its window
        if isinstance(config, LocalP):
            self.local = LocalPredictive(self.compare, width=width, inner_width=width // 2, radius=config.radius)

    def keys(self, rows: Lines) -> Float[Tensor, "lines slots key_width"]:
        """Compute the keys of the encoder's hidden states, once for all queries."""
        return self.score.keys(rows) if isinstance(self.score, Additive | General) else rows

    def compare(self, q: Tensor, keys: Tensor) -> Tensor:
        """Score queries against the result of `keys`."""
        score = self.score.compare if isinstance(self.score, Additive | General) else self.score
        return score(q, keys)

    def forward(
        self, q: Float[Tensor, "lines n width"], positions: Int[Tensor, "lines n"], source: EncodedSource
    ) -> Float[Tensor, "lines n value_width"]:
        """Return the context vector of each decoder state.

        Args:
            q: Decoder states, n for each sequence.
            positions: Position of each state in its target sequence, from 0.
            source: Keys and values of the source.
        """
        count = q.shape[1]
        if isinstance(self.config, LocalM | LocalP):
            k, v = source.keys.flatten(0, 1), source.values.flatten(0, 1)
            layout = source.layout(count)
            states = q.flatten(0, 1)
            if self.local is not None:
                context: Tensor = self.local(states, k, v, layout)
            else:
                assert isinstance(self.config, LocalM)
                context = local_monotonic(
                    self.compare, states, k, v, layout, radius=self.config.radius, positions=positions.flatten()
                )
            return context.view(len(q), count, context.shape[1])
        scores = (self.compare(q, source.keys).flatten(0, 1),)
        masks = (source.is_row().repeat_interleave(count, 0),)
        match self.config:
            case HardAttention(how="drawn") if self.training:
                (weights,) = sample_weights(scores, masks).weights
            case HardAttention():
                (weights,) = hard_weights(scores, masks)
            case _:
                (weights,) = soft_weights(scores, masks)
        return weights.view(len(q), count, weights.shape[1]) @ source.values


def pad_rows(rows: Rows, bounds: Bounds) -> tuple[Lines, Int[Tensor, " rows"]]:
    """Return the rows in padded lines, and the index of each row among the slots of all lines."""
    lengths = [stop - start for start, stop in pairwise(bounds)]
    longest = max(lengths, default=0)
    first_slots = np.arange(len(lengths)) * longest
    slots = np.repeat(first_slots - np.array(bounds[:-1], np.int64), lengths) + np.arange(bounds[-1])
    index = torch.from_numpy(slots).to(rows.device)
    padded = rows.new_zeros(len(lengths) * longest, rows.shape[1])
    return padded.index_copy(0, index, rows).view(len(lengths), longest, rows.shape[1]), index


# -- encoder and decoder --------------------------------------------------------------------------------------------


class RecurrentCache(KVCache):
    """The decoder's state in each sequence, and the source that it attends to."""

    def __init__(self, state: State, last_output: Float[Tensor, "sequences width"], source: EncodedSource) -> None:
        super().__init__(len(last_output))
        self.state, self.encoded = state, source
        self.last_output = last_output  # last output row of each sequence, an input of the next step (input feeding)

    def reorder(self, sequences: Sequence[int]) -> None:
        """Select these sequences, in this order; one may occur several times (beam search)."""
        if list(sequences) == list(range(len(self.lengths))):
            return
        super().reorder(sequences)
        index = torch.tensor(list(sequences), dtype=torch.long, device=self.last_output.device)
        self.state = tuple(tensor.index_select(1, index) for tensor in self.state)
        self.last_output = self.last_output.index_select(0, index)
        self.encoded = self.encoded.select(sequences)


class RecurrentSeq2SeqModel(Transformer):
    """A bidirectional encoder and a decoder, whose output is tanh(W [context; state]) in the embedding's dimension."""

    def __init__(self, config: ClassicConfig) -> None:
        nn.Module.__init__(self)  # instead of Transformer's, which needs stacks
        assert isinstance(config.reader, RecurrentSeq2Seq)
        self.config = config
        self.recurrent = config.reader
        self.execution = ExecutionOptions(pad_to_bucket=False)
        recurrent, word_width = config.reader, config.embedding.width
        self.embedding = EmbeddingLayer(config.embedding, word_width)
        self.encoder = self.decoder = None
        width = recurrent.width
        layers = recurrent.layers
        is_lstm = recurrent.cell == "lstm"
        dropout = recurrent.dropout if layers > 1 else 0.0
        encoder = Recurrent(cell=recurrent.cell, width=width // 2, layers=layers)
        self.reading = BidirectionalRnn(encoder, word_width, dropout=dropout)  # the encoder
        self.bridge = nn.Linear(width, layers * width * (2 if is_lstm else 1))  # last encoder to first decoder states
        self.feeds_output = recurrent.feed and recurrent.look is not None
        cell = nn.LSTM if is_lstm else nn.GRU
        input_width = word_width + (word_width if self.feeds_output else 0)
        self.writing = cell(input_width, width, layers, dropout=dropout)  # the decoder
        self.look = None if recurrent.look is None else SourceAttention(recurrent.look, width)
        self.mix = nn.Linear(width if self.look is None else 2 * width, word_width)  # state and context to output row

    def forward(
        self,
        source: Packed,
        target: Packed | None = None,
        *,
        trace: Trace | None = None,
        output_rows: Int[Tensor, " outputs"] | None = None,
    ) -> Float[Tensor, "some width"]:
        """Return the hidden states from which the next tokens of the target are predicted.

        Args:
            output_rows: Indices of the rows to return, in this order. If None, all rows.
        """
        if target is None:
            raise ModelError("this model needs a target: it reads one text and generates another")
        if len(target) != len(source):
            raise DataError(f"{len(source)} source and {len(target)} target sequences: give one target for each")
        return select_rows(self.decode_step(target, self.init_cache(source), trace=trace), output_rows)

    @property
    def traceable(self) -> tuple[TraceItem, ...]:
        """The values that a Trace can record: attention weights only, since not every score has queries and keys."""
        return () if self.look is None else ("weights",)

    def init_cache(self, source: Packed | int) -> RecurrentCache:
        """Return the decoder's state after the encoder has read the source."""
        if isinstance(source, int):
            raise ModelError("this model reads a text before it generates one: give the batch that it is to read")
        with torch.autocast(source.tokens.device.type, enabled=False):
            rows = self.reading(self.embedding(source), source.bounds)
            values, _ = pad_rows(rows, source.bounds)
            keys = values if self.look is None else self.look.keys(values)
            state = self._first_state(rows, source.bounds)
            last_output = rows.new_zeros(len(source), self.config.width)
            return RecurrentCache(state, last_output, EncodedSource(keys, values, tuple(source.lengths)))

    def _first_state(self, rows: Rows, bounds: Bounds) -> State:
        """Return h = tanh(W s + b), and for an LSTM c = W' s + b', where s are the last states of both directions."""
        half, count = rows.shape[1] // 2, len(bounds) - 1
        last_states = rows.new_zeros(count, 2 * half)  # stays 0 for empty sequences
        not_empty = [sequence for sequence, (start, stop) in enumerate(pairwise(bounds)) if start < stop]
        if not_empty:
            # the network from left to right ends at the last row, that from right to left at the first one
            last_rows = torch.tensor([bounds[sequence + 1] - 1 for sequence in not_empty], device=rows.device)
            first_rows = torch.tensor([bounds[sequence] for sequence in not_empty], device=rows.device)
            ends = torch.cat([rows[last_rows, :half], rows[first_rows, half:]], -1)
            last_states = last_states.index_copy(0, torch.tensor(not_empty, device=rows.device), ends)
        layers, width = self.recurrent.layers, self.recurrent.width
        num_states = self.bridge.out_features // (layers * width)  # 1 for a GRU, 2 for an LSTM
        states = self.bridge(last_states).view(count, num_states, layers, width).permute(1, 2, 0, 3)
        h, *c = (state.contiguous() for state in states.unbind(0))
        return (h.tanh(), *c)

    def decode_step(self, batch: Packed, cache: KVCache, *, trace: Trace | None = None) -> Float[Tensor, "rows width"]:
        """Decode tokens that continue the cached ones; returns their hidden states, and updates the cached state."""
        assert isinstance(cache, RecurrentCache), "another model's cache"
        if trace is not None:
            trace.check(1, self.traceable)
        is_traced = self.look is not None and trace is not None and trace.records("cross", 0, ("weights",))
        with torch.autocast(batch.tokens.device.type, enabled=False):
            x: Tensor = self.embedding(batch)
            past = torch.tensor(cache.lengths, dtype=torch.long, device=x.device)
            decode = self._decode_with_feeding if self.feeds_output else self._decode_without_feeding
            rows, weights = decode(x, batch.bounds, past, cache, is_traced)
        if trace is not None and weights is not None:
            spans = zip(pairwise(batch.bounds), cache.encoded.lengths, strict=True)
            sequence_weights = [weights[start:stop, :length][None] for (start, stop), length in spans]  # one head each
            trace.record_weights("cross", 0, sequence_weights)
        cache.advance(batch.lengths)
        return rows

    def _decode_without_feeding(
        self, x: Rows, bounds: Bounds, past: Tensor, cache: RecurrentCache, is_traced: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run the decoder over all tokens, then attention for all its states, and update the cached state.

        Args:
            x: Word vectors of the decoder's inputs.
            bounds: Bounds of their sequences.
            past: Number of tokens of each sequence that were decoded before.
            cache: The decoder's state and the source.
            is_traced: Whether to return attention weights.

        Returns:
            The output rows, and the attention weights of each row or None.
        """
        order, inverse, counts = _orders(bounds, x.device)
        if not counts:
            return x.new_zeros(0, self.config.width), None
        not_empty = _longest_first(bounds)[: counts[0]]  # sequences with tokens, longest first
        sorted_state = tuple(tensor[:, not_empty] for tensor in cache.state)
        outputs, last = self.writing(PackedSequence(x[order], torch.tensor(counts)), _to_cell(sorted_state))
        not_empty_index = torch.tensor(not_empty, device=x.device)
        cache.state = tuple(
            old.index_copy(1, not_empty_index, new) for old, new in zip(cache.state, _from_cell(last), strict=True)
        )
        states, weights = outputs.data[inverse], None
        if self.look is None:
            return self._mix(states, None), None
        q, slots = pad_rows(states, bounds)
        positions = past[:, None] + torch.arange(q.shape[1], device=x.device)
        context = self.look(q, positions, cache.encoded).flatten(0, 1)[slots]
        if is_traced:
            weights = self.look(q, positions, cache.encoded.with_identity_values()).flatten(0, 1)[slots]
        return self._mix(states, context), weights

    def _decode_with_feeding(
        self, x: Rows, bounds: Bounds, past: Tensor, cache: RecurrentCache, is_traced: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Decode one token of each sequence at a time, with each output row as an input of the next step.

        Arguments and results are those of `_decode_without_feeding`.
        """
        assert self.look is not None
        order, inverse, counts = _orders(bounds, x.device)
        if not counts:
            return x.new_zeros(0, self.config.width), None
        longest_first = _longest_first(bounds)
        state = tuple(tensor[:, longest_first] for tensor in cache.state)
        output = cache.last_output[longest_first]
        source = cache.encoded.select(longest_first)
        past = past[longest_first]
        # state and last output of the sequences that have no more tokens; those with more steps are appended later
        finished: list[tuple[Tensor, ...]] = []
        rows, weights = [], []
        for step, step_inputs in enumerate(x[order].split(counts)):
            count = len(step_inputs)  # sequences with a token in this step
            if count < len(output):
                finished.append((*(tensor[:, count:] for tensor in state), output[count:]))
                state = tuple(tensor[:, :count].contiguous() for tensor in state)
                output = output[:count]
                source = source.first(count)
            outputs, last = self.writing(torch.cat([step_inputs, output], -1)[None], _to_cell(state))
            state = _from_cell(last)
            q = outputs[0][:, None]
            positions = past[:count, None] + step
            output = self._mix(outputs[0], self.look(q, positions, source)[:, 0])
            rows.append(output)
            if is_traced:
                weights.append(self.look(q, positions, source.with_identity_values())[:, 0])
        finished.append((*state, output))
        original_order = torch.from_numpy(np.argsort(longest_first)).to(x.device)
        *states, last_output = (torch.cat(tensors[::-1], -2) for tensors in zip(*finished, strict=True))
        cache.state = tuple(tensor[:, original_order] for tensor in states)
        cache.last_output = last_output[original_order]
        return torch.cat(rows)[inverse], torch.cat(weights)[inverse] if weights else None

    def _mix(self, states: Rows, context: Tensor | None) -> Float[Tensor, "rows word_width"]:
        """Return tanh(W [context; state])."""
        inputs = states if context is None else torch.cat([context, states], -1)
        return dropout(self.mix(inputs).tanh(), self.recurrent.dropout, self.training)


def _orders(bounds: Bounds, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """Return row indices in time-major order, the inverse order, and the number of sequences that have each step."""
    order, counts = time_major_order(bounds)
    inverse = torch.from_numpy(np.argsort(order)).to(device)
    return torch.from_numpy(order).to(device), inverse, counts.tolist()


def _longest_first(bounds: Bounds) -> list[int]:
    """Return the indices of the sequences, longest first; equally long ones are in their order in the batch."""
    sequences: list[int] = np.argsort(-np.diff(bounds), kind="stable").tolist()
    return sequences


def _to_cell(state: State) -> Tensor | State:
    """Return a state in the form that PyTorch's cells expect: h for a GRU, (h, c) for an LSTM."""
    return state[0] if len(state) == 1 else state


def _from_cell(state: Tensor | State) -> State:
    """Return a state of PyTorch's cells as a tuple."""
    return (state,) if isinstance(state, Tensor) else tuple(state)
