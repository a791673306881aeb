"""Exact match and F1 of words that were written: each letter and sign counts, white space around a text does not."""

from __future__ import annotations

import pytest

from heedful.errors import HeedfulError
from heedful.tasks.metrics import TextScore, answer_scores, text_scores


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "f1"),
    [
        ("he goes to school.", "He goes to school.", 0, 3 / 4),  # case
        ("She has cat.", "She has a cat.", 0, 6 / 7),  # an article
        ("Well no", "Well, no", 0, 1 / 2),  # a sign
        (" He goes.\n", "He goes.", 1, 1),
        ("He  goes.", "He goes.", 0, 1),
        ("a a b", "a b b", 0, 2 / 3),
        ("", " ", 1, 1),
        ("", "a", 0, 0),
        ("b", "a", 0, 0),
    ],
)
def test_corrections_are_seen(prediction: str, gold: str, exact: float, f1: float) -> None:
    assert text_scores(prediction, gold) == pytest.approx((exact, f1))


def test_copies_are_no_corrections() -> None:
    """Of which the score of answers taken from a text sees nothing."""
    sources, golds = ["he goes", "an apple fell"], ["He goes.", "The apple fell"]
    assert [answer_scores(*texts, "2.0") for texts in zip(sources, [[gold] for gold in golds], strict=True)] == [
        (1, 1)
    ] * 2
    assert TextScore().update(sources, golds).compute() == {"exact": 0, "f1": pytest.approx(1 / 3), "count": 2}
    with pytest.raises(HeedfulError, match="there are 1 texts for 2 gold texts"):
        TextScore().update(["a"], golds)
