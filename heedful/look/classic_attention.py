"""What classic models look at: words at words by likeness, bags and trained queries at words and sentences."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import Loaded
from heedful.model.classic import Classic, SelfAttended, sentences
from heedful.model.config import Classes
from heedful.model.pooling import ReadClasses
from heedful.nn.attend import weights as weights_of
from heedful.nn.layout import Call, Layout
from heedful.packed import Packed

ALIKE = ("each word alike",)  # a mean, or so many means as there are words
HIERARCHY = ("word in its sentence", "sentence in the text", "word in the text")


def attention_parts(loaded: Loaded) -> list[tuple[str, tuple[str, ...], str]]:
    """Of a classic model: the parts that look, the names of their heads, and whether their rows are tokens or texts."""
    model, head = cast(Classic, loaded.model), loaded.head
    found: list[tuple[str, tuple[str, ...], str]] = []
    if isinstance(model.over, SelfAttended):
        found.append(("over", ("cosine" if model.over.cosine else "dot product",), "tokens"))
    if isinstance(head, ReadClasses):
        if hasattr(head, "bag"):
            found.append(("reader", ALIKE, "text"))
        elif hasattr(head, "hierarchy"):
            found.append(("reader", HIERARCHY, "text"))
        elif hasattr(head, "queries"):
            count = len(head.queries.queries)
            labels = loaded.config.head.labels if isinstance(loaded.config.head, Classes) else ()
            names = labels if head.each else tuple(f"query {number}" for number in range(count))
            found.append(("reader", names, "text"))
    return found


def attention_weights(loaded: Loaded, batch: Packed, part: str) -> Float[Tensor, "heads rows keys"]:
    """Of one sequence, as the model computes them."""
    model, head = cast(Classic, loaded.model), loaded.head
    below: Tensor = super(Classic, model).forward(batch)
    if part == "over":
        assert isinstance(model.over, SelfAttended)
        k = (F.normalize(below, dim=-1) if model.over.cosine else below)[:, None]
        return weights_of(k, k, Call(layout=Layout.of(batch.bounds), scale=1.0), 0)
    assert isinstance(head, ReadClasses)
    if hasattr(head, "bag"):
        return below.new_full((1, 1, len(below)), 1 / len(below))
    rows = below if model.over is None else model.over(below, batch.bounds)
    if not hasattr(head, "hierarchy"):
        read: Tensor = head.queries.weights(rows, batch.bounds)[0]
        return read[:, None]
    reader = head.hierarchy
    words, texts = sentences(batch, reader.ends)
    within = torch.cat([each[0] for each in reader.words.weights(rows, words)])
    found = reader.words(rows, words)[:, 0]
    if reader.over is not None:
        found = reader.over(found, texts)
    each = reader.sentences.weights(found, texts)[0][0]
    lengths = torch.tensor([stop - start for start, stop in pairwise(words)])
    spread = each.repeat_interleave(lengths)
    return torch.stack([within, spread, within * spread])[:, None]
