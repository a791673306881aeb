"""Retrieval metrics against trec_eval itself, by pytrec-eval-terrier."""

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
    draw = np.random.default_rng(seed)
    judgments, rankings = {}, {}
    for number in range(count):
        documents = [f"d{n}" for n in draw.permutation(int(draw.integers(1, 150)))]
        judged = documents[: int(draw.integers(1, len(documents) + 1))]
        judgments[f"q{number}"] = {name: int(draw.integers(-1, 4)) for name in judged}
        retrieved = draw.permutation(documents)[: int(draw.integers(1, len(documents) + 1))].tolist()
        rankings[f"q{number}"] = {name: float(draw.integers(0, 12)) / 8 for name in [*retrieved, "unjudged"]}
    return judgments, rankings


def test_each_query_equals_trec_eval() -> None:
    judgments, rankings = random_queries(1000, seed=7)
    oracle = pytrec_eval.RelevanceEvaluator(judgments, {"ndcg_cut", "map", "recip_rank", "recall"}).evaluate(rankings)
    metric = merge_all(RankingScores().update(name, rankings[name], judgments[name]) for name in judgments)
    relevant = [name for name in judgments if max(judgments[name].values()) > 0]
    assert list(metric.scores) == relevant and len(relevant) > 900
    for query, values in metric.scores.items():
        for name, value in zip(metric.names, values, strict=True):
            assert value == pytest.approx(oracle[query][ORACLE[name]], abs=1e-9), (query, name)
    for name, value in metric.compute().items():
        if name != "count":
            assert value == pytest.approx(np.mean([oracle[query][ORACLE[name]] for query in relevant]), abs=1e-9)


def test_a_query_without_a_ranking_counts_zero_and_one_without_relevant_documents_not_at_all() -> None:
    metric = (
        RankingScores().update("a", {"x": 1.0}, {"x": 1}).update("b", {}, {"x": 2}).update("c", {"x": 1.0}, {"x": 0})
    )
    scores = metric.compute()
    assert scores["count"] == 2 and scores["mrr"] == scores["ndcg@10"] == scores["recall@100"] == 0.5


def test_known_values() -> None:
    """Gains 3, 0, 2 of judged 3, 2, 1: computed by hand."""
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
        assert interval["low"] < metric.compute()[name] < interval["high"] and interval["count"] == len(metric.scores)


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(HeedfulError, match='score of document "b" is not a number'):
        ranked({"a": 1.0, "b": math.nan})
    with pytest.raises(HeedfulError, match='query "q" has two rankings'):
        RankingScores().update("q", {}, {"a": 1}).update("q", {}, {"a": 1})
    with pytest.raises(HeedfulError, match="a cutoff is 0"):
        RankingScores(ndcg_at=(0,))
    with pytest.raises(HeedfulError, match="of no examples"):
        RankingScores().compute()
