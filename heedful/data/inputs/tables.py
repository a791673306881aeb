"""Files of labelled forms as tables of inputs, without their labels: CoNLL, SQuAD's JSON, a text in each file."""

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
from heedful.data.labelled.data_file import SUFFIXES, DataSettings, column_number, is_squad, open_table, stem_and_suffix

CONLL_COLUMNS, SQUAD_COLUMNS = ("words", "lines"), ("id", "question", "context")  # columns
BLANK = " \t\r\n\v\f"


def open_input_table(path: Path, settings: DataSettings, sieve: RowErrors) -> Table:
    """Open a file, or a folder with a text in each file, as rows of inputs."""
    if os.path.isdir(path):
        return folder_table(Path(path), settings, sieve)
    suffix = stem_and_suffix(path)[1]
    form = settings.format or SUFFIXES.get(suffix)
    if form == "class-folders":
        return file_table(path, settings, sieve)
    if form == "class-files":
        return open_table(path, replace(settings, format=SUFFIXES.get(suffix, "text")), sieve)
    if form in (None, "text", "conll", "json", "squad"):
        file, _ = detect_encoding(path, encoding=settings.encoding, longest=settings.max_row_bytes)
        if form == "squad" or (form == "json" and is_squad(file)):
            return squad_table(file, sieve)
        if form == "conll" or (settings.format is None and form != "json" and conll.is_conll(read_head(file))):
            word = column_number(file, settings, "words", 1)
            header = conll.has_header(read_head(file), word) if settings.header is None else settings.header
            return conll_table(file, word, header, sieve)
    return open_table(path, settings, sieve)


def _table(shown: str, names: tuple[str, ...], rows: Callable[[RowErrors], Rows], sieve: RowErrors, said: str) -> Table:
    first = next(rows(sieve), None)
    if first is None:
        raise NoRowsError(f"{shown}: has no rows")
    return Table(shown=shown, names=names, first=first[1], rows=rows, said=(said,))


def conll_table(file: TextFile, word: int, header: bool, sieve: RowErrors) -> Table:
    """Read sentences in columns as rows of words and of the lines that they stand in; tags are not needed.

    All lines of the file are in `lines`: those before the first sentence, after a sentence, and sentences that cannot
    be read are in the lines of a sentence beside them.
    """

    def rows(sieve: RowErrors) -> Rows:
        words: list[str] = []
        lines: list[str] = []
        start = size = 0
        bad: BadRow | None = None
        ended, left = False, header
        for number, text, wrong in all_lines(file):
            cells = conll.split_columns(text.strip(BLANK)) if wrong is None else ["?"]
            if left or not cells[0] or cells[0] == conll.BORDER:
                left = left and not cells[0]
                ended = ended or bool(words or bad)
                lines.append(text)
                continue
            if ended:
                if bad is not None:
                    sieve.refuse(bad)
                else:
                    yield start, {"words": words, "lines": "".join(lines)}
                lines = lines if bad is not None else []
                words, size, bad, ended = [], 0, None, False
            start = start if words or bad else number
            size += len(text)
            if size > file.longest // 10:
                lines.clear()
            lines.append(text)
            reason = _reason(cells, word) if size <= file.longest // 10 else conll.missing_blank_line(file)
            if wrong is not None or reason:
                bad = bad or wrong or BadRow(file=file.shown, line=number, column="", reason=reason, text=text[:200])
            elif bad is None:
                words.append(cells[word - 1])
        if bad is not None:
            sieve.refuse(bad)
        elif words:
            yield start, {"words": words, "lines": "".join(lines)}

    said = f"{file.path.name}: words in column {word}, a blank line between sentences (format=conll)"
    return _table(file.shown, CONLL_COLUMNS, rows, sieve, said)


def _reason(cells: list[str], word: int) -> str:
    if len(cells) < word:
        return f"has {len(cells)} columns, and the words are in column {word}"
    return "" if cells[word - 1] else "has an empty word"


def squad_table(file: TextFile, sieve: RowErrors) -> Table:
    """Read SQuAD's JSON as rows of id, question and context; answers are not needed."""

    said = f"{file.path.name}: questions and contexts of SQuAD's JSON"
    return _table(file.shown, SQUAD_COLUMNS, lambda sieve: squad.read_inputs(file, sieve), sieve, said)


def folder_table(folder: Path, settings: DataSettings, sieve: RowErrors) -> Table:
    """Read each file below a folder as the text of a row, with its path in the folder."""

    def rows(sieve: RowErrors) -> Rows:
        for path in list_text_files(folder):
            if (text := read_text_file(path, settings, sieve)) is not None:
                yield 1, {"path": str(path.relative_to(folder)), "text": text}

    return _table(
        str(folder), ("path", "text"), rows, sieve, f"{folder.name}: a text in each file (format=class-folders)"
    )


def file_table(path: Path, settings: DataSettings, sieve: RowErrors) -> Table:
    """Read a file as one text."""

    def rows(sieve: RowErrors) -> Rows:
        if (text := read_text_file(path, settings, sieve)) is not None:
            yield 1, {"text": text}

    return _table(str(path), ("text",), rows, sieve, f"{path.name}: one text (format=class-folders)")
