"""Tables of unlabelled inputs, including formats of labelled data: CoNLL, SQuAD's JSON, folders of text files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from heedful.data.bad_rows import BadRow, RowErrors
from heedful.data.formats import conll, squad
from heedful.data.formats.tables import Rows, Table
from heedful.data.formats.text_files import NoRowsError, TextFile, all_lines, detect_encoding, read_head
from heedful.data.labelled.class_folders import list_text_files, read_text_file
from heedful.data.labelled.data_file import (
    FORMAT_BY_SUFFIX,
    DataSettings,
    column_position,
    is_squad,
    open_table,
    stem_and_suffix,
)

CONLL_COLUMNS = ("words", "lines")
SQUAD_COLUMNS = ("id", "question", "context")
BLANK = " \t\r\n\v\f"  # white space that a blank line may contain


def open_input_table(path: Path, settings: DataSettings, row_errors: RowErrors) -> Table:
    """Open a file, or a folder with one text per file, as a table of inputs."""
    if os.path.isdir(path):
        return folder_table(Path(path), settings, row_errors)
    suffix = stem_and_suffix(path)[1]
    file_format = settings.format or FORMAT_BY_SUFFIX.get(suffix)
    if file_format == "class-folders":
        return file_table(path, settings, row_errors)
    if file_format == "class-files":
        return open_table(path, replace(settings, format=FORMAT_BY_SUFFIX.get(suffix, "text")), row_errors)
    if file_format in (None, "text", "conll", "json", "squad"):
        file, _ = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
        if file_format == "squad" or (file_format == "json" and is_squad(file)):
            return squad_table(file, row_errors)
        has_conll_format = file_format == "conll"
        if settings.format is None and file_format in (None, "text"):
            has_conll_format = conll.is_conll(read_head(file))
        if has_conll_format:
            word = column_position(file, settings, "words", 1)
            header = conll.has_header(read_head(file), word) if settings.header is None else settings.header
            return conll_table(file, word, header, row_errors)
    return open_table(path, settings, row_errors)


def _make_table(
    display_name: str, names: tuple[str, ...], rows: Callable[[RowErrors], Rows], row_errors: RowErrors, note: str
) -> Table:
    """Return a table with these columns and rows; raise NoRowsError if there are no rows."""
    first = next(rows(row_errors), None)
    if first is None:
        raise NoRowsError(f"{display_name}: has no rows")
    return Table(display_name=display_name, names=names, first_row=first[1], rows=rows, notes=(note,))


def conll_table(file: TextFile, word: int, header: bool, row_errors: RowErrors) -> Table:
    """Open a CoNLL file as a table with the columns words and lines. Tags are optional.

    The column lines has the lines of the sentence in the file. Lines between sentences belong to the sentence before
    them, and lines of an unreadable sentence to the sentence after it. So the lines of all rows are the whole file,
    except an unreadable sentence at the end and sentences that are too long.

    Args:
        file: the file.
        word: position of the word column, from 1.
        header: whether the first line names the columns.
        row_errors: handles bad sentences.
    """

    def rows(row_errors: RowErrors) -> Rows:
        words: list[str] = []
        lines: list[str] = []
        start = 0  # first line of the sentence
        size = 0  # characters of the sentence
        bad: BadRow | None = None  # the first bad line of the sentence
        sentence_ended = False
        is_header_next = header
        for line_number, text, bad_line in all_lines(file):
            cells = conll.split_columns(text.strip(BLANK)) if bad_line is None else ["?"]  # "?": not a blank line
            is_separator = not cells[0] or cells[0] == conll.DOCUMENT_BORDER
            if is_header_next or is_separator:
                is_header_next = is_header_next and is_separator
                sentence_ended = sentence_ended or bool(words or bad)
                lines.append(text)
                continue
            if sentence_ended:
                if bad is not None:
                    row_errors.reject(bad)
                else:
                    yield start, {"words": words, "lines": "".join(lines)}
                    lines = []
                words, size, bad, sentence_ended = [], 0, None, False
            start = start if words or bad else line_number
            size += len(text)
            if size > conll.max_sentence_chars(file):
                lines.clear()
                reason = conll.missing_blank_line(file)
            else:
                reason = _line_problem(cells, word)
            lines.append(text)
            if bad_line is not None or reason:
                reported = BadRow(file=file.display_name, line=line_number, column="", reason=reason, text=text[:200])
                bad = bad or bad_line or reported
            elif bad is None:
                words.append(cells[word - 1])
        if bad is not None:
            row_errors.reject(bad)
        elif words:
            yield start, {"words": words, "lines": "".join(lines)}

    note = f"{file.path.name}: words in column {word}, a blank line between sentences (format=conll)"
    return _make_table(file.display_name, CONLL_COLUMNS, rows, row_errors, note)


def _line_problem(cells: list[str], word: int) -> str:
    """Return why the cells of a line have no word, or "" if they have one."""
    if len(cells) < word:
        return f"has {len(cells)} columns, and the words are in column {word}"
    return "" if cells[word - 1] else "has an empty word"


def squad_table(file: TextFile, row_errors: RowErrors) -> Table:
    """Open SQuAD's JSON as a table with the columns id, question and context. Answers are optional."""
    note = f"{file.path.name}: questions and contexts of SQuAD's JSON"

    def rows(row_errors: RowErrors) -> Rows:
        yield from squad.read_inputs(file, row_errors)

    return _make_table(file.display_name, SQUAD_COLUMNS, rows, row_errors, note)


def folder_table(folder: Path, settings: DataSettings, row_errors: RowErrors) -> Table:
    """Open a folder as a table with a row for each file: its path relative to the folder, and its text."""

    def rows(row_errors: RowErrors) -> Rows:
        for path in list_text_files(folder):
            if (text := read_text_file(path, settings, row_errors)) is not None:
                yield 1, {"path": str(path.relative_to(folder)), "text": text}

    note = f"{folder.name}: a text in each file (format=class-folders)"
    return _make_table(str(folder), ("path", "text"), rows, row_errors, note)


def file_table(path: Path, settings: DataSettings, row_errors: RowErrors) -> Table:
    """Open a file as a table with the column text and a single row, which has the whole file."""

    def rows(row_errors: RowErrors) -> Rows:
        if (text := read_text_file(path, settings, row_errors)) is not None:
            yield 1, {"text": text}

    return _make_table(str(path), ("text",), rows, row_errors, f"{path.name}: one text (format=class-folders)")
