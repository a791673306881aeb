"""The columns of a table are found by name or set by name or number; errors say what to set."""

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


def write_and_read(path: Path, data: Any, kind: Any = None, **settings: Any) -> Dataset[Any]:
    path.write_text(data if isinstance(data, str) else "\n".join(map(json.dumps, data)))
    return read(path, kind, DataSettings(dev_fraction=0.0, **settings), on_bad_row=Skip())


def test_given_columns(tmp_path: Path) -> None:
    path, data = tmp_path / "a.csv", "title,review,stars\nT,good,5\nU,bad,1\n"
    dataset = write_and_read(path, data, columns={"text": "review", "label": "stars"})
    assert [(example.text, example.label) for example in dataset.examples("train")] == [("good", "5"), ("bad", "1")]
    assert 'columns: text="review", label="stars"; not used: "title"' in dataset.stated
    dataset = write_and_read(path, data, columns={"text": ("title", "review"), "label": "3"})
    assert [example.text for example in dataset.examples("train")] == ["T good", "U bad"]
    dataset = write_and_read(path, data, columns={"text": 2, "label": 3}, header=True)
    assert next(dataset.examples("train")).text == "good"
    dataset = write_and_read(path, "5,good\n1,bad\n", columns={"text": 2, "label": 1})
    assert [(example.line, example.text) for example in dataset.examples("train")] == [(1, "good"), (2, "bad")]
    assert {"a.csv: no header", "columns: text=column 2, label=column 1"} < set(dataset.stated)


@pytest.mark.parametrize(
    ("data", "columns", "message"),
    [
        ("review,stars\na,1\n", None, r'which column is the text\? None is called "text" or "sentence"|the label'),
        (
            "good,1\nbad,0\n",
            None,
            r'No header was recognised; a row is "good", "1". Say --data.columns.text=NUMBER',
        ),
        (
            "text,stars\na,1\n",
            {"label": "star"},
            r'has no column "star", but "text", "stars" \(did you mean "stars"\?\)',
        ),
        ("text,stars\na,1\n", {"label": 3}, "has 2 columns, and column 3 was asked for"),
        (",text,\n1,a,x\n", {"text": "text", "label": 3}, 'column 3 and another one are called "": rename one of them'),
        (
            "text,review,label\na,b,1\n",
            None,
            '"text" and "review" could each be the text: say which, as --data.columns.text=text',
        ),
        ("text,stars\na,1\n", {"labl": "stars"}, 'column "labl" is not one of text, label, text_pair'),
    ],
)
def test_columns_that_are_missing_or_ambiguous(tmp_path: Path, data: str, columns: Any, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        write_and_read(tmp_path / "a.csv", data, LabelledExample, columns=columns)


def test_pairs_and_kinds(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    dataset = write_and_read(path, [{"premise": "a", "hypothesis": "b", "label": "x"}])
    assert list(dataset.examples("train")) == [LabelledExample(text="a", text_pair="b", label="x")]
    dataset = write_and_read(path, [{"sentence1": "a", "sentence2": "b", "score": 3}])
    assert list(dataset.examples("train")) == [ScoredExample(text="a", text_pair="b", score=3.0)]
    dataset = write_and_read(path, [{"anchor": "a", "positive": "b"}])
    assert list(dataset.examples("train")) == [PairExample(anchor="a", positive="b")]
    dataset = write_and_read(path, [{"sentence1": "a", "sentence2": "b", "score": 3}], PairExample)
    assert list(dataset.examples("train")) == [PairExample(anchor="a", positive="b", score=3.0)]
    dataset = write_and_read(
        path, [{"tokens": ["a", "b"], "tags": ["O", "S-X"]}, {"tokens": ["a"], "tags": ["O", "O"]}]
    )
    assert list(dataset.examples("train")) == [TaggedExample(words=("a", "b"), tags=("O", "B-X"))]
    assert str(dataset.row_errors.first[0]).endswith(":2:tags: has 2 tags for 1 words")


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
def test_a_label_of_a_pair_is_not_ignored_silently(tmp_path: Path, data: str, columns: Any, name: str) -> None:
    path = tmp_path / "a.csv"
    message = rf'"{name}" beside the two texts would not .* --data.columns.score={name} .*: --data.columns.score=..\]'
    with pytest.raises(HeedfulError, match=message):
        write_and_read(path, data, PairExample, columns=columns)
    dataset = write_and_read(path, data, PairExample, columns=columns | {"score": ()})
    assert [example.score for example in dataset.examples("train")] == [None, None]
    assert f'"{name}"' in dataset.stated[1].partition("not used: ")[2]
    if name != "gold_label":
        scored = write_and_read(path, data, PairExample, columns=columns | {"score": name})
        assert {example.score for example in scored.examples("train")} <= {0.0, 1.0}
    with pytest.raises(HeedfulError, match="column 3 beside the two texts"):
        write_and_read(path, "x,y,0\nz,w,1\n", PairExample, columns={"anchor": 1, "positive": 2})


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
    dataset = write_and_read(tmp_path / "a.jsonl", [row])
    candidates = ("Where is he? in Rome", "Where is he? at home")
    assert list(dataset.examples("train")) == [ChoiceExample(prompt="He left.", candidates=candidates, answer=1)]


def test_choices_in_csv(tmp_path: Path) -> None:
    data = "question,choice2,choice10,choice1,label\nWhy?,b,c,a,2\n"
    dataset = write_and_read(tmp_path / "a.csv", data)
    assert list(dataset.examples("train")) == [ChoiceExample(prompt="Why?", candidates=("a", "b", "c"), answer=2)]


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
    dataset = write_and_read(tmp_path / "a.jsonl", [{"prompt": "p", "choices": ["1", "2"], "answer": answer}])
    assert not list(dataset.examples("train"))
    assert str(dataset.row_errors.first[0]).split(":1:", 1)[1].startswith(message)


def test_bad_choices(tmp_path: Path) -> None:
    rows = [
        {"article": "p", "questions": ["q"], "options": [["a", "b"]], "answers": ["A", "B"]},
        {"article": "p", "questions": ["q"], "options": [5], "answers": ["A"]},
        {"article": "p", "questions": ["q"], "options": [["a"]], "answers": ["A"]},
        {"article": "p", "questions": [], "options": [], "answers": []},
    ]
    dataset = write_and_read(tmp_path / "a.jsonl", rows)
    assert not list(dataset.examples("train"))
    assert [bad_row.reason for bad_row in dataset.row_errors.first] == [
        "expected 1 answers and lists of options, one a question",
        "is 5, expected a list of texts",
        "has 1 candidates, expected two or more",
    ]


def test_a_label_named_like_a_column_does_not_make_its_row_a_header(tmp_path: Path) -> None:
    data = "I loved it,positive\nI hated it,negative\nok so,positive\n"
    dataset = write_and_read(tmp_path / "a.csv", data, columns={"text": 1, "label": 2})
    assert [example.label for example in dataset.examples("train")] == ["positive", "negative", "positive"]
    with pytest.raises(HeedfulError, match="No header was recognised"):
        write_and_read(tmp_path / "a.csv", data)
    for columns in ({"label": 2}, {"text": 1, "label": 2}, {"text": "text", "label": "2"}):
        dataset = write_and_read(tmp_path / "a.csv", "text,stars\na,1\n", columns=columns)
        assert [(example.text, example.label) for example in dataset.examples("train")] == [("a", "1")]


def test_a_mistyped_column_is_named_in_the_error(tmp_path: Path) -> None:
    data = "text,label\na,x\n"
    with pytest.raises(HeedfulError, match='has no column "lable", but "text", "label"'):
        write_and_read(tmp_path / "a.csv", data, columns={"label": "lable"})
    with pytest.raises(HeedfulError, match='column "txt" is not one of text, '):
        write_and_read(tmp_path / "a.csv", data, columns={"txt": "text"})
    with pytest.raises(HeedfulError, match="no kind of example has all of them"):
        write_and_read(tmp_path / "a.csv", data, columns={"text": "text", "tags": "label"})


def test_rows_may_have_different_numbers_of_choice_columns(tmp_path: Path) -> None:
    header = "question,choice1,choice2,choice3,answer\n"
    dataset = write_and_read(tmp_path / "a.csv", header + "q,yes,no,,yes\nr,a,b,c,b\n", ChoiceExample)
    read_examples = [(example.candidates, example.answer) for example in dataset.examples("train")]
    assert read_examples == [(("yes", "no"), 0), (("a", "b", "c"), 1)]
    dataset = write_and_read(tmp_path / "a.csv", header + "q,yes,,no,yes\n", ChoiceExample)
    assert not list(dataset.examples("train"))
    with pytest.raises(HeedfulError, match=r"a\.csv:2:choice2: is empty, but a candidate after it is not"):
        list(read(tmp_path / "a.csv", ChoiceExample, DataSettings(dev_fraction=0.0)).examples("train"))


def test_candidates_that_are_numbers(tmp_path: Path) -> None:
    dataset = write_and_read(
        tmp_path / "a.jsonl", [{"question": "q", "choices": ["2", "4"], "answer": "4"}], ChoiceExample
    )
    assert [example.answer for example in dataset.examples("train")] == [1]


def test_columns_of_formats_without_column_names(tmp_path: Path) -> None:
    path, data = tmp_path / "a.conll", "EU NNP I-NP I-ORG\nrejects VBZ I-VP O\n"
    dataset = write_and_read(path, data, columns={"tags": 2})
    assert [example.tags for example in dataset.examples("train")] == [("NNP", "VBZ")]
    assert "words in column 1, the tag in column 2" in dataset.stated
    for columns, message in (
        ({"tags": "pos"}, r"its columns have no names: set columns\.tags to a number"),
        ({"tags": "²"}, r"its columns have no names: set columns\.tags to a number"),
        ({"text": 1}, r"which has no column for columns\.text"),
        ({"tags": 5}, "has 4 columns, and column 5 was asked for"),
    ):
        with pytest.raises(HeedfulError, match=message):
            list(read(path, settings=DataSettings(dev_fraction=0.0, columns=columns)).examples("train"))
    with pytest.raises(HeedfulError, match=r"plain text, which has no column for columns\.text"):
        write_and_read(tmp_path / "a.txt", "a text\n", columns={"text": 1})


def test_tagged_sentences_in_tsv(tmp_path: Path) -> None:
    dataset = write_and_read(tmp_path / "a.tsv", "tokens\tner_tags\nEU rejects\tO O\nhi\tO\n", TaggedExample)
    assert [example.words for example in dataset.examples("train")] == [("EU", "rejects"), ("hi",)]
    columns = "EU\tB-ORG\nrejects\tO\n\nhi\tO\n"
    for kind in (TaggedExample, None):
        dataset = write_and_read(tmp_path / "b.tsv", columns, kind)
        assert [example.words for example in dataset.examples("train")] == [("EU", "rejects"), ("hi",)]


def test_splits_have_the_same_columns(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,text2,label\na,b,x\n")
    (tmp_path / "dev.csv").write_text("text,label\na,x\n")
    with pytest.raises(HeedfulError, match=r"train\.csv has a column for text_pair, and .*dev\.csv has none"):
        read(tmp_path)


def test_a_file_whose_name_does_not_say_its_split(tmp_path: Path) -> None:
    files = [tmp_path / "plain.csv", tmp_path / "plain-test.csv"]
    for file in files:
        file.write_text("text,label\na,x\n")
    with pytest.raises(HeedfulError, match=r"plain\.csv: the name does not say whether it is train, dev or test"):
        read(files)


def test_a_lower_case_letter_does_not_number_a_choice(tmp_path: Path) -> None:
    choices = [f"choice {number}" for number in range(40)]
    dataset = write_and_read(
        tmp_path / "a.jsonl", [{"question": "q", "choices": choices, "answer": "a"}], ChoiceExample
    )
    assert not list(dataset.examples("train"))


def test_columns_of_squad_and_of_glue_cannot_be_chosen(tmp_path: Path) -> None:
    squad = '{"data": [{"paragraphs": []}]}'
    with pytest.raises(HeedfulError, match=r"SQuAD's JSON, which has no column for columns\.question"):
        write_and_read(tmp_path / "a.json", squad, columns={"question": "frage"})
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
    """Programs write them so when they save a table with lists in its cells."""
    quoted = ",".join('"' + cell.replace('"', '""') + '"' for cell in cells)
    dataset = write_and_read(tmp_path / "a.csv", f"words,tags\n{quoted}\n", TaggedExample)
    assert list(dataset.examples("train")) == [TaggedExample(words=("EU", "rejects"), tags=("B-ORG", "O"))]
    dataset = write_and_read(tmp_path / "b.csv", "text,labels\na,\"['x', 'y']\"\nb,[]\nc,x|y\nd,[3]\n")
    assert [example.labels for example in dataset.examples("train")] == [("x", "y"), (), ("x", "y"), ("3",)]


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
def test_cells_that_look_like_a_list_but_are_not_one(tmp_path: Path, cell: str) -> None:
    """NumPy writes lists without commas; Python would read 'EU' 'rejects' as one string."""
    dataset = write_and_read(tmp_path / "a.csv", f'words,tags\n"{cell}",O O\n', TaggedExample)
    assert not list(dataset.examples("train"))
    (bad_row,) = dataset.row_errors.first
    assert bad_row.column == "words"
    assert 'looks like a list but cannot be read as one: write it as JSON, like ["one", "two"]' in bad_row.reason


def test_a_role_that_can_be_only_one_column(tmp_path: Path) -> None:
    data = "text,stars,label\na,5,x\n"
    for kind, columns in (
        (LabelledExample, {"label": ("stars", "label")}),
        (ScoredExample, {"score": ["stars", "label"]}),
    ):
        with pytest.raises(
            HeedfulError, match=r"are given as the (label|score), but that is one column: set which, as in --data"
        ):
            write_and_read(tmp_path / "a.csv", data, kind, columns=columns)
