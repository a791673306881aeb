"""Masked language modelling: predict masked tokens (Devlin et al. 2019, section 3.1)."""

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
SPAN_STOP, MAX_SPAN_WORDS = 0.2, 10  # probability that a word ends its span; words of a span, at most
Positions = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MaskedLM(SelfSupervised):
    """A share of the tokens is predicted: 80 % of them are masked, 10 % replaced by a random token, 10 % unchanged.

    `mask_prob` is a share of tokens for each `mask_unit`: tokens one by one; whole words, where a word that would
    exceed the share is skipped, as in the published code of Devlin et al. 2019, and each piece is masked, replaced or
    unchanged on its own; or spans of 1 to 10 words, 3.8 on average, all treated alike (Joshi et al. 2020, section 3.1).
    Special tokens are never chosen, but may be replacements, which are from the whole vocabulary, as in the published
    code. Masks depend on the sample's key alone; with `num_static_masks` they repeat after that many epochs.
    """

    tokenizer: Tokenizer
    mask_prob: float = 0.15
    mask_unit: MaskUnit = "tokens"
    num_static_masks: int | None = None
    count: int | None = None  # targets of each sample, filled up with targets of weight 0; None: as mask_prob gives
    head: str = field(default="masked_lm", init=False)

    def __post_init__(self) -> None:
        if self.tokenizer.special.mask is None:
            raise HeedfulError("this tokenizer has no mask token: masked language modelling needs one")
        if not 0 < self.mask_prob < 1:
            raise HeedfulError(f"mask_prob is {self.mask_prob}; expected a share of the tokens between 0 and 1")
        if self.mask_unit == "words":
            _ = self.tokenizer.continues  # refused now if it is not known

    def samples(self, texts: Sequence[str], limit: int | None) -> list[Sample]:
        """Return texts as samples; a text of more than `limit` tokens is cut into windows without overlap."""
        samples = []
        for encoded in self.tokenizer.encode_batch(list(texts)):
            ids = encoded.ids
            for start in range(0, len(ids), limit or len(ids) or 1):
                part = ids[start : start + (limit or len(ids))]
                if self.free[list(part)].any():
                    samples.append(Sample.of([part], [encoded.types[start : start + len(part)]]))
        return samples

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the masked batch, and the chosen rows."""
        packed, mask = pack_samples(samples), self.tokenizer.special.mask
        tokens, starts = packed.tokens.numpy(), [0, *accumulate(map(len, samples))]
        rows_of: list[Positions] = []
        weights: list[NDArray[np.float32]] = []
        for start, sample, key in zip(starts, samples, keys, strict=False):
            places, action, replacement = self._draw(sample, key)
            tokens[start + places[action < 0.8]] = mask
            replaced = (action >= 0.8) & (action < 0.9)
            tokens[start + places[replaced]] = scale_to_integers(replacement[replaced], self.tokenizer.size)
            missing = 0 if self.count is None else self.count - len(places)
            rows_of.append(start + np.pad(places, (0, missing)))
            weights.append(np.pad(np.ones(len(places), dtype=np.float32), (0, missing)))
        rows = concat_long(rows_of)
        return Batch(
            packed=packed,
            targets=concat_long([sample.tokens for sample in samples])[rows],
            weights=torch.from_numpy(np.concatenate([*weights, np.zeros(0, dtype=np.float32)])),
            rows=rows,
            counts=(float(sum(part.sum(dtype=np.float64) for part in weights)),),  # on the CPU, so that no device waits
        )

    def scores(self, loaded: ModelBundle, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Return scores over the vocabulary of the chosen rows; `rows` are all hidden states, if they are known."""
        assert loaded.head is not None and batch.rows is not None
        chosen = loaded.hidden_states(batch.packed, output_rows=batch.rows) if rows is None else rows[batch.rows]
        return upcast(loaded.head(chosen, batch.packed))

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of each chosen row."""
        return F.cross_entropy(scores, batch.targets, reduction="none")

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return one term: the cross-entropy of the chosen rows, which alone are computed."""
        return (self.masked_term(loaded, loaded.hidden_states(batch.packed, output_rows=batch.rows), batch),)

    def masked_term(self, loaded: ModelBundle, chosen: Tensor, batch: Batch) -> Term:
        """Return the term for hidden states of the chosen rows."""
        assert loaded.head is not None
        weights = None if self.count is None else batch.weights
        return cross_entropy_term("mlm", loaded.head(chosen, batch.packed), batch.targets, weights)

    # -- masks ------------------------------------------------------------------------------------------------

    def _draw(self, sample: Sample, key: int) -> tuple[Positions, NDArray[np.float64], NDArray[np.float64]]:
        """The chosen positions of a sample, in order, and random numbers for the action and the replacement of each."""
        free = self._maskable(sample, key)
        most = int(free.sum())
        count = min(most, max(1, round(self.mask_prob * most)))
        if self.count is not None:
            count = min(count, self.count)
        drawn = uniform(key, 4 * len(sample)).reshape(4, len(sample))
        if self.mask_unit == "tokens":
            order = np.argsort(np.where(free, drawn[0], 2.0), kind="stable")
            places = np.sort(order[:count])
            return places, drawn[1, places], drawn[2, places]
        starts = self._word_starts(sample, free)
        if self.mask_unit == "words":
            places = _whole(starts, free, drawn[0], count)
            return places, drawn[1, places], drawn[2, places]
        places, of = _spans(starts, drawn[0], drawn[3], free, count)
        return places, drawn[1, of], drawn[2, places]

    def _maskable(self, sample: Sample, key: int) -> NDArray[np.bool_]:
        """Mark the positions of a sample that may be chosen: all ordinary tokens."""
        return self.free[sample.tokens]

    @cached_property
    def free(self) -> NDArray[np.bool_]:
        """Mark the tokens of the vocabulary that may be chosen."""
        return is_text_token(np.arange(self.tokenizer.size, dtype=np.int32), self.tokenizer)

    def _word_starts(self, sample: Sample, free: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mark the positions that begin a word: also after a special token, and at the beginning of a sequence."""
        starts = free & (
            self.tokenizer.starts(sample.tokens) if self.mask_unit == "words" or self._knows_words else True
        )
        starts[1:] |= free[1:] & ~free[:-1]
        bounds = np.array([bound for bound in sample.bounds[:-1] if bound < len(sample)], dtype=np.int64)
        starts[bounds] |= free[bounds]
        return starts

    @cached_property
    def _knows_words(self) -> bool:
        try:
            return bool(self.tokenizer.continues.size)
        except HeedfulError:
            return False


def _whole(starts: NDArray[np.bool_], free: NDArray[np.bool_], drawn: NDArray[np.float64], count: int) -> Positions:
    """Positions of whole words in random order; a word that would exceed the count is skipped."""
    word = np.where(free, np.cumsum(starts) - 1, -1)
    sizes = np.bincount(word[free], minlength=int(starts.sum()))
    order = np.argsort(drawn[starts], kind="stable")
    filled = np.cumsum(sizes[order])
    first = int(np.searchsorted(filled, count, side="right"))
    taken, left = [order[:first]], count - (int(filled[first - 1]) if first else 0)
    for number in order[first:].tolist():
        if left == 0:
            break
        if sizes[number] <= left:
            taken.append(np.array([number]))
            left -= int(sizes[number])
    chosen = np.zeros(len(sizes) + 1, dtype=np.bool_)  # the last one is for positions outside words
    chosen[np.concatenate(taken)] = True
    return np.flatnonzero(chosen[word])


def _spans(
    starts: NDArray[np.bool_],
    drawn: NDArray[np.float64],
    sizes: NDArray[np.float64],
    free: NDArray[np.bool_],
    count: int,
) -> tuple[Positions, Positions]:
    """Positions of spans of words, and the first position of each one's span."""
    owner = np.full(len(free), -1)
    places = np.flatnonzero(starts)
    order = places[np.argsort(drawn[places], kind="stable")]
    stops = np.append(places[1:], len(free))  # of each word, or later
    left = count
    for place in order.tolist():
        if left <= 0:
            break
        if owner[place] >= 0:
            continue
        share = sizes[place] * (
            1 - (1 - SPAN_STOP) ** MAX_SPAN_WORDS
        )  # of lengths up to the maximum, as in the published code
        words = min(MAX_SPAN_WORDS, 1 + int(log1p(-share) / log(1 - SPAN_STOP)))
        at = int(np.searchsorted(places, place))
        stop = min(int(stops[min(at + words, len(places)) - 1]), place + left)
        inside = np.arange(place, stop)
        blocked = np.flatnonzero(~free[inside] | (owner[inside] >= 0))
        inside = inside[: blocked[0]] if len(blocked) else inside
        owner[inside] = place
        left -= len(inside)
    chosen = np.flatnonzero(owner >= 0)
    return chosen, owner[chosen]


@dataclass(frozen=True, kw_only=True)
class MaskedLMWithPairs(MaskedLM):
    """Masked tokens, and a label for each pair: whether the second part follows, or whether both are swapped.

    The loss is the sum of both means (Devlin et al. 2019, appendix A.2; Lan et al. 2020, section 3.1).
    """

    name: Literal["nsp", "sop"] = "nsp"  # of the second term
    head: str = field(default="pretraining", init=False)
    term_weights: tuple[float, ...] = field(default=(1.0, 1.0), init=False)

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the masked batch with the label of each pair."""
        masked = super().batch(samples, keys)
        labels = concat_long([sample.target for sample in samples])
        counts = float(masked.weights.sum(dtype=torch.float64)), float((labels >= 0).sum())
        return replace(masked, labels=labels, counts=counts)

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return the terms of masked tokens and of pairs."""
        assert isinstance(loaded.head, PretrainingHead) and batch.rows is not None and batch.labels is not None
        firsts = batch.packed.first_rows()
        rows = loaded.hidden_states(batch.packed, output_rows=torch.cat([firsts, batch.rows]))
        tokens = loaded.head.masked(rows[len(firsts) :], batch.packed)
        pairs = loaded.head.next(rows[: len(firsts)], batch.packed.select(firsts))
        unpadded = self.count is None
        masked = cross_entropy_term("mlm", tokens, batch.targets, None if unpadded else batch.weights)
        real = None if unpadded else (batch.labels >= 0).to(batch.weights)
        return masked, cross_entropy_term(self.name, pairs, batch.labels.clamp(min=0), real)
