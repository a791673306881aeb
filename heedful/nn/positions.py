"""Positions: waves that are added to embeddings, and relations, by which places turn q and k or bias scores."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import HeedfulError
from heedful.nn.dropout import dropout
from heedful.nn.layout import Bias, DenseBias, RelativeBias
from heedful.packed import Packed

Heads = Float[Tensor, "rows heads width"]
Waves = Literal["interleaved", "halves", "halves_inclusive"]


def sinusoid(
    positions: Int[Tensor, " rows"], width: int, layout: Waves = "interleaved", base: float = 10_000.0
) -> Float[Tensor, "rows width"]:
    """sin(p / base^e) and cos(p / base^e) of each position p at width / 2 wavelengths (Vaswani et al. 2017, 3.5).

    e = 2i/d, i from 0, with sin and cos alternating ("interleaved", the paper) or all sines first ("halves", Marian);
    e = i/(d/2 - 1) with all sines first ("halves_inclusive": tensor2tensor and fairseq). An odd width has one sine
    more than cosines, or ends with a zero ("halves_inclusive"). In float64.
    """
    pairs = width // 2 if layout == "halves_inclusive" else (width + 1) // 2
    i = torch.arange(pairs, dtype=torch.float64, device=positions.device)
    exponent = i / max(pairs - 1, 1) if layout == "halves_inclusive" else 2 * i / width
    angles = positions[:, None].double() * base**-exponent
    if layout == "interleaved":
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]
    else:
        waves = torch.cat([angles.sin(), angles.cos()[:, : width // 2]], -1)
        waves = F.pad(waves, (0, width - waves.shape[1]))
    return waves


# -- relations: positions that enter attention -------------------------------------------------------------------


class RelativePosition(nn.Module):
    """How the places of rows enter attention: q and k are turned, scores are biased. This one does neither.

    What layers share is prepared once for a batch: `prepare` makes it, `turn` and `bias` take it.
    """

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> Any:
        """What does not depend on q and k; `like` has the rows' dtype, keep: layers may share what kernels make."""
        return None

    def rotate(self, q: Heads, k: Heads, prepared: Any) -> tuple[Tensor, Tensor]:
        """The rows' queries and keys as their places change them."""
        return q, k

    def bias(self, q: Heads, prepared: Any, scale: float) -> Bias | None:
        """What is added to the scores, for queries that are not turned."""
        return None


class RotaryPosition(RelativePosition):
    """q and k turned by angles that grow with the place, so that scores depend on distances alone.

    Numbers i and i + d/2 of a head turn by place * base^(-2i/d) (Su et al. 2021, section 3.2.2). Angles in float64.
    """

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> Any:
        return batch.positions, like.dtype, {}

    def rotate(self, q: Heads, k: Heads, prepared: Any) -> tuple[Tensor, Tensor]:
        positions, dtype, turns = prepared
        width = q.shape[-1]
        if width not in turns:
            angles = positions[:, None, None].double() * self.base ** -(
                torch.arange(0, width, 2, dtype=torch.float64, device=q.device) / width
            )
            turns[width] = angles.cos().to(dtype), angles.sin().to(dtype)
        cos, sin = turns[width]

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        return turned(q), turned(k)


class BucketedPosition(RelativePosition):
    """A trained number for each head and bucket of distances, added to the scores (Raffel et al. 2020, section 2.1)."""

    def __init__(self, *, count: int, reach: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.count, self.reach, self.causal = count, reach, causal
        self.table = nn.Embedding(count, heads)

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> RelativeBias:
        reach = min(self.reach, max(batch.max_length - 1, 0))
        gaps = torch.arange(-reach, reach + 1, device=like.device)
        found = self.table(distance_buckets(gaps, self.count, self.reach, self.causal)).T
        return RelativeBias(table=found, blocks={} if keep else None)

    def bias(self, q: Heads, prepared: RelativeBias, scale: float) -> RelativeBias:
        return prepared


def distance_buckets(gap: Int[Tensor, "*shape"], count: int, reach: int, causal: bool) -> Int[Tensor, "*shape"]:
    """The bucket of each distance, key minus query: half of them exact, the others logarithmic up to `reach`.

    Keys that come later have the second half of the buckets, or, with a causal mask, bucket 0.
    """
    base = torch.zeros_like(gap)
    if causal:
        gap = (-gap).clamp(min=0)
    else:
        count //= 2
        base, gap = (gap > 0) * count, gap.abs()
    exact = count // 2
    far = torch.log(gap.clamp(min=1).float() / exact) / math.log(reach / exact) * (count - exact)
    return base + torch.where(gap < exact, gap, (exact + far.long()).clamp(max=count - 1))


class ShawPosition(RelativePosition):
    """Trained vectors for each distance up to `reach`, one for keys and one for values, shared by the heads.

    score = scale q (k + a) and result = sum of weight (v + b) (Shaw et al. 2018, equations 3 and 4).
    """

    def __init__(self, *, reach: int, width: int, values: bool) -> None:
        super().__init__()
        self.reach, self.has_values = reach, values
        self.keys = nn.Embedding(2 * reach + 1, width)
        if values:
            self.values = nn.Embedding(2 * reach + 1, width)

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> slice:
        reach = min(self.reach, max(batch.max_length - 1, 0))
        return slice(self.reach - reach, self.reach + reach + 1)

    def bias(self, q: Heads, prepared: slice, scale: float) -> RelativeBias:
        table = torch.einsum("ihd,gd->ihg", q * scale, self.keys.weight[prepared].to(q))
        return RelativeBias(table=table, values=self.values.weight[prepared].to(q) if self.has_values else None)


SEGMENTS = 4  # types that a segment relation tells apart


class TransformerXlPosition(RelativePosition):
    """score = scale ((q + u) k + (q + w) R p_gap + (q + s) e_same), with e for the same segment and for another.

    p are sinusoids of the distance, all sines first, and R, u, w, s, e are trained in each layer (Dai et al. 2019,
    section 3.3; Yang et al. 2019, section 2.5). The segment's part is carried by SEGMENTS more numbers of q and k.
    """

    def __init__(self, *, width: int, heads: int, head_width: int, reach: int | None, dropout: float) -> None:
        super().__init__()
        self.reach, self.dropout = reach, dropout
        self.place = nn.Linear(width, heads * head_width, bias=False)
        self.content_bias, self.place_bias, self.type_bias = (
            nn.Parameter(torch.zeros(heads, head_width)) for _ in range(3)
        )
        self.same_type = nn.Parameter(torch.zeros(2, heads, head_width))

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> Any:
        if batch.types.device.type == "cpu" and len(batch.types) and int(batch.types.max()) >= SEGMENTS:
            raise HeedfulError(f"segment type {int(batch.types.max())} was given; this model knows 0 to {SEGMENTS - 1}")
        reach = max(batch.max_length - 1, 0)
        steps = torch.arange(reach, -reach - 1, -1, device=like.device)  # query place minus key place
        limit = reach if self.reach is None else self.reach
        return batch, sinusoid(steps.clamp(-limit, limit), self.place.in_features, "halves").to(like)

    def rotate(self, q: Heads, k: Heads, prepared: Any) -> tuple[Tensor, Tensor]:
        batch, _ = prepared
        alike = F.one_hot(batch.types, SEGMENTS)[:, None].to(q)
        same, other = torch.einsum("ihd,shd->sih", q + self.type_bias, self.same_type).unsqueeze(-1).unbind()
        own = alike * same + (1 - alike) * other
        return torch.cat([q + self.content_bias, own], -1), torch.cat([k, alike.expand(-1, k.shape[1], -1)], -1)

    def bias(self, q: Heads, prepared: Any, scale: float) -> Bias:
        batch, waves = prepared
        places = self.place(dropout(waves, self.dropout, self.training)).unflatten(-1, q.shape[1:])
        table = torch.einsum("ihd,ghd->ihg", (q + self.place_bias) * scale, places)
        if batch.keys is None and batch.sees is None:
            return RelativeBias(table=table)
        return _spread(table, batch)


def _spread(table: Float[Tensor, "rows heads distances"], batch: Packed) -> DenseBias:
    """The same written out, for rows whose places are not in order, and -inf where a row does not see a key."""
    reach, blocks = table.shape[-1] // 2, []
    for number, span in enumerate(batch.spans()):
        of = batch.positions[span]
        to = of if batch.key_lengths is None else of[: batch.key_lengths[number]]
        gap = (to[None, :] - of[:, None] + reach).expand(table.shape[1], -1, -1)
        block = table[span].transpose(0, 1).gather(-1, gap)
        blocks.append(block if batch.visibility is None else block.masked_fill(~batch.visibility[number], -torch.inf))
    return DenseBias(blocks=tuple(blocks))
