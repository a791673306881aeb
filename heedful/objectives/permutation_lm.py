"""Permuted language modelling: tokens are predicted in any order (Yang et al. 2019, sections 2.2 and 2.3)."""

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

LONGEST = 5  # tokens of a span
Positions = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PermutationLM(SelfSupervised):
    """The mean of -log p(token | all tokens before it in a random order), over the last of the order of each sequence.

    Targets are a share of the text's tokens, 1 / K. With `spans`, as in pre-training (section 3.1), they are spans of
    1 to 5 tokens, all lengths equally likely, each at a random position in a context of its own that is K times as
    long (in the published code a length n has a probability in proportion to 1 / n, and spans begin at words); else
    any tokens. All other tokens are context, special tokens too: context comes first in the order, and, as in the
    published code, attends to all context, but to no target. A target attends to itself, the context and the targets
    before it; the row that predicts it, to the same without itself. Sequences may have any length.
    """

    tokenizer: Tokenizer
    share: float = 1 / 6  # of a text's tokens
    spans: bool = True
    head = "permutation_lm"

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise HeedfulError(f"share is {self.share}; expected more than 0 and less than 1")

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return each sequence followed by the rows that predict its targets, with the visibility of each row."""
        original, text = pack_samples(samples), [np.zeros(0, dtype=np.bool_)]
        draws = [np.zeros((3, 0))]
        for sample, key in zip(samples, keys, strict=True):
            text.append(is_text_token(sample.tokens, self.tokenizer))
            draws.append(uniform(key, 3 * len(sample)).reshape(3, -1))
        targets, sees = self._orders(original.bounds, np.concatenate(text), np.concatenate(draws, 1))
        counts = [len(positions) for positions in targets]
        ends = [stop + after for stop, after in zip(original.bounds[1:], accumulate(counts), strict=True)]
        rows = concat_long([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        return Batch(
            packed=_with_queries(original, concat_long(targets), rows, (0, *ends), sees),
            targets=original.tokens[concat_long(targets)],
            weights=torch.ones(len(rows)),
            rows=rows,
        )

    def _orders(
        self, bounds: Sequence[int], text: NDArray[np.bool_], draws: NDArray[np.float64]
    ) -> tuple[list[Positions], tuple[Tensor, ...]]:
        """Positions of each sequence's targets in the batch, and the visibility of its rows and its targets' rows."""
        positions, sees = [], []
        for start, stop in pairwise(bounds):
            inner, drawn = text[start:stop].nonzero()[0], draws[:, start:stop]
            targets = inner[
                draw_spans(drawn[:2, : len(inner)], self.share) if self.spans else self._any(drawn[0, inner])
            ]
            rank = np.full(stop - start, -1)  # in the order; of context -1
            rank[targets[drawn[2, targets].argsort(kind="stable")]] = np.arange(len(targets))
            before = torch.from_numpy(rank) < torch.from_numpy(rank.clip(0))[:, None]
            queries = before[torch.from_numpy(targets)]
            positions.append(start + targets)
            sees.append(torch.cat([before.fill_diagonal_(True), queries]))
        return positions, tuple(sees)

    def _any(self, drawn: NDArray[np.float64]) -> Positions:
        """A share of the tokens, those with the smallest random numbers, in order."""
        count = max(1, round(len(drawn) * self.share))
        return np.sort(drawn.argsort(kind="stable")[:count])

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return one term: the targets."""
        encoder = loaded.config.model.encoder
        if not loaded.config.model.embedding.query or not isinstance(encoder and encoder.relation, TransformerXl):
            raise HeedfulError(
                "permutation language modelling needs two-stream attention: embedding.query = true, and the relation "
                '"transformer_xl"'
            )
        assert loaded.head is not None and batch.rows is not None
        rows = loaded.hidden_states(batch.packed, output_rows=batch.rows)
        return (cross_entropy_term("plm", loaded.head(rows, batch.packed), batch.targets),)


def draw_spans(drawn: NDArray[np.float64], share: float) -> Positions:
    """Return positions of spans in contexts end to end; the last context has the same share, and at least one token.

    >>> draw_spans(np.array([[0.3, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], [0.0, 0.6, 0.9, 0, 0, 0, 0, 0]]), 0.5).tolist()
    [0, 1, 5, 7]
    """
    n = drawn.shape[1]
    if n == 0:
        return np.zeros(0, dtype=np.int64)
    lengths = 1 + scale_to_integers(drawn[0], LONGEST)
    ends = np.rint(lengths.cumsum() / share).astype(np.int64)
    whole = min(int(np.searchsorted(ends, n, side="right")), n - 1)  # contexts
    starts = np.concatenate([[0], ends[:whole]])
    room = np.diff(starts, append=n)
    lengths = np.append(lengths[:whole], round(room[-1] * share))
    if not lengths.sum():
        lengths[-1] = 1
    starts += (drawn[1, : whole + 1] * (room - lengths + 1)).astype(np.int64)
    return np.repeat(starts - lengths.cumsum() + lengths, lengths) + np.arange(lengths.sum())


def _with_queries(
    original: Packed, targets: Tensor, rows: Tensor, bounds: tuple[int, ...], sees: tuple[Tensor, ...]
) -> Packed:
    """The sequences, each followed by rows at the positions of its targets, whose tokens are not read."""
    known = torch.ones(bounds[-1], dtype=torch.bool)
    known[rows] = False

    def joined(values: Tensor, queries: Tensor | int) -> Tensor:
        """The values of the text's rows, and those of the rows that predict."""
        every = torch.empty(bounds[-1], dtype=torch.long)
        every[known] = values
        every[rows] = queries
        return every

    return Packed(
        tokens=joined(original.tokens, 0),
        positions=joined(original.positions, original.positions[targets]),
        types=joined(original.types, original.types[targets]),
        bounds=bounds,
        key_lengths=tuple(original.lengths),
        visibility=sees,
    )
