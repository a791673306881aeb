"""Evaluation of retrieval for `heedful evaluate`: rankings of documents, and their scores by relevance judgments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from heedful.data.retrieval.beir import beir_folder
from heedful.data.retrieval.documents import Document
from heedful.data.retrieval.trec import read_judgments, write_rankings
from heedful.errors import DataError, HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.search.index import RERANKED, SearchIndex, SearchMethod
from heedful.search.vectors import TopRows, VectorTable, normalized_rows
from heedful.tasks.metrics import RankingScores

DEPTH = 1000  # documents in a ranking, as in TREC and BEIR
DOCUMENT_CHUNK = 4096  # documents whose vectors are in memory at the same time
QUERY_CHUNK = 1024  # queries per matrix product with a chunk of documents


def rank_by_vectors(
    engine: BundleEngine, documents: Iterable[Document], queries: Mapping[str, str], depth: int = DEPTH
) -> dict[str, dict[str, float]]:
    """Return the cosines of the nearest `depth` documents of each query, by exact search.

    Documents are streamed; only their ids are stored.

    Args:
        engine: An engine that returns sentence embeddings.
        documents: The corpus.
        queries: Texts of queries by id.
        depth: How many documents each ranking has.

    Returns:
        Cosines by query id and document id.

    Raises:
        HeedfulError: If the model has no head for sentence embeddings, or if there are no documents.
    """
    if engine.kind != "embedding":
        raise HeedfulError(
            f"{engine.loaded.source} has a {engine.kind} head, and documents are ranked by sentence embeddings: give a "
            "model with an embedding head, such as one of heedful finetune embed"
        )
    query_vectors = normalized_rows(engine.encode_query(list(queries.values())))
    query_chunks = [query_vectors[start : start + QUERY_CHUNK] for start in range(0, len(query_vectors), QUERY_CHUNK)]
    nearest_of_chunks = [TopRows(len(chunk), depth) for chunk in query_chunks]
    document_ids: list[str] = []
    for document_chunk in _document_chunks(documents):
        contents = [document.content for document in document_chunk]
        table = VectorTable.of(normalized_rows(engine.encode_document(contents)))
        for nearest, query_chunk in zip(nearest_of_chunks, query_chunks, strict=True):
            nearest.add(table.scores(query_chunk, 0, len(document_chunk)), len(document_ids))
        document_ids += [document.id for document in document_chunk]
    if not document_ids:
        raise DataError("there are no documents to rank: the corpus is empty")
    rankings: list[dict[str, float]] = []
    for nearest in nearest_of_chunks:
        for cosines, indices in zip(*nearest.result(), strict=True):
            rankings.append(
                {document_ids[index]: float(cosine) for cosine, index in zip(cosines, indices, strict=True)}
            )
    return dict(zip(queries, rankings, strict=True))


def _document_chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield lists of DOCUMENT_CHUNK documents, the last one shorter."""
    remaining = iter(documents)
    while chunk := list(islice(remaining, DOCUMENT_CHUNK)):
        yield chunk


def rank_by_index(
    index: SearchIndex, queries: Mapping[str, str], method: SearchMethod, depth: int = DEPTH
) -> dict[str, dict[str, float]]:
    """Return the scores of the best `depth` documents of an index for each query, by query id and document id."""
    rankings = index.rank(list(queries.values()), depth, method=method)
    return {
        query: {index.document(position).id: score for position, score in ranking}
        for query, ranking in zip(queries, rankings, strict=True)
    }


def rank_by_reranker(
    index: SearchIndex, queries: Mapping[str, str], reranker: BundleEngine, depth: int = DEPTH
) -> dict[str, dict[str, float]]:
    """Rank the best `RERANKED` documents of hybrid search again with a cross-encoder, for each query.

    The reranked documents are those of `SearchIndex.search`.

    Args:
        index: The index.
        queries: Texts of queries by id. The ranking of an empty query is left as it is.
        reranker: The cross-encoder.
        depth: How many documents each ranking has. Those after the best `RERANKED` keep their order.

    Returns:
        Minus the rank of each document, counted from 0, by query id and document id.
    """
    rankings = {}
    for query, ranking in rank_by_index(index, queries, "hybrid", depth).items():
        text = queries[query]
        hits = index.search(text, RERANKED, method="hybrid", reranker=reranker) if text.strip() else []
        order = dict.fromkeys([hit.id for hit in hits] + list(ranking))
        rankings[query] = {document: float(-rank) for rank, document in enumerate(order)}
    return rankings


def score_rankings(
    rankings: Mapping[str, Mapping[str, float]], judgments: Mapping[str, Mapping[str, int]]
) -> RankingScores:
    """Return the metrics of rankings over all judged queries. A query without a ranking scores 0.

    Args:
        rankings: Scores by query id and document id.
        judgments: Relevance by query id and document id. A document above 0 is relevant.

    Raises:
        DataError: If no query has a relevant document.
    """
    scores = RankingScores()
    for query, judged in judgments.items():
        scores = scores.update(query, rankings.get(query, {}), judged)
    if not scores.scores:
        raise DataError(f"none of the {len(judgments)} judged queries has a relevant document: nothing can be scored")
    return scores


def retrieval_notes(
    scores: RankingScores, rankings: Mapping[str, object], judgments: Mapping[str, object]
) -> list[str]:
    """Return notes with the counts of queries without relevant documents, without a ranking and without judgments."""
    counts = {
        "queries without a relevant document, which are left out": len(judgments) - len(scores.scores),
        "queries without a ranking, which count 0": sum(query not in rankings for query in scores.scores),
        "rankings of queries without judgments, which are not used": sum(query not in judgments for query in rankings),
    }
    return [f"{description}: {count:,}" for description, count in counts.items() if count]


@dataclass(frozen=True, kw_only=True, slots=True)
class Relevance:
    """The relevance judgments of a split, or of a file."""

    split: str  # name of the split, or of the file
    judgments: dict[str, dict[str, int]]  # relevance by query id and document id


def read_relevance(data: object, split: str | None) -> Relevance:
    """Read the relevance judgments of a data set in BEIR's layout, or of a qrels file.

    Args:
        data: The folder of the data set, or the file.
        split: Name of the split of a data set. If None, its first one, test before dev. A file has no splits.

    Raises:
        HeedfulError: If `data` is neither a data set nor a file, or if it has no such split.
    """
    if folder := beir_folder(data):
        chosen = split or folder.splits[0]
        return Relevance(split=chosen, judgments=folder.judgments(chosen))
    if not isinstance(data, str | Path) or Path(data).is_dir():
        raise HeedfulError(
            f"{data} has no relevance judgments: give a qrels file, or a folder in BEIR's layout with corpus.jsonl, "
            "queries.jsonl and qrels/test.tsv"
        )
    if split is not None:
        raise HeedfulError(f"split is {split!r}, but {data} is a file of judgments without splits: leave it out")
    return Relevance(split=Path(data).name, judgments=read_judgments(Path(data)))


def save_rankings(path: Path, rankings: Mapping[str, Mapping[str, float]], source: str) -> None:
    """Write rankings as a TREC run. Its tag is the last part of `source`, which is the model's path or name."""
    write_rankings(path, rankings.items(), re.sub(r"\W+", "-", Path(source).name).strip("-") or "heedful")
