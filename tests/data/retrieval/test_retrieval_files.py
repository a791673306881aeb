"""Documents, relevance judgments and rankings are read from BEIR folders, TREC files and folders of texts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from heedful.data.retrieval.beir import beir_folder
from heedful.data.retrieval.documents import Document, read_documents
from heedful.data.retrieval.trec import read_judgments, read_rankings, write_rankings
from heedful.errors import DataError


def write_beir(folder: Path) -> Path:
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": "d1", "title": "Wings", "text": "lift"}, {"_id": "d2", "title": "", "text": "drag", "metadata": {}}]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "what lifts?"}\n{"_id": "q2", "text": "unjudged"}\n')
    for split in ("train", "dev", "test"):
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\n")
    return folder


def test_beir_folder(tmp_path: Path) -> None:
    assert beir_folder(tmp_path) is None
    data = beir_folder(write_beir(tmp_path / "nf"))
    assert data is not None and data.splits == ("test", "dev", "train")
    first, second = data.documents()
    assert (first.id, first.content) == ("d1", "Wings\nlift")
    assert second.content == "drag"
    assert data.queries("test") == {"q1": "what lifts?"}
    assert data.judgments("dev") == {"q1": {"d1": 2, "d2": 0}}
    with pytest.raises(DataError, match='no split "validation"; expected one of test, dev, train'):
        data.judgments("validation")
    (tmp_path / "nf/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq9\td1\t1\n")
    with pytest.raises(DataError, match=r'query "q9" is judged in test, but not in queries\.jsonl'):
        data.queries("test")


def test_a_folder_of_texts_and_tables(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.md").write_text("# One\n\nparagraph\n")
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "c.csv").write_text("text,title\nthree,T\nfour,\n")
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write('{"id": 7, "contents": "five"}\n')
    assert list(read_documents([tmp_path])) == [
        Document(id="b.txt", text="two"),
        Document(id="c.csv:2", text="three", title="T"),
        Document(id="c.csv:3", text="four"),
        Document(id="7", text="five"),
        Document(id="sub/a.md", text="# One\n\nparagraph"),
    ]
    assert [document.id for document in read_documents([tmp_path / "b.txt"])] == ["b.txt"]


def test_errors_name_the_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no document: expected files of \.txt"):
        list(read_documents([tmp_path]))
    with pytest.raises(DataError, match="no such file"):
        list(read_documents([tmp_path / "missing.txt"]))
    (tmp_path / "a.jsonl").write_text('{"id": "x", "text": "fine"}\n{"id": "y", "words": "no"}\n')
    with pytest.raises(DataError, match=r'a.jsonl:2: has no text: expected a column text or .* got \["id", "words"\]'):
        list(read_documents([tmp_path]))


def test_rankings_are_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    rankings = {"q1": {"d1": 0.1, "d2": 1 / 3}, "q2": {"d1": -5.0}}
    write_rankings(tmp_path / "run", rankings.items(), "tag")
    assert (tmp_path / "run").read_text().splitlines()[0] == "q1 Q0 d2 1 0.3333333333333333 tag"
    assert read_rankings(tmp_path / "run") == rankings
    with pytest.raises(DataError, match='the id "a b" has white space'):
        write_rankings(tmp_path / "other", [("q", {"a b": 1.0})], "tag")
    assert not (tmp_path / "other").exists()


def test_judgments_of_trec(tmp_path: Path) -> None:
    (tmp_path / "qrels").write_text("1 0 d1 2\n1 0 d2 -1\n\n2\t0\td1\t1\n2 0 d1 1\n")
    assert read_judgments(tmp_path / "qrels") == {"1": {"d1": 2, "d2": -1}, "2": {"d1": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 0 d1\n", "expected QUERY 0 DOCUMENT RELEVANCE"),
        ("1 0 d1 high\n", "expected a whole number as relevance"),
        ("1 0 d1 1\n1 0 d1 2\n", 'qrels:2: "1 0 d1 2": expected one relevance of document "d1" for query "1"'),
        ("\n", "has no relevance judgments"),
    ],
)
def test_wrong_judgments_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "qrels").write_text(text)
    with pytest.raises(DataError, match=message):
        read_judgments(tmp_path / "qrels")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 Q0 d1 1 0.5\n", "expected QUERY Q0 DOCUMENT RANK SCORE TAG"),
        ("1 Q0 d1 1 nan t\n", "expected a number as score"),
        ("1 Q0 d1 1 0.5 t\n1 Q0 d1 2 0.4 t\n", 'expected document "d1" once for query "1"'),
        ("\n", "has no ranking"),
    ],
)
def test_wrong_rankings_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run").write_text(text)
    with pytest.raises(DataError, match=message):
        read_rankings(tmp_path / "run")
