"""Models from before the Transformer: word embeddings, recurrent networks over them, untrained self-attention.

A `ClassicModel` has the interface of a `Transformer`: it returns a hidden state for each token of a packed batch, so
that every head, task and engine can use it. `pooling.py` turns these hidden states into vectors of texts.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from heedful.model.attention import ExecutionOptions, select_rows
from heedful.model.classic_config import ClassicConfig, Recurrent, RecurrentSeq2Seq, UntrainedSelfAttention
from heedful.model.embedding import EmbeddingLayer
from heedful.model.stack import Transformer
from heedful.model.trace import Trace, TraceItem
from heedful.nn.attend import attend
from heedful.nn.layout import Layout
from heedful.nn.recurrence import run_cells
from heedful.nn.scores import unit_vectors
from heedful.packed import Packed

Bounds = tuple[int, ...]
Rows = Float[Tensor, "rows width"]


class ClassicModel(Transformer):
    """Word vectors from an embedding table or an encoder, and optionally a contextualizer over them."""

    def __init__(self, config: ClassicConfig) -> None:
        if config.encoder is None:
            nn.Module.__init__(self)  # instead of Transformer's, which needs a stack
            self.config = config
            self.execution = ExecutionOptions(pad_to_bucket=False)
            self.embedding = EmbeddingLayer(config.embedding, config.embedding.width)
            self.encoder = self.decoder = None
        else:
            super().__init__(config)
        self.classic = config
        assert not isinstance(config.reader, RecurrentSeq2Seq)  # whose class is RecurrentSeq2SeqModel
        self.over = make_contextualizer(config.reader.over, config.word_width)  # applied over the word vectors
        if config.frozen:
            for module in self._frozen_parts():
                module.requires_grad_(False)

    def _frozen_parts(self) -> list[nn.Module]:
        """Return the modules that a frozen model does not train."""
        return [self.embedding] if self.encoder is None else [self.embedding, self.encoder]

    @property
    def traceable(self) -> tuple[TraceItem, ...]:
        """The values that a Trace can record, which are those of the encoder."""
        return () if self.encoder is None else super().traceable

    def train(self, mode: bool = True) -> ClassicModel:
        """Set training mode; frozen parts stay in eval mode."""
        super().train(mode)
        if self.classic.frozen:
            for module in self._frozen_parts():
                module.eval()
        return self

    def forward(
        self,
        source: Packed,
        target: Packed | None = None,
        *,
        trace: Trace | None = None,
        output_rows: Int[Tensor, " outputs"] | None = None,
    ) -> Float[Tensor, "some width"]:
        """Return the hidden states, [rows, width], in the order of the batch.

        Args:
            output_rows: Indices of the rows to return, in this order. If None, all rows.
        """
        if self.over is None:
            return super().forward(source, target, trace=trace, output_rows=output_rows)
        return select_rows(self.over(super().forward(source, target, trace=trace), source.bounds), output_rows)


def make_contextualizer(config: Recurrent | UntrainedSelfAttention | None, width: int) -> nn.Module | None:
    """Make the module that is applied to word vectors of dimension `width`, or None without a contextualizer."""
    match config:
        case Recurrent():
            return BidirectionalRnn(config, width)
        case UntrainedSelfAttention():
            return SelfAttentionMean(config)
    return None


class BidirectionalRnn(nn.Module):
    """A recurrent network from left to right and one from right to left, in each sequence (Graves et al. 2005).

    Each time step is computed for all sequences that are long enough, without padding. Training on a CPU uses the cells
    of `heedful.nn.recurrence`.
    """

    def __init__(self, config: Recurrent, width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        cell = nn.LSTM if config.cell == "lstm" else nn.GRU
        self.cells = cell(width, config.width, config.layers, bidirectional=True, dropout=dropout)
        self.width = 2 * config.width

    def forward(self, x: Rows, bounds: Bounds) -> Float[Tensor, "rows both_widths"]:
        if len(x) == 0:
            return x.new_zeros(0, self.width)
        row_order, counts = time_major_order(bounds)
        order = torch.from_numpy(row_order).to(x.device, non_blocking=True)
        inverse = torch.from_numpy(np.argsort(row_order)).to(x.device, non_blocking=True)  # back to the batch's order
        if x.is_cuda:
            self.cells.flatten_parameters()
        inputs = x.to(next(self.parameters()).dtype).index_select(0, order)
        if torch.is_grad_enabled() and inputs.device.type == "cpu":
            return run_cells(self.cells, inputs, counts.tolist()).index_select(0, inverse)
        outputs, _ = self.cells(PackedSequence(inputs, torch.from_numpy(counts)))
        rows: Tensor = outputs.data.index_select(0, inverse)
        return rows


def time_major_order(bounds: Bounds) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " steps"]]:
    """Order rows as recurrent networks compute them: the first rows of all sequences, then the second rows, ...

    Returns:
        The row indices in this order, of longer sequences first in each time step; and, for each time step, the number
        of sequences that have it.

    >>> [column.tolist() for column in time_major_order((0, 1, 1, 4))]
    [[1, 0, 2, 3], [2, 1, 1]]
    """
    starts, stops = np.array(bounds[:-1], np.int64), np.array(bounds[1:], np.int64)
    longest_first = np.argsort(starts - stops, kind="stable")
    lengths = (stops - starts)[longest_first]
    rank = np.repeat(np.arange(len(lengths)), lengths)  # rank of each row's sequence, 0 for the longest one
    step = np.arange(len(rank)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # position of each row
    row_indices = np.repeat(starts[longest_first], lengths) + step
    return row_indices[np.lexsort((rank, step))], np.bincount(step).astype(np.int64)


class SelfAttentionMean(nn.Module):
    """Untrained self-attention softmax(X X) X in each sequence, with dot products or cosines as scores."""

    def __init__(self, config: UntrainedSelfAttention) -> None:
        super().__init__()
        self.cosine = config.score == "cosine"

    def forward(self, x: Rows, bounds: Bounds) -> Rows:
        k = (unit_vectors(x) if self.cosine else x)[:, None]
        return attend(k, k, x[:, None], Layout.of(bounds), scale=1.0)[:, 0]


def sentence_bounds(batch: Packed, ends: tuple[int, ...]) -> tuple[Bounds, Bounds]:
    """Split sequences into sentences.

    A sentence ends after one or more tokens of `ends`, and before a token of another type. An empty sequence has no
    sentence.

    Returns:
        The first row of each sentence, then the number of rows; and the index of the first sentence of each sequence,
        then the number of sentences.

    >>> sentence_bounds(Packed.of([[5, 9, 9, 6], [], [7, 9]]), ends=(9,))
    ((0, 3, 4, 6), (0, 2, 2, 3))
    """
    tokens, types = batch.tokens.cpu().numpy(), batch.types.cpu().numpy()
    is_end = np.isin(tokens, ends)
    begins = np.zeros(len(tokens), np.bool_)
    begins[1:] = (is_end[:-1] & ~is_end[1:]) | (types[:-1] != types[1:])
    begins[[first for first, last in pairwise(batch.bounds) if first < last]] = True
    starts = np.flatnonzero(begins)
    sequence_bounds = np.searchsorted(starts, batch.bounds)
    return (*starts.tolist(), len(tokens)), tuple(sequence_bounds.tolist())
