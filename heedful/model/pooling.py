"""How a classic model reads a text off its rows: as a bag, by attention with trained queries, by its sentences.

A reader makes vectors of the rows of each sequence, [sequences, vectors, width]; an empty sequence has zeros.
"""

from __future__ import annotations

from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import HeedfulError
from heedful.model.classic import BidirectionalRnn, Bounds, Classic, Rows, sentence_bounds
from heedful.model.classic_config import (
    AttentionPooling,
    BagPooling,
    HierarchicalPooling,
    RecurrentSeq2Seq,
    StructuredPooling,
)
from heedful.model.config import Classes
from heedful.nn.attend import attend_with, attention_weights
from heedful.nn.dropout import dropout
from heedful.nn.layers import FullPrecisionLinear, segment_means
from heedful.nn.layout import AttentionArgs, Layout
from heedful.packed import Packed

Vectors = Float[Tensor, "sequences vectors vector_width"]


class BagPooler(nn.Module):
    """h = sum of x, or their mean."""

    def __init__(self, config: BagPooling) -> None:
        super().__init__()
        self.mean = config.how == "mean"

    def forward(self, rows: Rows, batch: Packed) -> Vectors:
        lengths = torch.tensor(batch.lengths, dtype=torch.long, device=rows.device)
        owner = torch.arange(len(batch), device=rows.device).repeat_interleave(lengths, output_size=len(rows))
        return segment_means(rows, owner, lengths, power=1.0 if self.mean else 0.0)[:, None]


class QueryPooler(nn.Module):
    """softmax(scale K q) V for each of some trained queries and each sequence; K and V are made of the rows.

    Attention with scores v tanh(W x + b) is the same: the query is v, and the keys are tanh(W x + b).
    """

    def __init__(self, config: AttentionPooling, width: int, count: int, inner: int, *, bias: bool = True) -> None:
        super().__init__()
        self.tanh = config.keys == "tanh"
        self.key = nn.Identity() if config.keys == "rows" else nn.Linear(width, inner, bias=self.tanh and bias)
        self.value = nn.Identity() if config.values == "rows" else nn.Linear(width, width, bias=False)
        self.queries = nn.Parameter(torch.zeros(count, width if config.keys == "rows" else inner))
        self.scale = 1 / sqrt(self.queries.shape[1]) if config.scaled else 1.0

    def forward(self, rows: Rows, bounds: Bounds) -> Vectors:
        q, k, call = self._call(rows, bounds)
        mixed = attend_with(q, k, self.value(rows)[:, None].to(k.dtype), call)
        vectors: Tensor = mixed[:, 0].unflatten(0, (len(bounds) - 1, len(self.queries)))
        return vectors

    def weights(self, rows: Rows, bounds: Bounds) -> list[Float[Tensor, "vectors _n"]]:
        """What each query takes of each row of each sequence."""
        q, k, call = self._call(rows, bounds)
        return [attention_weights(q, k, call, number)[0] for number in range(len(bounds) - 1)]

    def _call(self, rows: Rows, bounds: Bounds) -> tuple[Tensor, Tensor, AttentionArgs]:
        count, texts = len(self.queries), len(bounds) - 1
        k = self.key(rows)
        k = (k.tanh() if self.tanh else k)[:, None]
        q = self.queries.to(k.dtype).repeat(texts, 1)[:, None]
        return q, k, AttentionArgs(layout=Layout.of(range(0, texts * count + 1, count), bounds), scale=self.scale)


class HierarchicalPooler(nn.Module):
    """Attention over the words of each sentence, a recurrent net over sentences, and attention over those."""

    def __init__(self, config: HierarchicalPooling, width: int) -> None:
        super().__init__()
        tanh = AttentionPooling(keys="tanh")
        self.ends = config.ends
        self.words = QueryPooler(tanh, width, 1, config.inner)
        self.over = None if config.sentences is None else BidirectionalRnn(config.sentences, width)
        self.width = width if self.over is None else self.over.width
        self.sentences = QueryPooler(tanh, self.width, 1, config.inner)

    def forward(self, rows: Rows, batch: Packed) -> Vectors:
        words, texts = sentence_bounds(batch, self.ends)
        found = self.words(rows, words)[:, 0]
        if self.over is not None:
            found = self.over(found, texts)
        read: Tensor = self.sentences(found, texts)
        return read


class PooledClassesHead(nn.Module):
    """[sequences, labels]: W h + b of what the model's reader makes of a text."""

    def __init__(self, config: Classes, model: Classic) -> None:
        super().__init__()
        reader, labels = model.classic.reader, len(config.labels)
        assert not isinstance(reader, RecurrentSeq2Seq)  # a model with this head reads
        self.dropout, self.config = config.dropout, reader
        self.one = reader.binary == "sigmoid" and config.problem_type == "single_label_classification"
        if self.one and labels != 2:
            raise HeedfulError(f'binary is "sigmoid", which is for two labels, but there are {labels}: use "softmax"')
        width, count = model.classic.width, 1
        match reader:
            case BagPooling():
                self.bag = BagPooler(reader)
            case AttentionPooling(queries=queries):
                count = labels if queries == "classes" else 1
                self.queries = QueryPooler(reader, width, count, width)
            case StructuredPooling(hops=hops, inner=inner):
                count = hops
                self.queries = QueryPooler(AttentionPooling(keys="tanh"), width, hops, inner, bias=False)
            case HierarchicalPooling():
                self.hierarchy = HierarchicalPooler(reader, width)
                width = self.hierarchy.width
        self.each = isinstance(reader, AttentionPooling) and reader.queries == "classes"
        hidden = reader.hidden if isinstance(reader, StructuredPooling) else 0
        self.hidden = nn.Linear(count * width, hidden) if hidden else None
        last = FullPrecisionLinear if config.problem_type == "regression" else nn.Linear
        self.out = last(width if self.each else hidden or count * width, 1 if self.one else labels)

    def vectors(self, rows: Rows, batch: Packed) -> Vectors:
        """What the reader makes of each text."""
        match self.config:
            case BagPooling():
                read: Tensor = self.bag(rows, batch)
            case HierarchicalPooling():
                read = self.hierarchy(rows, batch)
            case _:
                read = self.queries(rows, batch.bounds)
        return read

    def forward(self, rows: Rows, batch: Packed) -> Float[Tensor, "sequences labels"]:
        read = dropout(self.vectors(rows, batch), self.dropout, self.training)
        if self.each:  # the score of a class is w_c h_c + b_c
            return (read * self.out.weight).sum(-1) + self.out.bias
        flat = read.flatten(1)
        if self.hidden is not None:
            flat = dropout(F.relu(self.hidden(flat)), self.dropout, self.training)
        scores: Tensor = self.out(flat)
        return torch.cat([torch.zeros_like(scores), scores], 1) if self.one else scores  # softmax(0, s) is sigmoid(s)

    def penalty(self, rows: Rows, batch: Packed) -> Float[Tensor, " sequences"]:
        """What is added to the loss of each text: that its mixtures are alike (Lin et al. 2017, equation 8).

        An empty text has no mixtures, and adds nothing.
        """
        if not isinstance(self.config, StructuredPooling) or self.config.penalty == 0:
            return rows.new_zeros(len(batch))
        one = torch.eye(self.config.hops, dtype=rows.dtype, device=rows.device)
        found = [a.to(rows.dtype) for a in self.queries.weights(rows, batch.bounds)]
        each = [(((a[:, None] * a).sum(-1) - one) ** 2).sum() * (a.shape[1] > 0) for a in found]  # never half precision
        return self.config.penalty * torch.stack(each) if each else rows.new_zeros(0)
