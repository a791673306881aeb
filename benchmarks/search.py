"""Search over Cranfield's 1,400 abstracts: quality of words, vectors, both and a reranker, and the time of a query.

HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/search.py [--models shipped minilm] [--rows 100000]
    [--reranker FOLDER] [--paragraphs 250000]

Queries are Cranfield's 225, with judgments of four grades: code 1, the best, has the gain 4, code 4 the gain 1. Each
metric has its 95 % interval over the queries, and each ranking its paired difference of nDCG@10 to BM25. bm25s, another
implementation of BM25, gets the same words where it is installed. A reranker orders the best 50 documents of the hybrid
ranking again. The time of a search by vectors is measured on --rows random vectors of width 384. Recall is measured on
--paragraphs paragraphs of Wikipedia and of novels, with other paragraphs as queries, by the first model: the share of
the ten nearest of float32 that a format returns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import lzma
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from engines import minilm
from numpy.typing import NDArray
from report import RESULTS, check_destination, grid, machine_busy, write

from heedful.bundled import BUNDLED_ENCODER
from heedful.data.retrieval.documents import Document
from heedful.infer.engine import Engine
from heedful.runs.evaluate_retrieval import DEPTH, rank_by_index, rank_by_reranker, score_rankings
from heedful.search.index import SearchIndex, SearchMethod
from heedful.search.vectors import VECTOR_FORMATS, VectorTable, normalized_rows
from heedful.search.words import WordIndex
from heedful.tasks.metrics import RankingScores, mean_interval

GRADES = {1: 4, 2: 3, 3: 2, 4: 1}  # gain by Cranfield's code; documents with other codes are not relevant
WIDTH = 384  # dimension of random vectors
TIMED = 25  # queries whose time is measured
CORPORA = ("wikipedia-2014-1", "wikipedia-2014-2", "wikipedia-2014-3", "wikipedia-2021", "novels")
PARAGRAPH_QUERIES = 500  # paragraphs that are queries, spread over the others
MIN_PARAGRAPH = 40  # characters
METHODS: tuple[SearchMethod, ...] = ("words", "vectors", "hybrid")
Judgments = dict[str, dict[str, int]]  # gains by the ids of queries and documents
Rankings = Mapping[str, Mapping[str, float]]  # scores by the ids of queries and documents


def cranfield(folder: Path) -> tuple[list[Document], dict[str, str], Judgments]:
    """Return the abstracts, the queries by id ("1", "2", ...), and the judgments."""
    documents = [Document(id=record["I"], text=record["W"]) for record in records(folder / "cran.all.1400")]
    queries = {str(n): record["W"] for n, record in enumerate(records(folder / "cran.qry"), start=1)}
    judgments: Judgments = {query: {} for query in queries}
    for line in (folder / "cranqrel").read_text(encoding="ascii").splitlines():
        query, document, code = line.split()
        judgments[query][document] = GRADES.get(int(code), 0)
    return documents, queries, judgments


def records(path: Path) -> Iterator[dict[str, str]]:
    """Yield the fields of each record of a file with lines .I, .T, .A, .B and .W."""
    for record in path.read_text(encoding="ascii").split("\n.I "):
        record_id, _, rest = record.removeprefix(".I ").partition("\n")
        parts = re.split(r"^\.([A-Z]) *$", rest, flags=re.MULTILINE)
        fields = dict(zip(parts[1::2], parts[2::2], strict=True))
        yield {"I": record_id.strip()} | {name: " ".join(text.split()) for name, text in fields.items()}


def by_bm25s(documents: Sequence[Document], queries: Mapping[str, str]) -> Rankings:
    """Rank by bm25s, on the words into which Heedful splits texts."""
    import bm25s

    words = WordIndex(None, "english")
    retriever = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    retriever.index([words.terms(document.content) for document in documents], show_progress=False)
    query_words = [words.terms(query) for query in queries.values()]
    indices, scores = retriever.retrieve(query_words, k=DEPTH, show_progress=False, sorted=True)
    return {
        query: {
            documents[index].id: float(score)
            for index, score in zip(query_indices, query_scores, strict=True)
            if score > 0
        }
        for query, query_indices, query_scores in zip(queries, indices, scores, strict=True)
    }


class CachedEngine(Engine):
    """An engine that encodes each list of documents once: indexes in several formats share the vectors."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.cache: dict[tuple[str, ...], NDArray[np.float32]] = {}

    def encode_document(self, texts: str | Iterable[str]) -> NDArray[np.float32]:
        key = tuple(texts)
        if key not in self.cache:
            self.cache[key] = super().encode_document(key)
        return self.cache[key]


def median_ms(search: Callable[[str], object], queries: Sequence[str]) -> float:
    """Return the median time of a query, in milliseconds."""
    seconds = []
    for query in queries:
        start = time.perf_counter()
        search(query)
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def row(name: str, scores: RankingScores, baseline: RankingScores, ms: float | None) -> dict[str, Any]:
    """Return the metrics of an arm with their intervals, and its difference to the baseline in nDCG@10."""
    column = scores.names.index("ndcg@10")
    differences = [scores.scores[query][column] - baseline.scores[query][column] for query in scores.scores]
    return {
        "arm": name,
        "numbers": scores.compute(),
        "intervals": scores.intervals(0),
        "difference": mean_interval(differences, seed=0, ids=list(scores.scores)),
        "median ms": ms,
    }


def quality(models: Mapping[str, str], folder: Path, reranker: Engine | None) -> list[dict[str, Any]]:
    """Measure each arm on Cranfield; return a row for each."""
    documents, queries, judgments = cranfield(folder)
    timed_queries = list(queries.values())[:TIMED]
    rows: list[dict[str, Any]] = []
    baseline: RankingScores | None = None  # scores of BM25, which are the same for all models
    for name, model in models.items():
        engine = CachedEngine(model)
        for vectors in VECTOR_FORMATS:
            with tempfile.TemporaryDirectory() as scratch:
                start = time.perf_counter()
                SearchIndex.create(Path(scratch) / "index", model=model, vectors=vectors)
                index = SearchIndex(Path(scratch) / "index", engine=engine)
                index.add(documents)
                print(f"{name} {vectors}: indexed in {time.perf_counter() - start:.1f} s", flush=True)
                for method in METHODS:
                    if method == "words" and baseline is not None:
                        continue  # BM25 is measured already
                    scores = score_rankings(rank_by_index(index, queries, method), judgments)
                    baseline = baseline or scores
                    arm = "BM25" if method == "words" else f"{name}, {vectors}, {method}"
                    ms = median_ms(partial(index.search, method=method), timed_queries)
                    rows.append(row(arm, scores, baseline, ms))
                    print(arm, rows[-1]["numbers"], flush=True)
                if reranker is not None and vectors == "float32":
                    assert baseline is not None
                    scores = score_rankings(rank_by_reranker(index, queries, reranker), judgments)
                    ms = median_ms(partial(index.search, method="hybrid", reranker=reranker), timed_queries)
                    rows.append(row(f"{name}, {vectors}, hybrid, reranked", scores, baseline, ms))
                    print(rows[-1]["arm"], rows[-1]["numbers"], flush=True)
    assert baseline is not None
    if importlib.util.find_spec("bm25s"):
        rows.append(row("bm25s", score_rankings(by_bm25s(documents, queries), judgments), baseline, None))
    return rows


def speed(count: int, rounds: int = 30) -> list[dict[str, Any]]:
    """Measure the time of the exact search of one query among random vectors."""
    generator = np.random.default_rng(0)
    vectors = normalized_rows(generator.normal(size=(count, WIDTH)).astype(np.float32))
    noise = generator.normal(size=(rounds, WIDTH)).astype(np.float32)
    queries = normalized_rows(vectors[:rounds] + 0.1 * noise)
    rows = []
    for vector_format in VECTOR_FORMATS:
        table = VectorTable.of(vectors, vector_format)
        seconds = []
        for query in queries:
            start = time.perf_counter()
            table.nearest(query[None], 10)
            seconds.append(time.perf_counter() - start)
        rows.append(
            {
                "format": vector_format,
                "rows": count,
                "median ms": 1000 * statistics.median(seconds),
                "least ms": 1000 * min(seconds),
            }
        )
        print(rows[-1], flush=True)
    return rows


def paragraphs(folder: Path) -> Iterator[str]:
    """Yield the paragraphs of the corpora, without headings."""
    for corpus in CORPORA:
        with lzma.open(folder / f"{corpus}.jsonl.xz", "rt", encoding="utf-8") as lines:
            for line in lines:
                yield from (text for text in json.loads(line)["text"].split("\n\n") if len(text) >= MIN_PARAGRAPH)


def recall(model: str, count: int, folder: Path) -> list[dict[str, Any]]:
    """Measure the share of the ten nearest paragraphs by float32 vectors that each format returns, and the time."""
    texts = list(islice(paragraphs(folder), count + PARAGRAPH_QUERIES))
    start = time.perf_counter()
    vectors = normalized_rows(Engine(model).encode_document(texts))
    print(f"encoded {len(texts)} paragraphs in {time.perf_counter() - start:.0f} s", flush=True)
    is_query = np.zeros(len(texts), bool)
    is_query[np.linspace(0, len(texts) - 1, PARAGRAPH_QUERIES).astype(int)] = True
    documents, queries = vectors[~is_query], vectors[is_query]
    nearest: dict[str, list[set[int]]] = {}
    rows = []
    for vector_format in VECTOR_FORMATS:
        table = VectorTable.of(documents, vector_format)
        seconds = []
        nearest[vector_format] = []
        for query in queries:
            start = time.perf_counter()
            _, indices = table.nearest(query[None], 10)
            seconds.append(time.perf_counter() - start)
            nearest[vector_format].append(set(indices[0].tolist()))
        shares = [
            len(returned & exact) / 10
            for returned, exact in zip(nearest[vector_format], nearest["float32"], strict=True)
        ]
        ms = 1000 * statistics.median(seconds)
        rows.append({"format": vector_format, "rows": len(documents), "recall@10": statistics.mean(shares), "ms": ms})
        print(rows[-1], flush=True)
    return rows


def tables(
    rows: Sequence[dict[str, Any]], times: Sequence[dict[str, Any]], recalls: Sequence[dict[str, Any]]
) -> list[str]:
    """Format the results of `quality`, `speed` and `recall` as Markdown, in a table each unless they are empty."""
    sections = []
    if rows:
        sections.append("## Cranfield, percent with 95 % intervals\n\n" + quality_table(rows))
    if times:
        columns = ["format", "rows", "median ms", "least ms"]
        cells = [
            [line["format"], f"{line['rows']:,}", f"{line['median ms']:.2f}", f"{line['least ms']:.2f}"]
            for line in times
        ]
        sections.append("## Exact search of one query, width 384\n\n" + grid(columns, cells))
    if recalls:
        columns = ["format", "paragraphs", "recall@10 of float32, percent", "median ms"]
        cells = [
            [line["format"], f"{line['rows']:,}", f"{100 * line['recall@10']:.2f}", f"{line['ms']:.2f}"]
            for line in recalls
        ]
        sections.append("## The ten nearest paragraphs\n\n" + grid(columns, cells))
    return sections


def quality_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows of `quality` as Markdown."""

    def percent(value: float, interval: Mapping[str, float]) -> str:
        return f"{100 * value:.2f} ({100 * interval['low']:.2f}–{100 * interval['high']:.2f})"

    metrics = ["ndcg@10", "map", "mrr", "recall@100"]
    lines = []
    for row in rows:
        scores = [percent(row["numbers"][metric], row["intervals"][metric]) for metric in metrics]
        difference = "" if row["arm"] == "BM25" else percent(row["difference"]["mean"], row["difference"])
        ms = "" if row["median ms"] is None else f"{row['median ms']:.1f}"
        lines.append([row["arm"], *scores, difference, ms])
    return grid(["arm", *metrics, "nDCG@10 less BM25's", "median ms"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure quality and speed, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=("shipped", "minilm"), default=["shipped", "minilm"])
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000])
    parser.add_argument("--reranker", help="folder of a cross-encoder")
    parser.add_argument("--paragraphs", type=int, default=0, help="number of paragraphs for the measurement of recall")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    check_destination(options.output)
    start, start_busy, start_own = time.perf_counter(), machine_busy(), time.process_time()
    makers: dict[str, Callable[[], str]] = {"shipped": lambda: BUNDLED_ENCODER, "minilm": minilm}
    models = {name: makers[name]() for name in options.models}
    data = Path(os.environ["HEEDFUL_DATA"])
    reranker = Engine(options.reranker) if options.reranker else None
    rows = quality(models, data / "tasks" / "cranfield", reranker) if models else []
    first = next(iter(models.values()), BUNDLED_ENCODER)
    recalls = recall(first, options.paragraphs, data / "corpus") if options.paragraphs else []
    times = [line for count in options.rows for line in speed(count)]
    others = machine_busy() - start_busy - (time.process_time() - start_own)
    share = max(0.0, others / (time.perf_counter() - start) / (os.cpu_count() or 1))
    about = (__doc__ or "").strip().split("\n\n", 2)[2]
    about += f"\n\nOther processes took {share:.0%} of the machine meanwhile; where that is much, times are too long."
    record = {"quality": rows, "speed": times, "recall": recalls}
    print(write("search", about, tables(rows, times, recalls), record, options.output))


if __name__ == "__main__":
    main()
