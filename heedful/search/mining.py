"""Mining of hard negatives: passages of an index that are similar to a query but probably not relevant.

`heedful index --mine-negatives` writes them as training data for `finetune embed` and `finetune rank`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from heedful.atomic_io import atomic_path, write_synced
from heedful.data import PairExample
from heedful.data.examples import hash_text, normalise_text
from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.search.index import SearchHit, SearchIndex
from heedful.search.rerank import rerank_scores
from heedful.search.vectors import normalized_rows
from heedful.tasks.task import batched

QUERIES = 256  # queries that are compared with the documents at once, which bounds the memory
DEPTH = 100  # nearest documents of a query from which negatives are chosen
NEGATIVES = 5  # maximum negatives of each pair
MARGIN = 0.05  # minimum relative gap between the scores of the positive and a negative (Moreira et al. 2024)


@dataclass(frozen=True, kw_only=True, slots=True)
class MinedRow:
    """A query with a relevant text and hard negatives: one row of training data."""

    query: str
    positive: str
    negative: list[str]  # the most similar first
    teacher_scores: list[float] | None = None  # relevance of the positive, then of each negative; None without teacher

    def line(self) -> bytes:
        """Return the row as a line of JSON."""
        row = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


@dataclass(slots=True)
class MiningCounts:
    """Counts of pairs and of their negatives."""

    pairs: int = 0  # all pairs
    without: int = 0  # pairs without a negative, which are not written
    negatives: int = 0  # negatives of all pairs


def mine_negatives(
    index: SearchIndex,
    pairs: Sequence[PairExample],
    *,
    num_negatives: int = NEGATIVES,
    margin: float = MARGIN,
    teacher: BundleEngine | None = None,
) -> Iterator[MinedRow]:
    """Yield a row for each pair of a query and a relevant text, with the passages that match the query best.

    A document that scores less than the margin below the positive may be relevant, and is not used. A passage is
    skipped if it contains, or is contained in, a positive of the query. A pair without a negative yields a row with an
    empty list.

    Args:
        index: The documents. Their vectors are read in blocks, never all at once.
        pairs: The pairs; several may have the same query.
        num_negatives: Maximum negatives of a pair.
        margin: Minimum relative gap between the positive's score and a negative's, from 0 to below 1.
        teacher: A cross-encoder that scores the positive and the negatives. If None, rows have no teacher scores.

    Raises:
        HeedfulError: If `num_negatives` or `margin` is out of range.
    """
    if not 1 <= num_negatives <= DEPTH:
        raise HeedfulError(f"num_negatives is {num_negatives}; expected a number from 1 to {DEPTH}")
    if not 0 <= margin < 1:
        raise HeedfulError(f"margin is {margin}; expected a share from 0 to below 1")
    positives: dict[int, set[str]] = {}
    for pair in pairs:
        positives.setdefault(hash_text(pair.anchor), set()).add(normalise_text(pair.positive))
    for chunk in batched(pairs, QUERIES):
        queries = normalized_rows(index.engine.encode_query([pair.anchor for pair in chunk]))
        positive_vectors = normalized_rows(index.engine.encode_document([pair.positive for pair in chunk]))
        positive_scores = np.einsum("ij,ij->i", queries, positive_vectors)
        rankings = index.rank_by_vectors(queries, DEPTH)
        for pair, vector, positive_score, ranking in zip(
            chunk, queries, positive_scores.tolist(), rankings, strict=True
        ):
            max_score = positive_score - margin * abs(positive_score)
            below_margin = [(document, score) for document, score in ranking if score < max_score]
            hits = index.hits(pair.anchor, below_margin, vector[None])
            negatives = _first_negatives(hits, positives[hash_text(pair.anchor)], num_negatives)
            teacher_scores = None
            if teacher is not None:
                teacher_scores = rerank_scores(teacher, pair.anchor, [pair.positive, *negatives], raw=True)
            yield MinedRow(query=pair.anchor, positive=pair.positive, negative=negatives, teacher_scores=teacher_scores)


def _first_negatives(hits: Iterable[SearchHit], positives: set[str], count: int) -> list[str]:
    """Return the first `count` passages that neither contain a positive nor are contained in one.

    Args:
        hits: Hits of the search for the query, the most similar first.
        positives: All positives of the query, normalised.
        count: Maximum number of passages.
    """
    negatives: list[str] = []
    for hit in hits:
        if len(negatives) == count:
            break
        passage = normalise_text(hit.passage)
        if not any(positive in passage or passage in positive for positive in positives):
            negatives.append(hit.passage)
    return negatives


def write_negatives(path: Path, rows: Iterable[MinedRow]) -> MiningCounts:
    """Write the rows that have negatives as JSON lines. The file appears only when it is complete."""
    counts = MiningCounts()

    def lines() -> Iterator[bytes]:
        for row in rows:
            counts.pairs += 1
            counts.negatives += len(row.negative)
            if row.negative:
                yield row.line()
            else:
                counts.without += 1

    with atomic_path(path) as part:
        write_synced(part, lines())
    return counts
