"""SQuAD scores: compared with torchmetrics, with scores computed by hand, and with those of published predictions."""

from __future__ import annotations

import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.errors import HeedfulError
from heedful.tasks.metrics import (
    SquadScore,
    SquadThreshold,
    answer_scores,
    apply_threshold,
    merge_all,
    normalize_answer,
)

WORDS = ["the", "a", "An", "cat", "Cat!", "U.S.", "-", "dog's", "dog", "1,000", "theatre", "\u2014", "café", "\n"]


def text(rng: random.Random, max_words: int = 5) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(0, max_words)))


def test_version_1_equals_torchmetrics() -> None:
    pytest.importorskip("torchmetrics", reason="the oracle of SQuAD scores is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchmetrics.functional.text import squad

    rng = random.Random(0)
    # every gold answer has a word: if both answers are empty, F1 is 0 in the published script and 1 in torchmetrics
    golds = {f"q{i}": [f"{text(rng)} cat" for _ in range(rng.randint(1, 4))] for i in range(2000)}
    predictions = {name: rng.choice([*answers, text(rng)]) for name, answers in golds.items()}
    metrics = SquadScore(version="1.1").update(predictions, golds).compute()
    expected = squad(
        [{"prediction_text": answer, "id": name} for name, answer in predictions.items()],
        [{"answers": {"answer_start": [0], "text": answers}, "id": name} for name, answers in golds.items()],
    )
    assert 100 * metrics["exact"] == pytest.approx(expected["exact_match"].item(), abs=1e-4)
    assert 100 * metrics["f1"] == pytest.approx(expected["f1"].item(), abs=1e-4)


@given(st.text(alphabet=st.sampled_from("aAnt he.,!'-x\t\u00a0é")))
def test_normalising_twice_changes_nothing_but_articles(answer: str) -> None:
    normalized = normalize_answer(answer)
    assert normalized == normalized.lower()
    assert normalized == " ".join(normalized.split())
    assert not set(normalized) & set(".,!'-")
    assert not set(normalized.split()) & {"a", "an", "the"}
    golds = ["zebra", answer] if normalized else [answer]
    assert answer_scores(answer, golds, "2.0") == (1.0, 1.0)


@pytest.mark.parametrize(
    ("prediction", "golds", "first", "second"),
    [
        ("The cat.", ["cat"], (1, 1), (1, 1)),
        ("cat cat", ["cat dog"], (0, 0.5), (0, 0.5)),  # words are counted as often as they occur
        ("", ["cat"], (0, 0), (0, 0)),
        ("a", ["the"], (1, 0), (1, 1)),  # both are empty without articles
        ("", [".", "cat"], (1, 0), (0, 0)),  # 2.0 drops the gold answer "."
        ("", ["."], (1, 0), (1, 1)),
        ("the-cat", ["thecat"], (1, 1), (1, 1)),  # punctuation goes before articles
    ],
)
def test_answer_scores_computed_by_hand(
    prediction: str, golds: list[str], first: tuple[float, ...], second: tuple[float, ...]
) -> None:
    assert answer_scores(prediction, golds, "1.1") == first
    assert answer_scores(prediction, golds, "2.0") == second


def test_unanswerable_and_missing() -> None:
    golds: dict[str, list[str]] = {"a": ["cat"], "b": [], "c": [], "d": [], "e": ["."]}
    predictions = {"a": "cat", "b": "", "c": "dog", "e": "", "not asked": "x"}
    metrics = SquadScore(version="2.0").update(predictions, golds).compute()
    assert (metrics["answerable_exact"], metrics["answerable_count"]) == (1.0, 2)  # the answer "." counts as one
    assert (metrics["unanswerable_f1"], metrics["unanswerable_count"]) == (pytest.approx(1 / 3), 3)
    assert metrics["exact"] == 3 / 5 and metrics["missing"] == 1
    assert metrics["notes"] == ["1 of 5 questions have no prediction and count 0"]
    only = SquadScore(version="2.0").update({"a": "cat"}, {"a": ["cat"]}).compute()
    assert not [name for name in only if name.startswith("unanswerable")]


def best_by_exhaustive_search(
    predictions: dict[str, str], golds: dict[str, list[str]], nulls: dict[str, float]
) -> dict[str, float]:
    """The best scores and their thresholds, found by computing the scores for every threshold."""
    best = {"exact": (-1.0, 0.0), "f1": (-1.0, 0.0)}
    for threshold in sorted({-math.inf, *nulls.values()}):
        metrics = SquadScore(version="2.0").update(apply_threshold(predictions, nulls, threshold), golds).compute()
        for name, (value, _) in best.items():
            if metrics[name] > value + 1e-12:
                best[name] = metrics[name], threshold
    return {
        **{f"best_{name}": value for name, (value, _) in best.items()},
        **{f"best_{name}_threshold": threshold for name, (_, threshold) in best.items()},
    }


@pytest.mark.parametrize("seed", range(30))
def test_best_threshold(seed: int) -> None:
    rng = random.Random(seed)
    golds = {f"q{i}": ["cat", "cat dog"] if rng.random() < 0.5 else [] for i in range(25)}
    predictions = {name: rng.choice(["cat", "cat x", "dog dog", ""]) for name in golds}
    num_values = 6 if seed % 2 else 10**9  # with and without equal scores
    shift = 0.5 if seed % 3 else 0.0  # log odds may be negative, probabilities may not
    nulls = {name: (1 + rng.randrange(num_values)) / num_values - shift for name in golds}
    metrics = SquadThreshold().update(predictions, golds, nulls).compute()
    expected = best_by_exhaustive_search(predictions, golds, nulls)
    for name in ("exact", "f1"):
        assert metrics[f"best_{name}"] == pytest.approx(expected[f"best_{name}"], abs=1e-12)
        threshold = metrics[f"best_{name}_threshold"]
        assert threshold == expected[f"best_{name}_threshold"] or threshold < min(nulls.values())
        with_threshold = apply_threshold(predictions, nulls, threshold)
        scores = SquadScore(version="2.0").update(with_threshold, golds).compute()
        assert scores[name] == pytest.approx(metrics[f"best_{name}"], abs=1e-12)


def test_answering_nothing_can_be_best() -> None:
    metrics = SquadThreshold().update({"a": "x", "b": "y"}, {"a": [], "b": []}, {"a": 0.1, "b": 0.9}).compute()
    assert (metrics["best_exact"], metrics["best_exact_threshold"]) == (1.0, 0.0)  # as in the published script
    metrics = SquadThreshold().update({"a": "x"}, {"a": []}, {"a": 0.0}).compute()
    assert metrics["best_f1_threshold"] < 0.0


def test_a_missing_prediction_is_always_wrong() -> None:
    golds: dict[str, list[str]] = {"a": [], "b": ["x"], "c": ["x"]}
    metrics = SquadThreshold().update({"b": "x"}, golds, {"a": 0.1, "b": 0.2, "c": 0.3}).compute()
    assert (metrics["best_exact"], metrics["best_exact_threshold"]) == (1 / 3, 0.0)  # answering all is no better
    metrics = SquadThreshold().update({"a": "", "b": "x"}, golds, {"a": 0.1, "b": 0.2, "c": 0.3}).compute()
    assert (metrics["best_f1"], metrics["best_f1_threshold"]) == (2 / 3, 0.2)


def test_what_is_refused() -> None:
    none: Any = None
    with pytest.raises(
        HeedfulError, match=r'question "q" has no gold answer, which version 1\.1 does not allow: score'
    ):
        SquadScore(version="1.1").update({"q": "x"}, {"q": []})
    with pytest.raises(HeedfulError, match="the gold answers of question \"q\" should be a list of texts, got 'cat'"):
        SquadScore(version="2.0").update({"q": "x"}, {"q": "cat"})
    with pytest.raises(HeedfulError, match=r'the prediction for question "q" should be a text \(""'):
        SquadScore(version="2.0").update({"q": none, "r": "x"}, {"q": ["x"]})
    with pytest.raises(HeedfulError, match='question "q" has no null score'):
        SquadThreshold().update({"q": "x"}, {"q": ["x"]}, {})
    with pytest.raises(HeedfulError, match='the null score of question "q" is nan'):
        SquadThreshold().update({"q": "x"}, {"q": ["x"]}, {"q": math.nan})
    with pytest.raises(HeedfulError, match='question "q" has no null score'):
        apply_threshold({"q": "x"}, {}, 0.5)
    metric = SquadScore(version="2.0")
    object.__setattr__(
        metric, "version", "3.0"
    )  # set afterwards, since the type checker of the tests rejects it in the constructor
    with pytest.raises(HeedfulError, match=r'version should be "1\.1" or "2\.0", got "3\.0"'):
        metric.__post_init__()


PUBLISHED = {  # percent: exact match and F1 of all, of answerable and of unanswerable questions
    "v1.1-bert-ensemble": (86.21, 92.20),
    "v1.1-rnet-plus-ensemble": (82.47, 88.48),
    "v1.1-slqa-plus-ensemble": (81.95, 88.38),
    "v1.1-match-lstm-ensemble": (67.63, 76.76),
    "v1.1-logistic-regression": (40.14, 50.98),
    "v2.0-bert-single": (78.74, 81.78, 74.11, 80.18, 83.36, 83.36),
    "v2.0-nlnet-single": (75.83, 78.78, 69.62, 75.53, 82.02, 82.02),
    "v2.0-bidaf-elmo-single": (65.70, 67.88, 61.42, 65.77, 69.97, 69.97),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_predictions(name: str, data_dir: Path) -> None:
    version: Any = name[1:4]
    folder = data_dir / "tasks" / "squad"
    predictions = json.loads((folder / "predictions" / f"{name}.json").read_text(encoding="utf-8"))
    articles = json.loads((folder / f"dev-v{version}.json").read_text(encoding="utf-8"))["data"]
    golds = {
        question["id"]: [answer["text"] for answer in question["answers"]]
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    }
    whole = SquadScore(version=version).update(predictions, golds)
    metrics = whole.compute()
    prefixes = ("", "answerable_", "unanswerable_") if version == "2.0" else ("",)
    scores = [metrics[prefix + kind] for prefix in prefixes for kind in ("exact", "f1")]
    assert tuple(round(100 * score, 2) for score in scores) == PUBLISHED[name]
    assert metrics["missing"] == (13 if name == "v1.1-logistic-regression" else 0)
    parts = [dict(list(golds.items())[start::3]) for start in range(3)]
    assert merge_all(SquadScore(version=version).update(predictions, part) for part in parts) == whole
