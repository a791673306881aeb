"""Hard negatives for training: documents of an index that resemble a query's positive text and are not relevant."""

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
from heedful.search.index import SearchIndex
from heedful.search.rerank import rerank_scores
from heedful.search.vectors import normalized_rows
from heedful.tasks.task import batched

QUERIES = 256  # compared with the documents at once, which bounds the memory
DEPTH = 100  # nearest documents of a query among which negatives are sought
NEGATIVES = 5  # for each pair
MARGIN = 0.05  # share of the positive's score by which a negative's is lower (Moreira et al. 2024)


@dataclass(frozen=True, kw_only=True, slots=True)
class MinedRow:
    """A query with a relevant text and texts that resemble it, as `finetune embed` and `finetune rank` read it."""

    query: str
    positive: str
    negative: list[str]
    teacher_scores: list[float] | None = None  # of the positive and each negative; None: there is no teacher

    def line(self) -> bytes:
        """Return the row as a line of JSON."""
        row = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


@dataclass(slots=True)
class MiningCounts:
    """Counts of pairs, and of their negatives."""

    pairs: int = 0
    without: int = 0  # pairs without a negative, which are left out
    negatives: int = 0


def mine_negatives(
    index: SearchIndex,
    pairs: Sequence[PairExample],
    *,
    num_negatives: int = NEGATIVES,
    margin: float = MARGIN,
    teacher: BundleEngine | None = None,
) -> Iterator[MinedRow]:
    """Yield each pair of a query and a relevant text with hard negatives: the best-matching passages of documents.

    Only documents that score below the positive by the margin are used, since others may be relevant. A passage is
    skipped if it contains, or is contained in, a positive of the query. A pair without a negative yields a row without
    any.

    Args:
        index: The documents. Their vectors are read in blocks, never all at once.
        pairs: The pairs; a query may have several.
        num_negatives: Maximum negatives of a pair.
        margin: Minimum relative gap between the positive's score and a negative's, from 0 to below 1.
        teacher: A cross-encoder whose scores of the positive and of the negatives are kept; None: none.

    Raises:
        HeedfulError: If a number is out of its range.
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
        own = normalized_rows(index.engine.encode_document([pair.positive for pair in chunk]))
        scores = np.einsum("ij,ij->i", queries, own)
        rankings = index.rank_by_vectors(queries, DEPTH)
        for pair, vector, score, ranking in zip(chunk, queries, scores.tolist(), rankings, strict=True):
            known = positives[hash_text(pair.anchor)]
            below = [(number, value) for number, value in ranking if value < score - margin * abs(score)]
            hard: list[str] = []
            for hit in index.hits(pair.anchor, below, vector[None]):
                if len(hard) == num_negatives:
                    break
                passage = normalise_text(hit.passage)
                if not any(positive in passage or passage in positive for positive in known):
                    hard.append(hit.passage)
            yield MinedRow(
                query=pair.anchor,
                positive=pair.positive,
                negative=hard,
                teacher_scores=None
                if teacher is None
                else rerank_scores(teacher, pair.anchor, [pair.positive, *hard], raw=True),
            )


def write_negatives(path: Path, rows: Iterable[MinedRow]) -> MiningCounts:
    """Write the rows that have negatives as JSON lines; the file appears when it is complete."""
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
