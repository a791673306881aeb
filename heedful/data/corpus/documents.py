"""Files as a stream of documents for a corpus: text files are split by their layout, a row of a table is a document."""

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

MIN_COUNTED_CHARS = 100  # a shorter document counts as this many characters, the memory of its Python objects
TICK_CHARS = 1_000_000  # characters between two yields of None by DocumentReader.chunks
LINE_OVERHEAD = 50  # characters added to the length of each line, for the memory of its Python object
SENTENCE_END = tuple(".!?…。！？\"'”’»)]")
Chunk = list[tuple[str, bool]]  # (text, whether each line is a sentence) of each document
TEXT_SUFFIXES = [suffix for suffix, name in FORMAT_BY_SUFFIX.items() if name != "conll"]  # CoNLL files are no text


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
    """List files, and the files with a known suffix in folders, sorted.

    Args:
        files: files and folders.
        exclude: folder of results, whose files are skipped.
        known: suffixes of the files that are listed in folders.

    Returns:
        (path, path relative to its folder, or its name) for each file, and notes for the user.

    Raises:
        DataError: If a file is missing, or a folder has no file with a known suffix.
    """
    excluded_folder = None if exclude is None else exclude.resolve()
    listed: list[tuple[Path, str]] = []
    notes: list[str] = []
    for path in files:
        if not os.path.isdir(path):
            check_file(path)
            listed.append((path, path.name))
            continue
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
        inside = [file for file in inside if excluded_folder not in file.resolve().parents]
        used = [file for file in inside if stem_and_suffix(file)[1] in known]
        if not used:
            raise DataError(f"{path}: holds no file of text: expected {', '.join(known)}, compressed or not")
        listed += [(file, str(file.relative_to(path))) for file in used]
        if len(used) < len(inside):
            notes.append(f"{path.name}: {len(inside) - len(used)} files of unknown kinds are not used")
    if not listed:
        raise DataError("no files were given")
    return listed, notes


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


class CountingPath(type(Path())):  # type: ignore[misc]
    """A path that knows how many bytes of its file were read so far, while the file is open."""

    handle: IO[str] | IO[bytes] | None = None  # the file that was opened last

    def open(self, *arguments: object, **options: object) -> IO[Any]:
        file: IO[Any] = super().open(*arguments, **options)
        self.handle = file
        return file

    @property
    def bytes_read(self) -> int:
        """The position in the file, which may be compressed, in bytes, or 0 if the file is closed."""
        return 0 if self.handle is None or self.handle.closed else int(self.handle.tell())


class DocumentReader:
    """Streams the documents of files.

    Args:
        files: the files.
        settings: how text is split into documents.
        row_errors: handles bad rows.
        notes: sentences for the user, to which sentences about the files are added.

    Raises:
        DataError: If a file is in CoNLL format.
    """

    def __init__(self, files: list[Path], settings: CorpusSettings, row_errors: RowErrors, notes: list[str]) -> None:
        for path in files:
            if (suffix := stem_and_suffix(path)[1]) not in ("", *TEXT_SUFFIXES):
                raise DataError(
                    f"{path}: {suffix} files hold words with tags, not text: write their text to a .txt file"
                )
        self.row_errors = row_errors
        self.notes = list(notes)
        self.num_split = 0  # documents that were split because of their size
        self._settings = settings
        self._files = [CountingPath(path) for path in files]
        self._sizes = [path.stat().st_size for path in files]  # bytes
        self._finished_bytes = 0  # bytes of files that were read completely
        self._current: CountingPath | None = None  # the file that is being read

    @property
    def fraction_read(self) -> float:
        """The fraction of all bytes that was read (0-1)."""
        current_bytes = self._current.bytes_read if self._current is not None else 0
        return min(1.0, (self._finished_bytes + current_bytes) / max(sum(self._sizes), 1))

    def chunks(self) -> Iterator[Chunk | None]:
        """Yield the documents of each shard. Also yield None every TICK_CHARS characters, as time to serve workers."""
        chunk: Chunk = []
        chunk_size = size_since_tick = 0  # characters
        for document in self._documents():
            chunk.append(document)
            size = max(len(document[0]), MIN_COUNTED_CHARS)
            chunk_size += size
            size_since_tick += size
            if chunk_size >= self._settings.shard_chars:
                yield chunk
                chunk, chunk_size = [], 0
            if size_since_tick >= TICK_CHARS:
                yield None
                size_since_tick = 0
        if chunk:
            yield chunk

    def _documents(self) -> Iterator[tuple[str, bool]]:
        """Yield all documents. Error messages name the settings of a corpus."""
        try:
            yield from self._read_all()
        except NoRowsError as error:
            raise DataError(f"{error}: if it is no text, give the other files by name, or move it away") from None
        except HeedfulError as error:
            raise DataError(_with_corpus_settings(str(error))) from None

    def _read_all(self) -> Iterator[tuple[str, bool]]:
        """Yield the documents of all files."""
        for path, size in zip(self._files, self._sizes, strict=True):
            self._current = path
            if not size:
                self._add_note(f"{path.name}: is empty")
            elif FORMAT_BY_SUFFIX.get(stem_and_suffix(path)[1], "text") == "text":
                yield from self._read_text(path)
            else:
                yield from self._read_table(path)
            self._current = None
            self._finished_bytes += size

    def _read_table(self, path: Path) -> Iterator[tuple[str, bool]]:
        """Yield the text column of a table."""
        column = self._settings.text_column
        settings = DataSettings(columns={"text": column} if column else None)
        file = open_data_file(path, TextExample, settings, self.row_errors)
        for note in file.notes:
            self._add_note(note if note.startswith(path.name) else f"{path.name}: {note}")
        for example in file.read(self.row_errors):
            assert isinstance(example, TextExample)
            yield example.text, False

    def _read_text(self, path: Path) -> Iterator[tuple[str, bool]]:
        """Yield the documents of a text file, by its layout."""
        file, notes = detect_encoding(path)
        for note in notes:
            self._add_note(note)
        layout = self._settings.sample_by
        if layout == "auto":
            layout = detect_layout(read_head(file))
            self._add_note(f"{path.name}: {LAYOUT_NOTES[layout]}")
        if layout == "line":
            yield from ((line, False) for _, line in read_text_lines(file, self.row_errors) if line.strip())
            return
        for block in self._blocks(file, split_at_blank=layout == "paragraph"):
            yield "\n".join(block), layout == "paragraph"

    def _blocks(self, file: TextFile, *, split_at_blank: bool) -> Iterator[list[str]]:
        """Yield the lines of each document, up to a blank line or the end of the file, and up to MAX_ROW_BYTES."""
        block: list[str] = []
        size = 0  # characters
        for _, line in read_text_lines(file, self.row_errors):
            if block and split_at_blank and not line.strip():
                yield block
                block, size = [], 0
            elif block and size + len(line) > MAX_ROW_BYTES:
                self.num_split += 1
                yield block
                block, size = [line], len(line) + LINE_OVERHEAD
            elif line.strip() or block:
                block.append(line)
                size += len(line) + LINE_OVERHEAD
        if block:
            yield block

    def _add_note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < 1000:
            self.notes.append(text)


def _with_corpus_settings(message: str) -> str:
    """Replace the names of data settings in a message by corpus settings.

    Advice to set the encoding is removed, since corpora have no such setting.

    >>> _with_corpus_settings("say --data.columns.text=NAME")
    'say --corpus.text_column=NAME'
    >>> _with_corpus_settings("say --data.encoding=cp1252, or iconv -f cp1252")
    'say iconv -f cp1252'
    """
    message = message.replace("--data.columns.text=", "--corpus.text_column=")
    return re.sub(r"--data\.encoding=[\w-]+( \(or -be\))?, or ", "", message)


LAYOUT_NOTES = {  # sentences for the user
    "line": "has no blank lines, so each line is a document",
    "paragraph": "lines are sentences, and blank lines separate documents",
    "document": "is one document, whose paragraphs are separated by blank lines",
}


def detect_layout(head: str) -> Literal["line", "paragraph", "document"]:
    r"""Detect from the beginning of a text file whether lines, paragraphs or the whole file are documents.

    Without blank lines, each line is a document. Blank lines separate documents if most blocks have several lines and
    most lines end like sentences. Otherwise they separate the paragraphs of a single document.

    >>> heads = "One.\nTwo.\n", "One.\nTwo.\n\nThree.\nFour.\n", "A line that\nis wrapped.\n\nNext.\n"
    >>> [detect_layout(head) for head in heads]
    ['line', 'paragraph', 'document']
    """
    lines = [line.strip() for line in head.split("\n")]
    if len(head) > 1000:
        del lines[-1]  # may be cut off
    while lines and not lines[-1]:
        lines.pop()
    if "" not in lines:
        return "line"
    filled_lines = [line for line in lines if line]
    num_blocks = sum(1 for previous, line in zip(["", *lines], lines, strict=False) if line and not previous)
    num_sentence_ends = sum(line.endswith(SENTENCE_END) for line in filled_lines)
    has_long_blocks = len(filled_lines) >= 1.5 * num_blocks
    has_sentence_lines = num_sentence_ends >= 0.7 * len(filled_lines)
    return "paragraph" if has_long_blocks and has_sentence_lines else "document"
