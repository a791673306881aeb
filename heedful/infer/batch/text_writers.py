"""Answers as CSV, or as the lines of CoNLL files with a column of predicted tags."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from heedful.data import escape_cell
from heedful.data.formats import conll
from heedful.infer.batch.writers import LOCATION_TYPES, AnswerRow, jsonable
from heedful.infer.finite import replace_nonfinite

if TYPE_CHECKING:
    import pyarrow as pa

BLANK = " \t\r\n\v\f"
NONE = "_"  # the tag of a word that has none
PREDICTED = "predicted"  # the name of the column, where a file has a header

# ---------------------------------------------------------------------------------------------------- CSV


def write_csv(chunks: Iterable[Sequence[AnswerRow]], schema: pa.Schema) -> Iterator[bytes]:
    """Write a header and a row for each answer.

    Columns inside a column have both names ("input.text", "probabilities.good"), lists are JSON, and cells that a
    spreadsheet would run as a formula get a ' before them.
    """
    yield csv_header(schema)
    columns = _columns(schema)
    for chunk in chunks:
        yield _encoded([_cell(_value(row, path)) for _, path in columns] for row in chunk)


def csv_header(schema: pa.Schema) -> bytes:
    """The first line of each CSV file of answers."""
    return _encoded([[escape_cell(name) for name, _ in _columns(schema)]])


def _columns(schema: pa.Schema) -> list[tuple[str, tuple[str, ...]]]:
    """The name of each column, and the keys that lead to its values."""
    import pyarrow as pa

    columns: list[tuple[str, tuple[str, ...]]] = []
    for field in schema:
        if pa.types.is_struct(field.type):
            columns += [(f"{field.name}.{inner.name}", (field.name, inner.name)) for inner in field.type]
        else:
            columns.append((field.name, (field.name,)))
    return columns


def _value(row: AnswerRow, path: tuple[str, ...]) -> object:
    name, *rest = path
    if name in (*LOCATION_TYPES, "error"):
        return getattr(row, name)
    value: object = row.cells if name == "input" else (row.answer or {}).get(name)
    for key in rest:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case str():
            return escape_cell(value)
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
    return escape_cell(json.dumps(replace_nonfinite(value), ensure_ascii=False, default=jsonable))


def _encoded(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="backslashreplace")


# ---------------------------------------------------------------------------------------------------- CoNLL


def write_conll(chunks: Iterable[Sequence[AnswerRow]]) -> Iterator[bytes]:
    """Write the lines of the input, with the predicted tag at the end of the line of each word.

    A word that could not be answered gets "_", a line between documents O. A sentence that cannot be read and has none
    after it is left out.
    """
    for chunk in chunks:
        yield "".join(_with_tags(row) for row in chunk).encode(errors="backslashreplace")


def _with_tags(answer_row: AnswerRow) -> str:
    cells = answer_row.cells or {}
    rows = str(cells.get("lines", "")).split("\n")
    first = [conll.split_columns(row.strip(BLANK)) for row in rows]
    places = [place for place, row in enumerate(first) if row[0] and row[0] != conll.DOCUMENT_BORDER]
    words = (answer_row.answer or {}).get("words", [])
    own = places[-len(words) :] if words else []
    tags = {place: word["label"] or NONE for place, word in zip(own, words, strict=True)}
    for place, row in enumerate(first):
        if row[0] == conll.DOCUMENT_BORDER:
            tags[place] = "O"
        elif place in places and place not in tags:
            header = (
                place == places[0]
                and answer_row.row == 1
                and {cell.casefold() for cell in row} & conll.WORD_COLUMN_NAMES
            )
            tags[place] = PREDICTED if header else NONE
    for place, tag in tags.items():
        line, end = rows[place].rstrip("\r"), "\r" if rows[place].endswith("\r") else ""
        rows[place] = f"{line}\t{tag}{end}" if "\t" in line else f"{line.rstrip(' ')} {tag}{end}"
    return "\n".join(rows)
