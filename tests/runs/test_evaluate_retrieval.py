"""Evaluation of retrieval: rankings against a brute-force computation, their metrics, and the command."""

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
from heedful.search import index as index_module
from tests.data.retrieval.test_retrieval_files import write_beir
from tests.support.model_folders import make_model_dir

TEXTS = ["The ship left the harbour.", "Bread is baked in an oven.", "A boat came home.", "Snow fell on the hills."]
QUERIES = {"q1": "boats at sea", "q2": "the baker", "q3": "winter weather"}
JUDGMENTS = {"q1": {"d0": 2, "d2": 1}, "q2": {"d1": 1}, "q3": {"d3": 1}}  # relevance by query and document


def run_command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert not exit_info.value.code


def write_dataset(folder: Path) -> Path:
    """Write TEXTS, QUERIES and JUDGMENTS in BEIR's layout."""
    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{number}", "text": text, "title": ""} for number, text in enumerate(TEXTS)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    queries = [{"_id": id, "text": text} for id, text in QUERIES.items()]
    (folder / "queries.jsonl").write_text("".join(json.dumps(query) + "\n" for query in queries))
    lines = ["query-id\tcorpus-id\tscore"]
    for query, judged in JUDGMENTS.items():
        lines += [f"{query}\t{document}\t{relevance}" for document, relevance in judged.items()]
    (folder / "qrels/test.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("documents_per_chunk", [4096, 3])
def test_documents_are_ranked_by_cosines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents_per_chunk: int
) -> None:
    monkeypatch.setattr(evaluate_retrieval, "DOCUMENT_CHUNK", documents_per_chunk)
    monkeypatch.setattr(evaluate_retrieval, "QUERY_CHUNK", 2)
    data, rankings_file = write_dataset(tmp_path / "d"), tmp_path / "run.trec"
    evaluation = heedful.evaluate(BUNDLED_ENCODER, data, predictions=rankings_file)
    engine = heedful.Engine(BUNDLED_ENCODER)
    queries, documents = engine.encode(list(QUERIES.values())), engine.encode(TEXTS)
    query_norms, document_norms = np.linalg.norm(queries, axis=1), np.linalg.norm(documents, axis=1)
    cosines = (queries @ documents.T) / query_norms[:, None] / document_norms
    rankings = read_rankings(rankings_file)
    for query, expected_scores in zip(QUERIES, cosines.tolist(), strict=True):
        scores = [rankings[query][f"d{number}"] for number in range(len(TEXTS))]
        assert scores == pytest.approx(expected_scores, abs=1e-5)
    assert evaluation.metric == "ndcg@10"
    assert evaluation.split == "test"
    assert evaluation.numbers["count"] == 3
    expected = evaluate_retrieval.score_rankings(rankings, JUDGMENTS)
    assert evaluation.numbers == expected.compute()
    assert evaluation.intervals == expected.intervals(0)
    of_rankings_file = heedful.evaluate(str(rankings_file), data)
    assert of_rankings_file.numbers == evaluation.numbers


def test_the_command_prints_metrics_with_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "d")
    (tmp_path / "bm25.trec").write_text("q1 Q0 d0 1 2.5 x\nq2 Q0 d0 1 1.0 x\nq9 Q0 d1 1 1.0 x\n")
    (tmp_path / "qrels.txt").write_text("q1 0 d0 1\nq2 0 d1 1\nq3 0 d3 1\nq4 0 d3 0\n")
    run_command("evaluate", "bm25.trec", "--data", "qrels.txt")
    printed = capsys.readouterr()
    assert "qrels.txt, 3 examples" in printed.out
    assert "ndcg@10" in printed.out
    assert "33.3 %" in printed.out
    assert "queries without a relevant document, which are left out: 1" in printed.err
    assert "queries without a ranking, which count 0: 1" in printed.err
    assert "rankings of queries without judgments, which are not used: 1" in printed.err
    run_command("evaluate", BUNDLED_ENCODER, "--data", "d", "--json")
    numbers = json.loads(capsys.readouterr().out)["numbers"]
    assert numbers["count"] == 3
    assert 0 < numbers["ndcg@10"] <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bm25.trec --data qrels.txt --split test", "qrels.txt is a file of judgments without splits"),
        ("bm25.trec --data .", "has no relevance judgments: give a qrels file"),
        ("bm25.trec --data d --predictions x", "predictions is .*, which has no effect on the evaluation"),
        (f"{BUNDLED_ENCODER} --data d --split dev", 'has no split "dev"; expected one of test'),
        (f"{BUNDLED_ENCODER} --data d --on-bad-row skip", "--on-bad-row has no effect on the evaluation"),
    ],
)
def test_options_without_effect_on_retrieval_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "d")
    (tmp_path / "bm25.trec").write_text("q1 Q0 d0 1 2.5 x\n")
    (tmp_path / "qrels.txt").write_text("q1 0 d0 1\n")
    with pytest.raises(SystemExit):
        main(["evaluate", *arguments.split()])
    assert re.search(message, capsys.readouterr().err)


def test_an_index_is_evaluated_by_each_method(tmp_path: Path) -> None:
    index = heedful.SearchIndex.create(tmp_path / "index", vectors="float32")
    index.add([Document(id=f"d{number}", text=text) for number, text in enumerate(TEXTS) if number != 1])
    data = write_dataset(tmp_path / "d")
    evaluation = heedful.evaluate(tmp_path / "index", data, predictions=tmp_path / "run.trec")
    expected = evaluate_retrieval.score_rankings(read_rankings(tmp_path / "run.trec"), JUDGMENTS)
    assert evaluation.metric == "ndcg@10"
    assert evaluation.numbers["ndcg@10"] == expected.compute()["ndcg@10"]
    word_rankings = {
        query: {hit.id: hit.score for hit in index.search(text, method="words")} for query, text in QUERIES.items()
    }
    by_words = evaluate_retrieval.score_rankings(word_rankings, JUDGMENTS)
    assert evaluation.numbers["words_map"] == by_words.compute()["map"]
    assert evaluation.intervals["words_map"] == by_words.intervals(0)["map"]
    assert "vectors_mrr" in evaluation.numbers
    assert "judged documents that the index does not have: 1" in evaluation.stated
    with pytest.raises(HeedfulError, match="has no queries with relevance judgments, on which an index is evaluated"):
        heedful.evaluate(tmp_path / "index", tmp_path)
    with pytest.raises(HeedfulError, match="precision is 'int8', which has no effect on the evaluation of retrieval"):
        heedful.evaluate(tmp_path / "index", data, precision="int8")


def test_a_reranked_index_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = heedful.SearchIndex.create(tmp_path / "index", vectors="float32")
    index.add([Document(id=f"d{number}", text=text) for number, text in enumerate(TEXTS)])
    data, cross_encoder = write_dataset(tmp_path / "d"), make_model_dir(tmp_path / "cross-encoder", "regression")
    plain = heedful.evaluate(tmp_path / "index", data)
    evaluation = heedful.evaluate(tmp_path / "index", data, reranker=cross_encoder, predictions=tmp_path / "run.trec")
    assert evaluation.numbers.items() > plain.numbers.items()
    rankings = read_rankings(tmp_path / "run.trec")
    expected = evaluate_retrieval.score_rankings(rankings, JUDGMENTS)
    assert evaluation.numbers["reranked_ndcg@10"] == expected.compute()["ndcg@10"]
    assert evaluation.intervals["reranked_ndcg@10"] == expected.intervals(0)["ndcg@10"]
    for query, text in QUERIES.items():
        hits = index.search(text, len(TEXTS), reranker=cross_encoder)
        assert sorted(rankings[query], key=rankings[query].__getitem__, reverse=True) == [hit.id for hit in hits]
    with_empty_query = evaluate_retrieval.rank_by_reranker(index, {"empty": " "}, heedful.Engine(cross_encoder))
    assert with_empty_query["empty"].keys() == {f"d{number}" for number in range(len(TEXTS))}
    with pytest.raises(SystemExit, match="0"):
        main(["evaluate", str(tmp_path / "index"), "--data", str(data), "--rerank", str(cross_encoder)])
    assert "reranked_ndcg@10" in capsys.readouterr().out
    (tmp_path / "a.csv").write_text("text,label\na,b\n")
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", str(tmp_path / "index"), "--data", str(tmp_path / "a.csv"), "--rerank", str(cross_encoder)])
    assert "--rerank needs an index and --data in BEIR's layout: give both" in capsys.readouterr().err
    with pytest.raises(HeedfulError, match="is not an index: give a folder of heedful index"):
        heedful.evaluate(BUNDLED_ENCODER, data, reranker=cross_encoder)


def test_the_reranked_documents_are_those_of_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they differ from the first documents of a ranking of all, since a search fuses shorter rankings."""
    for module in (evaluate_retrieval, index_module):
        monkeypatch.setattr(module, "RERANKED", 3)
    monkeypatch.setattr(index_module, "CANDIDATES", 3)
    index = heedful.SearchIndex.create(tmp_path / "index", vectors="float32")
    places = ["in the harbour", "at sea", "of the baker", "in winter", "on the hills", "near an oven"]
    texts = [f"{noun} {place}" for noun in ("a ship", "boats", "bread", "the weather") for place in places]
    index.add([Document(id=f"d{number}", text=text) for number, text in enumerate(texts)])
    reranker = heedful.Engine(make_model_dir(tmp_path / "cross-encoder", "regression"))
    queries = {"q1": "bread on a ship", "q2": "a baker in the hills", "q3": "winter weather at sea"}
    hybrid = evaluate_retrieval.rank_by_index(index, queries, "hybrid")
    reranked = evaluate_retrieval.rank_by_reranker(index, queries, reranker)
    hits = {query: [hit.id for hit in index.search(text, 3, reranker=reranker)] for query, text in queries.items()}
    assert {query: list(ranking)[:3] for query, ranking in reranked.items()} == hits
    assert any(set(hits[query]) != set(list(hybrid[query])[:3]) for query in queries)


def test_a_model_without_embeddings_and_data_without_relevant_documents_are_refused(tmp_path: Path) -> None:
    bundle = heedful.load(BUNDLED_ENCODER, head="masked_lm")
    with pytest.raises(HeedfulError, match="has a masked_lm head, and documents are ranked by sentence embeddings"):
        heedful.evaluate(bundle, write_dataset(tmp_path / "d"))
    data = write_beir(tmp_path / "e")
    (data / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t0\n")
    with pytest.raises(HeedfulError, match="none of the 1 judged queries has a relevant document"):
        heedful.evaluate(BUNDLED_ENCODER, data)
    (data / "corpus.jsonl").write_text("\n")
    with pytest.raises(HeedfulError, match="no documents to rank"):
        heedful.evaluate(BUNDLED_ENCODER, data)
