"""The arguments of attention: which rows belong to which sequence, and what is added to the scores.

Letters: H heads, D head width, n query rows and m key rows of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.packed import Packed, send

Span = tuple[int, int]  # start and stop of consecutive rows
Plan = TypeVar("Plan")


@dataclass(frozen=True, eq=False)
class Layout:
    """The query rows and the key rows of each sequence, as (start, stop) on the host.

    Query spans follow each other without a gap and cover all query rows; key spans may leave rows out. Plans that
    kernels derive from a layout are cached with it, so all layers of one forward pass share them.
    """

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    stride: int | None = None  # rows from the first key of a sequence to the first of the next one; None: they vary
    # bounds on the device, int32, of sequences that share the only span; a CUDA graph reads them. None: spans are exact
    row_bounds: Int[Tensor, " bounds"] | None = None
    # number of key rows of each sequence on the device, at most those of its span, for a CUDA graph; None: all
    key_counts: Int[Tensor, " sequences"] | None = None
    _plans: dict[Hashable, object] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int] | None = None) -> Layout:
        """Make a layout from bounds: sequence b has the query rows queries[b] to queries[b + 1].

        Args:
            keys: Bounds of the key rows; None: the queries' own.
        """
        spans = tuple(pairwise(queries))
        if keys is None:
            return cls(spans, spans)
        assert len(keys) == len(queries), f"{len(queries) - 1} sequences of queries but {len(keys) - 1} of keys"
        return cls(spans, tuple(pairwise(keys)))

    @classmethod
    def within(cls, batch: Packed) -> Layout:
        """Make the layout of self-attention in a batch; rows beyond a sequence's `key_lengths` are no keys."""
        layout = cls.of(batch.bounds)
        if batch.key_lengths is None:
            return layout
        keys = tuple((start, start + m) for (start, _), m in zip(layout.queries, batch.key_lengths, strict=True))
        return cls(layout.queries, keys)

    @property
    def rows(self) -> int:
        """Number of query rows."""
        return self.queries[-1][1] if self.queries else 0

    @property
    def min_key_rows(self) -> int:
        """Number of key rows that k and v need at least; raises HeedfulError if the spans are invalid."""
        return self.cached(("min key rows",), self._count_key_rows)

    def _count_key_rows(self) -> int:
        """Check the spans, and return the number of key rows that they need."""
        expected_start = 0
        for number, ((start, stop), (first, last)) in enumerate(zip(self.queries, self.keys, strict=True)):
            if start != expected_start or stop < start or not 0 <= first <= last:
                raise HeedfulError(
                    f"layout: sequence {number} has the query rows {start} to {stop} and the key rows {first} to "
                    f"{last}; expected query rows from {expected_start} on, and no span that ends before it begins"
                )
            expected_start = stop
        return max((last for first, last in self.keys if first < last), default=0)

    def sizes(self) -> list[tuple[int, int]]:
        """Return (n, m) of each sequence: its numbers of query and key rows."""
        return [
            (stop - start, last - first) for (start, stop), (first, last) in zip(self.queries, self.keys, strict=True)
        ]

    def key_lengths(self, device: torch.device) -> Int[Tensor, " sequences"]:
        """Return the number of key rows of each sequence as a tensor on a device."""
        if self.key_counts is not None:
            return self.key_counts
        return self.cached(("key lengths", device), lambda: send([m for _, m in self.sizes()], device))

    def cached(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """Return the plan cached under a key, made on first use."""
        if key not in self._plans:
            with torch.inference_mode(False):  # a plan made in inference may serve training
                self._plans[key] = make()
        return cast(Plan, self._plans[key])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RelativeBias:
    """A bias that depends on the distance from query to key.

    A table for each head holds the biases of T5 and ALiBi; a table for each query row and head, those of Shaw et al.
    and Transformer-XL. distance = key position - query position, clipped to -reach..reach; the last query and the last
    key of a sequence have the same position. table[..., h, reach + distance] is added to the score, and
    values[reach + distance] to the value of the key (Shaw et al. 2018, equation 3).
    """

    table: Float[Tensor, "heads distances"] | Float[Tensor, "rows heads distances"]
    values: Float[Tensor, "distances width"] | None = None
    blocks: dict[object, Tensor] | None = None  # cache of expanded biases by block; None: layers add different biases

    @property
    def reach(self) -> int:
        """Largest distance that the table distinguishes."""
        return (self.table.shape[-1] - 1) // 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DenseBias:
    """A bias for each pair of query and key, one [H, n, m] tensor for each sequence; -inf masks a pair."""

    blocks: tuple[Float[Tensor, "heads _queries _keys"], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DisentangledBias:
    """The bias scale (q K(p) + k Q(p)) of each pair, p the embedding of its relative position; self-attention only.

    K and Q project p as keys and queries (He et al. 2021, arXiv:2006.03654, section 3.1). distance = query position -
    key position in both terms, as the published code computes it: the opposite sign to `RelativeBias`.
    """

    position_q: Float[Tensor, "embeddings heads width"]  # Q(p)
    position_k: Float[Tensor, "embeddings heads width"]  # K(p)
    indexes: Int[Tensor, " distances"]  # row of the embedding at reach + distance, ascending with the distance

    @property
    def reach(self) -> int:
        """Largest distance that has an index: at least the length of the longest sequence less one."""
        return len(self.indexes) // 2

    def dense(
        self, q: Float[Tensor, "rows heads width"], k: Float[Tensor, "rows heads width"], scale: float, layout: Layout
    ) -> DenseBias:
        """Compute both terms for all pairs of a query and a key."""
        to_position = torch.einsum("ihd,ghd->hig", q * scale, self.position_k)
        from_position = torch.einsum("jhd,ghd->hjg", k * scale, self.position_q)
        blocks = []
        for start, stop in layout.queries:
            positions = torch.arange(stop - start, device=q.device)
            index = self.indexes[positions[:, None] - positions[None, :] + self.reach].expand(q.shape[1], -1, -1)
            content_to_position = to_position[:, start:stop].gather(-1, index)
            position_to_content = from_position[:, start:stop].gather(-1, index.mT).mT
            blocks.append(content_to_position + position_to_content)
        return DenseBias(blocks=tuple(blocks))


Bias = RelativeBias | DenseBias | DisentangledBias


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionArgs:
    """The arguments of one call of attention besides q, k and v."""

    layout: Layout
    scale: float  # multiplies q k and the terms of a DisentangledBias, not other biases
    causal: bool = False  # whether a query sees only keys at its own position and before; positions align at the end
    window: int | None = None  # a query sees keys at most this many positions away, both ends included; None: all
    bias: Bias | None = None
    dropout: float = 0.0  # probability that a weight is dropped after the softmax; the other weights are scaled up
    preferred: str = ""  # name of the kernel to try first, the fastest one measured on this machine; "": none


def with_dense_bias(q: Tensor, k: Tensor, args: AttentionArgs) -> AttentionArgs:
    """Return the arguments with a `DisentangledBias` expanded to a `DenseBias`; other biases are unchanged."""
    if not isinstance(args.bias, DisentangledBias):
        return args
    return replace(args, bias=args.bias.dense(q, k, args.scale, args.layout))


def cannot_differ(k: Tensor, v: Tensor) -> str:
    """Return why a kernel that needs values as wide as keys cannot compute with these, or an empty string."""
    if v.shape[-1] == k.shape[-1]:
        return ""
    return f"its values are as wide as its keys, and these are {v.shape[-1]} and {k.shape[-1]} wide"


def relative_distances(n: int, m: int, device: torch.device | None = None) -> Int[Tensor, "n m"]:
    """Return key position minus query position for n queries and m keys, aligned at the last ones."""
    return torch.arange(m, device=device)[None, :] - torch.arange(m - n, m, device=device)[:, None]


def allowed_pairs(distances: Int[Tensor, "*shape"], args: AttentionArgs) -> Bool[Tensor, "*shape"]:
    """Return which pairs at these distances the causal mask and the window allow."""
    pairs = torch.ones_like(distances, dtype=torch.bool)
    if args.causal:
        pairs &= distances <= 0
    if args.window is not None:
        pairs &= distances.abs() <= args.window
    return pairs
