"""Columns found by name, given by name or number, or asked for in words that help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heedful.data import Choices, DataSettings, Labelled, LeaveOut, Pair, Scored, Source, Tagged, read
from heedful.errors import HeedfulError


def opened(path: Path, data: Any, kind: Any = None, **settings: Any) -> Source[Any]:
    path.write_text(data if isinstance(data, str) else "\n".join(map(json.dumps, data)))
    return read(path, kind, DataSettings(dev=0.0, **settings), bad_rows=LeaveOut())


def test_given_columns(tmp_path: Path) -> None:
    path, data = tmp_path / "a.csv", "title,review,stars\nT,good,5\nU,bad,1\n"
    source = opened(path, data, columns={"text": "review", "label": "stars"})
    assert [(each.text, each.label) for each in source.examples("train")] == [("good", "5"), ("bad", "1")]
    assert 'columns: text="review", label="stars"; not used: "title"' in source.stated
    source = opened(path, data, columns={"text": ("title", "review"), "label": "3"})
    assert [each.text for each in source.examples("train")] == ["T good", "U bad"]
    source = opened(path, data, columns={"text": 2, "label": 3}, header=True)
    assert next(source.examples("train")).text == "good"
    source = opened(path, "5,good\n1,bad\n", columns={"text": 2, "label": 1})
    assert [(each.line, each.text) for each in source.examples("train")] == [(1, "good"), (2, "bad")]
    assert {"a.csv: no header", "columns: text=column 2, label=column 1"} < set(source.stated)


@pytest.mark.parametrize(
    ("data", "columns", "message"),
    [
        ("review,stars\na,1\n", None, r'which column is the text\? None is called "text" or "sentence"|the label'),
        (
            "good,1\nbad,0\n",
            None,
            r'There is no header that is understood; a row is "good", "1". Say --set columns.text=NUMBER',
        ),
        (
            "text,stars\na,1\n",
            {"label": "star"},
            r'has no column "star", but "text", "stars" \(did you mean "stars"\?\)',
        ),
        ("text,stars\na,1\n", {"label": 3}, "has 2 columns, and column 3 was asked for"),
        (
            "text,review,label\na,b,1\n",
            None,
            '"text" and "review" could each be the text: say which, as --set columns.text=text',
        ),
        ("text,stars\na,1\n", {"labl": "stars"}, 'column "labl" is not one of text, label, pair'),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, data: str, columns: Any, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        opened(tmp_path / "a.csv", data, Labelled, columns=columns)


def test_pairs_and_kinds(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    source = opened(path, [{"premise": "a", "hypothesis": "b", "label": "x"}])
    assert list(source.examples("train")) == [Labelled(text="a", pair="b", label="x")]
    source = opened(path, [{"sentence1": "a", "sentence2": "b", "score": 3}])
    assert list(source.examples("train")) == [Scored(text="a", pair="b", score=3.0)]
    source = opened(path, [{"anchor": "a", "positive": "b"}])
    assert list(source.examples("train")) == [Pair(a="a", b="b")]
    source = opened(path, [{"sentence1": "a", "sentence2": "b", "score": 3}], Pair)
    assert list(source.examples("train")) == [Pair(a="a", b="b", score=3.0)]
    source = opened(path, [{"tokens": ["a", "b"], "tags": ["O", "S-X"]}, {"tokens": ["a"], "tags": ["O", "O"]}])
    assert list(source.examples("train")) == [Tagged(words=("a", "b"), tags=("O", "B-X"))]
    assert str(source.sieve.first[0]).endswith(":2:tags: has 2 tags for 1 words")


OPTIONS = ["in Rome", "at home"]


@pytest.mark.parametrize(
    "row",
    [
        {"article": "He left.", "question": "Where is he?", "options": OPTIONS, "answer": "B"},
        {"article": "He left.", "question": "Where is he?", "options": OPTIONS, "answer": "at home"},
        {"context": "He left.", "question": "Where is he?", "choices": OPTIONS, "label": 1},
        {"sent1": "He left.", "sent2": "Where is he?", "ending0": OPTIONS[0], "ending1": OPTIONS[1], "label": 1},
        {"article": "He left.", "questions": ["Where is he?"], "options": [OPTIONS], "answers": ["B"]},
        {
            "passage": "He left.",
            "question": "Where is he?",
            "choices": {"text": OPTIONS, "label": ["1", "2"]},
            "answerKey": "2",
        },
    ],
)
def test_choices(tmp_path: Path, row: dict[str, Any]) -> None:
    source = opened(tmp_path / "a.jsonl", [row])
    candidates = ("Where is he? in Rome", "Where is he? at home")
    assert list(source.examples("train")) == [Choices(prompt="He left.", candidates=candidates, answer=1)]


def test_choices_in_csv(tmp_path: Path) -> None:
    data = "question,choice2,choice10,choice1,label\nWhy?,b,c,a,2\n"
    source = opened(tmp_path / "a.csv", data)
    assert list(source.examples("train")) == [Choices(prompt="Why?", candidates=("a", "b", "c"), answer=2)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (2, "answer: is 2, expected 0 to 1, a letter from A, or the text of a candidate"),
        (-1, "answer: is -1, expected 0 to 1"),
        ("C", "answer: is 2, expected 0 to 1"),
        ("x", 'answer: is "x", which is none of the candidates'),
        ("1", 'answer: is "1", which is several of the candidates'),
        (None, "answer: is missing, expected 0 to 1"),
        (True, "answer: is true, expected 0 to 1"),
    ],
)
def test_bad_answers(tmp_path: Path, answer: Any, message: str) -> None:
    source = opened(tmp_path / "a.jsonl", [{"prompt": "p", "choices": ["1", "2"], "answer": answer}])
    assert not list(source.examples("train"))
    assert str(source.sieve.first[0]).split(":1:", 1)[1].startswith(message)


def test_bad_choices(tmp_path: Path) -> None:
    rows = [
        {"article": "p", "questions": ["q"], "options": [["a", "b"]], "answers": ["A", "B"]},
        {"article": "p", "questions": ["q"], "options": [5], "answers": ["A"]},
        {"article": "p", "questions": ["q"], "options": [["a"]], "answers": ["A"]},
        {"article": "p", "questions": [], "options": [], "answers": []},
    ]
    source = opened(tmp_path / "a.jsonl", rows)
    assert not list(source.examples("train"))
    assert [bad.reason for bad in source.sieve.first] == [
        "expected 1 answers and lists of options, one a question",
        "is 5, expected a list of texts",
        "has 1 candidates, expected two or more",
    ]
