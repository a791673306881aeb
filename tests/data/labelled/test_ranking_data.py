"""Queries with their documents are read from lists, numbered columns, or rows with a relevance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heedful.data import Dataset, DataSettings, RankExample, Skip, check, read
from heedful.data.labelled.statistics import check_learnable, compute_stats, dev_split_problem
from heedful.errors import DataError, HeedfulError

GRADES = "query,text,label\nq,a,0\nr,c,1\nq,b,2\nr,d,0.5\nq,e,1\n"


def write_and_read(path: Path, data: Any, dev_fraction: float = 0.0, **settings: Any) -> Dataset[RankExample]:
    path.write_text(data if isinstance(data, str) else "\n".join(map(json.dumps, data)))
    return read(path, RankExample, DataSettings(dev_fraction=dev_fraction, **settings), on_bad_row=Skip())


def only_example(dataset: Dataset[RankExample]) -> RankExample:
    (example,) = dataset.examples("train")
    return example


@pytest.mark.parametrize(
    "row",
    [
        {"query": "q", "positive": "p", "negative": ["a", "b"]},
        {"question": "q", "positive": "p", "negatives": '["a", "b"]'},
        {"anchor": "q", "positive": "p", "negative_1": "a", "negative_2": "b", "negative_3": ""},
        {"query": "q", "positive": "p", "negative": "a", "negative_1": "b"},
        {"anchor": "q", "positive": "p", "hard_negative_10": "b", "hard_negative_9": "a", "hard_negative_11": None},
    ],
)
def test_a_row_with_irrelevant_documents(tmp_path: Path, row: dict[str, Any]) -> None:
    example = only_example(write_and_read(tmp_path / "a.jsonl", [row]))
    assert (example.query, example.documents, example.relevance) == ("q", ("p", "a", "b"), (1.0, 0.0, 0.0))
    assert example.texts == ("q", "p", "a", "b")
    assert example.group == "q"
    assert example.teacher_scores == ()


def test_a_negative_that_is_a_string_is_one_document(tmp_path: Path) -> None:
    example = only_example(
        write_and_read(tmp_path / "a.jsonl", [{"query": "q", "positive": "p", "negative": "a|b, c"}])
    )
    assert example.documents == ("p", "a|b, c")


def test_rows_of_one_query_are_one_example_and_the_most_relevant_come_first(tmp_path: Path) -> None:
    first, second = write_and_read(tmp_path / "a.csv", GRADES).examples("train")
    assert (first.query, first.documents, first.relevance, first.line) == ("q", ("b", "e", "a"), (2.0, 1.0, 0.0), 2)
    assert (second.documents, second.relevance, second.target) == (("c", "d"), (1.0, 0.5), "1.0\x1f0.5")


def test_rows_of_one_query_may_be_in_several_files(tmp_path: Path) -> None:
    for name, row in (("a", "q,a,0\n"), ("b", "q,b,1\n")):
        (tmp_path / f"{name}.csv").write_text("query,text,label\n" + row)
    dataset = read([tmp_path / "a.csv", tmp_path / "b.csv"], RankExample, DataSettings(dev_fraction=0.0))
    assert only_example(dataset).documents == ("b", "a")


def test_columns_may_be_named(tmp_path: Path) -> None:
    columns = {"query": "qtext", "document": "atext", "relevance": "label"}
    example = only_example(write_and_read(tmp_path / "a.csv", "qtext,label,atext\nq,1,a\nq,0,b\n", columns=columns))
    assert example.documents == ("a", "b")


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([3.0, 1.0, -2.0], (3.0, 1.0, -2.0)), ([2.0, 5.0], (0.0, -2.0, -5.0)), ("[2, 5]", (0.0, -2.0, -5.0))],
)
def test_scores_of_a_teacher_or_margins(tmp_path: Path, scores: Any, expected: tuple[float, ...]) -> None:
    row = {"query": "q", "positive": "p", "negative": ["a", "b"], "teacher_scores": scores}
    assert only_example(write_and_read(tmp_path / "a.jsonl", [row])).teacher_scores == expected


def test_a_teacher_score_on_each_row(tmp_path: Path) -> None:
    dataset = write_and_read(tmp_path / "a.csv", "query,text,label,teacher_score\nq,a,0,-1.5\nq,b,1,4\n")
    assert only_example(dataset).teacher_scores == (4.0, -1.5)
    assert compute_stats(dataset, ["train"]).has_teacher_scores


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "q", "positive": "p", "negative": []}, "is empty, expected a text that is not relevant"),
        ({"query": "q", "positive": "p", "negative": None}, "is empty, expected a text that is not relevant"),
        ({"query": "q", "positive": "p", "negative": 3}, "is 3, expected a text or a list of texts"),
        ({"query": "q", "text": "p", "label": -1}, "is -1, expected 0 for an irrelevant text, or more"),
        ({"query": "q", "text": "p", "label": "yes"}, 'is "yes", expected a number'),
        (
            {"query": "q", "positive": "p", "negative": ["a"], "teacher_scores": [1, 2, 3]},
            "has 3 numbers, expected 2 scores, or 1 margins",
        ),
        ({"query": "q", "text": "p", "label": 1, "margin": []}, "has 0 numbers, expected 1 score"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    dataset = write_and_read(tmp_path / "a.jsonl", [row])
    assert not list(dataset.examples("train"))
    (bad_row,) = dataset.row_errors.first
    assert message in bad_row.reason


@pytest.mark.parametrize(
    ("data", "columns", "message"),
    [
        (
            '{"query": "q", "other": "a"}',
            None,
            r'which column is the document\? None is called "document" or "passage" or "text"',
        ),
        ("query,text\nq,a\n", None, r"which column is the relevance\?"),
        ("a,b,c\nq,x,1\n", {"query": "a", "document": "b"}, r"which column is the relevance\?"),
        ("a,b,c\nq,x,y\n", {"query": "a", "positive": "b"}, r"which column is the negative\?"),
        ("a,b\nq,x\n", {"query": "a", "text": "b"}, 'column "text" is not one of query, positive, negative'),
    ],
)
def test_columns_that_are_missing(tmp_path: Path, data: str, columns: Any, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        write_and_read(tmp_path / ("a.jsonl" if data.startswith("{") else "a.csv"), data, columns=columns)


def test_the_report_counts_queries_that_splits_share(tmp_path: Path) -> None:
    for split, document in (("train", "a long document of six words"), ("dev", "b")):
        (tmp_path / f"{split}.csv").write_text(f"query,text,label\nq,{document},1\n")
    report = check(read(tmp_path, RankExample, DataSettings()))
    assert report.splits["train"].lengths[-1] == 7
    (leak,) = report.leaks
    assert (leak.texts, leak.groups) == (0, 1)


def test_statistics(tmp_path: Path) -> None:
    dataset = write_and_read(tmp_path / "a.csv", GRADES + "s,x,1\n")
    stats = compute_stats(dataset, ["train"])
    assert (stats.counts, stats.num_documents, stats.max_relevance) == ({"train": 3}, 6, 2.0)
    assert stats.num_rankable_queries == {"train": 2}
    check_learnable(dataset, stats)
    alone = write_and_read(tmp_path / "a.csv", "query,text,label\ns,x,1\nt,x,0\n")
    with pytest.raises(DataError, match="none of the 2 queries of train has documents that differ in relevance"):
        check_learnable(alone, compute_stats(alone, ["train"]))


@pytest.mark.parametrize("splits_with_scores", [["train"], ["dev"], ["train", "dev"]])
def test_teacher_scores_are_needed_only_in_train(splits_with_scores: list[str]) -> None:
    """All examples of train need them; other splits are evaluated without them.

    The data set is a stand-in, since `read` accepts teacher scores only in all splits or in none.
    """
    example = RankExample(query="q", documents=("p", "a"), relevance=(1.0, 0.0))
    examples = {
        split: [replace(example, teacher_scores=(2.0, 1.0)) if split in splits_with_scores else example]
        for split in ("train", "dev")
    }
    dataset: Any = SimpleNamespace(kind=RankExample, has_generated_dev=False, examples=examples.__getitem__)
    assert compute_stats(dataset, ["train", "dev"]).has_teacher_scores == ("train" in splits_with_scores)
    examples["train"].append(replace(example, teacher_scores=()))
    assert not compute_stats(dataset, ["train", "dev"]).has_teacher_scores


def test_no_dev_split_is_made_without_rankable_queries(tmp_path: Path) -> None:
    rows = [f"q{number},{text},{label}" for number in range(30) for text, label in (("a", 1), ("b", 1))]
    dataset = write_and_read(
        tmp_path / "a.csv", "\n".join(["query,text,label", *rows, "q,a,1", "q,b,0\n"]), dev_fraction=0.2
    )
    stats = compute_stats(dataset, ["train", "dev"])
    assert stats.counts["dev"] > 0
    assert "queries would have documents that differ in relevance" in dev_split_problem(dataset, stats)
