"""Heads: modules that compute scores or vectors from the last hidden states of a batch.

In this module, `rows` are these hidden states, one for each token, sequences end to end. `ModelBundle` calls
`make_head`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import ModelError
from heedful.model import config as c
from heedful.model.classic import ClassicModel
from heedful.model.pooling import PooledClassesHead
from heedful.model.stack import Transformer
from heedful.nn.dropout import dropout
from heedful.nn.layers import ACTIVATIONS, FullPrecisionLinear, make_norm, segment_means
from heedful.packed import Packed, send

Rows = Float[Tensor, "rows width"]


class Transform(nn.Module):
    """norm(activation(W h + b)) of every vector; the config decides which of these steps are computed."""

    def __init__(self, config: c.Summary | c.Rowwise, width: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation] if config.dense and config.activation else nn.Identity()
        self.dense = nn.Linear(width, width, bias=config.dense_bias) if config.dense else nn.Identity()
        self.norm: nn.Module = nn.Identity()
        if config.dense and config.norm_eps is not None:
            self.norm = make_norm("layer", width, config.norm_eps, config.norm_bias)

    def forward(self, x: Float[Tensor, "any width"]) -> Float[Tensor, "any width"]:
        transformed: Tensor = self.norm(self.activation(self.dense(x)))
        return transformed


class SummaryVector(Transform):
    """A transformed vector for each sequence; by default tanh(W h + b) of its first row (Devlin et al. 2019)."""

    def __init__(self, config: c.Summary, width: int) -> None:
        super().__init__(config, width)
        self.pooling = config.pooling
        self.pools_last = config.pools_last
        self.dropout_first = config.dropout_first
        self.pooled_token = config.pooled_token

    def forward(self, rows: Rows, batch: Packed) -> Float[Tensor, "sequences width"]:  # type: ignore[override]
        x = rows if self.pools_last else self._pool(rows, batch)
        x = super().forward(dropout(x, self.dropout_first, self.training))
        return self._pool(x, batch) if self.pools_last else x

    def _pool(self, rows: Rows, batch: Packed) -> Float[Tensor, "sequences width"]:
        """Pool the rows of each sequence; if `pooled_token` is set, return the row of its last occurrence."""
        if self.pooled_token is None or len(rows) == 0:
            return pool(rows, batch, self.pooling)
        lengths = send(batch.lengths, rows.device)
        return rows[last_rows_of(batch, self.pooled_token)].masked_fill((lengths == 0)[:, None], 0.0)


class MaskedTokensHead(nn.Module):
    """decoder(norm(activation(W h + b))) + bias: scores over the vocabulary, [rows, vocabulary]."""

    def __init__(self, config: c.MaskedTokens | c.Pretraining, model: Transformer) -> None:
        super().__init__()
        tokens = model.output_embedding.tokens
        width, has_dense = tokens.embedding_dim, isinstance(config, c.Pretraining) or config.dense
        if not has_dense:
            _check_width(config, model)
        self.activation = ACTIVATIONS[config.activation] if has_dense else nn.Identity()
        self.dense = nn.Linear(model.config.width, width, bias=config.dense_bias) if has_dense else nn.Identity()
        self.norm = make_norm("layer", width, config.norm_eps, config.norm_bias) if has_dense else nn.Identity()
        self.decoder = _make_decoder(tokens, config.tied, config.bias)

    def forward(self, rows: Rows, batch: Packed) -> Float[Tensor, "rows vocabulary"]:
        scores: Tensor = self.decoder(self.norm(self.activation(self.dense(rows))))
        return scores


class NextTokenHead(nn.Module):
    """Scores over the vocabulary by one linear layer, [rows, vocabulary]."""

    def __init__(self, config: c.NextToken | c.NextTokenAndChoice | c.PermutedTokens, model: Transformer) -> None:
        super().__init__()
        _check_width(config, model)
        self.scale = 1.0 if isinstance(config, c.PermutedTokens) else config.scale
        self.decoder = _make_decoder(model.output_embedding.tokens, config.tied, config.bias)
        if isinstance(config, c.NextToken) and config.bias:
            self.decoder.bias.requires_grad_(config.bias_is_trained)

    def forward(self, rows: Rows, batch: Packed) -> Float[Tensor, "rows vocabulary"]:
        scores: Tensor = self.decoder(rows if self.scale == 1.0 else rows * self.scale)
        return scores


def _check_width(config: c.Head, model: Transformer) -> None:
    """Raise ModelError unless the hidden size is the dimension of token vectors."""
    width = model.output_embedding.tokens.embedding_dim
    if width != model.config.width:
        raise ModelError(
            f"a {config.kind} head multiplies hidden states of {model.config.width} dimensions with token vectors of "
            f"{width}: set the width of the embedding to that of the stack"
        )


def _make_decoder(tokens: nn.Embedding, tied: bool, bias: bool) -> nn.Linear:
    """Make the layer of vocabulary scores; with `tied`, its weight is that of the token embedding."""
    decoder = nn.Linear(tokens.embedding_dim, tokens.num_embeddings, bias=bias, device="meta" if tied else None)
    if tied:
        decoder.weight = tokens.weight
        if bias:
            decoder.bias = nn.Parameter(torch.zeros(tokens.num_embeddings, device=tokens.weight.device))
    return decoder


class NextSentenceHead(nn.Module):
    """Next-sentence prediction: scores [sequences, 2]; 0 is "follows", 1 is "does not"."""

    def __init__(self, config: c.NextSentenceScores | c.Pretraining, model: Transformer) -> None:
        super().__init__()
        self.dropout = config.dropout if isinstance(config, c.Pretraining) else 0.0
        self.first = SummaryVector(c.Summary(), model.config.width)
        self.out = nn.Linear(model.config.width, 2)

    def forward(self, rows: Rows, batch: Packed) -> Float[Tensor, "sequences 2"]:
        scores: Tensor = self.out(dropout(self.first(rows, batch), self.dropout, self.training))
        return scores


class PretrainingScores(NamedTuple):
    """Scores of masked tokens, [rows, vocabulary], and of the next sentence, [sequences, 2]."""

    tokens: Tensor
    next: Tensor


class PretrainingHead(nn.Module):
    """Masked tokens and next-sentence prediction, as BERT is pre-trained."""

    def __init__(self, config: c.Pretraining, model: Transformer) -> None:
        super().__init__()
        self.masked = MaskedTokensHead(config, model)
        self.next = NextSentenceHead(config, model)

    def forward(self, rows: Rows, batch: Packed) -> PretrainingScores:
        return PretrainingScores(self.masked(rows, batch), self.next(rows, batch))


class PooledHead(nn.Module):
    """The pooler: one vector for each sequence, [sequences, hidden size]."""

    def __init__(self, config: c.Pooled, model: Transformer) -> None:
        super().__init__()
        self.first = SummaryVector(c.Summary(), model.config.width)

    def forward(self, rows: Rows, batch: Packed) -> Float[Tensor, "sequences width"]:
        pooled: Tensor = self.first(rows, batch)
        return pooled


class ClassesHead(nn.Module):
    """Sequence classification and regression: scores [sequences, labels]."""

    def __init__(self, config: c.Classes, model: Transformer) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.first = SummaryVector(config, model.config.width)
        last = FullPrecisionLinear if config.problem_type == "regression" else nn.Linear
        self.out = last(model.config.width, len(config.labels), bias=config.bias)

    def vectors(self, rows: Rows, batch: Packed) -> Float[Tensor, "sequences width"]:
        """Return the input of the last layer for each sequence."""
        vectors: Tensor = self.first(rows, batch)
        return vectors

    def forward(self, rows: Rows, batch: Packed) -> Float[Tensor, "sequences labels"]:
        scores: Tensor = self.out(dropout(self.vectors(rows, batch), self.dropout, self.training))
        return scores


class ChoiceHead(nn.Module):
    """Multiple choice: one score for each candidate, [sequences]; the answer is the one with the highest score."""

    def __init__(self, config: c.Choice | c.NextTokenAndChoice, model: Transformer) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.first = SummaryVector(config, model.config.width)
        self.out = nn.Linear(model.config.width, 1)

    def forward(self, rows: Rows, batch: Packed) -> Float[Tensor, " sequences"]:
        scores: Tensor = self.out(dropout(self.first(rows, batch), self.dropout, self.training))
        return scores[:, 0]


class NextTokenAndChoiceScores(NamedTuple):
    """Scores of next tokens, [rows, vocabulary], and of each sequence, [sequences]."""

    tokens: Tensor
    choice: Tensor


HeadOutputs = Tensor | PretrainingScores | NextTokenAndChoiceScores


class NextTokenAndChoiceHead(nn.Module):
    """Next tokens and multiple choice (GPT-2's double heads)."""

    def __init__(self, config: c.NextTokenAndChoice, model: Transformer) -> None:
        super().__init__()
        self.tokens = NextTokenHead(config, model)
        self.choice = ChoiceHead(config, model)

    def forward(self, rows: Rows, batch: Packed) -> NextTokenAndChoiceScores:
        return NextTokenAndChoiceScores(self.tokens(rows, batch), self.choice(rows, batch))


class RowsHead(nn.Module):
    """Scores of rows for token classification, question answering and replaced token detection.

    The shapes are [rows, labels], [rows, 2] (start and end of an answer) and [rows].
    """

    def __init__(self, config: c.TokenClasses | c.SpanScores | c.ReplacedTokens, model: Transformer) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.has_one_score = isinstance(config, c.ReplacedTokens)
        self.first = Transform(config, model.config.width)
        if isinstance(config, c.TokenClasses):
            num_scores = len(config.labels)
        elif self.has_one_score:
            num_scores = 1
        else:
            num_scores = 2
        self.out = nn.Linear(model.config.width, num_scores)

    def forward(self, rows: Rows, batch: Packed) -> Float[Tensor, "rows ..."]:
        scores: Tensor = self.out(dropout(self.first(rows), self.dropout, self.training))
        return scores[:, 0] if self.has_one_score else scores


class SentenceEmbeddingHead(nn.Module):
    """Sentence embeddings, [sequences, dimensions]: vectors of all poolings, concatenated, through the dense layers."""

    def __init__(self, config: c.SentenceEmbedding, model: Transformer) -> None:
        super().__init__()
        self.config = config
        widths = [model.config.width * len(config.pooling), *(layer.width for layer in config.dense)]
        self.dense = nn.ModuleList(
            nn.Linear(width, layer.width, bias=layer.bias) for width, layer in zip(widths, config.dense, strict=False)
        )
        if config.keeps_pooler:
            self.first = SummaryVector(c.Summary(), model.config.width)

    def forward(self, rows: Rows, batch: Packed) -> Float[Tensor, "sequences all_widths"]:
        vectors = torch.cat([pool(rows, batch, pooling) for pooling in self.config.pooling], -1)
        for layer, config in zip(self.dense, self.config.dense, strict=True):
            vectors = layer(vectors)
            vectors = ACTIVATIONS[config.activation](vectors) if config.activation else vectors
        return (F.normalize(vectors, dim=-1) if self.config.normalise else vectors)[:, : self.config.dimensions]


def pool(rows: Rows, batch: Packed, pooling: c.Pooling) -> Float[Tensor, "sequences width"]:
    """Pool the rows of each sequence into one vector; the vector of an empty sequence is zeros.

    "mean_sqrt_length" is the sum divided by the root of the length.
    """
    if len(batch) == 0:
        return rows[:0]
    lengths = send(batch.lengths, rows.device)
    if pooling in ("first", "last", "max") and 0 in batch.lengths:
        vectors = rows.new_zeros(len(batch), rows.shape[1])
        without_empty = replace(batch, bounds=tuple(sorted(set(batch.bounds))))
        vectors[lengths > 0] = pool(rows, without_empty, pooling)
        return vectors
    if pooling == "first":
        return rows[batch.first_rows()]
    if pooling == "last":
        return rows[batch.last_rows()]
    if pooling == "max":
        return torch.segment_reduce(rows, "max", lengths=lengths)
    segments = torch.arange(len(batch), device=rows.device).repeat_interleave(lengths, output_size=len(rows))
    return segment_means(rows, segments, lengths, power=0.5 if pooling == "mean_sqrt_length" else 1.0)


def last_rows_of(batch: Packed, token: int) -> Int[Tensor, " sequences"]:
    """Return the row index of the token's last occurrence in each sequence; without one, that of the last row."""
    device = batch.tokens.device
    rows = torch.where(batch.tokens == token, torch.arange(len(batch.tokens), device=device), -1)
    sequences = torch.arange(len(batch)).repeat_interleave(torch.tensor(batch.lengths)).to(device, non_blocking=True)
    last_row = send(batch.bounds[1:], device) - 1
    token_row = torch.full_like(last_row, -1).scatter_reduce(0, sequences, rows, "amax")
    return torch.where(token_row < 0, last_row, token_row)


def pooled_row(head: nn.Module, batch: Packed) -> tuple[Int[Tensor, " sequences"] | None, Packed]:
    """Return the rows that a head needs, if it reads one row of each sequence.

    Returns:
        The index of that row of each sequence, and a batch of these rows. If the head reads more rows, None and the
        batch itself.
    """
    match head:
        case ClassesHead() | ChoiceHead() | NextSentenceHead() | PooledHead():
            poolings: tuple[c.Pooling, ...] = (head.first.pooling,)
            pooled_token = head.first.pooled_token
        case SentenceEmbeddingHead():
            poolings, pooled_token = head.config.pooling, None
        case _:
            return None, batch
    if 0 in (len(batch), *batch.lengths) or len(poolings) > 1 or poolings[0] not in ("first", "last"):
        return None, batch
    if pooled_token is not None:
        rows = last_rows_of(batch, pooled_token)
    else:
        rows = batch.first_rows() if poolings[0] == "first" else batch.last_rows()
    return rows, batch.select(rows)


_HEADS: dict[type, type[nn.Module]] = {  # configuration -> module
    c.Pooled: PooledHead,
    c.MaskedTokens: MaskedTokensHead,
    c.NextSentenceScores: NextSentenceHead,
    c.Pretraining: PretrainingHead,
    c.Classes: ClassesHead,
    c.TokenClasses: RowsHead,
    c.Choice: ChoiceHead,
    c.SpanScores: RowsHead,
    c.ReplacedTokens: RowsHead,
    c.NextToken: NextTokenHead,
    c.NextTokenAndChoice: NextTokenAndChoiceHead,
    c.PermutedTokens: NextTokenHead,
    c.SentenceEmbedding: SentenceEmbeddingHead,
}


def make_head(config: c.Head, model: Transformer) -> nn.Module:
    """Make a head for a model; raises ModelError if the model cannot have this head."""
    if isinstance(config, c.Classes | c.TokenClasses) and not config.labels:
        raise ModelError(f'a "{config.kind}" head has no labels: give at least one')
    if isinstance(model, ClassicModel) and isinstance(config, c.Classes):
        return PooledClassesHead(config, model)
    return _HEADS[type(config)](config, model)
