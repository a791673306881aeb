"""Models from before the Transformer, and what they are to it: embeddings, recurrent nets, attention without weights.

A `Classic` stands where a `Transformer` stands: it takes a packed batch and gives rows, so that every head, task and
engine takes it. How a text is read off the rows is in `readers.py`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from heedful.model.classic_config import ClassicConfig, Recurrent, RecurrentSeq2Seq, UntrainedSelfAttention
from heedful.model.embedding import Embedding
from heedful.model.stack import Transformer, select_rows
from heedful.model.trace import Trace, TraceItem
from heedful.nn.attend import attend
from heedful.nn.layout import Layout
from heedful.nn.recurrence import run_cells
from heedful.nn.scores import unit_vectors
from heedful.packed import Packed

Bounds = tuple[int, ...]
Rows = Float[Tensor, "rows width"]


class Classic(Transformer):
    """Words become rows: by a table, or in context by an encoder; and what goes over them."""

    def __init__(self, config: ClassicConfig) -> None:
        if config.encoder is None:
            nn.Module.__init__(self)  # a Transformer has a stack; this one has none
            self.config, self.fills = config, False
            self.embedding = Embedding(config.embedding, config.embedding.width)
            self.encoder = self.decoder = None
        else:
            super().__init__(config)
        self.classic = config
        assert not isinstance(config.reader, RecurrentSeq2Seq)  # it writes: model/recurrent.py
        self.over = make_contextualizer(config.reader.over, config.word_width)
        if config.frozen:
            for part in self._fixed():
                part.requires_grad_(False)

    def _fixed(self) -> list[nn.Module]:
        """What stays as it is in a frozen model."""
        return [self.embedding] if self.encoder is None else [self.embedding, self.encoder]

    @property
    def traceable(self) -> tuple[TraceItem, ...]:
        """What its encoder gives; how a text is read off the rows is another matter."""
        return () if self.encoder is None else super().traceable

    def train(self, mode: bool = True) -> Classic:
        """As usual, but what is frozen drops nothing out."""
        super().train(mode)
        if self.classic.frozen:
            for part in self._fixed():
                part.eval()
        return self

    def forward(
        self,
        source: Packed,
        target: Packed | None = None,
        *,
        trace: Trace | None = None,
        wanted: Int[Tensor, " wanted"] | None = None,
    ) -> Float[Tensor, "some width"]:
        """The rows, sequences end to end; of the wanted ones alone, where they are given."""
        if self.over is None:
            return super().forward(source, target, trace=trace, wanted=wanted)
        return select_rows(self.over(super().forward(source, target, trace=trace), source.bounds), wanted)


def make_contextualizer(config: Recurrent | UntrainedSelfAttention | None, width: int) -> nn.Module | None:
    """What goes over rows of that width."""
    match config:
        case Recurrent():
            return BidirectionalRnn(config, width)
        case UntrainedSelfAttention():
            return SelfAttentionMean(config)
    return None


class BidirectionalRnn(nn.Module):
    """A recurrent net from left to right and one from right to left, in each sequence alone (Graves et al. 2005).

    Rows go through it time by time, those of all sequences that are long enough at once: nothing is filled up. On a CPU
    it learns by cells of our own.
    """

    def __init__(self, config: Recurrent, width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        cell = nn.LSTM if config.cell == "lstm" else nn.GRU
        self.cells = cell(width, config.width, config.layers, bidirectional=True, dropout=dropout)
        self.width = 2 * config.width

    def forward(self, x: Rows, bounds: Bounds) -> Float[Tensor, "rows both_widths"]:
        if len(x) == 0:
            return x.new_zeros(0, self.width)
        order, counts = time_major_order(bounds)
        there = torch.from_numpy(order).to(x.device)
        back = torch.from_numpy(np.argsort(order)).to(x.device)
        if x.is_cuda:
            self.cells.flatten_parameters()
        given = x.to(next(self.parameters()).dtype).index_select(0, there)
        if torch.is_grad_enabled() and given.device.type == "cpu":
            return run_cells(self.cells, given, counts.tolist()).index_select(0, back)
        out, _ = self.cells(PackedSequence(given, torch.from_numpy(counts)))
        rows: Tensor = out.data.index_select(0, back)
        return rows


def time_major_order(bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers place by place, longer sequences first, and how many sequences have each place.

    >>> [each.tolist() for each in by_time((0, 1, 1, 4))]
    [[1, 0, 2, 3], [2, 1, 1]]
    """
    starts, stops = np.array(bounds[:-1], np.int64), np.array(bounds[1:], np.int64)
    first = np.argsort(starts - stops, kind="stable")
    sizes = (stops - starts)[first]
    rank = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(rank)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = (np.repeat(starts[first], sizes) + place)[np.lexsort((rank, place))]
    return order, np.bincount(place).astype(np.int64)


class SelfAttentionMean(nn.Module):
    """softmax(X X) X over each sequence, with dot products or cosines as scores; there is nothing to train."""

    def __init__(self, config: UntrainedSelfAttention) -> None:
        super().__init__()
        self.cosine = config.score == "cosine"

    def forward(self, x: Rows, bounds: Bounds) -> Rows:
        k = (unit_vectors(x) if self.cosine else x)[:, None]
        return attend(k, k, x[:, None], Layout.of(bounds), scale=1.0)[:, 0]


def sentence_bounds(batch: Packed, ends: tuple[int, ...]) -> tuple[Bounds, Bounds]:
    """Where sentences begin and end among the rows, and which sentences make up each sequence; an empty one has none.

    >>> sentences(Packed.of([[5, 9, 9, 6], [], [7, 9]]), ends=(9,))
    ((0, 3, 4, 6), (0, 2, 2, 3))
    """
    tokens, types = batch.tokens.cpu().numpy(), batch.types.cpu().numpy()
    end = np.isin(tokens, ends)
    begins = np.zeros(len(tokens), np.bool_)
    begins[1:] = (end[:-1] & ~end[1:]) | (types[:-1] != types[1:])
    begins[[first for first, last in pairwise(batch.bounds) if first < last]] = True
    starts = np.flatnonzero(begins)
    texts = np.searchsorted(starts, batch.bounds)
    return (*starts.tolist(), len(tokens)), tuple(texts.tolist())
