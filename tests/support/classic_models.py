"""Tiny classic models, and recurrent networks computed step by step from their formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.checkpoint.new_head import with_head
from heedful.model.classic_config import (
    AttentionPooling,
    BagPooling,
    ClassicConfig,
    HierarchicalPooling,
    PoolingConfigs,
    Recurrent,
    StructuredPooling,
    UntrainedSelfAttention,
)
from heedful.model.config import EmbeddingConfig
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.words import word_tokenizer

WORDS = ["the", "film", "was", "good", "bad", "very", "not", "and", "end", "."]
TOKENIZER = word_tokenizer(WORDS)
END = 10  # the id of "."
BATCH = [[1, 2, 3, 6, 4, 10, 8, 9, 10, 10, 7, 5], [], [4], [10, 1, 2, 10], [5, 6, 7]]
LSTM, GRU = Recurrent(width=3, layers=2), Recurrent(cell="gru", width=3)
READERS: dict[str, PoolingConfigs] = {
    "bag of means": BagPooling(),
    "bag of sums": BagPooling(how="sum", binary="sigmoid"),
    "plain attention": AttentionPooling(),
    "keys and values": AttentionPooling(keys="linear", values="linear", scaled=True),
    "a query for each class": AttentionPooling(keys="tanh", queries="classes"),
    "structured": StructuredPooling(over=LSTM, hops=3, inner=5),
    "structured, hidden": StructuredPooling(over=None, hops=2, inner=5, hidden=6),
    "hierarchical": HierarchicalPooling(over=GRU, sentences=LSTM, inner=5, ends=(END,)),
    "hierarchical, plain": HierarchicalPooling(over=None, sentences=None, inner=5, ends=(END,)),
    "recurrent": BagPooling(over=GRU),
    "dot products": BagPooling(over=UntrainedSelfAttention()),
    "cosines": BagPooling(over=UntrainedSelfAttention(score="cosine")),
}


def make_classic_encoder(
    reader: PoolingConfigs, tokenizer: Tokenizer = TOKENIZER, width: int = 4, seed: int = 0, **fields: Any
) -> ModelBundle:
    """Return a classic model without a head."""
    embedding = EmbeddingConfig(vocabulary=tokenizer.size, width=width)
    config = ClassicConfig(embedding=embedding, reader=reader, **fields)
    return create(BundleConfig(family="heedful-classic", model=config), tokenizer, seed=seed)


def make_classic(name: str, labels: tuple[str, ...] = ("bad", "good"), **fields: Any) -> ModelBundle:
    """Return a classic model of READERS with a classification head, in float64 and eval mode."""
    bundle = with_head(make_classic_encoder(READERS[name], **fields), "sequence_classification", labels=labels, seed=1)
    return bundle.double().eval()


def recurrent_step(cells: nn.Module, x: Tensor, h: Tensor, c: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Compute one step of an LSTM or a GRU from the published formulas.

    Args:
        cells: The network, with weights named as in torch.nn.LSTM and torch.nn.GRU.
        x: Input of the step.
        h: Previous hidden state.
        c: Previous cell state; unused by a GRU.
        name: Suffix of the names of weights, such as "l0_reverse".
    """
    w, u, b, d = (getattr(cells, f"{kind}_{name}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    if isinstance(cells, nn.LSTM):
        i, f, g, o = (w @ x + b + u @ h + d).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    (wr, wz, wn), (ur, uz, un) = (w @ x + b).chunk(3), (u @ h + d).chunk(3)
    z = (wz + uz).sigmoid()
    return (1 - z) * (wn + (wr + ur).sigmoid() * un).tanh() + z * h, c


def run_recurrent(cells: Any, rows: Tensor) -> Tensor:
    """Return the outputs of a bidirectional LSTM or GRU, computed row by row."""
    for layer in range(cells.num_layers):
        directions = []
        for is_reverse in (False, True):
            name = f"l{layer}_reverse" if is_reverse else f"l{layer}"
            h = c = rows.new_zeros(cells.hidden_size)
            states = []
            for x in reversed(rows) if is_reverse else rows:
                h, c = recurrent_step(cells, x, h, c, name)
                states.append(h)
            directions.append(torch.stack(states[::-1] if is_reverse else states))
        rows = torch.cat(directions, -1)
    return rows
