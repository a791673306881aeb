"""Attention weights of classic models, for `Inspection`: self-attention over word vectors, bags, trained queries."""

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
from heedful.nn.attend import attention_weights
from heedful.nn.layout import AttentionArgs, Layout
from heedful.packed import Packed

BAG_NAMES = ("each word alike",)  # uniform weights: the mean or sum of the words
HIERARCHY_NAMES = ("word in its sentence", "sentence in the text", "word in the text")


def attention_parts(loaded: ModelBundle) -> list[tuple[str, tuple[str, ...], bool]]:
    """Return the parts of a classic model that have attention weights.

    Returns:
        For each part its name, the names of its heads, and whether it pools the text. A part that pools has one row,
        for the text as a whole; the other parts have a row for each token.
    """
    model = cast(ClassicModel, loaded.model)
    head = loaded.head
    parts: list[tuple[str, tuple[str, ...], bool]] = []
    if isinstance(model.over, SelfAttentionMean):
        parts.append(("over", ("cosine" if model.over.cosine else "dot product",), False))
    if isinstance(head, PooledClassesHead):
        if hasattr(head, "bag"):
            parts.append(("reader", BAG_NAMES, True))
        elif hasattr(head, "hierarchy"):
            parts.append(("reader", HIERARCHY_NAMES, True))
        elif hasattr(head, "queries"):
            count = len(head.queries.queries)
            labels = loaded.config.head.labels if isinstance(loaded.config.head, Classes) else ()
            names = labels if head.vector_per_class else tuple(f"query {index}" for index in range(count))
            parts.append(("reader", names, True))
    return parts


def classic_attention_weights(loaded: ModelBundle, batch: Packed, part: str) -> Float[Tensor, "heads rows keys"]:
    """Return the weights of one part, "over" or "reader", for a batch of one sequence."""
    model = cast(ClassicModel, loaded.model)
    head = loaded.head
    word_vectors: Tensor = super(ClassicModel, model).forward(batch)  # input of self-attention or recurrent network
    if part == "over":
        assert isinstance(model.over, SelfAttentionMean)
        k = (F.normalize(word_vectors, dim=-1) if model.over.cosine else word_vectors)[:, None]
        return attention_weights(k, k, AttentionArgs(layout=Layout.of(batch.bounds), scale=1.0), 0)
    assert isinstance(head, PooledClassesHead)
    if hasattr(head, "bag"):
        return word_vectors.new_full((1, 1, len(word_vectors)), 1 / len(word_vectors))
    rows = word_vectors if model.over is None else model.over(word_vectors, batch.bounds)
    if hasattr(head, "hierarchy"):
        return _hierarchy_weights(head, batch, rows)
    weights: Tensor = head.queries.weights(rows, batch.bounds)[0]
    return weights[:, None]


def _hierarchy_weights(
    head: PooledClassesHead, batch: Packed, rows: Float[Tensor, "rows width"]
) -> Float[Tensor, "heads 1 rows"]:
    """Return the weights of hierarchical attention for each word, in the order of `HIERARCHY_NAMES`.

    The weight of a word in the text is its weight in its sentence times the sentence's weight in the text.
    """
    hierarchy = head.hierarchy
    bounds, text_bounds = sentence_bounds(batch, hierarchy.ends)
    word_weights = torch.cat([weights[0] for weights in hierarchy.words.weights(rows, bounds)])
    sentence_vectors = hierarchy.words(rows, bounds)[:, 0]
    if hierarchy.over is not None:
        sentence_vectors = hierarchy.over(sentence_vectors, text_bounds)
    sentence_weights = hierarchy.sentences.weights(sentence_vectors, text_bounds)[0][0]
    lengths = torch.tensor([stop - start for start, stop in pairwise(bounds)])
    per_word = sentence_weights.repeat_interleave(lengths)
    return torch.stack([word_weights, per_word, word_weights * per_word])[:, None]
