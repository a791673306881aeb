"""RankingScores: equal to trec_eval, which pytrec-eval-terrier runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import pytrec_eval

from heedful.errors import HeedfulError
from heedful.tasks.metrics import RankingScores, merge_all
from heedful.tasks.metrics.ranking import ranked

ORACLE = {
    "ndcg@10": "ndcg_cut_10",
    "map": "map",
    "mrr": "recip_rank",
    "recall@10": "recall_10",
    "recall@100": "recall_100",
}


def random_queries(count: int, seed: int) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, float]]]:
    """Judgments and rankings with ties, unjudged and missing documents; scores are eighths, exact in float32."""
    rng = np.random.default_rng(seed)
    judgments, rankings = {}, {}
    for number in range(count):
        documents = [f"d{n}" for n in rng.permutation(int(rng.integers(1, 150)))]
        with_judgment = documents[: int(rng.integers(1, len(documents) + 1))]
        judgments[f"q{number}"] = {name: int(rng.integers(-1, 4)) for name in with_judgment}
        retrieved = rng.permutation(documents)[: int(rng.integers(1, len(documents) + 1))].tolist()
        rankings[f"q{number}"] = {name: float(rng.integers(0, 12)) / 8 for name in [*retrieved, "unjudged"]}
    return judgments, rankings


def test_scores_of_queries_equal_trec_eval() -> None:
    judgments, rankings = random_queries(1000, seed=7)
    expected = pytrec_eval.RelevanceEvaluator(judgments, {"ndcg_cut", "map", "recip_rank", "recall"}).evaluate(rankings)
    metric = merge_all(RankingScores().update(name, rankings[name], judgments[name]) for name in judgments)
    relevant = [name for name in judgments if max(judgments[name].values()) > 0]
    assert list(metric.scores) == relevant and len(relevant) > 900
    for query, values in metric.scores.items():
        for name, value in zip(metric.names, values, strict=True):
            assert value == pytest.approx(expected[query][ORACLE[name]], abs=1e-9), (query, name)
    for name, value in metric.compute().items():
        if name != "count":
            assert value == pytest.approx(np.mean([expected[query][ORACLE[name]] for query in relevant]), abs=1e-9)


def test_queries_without_a_ranking_or_without_relevant_documents() -> None:
    """The scores of the former are 0; the latter are left out."""
    metric = RankingScores().update("right", {"x": 1.0}, {"x": 1})
    metric = metric.update("without ranking", {}, {"x": 2})
    metric = metric.update("without relevant document", {"x": 1.0}, {"x": 0})
    scores = metric.compute()
    assert scores["count"] == 2
    assert scores["mrr"] == scores["ndcg@10"] == scores["recall@100"] == 0.5


def test_scores_computed_by_hand() -> None:
    """The ranked documents have relevance 3, 0 and 2; a document with relevance 1 is missing."""
    scores = RankingScores().update("q", {"a": 9, "x": 8, "b": 7}, {"a": 3, "b": 2, "c": 1}).compute()
    assert scores["ndcg@10"] == pytest.approx((3 + 2 / 2) / (3 + 2 / math.log2(3) + 1 / 2))
    assert scores["map"] == pytest.approx((1 + 2 / 3) / 3)
    assert scores["recall@10"] == pytest.approx(2 / 3) and scores["mrr"] == 1


def test_intervals_resample_queries_in_any_order() -> None:
    judgments, rankings = random_queries(200, seed=3)
    parts = [RankingScores().update(name, rankings[name], judgments[name]) for name in judgments]
    metric = merge_all(parts)
    assert merge_all(reversed(parts)).compute() == metric.compute()
    assert merge_all(reversed(parts)).intervals(0) == metric.intervals(0)
    for name, interval in metric.intervals(0).items():
        assert interval["low"] < metric.compute()[name] < interval["high"]
        assert interval["count"] == len(metric.scores)


def test_bad_rankings_are_refused() -> None:
    with pytest.raises(HeedfulError, match='score of document "b" is not a number'):
        ranked({"a": 1.0, "b": math.nan})
    with pytest.raises(HeedfulError, match='query "q" has two rankings'):
        RankingScores().update("q", {}, {"a": 1}).update("q", {}, {"a": 1})
    with pytest.raises(HeedfulError, match="a cutoff is 0"):
        RankingScores(ndcg_at=(0,))
    with pytest.raises(HeedfulError, match="of no examples"):
        RankingScores().compute()
