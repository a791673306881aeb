"""Search over Cranfield's 1,400 abstracts: quality of words, vectors and both, and the time of a query.

HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/search.py [--models shipped minilm] [--rows 100000]

Queries are Cranfield's 225, with judgments of four grades: code 1, the best, has the gain 4, code 4 the gain 1. Each
metric has its 95 % interval over the queries, and each ranking its paired difference of nDCG@10 to BM25. bm25s, another
implementation of BM25, gets the same words where it is installed. The time of a search by vectors is measured on --rows
random vectors of width 384.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from engines import minilm
from numpy.typing import NDArray
from report import RESULTS, check_destination, grid, machine_busy, write

from heedful.bundled import BUNDLED_ENCODER
from heedful.data.retrieval.documents import Document
from heedful.infer.engine import Engine
from heedful.runs.evaluate_retrieval import score_rankings
from heedful.search.index import SearchIndex, SearchMethod
from heedful.search.vectors import VECTOR_FORMATS, VectorTable, normalized_rows
from heedful.search.words import WordIndex
from heedful.tasks.metrics import RankingScores, mean_interval

DEPTH = 1000  # documents in a ranking
GRADES = {1: 4, 2: 3, 3: 2, 4: 1}  # gain by Cranfield's code; the others are not relevant
WIDTH = 384  # dimension of random vectors
TIMED = 25  # queries whose time is measured
METHODS: tuple[SearchMethod, ...] = ("words", "vectors", "hybrid")
Judgments = dict[str, dict[str, int]]
Rankings = Mapping[str, Mapping[str, float]]


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


def rankings_of(index: SearchIndex, queries: Mapping[str, str], method: SearchMethod) -> Rankings:
    """Return the scores of the first DEPTH documents for each query, by ids."""
    rankings = index.rank(list(queries.values()), DEPTH, method=method)
    return {
        query: {index.document(document_index).id: score for document_index, score in ranking}
        for query, ranking in zip(queries, rankings, strict=True)
    }


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


def quality(models: Mapping[str, str], folder: Path) -> list[dict[str, Any]]:
    """Measure each arm on Cranfield."""
    documents, queries, judgments = cranfield(folder)
    texts = list(queries.values())
    rows: list[dict[str, Any]] = []
    baseline: RankingScores | None = None
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
                        continue
                    scores = score_rankings(rankings_of(index, queries, method), judgments)
                    baseline = baseline or scores
                    arm = "BM25" if method == "words" else f"{name}, {vectors}, {method}"
                    ms = median_ms(partial(index.search, method=method), texts[:TIMED])
                    rows.append(row(arm, scores, baseline, ms))
                    print(arm, rows[-1]["numbers"], flush=True)
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


def tables(rows: Sequence[dict[str, Any]], times: Sequence[dict[str, Any]]) -> list[str]:
    """Format the tables of quality and of speed as Markdown."""

    def percent(value: float, interval: Mapping[str, float]) -> str:
        return f"{100 * value:.2f} ({100 * interval['low']:.2f}–{100 * interval['high']:.2f})"

    names = ["ndcg@10", "map", "mrr", "recall@100"]
    lines = []
    for row in rows:
        cells = [percent(row["numbers"][name], row["intervals"][name]) for name in names]
        difference = "" if row["arm"] == "BM25" else percent(row["difference"]["mean"], row["difference"])
        ms = "" if row["median ms"] is None else f"{row['median ms']:.1f}"
        lines.append([row["arm"], *cells, difference, ms])
    parts = []
    if lines:
        columns = ["arm", *names, "nDCG@10 less BM25's", "median ms"]
        parts.append("## Cranfield, percent with 95 % intervals\n\n" + grid(columns, lines))
    if times:
        lines = [
            [line["format"], f"{line['rows']:,}", f"{line['median ms']:.2f}", f"{line['least ms']:.2f}"]
            for line in times
        ]
        columns = ["format", "rows", "median ms", "least ms"]
        parts.append("## Exact search of one query, width 384\n\n" + grid(columns, lines))
    return parts


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure quality and speed, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=("shipped", "minilm"), default=["shipped", "minilm"])
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    check_destination(options.output)
    start, start_busy, start_own = time.perf_counter(), machine_busy(), time.process_time()
    makers: dict[str, Callable[[], str]] = {"shipped": lambda: BUNDLED_ENCODER, "minilm": minilm}
    models = {name: makers[name]() for name in options.models}
    rows = quality(models, Path(os.environ["HEEDFUL_DATA"]) / "tasks" / "cranfield") if models else []
    times = [line for count in options.rows for line in speed(count)]
    others = machine_busy() - start_busy - (time.process_time() - start_own)
    share = max(0.0, others / (time.perf_counter() - start) / (os.cpu_count() or 1))
    about = (__doc__ or "").strip().split("\n\n", 2)[2]
    about += f"\n\nOther processes took {share:.0%} of the machine meanwhile; where that is much, times are too long."
    print(write("search", about, tables(rows, times), {"quality": rows, "speed": times}, options.output))


if __name__ == "__main__":
    main()
