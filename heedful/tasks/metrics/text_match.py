"""Exact match and F1 of words of texts that were written, by the texts themselves: each letter and sign counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from heedful.tasks.metrics.base import Result, from_exact, require_examples, require_same_length
from heedful.tasks.metrics.squad import Tally, tally_scores, word_f1


def text_scores(said: str, gold: str) -> tuple[float, float]:
    """Exact match, but for white space around both, and F1 of words between spaces, as multisets.

    >>> text_scores("A cat sat. ", "a cat sat.")
    (0.0, 0.6666666666666666)
    """
    return float(said.strip() == gold.strip()), word_f1(said.split(), gold.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class TextScore:
    """Sums over texts."""

    tally: Tally = field(default_factory=Tally)
    unfinished: int = 0  # texts that were cut off before their end

    def update(self, said: Sequence[str], golds: Sequence[str]) -> TextScore:
        """With more texts, and what is right for each."""
        require_same_length(len(said), len(golds), "texts", "right ones")
        return self.added([text_scores(*each) for each in zip(said, golds, strict=True)])

    def added(self, scores: Sequence[tuple[float, float]], unfinished: int = 0) -> TextScore:
        """The same of scores."""
        return self.merge_state(TextScore(tally=tally_scores(scores), unfinished=unfinished))

    def merge_state(self, other: TextScore) -> TextScore:
        """Both as one."""
        return replace(self, tally=self.tally.plus(other.tally), unfinished=self.unfinished + other.unfinished)

    def compute(self) -> Result:
        """{"exact", "f1", "count"}."""
        tally = self.tally
        require_examples(tally.count, "the score")
        return {"exact": tally.exact / tally.count, "f1": from_exact(tally.f1, tally.count), "count": tally.count}
