"""Documents to search: text files, one document each, and rows of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heedful.data.bad_rows import BadRow, Raise, RowErrors, shown
from heedful.data.formats.text_files import COMPRESSED, NoRowsError, check_file, detect_encoding, read_text_lines
from heedful.data.labelled.data_file import DataSettings, open_table
from heedful.errors import DataError

TEXT_FILES = (".txt", ".md", ".rst")  # suffixes of files that are one document
TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")  # suffixes of files with a document in each row
ID_COLUMNS = ("_id", "id", "doc_id", "docno")
TEXT_COLUMNS = ("text", "contents", "content", "body")
TITLE_COLUMNS = ("title",)
BEIR_CORPUS, BEIR_QUERIES = "corpus.jsonl", "queries.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text with its id, which is unique in a collection."""

    id: str
    text: str
    title: str = ""

    @property
    def content(self) -> str:
        """The text that is searched: the title, if any, and the text in the lines below it."""
        return f"{self.title}\n{self.text}" if self.title else self.text


def read_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """Yield the documents of files and of the files in folders.

    A text file is one document, whose id is its path in its folder. A row of a table is one document, with the columns
    `id` (or `_id`), `text` and `title`; without a column of ids the id is FILE:LINE. Of a folder in BEIR's format only
    its corpus is read.

    Raises:
        DataError: If there is no such file, or a row has no text.
    """
    for path, name in document_files(paths):
        yield from _table(path, name) if _suffix(path) in TABLES else _text_file(path, name)


def document_files(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return files, and those with a known suffix in folders, each with its path in its folder, sorted."""
    listed: list[tuple[Path, str]] = []
    for path in paths:
        if not path.is_dir():
            check_file(path)
            listed.append((path, path.name))
        elif (path / BEIR_CORPUS).is_file() and (path / BEIR_QUERIES).is_file():
            listed.append((path / BEIR_CORPUS, BEIR_CORPUS))
        else:
            inside = [(file, file.relative_to(path)) for file in sorted(path.rglob("*")) if file.is_file()]
            known = [
                (file, str(name)) for file, name in inside
                if _suffix(file) in (*TEXT_FILES, *TABLES) and not any(part.startswith(".") for part in name.parts)
            ]  # fmt: skip
            if not known:
                raise DataError(f"{path}: holds no document: expected files of {', '.join((*TEXT_FILES, *TABLES))}")
            listed += known
    if not listed:
        raise DataError("no documents were given; expected files or folders of texts")
    return listed


def _suffix(path: Path) -> str:
    """Return the suffix of a file, without that of a compression."""
    name = Path(path.name.removesuffix(path.suffix)) if path.suffix in COMPRESSED else path
    return name.suffix.lower()


def _text_file(path: Path, name: str) -> Iterator[Document]:
    try:
        file, _ = detect_encoding(path)
    except NoRowsError:
        return
    text = "\n".join(line for _, line in read_text_lines(file, RowErrors(Raise())))
    if text.strip():
        yield Document(id=name, text=text)


def _table(path: Path, name: str) -> Iterator[Document]:
    row_errors = RowErrors(Raise())
    try:
        table = open_table(path, DataSettings(), row_errors)
    except NoRowsError:
        return
    for line, cells in table.rows(row_errors):
        row = dict(zip(table.names, cells, strict=False)) if isinstance(cells, list) else cells
        text, title = _cell(row, TEXT_COLUMNS), _cell(row, TITLE_COLUMNS)
        if not isinstance(text, str):
            reason = f"has no text: expected a column {' or '.join(TEXT_COLUMNS)}, got {shown(list(row)[:8])}"
            row_errors.reject(BadRow(file=str(path), line=line, column="", reason=reason, text=""))
        identity = _cell(row, ID_COLUMNS)
        yield Document(
            id=f"{name}:{line}" if identity is None else str(identity),
            text=str(text),
            title=title if isinstance(title, str) else "",
        )


def _cell(row: Mapping[str, object], names: Sequence[str]) -> object:
    return next((row[name] for name in names if name in row), None)
