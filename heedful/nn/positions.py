"""Positions: sinusoids that are added to embeddings, and relative positions that enter attention."""

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
Project = Callable[[Float[Tensor, "rows width"]], tuple[Tensor, Tensor, Tensor]]
Waves = Literal["interleaved", "halves", "halves_inclusive"]


def sinusoid(
    positions: Int[Tensor, " rows"] | Float[Tensor, " rows"],
    width: int,
    layout: Waves = "interleaved",
    base: float = 10_000.0,
) -> Float[Tensor, "rows width"]:
    """Return sin(p / base^e) and cos(p / base^e) of each position p at width / 2 wavelengths, in float64.

    Vaswani et al. 2017, section 3.5. An odd width has one sine more than cosines, or ends with a zero
    ("halves_inclusive").

    Args:
        layout: "interleaved": e = 2i/d, i from 0, with sin and cos alternating (the paper); "halves": the same, all
            sines first (Marian); "halves_inclusive": e = i/(d/2 - 1), all sines first (tensor2tensor and fairseq).
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


# -- relative positions, which enter attention -------------------------------------------------------------------


class RelativePosition(nn.Module):
    """How relative positions enter attention: by rotating q and k, or by a bias of the scores. The base does neither.

    `prepare` is called once for a batch; its result is shared by layers and passed to `rotate` and `bias`.
    """

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> Any:
        """Compute what does not depend on q and k.

        Args:
            like: A tensor with the rows' dtype and device.
            keep: Whether layers may share what kernels derive from the bias; not with gradient checkpointing.
        """
        return None

    def rotate(self, q: Heads, k: Keys, prepared: Any) -> tuple[Tensor, Tensor]:
        """Return queries and keys changed by their positions."""
        return q, k

    def bias(self, q: Heads, k: Keys, prepared: Any, scale: float, project: Project) -> Bias | None:
        """Return the bias that is added to the scores.

        Args:
            q: Queries before `rotate`.
            k: Keys before `rotate`.
            prepared: The result of `prepare`.
            scale: Factor of the scores.
            project: The layer's projection of rows to queries, keys and values, [rows, heads, width] each.
        """
        return None


Rotations = tuple[Tensor, Tensor]  # cosines and sines, [rows, 1, d/2]


def rotary_frequencies(base: float, width: int, device: torch.device | None = None) -> Float[Tensor, " pairs"]:
    """Return base^(-2i/d), the angle per position of the numbers i and i + d/2 of a head (Su et al. 2021, 3.2.2)."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    frequencies: Tensor = base**-exponents
    return frequencies


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnShape:
    """The numbers of YaRN (Peng et al. 2023, section 3.2); see `heedful.model.config.Yarn`."""

    factor: float
    trained: int
    fast: float
    slow: float
    truncate: bool

    def stretch(self, frequencies: Tensor, base: float) -> Tensor:
        """Return frequencies: fast ones unchanged, slow ones divided by the factor, those between interpolated."""
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
    """The numbers of Llama 3.1's stretch; see `heedful.model.config.Llama3Scaling`."""

    factor: float
    trained: int
    low: float
    high: float

    def stretch(self, frequencies: Tensor, base: float) -> Tensor:
        """Return frequencies: fast ones unchanged, slow ones divided by the factor, those between interpolated."""
        rotations = self.trained * frequencies / (2 * math.pi)
        share = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies / self.factor * (1 - share) + frequencies * share


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicNtkShape:
    """Dynamic NTK: in a sequence of n > L rows, the base is (s n / L - s + 1)^(d / (d - 2)) times as large.

    s is `factor`, L is `trained`.
    """

    factor: float
    trained: int

    def change(self, lengths: list[int], width: int, device: torch.device) -> Float[Tensor, "sequences pairs"]:
        """Return the factors of each sequence's frequencies."""
        growth = [self.factor * max(length, self.trained) / self.trained - (self.factor - 1) for length in lengths]
        powers = -torch.arange(0, width, 2, dtype=torch.float64, device=device) / (width - 2)
        if len(growth) == 1:  # nothing passes from host to device, as recording a CUDA graph asks for
            alone: Tensor = growth[0] ** powers
            return alone[None]
        changed: Tensor = torch.tensor(growth, dtype=torch.float64).to(device)[:, None] ** powers
        return changed


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRopeShape:
    """Divisors of each frequency (Ding et al. 2024): `short` in sequences of up to `trained` rows, else `long`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained: int

    def stretch(self, frequencies: Tensor, base: float) -> Tensor:
        """Return the frequencies of short sequences."""
        return frequencies / _filled(self.short, frequencies.device)

    def change(self, lengths: list[int], width: int, device: torch.device) -> Float[Tensor, "sequences pairs"]:
        """Return the factors of each sequence's frequencies."""
        changed = _filled([short / long for short, long in zip(self.short, self.long, strict=True)], device)
        if len(lengths) == 1:
            return changed[None] if lengths[0] > self.trained else torch.ones_like(changed)[None]
        is_long = torch.tensor([length > self.trained for length in lengths]).to(device)
        return torch.where(is_long[:, None], changed, 1.0)


def _filled(numbers: Sequence[float], device: torch.device) -> Float[Tensor, " numbers"]:
    """Return a vector without a copy from host to device, which the recording of a CUDA graph forbids."""
    return torch.stack([torch.full((), number, dtype=torch.float64, device=device) for number in numbers])


class RotaryPosition(RelativePosition):
    """Rotary position embedding (RoPE): q and k are rotated by their positions, so that scores depend on distances.

    Numbers i and i + d/2 of a head rotate by the position times base^(-2i/d) (Su et al. 2021, section 3.2.2). Angles
    are float64.

    Args:
        width: d, numbers of a head.
        factor: Divides the positions.
        shape: How frequencies are stretched.
        by_length: How frequencies change in sequences longer than the trained ones.
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
        """Return the angles per position of a sequence that is no longer than the trained ones."""
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
    """Return the bucket of each distance, key minus query: half of them exact, the others logarithmic up to `reach`.

    Later keys have the second half of the buckets, or, with a causal mask, bucket 0.
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

    def bias(self, q: Heads, k: Keys, prepared: slice, scale: float, project: Project) -> RelativeBias:
        table = torch.einsum("ihd,gd->ihg", q * scale, self.keys.weight[prepared].to(q))
        return RelativeBias(table=table, values=self.values.weight[prepared].to(q) if self.has_values else None)


SEGMENTS = 8  # token types that a Transformer-XL position distinguishes; heads stay a multiple of 8 wide, for CUDA


class TransformerXlPosition(RelativePosition):
    """score = scale ((q + u) k + (q + w) R p_distance + (q + s) e_same), with e for the same segment and for another.

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
    """The vectors of the distances in one batch, and the row among them of each distance."""

    vectors: Float[Tensor, "vectors width"]
    indexes: Int[Tensor, " distances"]  # row of the vector of each distance, query minus key, from -reach to reach


class DisentangledPosition(RelativePosition):
    """score = scale (q k + q K(p) + k Q(p)), where p is the vector of the distance, and K and Q project it as keys and
    queries (He et al. 2021, arXiv:2006.03654, section 3.1; buckets: He et al. 2023, arXiv:2111.09543, appendix).

    Only vectors of distances that the batch has are projected: 2n - 1 of them for texts of n tokens, as long as each
    distance has a vector of its own. For inference, see `ProjectedDistances`.
    """

    def __init__(self, *, buckets: int, reach: int, width: int, norm_eps: float | None, dropout: float) -> None:
        super().__init__()
        self.buckets, self.reach, self.dropout = buckets, reach, dropout
        self.table = nn.Embedding(2 * buckets, width)
        self.norm: nn.Module = nn.Identity() if norm_eps is None else nn.LayerNorm(width, eps=norm_eps)

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> DistanceVectors:
        reach = max(batch.max_length - 1, 0)
        distances = torch.arange(-reach, reach + 1, device=like.device)
        rows = self.rows(distances)  # which rise with the distance
        vectors: Tensor = self.norm(self.table.weight[rows[0] : rows[-1] + 1])
        return DistanceVectors(vectors, rows - rows[0])

    def rows(self, distances: Int[Tensor, " distances"]) -> Int[Tensor, " distances"]:
        """Return the row of the table for each distance, query minus key."""
        buckets = signed_log_buckets(distances, self.buckets, self.reach) + self.buckets
        return buckets.clamp(0, 2 * self.buckets - 1)

    def bias(self, q: Heads, k: Keys, prepared: DistanceVectors, scale: float, project: Project) -> DisentangledBias:
        position_q, position_k, _ = project(dropout(prepared.vectors, self.dropout, self.training))
        return DisentangledBias(position_q=position_q, position_k=position_k, indexes=prepared.indexes)


class ProjectedDistances(RelativePosition):
    """`DisentangledPosition` for one layer of a trained model, with all vectors of distances projected once."""

    position_q: Tensor
    position_k: Tensor
    rows: Tensor

    def __init__(self, position: DisentangledPosition, project: Project) -> None:
        super().__init__()
        self.reach = position.reach  # larger distances have the same vector as this one
        with torch.no_grad():
            position_q, position_k, _ = project(position.norm(position.table.weight))
            rows = position.rows(torch.arange(-self.reach, self.reach + 1, device=position_q.device))
        self.bounds = rows.tolist()  # the same rows on the host
        for name, tensor in (("position_q", position_q), ("position_k", position_k), ("rows", rows)):
            self.register_buffer(name, tensor.contiguous(), persistent=False)

    def prepare(self, batch: Packed, like: Tensor, *, keep: bool) -> ProjectedRows:
        reach = max(batch.max_length - 1, 0)
        cut = min(reach, self.reach)
        first, last = self.bounds[self.reach - cut], self.bounds[self.reach + cut]
        distances = torch.arange(-reach, reach + 1, device=like.device).clamp(-self.reach, self.reach)
        return ProjectedRows(slice(first, last + 1), self.rows[distances + self.reach] - first)

    def bias(self, q: Heads, k: Keys, prepared: ProjectedRows, scale: float, project: Project) -> DisentangledBias:
        position_q, position_k = self.position_q[prepared.rows], self.position_k[prepared.rows]
        return DisentangledBias(position_q=position_q, position_k=position_k, indexes=prepared.indexes)


class ProjectedRows(NamedTuple):
    """Rows of the projected vectors that a batch needs, and the row among them of each distance, query minus key."""

    rows: slice
    indexes: Int[Tensor, " distances"]


def signed_log_buckets(distances: Int[Tensor, "*shape"], count: int, reach: int) -> Int[Tensor, "*shape"]:
    """Return the bucket of each distance, with its sign: itself up to count / 2, then logarithmic, count at `reach`.

    Logarithms are float32, as published: their rounding decides at the borders.
    """
    exact = count // 2
    far = distances.abs().clamp(min=exact)
    logs = torch.log(far / exact) / torch.log(torch.tensor((reach - 1) / exact)) * (exact - 1)
    buckets = (logs.ceil() + exact).long() * distances.sign()
    return torch.where(distances.abs() <= exact, distances, buckets)


def _expand(table: Float[Tensor, "rows heads distances"], batch: Packed) -> DenseBias:
    """Expand a relative bias for rows whose positions are not in order, with -inf where a row does not see a key."""
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
