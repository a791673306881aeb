"""Permutation language modelling: predict tokens in a random order (Yang et al. 2019, sections 2.2 and 2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.model.config import TransformerXl
from heedful.objectives.base import Batch, Sample, SelfSupervised, Term, concat_long, cross_entropy_term, pack_samples
from heedful.objectives.random_numbers import is_text_token, scale_to_integers, uniform
from heedful.packed import Packed
from heedful.tokenizer import Tokenizer

MAX_SPAN_TOKENS = 5  # maximum tokens in a span
Positions = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PermutationLM(SelfSupervised):
    """The mean of -log p(target | context and the targets before it in a random order).

    The share of the text's tokens that are targets is 1 / K in the paper. With `spans`, as in pre-training (section
    3.1), targets are spans of 1 to 5 tokens, all lengths equally likely. Each span is at a random position in its own
    context, which is K times as long. (In the published code a length n has a probability in proportion to 1 / n, and
    spans begin at words.) Without `spans`, targets are single tokens.

    All tokens that are not targets are context, special tokens included. As in the published code, a context token
    attends to all context tokens and to no target. A target attends to itself, to the context and to the targets before
    it in the random order. The query that predicts a target attends to the same tokens except the target itself.
    Sequences may have any length.
    """

    tokenizer: Tokenizer
    share: float = 1 / 6  # share of the text's tokens that are targets
    spans: bool = True
    head = "permutation_lm"

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise HeedfulError(f"share is {self.share}; expected more than 0 and less than 1")

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return each sequence followed by one query per target, with a visibility mask."""
        original = pack_samples(samples)
        is_text = [np.zeros(0, dtype=np.bool_)]
        draws = [np.zeros((3, 0))]
        for sample, key in zip(samples, keys, strict=True):
            is_text.append(is_text_token(sample.tokens, self.tokenizer))
            draws.append(uniform(key, 3 * len(sample)).reshape(3, -1))
        targets, visibility = self._choose_targets(original.bounds, np.concatenate(is_text), np.concatenate(draws, 1))
        counts = [len(positions) for positions in targets]
        query_totals = accumulate(counts)  # queries up to the end of each sequence
        ends = [stop + total for stop, total in zip(original.bounds[1:], query_totals, strict=True)]
        query_rows = concat_long([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        target_positions = concat_long(targets)
        return Batch(
            packed=_with_queries(original, target_positions, query_rows, (0, *ends), visibility),
            targets=original.tokens[target_positions],
            weights=torch.ones(len(query_rows)),
            rows=query_rows,
        )

    def _choose_targets(
        self, bounds: Sequence[int], is_text: NDArray[np.bool_], draws: NDArray[np.float64]
    ) -> tuple[list[Positions], tuple[Tensor, ...]]:
        """Choose the targets of each sequence and their random order.

        Args:
            bounds: Bounds of the sequences.
            is_text: Marks the tokens that may be targets, [tokens].
            draws: Uniform random numbers, [3, tokens].

        Returns:
            The positions of each sequence's targets in the batch; and, for each sequence, a mask of the tokens that
            each token and then each query attends to, [tokens + targets, tokens].
        """
        positions, visibility = [], []
        for start, stop in pairwise(bounds):
            candidates = is_text[start:stop].nonzero()[0]
            sequence_draws = draws[:, start:stop]
            if self.spans:
                targets = candidates[draw_spans(sequence_draws[:2, : len(candidates)], self.share)]
            else:
                targets = candidates[self._draw_tokens(sequence_draws[0, candidates])]
            rank = np.full(stop - start, -1)  # rank of each target in the random order; -1 for context
            rank[targets[sequence_draws[2, targets].argsort(kind="stable")]] = np.arange(len(targets))
            comes_before = torch.from_numpy(rank) < torch.from_numpy(rank.clip(0))[:, None]
            seen_by_queries = comes_before[torch.from_numpy(targets)]
            seen_by_tokens = comes_before.fill_diagonal_(True)
            positions.append(start + targets)
            visibility.append(torch.cat([seen_by_tokens, seen_by_queries]))
        return positions, tuple(visibility)

    def _draw_tokens(self, draws: NDArray[np.float64]) -> Positions:
        """Return the indices of the smallest `share` of the random numbers, at least one, in ascending order."""
        count = max(1, round(len(draws) * self.share))
        return np.sort(draws.argsort(kind="stable")[:count])

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return one term, the cross-entropy of the targets."""
        encoder = loaded.config.model.encoder
        if not loaded.config.model.embedding.query or not isinstance(encoder and encoder.relation, TransformerXl):
            raise HeedfulError(
                "permutation language modelling needs two-stream attention: embedding.query = true, and the relation "
                '"transformer_xl"'
            )
        assert loaded.head is not None and batch.rows is not None
        states = loaded.hidden_states(batch.packed, output_rows=batch.rows)
        return (cross_entropy_term("plm", loaded.head(states, batch.packed), batch.targets),)


def draw_spans(draws: NDArray[np.float64], share: float) -> Positions:
    """Return the positions of the tokens of random spans, in ascending order. There is at least one position.

    The text is divided into contexts, and each context has one span with this share of its tokens. The last context may
    be cut, and its span is shortened in proportion.

    Args:
        draws: Uniform random numbers for the lengths and for the positions of the spans, [2, tokens].
        share: Share of the tokens in spans.

    >>> draw_spans(np.array([[0.3, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], [0.0, 0.6, 0.9, 0, 0, 0, 0, 0]]), 0.5).tolist()
    [0, 1, 5, 7]
    """
    tokens = draws.shape[1]
    if tokens == 0:
        return np.zeros(0, dtype=np.int64)
    lengths = 1 + scale_to_integers(draws[0], MAX_SPAN_TOKENS)
    ends = np.rint(lengths.cumsum() / share).astype(np.int64)
    complete_contexts = min(int(np.searchsorted(ends, tokens, side="right")), tokens - 1)  # all but the last one
    starts = np.concatenate([[0], ends[:complete_contexts]])
    context_sizes = np.diff(starts, append=tokens)
    lengths = np.append(lengths[:complete_contexts], round(context_sizes[-1] * share))
    if not lengths.sum():
        lengths[-1] = 1
    starts += (draws[1, : complete_contexts + 1] * (context_sizes - lengths + 1)).astype(np.int64)
    return np.repeat(starts - lengths.cumsum() + lengths, lengths) + np.arange(lengths.sum())


def _with_queries(
    original: Packed, targets: Tensor, query_rows: Tensor, bounds: tuple[int, ...], visibility: tuple[Tensor, ...]
) -> Packed:
    """Return the sequences, each followed by its queries.

    A query has the position and the token type of its target. The token id of a query is not read.

    Args:
        original: The sequences.
        targets: Packed positions of the targets in `original`.
        query_rows: Packed positions of the queries in the result.
        bounds: Bounds of the sequences in the result.
        visibility: For each sequence, a mask of the keys that each token and each query attends to.
    """
    is_token = torch.ones(bounds[-1], dtype=torch.bool)
    is_token[query_rows] = False

    def merge(token_values: Tensor, query_values: Tensor | int) -> Tensor:
        """Interleave the values of tokens and of queries."""
        merged = torch.empty(bounds[-1], dtype=torch.long)
        merged[is_token] = token_values
        merged[query_rows] = query_values
        return merged

    return Packed(
        tokens=merge(original.tokens, 0),
        positions=merge(original.positions, original.positions[targets]),
        types=merge(original.types, original.types[targets]),
        bounds=bounds,
        key_lengths=tuple(original.lengths),
        visibility=visibility,
    )
