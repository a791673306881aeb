"""Span corruption: an encoder reads a text with spans taken out, a decoder writes them (Raffel et al. 2020, 3.1.4)."""

from __future__ import annotations

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
    """A share of each text's tokens is removed in spans of 3 on average; a sentinel replaces each span.

    The encoder reads "Thank you <X> me to your party <Y> week </s>", and the decoder writes "<X> for inviting <Y> last
    </s>". The lengths of spans and of the text between them are a random partition, all equally likely. A text begins
    with text and ends with a span, so that no sentinel follows the last span, as in the published code (the paper's
    figure has one). Special tokens stay in the source. A text of fewer than two tokens is not changed, and has no
    targets.
    """

    tokenizer: Tokenizer
    start: int  # the token with which the decoder begins
    mask_prob: float = 0.15
    mean_noise_span_length: float = 3.0  # tokens of a span
    head = "language_model"
    _sentinels: NDArray[np.int32] = field(init=False, repr=False, compare=False)
    _stop: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids: list[int] = []
        while (id := self.tokenizer.id(SENTINEL.format(len(ids)))) is not None:
            ids.append(id)
        special = self.tokenizer.special
        if not ids:
            raise HeedfulError(
                f"this tokenizer has no token {SENTINEL.format(0)}: span corruption puts {SENTINEL.format(0)}, "
                f"{SENTINEL.format(1)}, ... in place of spans; add them as special tokens (100 are usual), or use the "
                "tokenizer of a model that was pre-trained with span corruption"
            )
        if special.eos_or_sep is None:
            raise HeedfulError("this tokenizer has no token that ends a text: name it as eos_token")
        if not 0 < self.mask_prob < 1 or self.mean_noise_span_length < 1:
            raise HeedfulError(
                f"mask_prob is {self.mask_prob} and mean_noise_span_length {self.mean_noise_span_length}; expected a "
                "share below 1 and a number of tokens from 1"
            )
        object.__setattr__(self, "_sentinels", np.array(ids, dtype=np.int32))
        object.__setattr__(self, "_stop", special.eos_or_sep)

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return sources, decoder inputs (the spans, shifted right), and the spans as targets."""
        parts = [self.corrupted(sample, key) for sample, key in zip(samples, keys, strict=True)]
        spans = pack_samples([target for _, target in parts])
        return Batch(
            packed=pack_samples([source for source, _ in parts]),
            target=spans.shift_right(self.start) if len(spans.tokens) else spans,
            targets=spans.tokens,
            weights=torch.ones(len(spans.tokens)),
        )

    def corrupted(self, sample: Sample, key: int) -> tuple[Sample, Sample]:
        """Return a sample of the sources, and one of their targets."""
        noise, firsts, sentinels = self._spans(sample, key)
        bounds = np.array(sample.bounds)
        in_source, source = ~noise, sample.tokens.copy()
        in_source[firsts], source[firsts] = True, sentinels
        tokens = _before(noise)[bounds]  # number of removed tokens before each sequence
        asked = np.diff(tokens) > 0
        stops = tokens[1:][asked]
        # inserts at one position keep this order: the end of a text, the sentinel of the next one
        at = np.concatenate([stops, _before(noise)[firsts]])
        target = np.insert(sample.tokens[noise], at, np.concatenate([np.full(len(stops), self._stop), sentinels]))
        ends = tokens + np.searchsorted(firsts, bounds) + _before(asked)
        return (
            Sample(
                tokens=source[in_source],
                types=sample.types[in_source],
                bounds=tuple(_before(in_source)[bounds].tolist()),
            ),
            Sample(tokens=target, types=np.zeros(len(target), dtype=np.uint8), bounds=tuple(ends.tolist())),
        )

    def _spans(self, sample: Sample, key: int) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int32]]:
        """Mark the tokens of spans; the first position of each span, and its sentinel."""
        text = is_text_token(sample.tokens, self.tokenizer)
        shares = uniform(key, len(text))
        noise = np.zeros(len(text), dtype=np.bool_)
        firsts, numbers = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for first, last in pairwise(sample.bounds):
            inner = text[first:last].nonzero()[0]
            if len(inner) and inner[-1] > inner[0]:
                start, stop = first + int(inner[0]), first + int(inner[-1]) + 1
                edges = start + span_edges(
                    shares[start : stop - 2], self.mask_prob, self.mean_noise_span_length, len(self._sentinels)
                )
                noise[start:stop] = np.repeat(np.arange(len(edges)) % 2 == 1, np.diff(edges, append=stop))
                firsts.append(edges[1::2])
                numbers.append(np.arange(len(edges) // 2))
        return noise, np.concatenate(firsts), self._sentinels[np.concatenate(numbers)]

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return one term: the tokens of the spans, their sentinels and the end."""
        assert loaded.head is not None and batch.target is not None
        rows = loaded.hidden_states(batch.packed, batch.target)
        return (cross_entropy_term("span_corruption", loaded.head(rows, batch.target), batch.targets),)


def span_edges(shares: NDArray[np.float64], rate: float, mean: float, most: int) -> NDArray[np.int64]:
    """Return the positions at which text and spans begin, in turn, in a text of len(shares) + 2 tokens.

    As published: round(n rate) tokens, from 1 to n - 1, in round(tokens / mean) spans, from 1 to
    `most`, the number of sentinels, and at least one token of text before each.

    >>> span_edges(np.array([0.5, 0.2, 0.9, 0.1, 0.4, 0.3]), 0.5, 2.0, 100).tolist()
    [0, 1, 3, 6]
    """
    n = len(shares) + 2
    noise = min(max(round(n * rate), 1), n - 1)
    count = max(1, min(round(noise / mean), noise, n - noise, most))
    span_lengths, text_lengths = _lengths(shares[: noise - 1], count), _lengths(shares[noise - 1 :], count)
    return np.concatenate([[0], np.stack([text_lengths, span_lengths], 1).ravel().cumsum()[:-1]])


def _lengths(shares: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The lengths of `count` parts of len(shares) + 1 tokens, cut where the shares are smallest."""
    cuts = np.sort(shares.argsort(kind="stable")[: count - 1]) + 1
    return np.diff(cuts, prepend=0, append=len(shares) + 1)


def _before(marked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The number of marked positions before each position, and in all."""
    return np.concatenate([np.zeros(1, dtype=np.int64), marked.cumsum()])
