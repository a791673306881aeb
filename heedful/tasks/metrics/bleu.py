"""BLEU as sacrebleu has it (Papineni et al. 2002; Post 2018), with the signature that says which BLEU it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from jaxtyping import Float64

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import Result, need_examples, need_length

ORDER = 4  # words of the longest n-grams
STATISTICS = 2 + 2 * ORDER  # words said, words that are right; n-grams that are right, and that were said, from 1 to 4
NEEDED = "BLEU is measured by sacrebleu, which is not installed: pip install 'heedful[translate]'"


def has_bleu() -> bool:
    """Whether it can be measured here."""
    return find_spec("sacrebleu") is not None


def _scorer() -> Any:
    if not has_bleu():
        raise HeedfulError(NEEDED)
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(force=True)  # force: it warns of nothing; its scores are the same


def bleu_statistics(said: str, gold: str) -> list[int]:
    """What one text adds to a corpus: the sums of these decide the score."""
    found = _scorer().corpus_score([said], [[gold]])
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Bleu:
    """Sums over texts."""

    count: int = 0
    sums: tuple[int, ...] = (0,) * STATISTICS

    def updated(self, said: Sequence[str], golds: Sequence[str]) -> Bleu:
        """With more texts, and what is right for each."""
        need_length(len(said), len(golds), "texts", "right ones")
        rows = [bleu_statistics(one, gold) for one, gold in zip(said, golds, strict=True)]
        return self.added(rows)

    def added(self, rows: Sequence[Sequence[int]]) -> Bleu:
        """The same of statistics."""
        sums = tuple(map(sum, zip(self.sums, *rows, strict=True)))
        return replace(self, count=self.count + len(rows), sums=sums)

    def merged(self, other: Bleu) -> Bleu:
        """Both as one."""
        return replace(self.added([other.sums]), count=self.count + other.count)

    def result(self) -> Result:
        """{"bleu", "signature", "count"}."""
        need_examples(self.count, "BLEU")
        (score,) = bleu_of(np.array([self.sums], dtype=np.float64)).tolist()
        scorer = _scorer()
        scorer.corpus_score(["a"], [["a"]])  # its signature counts references
        return {"bleu": score, "signature": str(scorer.get_signature()), "count": self.count}
