"""Token pruning: the upper layers of an encoder process only the tokens that receive the most attention.

A share of each sequence's tokens remains, with the first token, which the head reads, among them. The others are ranked
once, by the attention that they receive in the first pruned layer: the mean of that from the first token, as in EViT
(Liang et al. 2022, arXiv:2202.07800), and that from the mean hidden state of all tokens. PoWER-BERT (Goyal et al. 2020,
section 3.2) adds up the attention from each token instead, which costs more. The hidden states of the remaining tokens,
which include their positions, are packed again, so that pruned tokens cost nothing. Training prunes too: a model that
is fine-tuned with a pruning adapts to it.
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
from heedful.nn.layers import segment_means
from heedful.packed import Packed, send

MIN_TOKENS = 16  # tokens that remain of each sequence at least: in short texts, pruning saves little and loses the most


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


def first_and_mean(x: Float[Tensor, "rows width"], batch: Packed) -> Float[Tensor, "sequences 2 width"]:
    """Return the first row of each sequence and the mean of its rows; arbitrary numbers for an empty one."""
    first_rows = [min(start, len(x) - 1) for start in batch.bounds[:-1]]
    sequences, lengths = _sequences(batch, x.device)
    return torch.stack([x[send(first_rows, x.device)], segment_means(x, sequences, lengths)], 1)


def received_attention(
    q: Float[Tensor, "sequences queries heads width"], k: Float[Tensor, "rows heads width"], batch: Packed
) -> Float[Tensor, " rows"]:
    """Return the attention weight that each row receives, the mean over the heads and the queries of its sequence.

    In head h, query i of a sequence gives its row j the weight softmax_j(q_ih k_jh).

    Args:
        q: Queries of each sequence, already scaled.
        k: Keys of all rows.
        batch: The batch of these rows.
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    sequences, lengths = _sequences(batch, k.device)
    logits = torch.cat([torch.einsum("jhd,jhd->jh", query[sequences], k) for query in q.unbind(1)], 1)
    weights = (logits - torch.segment_reduce(logits, "max", lengths=lengths)[sequences]).exp()
    sums = weights.new_zeros(len(q), weights.shape[1]).index_add_(0, sequences, weights)
    return (weights / sums[sequences]).mean(1)


def _sequences(batch: Packed, device: torch.device) -> tuple[Int[Tensor, " rows"], Int[Tensor, " sequences"]]:
    """Return the index of each row's sequence, and the length of each sequence."""
    lengths = send(batch.lengths, device)
    return torch.arange(len(batch), device=device).repeat_interleave(lengths, output_size=batch.bounds[-1]), lengths


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
    sequences, _ = _sequences(batch, device)
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
