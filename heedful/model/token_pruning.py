"""Token pruning: the upper layers of an encoder compute only the tokens to which the first token attends most.

The first token of each sequence, which the head reads, and a share of the others remain. The others are ranked once, by
the attention of the first token to them in the first pruned layer, as in EViT (Liang et al. 2022, section 3);
PoWER-BERT (Goyal et al. 2020) ranks tokens by the attention that they receive from all tokens. The hidden states of the
remaining tokens, which include their positions, are packed again, so that pruned tokens cost nothing.
"""

from __future__ import annotations

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


def first_token_attention(
    q: Float[Tensor, "sequences heads width"],
    k: Float[Tensor, "rows heads width"],
    lengths: Int[Tensor, " sequences"],
    scale: float,
) -> Float[Tensor, " rows"]:
    """Return the attention weight from the first token of a sequence to each of its tokens, the mean over heads.

    In head h, the weight of row j is softmax_j(scale q_h k_jh), over the rows of its sequence.

    Args:
        q: Queries of the first tokens.
        k: Keys of all tokens.
        lengths: Number of rows of each sequence, from 1.
        scale: Factor of the products.
    """
    sequences = _sequence_indices(lengths, len(k))
    dtype = torch.promote_types(k.dtype, torch.float32)
    logits = (q.to(dtype)[sequences] * k.to(dtype)).sum(-1) * scale  # [rows, heads]
    weights = (logits - torch.segment_reduce(logits, "max", lengths=lengths)[sequences]).exp()
    weights = weights / torch.segment_reduce(weights, "sum", lengths=lengths)[sequences]
    return weights.mean(1)


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
    importance = importance.index_fill(0, send(first_rows, device), 2.0)  # more than any other row
    order = importance.argsort(descending=True, stable=True)
    sequences = _sequence_indices(send(batch.lengths, device), len(order))
    order = order[sequences[order].argsort(stable=True)]  # by sequence, and then by importance
    counts = [pruning.count(length) for length in batch.lengths]
    # the first `count` elements of `order` for each sequence
    chosen = [start + rank for start, count in zip(batch.bounds, counts, strict=False) for rank in range(count)]
    rows = order[send(chosen, device)].sort().values
    tokens, positions, types = (column[rows] for column in (batch.tokens, batch.positions, batch.types))
    return rows, Packed(tokens=tokens, positions=positions, types=types, bounds=(0, *accumulate(counts)))


def _sequence_indices(lengths: Int[Tensor, " sequences"], rows: int) -> Int[Tensor, " rows"]:
    """Return the index of the sequence to which each row belongs."""
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=rows)


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
