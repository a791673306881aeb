"""SQuAD's JSON: both versions, wrong answer starts corrected or refused, errors that name the position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heedful.data import AnswerSpan, Dataset, DataSettings, QuestionExample, Skip, check, read
from heedful.errors import HeedfulError

CONTEXT = "Ada met Ada. Bob wrote the notes."


def squad_question(name: str, *answers: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    """A question as SQuAD's JSON has it; the answers are pairs of a text and its start."""
    answer_objects = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": f"Who {name}?", "answers": answer_objects, **fields}


def write_and_read(path: Path, *questions: Any, indent: int | None = None) -> Dataset[Any]:
    data = {"data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": list(questions)}]}], "version": "x"}
    path.write_text(json.dumps(data, indent=indent))
    return read(path, settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())


def test_questions(tmp_path: Path) -> None:
    dataset = write_and_read(tmp_path / "a.json", squad_question("1", ("Bob", 13), ("the notes", 23)), indent=1)
    expected = (AnswerSpan("Bob", 13), AnswerSpan("the notes", 23))
    assert list(dataset.examples("train")) == [
        QuestionExample(id="1", question="Who 1?", context=CONTEXT, answers=expected)
    ]
    assert next(dataset.examples("train")).line == 6
    assert dataset.stated == (
        "each example is a question, its context and its right answers",
        "SQuAD's JSON, v1.1: the beginning of the file has no impossible questions",
    )
    dataset = write_and_read(
        tmp_path / "b.json",
        squad_question("2", is_impossible=True),
        squad_question("3", ("Bob", 13), is_impossible=False),
    )
    assert [example.impossible for example in dataset.examples("train")] == [True, False]
    assert "v2.0" in dataset.stated[1]
    assert check(dataset).splits["train"].labels == {"answerable": 1, "impossible": 1}


def test_wrong_answer_starts_are_corrected(tmp_path: Path) -> None:
    dataset = write_and_read(
        tmp_path / "a.json", squad_question("1", ("Bob", 3), ("Ada", 7)), squad_question("2", ("Ada", 2), ("Bob", -1))
    )
    list(dataset.examples("train"))
    read_examples = list(dataset.examples("train"))  # the second reading must not count the corrections again
    assert [[span.start for span in example.answers] for example in read_examples] == [[13, 8], [0, 13]]
    assert all(CONTEXT.startswith(span.text, span.start) for example in read_examples for span in example.answers)
    assert dataset.row_errors.repairs == {
        "answers whose start was wrong, found at the only occurrence of their text in the context": 2,
        "answers whose start was wrong, found at the occurrence of their text that is nearest to it": 2,
    }
    assert (
        "2 answers whose start was wrong, found at the occurrence of their text that is nearest to it"
        in check(dataset).lines()
    )


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (
            squad_question("1", ("Eve", 3)),
            'answers[0].answer_start: is 3, but the context does not have "Eve" there or anywhere',
        ),
        (squad_question("1", ("Ada", "0")), 'answers[0].answer_start: is "0", expected a whole number'),
        (squad_question("1", ("Ada", None)), "answers[0].answer_start: is null, expected a whole number"),
        (squad_question("1", ("", 0)), "answers[0].text: is empty"),
        (squad_question("1"), "answers: is empty, and the question is not marked impossible"),
        (
            squad_question("1", ("Ada", 0), is_impossible=True),
            "answers: has answers, but the question is marked impossible",
        ),
        (squad_question("1", ("Ada", 0), is_impossible="no"), 'is_impossible: is "no", expected true or false'),
        ({"id": "1", "question": "Who?"}, "answers: is missing"),
        ({"id": "1", "answers": []}, "question: is missing"),
        ({"question": "Who?", "answers": []}, "id: is missing"),
        ({"question": "Wh\ud800?", "id": "1", "answers": []}, "question: has half of a surrogate pair at character 3"),
        ({"question": "Who?", "id": "1", "answers": {}}, "answers: is {}, expected a list"),
        ({"question": "Who?", "id": "1", "answers": ["x"]}, 'answers[0]: is "x", expected an object'),
    ],
)
def test_bad_questions(tmp_path: Path, question: Any, message: str) -> None:
    dataset = write_and_read(
        tmp_path / "a.json", squad_question("0", ("Ada", 0)), question, squad_question("2", ("Ada", 8))
    )
    assert [example.id for example in dataset.examples("train")] == ["0", "2"]
    where = f"{tmp_path / 'a.json'}:1:data[0].paragraphs[0].qas[1]"
    assert [str(bad_row) for bad_row in dataset.row_errors.first] == [f"{where}.{message}"]
    with pytest.raises(HeedfulError, match=r"qas\[1\]"):
        list(read(tmp_path / "a.json", QuestionExample).examples("train"))


def test_bad_paragraphs_and_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"data": [{"paragraphs": [{"qas": []}, 5, {"context": "x", "qas": 1}]}]}')
    dataset = read(path, settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    assert not list(dataset.examples("train"))
    assert [bad_row.column for bad_row in dataset.row_errors.first] == [
        "data[0].paragraphs[0].context",
        "data[0].paragraphs[1]",
        "data[0].paragraphs[2].qas",
    ]
    path.write_text('{"data": [{"paragraphs": [{"context": "x",\n "qas": [}]}]}')
    with pytest.raises(HeedfulError, match=r"a\.json:2:10: is not valid JSON: Expecting value, found"):
        list(read(path).examples("train"))
    path.write_text('{"data": [{"paragraphs": [{"context": "x"')
    with pytest.raises(HeedfulError, match=r"the file ends"):
        list(read(path, settings=DataSettings(format="squad"), on_bad_row=Skip()).examples("train"))


def test_flat_columns(tmp_path: Path) -> None:
    answers = {"text": ["Bob"], "answer_start": [1]}
    rows = [
        {"id": 7, "question": "Who?", "context": CONTEXT, "answers": answers},
        {"id": 8, "question": "Who?", "context": CONTEXT, "answers": {"text": [], "answer_start": []}},
        {"id": 9, "question": "Who?", "context": CONTEXT, "answers": ["Bob"]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = read(tmp_path / "a.jsonl", settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    read_examples = list(dataset.examples("train"))
    assert [(example.id, example.answers, example.impossible) for example in read_examples] == [
        ("7", (AnswerSpan("Bob", 13),), False),
        ("8", (), True),
    ]
    assert str(dataset.row_errors.first[0]).endswith(
        '3:answers: is ["Bob"], expected a text of the context, or lists of the same length under text and answer_start'
    )


@pytest.mark.parametrize("name", ["answer", "answers"])
def test_plain_answers_are_found_in_the_context(tmp_path: Path, name: str) -> None:
    """The first occurrence counts, an empty cell means no answer, and any other text is a bad row."""
    rows = [
        f"question,context,{name}",
        'Who?,"Ada, Bob and Ada.",Ada',
        'Who?,"Ada, Bob and Ada.",Bob ',
        "Who?,Nobody came.,",
        'Who?,"Ada, Bob and Ada.",ada',
        'Who?,"Ada, Bob and Ada.","{""text"": [""Ada""], ""answer_start"": [0]}"',
    ]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    dataset = read(tmp_path / "a.csv", settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    assert [(example.answers, example.impossible) for example in dataset.examples("train")] == [
        ((AnswerSpan("Ada", 0),), False),
        ((AnswerSpan("Bob", 5),), False),
        ((), True),
    ]
    first, second = map(str, dataset.row_errors.first)
    assert first.endswith(f'a.csv:5:{name}: is "ada", which the context does not have word for word')
    assert second.startswith(f"{first.partition('a.csv')[0]}a.csv:6:{name}: is ")
    with pytest.raises(HeedfulError, match=r"a\.csv:5:.* does not have word for word"):
        list(read(tmp_path / "a.csv").examples("train"))


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    from heedful.data import LabelledExample

    write_and_read(tmp_path / "a.json", squad_question("1", ("Ada", 0)))
    with pytest.raises(HeedfulError, match=r"which column is the text"):
        read(tmp_path / "a.json", LabelledExample)
