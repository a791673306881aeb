"""Comparison of two inspections: aligned tokens, the difference of attention, the similarity of hidden states."""

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
    """Attention weights of two inspections on their aligned tokens."""

    a: Float[Tensor, "rows keys"]
    b: Float[Tensor, "rows keys"]
    difference: Float[Tensor, "rows keys"]  # b - a
    rows: Pairs
    keys: Pairs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateSimilarity:
    """Cosine similarity of the hidden states of aligned tokens."""

    tokens: Pairs
    cosines: Float[Tensor, "states tokens"]  # before the first block and after each


def align_tokens(a: Sequence[str], b: Sequence[str]) -> Pairs:
    """Align equal tokens in order, and tokens that were replaced by as many others.

    >>> align_tokens(["a", "good", "film"], ["a", "bad", "film"])
    [(0, 0), (1, 1), (2, 2)]
    >>> align_tokens(["a", "film"], ["a", "long", "film"])
    [(0, 0), (1, 2)]
    """
    pairs: Pairs = []
    for kind, start, stop, first, last in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal" or (kind == "replace" and stop - start == last - first):
            pairs += zip(range(start, stop), range(first, last), strict=True)
    return pairs


def attention_difference(
    a: Inspection, b: Inspection, part: str, layers: tuple[int, int], heads: tuple[int | None, int | None]
) -> AttentionDifference:
    """Return the weights of b minus those of a on aligned tokens.

    Args:
        layers: The layer of each, from 0.
        heads: The head of each, from 0; None: the mean over heads.
    """
    views = a.view(part), b.view(part)
    if {(view.rows, view.keys) for view in views} != {(views[0].rows, views[0].keys)}:
        raise RequestError(f"{part} attends to different texts in the two models: choose another part")
    rows, keys = (_align_sides(a, b, side) for side in (views[0].rows, views[0].keys))
    first, second = (
        _head_or_mean(inspection, part, layer, head)[[pair[number] for pair in rows]][
            :, [pair[number] for pair in keys]
        ]
        for number, (inspection, layer, head) in enumerate(zip((a, b), layers, heads, strict=True))
    )
    return AttentionDifference(a=first, b=second, difference=second - first, rows=rows, keys=keys)


def _align_sides(a: Inspection, b: Inspection, side: str) -> Pairs:
    return align_tokens(*([token["text"] for token in inspection.sides[side]] for inspection in (a, b)))


def _head_or_mean(inspection: Inspection, part: str, layer: int, head: int | None) -> Float[Tensor, "rows keys"]:
    mean: Tensor = inspection.weights(part, layer, None if head is None else [head]).mean(0)
    return mean


def hidden_state_similarity(a: Inspection, b: Inspection, part: str) -> StateSimilarity:
    """Return the cosine similarity of the hidden states of aligned tokens; for "cross" those of the decoder.

    Raises:
        RequestError: If the models have no such blocks, or different numbers of layers or widths.
    """
    part = "decoder" if part == "cross" else part
    has_part = all(part in [view.part for view in inspection.views] for inspection in (a, b))
    if not has_part or part not in ("encoder", "decoder"):
        raise RequestError(f"{part} has no blocks whose hidden states could be compared: choose encoder or decoder")
    states_a, states_b = a.hidden_states(part), b.hidden_states(part)
    if len(states_a) != len(states_b) or states_a[0].shape[1] != states_b[0].shape[1]:
        raise RequestError("the two models have different shapes, so their hidden states cannot be compared")
    pairs = _align_sides(a, b, a.view(part).rows)
    rows_a, rows_b = ([pair[number] for pair in pairs] for number in (0, 1))
    cosines = [
        torch.nn.functional.cosine_similarity(x[rows_a], y[rows_b], dim=-1)
        for x, y in zip(states_a, states_b, strict=True)
    ]
    return StateSimilarity(tokens=pairs, cosines=torch.stack(cosines))
