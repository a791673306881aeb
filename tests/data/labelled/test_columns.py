"""Columns found by name, given by name or number, or asked for in words that help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heedful.data import (
    ChoiceExample,
    Dataset,
    DataSettings,
    LabelledExample,
    PairExample,
    ScoredExample,
    Skip,
    TaggedExample,
    read,
)
from heedful.errors import HeedfulError


def opened(path: Path, data: Any, kind: Any = None, **settings: Any) -> Dataset[Any]:
    path.write_text(data if isinstance(data, str) else "\n".join(map(json.dumps, data)))
    return read(path, kind, DataSettings(dev_fraction=0.0, **settings), on_bad_row=Skip())


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
            r'There is no header that is understood; a row is "good", "1". Say --data.columns.text=NUMBER',
        ),
        (
            "text,stars\na,1\n",
            {"label": "star"},
            r'has no column "star", but "text", "stars" \(did you mean "stars"\?\)',
        ),
        ("text,stars\na,1\n", {"label": 3}, "has 2 columns, and column 3 was asked for"),
        (",text,\n1,a,x\n", {"text": "text", "label": 3}, 'column 3 is called "" as another is: name them apart'),
        (
            "text,review,label\na,b,1\n",
            None,
            '"text" and "review" could each be the text: say which, as --data.columns.text=text',
        ),
        ("text,stars\na,1\n", {"labl": "stars"}, 'column "labl" is not one of text, label, text_pair'),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, data: str, columns: Any, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        opened(tmp_path / "a.csv", data, LabelledExample, columns=columns)


def test_pairs_and_kinds(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    source = opened(path, [{"premise": "a", "hypothesis": "b", "label": "x"}])
    assert list(source.examples("train")) == [LabelledExample(text="a", text_pair="b", label="x")]
    source = opened(path, [{"sentence1": "a", "sentence2": "b", "score": 3}])
    assert list(source.examples("train")) == [ScoredExample(text="a", text_pair="b", score=3.0)]
    source = opened(path, [{"anchor": "a", "positive": "b"}])
    assert list(source.examples("train")) == [PairExample(anchor="a", positive="b")]
    source = opened(path, [{"sentence1": "a", "sentence2": "b", "score": 3}], PairExample)
    assert list(source.examples("train")) == [PairExample(anchor="a", positive="b", score=3.0)]
    source = opened(path, [{"tokens": ["a", "b"], "tags": ["O", "S-X"]}, {"tokens": ["a"], "tags": ["O", "O"]}])
    assert list(source.examples("train")) == [TaggedExample(words=("a", "b"), tags=("O", "B-X"))]
    assert str(source.row_errors.first[0]).endswith(":2:tags: has 2 tags for 1 words")


@pytest.mark.parametrize(
    ("data", "columns", "name"),
    [
        ("sentence1,sentence2,label\na,b,0\nc,d,1\n", {}, "label"),  # PAWS, MRPC
        (
            "question1,question2,is_duplicate\na,b,1\nc,d,1\n",
            {"anchor": "question1", "positive": "question2"},
            "is_duplicate",
        ),
        ("anchor,positive,number,Quality\na,b,7,1\nc,d,8,0\n", {}, "Quality"),
        ("anchor,positive,gold_label\na,b,entailment\nc,d,neutral\n", {}, "gold_label"),
    ],
)
def test_a_label_beside_two_texts_is_not_passed_over(tmp_path: Path, data: str, columns: Any, name: str) -> None:
    path = tmp_path / "a.csv"
    what = rf'"{name}" beside the two texts would not .* --data.columns.score={name} .*: --data.columns.score=..\]'
    with pytest.raises(HeedfulError, match=what):
        opened(path, data, PairExample, columns=columns)
    source = opened(path, data, PairExample, columns=columns | {"score": ()})
    assert [each.score for each in source.examples("train")] == [None, None]
    assert f'"{name}"' in source.stated[1].partition("not used: ")[2]
    if name != "gold_label":
        scored = opened(path, data, PairExample, columns=columns | {"score": name})
        assert {each.score for each in scored.examples("train")} <= {0.0, 1.0}
    with pytest.raises(HeedfulError, match="column 3 beside the two texts"):
        opened(path, "x,y,0\nz,w,1\n", PairExample, columns={"anchor": 1, "positive": 2})


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
    assert list(source.examples("train")) == [ChoiceExample(prompt="He left.", candidates=candidates, answer=1)]


def test_choices_in_csv(tmp_path: Path) -> None:
    data = "question,choice2,choice10,choice1,label\nWhy?,b,c,a,2\n"
    source = opened(tmp_path / "a.csv", data)
    assert list(source.examples("train")) == [ChoiceExample(prompt="Why?", candidates=("a", "b", "c"), answer=2)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (2, "answer: is 2, expected 0 to 1, a letter from A, or the text of a candidate"),
        (-1, "answer: is -1, expected 0 to 1"),
        ("C", 'answer: is "C", which is none of the candidates'),
        ("x", 'answer: is "x", which is none of the candidates'),
        ("1", 'answer: is "1", which is several of the candidates'),
        (None, "answer: is missing, expected 0 to 1"),
        (True, "answer: is true, expected 0 to 1"),
    ],
)
def test_bad_answers(tmp_path: Path, answer: Any, message: str) -> None:
    source = opened(tmp_path / "a.jsonl", [{"prompt": "p", "choices": ["1", "2"], "answer": answer}])
    assert not list(source.examples("train"))
    assert str(source.row_errors.first[0]).split(":1:", 1)[1].startswith(message)


def test_bad_choices(tmp_path: Path) -> None:
    rows = [
        {"article": "p", "questions": ["q"], "options": [["a", "b"]], "answers": ["A", "B"]},
        {"article": "p", "questions": ["q"], "options": [5], "answers": ["A"]},
        {"article": "p", "questions": ["q"], "options": [["a"]], "answers": ["A"]},
        {"article": "p", "questions": [], "options": [], "answers": []},
    ]
    source = opened(tmp_path / "a.jsonl", rows)
    assert not list(source.examples("train"))
    assert [bad.reason for bad in source.row_errors.first] == [
        "expected 1 answers and lists of options, one a question",
        "is 5, expected a list of texts",
        "has 1 candidates, expected two or more",
    ]


def test_a_label_that_is_called_like_a_column_makes_no_header(tmp_path: Path) -> None:
    data = "I loved it,positive\nI hated it,negative\nok so,positive\n"
    source = opened(tmp_path / "a.csv", data, columns={"text": 1, "label": 2})
    assert [each.label for each in source.examples("train")] == ["positive", "negative", "positive"]
    with pytest.raises(HeedfulError, match="There is no header that is understood"):
        opened(tmp_path / "a.csv", data)
    for columns in ({"label": 2}, {"text": 1, "label": 2}, {"text": "text", "label": "2"}):
        source = opened(tmp_path / "a.csv", "text,stars\na,1\n", columns=columns)
        assert [(each.text, each.label) for each in source.examples("train")] == [("a", "1")]


def test_a_mistyped_column_is_told_whatever_the_data_are_of(tmp_path: Path) -> None:
    data = "text,label\na,x\n"
    with pytest.raises(HeedfulError, match='has no column "lable", but "text", "label"'):
        opened(tmp_path / "a.csv", data, columns={"label": "lable"})
    with pytest.raises(HeedfulError, match='column "txt" is not one of text, '):
        opened(tmp_path / "a.csv", data, columns={"txt": "text"})
    with pytest.raises(HeedfulError, match="no kind of example has all of them"):
        opened(tmp_path / "a.csv", data, columns={"text": "text", "tags": "label"})


def test_choices_in_columns_differ_in_number(tmp_path: Path) -> None:
    header = "question,choice1,choice2,choice3,answer\n"
    source = opened(tmp_path / "a.csv", header + "q,yes,no,,yes\nr,a,b,c,b\n", ChoiceExample)
    read_examples = [(each.candidates, each.answer) for each in source.examples("train")]
    assert read_examples == [(("yes", "no"), 0), (("a", "b", "c"), 1)]
    source = opened(tmp_path / "a.csv", header + "q,yes,,no,yes\n", ChoiceExample)
    assert not list(source.examples("train"))
    with pytest.raises(HeedfulError, match=r"a\.csv:2:choice2: is empty, but a candidate after it is not"):
        list(read(tmp_path / "a.csv", ChoiceExample, DataSettings(dev_fraction=0.0)).examples("train"))


def test_candidates_that_are_numbers(tmp_path: Path) -> None:
    source = opened(tmp_path / "a.jsonl", [{"question": "q", "choices": ["2", "4"], "answer": "4"}], ChoiceExample)
    assert [each.answer for each in source.examples("train")] == [1]


def test_columns_of_formats_that_have_no_names(tmp_path: Path) -> None:
    path, data = tmp_path / "a.conll", "EU NNP I-NP I-ORG\nrejects VBZ I-VP O\n"
    source = opened(path, data, columns={"tags": 2})
    assert [each.tags for each in source.examples("train")] == [("NNP", "VBZ")]
    assert "words in column 1, the tag in column 2" in source.stated
    for columns, message in (
        ({"tags": "pos"}, r"its columns have no names: set columns\.tags to a number"),
        ({"tags": "²"}, r"its columns have no names: set columns\.tags to a number"),
        ({"text": 1}, r"which has no column for columns\.text"),
        ({"tags": 5}, "has 4 columns, and column 5 was asked for"),
    ):
        with pytest.raises(HeedfulError, match=message):
            list(read(path, settings=DataSettings(dev_fraction=0.0, columns=columns)).examples("train"))
    with pytest.raises(HeedfulError, match=r"plain text, which has no column for columns\.text"):
        opened(tmp_path / "a.txt", "a text\n", columns={"text": 1})


def test_tagged_sentences_in_tsv(tmp_path: Path) -> None:
    source = opened(tmp_path / "a.tsv", "tokens\tner_tags\nEU rejects\tO O\nhi\tO\n", TaggedExample)
    assert [each.words for each in source.examples("train")] == [("EU", "rejects"), ("hi",)]
    columns = "EU\tB-ORG\nrejects\tO\n\nhi\tO\n"
    for kind in (TaggedExample, None):
        source = opened(tmp_path / "b.tsv", columns, kind)
        assert [each.words for each in source.examples("train")] == [("EU", "rejects"), ("hi",)]


def test_splits_have_the_same_columns(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,text2,label\na,b,x\n")
    (tmp_path / "dev.csv").write_text("text,label\na,x\n")
    with pytest.raises(HeedfulError, match=r"train\.csv has a column for text_pair, and .*dev\.csv has none"):
        read(tmp_path)


def test_files_of_which_one_alone_is_called_test(tmp_path: Path) -> None:
    files = [tmp_path / "plain.csv", tmp_path / "plain-test.csv"]
    for file in files:
        file.write_text("text,label\na,x\n")
    with pytest.raises(HeedfulError, match=r"plain\.csv: the name does not say whether it is train, dev or test"):
        read(files)


def test_a_small_letter_is_no_number_of_a_choice(tmp_path: Path) -> None:
    choices = [f"choice {number}" for number in range(40)]
    source = opened(tmp_path / "a.jsonl", [{"question": "q", "choices": choices, "answer": "a"}], ChoiceExample)
    assert not list(source.examples("train"))


def test_columns_of_squad_and_of_glue_cannot_be_chosen(tmp_path: Path) -> None:
    squad = '{"data": [{"paragraphs": []}]}'
    with pytest.raises(HeedfulError, match=r"SQuAD's JSON, which has no column for columns\.question"):
        opened(tmp_path / "a.json", squad, columns={"question": "frage"})
    (tmp_path / "RTE").mkdir()
    (tmp_path / "RTE" / "train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n")
    with pytest.raises(HeedfulError, match=r"GLUE's RTE, which has no column for columns\.label"):
        read(tmp_path / "RTE", settings=DataSettings(dev_fraction=0.0, columns={"label": "index"}))


@pytest.mark.parametrize(
    "cells",
    [
        ("['EU', 'rejects']", "['B-ORG', 'O']"),
        ('["EU", "rejects"]', '["B-ORG","O"]'),
        ("['EU','rejects']", " ['B-ORG', 'O'] "),
        ("EU rejects", "B-ORG O"),
    ],
)
def test_lists_that_a_cell_holds_as_text(tmp_path: Path, cells: tuple[str, str]) -> None:
    """As tables write them that had lists in memory."""
    quoted = ",".join('"' + cell.replace('"', '""') + '"' for cell in cells)
    source = opened(tmp_path / "a.csv", f"words,tags\n{quoted}\n", TaggedExample)
    assert list(source.examples("train")) == [TaggedExample(words=("EU", "rejects"), tags=("B-ORG", "O"))]
    source = opened(tmp_path / "b.csv", "text,labels\na,\"['x', 'y']\"\nb,[]\nc,x|y\nd,[3]\n")
    assert [each.labels for each in source.examples("train")] == [("x", "y"), (), ("x", "y"), ("3",)]


@pytest.mark.parametrize(
    "cell",
    [
        "['EU' 'rejects']",
        "['EU'\n 'rejects']",
        "[EU, rejects]",
        "[1 2]",
        "['EU', ['x']]",
        "['EU', nan]",
        "[" * 300 + "]",
    ],
)
def test_what_looks_like_a_list_and_is_none(tmp_path: Path, cell: str) -> None:
    """NumPy writes no commas, and Python would make one text of both."""
    source = opened(tmp_path / "a.csv", f'words,tags\n"{cell}",O O\n', TaggedExample)
    assert not list(source.examples("train"))
    (bad,) = source.row_errors.first
    assert (
        bad.column == "words" and 'looks like a list and is none: write it as JSON, like ["one", "two"]' in bad.reason
    )


def test_a_role_that_is_one_column(tmp_path: Path) -> None:
    data = "text,stars,label\na,5,x\n"
    for kind, columns in (
        (LabelledExample, {"label": ("stars", "label")}),
        (ScoredExample, {"score": ["stars", "label"]}),
    ):
        with pytest.raises(
            HeedfulError, match=r"are given as the (label|score), but that is one column: set which, as in --data"
        ):
            opened(tmp_path / "a.csv", data, kind, columns=columns)
