"""Comparison of two inspections: aligned tokens, the difference of attention, the similarity of hidden states.

`page_api.py` answers with them when the page shows two texts or models side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.errors import RequestError
from heedful.look.inspection import Inspection

Pairs = list[tuple[int, int]]  # positions in the first and in the second text


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionDifference:
    """Attention weights of two inspections, a and b, on their aligned tokens."""

    a: Float[Tensor, "rows keys"]
    b: Float[Tensor, "rows keys"]
    difference: Float[Tensor, "rows keys"]  # b - a
    rows: Pairs  # aligned tokens that attend
    keys: Pairs  # aligned tokens that are attended to


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateSimilarity:
    """Cosine similarity of the hidden states of aligned tokens."""

    tokens: Pairs
    cosines: Float[Tensor, "states tokens"]  # before the first block and after each


def align_tokens(a: Sequence[str], b: Sequence[str]) -> Pairs:
    """Align equal tokens in order, and runs of different tokens between them if both runs have the same length.

    >>> align_tokens(["a", "good", "film"], ["a", "bad", "film"])
    [(0, 0), (1, 1), (2, 2)]
    >>> align_tokens(["a", "film"], ["a", "long", "film"])
    [(0, 0), (1, 2)]
    """
    pairs: Pairs = []
    for kind, start_a, stop_a, start_b, stop_b in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal" or (kind == "replace" and stop_a - start_a == stop_b - start_b):
            pairs += zip(range(start_a, stop_a), range(start_b, stop_b), strict=True)
    return pairs


def attention_difference(
    a: Inspection, b: Inspection, part: str, layers: tuple[int, int], heads: tuple[int | None, int | None]
) -> AttentionDifference:
    """Return the difference of attention weights, b - a, on aligned tokens.

    Args:
        a: One inspection.
        b: The inspection to compare it with.
        part: A part that both models have.
        layers: The layer in a and the layer in b, from 0.
        heads: The head in a and the head in b, from 0. None means the mean over heads.

    Raises:
        RequestError: If a model has no such part, or the part attends to different texts in the two models.
    """
    view_a, view_b = a.view(part), b.view(part)
    if (view_a.rows, view_a.keys) != (view_b.rows, view_b.keys):
        raise RequestError(f"{part} attends to different texts in the two models: choose another part")
    rows, keys = _align_sides(a, b, view_a.rows), _align_sides(a, b, view_a.keys)
    rows_a, rows_b = _unzip(rows)
    keys_a, keys_b = _unzip(keys)
    weights_a = _head_or_mean(a, part, layers[0], heads[0])[rows_a][:, keys_a]
    weights_b = _head_or_mean(b, part, layers[1], heads[1])[rows_b][:, keys_b]
    return AttentionDifference(a=weights_a, b=weights_b, difference=weights_b - weights_a, rows=rows, keys=keys)


def _align_sides(a: Inspection, b: Inspection, side: str) -> Pairs:
    names_a, names_b = ([token["text"] for token in inspection.sides[side]] for inspection in (a, b))
    return align_tokens(names_a, names_b)


def _unzip(pairs: Pairs) -> tuple[list[int], list[int]]:
    """Split pairs into the positions in the first text and the positions in the second text."""
    return [first for first, _ in pairs], [second for _, second in pairs]


def _head_or_mean(inspection: Inspection, part: str, layer: int, head: int | None) -> Float[Tensor, "rows keys"]:
    """Return the weights of one head, or the mean over heads if `head` is None."""
    mean: Tensor = inspection.weights(part, layer, None if head is None else [head]).mean(0)
    return mean


def hidden_state_similarity(a: Inspection, b: Inspection, part: str) -> StateSimilarity:
    """Return the cosine similarity of the hidden states of aligned tokens. For "cross", these are the decoder's.

    Raises:
        RequestError: If the models have no such blocks, or different layer counts or hidden sizes.
    """
    part = "decoder" if part == "cross" else part
    has_part = all(part in [view.part for view in inspection.views] for inspection in (a, b))
    if not has_part or part not in ("encoder", "decoder"):
        raise RequestError(f"{part} has no blocks whose hidden states could be compared: choose encoder or decoder")
    states_a, states_b = a.hidden_states(part), b.hidden_states(part)
    if len(states_a) != len(states_b) or states_a[0].shape[1] != states_b[0].shape[1]:
        raise RequestError("the two models have different shapes, so their hidden states cannot be compared")
    pairs = _align_sides(a, b, a.view(part).rows)
    rows_a, rows_b = _unzip(pairs)
    cosines = [
        torch.nn.functional.cosine_similarity(x[rows_a], y[rows_b], dim=-1)
        for x, y in zip(states_a, states_b, strict=True)
    ]
    return StateSimilarity(tokens=pairs, cosines=torch.stack(cosines))
