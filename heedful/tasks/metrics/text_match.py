"""Exact match and word F1 of generated texts, without normalization: letter case and punctuation count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from heedful.tasks.metrics.base import Result, from_exact, require_examples, require_same_length
from heedful.tasks.metrics.squad import Tally, tally_scores, word_f1


def text_scores(prediction: str, gold: str) -> tuple[float, float]:
    """Return (exact match, F1 of words). Surrounding white space is ignored, and words are split at white space.

    >>> text_scores("A cat sat. ", "a cat sat.")
    (0.0, 0.6666666666666666)
    """
    return float(prediction.strip() == gold.strip()), word_f1(prediction.split(), gold.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class TextScore:
    """Exact match and F1 of words, as means over texts."""

    tally: Tally = field(default_factory=Tally)
    unfinished: int = 0  # generated texts that were cut off before their end

    def update(self, predictions: Sequence[str], golds: Sequence[str]) -> TextScore:
        """Add predicted texts and their gold texts."""
        require_same_length(len(predictions), len(golds), "texts", "gold texts")
        return self.update_scores([text_scores(*pair) for pair in zip(predictions, golds, strict=True)])

    def update_scores(self, scores: Sequence[tuple[float, float]], unfinished: int = 0) -> TextScore:
        """Add texts by their pairs (exact match, F1), and by how many of the texts are unfinished."""
        return self.merge_state(TextScore(tally=tally_scores(scores), unfinished=unfinished))

    def merge_state(self, incoming: TextScore) -> TextScore:
        """Return the metric over the examples of both metrics."""
        return replace(self, tally=self.tally.plus(incoming.tally), unfinished=self.unfinished + incoming.unfinished)

    def compute(self) -> Result:
        """Return {"exact", "f1", "count"}."""
        tally = self.tally
        require_examples(tally.count, "the score")
        return {"exact": tally.exact / tally.count, "f1": from_exact(tally.f1, tally.count), "count": tally.count}
