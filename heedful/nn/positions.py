"""Positions: sinusoids that are added to embeddings, and relative positions in attention.

Logits are the inputs of attention's softmax, scale q k + bias.
"""

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
Waves = Literal["interleaved", "halves", "halves_inclusive"]  # order of sines and cosines; `sinusoid` defines them


def sinusoid(
    positions: Int[Tensor, " rows"] | Float[Tensor, " rows"],
    width: int,
    layout: Waves = "interleaved",
    base: float = 10_000.0,
) -> Float[Tensor, "rows width"]:
    """Return sin(p / base^e) and cos(p / base^e) for each position p and width / 2 exponents e, in float64.

    Vaswani et al. 2017, section 3.5. An odd width has one sine more than cosines; with "halves_inclusive" its last
    column is 0 instead.

    Args:
        positions: p of each row.
        width: Number of columns.
        layout: "interleaved" (the paper): e = 2i / width for i = 0, 1, ...; sines and cosines alternate. "halves"
            (Marian): the same exponents; the sines come before the cosines. "halves_inclusive" (tensor2tensor,
            fairseq): e = i / (width / 2 - 1), so that the last exponent is 1; the sines come before the cosines.
        base: Base of the powers.
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
    """Relative positions in attention, which rotate q and k or add a bias to the logits; the base class does neither.

    `prepare` is called once for a batch; every layer passes its result to `rotate` and `bias`.
    """

    def prepare(self, batch: Packed, like: Tensor, *, cache_bias: bool) -> Any:
        """Compute what depends on the batch, but not on q and k.

        Args:
            batch: The batch.
            like: A tensor with the dtype and the device of the hidden states.
            cache_bias: Whether kernels may cache the expanded bias for all layers; not with gradient checkpointing.
        """
        return None

    def rotate(self, q: Heads, k: Keys, prepared: Any) -> tuple[Tensor, Tensor]:
        """Return queries and keys transformed by their positions."""
        return q, k

    def bias(self, q: Heads, k: Keys, prepared: Any, scale: float, project: Project) -> Bias | None:
        """Return the bias that is added to the logits, or None for no bias.

        Args:
            q: Queries before `rotate`.
            k: Keys before `rotate`.
            prepared: Result of `prepare`.
            scale: Factor of q k in the logits.
            project: The layer's projection of rows to queries, keys and values, [rows, heads, width] each.
        """
        return None


Rotations = tuple[Tensor, Tensor]  # cosines and sines of the angles, [rows, 1, d/2] each


def rotary_frequencies(base: float, width: int, device: torch.device | None = None) -> Float[Tensor, " pairs"]:
    """Return the angle per position of each pair of dimensions, base^(-2i/d) for i = 0, ..., d/2 - 1, in float64.

    Pair i consists of the dimensions i and i + d/2 of a head of width d (Su et al. 2021, section 3.2.2).
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    frequencies: Tensor = base**-exponents
    return frequencies


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnShape:
    """YaRN's scaling of rotary frequencies (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""

    factor: float  # divisor of the slow frequencies
    trained: int  # length of the longest sequences in training
    fast: float  # rotations within `trained` positions, from which a frequency is unchanged
    slow: float  # rotations within `trained` positions, up to which a frequency is divided by `factor`
    truncate: bool  # whether the indices of the first and the last interpolated frequency are rounded to integers

    def stretch(self, frequencies: Tensor, base: float) -> Tensor:
        """Divide slow frequencies by the factor, keep fast ones, and interpolate between them, by their indices."""
        width = 2 * len(frequencies)
        first, last = (
            width * math.log(self.trained / (rotations * 2 * math.pi)) / (2 * math.log(base))
            for rotations in (self.fast, self.slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        last += 0.001 if first == last else 0.0
        indices = torch.arange(len(frequencies), dtype=torch.float64, device=frequencies.device)
        divided_share = ((indices - first) / (last - first)).clamp(0, 1)
        return frequencies / self.factor * divided_share + frequencies * (1 - divided_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Shape:
    """Llama 3.1's scaling of rotary frequencies (arXiv:2407.21783; its published code)."""

    factor: float  # divisor of the slow frequencies
    trained: int  # length of the longest sequences in training
    low: float  # rotations within `trained` positions, up to which a frequency is divided by `factor`
    high: float  # rotations within `trained` positions, from which a frequency is unchanged

    def stretch(self, frequencies: Tensor, base: float) -> Tensor:
        """Divide slow frequencies by the factor, keep fast ones, and interpolate between them, by their rotations."""
        rotations = self.trained * frequencies / (2 * math.pi)
        unchanged_share = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies / self.factor * (1 - unchanged_share) + frequencies * unchanged_share


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicNtkShape:
    """Dynamic NTK: in a sequence of n > L rows, the base is multiplied by (s n / L - s + 1)^(d / (d - 2)).

    d is the head dimension (bloc97 and emozilla 2023).
    """

    factor: float  # s
    trained: int  # L, the length of the longest sequences in training

    def change(self, lengths: list[int], width: int, device: torch.device) -> Float[Tensor, "sequences pairs"]:
        """Return the factors by which each sequence's frequencies are multiplied.

        Args:
            lengths: Number of rows of each sequence.
            width: Head dimension.
            device: Device of the result.
        """
        growth = [self.factor * max(length, self.trained) / self.trained - (self.factor - 1) for length in lengths]
        powers = -torch.arange(0, width, 2, dtype=torch.float64, device=device) / (width - 2)
        if len(growth) == 1:  # needs no copy from host to device, which is forbidden while a CUDA graph is recorded
            single: Tensor = growth[0] ** powers
            return single[None]
        factors: Tensor = torch.tensor(growth, dtype=torch.float64).to(device)[:, None] ** powers
        return factors


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRopeShape:
    """LongRoPE: a divisor for each frequency, another one in long sequences (Ding et al. 2024, arXiv:2402.13753)."""

    short: tuple[float, ...]  # divisors in sequences of up to `trained` rows
    long: tuple[float, ...]  # divisors in longer sequences
    trained: int  # length of the longest sequences in training

    def stretch(self, frequencies: Tensor, base: float) -> Tensor:
        """Divide the frequencies by the divisors for short sequences."""
        return frequencies / _make_vector(self.short, frequencies.device)

    def change(self, lengths: list[int], width: int, device: torch.device) -> Float[Tensor, "sequences pairs"]:
        """Return the factors by which each sequence's frequencies differ from those of short sequences.

        Args:
            lengths: Number of rows of each sequence.
            width: Head dimension.
            device: Device of the result.
        """
        factors = _make_vector([short / long for short, long in zip(self.short, self.long, strict=True)], device)
        if len(lengths) == 1:
            return factors[None] if lengths[0] > self.trained else torch.ones_like(factors)[None]
        is_long = torch.tensor([length > self.trained for length in lengths]).to(device)
        return torch.where(is_long[:, None], factors, 1.0)


def _make_vector(numbers: Sequence[float], device: torch.device) -> Float[Tensor, " numbers"]:
    """Make a float64 vector without a copy from host to device, which is forbidden while a CUDA graph is recorded."""
    return torch.stack([torch.full((), number, dtype=torch.float64, device=device) for number in numbers])


class RotaryPosition(RelativePosition):
    """Rotary position embedding (RoPE): q and k are rotated by their positions, so that logits depend on distances.

    The dimensions i and i + d/2 of a head are rotated by the angle position * base^(-2i/d), computed in float64 (Su et
    al. 2021, section 3.2.2).

    Args:
        base: Base of the frequencies.
        width: Head dimension d.
        factor: Divisor of the positions.
        shape: Scaling of the frequencies in all sequences. If None, no scaling.
        by_length: Scaling of the frequencies in sequences longer than the trained ones. If None, no scaling.
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
        """Return the angle per position of each pair of dimensions, in sequences no longer than the trained ones."""
        frequencies = rotary_frequencies(self.base, self.width, device)
        frequencies = frequencies if self.factor == 1.0 else frequencies / self.factor
        return frequencies if self.shape is None else self.shape.stretch(frequencies, self.base)

    def prepare(self, batch: Packed, like: Tensor, *, cache_bias: bool) -> Rotations:
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

        def rotate_pairs(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        return rotate_pairs(q), rotate_pairs(k)


class BucketedPosition(RelativePosition):
    """A trained bias for each head and bucket of distances, added to the logits (Raffel et al. 2020, section 2.1)."""

    def __init__(self, *, count: int, reach: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.count, self.reach, self.causal = count, reach, causal
        self.table = nn.Embedding(count, heads)

    def prepare(self, batch: Packed, like: Tensor, *, cache_bias: bool) -> RelativeBias:
        reach = min(self.reach, max(batch.max_length - 1, 0))
        distances = torch.arange(-reach, reach + 1, device=like.device)
        table = self.table(distance_buckets(distances, self.count, self.reach, self.causal)).T
        return RelativeBias(table=table, blocks={} if cache_bias else None)

    def bias(self, q: Heads, k: Keys, prepared: RelativeBias, scale: float, project: Project) -> RelativeBias:
        return prepared


def distance_buckets(distances: Int[Tensor, "*shape"], count: int, reach: int, causal: bool) -> Int[Tensor, "*shape"]:
    """Return the bucket of each distance, key position minus query position (Raffel et al. 2020, section 2.1).

    A short distance has a bucket of its own; longer ones share buckets, whose sizes grow logarithmically up to `reach`.
    Keys after the query have the second half of the buckets or, with a causal mask, bucket 0.

    Args:
        distances: Distances of any shape.
        count: Number of buckets.
        reach: Distance from which all distances share the last bucket.
        causal: Whether queries attend only to keys before them.
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
    """Trained vectors a and b for each distance, which are added to keys and values, shared by the heads.

    logit = scale q (k + a), and result = sum of weight (v + b) (Shaw et al. 2018, equations 3 and 4).

    Args:
        reach: Distance from which all distances have the same vectors.
        width: Head dimension.
        values: Whether there are vectors b.
    """

    def __init__(self, *, reach: int, width: int, values: bool) -> None:
        super().__init__()
        self.reach, self.has_values = reach, values
        self.keys = nn.Embedding(2 * reach + 1, width)
        if values:
            self.values = nn.Embedding(2 * reach + 1, width)

    def prepare(self, batch: Packed, like: Tensor, *, cache_bias: bool) -> slice:
        reach = min(self.reach, max(batch.max_length - 1, 0))
        return slice(self.reach - reach, self.reach + reach + 1)

    def bias(self, q: Heads, k: Keys, prepared: slice, scale: float, project: Project) -> RelativeBias:
        table = torch.einsum("ihd,gd->ihg", q * scale, self.keys.weight[prepared].to(q))
        return RelativeBias(table=table, values=self.values.weight[prepared].to(q) if self.has_values else None)


SEGMENTS = 8  # token types in `TransformerXlPosition`; a multiple of 8, since kernels on CUDA need such head widths


class TransformerXlPosition(RelativePosition):
    """Relative positions and segments of Transformer-XL and XLNet, with one set of parameters in each layer.

    logit = scale ((q + u) k + (q + w) R p + (q + s) e), where p are sinusoids of the distance ("halves") and e is one
    of two vectors: for a key in the query's segment or in another one. R, u, w, s and e are trained (Dai et al. 2019,
    section 3.3; Yang et al. 2019, section 2.5).

    `rotate` adds u to q, and SEGMENTS dimensions to q and k, whose product is the last term; `bias` returns the second.

    Args:
        width: Width of the sinusoids.
        heads: Number of heads.
        head_width: Head dimension.
        reach: Distance from which all distances have the same sinusoids. If None, all differ.
        dropout: Dropout probability of the sinusoids.
    """

    def __init__(self, *, width: int, heads: int, head_width: int, reach: int | None, dropout: float) -> None:
        super().__init__()
        self.reach, self.dropout = reach, dropout
        self.position = nn.Linear(width, heads * head_width, bias=False)
        self.content_bias, self.position_bias, self.type_bias = (
            nn.Parameter(torch.zeros(heads, head_width)) for _ in range(3)
        )
        self.same_type = nn.Parameter(torch.zeros(2, heads, head_width))

    def prepare(self, batch: Packed, like: Tensor, *, cache_bias: bool) -> tuple[Packed, Tensor]:
        extremes = batch.id_extremes()  # known on the host; on a GPU, an index beyond a table would end the process
        low, high = (0, 0) if extremes is None else extremes[1]
        if not 0 <= low <= high < SEGMENTS:
            raise DataError(
                f"the batch has segment type {low if low < 0 else high}; this model knows 0 to {SEGMENTS - 1}"
            )
        reach = max(batch.max_length - 1, 0)
        steps = torch.arange(reach, -reach - 1, -1, device=like.device)  # query position minus key position
        limit = reach if self.reach is None else self.reach
        return batch, sinusoid(steps.clamp(-limit, limit), self.position.in_features, "halves").to(like)

    def rotate(self, q: Heads, k: Keys, prepared: tuple[Packed, Tensor]) -> tuple[Tensor, Tensor]:
        batch, _ = prepared
        one_hot = F.one_hot(batch.types, SEGMENTS)[:, None].to(q)
        same, different = torch.einsum("ihd,shd->sih", q + self.type_bias, self.same_type).unsqueeze(-1).unbind()
        by_segment = one_hot * same + (1 - one_hot) * different
        keys = torch.cat([k, one_hot.expand(-1, k.shape[1], -1)], -1)
        return torch.cat([q + self.content_bias, by_segment], -1), keys

    def bias(self, q: Heads, k: Keys, prepared: tuple[Packed, Tensor], scale: float, project: Project) -> Bias:
        batch, waves = prepared
        projected = self.position(dropout(waves, self.dropout, self.training)).unflatten(-1, q.shape[1:])
        table = torch.einsum("ihd,ghd->ihg", (q + self.position_bias) * scale, projected)
        if batch.key_lengths is None and batch.visibility is None:
            return RelativeBias(table=table)
        return _expand(table, batch)


class DistanceVectors(NamedTuple):
    """The vectors of the distances that occur in a batch."""

    vectors: Float[Tensor, "vectors width"]
    indexes: Int[Tensor, " distances"]  # row of `vectors` for each distance (query minus key) from -reach to reach


class DisentangledPosition(RelativePosition):
    """Disentangled attention: logit = scale (q k + q K(p) + k Q(p)), where p is a trained vector of the distance.

    K and Q are the layer's projections to keys and queries (He et al. 2021, arXiv:2006.03654, section 3.1). Long
    distances share vectors by logarithmic buckets (He et al. 2023, arXiv:2111.09543, appendix). Only the vectors of
    distances that occur in the batch are projected; `ProjectedDistances` projects all of them once, for inference.

    Args:
        buckets: Number of buckets for distances of one sign.
        reach: Distance from which all distances share the last bucket.
        width: Width of the vectors, as wide as the hidden states.
        norm_eps: Epsilon of a layer norm of the vectors. If None, there is no norm.
        dropout: Dropout probability of the vectors.
    """

    def __init__(self, *, buckets: int, reach: int, width: int, norm_eps: float | None, dropout: float) -> None:
        super().__init__()
        self.buckets, self.reach, self.dropout = buckets, reach, dropout
        self.table = nn.Embedding(2 * buckets, width)
        self.norm: nn.Module = nn.Identity() if norm_eps is None else nn.LayerNorm(width, eps=norm_eps)

    def prepare(self, batch: Packed, like: Tensor, *, cache_bias: bool) -> DistanceVectors:
        reach = max(batch.max_length - 1, 0)
        rows = self.rows(torch.arange(-reach, reach + 1))  # ascending; on the CPU, because the host reads two of them
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
    """A `DisentangledPosition` for inference in one layer: the vectors of all distances are projected only once.

    Args:
        position: The trained vectors.
        project: The layer's projection of rows to queries, keys and values.
    """

    position_q: Tensor
    position_k: Tensor
    rows: Tensor

    def __init__(self, position: DisentangledPosition, project: Project) -> None:
        super().__init__()
        self.reach = position.reach  # distance from which all distances share a vector
        with torch.no_grad():
            position_q, position_k, _ = project(position.norm(position.table.weight))
            rows = position.rows(torch.arange(-self.reach, self.reach + 1, device=position_q.device))
        self.rows_on_host = rows.tolist()
        for name, tensor in (("position_q", position_q), ("position_k", position_k), ("rows", rows)):
            self.register_buffer(name, tensor.contiguous(), persistent=False)

    def prepare(self, batch: Packed, like: Tensor, *, cache_bias: bool) -> ProjectedRows:
        reach = max(batch.max_length - 1, 0)
        clipped = min(reach, self.reach)
        first, last = self.rows_on_host[self.reach - clipped], self.rows_on_host[self.reach + clipped]
        distances = torch.arange(-reach, reach + 1, device=like.device).clamp(-self.reach, self.reach)
        return ProjectedRows(slice(first, last + 1), self.rows[distances + self.reach] - first)

    def bias(self, q: Heads, k: Keys, prepared: ProjectedRows, scale: float, project: Project) -> DisentangledBias:
        position_q, position_k = self.position_q[prepared.rows], self.position_k[prepared.rows]
        return DisentangledBias(position_q=position_q, position_k=position_k, indexes=prepared.indexes)


class ProjectedRows(NamedTuple):
    """The part of the projected vectors that a batch needs."""

    rows: slice  # rows of `ProjectedDistances.position_q` and `position_k`
    indexes: Int[Tensor, " distances"]  # row of this slice for each distance (query minus key) from -reach to reach


def signed_log_buckets(distances: Int[Tensor, "*shape"], count: int, reach: int) -> Int[Tensor, "*shape"]:
    """Return the bucket of each distance, from -count to count (He et al. 2023, arXiv:2111.09543, appendix).

    Up to count / 2, the bucket of a distance is the distance itself. Above, buckets grow logarithmically, to `count` at
    `reach`. Logarithms are float32 as in the published code: rounding decides the bucket of some distances.
    """
    exact = count // 2
    far = distances.abs().clamp(min=exact)
    logs = torch.log(far / exact) / torch.log(torch.tensor((reach - 1) / exact)) * (exact - 1)
    buckets = (logs.ceil() + exact).long() * distances.sign()
    return torch.where(distances.abs() <= exact, distances, buckets)


def _expand(table: Float[Tensor, "rows heads distances"], batch: Packed) -> DenseBias:
    """Expand the table of a relative bias for two-stream attention, by the positions of the rows.

    The result is -inf for the keys that `batch.visibility` hides from a row.
    """
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
