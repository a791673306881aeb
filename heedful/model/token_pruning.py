"""Token pruning: the upper layers of an encoder compute only the tokens that receive most attention.

The first token of each sequence, which the head reads, and a share of the others remain. The others are ranked once, by
the attention that they receive in the first pruned layer, as in PoWER-BERT (Goyal et al. 2020, section 3.2), but from a
sample of the tokens instead of all. The hidden states of the remaining tokens, which include their positions, are
packed again, so that pruned tokens cost nothing. Training prunes too: a model that is fine-tuned with a pruning adapts
to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import ModelError
from heedful.model.classic_config import ClassicConfig
from heedful.model.config import Classes, Head, ModelConfig
from heedful.packed import Packed, send

MIN_TOKENS = 16  # tokens that remain of each sequence at least: in short texts, pruning saves little and loses most
MAX_QUERIES = 32  # tokens of each sequence whose attention ranks its tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPruning:
    """Which tokens the upper layers of an encoder compute; raises ModelError for values out of range."""

    layer: int  # number of lower layers, which compute all tokens; from 1
    keep_rate: float  # share of each sequence's tokens that the upper layers compute; above 0, at most 1

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise ModelError(
                f"layer is {self.layer}; expected the number of lower layers that compute all tokens, from 1"
            )
        if not 0 < self.keep_rate <= 1:
            raise ModelError(f"keep_rate is {self.keep_rate}; expected a share of the tokens, above 0 and at most 1")

    def count(self, length: int) -> int:
        """Return how many tokens remain of a sequence: the share `keep_rate`, rounded up, and at least MIN_TOKENS.

        >>> pruning = TokenPruning(layer=3, keep_rate=0.3)
        >>> pruning.count(200), pruning.count(20), pruning.count(7)
        (60, 16, 7)
        """
        return min(length, max(MIN_TOKENS, ceil(self.keep_rate * length - 1e-9)))


def cannot_prune(model: ModelConfig, head: Head | None) -> str:
    """Return why the tokens of a model with this head cannot be pruned, or an empty string."""
    stack = model.encoder
    if stack is None or model.decoder is not None or isinstance(model, ClassicConfig):
        return "tokens are pruned in Transformers that have an encoder and no decoder"
    if stack.layers < 2:
        return "it has one layer, and the first layer computes all tokens"
    if not isinstance(head, Classes):
        head_name = "no head" if head is None else f"a {head.kind} head"
        return f"it has {head_name}, and tokens are pruned for labels or a score of a whole text"
    if head.pooling != "first":
        return f'its head does not read the first token alone: its pooling is "{head.pooling}"'
    if stack.relation is not None:
        return f'its attention depends on relative positions ("{stack.relation.kind}")'
    if stack.window is not None or stack.causal:
        return "in some of its layers a token does not attend to the whole sequence"
    return ""


def received_attention(
    q: Float[Tensor, "queries heads width"],
    k: Float[Tensor, "rows heads width"],
    query_bounds: Sequence[int],
    bounds: Sequence[int],
    scale: float,
) -> Float[Tensor, " rows"]:
    """Return the attention weight that each row receives, the mean over heads and over the queries of its sequence.

    In head h, query i gives row j of its sequence the weight softmax_j(scale q_ih k_jh).

    Args:
        q: Queries, of rows at `sampled_rows`.
        k: Keys of all rows.
        query_bounds: Boundaries of the sequences in `q`.
        bounds: Boundaries of the sequences in `k`.
        scale: Factor of the products.
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    received = k.new_empty(len(k), dtype=dtype)
    for (first, last), (start, stop) in zip(pairwise(query_bounds), pairwise(bounds), strict=True):
        if start < stop:  # converted here, where a sequence fits the cache of the processor
            queries, keys = q[first:last].to(dtype).transpose(0, 1), k[start:stop].to(dtype).permute(1, 2, 0)
            received[start:stop] = (queries * scale @ keys).softmax(-1).mean((0, 1))
    return received


def sampled_rows(bounds: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the rows of each sequence whose attention ranks its tokens, and the boundaries of these rows.

    These are up to MAX_QUERIES rows, evenly spaced from the first to the last row.

    >>> sampled_rows((0, 3, 3, 4))
    ([0, 1, 2, 3], [0, 3, 3, 4])
    """
    rows: list[int] = []
    query_bounds = [0]
    for start, stop in pairwise(bounds):
        count, last = min(stop - start, MAX_QUERIES), stop - start - 1
        rows += [start + index * last // max(count - 1, 1) for index in range(count)]
        query_bounds.append(len(rows))
    return rows, query_bounds


def prune_tokens(
    pruning: TokenPruning, importance: Float[Tensor, " rows"], batch: Packed
) -> tuple[Int[Tensor, " some"], Packed]:
    """Return the indices of the remaining rows, in ascending order, and the batch of these rows.

    The first row of each sequence and its most important other rows remain; of equally important rows, earlier ones.

    Args:
        pruning: The share of rows that remain.
        importance: A number from 0 to 1 for each row.
        batch: The batch, which may have empty sequences.
    """
    device = importance.device
    first_rows = [start for start, stop in pairwise(batch.bounds) if start < stop]
    importance = importance.double().index_fill(0, send(first_rows, device), 2.0)  # more than any other row
    sequences = torch.arange(len(batch), device=device).repeat_interleave(
        send(batch.lengths, device), output_size=len(importance)
    )
    order = (importance - 3 * sequences).argsort(descending=True, stable=True)  # by sequence, then by importance
    counts = [pruning.count(length) for length in batch.lengths]
    # the first `count` elements of `order` for each sequence
    chosen = [start + rank for start, count in zip(batch.bounds, counts, strict=False) for rank in range(count)]
    rows = order[send(chosen, device)].sort().values
    tokens, positions, types = (column[rows] for column in (batch.tokens, batch.positions, batch.types))
    return rows, Packed(tokens=tokens, positions=positions, types=types, bounds=(0, *accumulate(counts)))


def rows_after(rows: Int[Tensor, " some"], output_rows: Int[Tensor, " outputs"]) -> Int[Tensor, " outputs"]:
    """Return the indices of `output_rows` among the remaining rows.

    Args:
        rows: Indices of the remaining rows, ascending.
        output_rows: Row indices from before pruning.

    Raises:
        ModelError: If an output row was pruned; only the first row of each sequence always remains.
    """
    indices = torch.searchsorted(rows, output_rows).clamp(max=len(rows) - 1)
    if not torch.equal(rows[indices], output_rows):
        raise ModelError("hidden states of pruned tokens are needed: only the first token of a sequence always remains")
    return indices
