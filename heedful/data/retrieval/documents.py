"""Documents for search indices and retrieval: a text file is one document, and so is each row of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heedful.data.bad_rows import BadRow, Raise, RowErrors, shown
from heedful.data.formats.text_files import COMPRESSED, NoRowsError, check_file, detect_encoding, read_text_lines
from heedful.data.labelled.data_file import DataSettings, open_table
from heedful.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst")  # suffixes of files with a single document
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")  # suffixes of files with a document per row
# names of columns, the preferred one first
ID_COLUMNS = ("_id", "id", "doc_id", "docno")
TEXT_COLUMNS = ("text", "contents", "content", "body")
TITLE_COLUMNS = ("title",)
BEIR_CORPUS, BEIR_QUERIES = "corpus.jsonl", "queries.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text with an id and a title."""

    id: str  # unique in a collection
    text: str
    title: str = ""  # "": no title

    @property
    def content(self) -> str:
        """The text that is indexed: the title, if there is one, and the text on the next line."""
        return f"{self.title}\n{self.text}" if self.title else self.text


def read_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """Yield the documents of files and of the files in folders.

    A text file is one document, whose id is the path of the file relative to its folder. A row of a table is one
    document, with the columns `id` (or `_id`), `text` and `title`. Without a column of ids, the id is FILE:LINE. In a
    folder of BEIR's layout only the corpus is read.

    Raises:
        DataError: If a file is missing or unreadable, or if a row has no text.
    """
    for path, name in document_files(paths):
        yield from _row_documents(path, name) if _suffix(path) in TABLE_SUFFIXES else _text_document(path, name)


def document_files(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """List files, and the files with a known suffix in folders, sorted.

    Returns:
        (path, path relative to its folder) for each file. For a file that is not from a folder it is (path, name).

    Raises:
        DataError: If a file is missing, or if a folder has no documents.
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
    """Return the lower-case suffix of a file, without a suffix of compression."""
    name = Path(path.name.removesuffix(path.suffix)) if path.suffix in COMPRESSED else path
    return name.suffix.lower()


def _text_document(path: Path, name: str) -> Iterator[Document]:
    """Yield the document of a text file, or nothing if the file has no text."""
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
        text = _first_cell(row, TEXT_COLUMNS)
        title = _first_cell(row, TITLE_COLUMNS)
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
    """Return the cell of the first column among `names` that the row has, or None if it has none."""
    return next((row[name] for name in names if name in row), None)
