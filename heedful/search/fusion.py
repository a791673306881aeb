"""Fusion of several rankings of documents into one, for hybrid search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

K = 60  # the constant of Cormack et al. 2009


def reciprocal_rank_fusion(rankings: Sequence[Sequence[int]], k: int = K) -> list[tuple[int, float]]:
    """Score each document by the sum of 1 / (k + rank) over the rankings (Cormack et al. 2009).

    Returns:
        (document, score) pairs, best first.

    >>> [(document, round(score, 4)) for document, score in reciprocal_rank_fusion([[7, 5], [5, 9]])]
    [(5, 0.0325), (7, 0.0164), (9, 0.0161)]
    """
    scores: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, document in enumerate(ranking, start=1):
            scores[document] += 1 / (k + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
