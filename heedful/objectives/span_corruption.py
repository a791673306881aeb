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
    """A share of each text's tokens is taken out in spans of 3 on average; each leaves a sentinel in its place.

    "Thank you <X> me to your party <Y> week </s>" is read, "<X> for inviting <Y> last </s>" is to be written. How long
    spans and what stands between them are is any partition, all as likely. A text begins with what is kept and ends
    with a span, so that, as in the published code, no sentinel follows the last span, which the paper's figure has.
    The special tokens around a text stay in the source. A text of fewer than two tokens stays whole, and nothing is
    asked of it.
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
                "tokenizer of a model that was pre-trained so"
            )
        if special.separator is None:
            raise HeedfulError("this tokenizer has no token that ends a text: name it as eos_token")
        if not 0 < self.mask_prob < 1 or self.mean_noise_span_length < 1:
            raise HeedfulError(
                f"mask_prob is {self.mask_prob} and mean_noise_span_length {self.mean_noise_span_length}; expected a "
                "share below 1 and a number of tokens from 1"
            )
        object.__setattr__(self, "_sentinels", np.array(ids, dtype=np.int32))
        object.__setattr__(self, "_stop", special.separator)

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Sources, what the decoder reads (the spans, one place to the right), and the spans as targets."""
        parts = [self.corrupted(sample, key) for sample, key in zip(samples, keys, strict=True)]
        spans = pack_samples([target for _, target in parts])
        return Batch(
            packed=pack_samples([source for source, _ in parts]),
            target=spans.shift_right(self.start) if len(spans.tokens) else spans,
            targets=spans.tokens,
            weights=torch.ones(len(spans.tokens)),
        )

    def corrupted(self, sample: Sample, key: int) -> tuple[Sample, Sample]:
        """The source of each sequence, and what is to be written for it."""
        noise, firsts, sentinels = self._taken(sample, key)
        bounds = np.array(sample.bounds)
        kept, source = ~noise, sample.tokens.copy()
        kept[firsts], source[firsts] = True, sentinels
        tokens = _before(noise)[bounds]  # that were taken before each sequence
        asked = np.diff(tokens) > 0
        stops = tokens[1:][asked]
        # where several are put into one place they come in this order: the end of a text, the next one's sentinel
        at = np.concatenate([stops, _before(noise)[firsts]])
        target = np.insert(sample.tokens[noise], at, np.concatenate([np.full(len(stops), self._stop), sentinels]))
        ends = tokens + np.searchsorted(firsts, bounds) + _before(asked)
        return (
            Sample(tokens=source[kept], types=sample.types[kept], bounds=tuple(_before(kept)[bounds].tolist())),
            Sample(tokens=target, types=np.zeros(len(target), dtype=np.uint8), bounds=tuple(ends.tolist())),
        )

    def _taken(self, sample: Sample, key: int) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int32]]:
        """Which tokens are in a span, where spans begin, and their sentinels."""
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
        """One: the tokens of the spans, their sentinels and the end."""
        assert loaded.head is not None and batch.target is not None
        rows = loaded.hidden_states(batch.packed, batch.target)
        return (cross_entropy_term("span_corruption", loaded.head(rows, batch.target), batch.targets),)


def span_edges(shares: NDArray[np.float64], rate: float, mean: float, most: int) -> NDArray[np.int64]:
    """Where a text of len(shares) + 2 tokens changes: at the first kept one, the first of a span, and so on in turn.

    As published: round(n rate) tokens, from 1 to n - 1, in round(tokens / mean) spans, from 1; no more than there are
    sentinels, and kept tokens to stand before each.

    >>> span_edges(np.array([0.5, 0.2, 0.9, 0.1, 0.4, 0.3]), 0.5, 2.0, 100).tolist()
    [0, 1, 3, 6]
    """
    n = len(shares) + 2
    noise = min(max(round(n * rate), 1), n - 1)
    count = max(1, min(round(noise / mean), noise, n - noise, most))
    taken, kept = _lengths(shares[: noise - 1], count), _lengths(shares[noise - 1 :], count)
    return np.concatenate([[0], np.stack([kept, taken], 1).ravel().cumsum()[:-1]])


def _lengths(shares: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The lengths of so many parts of len(shares) + 1 things: cut where the shares are smallest."""
    cuts = np.sort(shares.argsort(kind="stable")[: count - 1]) + 1
    return np.diff(cuts, prepend=0, append=len(shares) + 1)


def _before(marked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many are marked before each place, and in all."""
    return np.concatenate([np.zeros(1, dtype=np.int64), marked.cumsum()])
