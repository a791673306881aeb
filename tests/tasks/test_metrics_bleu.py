"""Bleu: equal to sacrebleu and to the formula of the paper, merged from any parts, with sacrebleu's signature."""

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
    """Random predictions and gold texts that agree in most words."""
    rng = random.Random(seed)
    golds = [rng.choices(WORDS, k=rng.randrange(3, 12)) for _ in range(count)]
    predictions = [
        [word if rng.random() < 0.8 else rng.choice(WORDS) for word in gold][: rng.randrange(2, 12)] for gold in golds
    ]
    return [" ".join(words) for words in predictions], [" ".join(words) for words in golds]


def bleu_by_formula(predictions: list[str], golds: list[str]) -> float:
    """min(1, exp(1 - r / c)) exp(mean log p_n) (Papineni et al. 2002, section 2.3), of words between spaces."""

    def ngrams(text: str, n: int) -> Counter[tuple[str, ...]]:
        words = text.split()
        return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))

    log_precisions = []
    for n in range(1, 5):
        right = total = 0
        for prediction, gold in zip(predictions, golds, strict=True):
            right += (ngrams(prediction, n) & ngrams(gold, n)).total()
            total += ngrams(prediction, n).total()
        log_precisions.append(math.log(right / total))
    predicted_length, gold_length = (sum(len(text.split()) for text in side) for side in (predictions, golds))
    brevity_penalty = min(1.0, math.exp(1 - gold_length / predicted_length))
    return brevity_penalty * math.exp(sum(log_precisions) / 4)


@pytest.mark.parametrize("seed", [0, 1])
def test_bleu_equals_sacrebleu_and_the_formula_of_the_paper(seed: int) -> None:
    predictions, golds = texts(seed)
    sacrebleu = BLEU(force=True)
    score = sacrebleu.corpus_score(predictions, [golds]).score
    metrics = Bleu().update(predictions, golds).compute()
    assert metrics["bleu"] == pytest.approx(score / 100, abs=1e-12)
    assert metrics["bleu"] == pytest.approx(bleu_by_formula(predictions, golds), abs=1e-12)
    assert metrics["signature"] == str(sacrebleu.get_signature())
    assert metrics["count"] == 30
    assert metrics["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    parts = [Bleu().update(predictions[start:stop], golds[start:stop]) for start, stop in ((20, 30), (0, 3), (3, 20))]
    assert parts[0].merge_state(parts[1]).merge_state(parts[2]).compute() == metrics
    statistics = [bleu_statistics(prediction, gold) for prediction, gold in zip(predictions, golds, strict=True)]
    sums = np.array(statistics).sum(0).astype(np.float64)
    assert bleu_of(np.stack([sums, 2 * sums])) == pytest.approx(metrics["bleu"])


def test_bleu_of_edge_cases() -> None:
    assert Bleu().update(["", "x"], ["a b", "c"]).compute()["bleu"] == 0
    assert Bleu().update(["a b c d e"], ["a b c d e"]).compute()["bleu"] == pytest.approx(1)
    with pytest.raises(HeedfulError, match="BLEU of no examples is not defined"):
        Bleu().compute()
    with pytest.raises(HeedfulError, match="there are 1 texts for 2 gold texts"):
        Bleu().update(["a"], ["a", "b"])


@pytest.mark.parametrize(("words", "lower_case"), [("char", False), ("zh", False), ("intl", True), ("none", True)])
def test_other_word_splitters_equal_sacrebleu(words: Any, lower_case: bool) -> None:
    predictions = ["Das Pferd frisst heute Gras.", "我爱北京天安门"]
    golds = ["das Pferd frisst heute, das Gras.", "我爱北京的天安门"]
    sacrebleu = BLEU(force=True, tokenize=words, lowercase=lower_case)
    score = sacrebleu.corpus_score(predictions, [golds]).score
    metrics = Bleu(words=words, lower_case=lower_case).update(predictions, golds).compute()
    assert metrics["bleu"] == pytest.approx(score / 100, abs=1e-12)
    assert metrics["bleu"] > 0
    assert metrics["signature"] == str(sacrebleu.get_signature())
    assert f"|case:{'lc' if lower_case else 'mixed'}|eff:no|tok:{words}|" in metrics["signature"]
    with pytest.raises(HeedfulError, match=r"these cannot be merged, their words differ: \('13a', False\) and"):
        Bleu().merge_state(Bleu(words=words, lower_case=lower_case))


def test_bleu_is_informative() -> None:
    """BLEU counts 4-grams, so that texts of fewer than 4 words have a BLEU of 0 even if they are right."""
    short = ["red cat", "a b c", "我爱北京天安门"]
    of_four_words = "one more word here"
    assert Bleu().update(short, short).compute()["bleu"] == 0
    assert not bleu_is_informative([*short, of_four_words], "13a")
    assert bleu_is_informative([*short, of_four_words], "char")
    assert not bleu_is_informative(["a b", "c", "four words are enough"], "char")
    assert bleu_is_informative([*short, of_four_words, "two texts of four", "and three of less"], "13a")
    assert bleu_is_informative([], "13a")
    assert bleu_is_informative(["我爱北京天安门"], "zh")


def test_short_texts_are_noted_until_a_longer_one_is_merged() -> None:
    metric = Bleu().update(["red cat"], ["red cat"])
    assert metric.has_short_texts
    longer = Bleu().update(["one more word here"], ["one more word here"])
    assert not metric.merge_state(longer).has_short_texts
