"""Search over the Cranfield collection, with the functions of benchmarks/search.py."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from heedful import SearchIndex
from heedful.runs.evaluate_retrieval import score_rankings

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("HEEDFUL_DATA", "missing")) / "tasks" / "cranfield"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module benchmarks/search.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("search")


def test_records_are_parsed(benchmark: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(".I 1\n.T\na title\n.W\nfirst line\n .second . line\n.I 2\n.T\n.W\n")
    assert list(benchmark.records(tmp_path / "file")) == [
        {"I": "1", "T": "a title", "W": "first line .second . line"},
        {"I": "2", "T": "", "W": ""},
    ]


def test_the_time_of_each_format_is_measured(benchmark: Any) -> None:
    rows = benchmark.speed(300, rounds=2)
    assert [row["format"] for row in rows] == ["float32", "int8", "binary"]
    assert all(row["median ms"] > 0 for row in rows)
    assert "| int8 | 300 |" in benchmark.tables([], rows, [])[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not DATA.is_dir(), reason="HEEDFUL_DATA has no Cranfield")
def test_hybrid_is_at_least_as_good_as_bm25(benchmark: Any, tmp_path: Path) -> None:
    documents, queries, judgments = benchmark.cranfield(DATA)
    assert (len(documents), len(queries)) == (1400, 225)
    index = SearchIndex.create(tmp_path / "index", model=benchmark.minilm())
    index.add(documents)
    ndcg = {
        method: score_rankings(benchmark.rankings_of(index, queries, method), judgments).compute()["ndcg@10"]
        for method in benchmark.METHODS
    }
    assert ndcg["words"] > 0.35 and ndcg["vectors"] > 0.35
    assert ndcg["hybrid"] >= ndcg["words"]
