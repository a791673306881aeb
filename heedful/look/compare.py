"""Two looks side by side: their tokens aligned, and the difference of what they look at."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.look.inspection import Inspection


def align_tokens(one: Sequence[str], other: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of places: equal tokens in order, and, where as many were replaced as came, each with its replacement.

    >>> align(["a", "good", "film"], ["a", "bad", "film"]), align(["a", "film"], ["a", "long", "film"])
    ([(0, 0), (1, 1), (2, 2)], [(0, 0), (1, 2)])
    """
    pairs: list[tuple[int, int]] = []
    for what, a, b, c, d in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if what == "equal" or (what == "replace" and b - a == d - c):
            pairs += zip(range(a, b), range(c, d), strict=True)
    return pairs


def attention_difference(
    a: Inspection, b: Inspection, part: str, layers: tuple[int, int], heads: tuple[int | None, int | None]
) -> dict[str, Any]:
    """Weights of the second minus those of the first on aligned tokens; a head of None is the mean of all.

    {"a", "b", "difference": [rows, keys], "rows", "keys": [(place in a, place in b)]}.
    """
    views = a.view(part), b.view(part)
    if {(view.rows, view.keys) for view in views} != {(views[0].rows, views[0].keys)}:
        raise HeedfulError(f"the two models' {part} look at different texts")
    chosen = [_weights(inside, part, layer, head) for inside, layer, head in zip((a, b), layers, heads, strict=True)]
    rows, keys = (
        align_tokens(*([each["text"] for each in inside.sides[side]] for inside in (a, b)))
        for side in (views[0].rows, views[0].keys)
    )
    first, second = (each[[pair[n] for pair in rows]][:, [pair[n] for pair in keys]] for n, each in enumerate(chosen))
    return {"a": first, "b": second, "difference": second - first, "rows": rows, "keys": keys}


def _weights(inside: Inspection, part: str, layer: int, head: int | None) -> Float[Tensor, "rows keys"]:
    found = inside.weights(part, layer, None if head is None else [head])
    mean: Tensor = found.mean(0)
    return mean


def hidden_state_similarity(a: Inspection, b: Inspection, part: str) -> dict[str, Any]:
    """How alike the rows of aligned tokens are after each layer of both, as cosines; only of models of one shape.

    {"tokens": [(place in a, place in b)], "cosines": [layers + 1, tokens]}; those that look across are the decoder's.
    """
    part = "decoder" if part == "cross" else part
    if any(part not in [view.part for view in inside.views] for inside in (a, b)) or part not in ("encoder", "decoder"):
        raise HeedfulError("there are no blocks through which rows could be followed")
    one, other = a.hidden_states(part), b.hidden_states(part)
    if len(one) != len(other) or one[0].shape[1] != other[0].shape[1]:
        raise HeedfulError("the two models have different shapes, so their rows cannot be compared")
    pairs = align_tokens(*([each["text"] for each in inside.sides[inside.view(part).rows]] for inside in (a, b)))
    mine, theirs = ([pair[n] for pair in pairs] for n in (0, 1))
    cosines = [
        torch.nn.functional.cosine_similarity(x[mine], y[theirs], dim=-1) for x, y in zip(one, other, strict=True)
    ]
    return {"tokens": pairs, "cosines": torch.stack(cosines)}
