"""Readers of tables as streams of rows: CSV, TSV, JSON lines, JSON, Parquet, and objects of the `datasets` library.

Each reader returns a `Table`. Labelled data, inputs and documents are all read from tables.
"""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from heedful.data.bad_rows import BadRow, RowErrors, Skip, shown
from heedful.data.formats.text_files import (
    MAX_COMPRESSION_RATIO,
    UNCHECKED_BYTES,
    JsonStream,
    Line,
    NoRowsError,
    TextFile,
    all_lines,
    open_json,
    read_text_lines,
    unique_keys,
)
from heedful.errors import DataError, HeedfulError

if TYPE_CHECKING:
    import pyarrow

Cells = list[str] | dict[str, object]  # cells of a row, in the order of the columns or by column name
Rows = Iterator[tuple[int, Cells]]  # (line from 1, cells); in a format without lines, (row from 1, cells)
PARQUET_BATCH_ROWS = 256  # rows per batch of a Parquet file
MAX_ROW_LINES = 100_000  # maximum lines of a CSV row, since a short line takes many times its length in memory
HEAD_ROWS = 200  # first rows that are examined for names and kinds of columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A stream of rows. Columns have names, or without a header their positions as names."""

    display_name: str  # name of the file or object in messages
    names: tuple[str, ...]  # names of the columns; "1", "2", … without a header
    first_row: Cells
    rows: Callable[[RowErrors], Rows]  # each call starts from the first row
    # names of labels by column, for columns whose cells are indices of labels
    label_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # sentences for the user
    header: bool | None = None  # value of the setting `header`; None: not set


# ---------------------------------------------------------------------------------------------------- CSV, TSV


class _BadLinesError(Exception):
    """Raised if the lines of a row cannot be used, perhaps because a quote is not closed."""

    def __init__(self, reason: str, unclosed: bool) -> None:
        super().__init__(reason)
        self.unclosed = unclosed


class _RowLines:
    """Iterator over lines for the csv module, which records the lines of the current row."""

    def __init__(self, file: TextFile) -> None:
        self._source: Iterator[Line] = all_lines(file)
        self._pushed_back: deque[Line] = deque()  # lines that are returned again
        self._max_row_bytes = file.max_row_bytes
        self.lines: list[Line] = []  # lines of the current row
        self._length = 0  # characters of the current row

    def begin_row(self) -> None:
        self.lines.clear()
        self._length = 0

    def push_back(self) -> None:
        """Put the lines of the row except the first one back, so that they are returned again."""
        self._pushed_back.extendleft(reversed(self.lines[1:]))

    def __iter__(self) -> _RowLines:
        return self

    def __next__(self) -> str:
        line = self._pushed_back.popleft() if self._pushed_back else next(self._source)
        _, text, bad_row = line
        self.lines.append(line)
        self._length += len(text)
        if bad_row is not None and not text:  # the line is too long
            raise _BadLinesError(bad_row.reason, unclosed=False)
        if len(self.lines) > MAX_ROW_LINES:
            raise _BadLinesError(f"has more than {MAX_ROW_LINES:,} lines: is a quote not closed?", unclosed=True)
        if self._length > self._max_row_bytes:
            raise _BadLinesError(
                f"is longer than {self._max_row_bytes:,} characters: is a quote not closed?", unclosed=True
            )
        return text


def _read_quoted(file: TextFile, delimiter: str, row_errors: RowErrors) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells) of rows whose cells may be quoted and contain line ends.

    A row with an unclosed quote is a bad row. Reading continues with the second line of that row.
    """
    csv.field_size_limit(max(csv.field_size_limit(), file.max_row_bytes + 1))
    row = _RowLines(file)
    reader = csv.reader(row, delimiter=delimiter, strict=True)
    while True:
        row.begin_row()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except (csv.Error, _BadLinesError) as error:
            unclosed = getattr(error, "unclosed", "unexpected end" in str(error))
            row_errors.reject(_bad_csv_row(file, row.lines[:1] if unclosed else row.lines, error))
            if unclosed:
                row.push_back()
            reader = csv.reader(row, delimiter=delimiter, strict=True)
            continue
        if any(bad for _, _, bad in row.lines):
            row_errors.reject(_bad_csv_row(file, row.lines))
        elif cells:
            yield row.lines[0][0], cells


def _bad_csv_row(file: TextFile, lines: Sequence[Line], error: Exception | None = None) -> BadRow:
    """Return the bad row for these lines, with the error of one of the lines or of the csv module."""
    bad_line = next((bad for _, _, bad in lines if bad), None)
    if bad_line and len(lines) == 1:
        return bad_line
    first, last = lines[0][0], lines[-1][0]
    reason = str(error)
    if bad_line:
        reason = bad_line.reason
    elif "unexpected end" in reason:
        reason = "a quote that opens in this line is not closed before the file ends"
    elif isinstance(error, csv.Error):
        hint = " (a quote inside a quoted cell is written twice)" if "'\"'" in reason else ""
        reason = f"is not CSV: {reason}{hint}"
    if last > first:
        reason = f"the row of the lines {first} to {last}: {reason}"
    text = "".join(text[:200] for _, text, _ in lines[:3])[:200]
    return BadRow(file=file.display_name, line=first, column="", reason=reason, text=text)


def _read_literal(file: TextFile, delimiter: str, row_errors: RowErrors) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells) of rows in which quotes are ordinary characters."""
    for number, line in read_text_lines(file, row_errors):
        if line:
            yield number, line.split(delimiter)


def read_delimited(
    file: TextFile,
    row_errors: RowErrors,
    *,
    delimiter: str,
    quoted: bool,
    is_header: Callable[[list[str]], bool],
    min_cells: int | None = None,
) -> Table:
    """Open a CSV or TSV file.

    Args:
        file: the file.
        row_errors: handles bad rows among the first two.
        delimiter: character between cells.
        quoted: whether cells may be quoted.
        is_header: whether the cells of the first row name the columns.
        min_cells: minimum cells in a row. If None, every row must have exactly as many cells as the first row.

    Raises:
        NoRowsError: If the file has no rows below the header.
        DataError: If the header contains a name twice.
    """

    def all_rows(row_errors: RowErrors) -> Iterator[tuple[int, list[str]]]:
        return (_read_quoted if quoted else _read_literal)(file, delimiter, row_errors)

    head = list(islice(all_rows(row_errors), 2))
    if not head:
        raise NoRowsError(f"{file.display_name}: has no rows")
    first_line, first_cells = head[0]
    num_cells = len(first_cells)
    has_header = is_header(first_cells)
    if has_header:
        names = tuple(cell.strip() for cell in first_cells)
        if len(head) < 2:
            raise NoRowsError(f"{file.display_name}: has a header and no rows")
        if duplicates := [name for name in names if names.count(name) > 1 and name]:
            raise DataError(f"{file.display_name}:{first_line}: two columns are called {shown(duplicates[0])}")
    else:
        names = tuple(str(position) for position in range(1, num_cells + 1))
    separator = "tab" if delimiter == "\t" else delimiter
    hint = f"a {separator} inside a text needs quotes around it"
    if not quoted:
        hint = "quotes count as text here: if they wrap cells, say --data.quoting=quoted"

    def rows(row_errors: RowErrors) -> Rows:
        for line_number, cells in all_rows(row_errors):
            if has_header and line_number == first_line:
                continue
            has_all_cells = len(cells) == num_cells if min_cells is None else len(cells) >= min_cells
            if has_all_cells:
                yield line_number, cells
                continue
            expected = num_cells if min_cells is None else min_cells
            reason = f"has {len(cells)} cells, expected {expected} as in line {first_line}; {hint}"
            text = delimiter.join(cells)[:200]
            row_errors.reject(BadRow(file=file.display_name, line=line_number, column="", reason=reason, text=text))

    _, first_row = head[1] if has_header else head[0]
    return Table(
        display_name=file.display_name,
        names=names,
        first_row=first_row,
        rows=rows,
        notes=() if has_header else (f"{file.path.name}: no header",),
    )


# ---------------------------------------------------------------------------------------------------- JSON


def read_json_lines(file: TextFile, row_errors: RowErrors) -> Table:
    """Open a file of JSON lines, with one object per line. The keys of the objects are the columns."""

    def rows(row_errors: RowErrors) -> Rows:
        for line_number, line in read_text_lines(file, row_errors):
            if not line.strip():
                continue
            column = reason = ""
            try:
                value = json.loads(line, object_pairs_hook=unique_keys)
                if not isinstance(value, dict):
                    reason = f"is {shown(value)}, expected a JSON object"
            except (ValueError, RecursionError) as error:
                column = str(getattr(error, "colno", ""))
                reason = f"is not valid JSON: {getattr(error, 'msg', error)}"
            if reason:
                bad = BadRow(file=file.display_name, line=line_number, column=column, reason=reason, text=line[:200])
                row_errors.reject(bad)
            else:
                yield line_number, value

    return _table_of_dicts(file.display_name, rows, row_errors)


def read_json_list(file: TextFile, row_errors: RowErrors) -> Table:
    """Open a JSON file: a list of objects, or an object with such a list under "data"."""

    def rows(row_errors: RowErrors) -> Rows:
        with open_json(file) as text:
            if text.peek() == "[":
                yield from list_rows(text, row_errors)
                text.end()
                return
            has_list = False
            for key in text.keys():  # noqa: SIM118  # a stream has no lookup by key
                if key == "data" and text.peek() == "[":
                    has_list = True
                    yield from list_rows(text, row_errors)
                else:
                    text.value()
            text.end()
            if not has_list:
                raise NoRowsError(
                    f'{file.display_name}: has no rows: it is one object without a list of them under "data" (if '
                    "each line is an object, set --data.format=jsonl)"
                )

    def list_rows(text: JsonStream, row_errors: RowErrors) -> Rows:
        for index in text.elements():
            text.peek()
            line, value = text.line, text.value()
            if isinstance(value, dict):
                yield line, value
            else:
                reason = f"is {shown(value)}, expected a JSON object"
                bad = BadRow(
                    file=file.display_name, line=line, column=f"[{index}]", reason=reason, text=str(value)[:200]
                )
                row_errors.reject(bad, index=index)

    return _table_of_dicts(file.display_name, rows, row_errors)


def _table_of_dicts(
    name: str,
    rows: Callable[[RowErrors], Rows],
    row_errors: RowErrors,
    label_names: Mapping[str, tuple[str, ...]] | None = None,
) -> Table:
    """Return a table of rows that are dicts. Its columns are the keys of the first HEAD_ROWS rows."""
    first = next(rows(row_errors), None)
    if first is None:
        raise NoRowsError(f"{name}: has no rows")
    _, first_row = first
    head = islice(rows(RowErrors(Skip())), HEAD_ROWS)
    names = dict.fromkeys(chain(first_row, *(cells for _, cells in head)))
    label_names = label_names or {}
    notes = tuple(f"the names of {shown(column)} come with the data" for column in label_names)
    return Table(
        display_name=name, names=tuple(names), first_row=first_row, rows=rows, label_names=label_names, notes=notes
    )


# ---------------------------------------------------------------------------------------------------- Parquet, objects


def read_parquet(path: Path, row_errors: RowErrors) -> Table:
    """Open a Parquet file, which is read in batches of rows.

    Raises:
        NoRowsError: If the file has no rows.
        DataError: If the file is damaged or unpacks to too many bytes.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    # errors that pyarrow raises for damaged files
    errors = (pyarrow.ArrowException, OSError, ValueError, TypeError, LookupError, MemoryError)

    def rows(row_errors: RowErrors) -> Rows:
        num_rows = num_characters = 0
        try:
            with ParquetFile(path, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, use_threads=False):
                    for cells in _batch_rows(batch):
                        num_rows += 1
                        num_characters += _text_size(cells)
                        if num_characters > UNCHECKED_BYTES and num_characters > MAX_COMPRESSION_RATIO * file_bytes:
                            raise _compression_error(path, f"{num_characters:,} characters up to row {num_rows:,}")
                        yield num_rows, cells
        except HeedfulError:
            raise
        except errors as error:
            raise DataError(f"{path}: cannot be read after row {num_rows}: {error}") from None

    try:
        with ParquetFile(path, pre_buffer=False) as file:
            unpacked_bytes = sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups))
            datasets_metadata = (file.schema_arrow.metadata or {}).get(b"huggingface")
            names = file.schema_arrow.names
            file_bytes = path.stat().st_size
    except errors as error:
        raise DataError(f"{path}: is no Parquet file that can be read: {error}") from None
    if unpacked_bytes > UNCHECKED_BYTES and unpacked_bytes > MAX_COMPRESSION_RATIO * file_bytes:
        raise _compression_error(path, f"{unpacked_bytes:,} bytes")
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: two columns are called {shown(duplicates[0])}")
    return _table_of_dicts(str(path), rows, row_errors, _metadata_label_names(datasets_metadata))


def _text_size(cells: dict[str, object]) -> int:
    """Count the characters of a row's texts and lists of texts.

    The size of the file does not bound this count, since a dictionary may store a long text once for many rows.
    """
    size = 0
    for value in cells.values():
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, list):
            size += sum(len(text) for text in value if isinstance(text, str | bytes))
    return size


def _compression_error(path: Path, size: str) -> HeedfulError:
    return DataError(
        f"{path}: unpacks to more than {MAX_COMPRESSION_RATIO} times its size ({size}), which text seldom does: if you "
        "trust it, write its columns without a dictionary, or as CSV or JSON lines"
    )


def _batch_rows(batch: pyarrow.RecordBatch) -> Iterator[dict[str, object]]:
    """Yield the rows of a batch as dicts.

    A time that Python cannot represent (nanoseconds, years past 9999) becomes the integer that the file stores.
    """
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for row in zip(*batch.columns, strict=True):
            yield dict(zip(batch.schema.names, map(_to_python, row), strict=True))


def _to_python(scalar: pyarrow.Scalar) -> object:
    """Convert an Arrow value to Python. A value that Python cannot represent becomes the stored integer or a text."""
    import pyarrow

    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        match scalar:
            case pyarrow.StructScalar():
                return {name: _to_python(field_value) for name, field_value in scalar.items()}
            case pyarrow.ListScalar():
                return [_to_python(field_value) for field_value in scalar.values]
        return getattr(scalar, "value", None) or str(scalar)


def _metadata_label_names(datasets_metadata: bytes | None) -> dict[str, tuple[str, ...]]:
    """Read the label names that the `datasets` library stores in a Parquet file's metadata."""
    try:
        features = json.loads(datasets_metadata or b"{}")["info"]["features"]
        return {column: names for column, feature in features.items() if (names := class_label_names(feature))}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def class_label_names(feature: object) -> tuple[str, ...]:
    """Return the label names of a feature, or list of features, of the `datasets` library; () if it has none."""
    for _ in range(3):
        names = feature.get("names") if isinstance(feature, Mapping) else getattr(feature, "names", None)
        if isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
        feature = feature.get("feature") if isinstance(feature, Mapping) else getattr(feature, "feature", None)
    return ()


@runtime_checkable
class DatasetObject(Protocol):
    """A `datasets.Dataset`, or an object with the same attributes."""

    @property
    def features(self) -> Mapping[str, object] | None: ...

    @property
    def column_names(self) -> Sequence[str]: ...

    def __iter__(self) -> Iterator[object]: ...


def read_dataset_object(name: str, data: DatasetObject, row_errors: RowErrors) -> Table:
    """Open a `datasets.Dataset`, or an object with the same attributes, as a table with the label names of the data."""

    def rows(row_errors: RowErrors) -> Rows:
        for row_number, cells in enumerate(data, start=1):
            if isinstance(cells, Mapping):
                yield row_number, dict(cells)
            else:
                reason = f"is {type(cells).__name__}, expected a mapping from columns to values"
                row_errors.reject(BadRow(file=name, line=row_number, column="", reason=reason, text=str(cells)[:200]))

    features = data.features or {}
    label_names = {column: names for column in features if (names := class_label_names(features[column]))}
    return _table_of_dicts(name, rows, row_errors, label_names)
