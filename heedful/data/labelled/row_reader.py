"""Conversion of the rows of a table to examples, with one function for each class of examples.

A data file calls `read_examples`. Each function `_x_fields` yields the fields of the examples in one row, as a dict for
each example. It reads the cells of the row by their roles, through a `RowReader`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from heedful.data.bad_rows import BadRow, CellError, RowErrors, shown
from heedful.data.examples import (
    ChoiceExample,
    Example,
    LabelledExample,
    MultiLabelExample,
    PairExample,
    QuestionExample,
    RankExample,
    ScoredExample,
    Seq2SeqExample,
    TaggedExample,
    TextExample,
)
from heedful.data.formats.list_cells import parse_list_cell
from heedful.data.formats.squad import align_answers
from heedful.data.formats.tables import Cells, Table
from heedful.data.labelled.columns import SEPARATOR, Columns, RowReader


def _text_fields(reader: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    yield {"text": reader.text(cells, "text")}


def _label_fields(reader: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    value, name = reader.values(cells, "label")[0]
    label = reader.label(value, name, reader.label_names["label"])
    yield {"text": reader.text(cells, "text"), "text_pair": reader.text_pair(cells), "label": label}


def _labels_fields(reader: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    values = reader.values(cells, "labels")
    labels: list[str] = []
    if len(values) > 1:  # one column per label
        for value, name in values:
            if value not in (0, 1, "0", "1", True, False):
                raise CellError(name, f"is {shown(value)}, expected 0 or 1")
            if value in (1, "1"):
                labels.append(name)
    else:
        ((value, name),) = values
        label_values = _split_labels(value, name)
        labels = [reader.label(label_value, name, reader.label_names["labels"]) for label_value in label_values]
    yield {
        "text": reader.text(cells, "text"),
        "text_pair": reader.text_pair(cells),
        "labels": tuple(dict.fromkeys(labels)),
    }


def _split_labels(value: object, name: str) -> Sequence[object]:
    """Return the labels in a cell: a list, or texts separated by bars. An empty or missing cell has no labels."""
    value = parse_list_cell(value, name)
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str):
        return value.split(SEPARATOR) if value.strip() else ()
    if value is None:
        return ()
    raise CellError(name, f"is {shown(value)}, expected a list of labels")


def _score_fields(reader: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    yield {
        "text": reader.text(cells, "text"),
        "text_pair": reader.text_pair(cells),
        "score": reader.number(cells, "score"),
    }


def _tag_fields(reader: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    words = reader.texts(cells, "words")
    value, name = reader.values(cells, "tags")[0]
    value = parse_list_cell(value, name)
    tag_values = value.split() if isinstance(value, str) else value
    if not isinstance(tag_values, list | tuple):
        raise CellError(name, "is missing" if tag_values is None else f"is {shown(value)}, expected a list of tags")
    tags = tuple(
        reader.label(tag, f"{name}[{index}]", reader.label_names["tags"]) for index, tag in enumerate(tag_values)
    )
    if len(tags) != len(words):
        raise CellError(name, f"has {len(tags)} tags for {len(words)} words")
    yield {"words": words, "tags": tags}


def _question_fields(reader: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    """Yield the fields of a question, and under "repairs" the kinds of repairs for `read_examples` to count."""
    context = reader.text(cells, "context")
    answers = _texts_and_starts(reader, reader.value(cells, "answers"), context)
    impossible = reader.value(cells, "impossible") if reader.has("impossible") else not answers
    spans, repairs = align_answers(answers, context, impossible in (True, 1, "1", "true", "True"))
    yield {
        "question": reader.text(cells, "question"),
        "id": str(reader.value(cells, "id")) if reader.has("id") else "",
        "context": context,
        "answers": spans,
        "impossible": not spans,
        "repairs": repairs,
    }


def _texts_and_starts(reader: RowReader, value: object, context: str) -> list[tuple[str, object]]:
    """Return (text, start) of each answer in a cell.

    Args:
        reader: The reader of the row.
        value: The cell: a dict of lists, as published, a list of dicts, or the text of one answer. That answer starts
            at its first occurrence in the context; an empty text means that there is no answer.
        context: The context of the question.
    """
    name = reader.name("answers")
    texts: object = None
    starts: object = None
    if isinstance(value, str):
        texts = [text] if (text := reader.check_text(value, name).strip()) else []
        starts = [context.find(text) for text in texts]
        if -1 in starts:
            raise CellError(name, f"is {shown(text)}, which the context does not have word for word")
    elif isinstance(value, dict):  # {"text": [...], "answer_start": [...]}
        texts, starts = value.get("text"), value.get("answer_start")
    elif isinstance(value, list) and all(isinstance(answer, dict) for answer in value):
        texts = [answer.get("text") for answer in value]
        starts = [answer.get("answer_start") for answer in value]
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise CellError(
            name,
            f"is {shown(value)}, expected a text of the context, or lists of the same length under text and "
            "answer_start",
        )
    return [(reader.check_text(text, f"{name}.text"), start) for text, start in zip(texts, starts, strict=True)]


def _choice_fields(reader: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    questions = reader.value(cells, "question") if reader.has("question") else None
    if isinstance(questions, list):
        yield from _passage_fields(reader, cells, questions)
        return
    question = reader.text(cells, "question") if reader.has("question") else None
    marks: Sequence[object] = ()
    value = reader.value(cells, "candidates")
    if isinstance(value, dict):  # {"text": [...], "label": ["A", ...]}
        marks = value.get("label") or ()
        if isinstance(cells, dict):
            cells = {**cells, reader.name("candidates"): value.get("text")}
    yield _one_choice(reader, cells, question, reader.texts(cells, "candidates"), reader.value(cells, "answer"), marks)


def _passage_fields(reader: RowReader, cells: Cells, questions: list[object]) -> Iterator[dict[str, object]]:
    """Yield the fields of each question of a row that has a passage with lists of questions, options and answers."""
    columns = (reader.value(cells, "candidates"), reader.value(cells, "answer"))
    lists = [values for values in columns if isinstance(values, list) and len(values) == len(questions)]
    if len(lists) < 2:
        raise CellError(
            reader.name("answer"), f"expected {len(questions)} answers and lists of options, one a question"
        )
    for index, (question, texts, answer) in enumerate(zip(questions, *lists, strict=True)):
        question_text = reader.check_text(question, f"{reader.name('question')}[{index}]")
        name = f"{reader.name('candidates')}[{index}]"
        if not isinstance(texts, list):
            raise CellError(name, f"is {shown(texts)}, expected a list of texts")
        candidates = tuple(reader.check_text(candidate, name) for candidate in texts)
        yield _one_choice(reader, cells, question_text, candidates, answer, ())


def _one_choice(
    reader: RowReader,
    cells: Cells,
    question: str | None,
    candidates: tuple[str, ...],
    answer: object,
    marks: Sequence[object],
) -> dict[str, object]:
    """Return the fields of one ChoiceExample.

    Args:
        reader: reads cells by role.
        cells: cells of the row.
        question: question about the prompt, which is joined with each candidate. If None, there is no question.
        candidates: the candidates.
        answer: the correct candidate, in a form that `parse_correct_index` accepts.
        marks: marks of the candidates, such as "A", or empty if the candidates have no marks.
    """
    if len(candidates) < 2:
        raise CellError(reader.name("candidates"), f"has {len(candidates)} candidates, expected two or more")
    correct = parse_correct_index(answer, candidates, marks, reader.name("answer"))
    if not reader.has("prompt"):
        assert question is not None
        return {"prompt": question, "candidates": candidates, "answer": correct}
    if question is not None:
        candidates = tuple(fill_blank(question, candidate) for candidate in candidates)
    return {"prompt": reader.text(cells, "prompt"), "candidates": candidates, "answer": correct}


def fill_blank(question: str, option: str) -> str:
    """Insert an option into the question's only blank, or append it to the question.

    >>> fill_blank("He was _ .", "late"), fill_blank("Why?", "He was late.")
    ('He was late .', 'Why? He was late.')
    """
    blanks = re.findall("_+", question)
    return question.replace(blanks[0], option) if len(blanks) == 1 else f"{question} {option}".strip()


def parse_correct_index(answer: object, candidates: Sequence[str], marks: Sequence[object], name: str) -> int:
    """Return the index of the correct candidate from an answer: an index, a letter from A, a mark or a text.

    Args:
        answer: value of the cell.
        candidates: the candidates.
        marks: marks of the candidates. If there are any, a textual answer must be one of them.
        name: name of the cell's column, for messages.

    Raises:
        CellError: If the answer is not exactly one of the candidates.
    """
    if isinstance(answer, str):
        answer = answer.strip()
        matches = {index for index, mark in enumerate(marks) if mark == answer}
        if not marks:
            matches |= {index for index, candidate in enumerate(candidates) if candidate.strip() == answer}
            letter_index = ord(answer) - ord("A") if len(answer) == 1 and "A" <= answer <= "Z" else -1
            digit_index = int(answer[:9]) if answer.isascii() and answer.isdigit() else -1
            matches |= {index for index in (letter_index, digit_index) if 0 <= index < len(candidates)}
        if len(matches) != 1:
            raise CellError(name, f"is {shown(answer)}, which is {'several' if matches else 'none'} of the candidates")
        answer = matches.pop()
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(candidates):
        state = "is missing" if answer is None else f"is {shown(answer)}"
        raise CellError(
            name, f"{state}, expected 0 to {len(candidates) - 1}, a letter from A, or the text of a candidate"
        )
    return answer


def _pair_fields(reader: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    score = reader.number(cells, "score") if reader.has("score") else None
    negatives = reader.text_list(cells, "negative") if reader.has("negative") else ()
    scores = _teacher_scores(reader, cells, 1 + len(negatives)) if reader.has("teacher_scores") else ()
    anchor, positive = reader.text(cells, "anchor"), reader.text(cells, "positive")
    yield {
        "anchor": anchor,
        "positive": positive,
        "score": score,
        "negatives": negatives,
        "teacher_scores": scores,
    }


def _rank_fields(reader: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    if reader.has("negative"):
        negatives = reader.text_list(cells, "negative")
        if not negatives:
            raise CellError(reader.name("negative"), "is empty, expected a text that is not relevant to the query")
        documents = (reader.text(cells, "positive"), *negatives)
        relevance = (1.0, *(0.0 for _ in negatives))
    else:
        documents = (reader.text(cells, "document"),)
        relevance = (reader.number(cells, "relevance"),)
        if relevance[0] < 0:
            raise CellError(
                reader.name("relevance"), f"is {relevance[0]:g}, expected 0 for an irrelevant text, or more"
            )
    scores = _teacher_scores(reader, cells, len(documents)) if reader.has("teacher_scores") else ()
    yield {
        "query": reader.text(cells, "query"),
        "documents": documents,
        "relevance": relevance,
        "teacher_scores": scores,
    }


def _teacher_scores(reader: RowReader, cells: Cells, num_documents: int) -> tuple[float, ...]:
    """Return the teacher's score of each document.

    A row may have margins instead: the score of the first document minus the score of each other document. Margins are
    converted to scores with 0 for the first document.
    """
    numbers = reader.numbers(cells, "teacher_scores")
    if len(numbers) == num_documents - 1 > 0:
        return (0.0, *(-margin for margin in numbers))
    if len(numbers) != num_documents:
        expected = f"{num_documents} scores, or {num_documents - 1} margins" if num_documents > 1 else "1 score"
        raise CellError(reader.name("teacher_scores"), f"has {len(numbers)} numbers, expected {expected}")
    return numbers


def _seq2seq_fields(reader: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    yield {"text": reader.text(cells, "source"), "rewritten": reader.text(cells, "target")}


ReadFields = Callable[[RowReader, Cells], Iterator[dict[str, object]]]
READ_FIELDS: dict[type[Example], ReadFields] = {  # other classes implement `Example.from_cells`
    TextExample: _text_fields,
    LabelledExample: _label_fields,
    MultiLabelExample: _labels_fields,
    ScoredExample: _score_fields,
    TaggedExample: _tag_fields,
    QuestionExample: _question_fields,
    ChoiceExample: _choice_fields,
    PairExample: _pair_fields,
    RankExample: _rank_fields,
    Seq2SeqExample: _seq2seq_fields,
}


def read_examples(table: Table, columns: Columns, row_errors: RowErrors, max_text_chars: int) -> Iterator[Example]:
    """Yield the examples in the rows of a table. A row with an unusable cell is a bad row.

    Args:
        table: the table.
        columns: columns of the table by role, and the class of the examples.
        row_errors: handles bad rows and counts repairs.
        max_text_chars: maximum characters in a text.
    """
    reader = RowReader(table, columns, max_text_chars)
    read_fields: ReadFields = READ_FIELDS.get(columns.kind) or columns.kind.from_cells
    for row_index, (line, cells) in enumerate(table.rows(row_errors)):
        try:
            fields_of_examples = list(read_fields(reader, cells))
        except CellError as error:
            text = "\t".join(cells) if isinstance(cells, list) else shown(cells)
            bad = BadRow(file=table.display_name, line=line, column=error.column, reason=error.reason, text=text[:200])
            row_errors.reject(bad, index=row_index, stage="cells")
            continue
        for fields in fields_of_examples:
            repairs = fields.pop("repairs", ())  # not a field of the class
            assert isinstance(repairs, list | tuple)
            for index, kind in enumerate(repairs):
                row_errors.count_repair(kind, table.display_name, line, row_index * 1000 + min(index, 999))
            yield columns.kind(file=table.display_name, line=line, **fields)
