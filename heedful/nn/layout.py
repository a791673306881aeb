"""The arguments of attention: the layout of sequences in packed rows, the bias, masks and dropout.

Attention is softmax(scale q k + bias) v; its logits are scale q k + bias. Letters in shapes: H heads, D head dimension,
n query rows and m key rows of one sequence.
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

    Query spans follow each other without a gap and cover all query rows; key spans may leave rows out. The plans that
    kernels make for a layout (gather indices, masks) are cached with it, so all layers of a forward pass share them.

    `row_bounds` and `key_counts` are for CUDA graphs, in which lengths may change between replays.
    """

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    stride: int | None = None  # rows from the first key of a sequence to that of the next one; None: not constant
    # sequence boundaries (cu_seqlens) on the device, int32; then `queries` and `keys` are one span of all rows
    row_bounds: Int[Tensor, " bounds"] | None = None
    # number of key rows of each sequence, on the device, from the start of its span; None: the whole span
    key_counts: Int[Tensor, " sequences"] | None = None
    _plans: dict[Hashable, object] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int] | None = None) -> Layout:
        """Make a layout from sequence boundaries (cu_seqlens).

        Args:
            queries: Sequence b has the query rows queries[b] to queries[b + 1] - 1.
            keys: Sequence b has the key rows keys[b] to keys[b + 1] - 1. If None, self-attention: `queries`.
        """
        spans = tuple(pairwise(queries))
        if keys is None:
            return cls(spans, spans)
        assert len(keys) == len(queries), f"{len(queries) - 1} sequences of queries but {len(keys) - 1} of keys"
        return cls(spans, tuple(pairwise(keys)))

    @classmethod
    def within(cls, batch: Packed) -> Layout:
        """Make the layout of self-attention in a batch, with the keys that `batch.key_lengths` selects."""
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
        """Smallest number of rows that k and v may have; raises HeedfulError if the spans are invalid."""
        return self.cached(("min key rows",), self._count_key_rows)

    def _count_key_rows(self) -> int:
        """Check the spans, and return where the last key span ends."""
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
        """Return (n, m) of each sequence: the numbers of its query rows and its key rows."""
        return [
            (stop - start, last - first) for (start, stop), (first, last) in zip(self.queries, self.keys, strict=True)
        ]

    def key_lengths(self, device: torch.device) -> Int[Tensor, " sequences"]:
        """Return the number of key rows of each sequence as a tensor on a device."""
        if self.key_counts is not None:
            return self.key_counts
        return self.cached(("key lengths", device), lambda: send([m for _, m in self.sizes()], device))

    def cached(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """Return the plan cached under a key; `make` makes it on first use."""
        if key not in self._plans:
            with torch.inference_mode(False):  # training may use the plan too, and cannot use inference tensors
                self._plans[key] = make()
        return cast(Plan, self._plans[key])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RelativeBias:
    """A bias that depends on the distance from query to key.

    table[h, reach + distance] is added to the logit of a query and a key in head h, as in T5 and ALiBi. A table with
    rows has an entry for each query row i too: table[i, h, reach + distance], as in Shaw et al. and Transformer-XL.
    values[reach + distance] is added to the value of the key (Shaw et al. 2018, equation 3).

    distance = key position - query position, clipped to -reach..reach; the last query and the last key of a sequence
    have the same position.
    """

    table: Float[Tensor, "heads distances"] | Float[Tensor, "rows heads distances"]
    values: Float[Tensor, "distances width"] | None = None  # None: nothing is added to the values
    blocks: dict[object, Tensor] | None = None  # cache of expanded biases by block; None: biases of layers differ

    @property
    def reach(self) -> int:
        """Largest distance with an entry of its own; the table has 2 reach + 1 distances."""
        return (self.table.shape[-1] - 1) // 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DenseBias:
    """A bias for each pair of a query and a key: one tensor [H, n, m] for each sequence; -inf masks a pair."""

    blocks: tuple[Float[Tensor, "heads _queries _keys"], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DisentangledBias:
    """The bias of disentangled attention: scale (q K(p) + k Q(p)) for a query q and a key k; self-attention only.

    p is the embedding of the pair's relative position; K and Q are the layer's projections to keys and queries (He et
    al. 2021, arXiv:2006.03654, section 3.1). distance = query position - key position in both terms, as in the
    published code: the opposite sign to `RelativeBias`.
    """

    position_q: Float[Tensor, "embeddings heads width"]  # Q(p)
    position_k: Float[Tensor, "embeddings heads width"]  # K(p)
    indexes: Int[Tensor, " distances"]  # row of `position_q` and `position_k` for distance d, at d + reach; ascending

    @property
    def reach(self) -> int:
        """Largest distance that has an index: at least the length of the longest sequence minus 1."""
        return len(self.indexes) // 2

    def dense(
        self, q: Float[Tensor, "rows heads width"], k: Float[Tensor, "rows heads width"], scale: float, layout: Layout
    ) -> DenseBias:
        """Compute the bias of all pairs of a query and a key."""
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
    scale: float  # factor of q k and of a DisentangledBias, not of other biases
    causal: bool = False  # whether a query attends only to keys at its own position and before it
    window: int | None = None  # positions on each side that a query attends to, besides its own; None: all
    bias: Bias | None = None
    dropout: float = 0.0  # probability of dropping a weight after the softmax
    preferred: str = ""  # name of the kernel to try first, the fastest one measured on this machine; "": none


def with_dense_bias(q: Tensor, k: Tensor, args: AttentionArgs) -> AttentionArgs:
    """Return the arguments with a `DisentangledBias` expanded to a `DenseBias`; other biases are unchanged."""
    if not isinstance(args.bias, DisentangledBias):
        return args
    return replace(args, bias=args.bias.dense(q, k, args.scale, args.layout))


def cannot_differ(k: Tensor, v: Tensor) -> str:
    """Return why a kernel that needs keys and values of one width cannot compute with k and v, or an empty string."""
    if v.shape[-1] == k.shape[-1]:
        return ""
    return f"its values are as wide as its keys, and these are {v.shape[-1]} and {k.shape[-1]} wide"


def relative_distances(n: int, m: int, device: torch.device | None = None) -> Int[Tensor, "n m"]:
    """Return key position minus query position of each pair; the last of n queries is at the position of the last key.

    >>> relative_distances(2, 3).tolist()
    [[-1, 0, 1], [-2, -1, 0]]
    """
    return torch.arange(m, device=device)[None, :] - torch.arange(m - n, m, device=device)[:, None]


def allowed_pairs(distances: Int[Tensor, "*shape"], args: AttentionArgs) -> Bool[Tensor, "*shape"]:
    """Return whether the causal mask and the window allow a query to attend to a key at each of these distances."""
    pairs = torch.ones_like(distances, dtype=torch.bool)
    if args.causal:
        pairs &= distances <= 0
    if args.window is not None:
        pairs &= distances.abs() <= args.window
    return pairs
