"""Read files as documents: text files split by their layout, tables row by row."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from heedful.data.bad_rows import RowErrors
from heedful.data.examples import TextExample
from heedful.data.formats.text_files import (
    MAX_ROW_BYTES,
    NoRowsError,
    TextFile,
    check_file,
    detect_encoding,
    read_head,
    read_text_lines,
)
from heedful.data.labelled.data_file import FORMAT_BY_SUFFIX, DataSettings, open_data_file, stem_and_suffix
from heedful.errors import DataError, HeedfulError, SettingError

LEAST = 100  # characters that a document counts at least: an empty one takes memory too
TICK = 1_000_000  # characters between two yields of None
LINE = 50  # characters that a line counts in addition
SENTENCE_END = tuple(".!?…。！？\"'”’»)]")
Chunk = list[tuple[str, bool]]  # (text, whether each line is a sentence) of each document
TEXT_SUFFIXES = [
    suffix for suffix, form in FORMAT_BY_SUFFIX.items() if form != "conll"
]  # suffixes of text; tagged words are excluded


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSettings:
    """How text is split into documents, and which documents are kept."""

    text_column: str = ""  # column of the text in JSON lines, tables and Parquet; "": found by name
    sample_by: Literal["auto", "line", "paragraph", "document"] = "auto"  # what is a document in a text file
    dedup: Literal["none", "exact", "near"] = "none"  # remove equal documents, or near duplicates too
    jaccard_threshold: float = 0.8  # minimum similarity (word 5-shingles, 0.3 to 1) of near duplicates
    min_document_chars: int = 0  # minimum characters of a document; shorter ones are dropped and counted
    shard_chars: int = 32_000_000  # characters of text in a shard

    def __post_init__(self) -> None:
        if not 0.3 <= self.jaccard_threshold <= 1:
            raise SettingError(
                f"jaccard_threshold is {self.jaccard_threshold}, expected a share from 0.3 to 1",
                path="jaccard_threshold",
            )
        if self.min_document_chars < 0:
            raise SettingError(
                f"min_document_chars is {self.min_document_chars}, expected a number of characters from 0",
                path="min_document_chars",
            )
        if self.shard_chars < 1:
            raise SettingError(
                f"shard_chars is {self.shard_chars}, expected a number of characters from 1", path="shard_chars"
            )


def list_files(
    files: Sequence[Path], exclude: Path | None = None, known: Sequence[str] = TEXT_SUFFIXES
) -> tuple[list[tuple[Path, str]], list[str]]:
    """List files, and those in folders with a known suffix, sorted.

    Args:
        files: files and folders.
        exclude: folder of results, whose files are skipped.
        known: suffixes of files in folders.

    Returns:
        Each path with its name relative to the given folder; notes for the user.
    """
    apart = None if exclude is None else exclude.resolve()
    listed: list[tuple[Path, str]] = []
    notes: list[str] = []
    for path in files:
        if not os.path.isdir(path):
            check_file(path)
            listed.append((path, path.name))
            continue
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path)))
        inside = [file for file in inside if apart not in file.resolve().parents]
        used = [file for file in inside if stem_and_suffix(file)[1] in known]
        if not used:
            raise DataError(f"{path}: holds no file of text: {', '.join(known)}, packed or not")
        listed += [(file, str(file.relative_to(path))) for file in used]
        if len(used) < len(inside):
            notes.append(f"{path.name}: {len(inside) - len(used)} files of unknown kinds are not used")
    if not listed:
        raise DataError("no files were given")
    return listed, notes


def _hidden(place: Path) -> bool:
    return any(part.startswith(".") for part in place.parts)


class CountingPath(type(Path())):  # type: ignore[misc]
    """A path that reports how many bytes of its file were read."""

    handle: IO[str] | IO[bytes] | None = None

    def open(self, *arguments: object, **options: object) -> IO[Any]:
        file: IO[Any] = super().open(*arguments, **options)
        self.handle = file
        return file

    @property
    def read(self) -> int:
        """Position in the (compressed) file, in bytes."""
        return 0 if self.handle is None or self.handle.closed else int(self.handle.tell())


class DocumentReader:
    """Streams the documents of all files, and reports progress."""

    def __init__(self, files: list[Path], settings: CorpusSettings, row_errors: RowErrors, notes: list[str]) -> None:
        for path in files:
            if (suffix := stem_and_suffix(path)[1]) not in ("", *TEXT_SUFFIXES):
                what = "a kind of file of words with tags, which are no text"
                raise DataError(f"{path}: {suffix} is {what}: write what is to be read to a .txt file")
        self.row_errors, self.notes, self.cut = (
            row_errors,
            list(notes),
            0,
        )  # number of documents that were split for their size
        self._settings = settings
        self._files = [CountingPath(path) for path in files]
        self._sizes = [path.stat().st_size for path in files]
        self._done = 0
        self._at: CountingPath | None = None

    @property
    def share(self) -> float:
        """Share of all bytes that were read (0-1)."""
        return min(1.0, (self._done + (self._at.read if self._at is not None else 0)) / max(sum(self._sizes), 1))

    def chunks(self) -> Iterator[Chunk | None]:
        """Yield the documents of each shard; None regularly in between, so that the caller can serve workers."""
        chunk: Chunk = []
        size = tick = 0
        for document in self._documents():
            chunk.append(document)
            size += max(len(document[0]), LEAST)
            tick += max(len(document[0]), LEAST)
            if size >= self._settings.shard_chars:
                yield chunk
                chunk, size = [], 0
            if tick >= TICK:
                yield None
                tick = 0
        if chunk:
            yield chunk

    def _documents(self) -> Iterator[tuple[str, bool]]:
        try:
            yield from self._all()
        except NoRowsError as error:
            raise DataError(f"{error}: if it is no text, give the other files by name, or move it away") from None
        except HeedfulError as error:
            raise DataError(_of_corpus(str(error))) from None

    def _all(self) -> Iterator[tuple[str, bool]]:
        for path, size in zip(self._files, self._sizes, strict=True):
            self._at = path
            if not size:
                self._add_note(f"{path.name}: is empty")
            elif FORMAT_BY_SUFFIX.get(stem_and_suffix(path)[1], "text") == "text":
                yield from self._text(path)
            else:
                column = self._settings.text_column
                settings = DataSettings(columns={"text": column} if column else None)
                part = open_data_file(path, TextExample, settings, self.row_errors)
                for note in part.notes:
                    self._add_note(f"{path.name}: {note}" if not note.startswith(path.name) else note)
                for example in part.read(self.row_errors):
                    assert isinstance(example, TextExample)
                    yield example.text, False
            self._at = None
            self._done += size

    def _text(self, path: Path) -> Iterator[tuple[str, bool]]:
        file, notes = detect_encoding(path)
        for note in notes:
            self._add_note(note)
        form = self._settings.sample_by
        if form == "auto":
            form = layout(read_head(file))
            self._add_note(f"{path.name}: {LAYOUTS[form]}")
        if form == "line":
            yield from ((line, False) for _, line in read_text_lines(file, self.row_errors) if line.strip())
            return
        for block in self._blocks(file, blank=form == "paragraph"):
            yield "\n".join(block), form == "paragraph"

    def _blocks(self, file: TextFile, *, blank: bool) -> Iterator[list[str]]:
        block: list[str] = []
        size = 0
        for _, line in read_text_lines(file, self.row_errors):
            if block and blank and not line.strip():
                yield block
                block, size = [], 0
            elif block and size + len(line) > MAX_ROW_BYTES:
                self.cut += 1
                yield block
                block, size = [line], len(line) + LINE
            elif line.strip() or block:
                block.append(line)
                size += len(line) + LINE
        if block:
            yield block

    def _add_note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < 1000:
            self.notes.append(text)


def _of_corpus(message: str) -> str:
    """Rewrite a message with the names of corpus settings, which have no encoding.

    >>> _of_corpus("say --data.columns.text=NAME")
    'say --corpus.text_column=NAME'
    >>> _of_corpus("say --data.encoding=cp1252, or iconv -f cp1252")
    'say iconv -f cp1252'
    """
    message = message.replace("--data.columns.text=", "--corpus.text_column=")
    return re.sub(r"--data\.encoding=[\w-]+( \(or -be\))?, or ", "", message)


LAYOUTS = {
    "line": "has no blank lines, so each line is a document",
    "paragraph": "lines are sentences, and blank lines part documents",
    "document": "is one document, whose paragraphs are separated by blank lines",
}


def layout(head: str) -> Literal["line", "paragraph", "document"]:
    r"""Detect what a document is in a text file, from its beginning; without blank lines it is a line.

    Blank lines separate documents if most blocks have several lines, and most lines end like sentences.

    >>> layout("One.\nTwo.\n"), layout("One.\nTwo.\n\nThree.\nFour.\n"), layout("A line that\ngoes on.\n\nNext.\n")
    ('line', 'paragraph', 'document')
    """
    rows = [row.strip() for row in head.split("\n")[: -1 if len(head) > 1000 else None]]
    while rows and not rows[-1]:
        rows.pop()
    if "" not in rows:
        return "line"
    filled = [row for row in rows if row]
    blocks = sum(1 for before, row in zip(["", *rows], rows, strict=False) if row and not before)
    ended = sum(row.endswith(SENTENCE_END) for row in filled)
    return "paragraph" if len(filled) >= 1.5 * blocks and ended >= 0.7 * len(filled) else "document"
