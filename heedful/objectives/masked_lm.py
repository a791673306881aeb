"""Masked language modelling (Devlin et al. 2019, section 3.1): single tokens, whole words or spans are masked.

`MaskedLMWithPairs` adds next sentence prediction or sentence order prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import log, log1p
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.model.heads import PretrainingHead
from heedful.objectives.base import (
    Batch,
    Sample,
    SelfSupervised,
    Term,
    concat_long,
    cross_entropy_term,
    pack_samples,
    upcast,
)
from heedful.objectives.random_numbers import is_text_token, scale_to_integers, uniform
from heedful.tokenizer import Tokenizer

MaskUnit = Literal["tokens", "words", "spans"]
SPAN_STOP = 0.2  # probability that a span ends after a word
MAX_SPAN_WORDS = 10  # maximum words in a span
MASK_SHARE = 0.8  # share of the targets that are masked
REPLACED_UNTIL = 0.9  # the next share, from 0.8 to 0.9, is replaced by random tokens; the rest is unchanged
Positions = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MaskedLM(SelfSupervised):
    """Predict a share of the tokens. 80 % of these targets are masked, 10 % replaced by a random token, 10 % unchanged.

    `mask_prob` is the share of targets in a sample. `mask_unit` is the unit in which targets are chosen:

    * tokens: one by one.
    * words: whole words. A word that would exceed the share is skipped, as in the published code of Devlin et al. 2019.
      Each token of a word is masked, replaced or unchanged independently.
    * spans: 1 to 10 words, 3.8 on average. All tokens of a span are treated alike (Joshi et al. 2020, section 3.1).

    Special tokens are never targets. Random replacements come from the whole vocabulary, special tokens included, as in
    the published code. Masks depend only on the sample's key. With `num_static_masks` they repeat after that number of
    epochs.
    """

    tokenizer: Tokenizer
    mask_prob: float = 0.15
    mask_unit: MaskUnit = "tokens"
    num_static_masks: int | None = None
    target_count: int | None = None  # fixed number of targets per sample, padded with weight 0; None for no padding
    head: str = field(default="masked_lm", init=False)

    def __post_init__(self) -> None:
        if self.tokenizer.special.mask is None:
            raise HeedfulError("this tokenizer has no mask token: masked language modelling needs one")
        if not 0 < self.mask_prob < 1:
            raise HeedfulError(f"mask_prob is {self.mask_prob}; expected a share of the tokens between 0 and 1")
        if self.mask_unit == "words":
            _ = self.tokenizer.continues  # raises a HeedfulError if the tokenizer does not know where words begin

    def samples(self, texts: Sequence[str], limit: int | None) -> list[Sample]:
        """Encode texts as samples, and cut a text of more than `limit` tokens into windows without overlap.

        Windows without text tokens are left out. If `limit` is None, texts are not cut.
        """
        samples = []
        for encoded in self.tokenizer.encode_batch(list(texts)):
            window_size = limit or len(encoded.ids) or 1
            for start in range(0, len(encoded.ids), window_size):
                window = slice(start, start + window_size)
                ids = encoded.ids[window]
                if self.is_text_id[list(ids)].any():
                    samples.append(Sample.of([ids], [encoded.types[window]]))
        return samples

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the masked batch with the original tokens of the chosen positions as targets."""
        packed = pack_samples(samples)
        mask_id = self.tokenizer.special.mask
        tokens = packed.tokens.numpy()
        starts = [0, *accumulate(map(len, samples))]
        sample_rows: list[Positions] = []  # packed positions of the targets of each sample
        weights: list[NDArray[np.float32]] = []
        for start, sample, key in zip(starts, samples, keys, strict=False):
            positions, action, replacement = self._draw(sample, key)
            tokens[start + positions[action < MASK_SHARE]] = mask_id
            is_replaced = (action >= MASK_SHARE) & (action < REPLACED_UNTIL)
            tokens[start + positions[is_replaced]] = scale_to_integers(replacement[is_replaced], self.tokenizer.size)
            padding = 0 if self.target_count is None else self.target_count - len(positions)
            sample_rows.append(start + np.pad(positions, (0, padding)))
            weights.append(np.pad(np.ones(len(positions), dtype=np.float32), (0, padding)))
        rows = concat_long(sample_rows)
        target_total = sum(part.sum(dtype=np.float64) for part in weights)  # on the CPU, so that no device has to wait
        return Batch(
            packed=packed,
            targets=concat_long([sample.tokens for sample in samples])[rows],
            weights=torch.from_numpy(np.concatenate([*weights, np.zeros(0, dtype=np.float32)])),
            rows=rows,
            counts=(float(target_total),),
        )

    def scores(self, loaded: ModelBundle, batch: Batch, hidden_states: Tensor | None = None) -> Tensor:
        """Return the scores over the vocabulary of the chosen rows.

        Args:
            loaded: The model.
            batch: The masked batch.
            hidden_states: Hidden states of all tokens of the batch. If None, those of the masked tokens are computed.
        """
        assert loaded.head is not None and batch.rows is not None
        if hidden_states is None:
            masked_states = loaded.hidden_states(batch.packed, output_rows=batch.rows)
        else:
            masked_states = hidden_states[batch.rows]
        return upcast(loaded.head(masked_states, batch.packed))

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy at each chosen position."""
        return F.cross_entropy(scores, batch.targets, reduction="none")

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return one term, the cross-entropy at the chosen positions. Scores of other positions are not computed."""
        return (self.masked_term(loaded, loaded.hidden_states(batch.packed, output_rows=batch.rows), batch),)

    def masked_term(self, loaded: ModelBundle, chosen: Tensor, batch: Batch) -> Term:
        """Return the cross-entropy term from the hidden states at the chosen positions."""
        assert loaded.head is not None
        weights = None if self.target_count is None else batch.weights
        return cross_entropy_term("mlm", loaded.head(chosen, batch.packed), batch.targets, weights)

    # -- choice of the targets ----------------------------------------------------------------------------------

    def _draw(self, sample: Sample, key: int) -> tuple[Positions, NDArray[np.float64], NDArray[np.float64]]:
        """Choose the target positions of a sample, in ascending order.

        Returns:
            The positions; and two uniform random numbers for each. The first random number decides whether the token is
            masked, replaced or unchanged. The second one picks the replacement.
        """
        maskable = self._maskable(sample, key)
        maskable_count = int(maskable.sum())
        count = min(maskable_count, max(1, round(self.mask_prob * maskable_count)))
        if self.target_count is not None:
            count = min(count, self.target_count)
        order, action, replacement, span_length = uniform(key, 4 * len(sample)).reshape(4, len(sample))
        if self.mask_unit == "tokens":
            random_order = np.argsort(np.where(maskable, order, 2.0), kind="stable")
            positions = np.sort(random_order[:count])
            return positions, action[positions], replacement[positions]
        starts = self._word_starts(sample, maskable)
        if self.mask_unit == "words":
            positions = _choose_words(starts, maskable, order, count)
            return positions, action[positions], replacement[positions]
        positions, span_starts = _choose_spans(starts, maskable, order, span_length, count)
        return positions, action[span_starts], replacement[positions]

    def _maskable(self, sample: Sample, key: int) -> NDArray[np.bool_]:
        """Mark the positions of a sample that may be chosen: all text tokens."""
        return self.is_text_id[sample.tokens]

    @cached_property
    def is_text_id(self) -> NDArray[np.bool_]:
        """Mark the ids of the vocabulary that are text tokens, [vocabulary]."""
        return is_text_token(np.arange(self.tokenizer.size, dtype=np.int32), self.tokenizer)

    def _word_starts(self, sample: Sample, maskable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mark the positions that begin a word.

        A text token that is the first of a sequence, or follows a special token, always begins a word. If the tokenizer
        does not know where words begin, every token is a word.
        """
        if self.mask_unit == "words" or self._knows_words:
            starts = maskable & self.tokenizer.starts(sample.tokens)
        else:
            starts = maskable.copy()
        starts[1:] |= maskable[1:] & ~maskable[:-1]
        bounds = np.array([bound for bound in sample.bounds[:-1] if bound < len(sample)], dtype=np.int64)
        starts[bounds] |= maskable[bounds]
        return starts

    @cached_property
    def _knows_words(self) -> bool:
        """Whether the tokenizer knows where words begin."""
        try:
            return bool(self.tokenizer.continues.size)
        except HeedfulError:
            return False


def _choose_words(
    starts: NDArray[np.bool_], maskable: NDArray[np.bool_], draws: NDArray[np.float64], count: int
) -> Positions:
    """Choose whole words in random order until they have `count` tokens. A word that would exceed `count` is skipped.

    Args:
        starts: Marks the positions that begin a word.
        maskable: Marks the positions that belong to words.
        draws: A random number for each position. A word's rank in the random order depends on that of its first token.
        count: Maximum number of positions to return.
    """
    word_of = np.where(maskable, np.cumsum(starts) - 1, -1)  # index of the word at each position; -1 outside words
    sizes = np.bincount(word_of[maskable], minlength=int(starts.sum()))
    random_order = np.argsort(draws[starts], kind="stable")
    total_sizes = np.cumsum(sizes[random_order])
    fitting = int(np.searchsorted(total_sizes, count, side="right"))  # words before the first one that is too long
    remaining = count - (int(total_sizes[fitting - 1]) if fitting else 0)
    is_chosen = np.zeros(len(sizes) + 1, dtype=np.bool_)  # the last element is for positions outside words
    is_chosen[random_order[:fitting]] = True
    for word in random_order[fitting:].tolist():
        if remaining == 0:
            break
        if sizes[word] <= remaining:
            is_chosen[word] = True
            remaining -= int(sizes[word])
    return np.flatnonzero(is_chosen[word_of])


def _choose_spans(
    starts: NDArray[np.bool_],
    maskable: NDArray[np.bool_],
    draws: NDArray[np.float64],
    length_draws: NDArray[np.float64],
    count: int,
) -> tuple[Positions, Positions]:
    """Choose spans of words in random order until they have `count` tokens.

    Args:
        starts: Marks the positions that begin a word.
        maskable: Marks the positions that belong to words.
        draws: A random number for each position. A span begins at a word, and its rank in the random order depends on
            the random number of that word's first token.
        length_draws: A random number for each position, which decides the length of a span that begins there.
        count: Maximum number of positions to return.

    Returns:
        The chosen positions, ascending; and, for each, the first position of its span.
    """
    span_of = np.full(len(maskable), -1)  # first position of the span at each position; -1 outside spans
    word_starts = np.flatnonzero(starts)
    random_order = word_starts[np.argsort(draws[word_starts], kind="stable")]
    next_starts = np.append(word_starts[1:], len(maskable))  # for each word, the first position of the next word
    # the geometric distribution is cut at the maximum length, as in the published code
    max_share = 1 - (1 - SPAN_STOP) ** MAX_SPAN_WORDS
    remaining = count
    for start in random_order.tolist():
        if remaining <= 0:
            break
        if span_of[start] >= 0:
            continue
        share = length_draws[start] * max_share
        words = min(MAX_SPAN_WORDS, 1 + int(log1p(-share) / log(1 - SPAN_STOP)))
        first_word = int(np.searchsorted(word_starts, start))
        stop = min(int(next_starts[min(first_word + words, len(word_starts)) - 1]), start + remaining)
        inside = np.arange(start, stop)
        blocked = np.flatnonzero(~maskable[inside] | (span_of[inside] >= 0))
        inside = inside[: blocked[0]] if len(blocked) else inside
        span_of[inside] = start
        remaining -= len(inside)
    chosen = np.flatnonzero(span_of >= 0)
    return chosen, span_of[chosen]


@dataclass(frozen=True, kw_only=True)
class MaskedLMWithPairs(MaskedLM):
    """Masked language modelling, plus the classification of each pair of segments.

    The label is 1 if the second segment is from another document (`nsp`, Devlin et al. 2019, appendix A.2), or if the
    segments are swapped (`sop`, Lan et al. 2020, section 3.1), else 0. The loss is the sum of both mean losses.
    """

    name: Literal["nsp", "sop"] = "nsp"  # name of the second term
    head: str = field(default="pretraining", init=False)
    term_weights: tuple[float, ...] = field(default=(1.0, 1.0), init=False)

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the masked batch with the label of each pair, or -1 for a sequence of padding."""
        masked = super().batch(samples, keys)
        labels = concat_long([sample.target for sample in samples])
        counts = float(masked.weights.sum(dtype=torch.float64)), float((labels >= 0).sum())
        return replace(masked, labels=labels, counts=counts)

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return the cross-entropy of masked tokens and the cross-entropy of pairs."""
        assert isinstance(loaded.head, PretrainingHead) and batch.rows is not None and batch.labels is not None
        first_rows = batch.packed.first_rows()
        pair_count = len(first_rows)
        states = loaded.hidden_states(batch.packed, output_rows=torch.cat([first_rows, batch.rows]))
        token_scores = loaded.head.masked(states[pair_count:], batch.packed)
        pair_scores = loaded.head.next(states[:pair_count], batch.packed.select(first_rows))
        token_weights = pair_weights = None
        if self.target_count is not None:  # targets and pairs may be padding
            token_weights, pair_weights = batch.weights, (batch.labels >= 0).to(batch.weights)
        return (
            cross_entropy_term("mlm", token_scores, batch.targets, token_weights),
            cross_entropy_term(self.name, pair_scores, batch.labels.clamp(min=0), pair_weights),
        )
