"""SQuAD's JSON, v1.1 and v2.0, a paragraph at a time; wrong answer starts are mended where the text tells how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from heedful.data.bad_rows import BadRow, CellError, RowErrors, shown
from heedful.data.examples import AnswerSpan, QuestionExample
from heedful.data.formats.text_files import JsonStream, TextFile, open_json

ONCE = "answers whose start was wrong, found where their text stands once in the context"
NEAREST = "answers whose start was wrong, found where their text stands nearest to it"


def read_questions(file: TextFile, sieve: RowErrors) -> Iterator[QuestionExample]:
    """All questions of a file; a question that cannot be used is a bad row of its own."""
    number = 0
    with open_json(file) as text:
        for place, line, paragraph in _paragraphs(text):
            try:
                context = _text(paragraph, "context")
                asked = _list(paragraph, "qas")
            except CellError as wrong:
                number += 1
                _refuse(sieve, file, line, number, place, wrong, paragraph)
                continue
            for index, raw in enumerate(asked):
                number += 1
                try:
                    example, mended = parse_question(raw, context)
                except CellError as wrong:
                    _refuse(sieve, file, line, number, f"{place}.qas[{index}]", wrong, raw)
                    continue
                for order, what in enumerate(mended):
                    sieve.mend(what, file.shown, line, number * 1000 + min(order, 999))
                yield QuestionExample(file=file.shown, line=line, **example)


def read_inputs(file: TextFile, sieve: RowErrors) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the questions of a file with their lines, without answers."""
    number = 0
    with open_json(file) as text:
        for place, line, paragraph in _paragraphs(text):
            try:
                context, asked = _text(paragraph, "context"), _list(paragraph, "qas")
            except CellError as wrong:
                number += 1
                _refuse(sieve, file, line, number, place, wrong, paragraph)
                continue
            for index, raw in enumerate(asked):
                number += 1
                try:
                    asked_text = _text(raw, "question")
                    yield line, {"id": str(raw.get("id", "")), "question": asked_text, "context": context}
                except CellError as wrong:
                    _refuse(sieve, file, line, number, f"{place}.qas[{index}]", wrong, raw)


def _paragraphs(text: JsonStream) -> Iterator[tuple[str, int, Any]]:
    """Each paragraph with its place and its line, wherever "data" stands."""
    for key in text.keys():  # noqa: SIM118  # they are walked, not looked up
        if key != "data":
            text.value()
            continue
        for article in text.elements():
            for part in text.keys():  # noqa: SIM118
                if part != "paragraphs":
                    text.value()
                    continue
                for paragraph in text.elements():
                    text.peek()
                    yield f"data[{article}].paragraphs[{paragraph}]", text.line, text.value()
    text.end()


def _refuse(sieve: RowErrors, file: TextFile, line: int, number: int, place: str, wrong: CellError, raw: Any) -> None:
    column = f"{place}.{wrong.column}" if wrong.column else place
    bad = BadRow(file=file.shown, line=line, column=column, reason=wrong.reason, text=shown(raw))
    sieve.refuse(bad, number=number)


def parse_question(raw: Any, context: str) -> tuple[dict[str, Any], list[str]]:
    """The fields of one question, and what was mended."""
    text = _text(raw, "question")
    name = raw.get("id")
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise CellError("id", f"is {shown(name)}, expected text" if "id" in raw else "is missing")
    impossible = raw.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise CellError("is_impossible", f"is {shown(impossible)}, expected true or false")
    answers = _list(raw, "answers")
    pairs = [(_text(each, "text", f"answers[{n}]."), each.get("answer_start")) for n, each in enumerate(answers)]
    spans, mended = align_answers(pairs, context, impossible)
    fields = {"id": str(name), "question": text, "context": context, "answers": spans, "impossible": impossible}
    return fields, mended


def align_answers(
    pairs: list[tuple[str, Any]], context: str, impossible: bool
) -> tuple[tuple[AnswerSpan, ...], list[str]]:
    """The answers at their places in the context, and what was mended."""
    if impossible and pairs:
        raise CellError("answers", "has answers, but the question is said to be impossible")
    if not impossible and not pairs:
        raise CellError("answers", "is empty, and the question is not said to be impossible")
    spans, mended = [], []
    for number, (text, start) in enumerate(pairs):
        where = f"answers[{number}].answer_start"
        if not text:
            raise CellError(f"answers[{number}].text", "is empty")
        if not isinstance(start, int) or isinstance(start, bool):
            raise CellError(where, f"is {shown(start)}, expected a whole number")
        if start < 0 or not context.startswith(text, start):
            start, what = _found(text, start, context, where)
            mended.append(what)
        spans.append(AnswerSpan(text, start))
    return tuple(spans), mended


def _found(text: str, start: int, context: str, where: str) -> tuple[int, str]:
    """Where the text really stands."""
    first, after = context.find(text), context.find(text, max(start, 0))
    before = context.rfind(text, 0, max(start, 0) + len(text))
    places = [place for place in (before, after) if place >= 0] or ([first] if first >= 0 else [])
    if not places:
        raise CellError(where, f"is {start}, but the context does not have {shown(text)} there or anywhere")
    nearest = min(places, key=lambda place: (abs(place - start), place))
    return nearest, ONCE if first == context.rfind(text) else NEAREST


def _text(raw: Any, key: str, place: str = "") -> str:
    if not isinstance(raw, dict):
        raise CellError(place.rstrip("."), f"is {shown(raw)}, expected an object")
    value = raw.get(key)
    if not isinstance(value, str):
        raise CellError(place + key, f"is {shown(value)}, expected text" if key in raw else "is missing")
    return check_surrogates(value, place + key)


def check_surrogates(text: str, column: str) -> str:
    """The same text, unless half a character is in it."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CellError(column, f"has half of a surrogate pair at character {error.start + 1}") from None
    return text


def _list(raw: dict[str, Any], key: str) -> list[Any]:
    value = raw.get(key)
    if not isinstance(value, list):
        raise CellError(key, f"is {shown(value)}, expected a list" if key in raw else "is missing")
    return value
