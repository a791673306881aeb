"""Streaming reader of questions in SQuAD's JSON, v1.1 and v2.0 (Rajpurkar et al. 2016, 2018).

An answer whose `answer_start` is wrong is moved to the nearest occurrence of its text in the context, and counted as a
repair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from heedful.data.bad_rows import BadRow, CellError, RowErrors, shown
from heedful.data.examples import AnswerSpan, QuestionExample
from heedful.data.formats.text_files import JsonStream, TextFile, open_json

# kinds of repairs
FOUND_ONLY = "answers whose start was wrong, found at the only occurrence of their text in the context"
FOUND_NEAREST = "answers whose start was wrong, found at the occurrence of their text that is nearest to it"


class _RawQuestion(NamedTuple):
    """A question of the file, as parsed JSON, with its position."""

    value: Any
    context: str
    path: str  # JSON path
    line: int  # line of the paragraph, from 1
    question_index: int  # index among all questions of the file, from 1


def read_questions(file: TextFile, row_errors: RowErrors) -> Iterator[QuestionExample]:
    """Yield all questions of a file. A question that cannot be used is a bad row."""
    for question in _raw_questions(file, row_errors):
        try:
            example, repairs = parse_question(question.value, question.context)
        except CellError as error:
            _reject(row_errors, file, question, error)
            continue
        for index, kind in enumerate(repairs):
            cell_index = question.question_index * 1000 + min(index, 999)  # ascends over all answers of the file
            row_errors.count_repair(kind, file.display_name, question.line, cell_index)
        yield replace(example, file=file.display_name, line=question.line)


def read_inputs(file: TextFile, row_errors: RowErrors) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line, cells) of each question, without its answers."""
    for question in _raw_questions(file, row_errors):
        try:
            text = _text(question.value, "question")
        except CellError as error:
            _reject(row_errors, file, question, error)
            continue
        id_text = str(question.value.get("id", ""))
        yield question.line, {"id": id_text, "question": text, "context": question.context}


def _raw_questions(file: TextFile, row_errors: RowErrors) -> Iterator[_RawQuestion]:
    """Yield the questions of all paragraphs. A paragraph without a context or questions is a bad row."""
    count = 0  # questions and bad paragraphs so far
    with open_json(file) as stream:
        for path, line, paragraph in _paragraphs(stream):
            try:
                context, questions = _text(paragraph, "context"), _list(paragraph, "qas")
            except CellError as error:
                count += 1
                _reject(row_errors, file, _RawQuestion(paragraph, "", path, line, count), error)
                continue
            for index, question in enumerate(questions):
                count += 1
                yield _RawQuestion(question, context, f"{path}.qas[{index}]", line, count)


def _paragraphs(stream: JsonStream) -> Iterator[tuple[str, int, Any]]:
    """Yield (JSON path, line, paragraph) for each paragraph. Keys other than "data" and "paragraphs" are skipped."""
    for key in stream.keys():  # noqa: SIM118  # a stream has no lookup by key
        if key != "data":
            stream.value()
            continue
        for article in stream.elements():
            for article_key in stream.keys():  # noqa: SIM118
                if article_key != "paragraphs":
                    stream.value()
                    continue
                for paragraph in stream.elements():
                    stream.peek()
                    yield f"data[{article}].paragraphs[{paragraph}]", stream.line, stream.value()
    stream.end()


def _reject(row_errors: RowErrors, file: TextFile, question: _RawQuestion, error: CellError) -> None:
    """Report a question or a paragraph as a bad row."""
    column = f"{question.path}.{error.column}" if error.column else question.path
    text = shown(question.value)
    bad = BadRow(file=file.display_name, line=question.line, column=column, reason=error.reason, text=text)
    row_errors.reject(bad, index=question.question_index)


def parse_question(raw: Any, context: str) -> tuple[QuestionExample, list[str]]:
    """Parse a question of SQuAD's JSON.

    Returns:
        The example, and the kind of each repair.

    Raises:
        CellError: If a value is missing or has a wrong type, or an answer is not in the context.
    """
    text = _text(raw, "question")
    name = raw.get("id")
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise CellError("id", f"is {shown(name)}, expected text" if "id" in raw else "is missing")
    impossible = raw.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise CellError("is_impossible", f"is {shown(impossible)}, expected true or false")
    answers = _list(raw, "answers")
    pairs = []  # (text, start) of each answer
    for index, answer in enumerate(answers):
        answer_text = _text(answer, "text", f"answers[{index}].")
        pairs.append((answer_text, answer.get("answer_start")))
    spans, repairs = align_answers(pairs, context, impossible)
    example = QuestionExample(id=str(name), question=text, context=context, answers=spans, impossible=impossible)
    return example, repairs


def align_answers(
    pairs: list[tuple[str, object]], context: str, impossible: bool
) -> tuple[tuple[AnswerSpan, ...], list[str]]:
    """Convert answers to spans, and move an answer with a wrong start to an occurrence of its text in the context.

    Args:
        pairs: text and start of each answer.
        context: text that contains the answers.
        impossible: whether the question is marked as unanswerable.

    Returns:
        The spans, and the kind of each repair.

    Raises:
        CellError: If an answer does not occur in the context, or answers and `impossible` contradict each other.
    """
    if impossible and pairs:
        raise CellError("answers", "has answers, but the question is marked impossible")
    if not impossible and not pairs:
        raise CellError("answers", "is empty, and the question is not marked impossible")
    spans, repairs = [], []
    for index, (text, start) in enumerate(pairs):
        column = f"answers[{index}].answer_start"
        if not text:
            raise CellError(f"answers[{index}].text", "is empty")
        if not isinstance(start, int) or isinstance(start, bool):
            raise CellError(column, f"is {shown(start)}, expected a whole number")
        if start < 0 or not context.startswith(text, start):
            start, repair = _find_nearest(text, start, context, column)
            repairs.append(repair)
        spans.append(AnswerSpan(text, start))
    return tuple(spans), repairs


def _find_nearest(text: str, start: int, context: str, column: str) -> tuple[int, str]:
    """Return the offset of a text in the context that is nearest to a wrong start, and the kind of repair.

    Raises:
        CellError: If the context does not contain the text.
    """
    first = context.find(text)
    after = context.find(text, max(start, 0))
    before = context.rfind(text, 0, max(start, 0) + len(text))
    offsets = [offset for offset in (before, after) if offset >= 0] or ([first] if first >= 0 else [])
    if not offsets:
        raise CellError(column, f"is {start}, but the context does not have {shown(text)} there or anywhere")
    nearest = min(offsets, key=lambda offset: (abs(offset - start), offset))
    return nearest, FOUND_ONLY if first == context.rfind(text) else FOUND_NEAREST


def _text(raw: object, key: str, path: str = "") -> str:
    """Return the text under a key of a JSON object, or raise CellError. Messages have `path` before the key."""
    if not isinstance(raw, dict):
        raise CellError(path.rstrip("."), f"is {shown(raw)}, expected an object")
    value = raw.get(key)
    if not isinstance(value, str):
        raise CellError(path + key, f"is {shown(value)}, expected text" if key in raw else "is missing")
    return check_surrogates(value, path + key)


def check_surrogates(text: str, column: str) -> str:
    """Return the text, or raise CellError if it has a lone surrogate, which no encoding can represent."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CellError(column, f"has half of a surrogate pair at character {error.start + 1}") from None
    return text


def _list(raw: dict[str, Any], key: str) -> list[Any]:
    """Return the list under a key of a JSON object, or raise CellError."""
    value = raw.get(key)
    if not isinstance(value, list):
        raise CellError(key, f"is {shown(value)}, expected a list" if key in raw else "is missing")
    return value
