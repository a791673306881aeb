"""Positions: sinusoids that are added to embeddings, and relative positions in attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import DataError
from heedful.nn.dropout import dropout
from heedful.nn.layout import Bias, DenseBias, DisentangledBias, RelativeBias
from heedful.packed import Packed

Heads = Float[Tensor, "rows heads width"]
Keys = Float[Tensor, "rows kv_heads width"]
Project = Callable[[Float[Tensor, "rows width"]], tuple[Tensor, Tensor, Tensor]]  # a layer's projection to q, k, v
Waves = Literal["interleaved", "halves", "halves_inclusive"]  # orders of sines and cosines; see `sinusoid`


def sinusoid(
    positions: Int[Tensor, " rows"] | Float[Tensor, " rows"],
    width: int,
    layout: Waves = "interleaved",
    base: float = 10_000.0,
) -> Float[Tensor, "rows width"]:
    """Return sin(p / base^e) and cos(p / base^e) of each position p, with width / 2 exponents e, in float64.

    Vaswani et al. 2017, section 3.5. An odd width has one more sine than cosines; with "halves_inclusive" it ends with
    a zero instead.

    Args:
        layout: "interleaved": e = 2i/width for i = 0, 1, ..., with sines and cosines alternating (the paper).
            "halves": the same e, all sines first (Marian). "halves_inclusive": e = i/(width/2 - 1), all sines first
            (tensor2tensor and fairseq).
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


# -- relative positions in attention -----------------------------------------------------------------------------


class RelativePosition(nn.Module):
    """Relative positions in attention: they rotate q and k, or add a bias to the scores. The base class does neither.

    `prepare` is called once for a batch; all layers pass its result to `rotate` and `bias`.
    """

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> Any:
        """Compute the part that does not depend on q and k.

        Args:
            like: A tensor with the rows' dtype and device.
            keep: Whether kernels may cache what they derive from the bias; not with gradient checkpointing.
        """
        return None

    def rotate(self, q: Heads, k: Keys, prepared: Any) -> tuple[Tensor, Tensor]:
        """Return queries and keys changed by their positions."""
        return q, k

    def bias(self, q: Heads, k: Keys, prepared: Any, scale: float, project: Project) -> Bias | None:
        """Return the bias that is added to the scores; None: no bias.

        Args:
            q: Queries before `rotate`.
            k: Keys before `rotate`.
            prepared: Result of `prepare`.
            scale: Factor of the scores.
            project: The layer's projection of rows to queries, keys and values, [rows, heads, width] each.
        """
        return None


Rotations = tuple[Tensor, Tensor]  # cosines and sines of the angles, [rows, 1, d/2] each


def rotary_frequencies(base: float, width: int, device: torch.device | None = None) -> Float[Tensor, " pairs"]:
    """Return base^(-2i/d) for each pair of numbers i and i + d/2 of a head of width d: its angle per position.

    Su et al. 2021, section 3.2.2.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    frequencies: Tensor = base**-exponents
    return frequencies


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnShape:
    """YaRN's change of rotary frequencies (Peng et al. 2023, section 3.2); `heedful.model.config.Yarn` says more."""

    factor: float  # divisor of the slow frequencies
    trained: int  # length of the longest sequences in training
    fast: float  # rotations in `trained` positions, from which a frequency stays as it is
    slow: float  # rotations in `trained` positions, up to which a frequency is divided
    truncate: bool  # whether the first and the last interpolated frequency are rounded to whole numbers

    def stretch(self, frequencies: Tensor, base: float) -> Tensor:
        """Divide slow frequencies by the factor, keep fast ones, and interpolate between them."""
        width = 2 * len(frequencies)
        first, last = (
            width * math.log(self.trained / (rotations * 2 * math.pi)) / (2 * math.log(base))
            for rotations in (self.fast, self.slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        last += 0.001 if first == last else 0.0
        numbers = torch.arange(len(frequencies), dtype=torch.float64, device=frequencies.device)
        share = ((numbers - first) / (last - first)).clamp(0, 1)
        return frequencies / self.factor * share + frequencies * (1 - share)


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Shape:
    """Llama 3.1's change of rotary frequencies; `heedful.model.config.Llama3Scaling` says more."""

    factor: float  # divisor of the slow frequencies
    trained: int  # length of the longest sequences in training
    low: float  # rotations in `trained` positions, up to which a frequency is divided
    high: float  # rotations in `trained` positions, from which a frequency stays as it is

    def stretch(self, frequencies: Tensor, base: float) -> Tensor:
        """Divide slow frequencies by the factor, keep fast ones, and interpolate between them."""
        rotations = self.trained * frequencies / (2 * math.pi)
        share = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies / self.factor * (1 - share) + frequencies * share


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicNtkShape:
    """Dynamic NTK: in a sequence of n > L rows, the base is (s n / L - s + 1)^(d / (d - 2)) times as large."""

    factor: float  # s
    trained: int  # L, the length of the longest sequences in training

    def change(self, lengths: list[int], width: int, device: torch.device) -> Float[Tensor, "sequences pairs"]:
        """Return the factors of each sequence's frequencies."""
        growth = [self.factor * max(length, self.trained) / self.trained - (self.factor - 1) for length in lengths]
        powers = -torch.arange(0, width, 2, dtype=torch.float64, device=device) / (width - 2)
        if len(growth) == 1:  # without a copy from host to device, which the recording of a CUDA graph forbids
            single: Tensor = growth[0] ** powers
            return single[None]
        factors: Tensor = torch.tensor(growth, dtype=torch.float64).to(device)[:, None] ** powers
        return factors


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRopeShape:
    """LongRoPE (Ding et al. 2024): divisors of the frequencies, others for long sequences than for short ones."""

    short: tuple[float, ...]  # divisors in sequences of up to `trained` rows
    long: tuple[float, ...]  # divisors in longer sequences
    trained: int  # length of the longest sequences in training

    def stretch(self, frequencies: Tensor, base: float) -> Tensor:
        """Return the frequencies of short sequences."""
        return frequencies / _make_vector(self.short, frequencies.device)

    def change(self, lengths: list[int], width: int, device: torch.device) -> Float[Tensor, "sequences pairs"]:
        """Return the factors of each sequence's frequencies, relative to those of short sequences."""
        factors = _make_vector([short / long for short, long in zip(self.short, self.long, strict=True)], device)
        if len(lengths) == 1:
            return factors[None] if lengths[0] > self.trained else torch.ones_like(factors)[None]
        is_long = torch.tensor([length > self.trained for length in lengths]).to(device)
        return torch.where(is_long[:, None], factors, 1.0)


def _make_vector(numbers: Sequence[float], device: torch.device) -> Float[Tensor, " numbers"]:
    """Make a float64 vector without a copy from host to device, which the recording of a CUDA graph forbids."""
    return torch.stack([torch.full((), number, dtype=torch.float64, device=device) for number in numbers])


class RotaryPosition(RelativePosition):
    """Rotary position embedding (RoPE): q and k are rotated by their positions, so that scores depend on distances.

    The pair of numbers i and i + d/2 of a head is rotated by the position times base^(-2i/d), computed in float64 (Su
    et al. 2021, section 3.2.2).

    Args:
        width: d, the width of a head.
        factor: Divisor of the positions.
        shape: Change of the frequencies in all sequences; None: no change.
        by_length: Change of the frequencies in sequences longer than the trained ones; None: no change.
        magnitude: Factor of the rotated queries and keys.
    """

    def __init__(
        self,
        base: float,
        width: int,
        *,
        factor: float = 1.0,
        shape: YarnShape | Llama3Shape | LongRopeShape | None = None,
        by_length: DynamicNtkShape | LongRopeShape | None = None,
        magnitude: float = 1.0,
    ) -> None:
        super().__init__()
        self.base, self.width, self.factor = base, width, factor
        self.shape, self.by_length, self.magnitude = shape, by_length, magnitude

    def frequencies(self, device: torch.device | None = None) -> Float[Tensor, " pairs"]:
        """Return the angle per position of each pair, in a sequence that is no longer than the trained ones."""
        frequencies = rotary_frequencies(self.base, self.width, device)
        frequencies = frequencies if self.factor == 1.0 else frequencies / self.factor
        return frequencies if self.shape is None else self.shape.stretch(frequencies, self.base)

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> Rotations:
        frequencies = self.frequencies(like.device)
        if self.by_length is not None and max(batch.lengths, default=0) > self.by_length.trained:
            change = self.by_length.change(batch.lengths, self.width, like.device)
            sequences = torch.arange(len(batch)).repeat_interleave(torch.tensor(batch.lengths))
            frequencies = frequencies * (change if len(batch) == 1 else change[sequences.to(like.device)])
        angles = batch.positions[:, None].double() * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        return cos.to(like.dtype)[:, None], sin.to(like.dtype)[:, None]

    def rotate(self, q: Heads, k: Keys, prepared: Rotations) -> tuple[Tensor, Tensor]:
        cos, sin = prepared

        def rotated(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        return rotated(q), rotated(k)


class BucketedPosition(RelativePosition):
    """A trained bias for each head and bucket of distances, added to the scores (Raffel et al. 2020, section 2.1)."""

    def __init__(self, *, count: int, reach: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.count, self.reach, self.causal = count, reach, causal
        self.table = nn.Embedding(count, heads)

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> RelativeBias:
        reach = min(self.reach, max(batch.max_length - 1, 0))
        distances = torch.arange(-reach, reach + 1, device=like.device)
        table = self.table(distance_buckets(distances, self.count, self.reach, self.causal)).T
        return RelativeBias(table=table, blocks={} if keep else None)

    def bias(self, q: Heads, k: Keys, prepared: RelativeBias, scale: float, project: Project) -> RelativeBias:
        return prepared


def distance_buckets(distances: Int[Tensor, "*shape"], count: int, reach: int, causal: bool) -> Int[Tensor, "*shape"]:
    """Return the bucket of each distance, key position minus query position (Raffel et al. 2020, section 2.1).

    Near distances have a bucket each; the others share buckets that grow logarithmically up to `reach`. Keys after the
    query have the second half of the buckets; with a causal mask, they have bucket 0.

    Args:
        count: Number of buckets.
        reach: Distance from which all distances share the last bucket.
    """
    offset = torch.zeros_like(distances)
    if causal:
        distances = (-distances).clamp(min=0)
    else:
        count //= 2
        offset, distances = (distances > 0) * count, distances.abs()
    exact = count // 2
    far = torch.log(distances.clamp(min=1).float() / exact) / math.log(reach / exact) * (count - exact)
    return offset + torch.where(distances < exact, distances, (exact + far.long()).clamp(max=count - 1))


class ShawPosition(RelativePosition):
    """Trained vectors a and b of each distance up to `reach`, shared by the heads.

    score = scale q (k + a), and result = sum of weight (v + b) (Shaw et al. 2018, equations 3 and 4).

    Args:
        values: Whether there are vectors b.
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

    def bias(self, q: Heads, k: Keys, prepared: slice, scale: float, project: Project) -> RelativeBias:
        table = torch.einsum("ihd,gd->ihg", q * scale, self.keys.weight[prepared].to(q))
        return RelativeBias(table=table, values=self.values.weight[prepared].to(q) if self.has_values else None)


SEGMENTS = 8  # token types that `TransformerXlPosition` distinguishes; a multiple of 8, because CUDA needs such widths


class TransformerXlPosition(RelativePosition):
    """Relative positions and segments of Transformer-XL and XLNet, with one set of parameters in each layer.

    score = scale ((q + u) k + (q + w) R p + (q + s) e), where p are sinusoids of the distance, all sines first, and e
    is one of two vectors: for a key in the query's segment, or in another. R, u, w, s and e are trained (Dai et al.
    2019, section 3.3; Yang et al. 2019, section 2.5). The last term is computed by SEGMENTS more numbers of q and k.
    """

    def __init__(self, *, width: int, heads: int, head_width: int, reach: int | None, dropout: float) -> None:
        super().__init__()
        self.reach, self.dropout = reach, dropout
        self.place = nn.Linear(width, heads * head_width, bias=False)
        self.content_bias, self.place_bias, self.type_bias = (
            nn.Parameter(torch.zeros(heads, head_width)) for _ in range(3)
        )
        self.same_type = nn.Parameter(torch.zeros(2, heads, head_width))

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> tuple[Packed, Tensor]:
        if batch.types.device.type == "cpu" and len(batch.types) and int(batch.types.max()) >= SEGMENTS:
            raise DataError(
                f"the batch has segment type {int(batch.types.max())}; this model knows 0 to {SEGMENTS - 1}"
            )
        reach = max(batch.max_length - 1, 0)
        steps = torch.arange(reach, -reach - 1, -1, device=like.device)  # query position minus key position
        limit = reach if self.reach is None else self.reach
        return batch, sinusoid(steps.clamp(-limit, limit), self.place.in_features, "halves").to(like)

    def rotate(self, q: Heads, k: Keys, prepared: tuple[Packed, Tensor]) -> tuple[Tensor, Tensor]:
        batch, _ = prepared
        one_hot = F.one_hot(batch.types, SEGMENTS)[:, None].to(q)
        same, different = torch.einsum("ihd,shd->sih", q + self.type_bias, self.same_type).unsqueeze(-1).unbind()
        by_segment = one_hot * same + (1 - one_hot) * different
        keys = torch.cat([k, one_hot.expand(-1, k.shape[1], -1)], -1)
        return torch.cat([q + self.content_bias, by_segment], -1), keys

    def bias(self, q: Heads, k: Keys, prepared: tuple[Packed, Tensor], scale: float, project: Project) -> Bias:
        batch, waves = prepared
        projected = self.place(dropout(waves, self.dropout, self.training)).unflatten(-1, q.shape[1:])
        table = torch.einsum("ihd,ghd->ihg", (q + self.place_bias) * scale, projected)
        if batch.key_lengths is None and batch.visibility is None:
            return RelativeBias(table=table)
        return _expand(table, batch)


class DistanceVectors(NamedTuple):
    """The vectors of the distances that occur in a batch."""

    vectors: Float[Tensor, "vectors width"]
    indexes: Int[Tensor, " distances"]  # row in `vectors` of each distance, query minus key, from -reach to reach


class DisentangledPosition(RelativePosition):
    """Disentangled attention: score = scale (q k + q K(p) + k Q(p)), where p is a trained vector of the distance.

    K and Q project p as keys and queries (He et al. 2021, arXiv:2006.03654, section 3.1). Far distances share vectors
    by logarithmic buckets (He et al. 2023, arXiv:2111.09543, appendix). Only the vectors of distances that occur in the
    batch are projected. `ProjectedDistances` is faster in inference.
    """

    def __init__(self, *, buckets: int, reach: int, width: int, norm_eps: float | None, dropout: float) -> None:
        super().__init__()
        self.buckets, self.reach, self.dropout = buckets, reach, dropout
        self.table = nn.Embedding(2 * buckets, width)
        self.norm: nn.Module = nn.Identity() if norm_eps is None else nn.LayerNorm(width, eps=norm_eps)

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> DistanceVectors:
        reach = max(batch.max_length - 1, 0)
        rows = self.rows(torch.arange(-reach, reach + 1))  # ascending; on the CPU, since a GPU would be waited for
        first, last = int(rows[0]), int(rows[-1])
        vectors: Tensor = self.norm(self.table.weight[first : last + 1])
        return DistanceVectors(vectors, (rows - first).to(like.device, non_blocking=True))

    def rows(self, distances: Int[Tensor, " distances"]) -> Int[Tensor, " distances"]:
        """Return the row of `table` for each distance, query position minus key position."""
        buckets = signed_log_buckets(distances, self.buckets, self.reach) + self.buckets
        return buckets.clamp(0, 2 * self.buckets - 1)

    def bias(self, q: Heads, k: Keys, prepared: DistanceVectors, scale: float, project: Project) -> DisentangledBias:
        position_q, position_k, _ = project(dropout(prepared.vectors, self.dropout, self.training))
        return DisentangledBias(position_q=position_q, position_k=position_k, indexes=prepared.indexes)


class ProjectedDistances(RelativePosition):
    """A `DisentangledPosition` for inference in one layer, with the vectors of all distances projected once."""

    position_q: Tensor
    position_k: Tensor
    rows: Tensor

    def __init__(self, position: DisentangledPosition, project: Project) -> None:
        super().__init__()
        self.reach = position.reach  # largest distance with a vector of its own; larger ones share it
        with torch.no_grad():
            position_q, position_k, _ = project(position.norm(position.table.weight))
            rows = position.rows(torch.arange(-self.reach, self.reach + 1, device=position_q.device))
        self.rows_on_host = rows.tolist()
        for name, tensor in (("position_q", position_q), ("position_k", position_k), ("rows", rows)):
            self.register_buffer(name, tensor.contiguous(), persistent=False)

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> ProjectedRows:
        reach = max(batch.max_length - 1, 0)
        cut = min(reach, self.reach)
        first, last = self.rows_on_host[self.reach - cut], self.rows_on_host[self.reach + cut]
        distances = torch.arange(-reach, reach + 1, device=like.device).clamp(-self.reach, self.reach)
        return ProjectedRows(slice(first, last + 1), self.rows[distances + self.reach] - first)

    def bias(self, q: Heads, k: Keys, prepared: ProjectedRows, scale: float, project: Project) -> DisentangledBias:
        position_q, position_k = self.position_q[prepared.rows], self.position_k[prepared.rows]
        return DisentangledBias(position_q=position_q, position_k=position_k, indexes=prepared.indexes)


class ProjectedRows(NamedTuple):
    """The projected vectors that a batch needs."""

    rows: slice  # rows of `ProjectedDistances.position_q` and `position_k`
    indexes: Int[Tensor, " distances"]  # row in this slice of each distance, query position minus key position


def signed_log_buckets(distances: Int[Tensor, "*shape"], count: int, reach: int) -> Int[Tensor, "*shape"]:
    """Return the bucket of each distance, with the distance's sign.

    Up to count / 2 the bucket is the distance; beyond, it grows logarithmically, to `count` at `reach`. Logarithms are
    float32 as in the published code, because their rounding decides at the limits of buckets.
    """
    exact = count // 2
    far = distances.abs().clamp(min=exact)
    logs = torch.log(far / exact) / torch.log(torch.tensor((reach - 1) / exact)) * (exact - 1)
    buckets = (logs.ceil() + exact).long() * distances.sign()
    return torch.where(distances.abs() <= exact, distances, buckets)


def _expand(table: Float[Tensor, "rows heads distances"], batch: Packed) -> DenseBias:
    """Expand a relative bias for rows whose positions are not in order; -inf if a row does not see a key."""
    reach, blocks = table.shape[-1] // 2, []
    for number, span in enumerate(batch.spans()):
        queries = batch.positions[span]
        keys = queries if batch.key_lengths is None else queries[: batch.key_lengths[number]]
        column = (keys[None, :] - queries[:, None] + reach).expand(table.shape[1], -1, -1)
        block = table[span].transpose(0, 1).gather(-1, column)
        if batch.visibility is not None:
            block = block.masked_fill(~batch.visibility[number], -torch.inf)
        blocks.append(block)
    return DenseBias(blocks=tuple(blocks))
