"""Attention that looks at a few places alone: around a row itself, around a place that moves on, or a predicted one.

Nothing here is as large as queries times keys: memory and work grow with the queries times the window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import HeedfulError
from heedful.nn.layout import Layout
from heedful.nn.scores import Location, Score


def restricted(
    q: Float[Tensor, "rows heads width"],
    k: Float[Tensor, "rows heads width"],
    v: Float[Tensor, "rows heads value_width"],
    layout: Layout,
    *,
    radius: int,
    scale: float,
) -> Float[Tensor, "rows heads value_width"]:
    """softmax(scale q k) v over the rows at most `radius` places away, both ends included (Vaswani et al. 2017, 4).

    It equals attend(..., window=radius); keys are shifted past the queries, so that there is never an n x n tensor.
    """
    if layout.queries != layout.keys:
        raise HeedfulError("restricted attention is of rows to their neighbours: the queries and keys must be one")
    if radius < 0:
        raise HeedfulError(f"radius is {radius}; expected a whole number from 0")
    if len(q) == 0:
        return q.new_zeros(0, *v.shape[1:])
    place, length, _ = _placed(layout, q.device)
    radius = min(radius, int(length.max()) - 1)
    k, v = (F.pad(each, (0, 0, 0, 0, radius, radius)) for each in (k, v))
    steps = range(2 * radius + 1)
    scores = torch.stack([(q * k[step : step + len(q)]).sum(-1) for step in steps], -1) * scale
    beside = place[:, None] + torch.arange(-radius, radius + 1, device=q.device)
    sees = (beside >= 0) & (beside < length[:, None])
    weights = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1)  # a row sees itself at least
    out = q.new_zeros(len(q), *v.shape[1:])
    for step in steps:
        out = out + weights[..., step, None] * v[step : step + len(q)]
    return out


# -- local attention of Luong et al. 2015 ---------------------------------------------------------------------------


def local_monotonic(
    score: Score,
    q: Float[Tensor, "queries width"],
    k: Float[Tensor, "keys key_width"],
    v: Float[Tensor, "keys value_width"],
    layout: Layout,
    *,
    radius: int,
    positions: Int[Tensor, " queries"] | None = None,
) -> Float[Tensor, "queries value_width"]:
    """local-m: query t looks at the keys t - radius to t + radius, places counted from 0 (Luong et al. 2015, 3.2).

    `places` are the queries' t where others came earlier; None: they are counted in each sequence.
    """
    centres = _placed(layout, q.device)[0] if positions is None else positions
    return _local(score, q, k, v, layout, centres.to(_exact(q)), radius, sharp=False)


class LocalPredictive(nn.Module):
    """local-p: p = m sigmoid(v tanh(W q)) of m keys, and weights align(q, k_s) exp(-(s - p)^2 / (2 (radius/2)^2)).

    align is the softmax over the places s from p - radius to p + radius; what the Gaussian takes is not given back
    (Luong et al. 2015, equations 9 and 10). Places are counted from 0.
    """

    def __init__(self, score: Score, *, width: int, inner_width: int, radius: int) -> None:
        super().__init__()
        if radius < 1:
            raise HeedfulError(f"radius is {radius}; expected a whole number from 1: the Gaussian is half as wide")
        self.score, self.radius = score, radius
        self.inner = nn.Linear(width, inner_width, bias=False)
        self.out = nn.Linear(inner_width, 1, bias=False)

    def centres(self, q: Float[Tensor, "queries width"], layout: Layout) -> Float[Tensor, " queries"]:
        """The predicted places, from 0 to the number of keys."""
        _, length, _ = _placed(layout, q.device)
        places: Tensor = length * self.out(self.inner(q).tanh())[:, 0].to(_exact(q)).sigmoid()
        return places

    def forward(
        self,
        q: Float[Tensor, "queries width"],
        k: Float[Tensor, "keys key_width"],
        v: Float[Tensor, "keys value_width"],
        layout: Layout,
    ) -> Float[Tensor, "queries value_width"]:
        return _local(self.score, q, k, v, layout, self.centres(q, layout), self.radius, sharp=True)


def _exact(q: Tensor) -> torch.dtype:
    """The kind of number of places: bfloat16 has not all of the whole ones above 256."""
    return torch.promote_types(q.dtype, torch.float32)


class _Window(NamedTuple):
    rows: Int[Tensor, "queries places"]  # of the keys
    away: Float[Tensor, "queries places"]  # place less centre
    sees: Bool[Tensor, "queries places"]


def _window(centres: Tensor, radius: int, layout: Layout, keys: int) -> _Window:
    """The whole places from centre - radius to centre + radius that the query's sequence has."""
    _, length, first = _placed(layout, centres.device)
    steps = torch.arange(2 * radius + 1, device=centres.device)
    places = (centres.detach() - radius).ceil().long()[:, None] + steps
    away = places.to(centres.dtype) - centres[:, None]
    sees = (places >= 0) & (places < length[:, None]) & (away.detach() <= radius)
    return _Window((first[:, None] + places).clamp(0, keys - 1), away, sees)


def _local(
    score: Score, q: Tensor, k: Tensor, v: Tensor, layout: Layout, centres: Tensor, radius: int, *, sharp: bool
) -> Tensor:
    if radius < 0:
        raise HeedfulError(f"radius is {radius}; expected a whole number from 0")
    if isinstance(score, Location):
        raise HeedfulError("local attention compares queries with keys: location scores do not look at them")
    if len(q) == 0 or len(k) == 0:
        return q.new_zeros(len(q), v.shape[-1])
    rows, away, sees = _window(centres, radius, layout, len(k))
    some = sees.any(-1, keepdim=True)
    scores = score(q[:, None], k[rows])[:, 0]
    weights = scores.masked_fill(~sees & some, -torch.inf).softmax(-1).where(some, 0.0)
    if sharp:
        weights = weights * (-(away**2) / (2 * (radius / 2) ** 2)).exp().to(weights.dtype)
    return torch.einsum("qw,qwd->qd", weights, v[rows])


def _placed(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each query its place in its sequence, and how many keys the sequence has and where they begin."""
    sizes = layout.sizes()
    counts = torch.tensor([n for n, _ in sizes], dtype=torch.long)
    starts, lengths, firsts = (
        torch.tensor(each, dtype=torch.long).repeat_interleave(counts)
        for each in ([a for a, _ in layout.queries], [m for _, m in sizes], [first for first, _ in layout.keys])
    )
    places = torch.arange(len(starts)) - starts
    return places.to(device), lengths.to(device), firsts.to(device)
