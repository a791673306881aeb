"""Pooling of classic models: bags of words, attention with trained queries, and hierarchical attention.

A pooler computes one or more vectors of each sequence from its hidden states (`rows`), [sequences, vectors, width]; the
vectors of an empty sequence are zeros. `heads.py` makes a `PooledClassesHead` for a classifier of a classic model.
"""

from __future__ import annotations

from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import ModelError
from heedful.model.classic import BidirectionalRnn, Bounds, ClassicModel, Rows, sentence_bounds
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
from heedful.packed import Packed, send

Vectors = Float[Tensor, "sequences vectors vector_width"]


class BagPooler(nn.Module):
    """The sum or the mean of the hidden states of each sequence."""

    def __init__(self, config: BagPooling) -> None:
        super().__init__()
        self.mean = config.how == "mean"

    def forward(self, rows: Rows, batch: Packed) -> Vectors:
        lengths = send(batch.lengths, rows.device)
        segments = torch.arange(len(batch), device=rows.device).repeat_interleave(lengths, output_size=len(rows))
        return segment_means(rows, segments, lengths, power=1.0 if self.mean else 0.0)[:, None]


class QueryPooler(nn.Module):
    """Attention softmax(scale K q) V with `count` trained queries q for each sequence; K and V are made from the rows.

    Additive scores v tanh(W x + b) are included: the query is v, and the keys are tanh(W x + b).
    """

    def __init__(self, config: AttentionPooling, width: int, count: int, inner: int, *, bias: bool = True) -> None:
        """Make the layers.

        Args:
            width: Dimension of the rows and of the values.
            count: How many queries there are.
            inner: Dimension of the keys, if these are not the rows themselves.
            bias: Whether keys with tanh have a bias.
        """
        super().__init__()
        self.tanh = config.keys == "tanh"
        self.key = nn.Identity() if config.keys == "rows" else nn.Linear(width, inner, bias=self.tanh and bias)
        self.value = nn.Identity() if config.values == "rows" else nn.Linear(width, width, bias=False)
        self.queries = nn.Parameter(torch.zeros(count, width if config.keys == "rows" else inner))
        self.scale = 1 / sqrt(self.queries.shape[1]) if config.scaled else 1.0

    def forward(self, rows: Rows, bounds: Bounds) -> Vectors:
        q, k, args = self._attention(rows, bounds)
        attended = attend_with(q, k, self.value(rows)[:, None].to(k.dtype), args)
        vectors: Tensor = attended[:, 0].unflatten(0, (len(bounds) - 1, len(self.queries)))
        return vectors

    def weights(self, rows: Rows, bounds: Bounds) -> list[Float[Tensor, "vectors _n"]]:
        """Return the attention weights of each sequence, from queries to rows."""
        q, k, args = self._attention(rows, bounds)
        return [attention_weights(q, k, args, sequence)[0] for sequence in range(len(bounds) - 1)]

    def _attention(self, rows: Rows, bounds: Bounds) -> tuple[Tensor, Tensor, AttentionArgs]:
        """Return queries, keys and the other arguments of attention."""
        count = len(self.queries)
        sequences = len(bounds) - 1
        k = self.key(rows)
        k = (k.tanh() if self.tanh else k)[:, None]
        q = self.queries.to(k.dtype).repeat(sequences, 1)[:, None]
        layout = Layout.of(range(0, sequences * count + 1, count), bounds)  # `count` queries for each sequence
        return q, k, AttentionArgs(layout=layout, scale=self.scale)


class HierarchicalPooler(nn.Module):
    """Hierarchical attention: over the words of each sentence, then over the sentences of each text.

    A recurrent network may be applied to the sentence vectors in between.
    """

    def __init__(self, config: HierarchicalPooling, width: int) -> None:
        super().__init__()
        tanh = AttentionPooling(keys="tanh")
        self.ends = config.ends
        self.words = QueryPooler(tanh, width, 1, config.inner)
        self.over = None if config.sentences is None else BidirectionalRnn(config.sentences, width)
        self.width = width if self.over is None else self.over.width
        self.sentences = QueryPooler(tanh, self.width, 1, config.inner)

    def forward(self, rows: Rows, batch: Packed) -> Vectors:
        row_bounds, text_bounds = sentence_bounds(batch, self.ends)
        sentences = self.words(rows, row_bounds)[:, 0]
        if self.over is not None:
            sentences = self.over(sentences, text_bounds)
        vectors: Tensor = self.sentences(sentences, text_bounds)
        return vectors


class PooledClassesHead(nn.Module):
    """Sequence classification by a classic model: W h + b of the pooled vectors, [sequences, labels]."""

    def __init__(self, config: Classes, model: ClassicModel) -> None:
        super().__init__()
        pooling, labels = model.classic.reader, len(config.labels)
        assert not isinstance(pooling, RecurrentSeq2Seq)  # a model with this head generates no text
        self.dropout, self.config = config.dropout, pooling
        self.one_score = pooling.binary == "sigmoid" and config.problem_type == "single_label_classification"
        if self.one_score and labels != 2:
            raise ModelError(f'binary is "sigmoid", which is for two labels, but there are {labels}: use "softmax"')
        width, count = model.classic.width, 1  # dimension and number of the pooled vectors of a text
        match pooling:
            case BagPooling():
                self.bag = BagPooler(pooling)
            case AttentionPooling(queries=queries):
                count = labels if queries == "classes" else 1
                self.queries = QueryPooler(pooling, width, count, width)
            case StructuredPooling(hops=hops, inner=inner):
                count = hops
                self.queries = QueryPooler(AttentionPooling(keys="tanh"), width, hops, inner, bias=False)
            case HierarchicalPooling():
                self.hierarchy = HierarchicalPooler(pooling, width)
                width = self.hierarchy.width
        self.vector_per_class = isinstance(pooling, AttentionPooling) and pooling.queries == "classes"
        hidden = pooling.hidden if isinstance(pooling, StructuredPooling) else 0
        self.hidden = nn.Linear(count * width, hidden) if hidden else None
        last = FullPrecisionLinear if config.problem_type == "regression" else nn.Linear
        inputs = width if self.vector_per_class else hidden or count * width
        self.out = last(inputs, 1 if self.one_score else labels)

    def vectors(self, rows: Rows, batch: Packed) -> Vectors:
        """Return the pooled vectors of each text."""
        match self.config:
            case BagPooling():
                vectors: Tensor = self.bag(rows, batch)
            case HierarchicalPooling():
                vectors = self.hierarchy(rows, batch)
            case _:
                vectors = self.queries(rows, batch.bounds)
        return vectors

    def forward(self, rows: Rows, batch: Packed) -> Float[Tensor, "sequences labels"]:
        vectors = dropout(self.vectors(rows, batch), self.dropout, self.training)
        if self.vector_per_class:  # the score of a class is w_c h_c + b_c
            return (vectors * self.out.weight).sum(-1) + self.out.bias
        flat = vectors.flatten(1)
        if self.hidden is not None:
            flat = dropout(F.relu(self.hidden(flat)), self.dropout, self.training)
        scores: Tensor = self.out(flat)
        if self.one_score:
            scores = torch.cat([torch.zeros_like(scores), scores], 1)  # softmax(0, s) is sigmoid(s)
        return scores

    def penalty(self, rows: Rows, batch: Packed) -> Float[Tensor, " sequences"]:
        """Return the penalty on similar attention rows of each text, a term of its loss; 0 for an empty text.

        Lin et al. 2017, equation 8.
        """
        if not isinstance(self.config, StructuredPooling) or self.config.penalty == 0:
            return rows.new_zeros(len(batch))
        identity = torch.eye(self.config.hops, dtype=rows.dtype, device=rows.device)
        penalties = []
        for weights in self.queries.weights(rows, batch.bounds):
            a = weights.to(rows.dtype)
            similarities = (a[:, None] * a).sum(-1)  # A A', not by matmul, which autocast would compute in bfloat16
            has_rows = a.shape[1] > 0
            penalties.append((similarities - identity).square().sum() * has_rows)
        return self.config.penalty * torch.stack(penalties) if penalties else rows.new_zeros(0)
