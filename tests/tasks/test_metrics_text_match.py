"""Exact match and F1 of generated texts: case and punctuation count, white space around a text does not."""

from __future__ import annotations

import pytest

from heedful.errors import HeedfulError
from heedful.tasks.metrics import TextScore, answer_scores, text_scores


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "f1"),
    [
        ("he goes to school.", "He goes to school.", 0, 3 / 4),  # case
        ("She has cat.", "She has a cat.", 0, 6 / 7),  # an article
        ("Well no", "Well, no", 0, 1 / 2),  # a comma
        (" He goes.\n", "He goes.", 1, 1),
        ("He  goes.", "He goes.", 0, 1),
        ("a a b", "a b b", 0, 2 / 3),
        ("", " ", 1, 1),
        ("", "a", 0, 0),
        ("b", "a", 0, 0),
    ],
)
def test_text_scores(prediction: str, gold: str, exact: float, f1: float) -> None:
    assert text_scores(prediction, gold) == pytest.approx((exact, f1))


def test_a_copy_scores_less_than_a_correction() -> None:
    """SQuAD's scores ignore case, punctuation and articles, and so would call these copies right."""
    sources, golds = ["he goes", "an apple fell"], ["He goes.", "The apple fell"]
    for source, gold in zip(sources, golds, strict=True):
        assert answer_scores(source, [gold], "2.0") == (1, 1)
    assert TextScore().update(sources, golds).compute() == {"exact": 0, "f1": pytest.approx(1 / 3), "count": 2}
    with pytest.raises(HeedfulError, match="there are 1 texts for 2 gold texts"):
        TextScore().update(["a"], golds)
