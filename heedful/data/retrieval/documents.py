"""Documents to search, from text files (one document each) and from rows of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heedful.data.bad_rows import BadRow, Raise, RowErrors, shown
from heedful.data.formats.text_files import COMPRESSED, NoRowsError, check_file, detect_encoding, read_text_lines
from heedful.data.labelled.data_file import DataSettings, open_table
from heedful.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst")  # suffixes of files that are one document
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")  # suffixes of files with a document per row
# names of columns, the preferred one first
ID_COLUMNS = ("_id", "id", "doc_id", "docno")
TEXT_COLUMNS = ("text", "contents", "content", "body")
TITLE_COLUMNS = ("title",)
BEIR_CORPUS, BEIR_QUERIES = "corpus.jsonl", "queries.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text with its id and its title."""

    id: str  # unique in a collection
    text: str
    title: str = ""  # "": none

    @property
    def content(self) -> str:
        """The text that is searched: the title, if there is one, then the text on the next line."""
        return f"{self.title}\n{self.text}" if self.title else self.text


def read_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """Yield the documents of files and of the files in folders.

    A text file is one document; its id is its path relative to the given folder. A row of a table is one document, with
    the columns `id` (or `_id`), `text` and `title`; without a column of ids, its id is FILE:LINE. In a folder of BEIR's
    layout only the corpus is read.

    Raises:
        DataError: If a file is missing or unreadable, or a row has no text.
    """
    for path, name in document_files(paths):
        yield from _row_documents(path, name) if _suffix(path) in TABLE_SUFFIXES else _text_document(path, name)


def document_files(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """List files, and the files with a known suffix in folders, sorted.

    Returns:
        Each file with its path relative to the given folder; the name of a file that was given itself.

    Raises:
        DataError: If a file is missing, or a folder has no documents.
    """
    listed: list[tuple[Path, str]] = []
    for path in paths:
        if not path.is_dir():
            check_file(path)
            listed.append((path, path.name))
        elif (path / BEIR_CORPUS).is_file() and (path / BEIR_QUERIES).is_file():
            listed.append((path / BEIR_CORPUS, BEIR_CORPUS))
        else:
            suffixes = (*TEXT_SUFFIXES, *TABLE_SUFFIXES)
            documents = []
            for file in sorted(path.rglob("*")):
                name = file.relative_to(path)
                is_hidden = any(part.startswith(".") for part in name.parts)
                if file.is_file() and _suffix(file) in suffixes and not is_hidden:
                    documents.append((file, str(name)))
            if not documents:
                raise DataError(f"{path}: holds no document: expected files of {', '.join(suffixes)}")
            listed += documents
    if not listed:
        raise DataError("no documents were given; expected files or folders of texts")
    return listed


def _suffix(path: Path) -> str:
    """Return the lower-case suffix of a file; the suffix of a compression is skipped."""
    name = Path(path.name.removesuffix(path.suffix)) if path.suffix in COMPRESSED else path
    return name.suffix.lower()


def _text_document(path: Path, name: str) -> Iterator[Document]:
    """Yield the document of a text file; nothing if it has no text."""
    try:
        file, _ = detect_encoding(path)
    except NoRowsError:
        return
    text = "\n".join(line for _, line in read_text_lines(file, RowErrors(Raise())))
    if text.strip():
        yield Document(id=name, text=text)


def _row_documents(path: Path, name: str) -> Iterator[Document]:
    """Yield the documents of a table's rows."""
    row_errors = RowErrors(Raise())
    try:
        table = open_table(path, DataSettings(), row_errors)
    except NoRowsError:
        return
    for line, cells in table.rows(row_errors):
        row = dict(zip(table.names, cells, strict=False)) if isinstance(cells, list) else cells
        text, title = _first_cell(row, TEXT_COLUMNS), _first_cell(row, TITLE_COLUMNS)
        if not isinstance(text, str):
            reason = f"has no text: expected a column {' or '.join(TEXT_COLUMNS)}, got {shown(list(row)[:8])}"
            row_errors.reject(BadRow(file=str(path), line=line, column="", reason=reason, text=""))
        row_id = _first_cell(row, ID_COLUMNS)
        yield Document(
            id=f"{name}:{line}" if row_id is None else str(row_id),
            text=str(text),
            title=title if isinstance(title, str) else "",
        )


def _first_cell(row: Mapping[str, object], names: Sequence[str]) -> object:
    """Return the cell of the first of these columns that the row has, else None."""
    return next((row[name] for name in names if name in row), None)
