"""BLEU as sacrebleu has it (Papineni et al. 2002; Post 2018), with the signature that says which BLEU it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import Result, require_equal, require_examples, require_same_length
from heedful.tasks.specs.seq2seq import BleuTokenizer, has_bleu

ORDER = 4  # words of the longest n-grams
STATISTICS = 2 + 2 * ORDER  # words said, words that are right; n-grams that are right, and that were said, from 1 to 4
INSTALL_HINT = "BLEU is measured by sacrebleu, which is not installed: pip install 'heedful[translate]'"


def _scorer(words: BleuTokenizer = "13a", lower_case: bool = False) -> Any:
    if not has_bleu():
        raise HeedfulError(INSTALL_HINT)
    from sacrebleu.metrics.bleu import BLEU

    # force: it warns of nothing; its scores are the same
    return BLEU(lowercase=lower_case, force=True, tokenize=words)


def bleu_statistics(said: str, gold: str, words: BleuTokenizer = "13a", lower_case: bool = False) -> list[int]:
    """What one text adds to a corpus: the sums of these decide the score."""
    found = _scorer(words, lower_case).corpus_score([said], [[gold]])
    return [found.sys_len, found.ref_len, *found.counts, *found.totals]


def bleu_of(sums: Float64[np.ndarray, "replicates statistics"]) -> Float64[np.ndarray, " replicates"]:
    """min(1, exp(1 - right / said)) times the geometric mean of the n-grams' precisions, from 0 to 1.

    The lengths are in words, the end of a text is none; a precision of 0 is smoothed ("exp").
    """
    scorer = _scorer()
    whole = np.rint(sums).astype(int).tolist()
    scores = [
        scorer.compute_bleu(row[2 : 2 + ORDER], row[2 + ORDER :], row[0], row[1], smooth_method="exp").score / 100
        for row in whole
    ]
    return np.array(scores, dtype=np.float64)


def bleu_is_informative(golds: Sequence[str], words: BleuTokenizer) -> bool:
    """Whether BLEU can tell who writes such texts better (see `Bleu.blunt`)."""
    return not Bleu(words=words).update(golds, golds).blunt


@dataclass(frozen=True, kw_only=True, slots=True)
class Bleu:
    """Sums over texts."""

    words: BleuTokenizer = "13a"
    lower_case: bool = False  # texts are compared in lower case
    count: int = 0
    short: int = 0  # right texts of fewer words than the longest n-grams
    sums: tuple[int, ...] = (0,) * STATISTICS

    @property
    def blunt(self) -> bool:
        """Whether most right texts are short: it is 0 then, whatever is written, or a matter of the few others."""
        return 2 * self.short > self.count

    def update(self, said: Sequence[str], golds: Sequence[str]) -> Bleu:
        """With more texts, and what is right for each."""
        require_same_length(len(said), len(golds), "texts", "right ones")
        return self.added([self.statistics(one, gold) for one, gold in zip(said, golds, strict=True)])

    def statistics(self, said: str, gold: str) -> list[int]:
        """What one text adds."""
        return bleu_statistics(said, gold, self.words, self.lower_case)

    def added(self, rows: Sequence[Sequence[int]]) -> Bleu:
        """The same of statistics."""
        sums = tuple(map(sum, zip(self.sums, *rows, strict=True)))
        short = self.short + sum(row[1] < ORDER for row in rows)
        return replace(self, count=self.count + len(rows), short=short, sums=sums)

    def merge_state(self, other: Bleu) -> Bleu:
        """Both as one."""
        require_equal((self.words, self.lower_case), (other.words, other.lower_case), "words")
        sums = tuple(map(sum, zip(self.sums, other.sums, strict=True)))
        return replace(self, count=self.count + other.count, short=self.short + other.short, sums=sums)

    def compute(self) -> Result:
        """{"bleu", "signature", "count"}."""
        require_examples(self.count, "BLEU")
        (score,) = bleu_of(np.array([self.sums], dtype=np.float64)).tolist()
        scorer = _scorer(self.words, self.lower_case)
        scorer.corpus_score(["a"], [["a"]])  # its signature counts references
        return {"bleu": score, "signature": str(scorer.get_signature()), "count": self.count}
