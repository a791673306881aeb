"""Two recurrent nets: one reads a text, and another writes one, with or without attention to what was read.

A `RecurrentWriter` stands where a `Transformer` with encoder and decoder stands; what it remembers while it writes is
the state of its second net.
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

from heedful.errors import HeedfulError
from heedful.model.classic import BidirectionalRnn, Bounds, Classic, Rows, time_major_order
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
from heedful.model.config import ModelConfig
from heedful.model.embedding import Embedding
from heedful.model.kv_cache import KVCache
from heedful.model.stack import Transformer, select_rows
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

Lines = Float[Tensor, "lines places width"]  # a line of places for each sequence, those behind its end are never seen
State = tuple[Tensor, ...]  # h, and of an LSTM c, each [layers, sequences, width]


def make_model(config: ModelConfig) -> Transformer:
    """The model of that config."""
    if not isinstance(config, ClassicConfig):
        return Transformer(config)
    return RecurrentSeq2SeqModel(config) if config.has_decoder else Classic(config)


# -- what is looked at ----------------------------------------------------------------------------------------------


class EncodedSource(NamedTuple):
    """The rows that were read, as they are compared and as they are taken."""

    keys: Float[Tensor, "lines places key_width"]
    values: Float[Tensor, "lines places width"]
    lengths: tuple[int, ...]

    def is_row(self) -> Bool[Tensor, "lines places"]:
        """Which places hold a row."""
        lengths = torch.tensor(self.lengths, device=self.keys.device)
        return torch.arange(self.keys.shape[1], device=self.keys.device) < lengths[:, None]

    def layout(self, queries: int) -> Layout:
        """So many queries of each sequence to its line."""
        lines, places = self.keys.shape[:2]
        spans = tuple((line * places, line * places + length) for line, length in enumerate(self.lengths))
        return Layout(Layout.of(range(0, lines * queries + 1, queries)).queries, spans)

    def select(self, numbers: Sequence[int]) -> EncodedSource:
        """These lines, in this order."""
        lines = torch.tensor(list(numbers), dtype=torch.long, device=self.keys.device)
        lengths = tuple(self.lengths[number] for number in numbers)
        return EncodedSource(self.keys.index_select(0, lines), self.values.index_select(0, lines), lengths)

    def first(self, count: int) -> EncodedSource:
        """So many lines."""
        return EncodedSource(self.keys[:count], self.values[:count], self.lengths[:count])

    def with_identity_values(self) -> EncodedSource:
        """Whose values say where they stand, so that what is taken of them are the weights themselves."""
        count = self.keys.shape[1]
        one = torch.eye(count, dtype=self.values.dtype, device=self.values.device)
        return self._replace(values=one.expand(len(self.keys), -1, -1))


class SourceAttention(nn.Module):
    """Attention of the writing net to the rows that were read."""

    def __init__(self, config: SourceAttentionConfigs, width: int) -> None:
        super().__init__()
        self.config = config
        longest = config.longest if isinstance(config, GlobalAttention | HardAttention) else 1
        made: dict[str, Callable[[], Score]] = {
            "cosine": lambda: cosine,
            "additive": lambda: Additive(width=width, key_width=width, inner_width=width // 2),
            "location": lambda: Location(width=width, longest=longest),
            "general": lambda: General(width=width, key_width=width),
            "dot": lambda: dot,
            "scaled_dot": lambda: scaled_dot,
        }
        self.score = made[config.score]()
        self.place = None
        if isinstance(config, LocalP):
            self.place = LocalPredictive(self.compare, width=width, inner_width=width // 2, radius=config.radius)

    def keys(self, rows: Lines) -> Float[Tensor, "lines places key_width"]:
        """The rows as they are compared."""
        return self.score.keys(rows) if isinstance(self.score, Additive | General) else rows

    def compare(self, q: Tensor, keys: Tensor) -> Tensor:
        """Scores of what `keys` made."""
        score = self.score.compare if isinstance(self.score, Additive | General) else self.score
        return score(q, keys)

    def forward(
        self, q: Float[Tensor, "lines n width"], places: Int[Tensor, "lines n"], source: EncodedSource
    ) -> Float[Tensor, "lines n value_width"]:
        """What each state takes of its line; `places` say how many tokens were written before it."""
        count = q.shape[1]
        if isinstance(self.config, LocalM | LocalP):
            k, v = source.keys.flatten(0, 1), source.values.flatten(0, 1)
            layout, states = source.layout(count), q.flatten(0, 1)
            if self.place is not None:
                near: Tensor = self.place(states, k, v, layout)
            else:
                assert isinstance(self.config, LocalM)
                radius = self.config.radius
                near = local_monotonic(self.compare, states, k, v, layout, radius=radius, positions=places.flatten())
            return near.view(len(q), count, near.shape[1])
        scores = (self.compare(q, source.keys).flatten(0, 1),)
        sees = (source.is_row().repeat_interleave(count, 0),)
        match self.config:
            case HardAttention(how="drawn") if self.training:
                (weights,) = sample_weights(scores, sees).weights
            case HardAttention():
                (weights,) = hard_weights(scores, sees)
            case _:
                (weights,) = soft_weights(scores, sees)
        return weights.view(len(q), count, weights.shape[1]) @ source.values


def pad_rows(rows: Rows, bounds: Bounds) -> tuple[Lines, Int[Tensor, " rows"]]:
    """The rows in lines, and where each row stands among all places end to end."""
    lengths = [stop - start for start, stop in pairwise(bounds)]
    places = max(lengths, default=0)
    first = np.arange(len(lengths)) * places
    there = np.repeat(first - np.array(bounds[:-1], np.int64), lengths) + np.arange(bounds[-1])
    at = torch.from_numpy(there).to(rows.device)
    empty = rows.new_zeros(len(lengths) * places, rows.shape[1])
    return empty.index_copy(0, at, rows).view(len(lengths), places, rows.shape[1]), at


# -- the two nets ---------------------------------------------------------------------------------------------------


class RecurrentCache(KVCache):
    """Where the writing net stands in each sequence."""

    def __init__(self, state: State, fed: Float[Tensor, "sequences width"], source: EncodedSource) -> None:
        super().__init__(len(fed))
        self.state, self.fed, self.read = state, fed, source

    def reorder(self, numbers: Sequence[int]) -> None:
        """Go on with these sequences in this order."""
        if list(numbers) == list(range(len(self.lengths))):
            return
        super().reorder(numbers)
        at = torch.tensor(list(numbers), dtype=torch.long, device=self.fed.device)
        self.state = tuple(each.index_select(1, at) for each in self.state)
        self.fed, self.read = self.fed.index_select(0, at), self.read.select(numbers)


class RecurrentSeq2SeqModel(Transformer):
    """One net reads, the other writes; rows are tanh(W [what it saw; its state]), as wide as the embedding."""

    def __init__(self, config: ClassicConfig) -> None:
        nn.Module.__init__(self)  # a Transformer has stacks; this one has none
        assert isinstance(config.reader, RecurrentSeq2Seq)
        self.config, self.writer, self.fills = config, config.reader, False
        writer, given = config.reader, config.embedding.width
        self.embedding = Embedding(config.embedding, given)
        self.encoder = self.decoder = None
        width, layers, lstm = writer.width, writer.layers, writer.cell == "lstm"
        between = writer.dropout if layers > 1 else 0.0
        self.reading = BidirectionalRnn(
            Recurrent(cell=writer.cell, width=width // 2, layers=layers), given, dropout=between
        )
        self.bridge = nn.Linear(width, layers * width * (2 if lstm else 1))
        self.feeds = writer.feed and writer.look is not None
        cell = nn.LSTM if lstm else nn.GRU
        self.writing = cell(given + (given if self.feeds else 0), width, layers, dropout=between)
        self.look = None if writer.look is None else SourceAttention(writer.look, width)
        self.mix = nn.Linear(width if self.look is None else 2 * width, given)

    def forward(
        self,
        source: Packed,
        target: Packed | None = None,
        *,
        trace: Trace | None = None,
        wanted: Int[Tensor, " wanted"] | None = None,
    ) -> Float[Tensor, "some width"]:
        """The rows of the target, from which each of its next tokens is told; `wanted`: of these alone."""
        if target is None:
            raise HeedfulError("this model needs a target: it reads one text and writes another")
        if len(target) != len(source):
            raise HeedfulError(f"{len(source)} source and {len(target)} target sequences: give one target for each")
        return select_rows(self.decode_step(target, self.init_cache(source), trace=trace), wanted)

    @property
    def traceable(self) -> tuple[TraceItem, ...]:
        """What its one layer looks at, which is not always by queries and keys."""
        return () if self.look is None else ("weights",)

    def init_cache(self, source: Packed | int) -> RecurrentCache:
        """What is known of these sequences before anything is written."""
        if isinstance(source, int):
            raise HeedfulError("this model reads a text before it writes one: give the batch that it is to read")
        with torch.autocast(source.tokens.device.type, enabled=False):
            rows = self.reading(self.embedding(source), source.bounds)
            values, _ = pad_rows(rows, source.bounds)
            keys = values if self.look is None else self.look.keys(values)
            start = self._start(rows, source.bounds)
            fed = rows.new_zeros(len(source), self.config.width)
            return RecurrentCache(start, fed, EncodedSource(keys, values, tuple(source.lengths)))

    def _start(self, rows: Rows, bounds: Bounds) -> State:
        """h = tanh(W s + b), and of an LSTM c = W' s + b', of what both directions know at their end."""
        half, count = rows.shape[1] // 2, len(bounds) - 1
        both = rows.new_zeros(count, 2 * half)
        some = [number for number, (start, stop) in enumerate(pairwise(bounds)) if start < stop]
        if some:
            last = torch.tensor([bounds[number + 1] - 1 for number in some], device=rows.device)
            first = torch.tensor([bounds[number] for number in some], device=rows.device)
            ends = torch.cat([rows[last, :half], rows[first, half:]], -1)
            both = both.index_copy(0, torch.tensor(some, device=rows.device), ends)
        layers, width = self.writer.layers, self.writer.width
        states = self.bridge.out_features // (layers * width)
        parts = self.bridge(both).view(count, states, layers, width).permute(1, 2, 0, 3)
        h, *c = (each.contiguous() for each in parts.unbind(0))
        return (h.tanh(), *c)

    def decode_step(self, batch: Packed, cache: KVCache, *, trace: Trace | None = None) -> Float[Tensor, "rows width"]:
        """The rows of tokens that follow what the cache holds; they are remembered too."""
        assert isinstance(cache, RecurrentCache), "another model's cache"
        if trace is not None:
            trace.check(1, self.traceable)
        wants = self.look is not None and trace is not None and trace.records("cross", 0, ("weights",))
        with torch.autocast(batch.tokens.device.type, enabled=False):
            x: Tensor = self.embedding(batch)
            before = torch.tensor(cache.lengths, dtype=torch.long, device=x.device)
            if self.feeds:
                rows, seen = self._step_by_step(x, batch.bounds, before, cache, wants)
            else:
                rows, seen = self._at_once(x, batch.bounds, before, cache, wants)
        if trace is not None and seen is not None:
            spans = zip(pairwise(batch.bounds), cache.read.lengths, strict=True)
            trace.record_weights("cross", 0, [seen[start:stop, :length][None] for (start, stop), length in spans])
        cache.advance(batch.lengths)
        return rows

    def _at_once(
        self, x: Rows, bounds: Bounds, before: Tensor, cache: RecurrentCache, wants: bool
    ) -> tuple[Tensor, Tensor | None]:
        """All tokens through the net, then all their states look."""
        order, back, counts = _orders(bounds, x.device)
        if not counts:
            return x.new_zeros(0, self.config.width), None
        longest = _longest_first(bounds)
        sorted_state = tuple(each[:, longest[: counts[0]]] for each in cache.state)
        made, last = self.writing(PackedSequence(x[order], torch.tensor(counts)), _in(sorted_state))
        cache.state = tuple(
            each.index_copy(1, torch.tensor(longest[: counts[0]], device=x.device), new)
            for each, new in zip(cache.state, _out(last), strict=True)
        )
        states, seen = made.data[back], None
        if self.look is None:
            return self._mixed(states, None), None
        q, there = pad_rows(states, bounds)
        places = before[:, None] + torch.arange(q.shape[1], device=x.device)
        saw = self.look(q, places, cache.read).flatten(0, 1)[there]
        if wants:
            seen = self.look(q, places, cache.read.with_identity_values()).flatten(0, 1)[there]
        return self._mixed(states, saw), seen

    def _step_by_step(
        self, x: Rows, bounds: Bounds, before: Tensor, cache: RecurrentCache, wants: bool
    ) -> tuple[Tensor, Tensor | None]:
        """One token of each sequence at a time, those that are long enough; what each saw goes into the next step."""
        assert self.look is not None
        order, back, counts = _orders(bounds, x.device)
        if not counts:
            return x.new_zeros(0, self.config.width), None
        longest = _longest_first(bounds)
        state, fed = tuple(each[:, longest] for each in cache.state), cache.fed[longest]
        read, before = cache.read.select(longest), before[longest]
        ended: list[tuple[Tensor, ...]] = []  # states of sequences that have no more tokens, the longest last
        found, shown = [], []
        for number, part in enumerate(x[order].split(counts)):
            count = len(part)
            if count < len(fed):
                ended.append((*(each[:, count:] for each in state), fed[count:]))
                state, fed, read = tuple(each[:, :count].contiguous() for each in state), fed[:count], read.first(count)
            made, last = self.writing(torch.cat([part, fed], -1)[None], _in(state))
            state, q = _out(last), made[0][:, None]
            places = before[:count, None] + number
            fed = self._mixed(made[0], self.look(q, places, read)[:, 0])
            found.append(fed)
            if wants:
                shown.append(self.look(q, places, read.with_identity_values())[:, 0])
        ended.append((*state, fed))
        again = torch.from_numpy(np.argsort(longest)).to(x.device)
        *states, last_fed = (torch.cat(each[::-1], -2) for each in zip(*ended, strict=True))
        cache.state, cache.fed = tuple(each[:, again] for each in states), last_fed[again]
        return torch.cat(found)[back], torch.cat(shown)[back] if shown else None

    def _mixed(self, states: Rows, saw: Tensor | None) -> Float[Tensor, "rows given"]:
        """tanh(W [what it saw; its state])."""
        both = states if saw is None else torch.cat([saw, states], -1)
        return dropout(self.mix(both).tanh(), self.writer.dropout, self.training)


def _orders(bounds: Bounds, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """Row numbers place by place, where each row stands among them, and how many sequences have each place."""
    order, counts = time_major_order(bounds)
    back = torch.from_numpy(np.argsort(order)).to(device)
    return torch.from_numpy(order).to(device), back, counts.tolist()


def _longest_first(bounds: Bounds) -> list[int]:
    """The numbers of the sequences, in the order that `by_time` has."""
    found: list[int] = np.argsort(-np.diff(bounds), kind="stable").tolist()
    return found


def _in(state: State) -> Tensor | State:
    return state[0] if len(state) == 1 else state


def _out(state: Tensor | State) -> State:
    return (state,) if isinstance(state, Tensor) else tuple(state)
