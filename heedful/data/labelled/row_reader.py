"""Read the rows of a table as examples."""

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


def _plain(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    yield {"text": read.text(cells, "text")}


def _labelled(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    value, name = read.values(cells, "label")[0]
    label = read.label(value, name, read.label_names["label"])
    yield {"text": read.text(cells, "text"), "text_pair": read.text_pair(cells), "label": label}


def _multi(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    values, words = read.values(cells, "labels"), read.label_names["labels"]
    labels: list[str] = []
    if len(values) > 1:  # one column per label
        for value, name in values:
            if value not in (0, 1, "0", "1", True, False):
                raise CellError(name, f"is {shown(value)}, expected 0 or 1")
            labels += [name] * (value in (1, "1"))
    else:
        ((value, name),) = values
        value = parse_list_cell(value, name)
        label_values = value.split(SEPARATOR) if isinstance(value, str) and value.strip() else value
        if not isinstance(label_values, list | tuple):
            if label_values is None or isinstance(label_values, str):
                label_values = []
            else:
                raise CellError(name, f"is {shown(value)}, expected a list of labels")
        labels = [read.label(label_value, name, words) for label_value in label_values]
    yield {"text": read.text(cells, "text"), "text_pair": read.text_pair(cells), "labels": tuple(dict.fromkeys(labels))}


def _scored(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    yield {"text": read.text(cells, "text"), "text_pair": read.text_pair(cells), "score": read.number(cells, "score")}


def _tagged(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    words, (value, name) = read.texts(cells, "words"), read.values(cells, "tags")[0]
    value = parse_list_cell(value, name)
    tag_values = value.split() if isinstance(value, str) else value
    if not isinstance(tag_values, list | tuple):
        raise CellError(name, "is missing" if tag_values is None else f"is {shown(value)}, expected a list of tags")
    tags = tuple(read.label(tag, f"{name}[{index}]", read.label_names["tags"]) for index, tag in enumerate(tag_values))
    if len(tags) != len(words):
        raise CellError(name, f"has {len(tags)} tags for {len(words)} words")
    yield {"words": words, "tags": tags}


def _question(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    context, value, name = read.text(cells, "context"), read.value(cells, "answers"), read.name("answers")
    if isinstance(value, dict):  # {"text": [...], "answer_start": [...]}
        texts, starts = value.get("text"), value.get("answer_start")
    else:
        answers = value if isinstance(value, list) and all(isinstance(answer, dict) for answer in value) else None
        texts, starts = (answers and [answer.get(key) for answer in answers] for key in ("text", "answer_start"))
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise CellError(name, f"is {shown(value)}, expected lists of the same length under text and answer_start")
    pairs = [(read.check_text(text, f"{name}.text"), start) for text, start in zip(texts, starts, strict=True)]
    impossible = read.value(cells, "impossible") if read.has("impossible") else not pairs
    spans, repairs = align_answers(pairs, context, impossible in (True, 1, "1", "true", "True"))
    question = read.text(cells, "question")
    id_text = str(read.value(cells, "id")) if read.has("id") else ""
    fields = {"id": id_text, "question": question, "context": context, "answers": spans, "impossible": not spans}
    yield fields | {"repairs": repairs}


def _choices(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
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
            yield _choice(read, cells, question, candidates, answer, ())
        return
    question = read.text(cells, "question") if read.has("question") else None
    marks: Sequence[object] = ()
    value = read.value(cells, "candidates")
    if isinstance(value, dict):  # {"text": [...], "label": ["A", ...]}
        marks = value.get("label") or ()
        cells = {**cells, read.name("candidates"): value.get("text")} if isinstance(cells, dict) else cells
    yield _choice(read, cells, question, read.texts(cells, "candidates"), read.value(cells, "answer"), marks)


def _choice(
    read: RowReader,
    cells: Cells,
    question: str | None,
    candidates: tuple[str, ...],
    answer: object,
    marks: Sequence[object],
) -> dict[str, object]:
    if len(candidates) < 2:
        raise CellError(read.name("candidates"), f"has {len(candidates)} candidates, expected two or more")
    right = right_one(answer, candidates, marks, read.name("answer"))
    if not read.has("prompt"):
        assert question is not None
        return {"prompt": question, "candidates": candidates, "answer": right}
    if question is not None:
        candidates = tuple(fill_blank(question, candidate) for candidate in candidates)
    return {"prompt": read.text(cells, "prompt"), "candidates": candidates, "answer": right}


def fill_blank(question: str, option: str) -> str:
    """Insert an option into the question's only blank, or append it to the question.

    >>> fill_blank("He was _ .", "late"), fill_blank("Why?", "He was late.")
    ('He was late .', 'Why? He was late.')
    """
    blanks = re.findall("_+", question)
    return question.replace(blanks[0], option) if len(blanks) == 1 else f"{question} {option}".strip()


def right_one(answer: object, candidates: Sequence[str], marks: Sequence[object], name: str) -> int:
    """Index of the correct candidate, given as that index, a letter from A, its mark or its text."""
    if isinstance(answer, str):
        answer = answer.strip()
        matches = {number for number, mark in enumerate(marks) if mark == answer}
        if not marks:
            matches |= {number for number, candidate in enumerate(candidates) if candidate.strip() == answer}
            letter = ord(answer) - ord("A") if len(answer) == 1 and "A" <= answer <= "Z" else -1
            number = int(answer[:9]) if answer.isascii() and answer.isdigit() else -1
            matches |= {index for index in (letter, number) if 0 <= index < len(candidates)}
        if len(matches) != 1:
            raise CellError(name, f"is {shown(answer)}, which is {'several' if matches else 'none'} of the candidates")
        answer = matches.pop()
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(candidates):
        state = "is missing" if answer is None else f"is {shown(answer)}"
        raise CellError(
            name, f"{state}, expected 0 to {len(candidates) - 1}, a letter from A, or the text of a candidate"
        )
    return answer


def _pair(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    score = read.number(cells, "score") if read.has("score") else None
    negatives = read.text_list(cells, "negative") if read.has("negative") else ()
    scores = teacher_scores(read, cells, 1 + len(negatives)) if read.has("teacher_scores") else ()
    anchor, positive = read.text(cells, "anchor"), read.text(cells, "positive")
    yield {
        "anchor": anchor,
        "positive": positive,
        "score": score,
        "negatives": negatives,
        "teacher_scores": scores,
    }


def _ranked(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
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
    scores = teacher_scores(read, cells, len(documents)) if read.has("teacher_scores") else ()
    yield {
        "query": read.text(cells, "query"),
        "documents": documents,
        "relevance": relevance,
        "teacher_scores": scores,
    }


def teacher_scores(read: RowReader, cells: Cells, documents: int) -> tuple[float, ...]:
    """Return the teacher's score of each document; margins of the first over the others are scores up to a constant."""
    scores = read.numbers(cells, "teacher_scores")
    if len(scores) == documents - 1 > 0:
        return (0.0, *(-margin for margin in scores))
    if len(scores) != documents:
        expected = f"{documents} scores, or {documents - 1} margins" if documents > 1 else "1 score"
        raise CellError(read.name("teacher_scores"), f"has {len(scores)} numbers, expected {expected}")
    return scores


def _rewritten(read: RowReader, cells: Cells) -> Iterator[dict[str, object]]:
    yield {"text": read.text(cells, "source"), "rewritten": read.text(cells, "target")}


Fields = Callable[[RowReader, Cells], Iterator[dict[str, object]]]
FIELDS: dict[type[Example], Fields] = {  # other classes implement `Example.from_cells`
    TextExample: _plain,
    LabelledExample: _labelled,
    MultiLabelExample: _multi,
    ScoredExample: _scored,
    TaggedExample: _tagged,
    QuestionExample: _question,
    ChoiceExample: _choices,
    PairExample: _pair,
    RankExample: _ranked,
    Seq2SeqExample: _rewritten,
}


def read_examples(table: Table, columns: Columns, row_errors: RowErrors, longest: int) -> Iterator[Example]:
    """Yield the rows of a table as examples; a row with an unusable cell is a bad row."""
    read = RowReader(table, columns, longest)
    fields: Fields = FIELDS.get(columns.kind) or columns.kind.from_cells
    for ordinal, (line, cells) in enumerate(table.rows(row_errors)):
        try:
            fields_of_examples = list(fields(read, cells))
        except CellError as wrong:
            text = "\t".join(cells) if isinstance(cells, list) else shown(cells)
            bad = BadRow(file=table.display_name, line=line, column=wrong.column, reason=wrong.reason, text=text[:200])
            row_errors.reject(bad, number=ordinal, stage="cells")
            continue
        for example_fields in fields_of_examples:
            repairs = example_fields.pop("repairs", ())
            assert isinstance(repairs, list | tuple)
            for number, what in enumerate(repairs):
                row_errors.count_repair(what, table.display_name, line, ordinal * 1000 + min(number, 999))
            yield columns.kind(file=table.display_name, line=line, **example_fields)
