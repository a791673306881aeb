"""What attention works on: which rows belong to which sequence, and what is added to the scores.

Letters: T rows of all sequences, H heads, D head width, n query rows and m key rows of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.packed import Packed

Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Layout:
    """The query rows and the key rows of each sequence, as (start, stop) on the host.

    Query spans follow each other without a gap and cover all query rows; key spans may leave rows out.
    Plans that kernels derive from a layout are kept with it, so all layers of one forward pass share them.
    """

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    stride: int | None = None  # key rows are lines of so many places, one line for each sequence in order
    _plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int] | None = None) -> Layout:
        """From bounds: sequence b has the query rows queries[b] to queries[b + 1]; keys default to the same rows."""
        spans = tuple(pairwise(queries))
        if keys is None:
            return cls(spans, spans)
        assert len(keys) == len(queries), f"{len(queries) - 1} sequences of queries but {len(keys) - 1} of keys"
        return cls(spans, tuple(pairwise(keys)))

    @classmethod
    def within(cls, batch: Packed) -> Layout:
        """Each sequence of a batch to itself, without the rows that only look on."""
        layout = cls.of(batch.bounds)
        if batch.key_lengths is None:
            return layout
        return cls(
            layout.queries, tuple((a, a + m) for (a, _), m in zip(layout.queries, batch.key_lengths, strict=True))
        )

    @property
    def rows(self) -> int:
        """How many query rows there are."""
        return self.queries[-1][1] if self.queries else 0

    @property
    def min_key_rows(self) -> int:
        """How many key rows there are at least; a HeedfulError where the spans are not such as they have to be."""
        found: int = self.cached(("keys needed",), self._keys_needed)
        return found

    def _keys_needed(self) -> int:
        at = 0
        for number, ((start, stop), (first, last)) in enumerate(zip(self.queries, self.keys, strict=True)):
            if start != at or stop < start or not 0 <= first <= last:
                raise HeedfulError(
                    f"layout: sequence {number} has the query rows {start} to {stop} and the key rows {first} to "
                    f"{last}; expected query rows from {at} on, and no span that ends before it begins"
                )
            at = stop
        return max((last for first, last in self.keys if first < last), default=0)

    def sizes(self) -> list[tuple[int, int]]:
        """(n, m) of each sequence."""
        return [(b - a, d - c) for (a, b), (c, d) in zip(self.queries, self.keys, strict=True)]

    def cached(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The plan of that key, made once."""
        if key not in self._plans:
            with torch.inference_mode(False):  # what served inference may serve training
                self._plans[key] = make()
        return self._plans[key]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RelativeBias:
    """A bias that depends on how far the key stands from the query: T5's buckets, ALiBi; with one table for each
    query row also Shaw's and Transformer-XL's terms.

    table[..., h, reach + gap] is added to the score, gap = key place - query place, clipped to -reach..reach; and
    values[reach + gap], times the weight, to the result (Shaw et al. 2018, equation 3). Places are counted so that the
    last query and the last key of a sequence stand at the same place.
    """

    table: Float[Tensor, "heads distances"] | Float[Tensor, "rows heads distances"]
    values: Float[Tensor, "distances width"] | None = None  # what a row takes from that far, besides the value there
    blocks: dict[Any, Tensor] | None = None  # filled by kernels, where several layers add the same

    @property
    def reach(self) -> int:
        """The largest distance that the table tells apart."""
        return (self.table.shape[-1] - 1) // 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DenseBias:
    """A bias given in full, one [H, n, m] tensor for each sequence; -inf forbids a pair."""

    blocks: tuple[Float[Tensor, "heads _queries _keys"], ...]


Bias = RelativeBias | DenseBias


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionArgs:
    """One call of attention: everything but q, k and v."""

    layout: Layout
    scale: float  # multiplies q k, not the bias
    causal: bool = False  # a query sees keys at its own place and before, places aligned at the end
    window: int | None = None  # a query sees keys at most so many places away, both ends included
    bias: Bias | None = None
    dropout: float = 0.0  # probability with which a weight is dropped after the softmax; the rest is scaled up
    preferred: str = ""  # the kernel that was measured to be the fastest here; it is taken where it can


def cannot_differ(k: Tensor, v: Tensor) -> str:
    """Why a kernel that wants values as wide as keys cannot take these, or nothing."""
    if v.shape[-1] == k.shape[-1]:
        return ""
    return f"its values are as wide as its keys, and these are {v.shape[-1]} and {k.shape[-1]} wide"


def relative_distances(n: int, m: int, device: torch.device | None = None) -> Int[Tensor, "n m"]:
    """Key place minus query place for n queries and m keys whose last ones stand at the same place."""
    return torch.arange(m, device=device)[None, :] - torch.arange(m - n, m, device=device)[:, None]


def allowed_pairs(gap: Int[Tensor, "*shape"], call: AttentionArgs) -> Bool[Tensor, "*shape"]:
    """Which pairs at those distances may attend."""
    pairs = torch.ones_like(gap, dtype=torch.bool)
    if call.causal:
        pairs &= gap <= 0
    if call.window is not None:
        pairs &= gap.abs() <= call.window
    return pairs
