"""BLEU equals sacrebleu's and the paper's formula, however the texts are split, and reports sacrebleu's signature."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from heedful.errors import HeedfulError
from heedful.tasks.metrics import Bleu
from heedful.tasks.metrics.bleu import bleu_is_informative, bleu_of, bleu_statistics

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", ",", "."]


def texts(seed: int, count: int = 30) -> tuple[list[str], list[str]]:
    draw = random.Random(seed)
    golds = [draw.choices(WORDS, k=draw.randrange(3, 12)) for _ in range(count)]
    predictions = [
        [word if draw.random() < 0.8 else draw.choice(WORDS) for word in gold][: draw.randrange(2, 12)]
        for gold in golds
    ]
    return [" ".join(words) for words in predictions], [" ".join(words) for words in golds]


def counted(predictions: list[str], golds: list[str]) -> float:
    """min(1, exp(1 - r / c)) exp(mean log p_n) (Papineni et al. 2002, section 2.3), of words between spaces."""
    right, total = [0] * 4, [0] * 4
    for one, gold in zip(predictions, golds, strict=True):
        for n in range(1, 5):
            a, b = (Counter(tuple(w[i : i + n]) for i in range(len(w) - n + 1)) for w in (one.split(), gold.split()))
            right[n - 1] += (a & b).total()
            total[n - 1] += a.total()
    c, r = (sum(len(text.split()) for text in texts) for texts in (predictions, golds))
    return min(1.0, math.exp(1 - r / c)) * math.exp(sum(math.log(a / b) for a, b in zip(right, total, strict=True)) / 4)


@pytest.mark.parametrize("seed", [0, 1])
def test_bleu_equals_sacrebleu_and_the_formula_of_the_paper(seed: int) -> None:
    predictions, golds = texts(seed)
    theirs = BLEU(force=True)
    score = theirs.corpus_score(predictions, [golds]).score
    metrics = Bleu().update(predictions, golds).compute()
    assert metrics["bleu"] == pytest.approx(score / 100, abs=1e-12)
    assert metrics["bleu"] == pytest.approx(counted(predictions, golds), abs=1e-12)
    assert metrics["signature"] == str(theirs.get_signature()) and metrics["count"] == 30
    assert metrics["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    parts = [Bleu().update(predictions[a:b], golds[a:b]) for a, b in ((20, 30), (0, 3), (3, 20))]
    assert parts[0].merge_state(parts[1]).merge_state(parts[2]).compute() == metrics
    rows = np.array([bleu_statistics(a, b) for a, b in zip(predictions, golds, strict=True)])
    assert bleu_of(np.stack([rows.sum(0), 2 * rows.sum(0)]).astype(np.float64)) == pytest.approx(metrics["bleu"])


def test_the_ends_of_what_can_be_scored() -> None:
    assert Bleu().update(["", "x"], ["a b", "c"]).compute()["bleu"] == 0
    assert Bleu().update(["a b c d e"], ["a b c d e"]).compute()["bleu"] == pytest.approx(1)
    with pytest.raises(HeedfulError, match="BLEU of no examples is not defined"):
        Bleu().compute()
    with pytest.raises(HeedfulError, match="there are 1 texts for 2 gold texts"):
        Bleu().update(["a"], ["a", "b"])


@pytest.mark.parametrize(("words", "lower_case"), [("char", False), ("zh", False), ("intl", True), ("none", True)])
def test_what_it_counts_is_sacrebleus_and_in_its_signature(words: Any, lower_case: bool) -> None:
    predictions = ["Das Pferd frisst heute Gras.", "我爱北京天安门"]
    golds = ["das Pferd frisst heute, das Gras.", "我爱北京的天安门"]
    theirs = BLEU(force=True, tokenize=words, lowercase=lower_case)
    score = theirs.corpus_score(predictions, [golds]).score
    metrics = Bleu(words=words, lower_case=lower_case).update(predictions, golds).compute()
    assert metrics["bleu"] == pytest.approx(score / 100, abs=1e-12) and metrics["bleu"] > 0
    assert metrics["signature"] == str(theirs.get_signature())
    assert f"|case:{'lc' if lower_case else 'mixed'}|eff:no|tok:{words}|" in metrics["signature"]
    with pytest.raises(HeedfulError, match=r"these cannot be merged, their words differ: \('13a', False\) and"):
        Bleu().merge_state(Bleu(words=words, lower_case=lower_case))


def test_most_right_texts_need_as_many_words_as_its_longest_n_grams() -> None:
    """Of fewer it is 0, though all is right."""
    short = ["red cat", "a b c", "我爱北京天安门", "one more word here"]
    assert Bleu().update(short[:3], short[:3]).compute()["bleu"] == 0
    assert (
        not bleu_is_informative(short, "13a")
        and bleu_is_informative(short, "char")
        and not bleu_is_informative(["a b", "c", "four words are enough"], "char")
    )
    assert bleu_is_informative([*short, "two texts of four", "and three of less"], "13a") and bleu_is_informative(
        [], "13a"
    )
    assert bleu_is_informative(["我爱北京天安门"], "zh")
    seen = Bleu().update(short[:1], short[:1])
    assert seen.has_short_texts and not seen.merge_state(Bleu().update(short[3:], short[3:])).has_short_texts
