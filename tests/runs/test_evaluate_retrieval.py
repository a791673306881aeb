"""Evaluation of retrieval: the ranking of a plain computation, its metrics, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import heedful
from heedful.bundled import BUNDLED_ENCODER
from heedful.cli import main
from heedful.data.retrieval.documents import Document
from heedful.data.retrieval.trec import read_rankings
from heedful.errors import HeedfulError
from heedful.runs import evaluate_retrieval
from tests.data.retrieval.test_retrieval_files import write_beir

TEXTS = ["The ship left the harbour.", "Bread is baked in an oven.", "A boat came home.", "Snow fell on the hills."]
QUERIES = {"q1": "boats at sea", "q2": "the baker", "q3": "winter weather"}
JUDGED = {"q1": {"d0": 2, "d2": 1}, "q2": {"d1": 1}, "q3": {"d3": 1}}


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code


def folder_of(path: Path) -> Path:
    (path / "qrels").mkdir(parents=True)
    rows = [{"_id": f"d{number}", "text": text, "title": ""} for number, text in enumerate(TEXTS)]
    (path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"_id": name, "text": text} for name, text in QUERIES.items()]
    (path / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"{query}\t{name}\t{value}" for query, judged in JUDGED.items() for name, value in judged.items()]
    (path / "qrels/test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    return path


@pytest.mark.parametrize("at_once", [4096, 3])
def test_the_ranking_is_that_of_plain_cosines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(evaluate_retrieval, "DOCUMENT_CHUNK", at_once)
    monkeypatch.setattr(evaluate_retrieval, "QUERY_CHUNK", 2)
    evaluation = heedful.evaluate(BUNDLED_ENCODER, folder_of(tmp_path / "d"), predictions=tmp_path / "run.trec")
    engine = heedful.Engine(BUNDLED_ENCODER)
    a, b = engine.encode(list(QUERIES.values())), engine.encode(TEXTS)
    cosines = (a @ b.T) / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)
    rankings = read_rankings(tmp_path / "run.trec")
    for row, query in zip(cosines, QUERIES, strict=True):
        assert [rankings[query][f"d{number}"] for number in range(len(TEXTS))] == pytest.approx(row.tolist(), abs=1e-5)
    assert evaluation.metric == "ndcg@10" and evaluation.split == "test" and evaluation.numbers["count"] == 3
    expected = evaluate_retrieval.score_rankings(rankings, JUDGED)
    assert evaluation.numbers == expected.compute() and evaluation.intervals == expected.intervals(0)
    again = heedful.evaluate(str(tmp_path / "run.trec"), tmp_path / "d")
    assert again.numbers == evaluation.numbers


def test_the_command_prints_metrics_with_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "d")
    (tmp_path / "bm25.trec").write_text("q1 Q0 d0 1 2.5 x\nq2 Q0 d0 1 1.0 x\nq9 Q0 d1 1 1.0 x\n")
    (tmp_path / "qrels.txt").write_text("q1 0 d0 1\nq2 0 d1 1\nq3 0 d3 1\nq4 0 d3 0\n")
    run("evaluate", "bm25.trec", "--data", "qrels.txt")
    printed = capsys.readouterr()
    assert "qrels.txt, 3 examples" in printed.out and "ndcg@10" in printed.out and "33.3 %" in printed.out
    assert "queries without a relevant document, which are left out: 1" in printed.err
    assert "queries without a ranking, which count 0: 1" in printed.err
    assert "rankings of queries without judgments, which are not used: 1" in printed.err
    run("evaluate", BUNDLED_ENCODER, "--data", "d", "--json")
    numbers = json.loads(capsys.readouterr().out)["numbers"]
    assert numbers["count"] == 3 and 0 < numbers["ndcg@10"] <= 1
    for wrong, message in (
        (["bm25.trec", "--data", "qrels.txt", "--split", "test"], "qrels.txt is a file of judgments without splits"),
        (["bm25.trec", "--data", "."], "has no relevance judgments: give a qrels file"),
        (
            ["bm25.trec", "--data", "d", "--predictions", "x"],
            "predictions is .*, which has no effect on the evaluation",
        ),
        ([BUNDLED_ENCODER, "--data", "d", "--split", "dev"], 'has no split "dev"; expected one of test'),
        ([BUNDLED_ENCODER, "--data", "d", "--on-bad-row", "skip"], "--on-bad-row has no effect on the evaluation"),
    ):
        with pytest.raises(SystemExit):
            main(["evaluate", *wrong])
        assert re.search(message, capsys.readouterr().err), wrong


def test_an_index_is_evaluated_by_each_method(tmp_path: Path) -> None:
    index = heedful.SearchIndex.create(tmp_path / "index", vectors="float32")
    index.add([Document(id=f"d{number}", text=text) for number, text in enumerate(TEXTS) if number != 1])
    data = folder_of(tmp_path / "d")
    evaluation = heedful.evaluate(tmp_path / "index", data, predictions=tmp_path / "run.trec")
    expected = evaluate_retrieval.score_rankings(read_rankings(tmp_path / "run.trec"), JUDGED)
    assert evaluation.metric == "ndcg@10" and evaluation.numbers["ndcg@10"] == expected.compute()["ndcg@10"]
    words = {
        query: {hit.id: hit.score for hit in index.search(text, method="words")} for query, text in QUERIES.items()
    }
    by_words = evaluate_retrieval.score_rankings(words, JUDGED)
    assert evaluation.numbers["words_map"] == by_words.compute()["map"]
    assert evaluation.intervals["words_map"] == by_words.intervals(0)["map"] and "vectors_mrr" in evaluation.numbers
    assert "judged documents that the index does not have: 1" in evaluation.stated
    with pytest.raises(HeedfulError, match="has no queries with relevance judgments, on which an index is evaluated"):
        heedful.evaluate(tmp_path / "index", tmp_path)
    with pytest.raises(HeedfulError, match="precision is 'int8', which has no effect on the evaluation of retrieval"):
        heedful.evaluate(tmp_path / "index", data, precision="int8")


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    bundle = heedful.load(BUNDLED_ENCODER, head="masked_lm")
    with pytest.raises(HeedfulError, match="has a masked_lm head, and documents are ranked by sentence embeddings"):
        heedful.evaluate(bundle, folder_of(tmp_path / "d"))
    data = write_beir(tmp_path / "e")
    (data / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t0\n")
    with pytest.raises(HeedfulError, match="none of the 1 judged queries has a relevant document"):
        heedful.evaluate(BUNDLED_ENCODER, data)
    (data / "corpus.jsonl").write_text("\n")
    with pytest.raises(HeedfulError, match="no documents to rank"):
        heedful.evaluate(BUNDLED_ENCODER, data)
