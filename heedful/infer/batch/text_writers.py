"""Answers as CSV or as CoNLL files, which are the lines of the input with a column of predicted tags."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from heedful.data import escape_cell
from heedful.data.formats import conll
from heedful.data.inputs.input_files import InputFile, InputRow
from heedful.infer.batch.writers import LOCATION_TYPES, AnswerRow, jsonable
from heedful.infer.finite import replace_nonfinite

if TYPE_CHECKING:
    import pyarrow as pa

BLANK = " \t\r\n\v\f"  # white space that is stripped from lines
NO_TAG = "_"  # written for a word without a predicted tag
COLUMN_NAME = "predicted"  # header of the new column, in files that have a header
MAX_LISTED = 10  # ranges of lost lines that a note lists

# ---------------------------------------------------------------------------------------------------- CSV


def write_csv(chunks: Iterable[Sequence[AnswerRow]], schema: pa.Schema) -> Iterator[bytes]:
    """Yield the bytes of a CSV file: a header, and a line for each row.

    A column inside another column is named by both, such as "input.text" or "probabilities.good". Lists are written as
    JSON. A cell that a spreadsheet would run as a formula gets a leading '.
    """
    yield csv_header(schema)
    columns = _columns(schema)
    for chunk in chunks:
        yield _encoded([_cell(_value(row, path)) for _, path in columns] for row in chunk)


def csv_header(schema: pa.Schema) -> bytes:
    """Return the first line of each CSV file of answers."""
    return _encoded([[escape_cell(name) for name, _ in _columns(schema)]])


def _columns(schema: pa.Schema) -> list[tuple[str, tuple[str, ...]]]:
    """Return the name of each CSV column and the path of keys to its values."""
    import pyarrow as pa

    columns: list[tuple[str, tuple[str, ...]]] = []
    for field in schema:
        if pa.types.is_struct(field.type):
            columns += [(f"{field.name}.{inner.name}", (field.name, inner.name)) for inner in field.type]
        else:
            columns.append((field.name, (field.name,)))
    return columns


def _value(row: AnswerRow, path: tuple[str, ...]) -> object:
    """Return the value at a path of keys in a row; None if it is missing."""
    name, *inner_keys = path
    if name in (*LOCATION_TYPES, "error"):
        return getattr(row, name)
    value: object = row.cells if name == "input" else (row.answer or {}).get(name)
    for key in inner_keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _cell(value: object) -> str:
    """Return a value as the text of a CSV cell."""
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
    """Yield the lines of the input, with the predicted tag appended to the line of each word.

    A word without an answer gets "_", and a line between documents gets "O". A blank line follows the last sentence of
    a file that ends without one, so that the next file's first sentence is not joined to it. Lines of sentences that
    cannot be read are written before the next sentence. Those at the end of a file are missing, and so are lines of
    sentences that are too long: see `LostLines`.
    """
    for chunk in chunks:
        yield "".join(_with_tags(row) for row in chunk).encode(errors="backslashreplace")


def _with_tags(answer_row: AnswerRow) -> str:
    """Return the lines of a sentence, and of unreadable sentences before it, with the predicted tags."""
    lines = str((answer_row.cells or {}).get("lines", "")).split("\n")
    columns = [conll.split_columns(line.strip(BLANK)) for line in lines]
    word_lines = [number for number, cells in enumerate(columns) if cells[0] and cells[0] != conll.DOCUMENT_BORDER]
    words = (answer_row.answer or {}).get("words", [])
    answered_lines = word_lines[-len(words) :] if words else []  # the last lines: earlier ones could not be read
    tags = {number: word["label"] or NO_TAG for number, word in zip(answered_lines, words, strict=True)}
    for number, cells in enumerate(columns):
        if cells[0] == conll.DOCUMENT_BORDER:
            tags[number] = "O"
        elif number in word_lines and number not in tags:
            is_first_line = answer_row.row == 1 and number == word_lines[0]
            is_header = is_first_line and {cell.casefold() for cell in cells} & conll.WORD_COLUMN_NAMES
            tags[number] = COLUMN_NAME if is_header else NO_TAG
    for number, tag in tags.items():
        line, end = lines[number].rstrip("\r"), "\r" if lines[number].endswith("\r") else ""
        lines[number] = f"{line}\t{tag}{end}" if "\t" in line else f"{line.rstrip(' ')} {tag}{end}"
    if lines[-1]:  # the file ends without a newline
        lines.append("")
    if word_lines and word_lines[-1] == len(lines) - 2:  # the file ends without a blank line
        lines.append("")
    return "\n".join(lines)


class LostLines:
    """Finds the lines of CoNLL files that are missing from the output, since they are in the lines of no usable row."""

    def __init__(self) -> None:
        self.ranges: list[str] = []  # the first ranges of lines, such as "a.conll:4-9" and "a.conll:12-end"
        self.count = 0  # number of all ranges

    def rows(self, input_file: InputFile) -> Iterator[InputRow]:
        """Yield the rows of a file, and collect the ranges of lines that are in no usable row."""
        next_line = 1  # line after the last line of the usable rows so far
        row: InputRow | None = None
        for row in input_file.rows():
            if isinstance(row.cells, dict):
                words, text = row.cells["words"], str(row.cells["lines"])
                assert isinstance(words, list)
                lines = text.removesuffix("\n").split("\n")
                first_line = row.line - _first_word(lines, len(words))
                if first_line > next_line:
                    self._add(f"{input_file.name}:{next_line}-{first_line - 1}")
                next_line = first_line + len(lines)
            yield row
        if row is not None and row.cells is None:
            self._add(f"{input_file.name}:{next_line}-end")

    @property
    def note(self) -> str:
        """A sentence for the user that lists the missing lines, or "" if no lines are missing."""
        if not self.count:
            return ""
        more = f" and {self.count - MAX_LISTED:,} more" if self.count > MAX_LISTED else ""
        return (
            "these lines are missing from the output, because their sentence is too long, or cannot be read and ends "
            f"the file: {', '.join(self.ranges)}{more}"
        )

    def _add(self, line_range: str) -> None:
        self.count += 1
        if self.count <= MAX_LISTED:
            self.ranges.append(line_range)


def _first_word(lines: Sequence[str], num_words: int) -> int:
    """Return the index of the line with a sentence's first word.

    Args:
        lines: Lines of a row: unreadable sentences, the words of the sentence, then blank lines and document borders.
        num_words: Number of words of the sentence.
    """
    end = len(lines)
    while conll.split_columns(lines[end - 1].strip(BLANK))[0] in ("", conll.DOCUMENT_BORDER):
        end -= 1
    return end - num_words
