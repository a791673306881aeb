"""Tables of unlabelled inputs from labelled formats: CoNLL, SQuAD's JSON, folders with one text per file."""

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
    column_number,
    is_squad,
    open_table,
    stem_and_suffix,
)

CONLL_COLUMNS, SQUAD_COLUMNS = ("words", "lines"), ("id", "question", "context")  # columns
BLANK = " \t\r\n\v\f"


def open_input_table(path: Path, settings: DataSettings, row_errors: RowErrors) -> Table:
    """Open a file, or a folder with one text per file, as a table of inputs."""
    if os.path.isdir(path):
        return folder_table(Path(path), settings, row_errors)
    suffix = stem_and_suffix(path)[1]
    form = settings.format or FORMAT_BY_SUFFIX.get(suffix)
    if form == "class-folders":
        return file_table(path, settings, row_errors)
    if form == "class-files":
        return open_table(path, replace(settings, format=FORMAT_BY_SUFFIX.get(suffix, "text")), row_errors)
    if form in (None, "text", "conll", "json", "squad"):
        file, _ = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
        if form == "squad" or (form == "json" and is_squad(file)):
            return squad_table(file, row_errors)
        if form == "conll" or (settings.format is None and form != "json" and conll.is_conll(read_head(file))):
            word = column_number(file, settings, "words", 1)
            header = conll.has_header(read_head(file), word) if settings.header is None else settings.header
            return conll_table(file, word, header, row_errors)
    return open_table(path, settings, row_errors)


def _table(
    shown: str, names: tuple[str, ...], rows: Callable[[RowErrors], Rows], row_errors: RowErrors, note: str
) -> Table:
    first = next(rows(row_errors), None)
    if first is None:
        raise NoRowsError(f"{shown}: has no rows")
    return Table(display_name=shown, names=names, first_row=first[1], rows=rows, notes=(note,))


def conll_table(file: TextFile, word: int, header: bool, row_errors: RowErrors) -> Table:
    """Open CoNLL as a table with the columns words and lines; tags are optional.

    `lines` covers the whole file: lines outside sentences, and unreadable sentences, belong to the lines of a
    neighbouring sentence.
    """

    def rows(row_errors: RowErrors) -> Rows:
        words: list[str] = []
        lines: list[str] = []
        start = size = 0
        bad: BadRow | None = None
        ended, left = False, header
        for number, text, wrong in all_lines(file):
            cells = conll.split_columns(text.strip(BLANK)) if wrong is None else ["?"]
            if left or not cells[0] or cells[0] == conll.DOCUMENT_BORDER:
                left = left and not cells[0]
                ended = ended or bool(words or bad)
                lines.append(text)
                continue
            if ended:
                if bad is not None:
                    row_errors.reject(bad)
                else:
                    yield start, {"words": words, "lines": "".join(lines)}
                lines = lines if bad is not None else []
                words, size, bad, ended = [], 0, None, False
            start = start if words or bad else number
            size += len(text)
            if size > file.max_row_bytes // 10:
                lines.clear()
            lines.append(text)
            reason = _reason(cells, word) if size <= file.max_row_bytes // 10 else conll.missing_blank_line(file)
            if wrong is not None or reason:
                bad = (
                    bad
                    or wrong
                    or BadRow(file=file.display_name, line=number, column="", reason=reason, text=text[:200])
                )
            elif bad is None:
                words.append(cells[word - 1])
        if bad is not None:
            row_errors.reject(bad)
        elif words:
            yield start, {"words": words, "lines": "".join(lines)}

    note = f"{file.path.name}: words in column {word}, a blank line between sentences (format=conll)"
    return _table(file.display_name, CONLL_COLUMNS, rows, row_errors, note)


def _reason(cells: list[str], word: int) -> str:
    if len(cells) < word:
        return f"has {len(cells)} columns, and the words are in column {word}"
    return "" if cells[word - 1] else "has an empty word"


def squad_table(file: TextFile, row_errors: RowErrors) -> Table:
    """Open SQuAD's JSON as a table with the columns id, question and context; answers are optional."""
    note = f"{file.path.name}: questions and contexts of SQuAD's JSON"
    return _table(
        file.display_name, SQUAD_COLUMNS, lambda row_errors: squad.read_inputs(file, row_errors), row_errors, note
    )


def folder_table(folder: Path, settings: DataSettings, row_errors: RowErrors) -> Table:
    """Open a folder as a table with the columns path and text, one row per file."""

    def rows(row_errors: RowErrors) -> Rows:
        for path in list_text_files(folder):
            if (text := read_text_file(path, settings, row_errors)) is not None:
                yield 1, {"path": str(path.relative_to(folder)), "text": text}

    return _table(
        str(folder), ("path", "text"), rows, row_errors, f"{folder.name}: a text in each file (format=class-folders)"
    )


def file_table(path: Path, settings: DataSettings, row_errors: RowErrors) -> Table:
    """Open a file as a table with one text."""

    def rows(row_errors: RowErrors) -> Rows:
        if (text := read_text_file(path, settings, row_errors)) is not None:
            yield 1, {"text": text}

    return _table(str(path), ("text",), rows, row_errors, f"{path.name}: one text (format=class-folders)")
