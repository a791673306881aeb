"""Span corruption (Raffel et al. 2020, section 3.1.4): the decoder predicts spans removed from the encoder's input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.objectives.base import Batch, Sample, SelfSupervised, Term, cross_entropy_term, pack_samples
from heedful.objectives.random_numbers import is_text_token, uniform
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.settings import SENTINEL


@dataclass(frozen=True, kw_only=True)
class SpanCorruption(SelfSupervised):
    """Remove spans of 3 tokens on average from each text, and replace each span by a sentinel token.

    For "Thank you for inviting me to your party last week" the input of the encoder may be "Thank you <X> me to your
    party <Y> </s>", and the target of the decoder "<X> for inviting <Y> last week </s>". Unchanged parts and spans
    alternate: each text begins with an unchanged part and ends with a span. The lengths of the spans are a random
    partition of the removed tokens, and the lengths of the unchanged parts one of the remaining tokens. All partitions
    are equally likely. No sentinel follows the last span in the target, as in the published code (the paper's figure
    has one).

    Special tokens at the beginning and at the end of a sequence are not removed; special tokens between text tokens
    are treated as text. A text of fewer than two tokens is not changed and has no targets.
    """

    tokenizer: Tokenizer
    start: int  # id of the token with which the decoder starts
    mask_prob: float = 0.15  # share of a text's tokens that are removed
    mean_noise_span_length: float = 3.0  # mean number of tokens in a span
    head = "language_model"
    _sentinels: NDArray[np.int32] = field(init=False, repr=False, compare=False)  # ids of the sentinel tokens, in order
    _end_id: int = field(init=False, repr=False, compare=False)  # id of the token that ends a text

    def __post_init__(self) -> None:
        sentinel_ids: list[int] = []
        while (sentinel_id := self.tokenizer.id(SENTINEL.format(len(sentinel_ids)))) is not None:
            sentinel_ids.append(sentinel_id)
        special = self.tokenizer.special
        if not sentinel_ids:
            raise HeedfulError(
                f"this tokenizer has no token {SENTINEL.format(0)}: span corruption puts {SENTINEL.format(0)}, "
                f"{SENTINEL.format(1)}, ... in place of spans; add them as special tokens (100 are usual), or use the "
                "tokenizer of a model that was pre-trained with span corruption"
            )
        if special.eos_or_sep is None:
            raise HeedfulError("this tokenizer has no token that ends a text: name it as eos_token")
        if not 0 < self.mask_prob < 1:
            raise HeedfulError(f"mask_prob is {self.mask_prob}; expected a share of the tokens between 0 and 1")
        if not 1 <= self.mean_noise_span_length < math.inf:
            raise HeedfulError(
                f"mean_noise_span_length is {self.mean_noise_span_length}; expected a number of tokens, at least 1"
            )
        # the dataclass is frozen, so these fields cannot be assigned
        object.__setattr__(self, "_sentinels", np.array(sentinel_ids, dtype=np.int32))
        object.__setattr__(self, "_end_id", special.eos_or_sep)

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return corrupted texts as encoder inputs, and their targets, also shifted right as decoder inputs.

        Every target token has weight 1: `Sample.weight` is not used, as in all objectives without labels.
        """
        pairs = [self.corrupt_sample(sample, key) for sample, key in zip(samples, keys, strict=True)]
        targets = pack_samples([target for _, target in pairs])
        return Batch(
            packed=pack_samples([source for source, _ in pairs]),
            decoder_input=targets.shift_right(self.start),
            targets=targets.tokens,
            weights=torch.ones(len(targets.tokens)),
        )

    def corrupt_sample(self, sample: Sample, key: int) -> tuple[Sample, Sample]:
        """Return (source, target): a sample of the corrupted sequences, and a sample of their targets.

        If the spans "b c" and "f" of one sequence are removed:

            tokens  a  b  c    d  e  f  </s>
            source  a <X>      d  e <Y> </s>
            target    <X> b c       <Y> f </s>
        """
        is_removed, span_starts, sentinels = self._choose_spans(sample, key)
        bounds = np.array(sample.bounds)
        # source: the first token of each span becomes its sentinel, and the other tokens of the span are left out
        source = sample.tokens.copy()
        source[span_starts] = sentinels
        in_source = ~is_removed
        in_source[span_starts] = True
        # target: the removed tokens of all sequences, with a sentinel before each span and an end token after each text
        removed_before = _count_before(is_removed)  # removed tokens before each position; above: 0 0 1 2 2 2 3 3
        removed_bounds = removed_before[bounds]  # removed tokens before each sequence, then of all
        has_targets = np.diff(removed_bounds) > 0  # whether each sequence has removed tokens
        target_ends = removed_bounds[1:][has_targets]
        # at equal positions, np.insert keeps the order of the inserts: the end of a text, then the next sentinel
        insert_positions = np.concatenate([target_ends, removed_before[span_starts]])
        insert_ids = np.concatenate([np.full(len(target_ends), self._end_id), sentinels])
        target = np.insert(sample.tokens[is_removed], insert_positions, insert_ids)
        # removed tokens + sentinels + end tokens before each boundary
        target_bounds = removed_bounds + np.searchsorted(span_starts, bounds) + _count_before(has_targets)
        return (
            Sample(
                tokens=source[in_source],
                types=sample.types[in_source],
                bounds=tuple(_count_before(in_source)[bounds].tolist()),
            ),
            Sample(tokens=target, types=np.zeros(len(target), dtype=np.uint8), bounds=tuple(target_bounds.tolist())),
        )

    def _choose_spans(self, sample: Sample, key: int) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int32]]:
        """Choose the spans of all sequences of a sample.

        Returns:
            (is_removed [tokens], span_starts [spans], sentinels [spans]): whether each token is in a span, the position
            of each span's first token, and the id of each span's sentinel.
        """
        is_text = is_text_token(sample.tokens, self.tokenizer)
        draws = uniform(key, len(is_text))
        is_removed = np.zeros(len(is_text), dtype=np.bool_)
        span_starts = [np.zeros(0, dtype=np.int64)]  # an empty array, since np.concatenate needs at least one
        span_indices = [np.zeros(0, dtype=np.int64)]  # index of each span in its text, which selects the sentinel
        for sequence_start, sequence_stop in pairwise(sample.bounds):
            text_positions = sequence_start + is_text[sequence_start:sequence_stop].nonzero()[0]
            if len(text_positions) == 0 or text_positions[0] == text_positions[-1]:
                continue  # fewer than two tokens of text
            text_start, text_stop = int(text_positions[0]), int(text_positions[-1]) + 1
            # a text of n tokens uses n - 2 random numbers
            edges = text_start + span_edges(
                draws[text_start : text_stop - 2], self.mask_prob, self.mean_noise_span_length, len(self._sentinels)
            )
            is_span = np.arange(len(edges)) % 2 == 1  # edges are [text_0, span_0, text_1, span_1, ...]
            is_removed[text_start:text_stop] = np.repeat(is_span, np.diff(edges, append=text_stop))
            span_starts.append(edges[1::2])
            span_indices.append(np.arange(len(edges) // 2))
        return is_removed, np.concatenate(span_starts), self._sentinels[np.concatenate(span_indices)]

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return one term, the cross-entropy of the removed tokens, the sentinels and the end tokens."""
        assert loaded.head is not None and batch.decoder_input is not None
        states = loaded.hidden_states(batch.packed, batch.decoder_input)
        return (cross_entropy_term("span_corruption", loaded.head(states, batch.decoder_input), batch.targets),)


def span_edges(draws: NDArray[np.float64], mask_prob: float, mean_length: float, max_spans: int) -> NDArray[np.int64]:
    """Return the boundaries [text_0, span_0, text_1, span_1, ...] in a text of n tokens: the first token of each part.

    text_i is the unchanged part before span_i; each part has at least one token. As in the published code, the number
    of removed tokens is round(n * mask_prob), at least 1 and at most n - 1, and the number of spans is
    round(removed tokens / mean_length), at least 1. It is at most the number of removed tokens, the number of unchanged
    tokens, and `max_spans`.

    Args:
        draws: Uniform random numbers [n - 2], from which the lengths of the parts are derived.
        mask_prob: Share of the tokens in spans.
        mean_length: Mean number of tokens in a span.
        max_spans: Maximum number of spans, which is the number of sentinels.

    >>> span_edges(np.array([0.5, 0.2, 0.9, 0.1, 0.4, 0.3]), 0.5, 2.0, 100).tolist()
    [0, 1, 3, 6]
    """
    n = len(draws) + 2
    num_removed = min(max(round(n * mask_prob), 1), n - 1)
    num_spans = max(1, min(round(num_removed / mean_length), num_removed, n - num_removed, max_spans))
    # a partition of k tokens uses k - 1 random numbers
    span_lengths = _random_partition(draws[: num_removed - 1], num_spans)
    text_lengths = _random_partition(draws[num_removed - 1 :], num_spans)
    lengths = np.stack([text_lengths, span_lengths], 1).ravel()  # text_0, span_0, text_1, ...
    return np.concatenate([[0], lengths.cumsum()[:-1]])


def _random_partition(draws: NDArray[np.float64], num_parts: int) -> NDArray[np.int64]:
    """Cut len(draws) + 1 tokens into parts, and return the lengths of the parts.

    Each random number belongs to the gap between two tokens. The cuts are in the gaps with the smallest numbers, so all
    partitions into this number of parts are equally likely.
    """
    cuts = np.sort(draws.argsort(kind="stable")[: num_parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=len(draws) + 1)


def _count_before(marked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the number of marked positions before each position, and then the number of all marked positions."""
    return np.concatenate([np.zeros(1, dtype=np.int64), marked.cumsum()])
