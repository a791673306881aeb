"""Local attention: each query attends to a window of keys around its own position or around a predicted one.

Memory and time grow with queries times window, not with queries times keys. The recurrent decoder uses local-m and
local-p of Luong et al. 2015; the studies use `restricted`, restricted self-attention of Vaswani et al. 2017.
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
    """Compute restricted self-attention: softmax(scale q k) v over the keys at most `radius` positions from a query.

    Vaswani et al. 2017, section 4. The result equals `attend` with window=radius, but instead of a tensor of all pairs,
    2 radius + 1 products of the queries with shifted keys are computed.
    """
    if layout.queries != layout.keys:
        raise HeedfulError("restricted attention compares rows with their neighbours: give q and k the same spans")
    if radius < 0:
        raise HeedfulError(f"radius is {radius}; expected a whole number from 0")
    if len(q) == 0:
        return q.new_zeros(0, *v.shape[1:])
    positions, lengths, _ = _query_positions(layout, q.device)
    radius = min(radius, int(lengths.max()) - 1)
    k, v = (F.pad(rows, (0, 0, 0, 0, radius, radius)) for rows in (k, v))
    steps = range(2 * radius + 1)
    logits = torch.stack([(q * k[step : step + len(q)]).sum(-1) for step in steps], -1) * scale  # [rows, heads, window]
    neighbours = positions[:, None] + torch.arange(-radius, radius + 1, device=q.device)
    visible = (neighbours >= 0) & (neighbours < lengths[:, None])
    weights = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1)  # not NaN: each row attends to itself
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
    """Compute local-m: query t attends to the keys t - radius to t + radius (Luong et al. 2015, section 3.2).

    The result is the sum of softmax(score(q, k)) v over these keys; t and the positions of keys are counted from 0.

    Args:
        score: Score function; not a location score.
        q: Queries of all sequences.
        k: Keys of all sequences.
        v: Values of all sequences.
        layout: Query rows and key rows of each sequence.
        radius: Keys on each side of the window's centre.
        positions: t of each query. If None, t is counted from 0 in each sequence.

    Raises:
        HeedfulError: If `radius` is negative or `score` a location score.
    """
    centres = _query_positions(layout, q.device)[0] if positions is None else positions
    return _local(score, q, k, v, layout, centres.to(_position_dtype(q)), radius, gaussian=False)


class LocalPredictive(nn.Module):
    """Local-p (predictive): each query attends around a predicted position p (Luong et al. 2015, equations 9 and 10).

    p = m sigmoid(v tanh(W q)) for m keys, and the weight of key s is align(q, k_s) exp(-(s - p)^2 / (2 (radius/2)^2)),
    where align is the softmax over the positions s from p - radius to p + radius. Weights are not normalised again
    after the Gaussian. Positions are counted from 0.

    Args:
        score: Score function; not a location score.
        width: Width of the queries.
        inner_width: Width of tanh(W q).
        radius: Keys on each side of p, from 1.
    """

    def __init__(self, score: Score, *, width: int, inner_width: int, radius: int) -> None:
        super().__init__()
        if radius < 1:
            raise HeedfulError(
                f"radius is {radius}; expected a whole number from 1: radius / 2 is the Gaussian's standard deviation"
            )
        self.score, self.radius = score, radius
        self.inner = nn.Linear(width, inner_width, bias=False)
        self.out = nn.Linear(inner_width, 1, bias=False)

    def centres(self, q: Float[Tensor, "queries width"], layout: Layout) -> Float[Tensor, " queries"]:
        """Predict the centre p of each query's window, from 0 to the number of keys."""
        _, lengths, _ = _query_positions(layout, q.device)
        centres: Tensor = lengths * self.out(self.inner(q).tanh())[:, 0].to(_position_dtype(q)).sigmoid()
        return centres

    def forward(
        self,
        q: Float[Tensor, "queries width"],
        k: Float[Tensor, "keys key_width"],
        v: Float[Tensor, "keys value_width"],
        layout: Layout,
    ) -> Float[Tensor, "queries value_width"]:
        return _local(self.score, q, k, v, layout, self.centres(q, layout), self.radius, gaussian=True)


def _position_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype for positions, float32 at least: bfloat16 cannot represent all integers above 256."""
    return torch.promote_types(q.dtype, torch.float32)


class _Window(NamedTuple):
    """The keys in the window of each query; the window may extend beyond the sequence."""

    rows: Int[Tensor, "queries window"]  # key rows, clamped to the rows of the batch
    offsets: Float[Tensor, "queries window"]  # position of the key minus centre of the window
    visible: Bool[Tensor, "queries window"]  # whether the sequence has a key at this position


def _window(centres: Tensor, radius: int, layout: Layout, keys: int) -> _Window:
    """Return the keys at the integer positions from centre - radius to centre + radius.

    Args:
        centres: Centre of each query's window, with gradient.
        radius: Keys on each side of the centre.
        layout: Query rows and key rows of each sequence.
        keys: Number of key rows in the batch.
    """
    _, lengths, firsts = _query_positions(layout, centres.device)
    steps = torch.arange(2 * radius + 1, device=centres.device)
    positions = (centres.detach() - radius).ceil().long()[:, None] + steps
    offsets = positions.to(centres.dtype) - centres[:, None]
    visible = (positions >= 0) & (positions < lengths[:, None]) & (offsets.detach() <= radius)
    return _Window((firsts[:, None] + positions).clamp(0, keys - 1), offsets, visible)


def _local(
    score: Score, q: Tensor, k: Tensor, v: Tensor, layout: Layout, centres: Tensor, radius: int, *, gaussian: bool
) -> Tensor:
    """Compute attention to the keys in windows around the centres.

    Args:
        score: Score function.
        q: Queries, [queries, width].
        k: Keys, [keys, key width].
        v: Values, [keys, value width].
        layout: Query rows and key rows of each sequence.
        centres: Centre of each query's window.
        radius: Keys on each side of the centre.
        gaussian: Whether a Gaussian around the centre multiplies the weights, as in local-p.
    """
    if radius < 0:
        raise HeedfulError(f"radius is {radius}; expected a whole number from 0")
    if isinstance(score, Location):
        raise HeedfulError("local attention compares queries with keys: location scores ignore keys, use another score")
    if len(q) == 0 or len(k) == 0:
        return q.new_zeros(len(q), v.shape[-1])
    rows, offsets, visible = _window(centres, radius, layout, len(k))
    sees_any = visible.any(-1, keepdim=True)
    scores = score(q[:, None], k[rows])[:, 0]
    weights = scores.masked_fill(~visible & sees_any, -torch.inf).softmax(-1).where(sees_any, 0.0)
    if gaussian:
        weights = weights * (-(offsets**2) / (2 * (radius / 2) ** 2)).exp().to(weights.dtype)
    return torch.einsum("qw,qwd->qd", weights, v[rows])


def _query_positions(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the position of each query, and the number of keys and the first key row of its sequence."""
    sizes = layout.sizes()
    counts = torch.tensor([n for n, _ in sizes], dtype=torch.long)
    starts, lengths, firsts = (
        torch.tensor(column, dtype=torch.long).repeat_interleave(counts)
        for column in (
            [start for start, _ in layout.queries],
            [m for _, m in sizes],
            [first for first, _ in layout.keys],
        )
    )
    positions = torch.arange(len(starts)) - starts
    return positions.to(device), lengths.to(device), firsts.to(device)
