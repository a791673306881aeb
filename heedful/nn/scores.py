"""Alignment: how well a key fits a query, how scores become weights, and what is read with them.

A score takes the n queries and the m keys of one sequence and gives n x m numbers; leading dimensions go along.
`align` scores packed rows, `soft`, `hard` and `drawn` make weights of the scores, `read` takes the values. A pair that
a mask forbids has the weight 0, and a query that may see no key reads zeros. This is the slow, obvious way;
`heedful.nn.attend` is the fast one for products, to which cosine and general scores come down too.
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
Score = Callable[[Tensor, Tensor], Tensor]
Blocks = tuple[Float[Tensor, "_n _m"], ...]  # one for each sequence
Masks = tuple[Bool[Tensor, "_n _m"], ...]  # which pairs count


# -- six scores -------------------------------------------------------------------------------------------------


def cosine(q: Queries, k: Keys) -> Pairs:
    """q k / (|q| |k|), from -1 to 1; 0 where one of them is zero (Graves et al. 2014, section 3.3.1)."""
    return unit_vectors(q) @ unit_vectors(k).mT


def unit_vectors(x: Float[Tensor, "*some width"]) -> Float[Tensor, "*some width"]:
    """x / |x|, or 0 where it is zero; in float32 at least, and brought to about 1 first, for squares to be numbers."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    size = wide.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    return F.normalize(wide / size, dim=-1).to(x.dtype)


def dot(q: Queries, k: Keys) -> Pairs:
    """q k (Luong et al. 2015, section 3.1)."""
    return q @ k.mT


def scaled_dot(q: Queries, k: Keys) -> Pairs:
    """q k / sqrt(d) (Vaswani et al. 2017, section 3.2.1)."""
    return dot(q, k) / sqrt(q.shape[-1])


class General(nn.Module):
    """q W k, which is dot where W = 1 (Luong et al. 2015, section 3.1)."""

    def __init__(self, *, width: int, key_width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(key_width, width, bias=False)

    def keys(self, k: Keys) -> Prepared:
        """W k, once for all queries."""
        made: Tensor = self.weight(k)
        return made

    def compare(self, q: Queries, keys: Prepared) -> Pairs:
        """The scores, of what `keys` made."""
        return dot(q, keys)

    def forward(self, q: Queries, k: Keys) -> Pairs:
        return self.compare(q, self.keys(k))


class Additive(nn.Module):
    """v tanh(W q + U k), which is v tanh([W U] [q; k]) (Bahdanau et al. 2015, appendix A.1.2)."""

    def __init__(self, *, width: int, key_width: int, inner_width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, inner_width, bias=False)
        self.key = nn.Linear(key_width, inner_width, bias=False)
        self.out = nn.Linear(inner_width, 1, bias=False)

    def keys(self, k: Keys) -> Prepared:
        """U k, once for all queries."""
        made: Tensor = self.key(k)
        return made

    def compare(self, q: Queries, keys: Prepared) -> Pairs:
        """The scores, of what `keys` made."""
        both = self.query(q).unsqueeze(-2) + keys.unsqueeze(-3)  # n x m x inner
        scores: Tensor = self.out(both.tanh()).squeeze(-1)
        return scores

    def forward(self, q: Queries, k: Keys) -> Pairs:
        return self.compare(q, self.keys(k))


class Location(nn.Module):
    """W q, one score for each place up to `longest`, whatever the keys are (Luong et al. 2015, equation 8).

    Places that a sequence does not have are cut off before the softmax, so that the others' weights sum to 1.
    """

    def __init__(self, *, width: int, longest: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, longest, bias=False)

    def forward(self, q: Queries, k: Keys) -> Pairs:
        if k.shape[-2] > self.weight.out_features:
            raise HeedfulError(
                f"a sequence has {k.shape[-2]} keys, but location scores know {self.weight.out_features} places: "
                "make them with a larger longest, or cut the sequence"
            )
        scores: Tensor = self.weight(q)[..., : k.shape[-2]]
        return scores


# -- over packed rows ---------------------------------------------------------------------------------------------


def align(
    score: Score, q: Float[Tensor, "queries width"], k: Float[Tensor, "keys key_width"], layout: Layout
) -> Blocks:
    """The scores of each sequence, n x m."""
    spans = zip(layout.queries, layout.keys, strict=True)
    return tuple(score(q[start:stop], k[first:last]) for (start, stop), (first, last) in spans)


def visible_pairs(
    layout: Layout, *, causal: bool = False, window: int | None = None, device: torch.device | None = None
) -> Masks:
    """Which pairs of each sequence count, as `attend` has it: the last query and the last key at one place."""
    call = AttentionArgs(layout=layout, scale=1.0, causal=causal, window=window)
    return tuple(allowed_pairs(relative_distances(n, m, device), call) for n, m in layout.sizes())


def soft_weights(scores: Blocks, masks: Masks | None = None) -> Blocks:
    """softmax over the keys that count: all of them are read, each a little."""
    return tuple(_seen(_hidden(block, mask).softmax(-1), mask) for block, mask in _masked(scores, masks))


def hard_weights(scores: Blocks, masks: Masks | None = None) -> Blocks:
    """1 for the key with the highest score, the first among equals; its gradient is the one that `soft` would have.

    That is the straight-through estimator, which is biased (Bengio et al. 2013, section 4).
    """
    chosen = [_hidden(block, mask).argmax(-1) if block.shape[1] else None for block, mask in _masked(scores, masks)]
    return _straight(chosen, soft_weights(scores, masks), masks)


class SampledWeights(NamedTuple):
    """One key for each query, drawn from `soft`, and the logarithm of its probability."""

    weights: Blocks  # 1 for the key; gradient: straight-through
    log_probs: Float[Tensor, " queries"]  # with their gradient, for `reinforce`; 0 for a query that may see no key


def sample_weights(
    scores: Blocks, masks: Masks | None = None, *, generator: torch.Generator | None = None
) -> SampledWeights:
    """Stochastic hard attention: a key is drawn with the probability that `soft` gives it (Xu et al. 2015, 4.1).

    Learn through `weights` by straight-through, or detach them and add `reinforce` to the loss.
    """
    shares = soft_weights(scores, masks)
    chosen: list[Tensor | None] = []
    logs = []
    for (block, mask), share in zip(_masked(scores, masks), shares, strict=True):
        if not block.shape[1]:
            chosen.append(None)
            logs.append(block.new_zeros(len(block)))
            continue
        sure = _seen(share.detach(), mask, 1.0)  # of a query that may see no key, any: its weight is 0
        place = sure.multinomial(1, generator=generator) if len(block) else block.new_zeros(0, 1, dtype=torch.long)
        chosen.append(place[:, 0])
        logs.append(_seen(_hidden(block, mask).log_softmax(-1).gather(-1, place), mask)[:, 0])
    return SampledWeights(_straight(chosen, shares, masks), torch.cat(logs) if logs else torch.zeros(0))


def reinforce(
    logs: Float[Tensor, " queries"], losses: Float[Tensor, " queries"], baseline: float | Tensor
) -> Float[Tensor, ""]:
    """sum of log p (loss - baseline), whose gradient is an unbiased estimate of that of the expected loss.

    REINFORCE (Williams 1992, section 4) with any baseline that does not depend on what was drawn; the weights with
    which the losses were made are to be detached. `moved` makes the baseline of Xu et al. 2015.
    """
    return (logs * (losses.detach() - baseline)).sum()


def update_baseline(baseline: float, loss: float, *, keep: float = 0.9) -> float:
    """The moving average of losses that have been seen (Xu et al. 2015, equation 12).

    >>> moved(1.0, 2.0)
    1.1
    """
    return keep * baseline + (1 - keep) * loss


def weighted_sum(
    weights: Sequence[Float[Tensor, "_n _m"]], v: Float[Tensor, "keys width"], layout: Layout
) -> Float[Tensor, "queries width"]:
    """The sum of weight times value, for each query."""
    if not weights:
        return v.new_zeros(0, v.shape[-1])
    return torch.cat([block @ v[first:last] for block, (first, last) in zip(weights, layout.keys, strict=True)])


# -- masks ----------------------------------------------------------------------------------------------------------


def _masked(scores: Blocks, sees: Masks | None) -> list[tuple[Tensor, Tensor | None]]:
    if sees is None:
        return [(block, None) for block in scores]
    shapes = [[tuple(each.shape) for each in blocks] for blocks in (scores, sees)]
    if shapes[0] != shapes[1]:
        raise HeedfulError(f"the masks have the shapes {shapes[1]}, but the scores {shapes[0]}: give one for each pair")
    return list(zip(scores, sees, strict=True))


def _hidden(block: Tensor, mask: Tensor | None) -> Tensor:
    """-inf where a pair does not count, but in rows where none counts: so softmax and its gradient stay finite."""
    return block if mask is None else block.masked_fill(~mask & mask.any(-1, keepdim=True), -torch.inf)


def _seen(block: Tensor, mask: Tensor | None, other: float = 0.0) -> Tensor:
    """The same, and another number in rows where no pair counts."""
    return block if mask is None else block.where(mask.any(-1, keepdim=True), other)


def _straight(chosen: Sequence[Tensor | None], shares: Blocks, sees: Masks | None) -> Blocks:
    """1 at the chosen places and 0 elsewhere, exactly; the gradient goes to the shares."""
    made = []
    for place, (share, mask) in zip(chosen, _masked(shares, sees), strict=True):
        if place is None:
            made.append(share)
            continue
        one = _seen(F.one_hot(place, share.shape[1]).to(share), mask)
        made.append(one + (share - share.detach()))  # which is 0
    return tuple(made)
