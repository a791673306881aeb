"""BLEU as sacrebleu computes it (Papineni et al. 2002, Post 2018), with the signature that names the variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import Result, require_equal, require_examples, require_same_length
from heedful.tasks.specs.seq2seq import BleuTokenizer, has_bleu

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

ORDER = 4  # words in the longest n-grams
STATISTICS = 2 + 2 * ORDER  # counts per text: predicted words, gold words, correct n-grams and predicted n-grams by n
INSTALL_HINT = "BLEU needs sacrebleu, which is not installed: pip install 'heedful[translate]'"


def _scorer(words: BleuTokenizer = "13a", lower_case: bool = False) -> BLEU:
    """Return sacrebleu's scorer; raise HeedfulError if sacrebleu is not installed."""
    if not has_bleu():
        raise HeedfulError(INSTALL_HINT)
    from sacrebleu.metrics.bleu import BLEU

    # force: suppresses warnings about tokenized texts
    return BLEU(lowercase=lower_case, force=True, tokenize=words)


def bleu_statistics(prediction: str, gold: str, words: BleuTokenizer = "13a", lower_case: bool = False) -> list[int]:
    """Return the statistics of one text. BLEU of a corpus is computed from the sums of these over its texts."""
    score = _scorer(words, lower_case).corpus_score([prediction], [[gold]])
    return [score.sys_len, score.ref_len, *score.counts, *score.totals]


def bleu_of(sums: Float64[np.ndarray, "replicates statistics"]) -> Float64[np.ndarray, " replicates"]:
    """Return BLEU, from 0 to 1: min(1, exp(1 - gold / predicted)) times the geometric mean of the n-gram precisions.

    Here `gold` and `predicted` count words. A precision of 0 is smoothed by sacrebleu's method "exp".
    """
    scorer = _scorer()
    scores = []
    for predicted_words, gold_words, *ngrams in np.rint(sums).astype(int).tolist():
        correct, predicted = ngrams[:ORDER], ngrams[ORDER:]
        bleu = scorer.compute_bleu(correct, predicted, predicted_words, gold_words, smooth_method="exp")
        scores.append(bleu.score / 100)
    return np.array(scores, dtype=np.float64)


def bleu_is_informative(golds: Sequence[str], words: BleuTokenizer) -> bool:
    """Whether BLEU can rank models on texts like these (see `Bleu.has_short_texts`)."""
    return not Bleu(words=words).update(golds, golds).has_short_texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Bleu:
    """BLEU over texts, from the sums of their statistics."""

    words: BleuTokenizer = "13a"  # tokenizer that splits texts into words
    lower_case: bool = False  # whether texts are compared in lower case
    count: int = 0  # texts
    short: int = 0  # gold texts with fewer words than the longest n-grams
    sums: tuple[int, ...] = (0,) * STATISTICS  # sums of `bleu_statistics` over texts

    @property
    def has_short_texts(self) -> bool:
        """Whether most gold texts are short. BLEU is then 0 for any prediction, or depends on a few longer texts."""
        return 2 * self.short > self.count

    def update(self, predictions: Sequence[str], golds: Sequence[str]) -> Bleu:
        """Add predicted texts and their gold texts."""
        require_same_length(len(predictions), len(golds), "texts", "gold texts")
        return self.update_statistics([self.statistics(*pair) for pair in zip(predictions, golds, strict=True)])

    def statistics(self, prediction: str, gold: str) -> list[int]:
        """Return the statistics of one text."""
        return bleu_statistics(prediction, gold, self.words, self.lower_case)

    def update_statistics(self, rows: Sequence[Sequence[int]]) -> Bleu:
        """Add texts by their statistics, [texts, statistics]."""
        sums = tuple(map(sum, zip(self.sums, *rows, strict=True)))
        short = self.short + sum(row[1] < ORDER for row in rows)
        return replace(self, count=self.count + len(rows), short=short, sums=sums)

    def merge_state(self, incoming: Bleu) -> Bleu:
        """Return the metric over the examples of both metrics."""
        require_equal((self.words, self.lower_case), (incoming.words, incoming.lower_case), "words")
        sums = tuple(map(sum, zip(self.sums, incoming.sums, strict=True)))
        return replace(self, count=self.count + incoming.count, short=self.short + incoming.short, sums=sums)

    def compute(self) -> Result:
        """Return {"bleu", "signature", "count"}."""
        require_examples(self.count, "BLEU")
        (score,) = bleu_of(np.array([self.sums], dtype=np.float64)).tolist()
        scorer = _scorer(self.words, self.lower_case)
        scorer.corpus_score(["a"], [["a"]])  # the signature needs the number of references
        return {"bleu": score, "signature": str(scorer.get_signature()), "count": self.count}
