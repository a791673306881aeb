"""SQuAD's JSON, v1.1 and v2.0 (Rajpurkar et al. 2016, 2018), one paragraph at a time.

An answer whose `answer_start` is wrong is aligned to its text in the context, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from heedful.data.bad_rows import BadRow, CellError, RowErrors, shown
from heedful.data.examples import AnswerSpan, QuestionExample
from heedful.data.formats.text_files import JsonStream, TextFile, open_json

ONCE = "answers whose start was wrong, found at the only occurrence of their text in the context"
NEAREST = "answers whose start was wrong, found at the occurrence of their text that is nearest to it"


def read_questions(file: TextFile, row_errors: RowErrors) -> Iterator[QuestionExample]:
    """Yield all questions of a file; each question that cannot be used is a bad row."""
    number = 0
    with open_json(file) as text:
        for place, line, paragraph in _paragraphs(text):
            try:
                context = _text(paragraph, "context")
                questions = _list(paragraph, "qas")
            except CellError as wrong:
                number += 1
                _refuse(row_errors, file, line, number, place, wrong, paragraph)
                continue
            for index, raw in enumerate(questions):
                number += 1
                try:
                    example, repairs = parse_question(raw, context)
                except CellError as wrong:
                    _refuse(row_errors, file, line, number, f"{place}.qas[{index}]", wrong, raw)
                    continue
                for order, what in enumerate(repairs):
                    row_errors.count_repair(what, file.display_name, line, number * 1000 + min(order, 999))
                yield replace(example, file=file.display_name, line=line)


def read_inputs(file: TextFile, row_errors: RowErrors) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line, cells) of each question, without its answers."""
    number = 0
    with open_json(file) as text:
        for place, line, paragraph in _paragraphs(text):
            try:
                context, questions = _text(paragraph, "context"), _list(paragraph, "qas")
            except CellError as wrong:
                number += 1
                _refuse(row_errors, file, line, number, place, wrong, paragraph)
                continue
            for index, raw in enumerate(questions):
                number += 1
                try:
                    asked_text = _text(raw, "question")
                    yield line, {"id": str(raw.get("id", "")), "question": asked_text, "context": context}
                except CellError as wrong:
                    _refuse(row_errors, file, line, number, f"{place}.qas[{index}]", wrong, raw)


def _paragraphs(text: JsonStream) -> Iterator[tuple[str, int, Any]]:
    """Yield (JSON path, line, paragraph), wherever "data" is in the file."""
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


def _refuse(
    row_errors: RowErrors, file: TextFile, line: int, number: int, place: str, wrong: CellError, raw: object
) -> None:
    column = f"{place}.{wrong.column}" if wrong.column else place
    bad = BadRow(file=file.display_name, line=line, column=column, reason=wrong.reason, text=shown(raw))
    row_errors.reject(bad, number=number)


def parse_question(raw: Any, context: str) -> tuple[QuestionExample, list[str]]:
    """Return one question, and the kinds of repairs."""
    text = _text(raw, "question")
    name = raw.get("id")
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise CellError("id", f"is {shown(name)}, expected text" if "id" in raw else "is missing")
    impossible = raw.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise CellError("is_impossible", f"is {shown(impossible)}, expected true or false")
    answers = _list(raw, "answers")
    pairs = [(_text(answer, "text", f"answers[{n}]."), answer.get("answer_start")) for n, answer in enumerate(answers)]
    spans, repairs = align_answers(pairs, context, impossible)
    example = QuestionExample(id=str(name), question=text, context=context, answers=spans, impossible=impossible)
    return example, repairs


def align_answers(
    pairs: list[tuple[str, object]], context: str, impossible: bool
) -> tuple[tuple[AnswerSpan, ...], list[str]]:
    """Align answers with the context.

    Args:
        pairs: text and start of each answer.
        context: text that contains the answers.
        impossible: whether the question is marked as unanswerable.

    Returns:
        The answers, and the kinds of repairs.

    Raises:
        CellError: If an answer does not occur in the context, or answers and `impossible` contradict each other.
    """
    if impossible and pairs:
        raise CellError("answers", "has answers, but the question is marked impossible")
    if not impossible and not pairs:
        raise CellError("answers", "is empty, and the question is not marked impossible")
    spans, repairs = [], []
    for number, (text, start) in enumerate(pairs):
        where = f"answers[{number}].answer_start"
        if not text:
            raise CellError(f"answers[{number}].text", "is empty")
        if not isinstance(start, int) or isinstance(start, bool):
            raise CellError(where, f"is {shown(start)}, expected a whole number")
        if start < 0 or not context.startswith(text, start):
            start, what = _found(text, start, context, where)
            repairs.append(what)
        spans.append(AnswerSpan(text, start))
    return tuple(spans), repairs


def _found(text: str, start: int, context: str, where: str) -> tuple[int, str]:
    """Return the nearest occurrence of a text, and the kind of repair."""
    first, after = context.find(text), context.find(text, max(start, 0))
    before = context.rfind(text, 0, max(start, 0) + len(text))
    places = [place for place in (before, after) if place >= 0] or ([first] if first >= 0 else [])
    if not places:
        raise CellError(where, f"is {start}, but the context does not have {shown(text)} there or anywhere")
    nearest = min(places, key=lambda place: (abs(place - start), place))
    return nearest, ONCE if first == context.rfind(text) else NEAREST


def _text(raw: object, key: str, place: str = "") -> str:
    if not isinstance(raw, dict):
        raise CellError(place.rstrip("."), f"is {shown(raw)}, expected an object")
    value = raw.get(key)
    if not isinstance(value, str):
        raise CellError(place + key, f"is {shown(value)}, expected text" if key in raw else "is missing")
    return check_surrogates(value, place + key)


def check_surrogates(text: str, column: str) -> str:
    """Return the text; raise CellError if it contains a lone surrogate."""
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
