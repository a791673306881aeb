"""Retrieval metrics of TREC: MRR, MAP, nDCG and recall of rankings against relevance judgments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import Result, require_equal, require_examples
from heedful.tasks.metrics.bootstrap import Bootstrap

Ranking = Mapping[str, float]  # the score of each retrieved document, by its id
Judgments = Mapping[str, float]  # the relevance of each judged document, by its id; above 0: relevant


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankingScores:
    """MRR, MAP, nDCG@k and recall@k as trec_eval defines them, each the mean over queries.

    Documents are ranked by decreasing score, and by decreasing id if their scores are equal, as in trec_eval. Documents
    without a judgment are not relevant. Queries without a relevant document are left out, since all their rankings are
    equally good.
    """

    ndcg_at: tuple[int, ...] = (10,)  # values of k for nDCG@k
    recall_at: tuple[int, ...] = (10, 100)  # values of k for recall@k
    scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # metrics by query, in the order of `names`
    left_out: int = 0  # queries without a relevant document

    def __post_init__(self) -> None:
        if wrong := [k for k in (*self.ndcg_at, *self.recall_at) if k < 1]:
            raise HeedfulError(f"a cutoff is {wrong[0]}; expected a number of documents from 1")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics, such as "ndcg@10"."""
        return (*(f"ndcg@{k}" for k in self.ndcg_at), "map", "mrr", *(f"recall@{k}" for k in self.recall_at))

    def update(self, query: str, ranking: Ranking, judgments: Judgments) -> RankingScores:
        """Add a query with its ranking (empty if no document was retrieved) and its judgments.

        Raises:
            HeedfulError: If the query was added before, or a score is not a number.
        """
        if not any(relevance > 0 for relevance in judgments.values()):
            return replace(self, left_out=self.left_out + 1)
        values = self._values([judgments.get(name, 0) for name in ranked(ranking)], judgments)
        return self.merge_state(replace(self, scores={query: values}, left_out=0))

    def _values(self, gains: Sequence[float], judgments: Judgments) -> tuple[float, ...]:
        """Return the metrics of a query, in the order of `names`.

        Args:
            gains: Relevance of each ranked document, in the order of the ranking.
            judgments: Relevance of each judged document.
        """
        ideal = sorted(judgments.values(), reverse=True)
        relevant_count = sum(gain > 0 for gain in ideal)
        relevant_ranks = [rank for rank, gain in enumerate(gains, start=1) if gain > 0]
        return (
            *(_dcg(gains[:k]) / _dcg(ideal[:k]) for k in self.ndcg_at),
            math.fsum(hits / rank for hits, rank in enumerate(relevant_ranks, start=1)) / relevant_count,
            1 / relevant_ranks[0] if relevant_ranks else 0.0,
            *(sum(rank <= k for rank in relevant_ranks) / relevant_count for k in self.recall_at),
        )

    def merge_state(self, incoming: RankingScores) -> RankingScores:
        """Return the metric over the queries of both metrics."""
        require_equal(self.names, incoming.names, "metrics")
        if duplicate := next((query for query in incoming.scores if query in self.scores), None):
            raise HeedfulError(f'query "{duplicate}" has two rankings; expected one')
        left_out = self.left_out + incoming.left_out
        return replace(self, scores={**self.scores, **incoming.scores}, left_out=left_out)

    def compute(self) -> Result:
        """Return the mean of each metric over queries, and the "count" of queries."""
        require_examples(len(self.scores), "retrieval")
        columns = zip(self.names, zip(*self.scores.values(), strict=True), strict=True)
        return {name: math.fsum(column) / len(column) for name, column in columns} | {"count": len(self.scores)}

    def intervals(self, seed: int) -> dict[str, Result]:
        """Return the interval of each metric. Queries are resampled, documents are not."""
        require_examples(len(self.scores), "retrieval")
        queries, rows = list(self.scores), np.array(list(self.scores.values()))
        ones = np.ones(len(rows))
        return {
            name: Bootstrap(seed=seed, statistics=2).update(queries, np.stack([column, ones], 1)).interval()
            for name, column in zip(self.names, rows.T, strict=True)
        }


def ranked(ranking: Ranking) -> list[str]:
    """Return the document ids of a ranking, best first. Among equal scores, the greater id comes first.

    >>> ranked({"a": 1.0, "b": 2.0, "c": 1.0})
    ['b', 'c', 'a']
    """
    if unranked := next((id for id, score in ranking.items() if math.isnan(score)), None):
        raise HeedfulError(f'the score of document "{unranked}" is not a number, so it has no rank')
    return sorted(ranking, key=lambda id: (ranking[id], id), reverse=True)


def _dcg(gains: Sequence[float]) -> float:
    """Return the discounted cumulative gain, Σ gain / log2(1 + rank) (Järvelin and Kekäläinen 2002)."""
    return math.fsum(gain / math.log2(1 + rank) for rank, gain in enumerate(gains, start=1) if gain > 0)
