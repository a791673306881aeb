"""Read the rows of a table as examples: one function for each class of examples, which yields their fields."""

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


def _text_fields(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    yield {"text": read.text(cells, "text")}


def _label_fields(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    value, name = read.values(cells, "label")[0]
    label = read.label(value, name, read.label_names["label"])
    yield {"text": read.text(cells, "text"), "text_pair": read.text_pair(cells), "label": label}


def _labels_fields(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    values = read.values(cells, "labels")
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
        labels = [read.label(label_value, name, read.label_names["labels"]) for label_value in label_values]
    yield {"text": read.text(cells, "text"), "text_pair": read.text_pair(cells), "labels": tuple(dict.fromkeys(labels))}


def _split_labels(value: object, name: str) -> Sequence[object]:
    """Return the labels in a cell: a list, or texts separated by bars; none if it is empty or missing."""
    value = parse_list_cell(value, name)
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str):
        return value.split(SEPARATOR) if value.strip() else ()
    if value is None:
        return ()
    raise CellError(name, f"is {shown(value)}, expected a list of labels")


def _score_fields(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    yield {"text": read.text(cells, "text"), "text_pair": read.text_pair(cells), "score": read.number(cells, "score")}


def _tag_fields(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    words, (value, name) = read.texts(cells, "words"), read.values(cells, "tags")[0]
    value = parse_list_cell(value, name)
    tag_values = value.split() if isinstance(value, str) else value
    if not isinstance(tag_values, list | tuple):
        raise CellError(name, "is missing" if tag_values is None else f"is {shown(value)}, expected a list of tags")
    tags = tuple(read.label(tag, f"{name}[{index}]", read.label_names["tags"]) for index, tag in enumerate(tag_values))
    if len(tags) != len(words):
        raise CellError(name, f"has {len(tags)} tags for {len(words)} words")
    yield {"words": words, "tags": tags}


def _question_fields(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    context, value, name = read.text(cells, "context"), read.value(cells, "answers"), read.name("answers")
    texts: object = None
    starts: object = None
    if isinstance(value, dict):  # {"text": [...], "answer_start": [...]}
        texts, starts = value.get("text"), value.get("answer_start")
    elif isinstance(value, list) and all(isinstance(answer, dict) for answer in value):
        texts, starts = ([answer.get(key) for answer in value] for key in ("text", "answer_start"))
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise CellError(name, f"is {shown(value)}, expected lists of the same length under text and answer_start")
    pairs = [(read.check_text(text, f"{name}.text"), start) for text, start in zip(texts, starts, strict=True)]
    impossible = read.value(cells, "impossible") if read.has("impossible") else not pairs
    spans, repairs = align_answers(pairs, context, impossible in (True, 1, "1", "true", "True"))
    question = read.text(cells, "question")
    id_text = str(read.value(cells, "id")) if read.has("id") else ""
    fields = {"id": id_text, "question": question, "context": context, "answers": spans, "impossible": not spans}
    yield fields | {"repairs": repairs}


def _choice_fields(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    questions = read.value(cells, "question") if read.has("question") else None
    if isinstance(questions, list):  # one passage with several questions
        options, answers = read.value(cells, "candidates"), read.value(cells, "answer")
        lists = [values for values in (options, answers) if isinstance(values, list) and len(values) == len(questions)]
        if len(lists) < 2:
            raise CellError(
                read.name("answer"), f"expected {len(questions)} answers and lists of options, one a question"
            )
        for number, (question, texts, answer) in enumerate(zip(questions, *lists, strict=True)):
            where = f"[{number}]"
            question = read.check_text(question, read.name("question") + where)
            if not isinstance(texts, list):
                raise CellError(read.name("candidates") + where, f"is {shown(texts)}, expected a list of texts")
            candidates = tuple(read.check_text(candidate, read.name("candidates") + where) for candidate in texts)
            yield _one_choice(read, cells, question, candidates, answer, ())
        return
    question = read.text(cells, "question") if read.has("question") else None
    marks: Sequence[object] = ()
    value = read.value(cells, "candidates")
    if isinstance(value, dict):  # {"text": [...], "label": ["A", ...]}
        marks = value.get("label") or ()
        if isinstance(cells, dict):
            cells = {**cells, read.name("candidates"): value.get("text")}
    yield _one_choice(read, cells, question, read.texts(cells, "candidates"), read.value(cells, "answer"), marks)


def _one_choice(
    read: RowReader,
    cells: Cells,
    question: str | None,
    candidates: tuple[str, ...],
    answer: object,
    marks: Sequence[object],
) -> dict[str, object]:
    """Return the fields of one ChoiceExample.

    Args:
        read: reads the row.
        cells: the row.
        question: question about the prompt, which is joined with each candidate; None: no question.
        candidates: the candidates.
        answer: the correct candidate, as `parse_correct_index` reads it.
        marks: marks of the candidates, such as "A"; empty: they have none.
    """
    if len(candidates) < 2:
        raise CellError(read.name("candidates"), f"has {len(candidates)} candidates, expected two or more")
    correct = parse_correct_index(answer, candidates, marks, read.name("answer"))
    if not read.has("prompt"):
        assert question is not None
        return {"prompt": question, "candidates": candidates, "answer": correct}
    if question is not None:
        candidates = tuple(fill_blank(question, candidate) for candidate in candidates)
    return {"prompt": read.text(cells, "prompt"), "candidates": candidates, "answer": correct}


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
        marks: marks of the candidates; a text must be one of them if there are any.
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
            number = int(answer[:9]) if answer.isascii() and answer.isdigit() else -1
            matches |= {index for index in (letter_index, number) if 0 <= index < len(candidates)}
        if len(matches) != 1:
            raise CellError(name, f"is {shown(answer)}, which is {'several' if matches else 'none'} of the candidates")
        answer = matches.pop()
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(candidates):
        state = "is missing" if answer is None else f"is {shown(answer)}"
        raise CellError(
            name, f"{state}, expected 0 to {len(candidates) - 1}, a letter from A, or the text of a candidate"
        )
    return answer


def _pair_fields(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    score = read.number(cells, "score") if read.has("score") else None
    negatives = read.text_list(cells, "negative") if read.has("negative") else ()
    scores = _teacher_scores(read, cells, 1 + len(negatives)) if read.has("teacher_scores") else ()
    anchor, positive = read.text(cells, "anchor"), read.text(cells, "positive")
    yield {
        "anchor": anchor,
        "positive": positive,
        "score": score,
        "negatives": negatives,
        "teacher_scores": scores,
    }


def _rank_fields(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    if read.has("negative"):
        negatives = read.text_list(cells, "negative")
        if not negatives:
            raise CellError(read.name("negative"), "is empty, expected a text that is not relevant to the query")
        documents = (read.text(cells, "positive"), *negatives)
        relevance = (1.0, *(0.0 for _ in negatives))
    else:
        documents, relevance = (read.text(cells, "document"),), (read.number(cells, "relevance"),)
        if relevance[0] < 0:
            raise CellError(read.name("relevance"), f"is {relevance[0]:g}, expected 0 for an irrelevant text, or more")
    scores = _teacher_scores(read, cells, len(documents)) if read.has("teacher_scores") else ()
    yield {
        "query": read.text(cells, "query"),
        "documents": documents,
        "relevance": relevance,
        "teacher_scores": scores,
    }


def _teacher_scores(read: RowReader, cells: Cells, num_documents: int) -> tuple[float, ...]:
    """Return the teacher's score of each document.

    A row may have margins instead, which are the score of the first document minus that of each other one; they become
    scores with 0 for the first document.
    """
    numbers = read.numbers(cells, "teacher_scores")
    if len(numbers) == num_documents - 1 > 0:
        return (0.0, *(-margin for margin in numbers))
    if len(numbers) != num_documents:
        expected = f"{num_documents} scores, or {num_documents - 1} margins" if num_documents > 1 else "1 score"
        raise CellError(read.name("teacher_scores"), f"has {len(numbers)} numbers, expected {expected}")
    return numbers


def _seq2seq_fields(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    yield {"text": read.text(cells, "source"), "rewritten": read.text(cells, "target")}


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
    """Yield the examples in the rows of a table; a row with an unusable cell is a bad row.

    Args:
        table: the table.
        columns: its columns by role, and the class of the examples.
        row_errors: handles bad rows and counts repairs.
        max_text_chars: maximum number of characters in a text.
    """
    reader = RowReader(table, columns, max_text_chars)
    read_fields: ReadFields = READ_FIELDS.get(columns.kind) or columns.kind.from_cells
    for number, (line, cells) in enumerate(table.rows(row_errors)):
        try:
            fields_of_examples = list(read_fields(reader, cells))
        except CellError as error:
            text = "\t".join(cells) if isinstance(cells, list) else shown(cells)
            bad = BadRow(file=table.display_name, line=line, column=error.column, reason=error.reason, text=text[:200])
            row_errors.reject(bad, number=number, stage="cells")
            continue
        for fields in fields_of_examples:
            repairs = fields.pop("repairs", ())
            assert isinstance(repairs, list | tuple)
            for index, kind in enumerate(repairs):
                row_errors.count_repair(kind, table.display_name, line, number * 1000 + min(index, 999))
            yield columns.kind(file=table.display_name, line=line, **fields)
