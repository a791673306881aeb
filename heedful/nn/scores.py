"""Attention in three steps: alignment scores of queries and keys, attention weights, and the weighted sum of values.

Scores are the logits of the softmax (Luong et al. 2015, section 3.1, call them scores). A score function maps n queries
and m keys of one sequence to n x m scores, with any leading dimensions. `align` computes the scores of packed rows;
`soft_weights`, `hard_weights` and `sample_weights` turn scores into attention weights; `weighted_sum` multiplies them
with the values. The weight of a masked pair is 0, and so is the result of a query whose keys are all masked.

The recurrent decoder and the studies use these functions, which are simple and slow. `heedful.nn.attend` is fast; it
computes dot products only, to which cosine and general scores can be reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import HeedfulError
from heedful.nn.layout import AttentionArgs, Layout, allowed_pairs, relative_distances

Queries = Float[Tensor, "*some n width"]
Keys = Float[Tensor, "*some m key_width"]
Pairs = Float[Tensor, "*some n m"]
Prepared = Float[Tensor, "*some m inner"]
Score = Callable[[Tensor, Tensor], Tensor]  # q [..., n, width], k [..., m, key width] -> scores [..., n, m]
Blocks = tuple[Float[Tensor, "_n _m"], ...]  # scores or weights, one tensor for each sequence
Masks = tuple[Bool[Tensor, "_n _m"], ...]  # True for visible pairs


# -- six score functions ----------------------------------------------------------------------------------------


def cosine(q: Queries, k: Keys) -> Pairs:
    """Return the cosine similarity q k / (|q| |k|), 0 if q or k is zero (Graves et al. 2014, section 3.3.1)."""
    return unit_vectors(q) @ unit_vectors(k).mT


def unit_vectors(x: Float[Tensor, "*some width"]) -> Float[Tensor, "*some width"]:
    """Return x / |x|, or 0 if x is zero.

    Norms are computed in float32 at least, from vectors scaled to a largest element of 1: squares do not overflow.
    """
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = precise.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(precise.dtype).tiny)
    return F.normalize(precise / largest, dim=-1).to(x.dtype)


def dot(q: Queries, k: Keys) -> Pairs:
    """Return the dot product q k (Luong et al. 2015, section 3.1)."""
    return q @ k.mT


def scaled_dot(q: Queries, k: Keys) -> Pairs:
    """Return q k / sqrt(d) for vectors of width d (Vaswani et al. 2017, section 3.2.1)."""
    return dot(q, k) / sqrt(q.shape[-1])


class General(nn.Module):
    """The general score q W k with a trained matrix W (Luong et al. 2015, section 3.1)."""

    def __init__(self, *, width: int, key_width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(key_width, width, bias=False)

    def keys(self, k: Keys) -> Prepared:
        """Compute W k, which does not depend on the queries."""
        projected: Tensor = self.weight(k)
        return projected

    def compare(self, q: Queries, keys: Prepared) -> Pairs:
        """Compute the scores of queries with the result of `keys`."""
        return dot(q, keys)

    def forward(self, q: Queries, k: Keys) -> Pairs:
        return self.compare(q, self.keys(k))


class Additive(nn.Module):
    """The additive score v tanh(W q + U k), with trained v, W and U (Bahdanau et al. 2015, appendix A.1.2)."""

    def __init__(self, *, width: int, key_width: int, inner_width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, inner_width, bias=False)
        self.key = nn.Linear(key_width, inner_width, bias=False)
        self.out = nn.Linear(inner_width, 1, bias=False)

    def keys(self, k: Keys) -> Prepared:
        """Compute U k, which does not depend on the queries."""
        projected: Tensor = self.key(k)
        return projected

    def compare(self, q: Queries, keys: Prepared) -> Pairs:
        """Compute the scores of queries with the result of `keys`."""
        sums = self.query(q).unsqueeze(-2) + keys.unsqueeze(-3)  # [..., n, m, inner]
        scores: Tensor = self.out(sums.tanh()).squeeze(-1)
        return scores

    def forward(self, q: Queries, k: Keys) -> Pairs:
        return self.compare(q, self.keys(k))


class Location(nn.Module):
    """The location score W q: a score for each of `longest` key positions, which does not depend on the keys.

    Luong et al. 2015, equation 8. Only the first m scores are returned for m keys, so their weights sum to 1. More than
    `longest` keys raise HeedfulError.
    """

    def __init__(self, *, width: int, longest: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, longest, bias=False)

    def forward(self, q: Queries, k: Keys) -> Pairs:
        if k.shape[-2] > self.weight.out_features:
            raise HeedfulError(
                f"a sequence has {k.shape[-2]} keys, but location scores know {self.weight.out_features} positions: "
                "make them with a larger longest, or truncate the sequence"
            )
        scores: Tensor = self.weight(q)[..., : k.shape[-2]]
        return scores


# -- packed rows: scores, weights and sums ------------------------------------------------------------------------


def align(
    score: Score, q: Float[Tensor, "queries width"], k: Float[Tensor, "keys key_width"], layout: Layout
) -> Blocks:
    """Return the scores of each sequence, [n, m]."""
    spans = zip(layout.queries, layout.keys, strict=True)
    return tuple(score(q[start:stop], k[first:last]) for (start, stop), (first, last) in spans)


def visible_pairs(
    layout: Layout, *, causal: bool = False, window: int | None = None, device: torch.device | None = None
) -> Masks:
    """Return which pairs of a query and a key are visible in each sequence, [n, m].

    The last query is at the position of the last key, as in `heedful.nn.attend.attend`.

    Args:
        layout: Query rows and key rows of each sequence.
        causal: Whether a query attends only to keys at its own position and before it.
        window: Positions on each side that a query attends to, besides its own. If None, all.
        device: Device of the masks.
    """
    args = AttentionArgs(layout=layout, scale=1.0, causal=causal, window=window)
    return tuple(allowed_pairs(relative_distances(n, m, device), args) for n, m in layout.sizes())


def soft_weights(scores: Blocks, masks: Masks | None = None) -> Blocks:
    """Return soft attention weights: the softmax of the scores over the visible keys."""
    return tuple(_where_visible(_masked(block, mask).softmax(-1), mask) for block, mask in _with_masks(scores, masks))


def hard_weights(scores: Blocks, masks: Masks | None = None) -> Blocks:
    """Return hard attention weights: 1 for the visible key with the highest score (the first of equals), 0 otherwise.

    The gradient is that of `soft_weights`: the straight-through estimator, which is biased (Bengio et al. 2013, section
    4).
    """
    chosen = [_masked(block, mask).argmax(-1) if block.shape[1] else None for block, mask in _with_masks(scores, masks)]
    return _straight_through(chosen, soft_weights(scores, masks), masks)


class SampledWeights(NamedTuple):
    """One key sampled for each query."""

    weights: Blocks  # 1 for the sampled key, 0 for others; the gradient is the straight-through estimate
    log_probs: Float[Tensor, " queries"]  # with gradient, for `reinforce`; 0 for a query whose keys are all masked


def sample_weights(
    scores: Blocks, masks: Masks | None = None, *, generator: torch.Generator | None = None
) -> SampledWeights:
    """Sample one key for each query, with the probabilities of `soft_weights`: stochastic hard attention.

    Xu et al. 2015, section 4.1. Train either through `weights` (straight-through), or by adding `reinforce` to the loss
    of detached weights.
    """
    probabilities = soft_weights(scores, masks)
    chosen: list[Tensor | None] = []
    log_probs = []
    for (block, mask), weights in zip(_with_masks(scores, masks), probabilities, strict=True):
        if not block.shape[1]:
            chosen.append(None)
            log_probs.append(block.new_zeros(len(block)))
            continue
        # multinomial needs a positive weight in each row: a query whose keys are all masked samples any key, whose
        # weight `_straight_through` sets to 0
        positive = _where_visible(weights.detach(), mask, 1.0)
        no_key = block.new_zeros(0, 1, dtype=torch.long)
        key = positive.multinomial(1, generator=generator) if len(block) else no_key
        chosen.append(key[:, 0])
        log_probs.append(_where_visible(_masked(block, mask).log_softmax(-1).gather(-1, key), mask)[:, 0])
    all_log_probs = torch.cat(log_probs) if log_probs else torch.zeros(0)
    return SampledWeights(_straight_through(chosen, probabilities, masks), all_log_probs)


def reinforce(
    log_probs: Float[Tensor, " queries"], losses: Float[Tensor, " queries"], baseline: float | Tensor
) -> Float[Tensor, ""]:
    """Return the REINFORCE term, the sum of log p (loss - baseline) (Williams 1992, section 4).

    Its gradient is an unbiased estimate of the gradient of the expected loss.

    Args:
        log_probs: log p of the sampled keys, with gradient.
        losses: Loss of each query, from detached weights.
        baseline: A number that does not depend on the sampled keys, such as that of `update_baseline`.
    """
    return (log_probs * (losses.detach() - baseline)).sum()


def update_baseline(baseline: float, loss: float, *, keep: float = 0.9) -> float:
    """Return the exponential moving average of losses (Xu et al. 2015, equation 12).

    Args:
        baseline: The average before this step.
        loss: Loss of this step.
        keep: Weight of the average before this step.

    >>> update_baseline(1.0, 2.0)
    1.1
    """
    return keep * baseline + (1 - keep) * loss


def weighted_sum(
    weights: Sequence[Float[Tensor, "_n _m"]], v: Float[Tensor, "keys width"], layout: Layout
) -> Float[Tensor, "queries width"]:
    """Return the sum of weight times value over the keys, for each query."""
    if not weights:
        return v.new_zeros(0, v.shape[-1])
    return torch.cat([block @ v[first:last] for block, (first, last) in zip(weights, layout.keys, strict=True)])


# -- masks ----------------------------------------------------------------------------------------------------------


def _with_masks(scores: Blocks, masks: Masks | None) -> list[tuple[Tensor, Tensor | None]]:
    """Return the tensor of each sequence with its mask or None; raises HeedfulError if shapes differ."""
    if masks is None:
        return [(block, None) for block in scores]
    score_shapes, mask_shapes = ([tuple(block.shape) for block in blocks] for blocks in (scores, masks))
    if score_shapes != mask_shapes:
        raise HeedfulError(
            f"the masks have the shapes {mask_shapes}, but the scores {score_shapes}: give one for each pair"
        )
    return list(zip(scores, masks, strict=True))


def _masked(block: Tensor, mask: Tensor | None) -> Tensor:
    """Set masked pairs to -inf, except in rows without a visible pair, whose softmax would be NaN."""
    return block if mask is None else block.masked_fill(~mask & mask.any(-1, keepdim=True), -torch.inf)


def _where_visible(block: Tensor, mask: Tensor | None, fill: float = 0.0) -> Tensor:
    """Set rows without a visible pair to `fill`."""
    return block if mask is None else block.where(mask.any(-1, keepdim=True), fill)


def _straight_through(chosen: Sequence[Tensor | None], weights: Blocks, masks: Masks | None) -> Blocks:
    """Return 1 at the chosen keys and 0 elsewhere, with the gradient of the weights.

    Args:
        chosen: Index of the chosen key of each query, for each sequence. None for a sequence without keys.
        weights: Soft attention weights.
        masks: Masks of the weights.
    """
    outputs = []
    for keys, (block, mask) in zip(chosen, _with_masks(weights, masks), strict=True):
        if keys is None:
            outputs.append(block)
            continue
        one_hot = _where_visible(F.one_hot(keys, block.shape[1]).to(block), mask)
        outputs.append(one_hot + (block - block.detach()))  # adds 0, with the gradient of the weights
    return tuple(outputs)
