"""Attention weights of classic models: self-attention over word vectors, bags of words, trained queries."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.model.classic import ClassicModel, SelfAttentionMean, sentence_bounds
from heedful.model.config import Classes
from heedful.model.pooling import PooledClassesHead
from heedful.nn.attend import attention_weights as weights_of
from heedful.nn.layout import AttentionArgs, Layout
from heedful.packed import Packed

BAG_NAMES = ("each word alike",)  # uniform weights: the mean or sum of the words
HIERARCHY_NAMES = ("word in its sentence", "sentence in the text", "word in the text")


def attention_parts(loaded: ModelBundle) -> list[tuple[str, tuple[str, ...], str]]:
    """Return the parts of a classic model that have attention weights.

    Returns:
        For each part its name, the names of its heads, and what its rows are: "tokens" or "text".
    """
    model, head = cast(ClassicModel, loaded.model), loaded.head
    parts: list[tuple[str, tuple[str, ...], str]] = []
    if isinstance(model.over, SelfAttentionMean):
        parts.append(("over", ("cosine" if model.over.cosine else "dot product",), "tokens"))
    if isinstance(head, PooledClassesHead):
        if hasattr(head, "bag"):
            parts.append(("reader", BAG_NAMES, "text"))
        elif hasattr(head, "hierarchy"):
            parts.append(("reader", HIERARCHY_NAMES, "text"))
        elif hasattr(head, "queries"):
            count = len(head.queries.queries)
            labels = loaded.config.head.labels if isinstance(loaded.config.head, Classes) else ()
            names = labels if head.vector_per_class else tuple(f"query {number}" for number in range(count))
            parts.append(("reader", names, "text"))
    return parts


def classic_attention_weights(loaded: ModelBundle, batch: Packed, part: str) -> Float[Tensor, "heads rows keys"]:
    """Return the weights of one part, "over" or "reader", for a batch of one sequence."""
    model, head = cast(ClassicModel, loaded.model), loaded.head
    below: Tensor = super(ClassicModel, model).forward(batch)  # without self-attention or a recurrent network
    if part == "over":
        assert isinstance(model.over, SelfAttentionMean)
        k = (F.normalize(below, dim=-1) if model.over.cosine else below)[:, None]
        return weights_of(k, k, AttentionArgs(layout=Layout.of(batch.bounds), scale=1.0), 0)
    assert isinstance(head, PooledClassesHead)
    if hasattr(head, "bag"):
        return below.new_full((1, 1, len(below)), 1 / len(below))
    rows = below if model.over is None else model.over(below, batch.bounds)
    if not hasattr(head, "hierarchy"):
        weights: Tensor = head.queries.weights(rows, batch.bounds)[0]
        return weights[:, None]
    reader = head.hierarchy
    bounds, text_bounds = sentence_bounds(batch, reader.ends)
    word_weights = torch.cat([weights[0] for weights in reader.words.weights(rows, bounds)])
    vectors = reader.words(rows, bounds)[:, 0]
    if reader.over is not None:
        vectors = reader.over(vectors, text_bounds)
    sentence_weights = reader.sentences.weights(vectors, text_bounds)[0][0]
    lengths = torch.tensor([stop - start for start, stop in pairwise(bounds)])
    per_word = sentence_weights.repeat_interleave(lengths)
    return torch.stack([word_weights, per_word, word_weights * per_word])[:, None]
