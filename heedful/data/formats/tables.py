"""Tables as streams of rows: CSV, TSV, JSON lines, JSON, Parquet, and objects of the `datasets` library."""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from heedful.data.bad_rows import BadRow, CellError, RowErrors, Skip, shown
from heedful.data.formats.text_files import (
    FREE,
    MOST_RATIO,
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

Cells = list[str] | dict[str, object]
Rows = Iterator[tuple[int, Cells]]  # number of the line, or of the row if the format has no lines
BATCH = 256  # rows of Parquet that are read at a time
MOST_LINES = 100_000  # lines of one CSV row, at most: a short line takes many times its length in memory
HEAD_ROWS = 200  # first rows, whose keys are the columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows with named or numbered columns."""

    display_name: str  # in messages
    names: tuple[str, ...]  # "1", "2", … without a header
    first: Cells
    rows: Callable[[RowErrors], Rows]
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # label names of integer columns, by column
    notes: tuple[str, ...] = ()
    header: bool | None = None  # the setting `header`; None: not set


# ---------------------------------------------------------------------------------------------------- CSV, TSV


class _SpoiltError(Exception):
    def __init__(self, reason: str, unclosed: bool) -> None:
        super().__init__(reason)
        self.unclosed = unclosed


class _Feed:
    """Lines for the csv module, kept until their row is complete."""

    def __init__(self, file: TextFile) -> None:
        self._source: Iterator[Line] = all_lines(file)
        self._pushed_back: deque[Line] = deque()
        self._longest = file.longest
        self.taken: list[Line] = []
        self._length = 0

    def begin(self) -> None:
        self.taken.clear()
        self._length = 0

    def give_back(self) -> None:
        """Read all lines but the first again."""
        self._pushed_back.extendleft(reversed(self.taken[1:]))

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        line = self._pushed_back.popleft() if self._pushed_back else next(self._source)
        self.taken.append(line)
        self._length += len(line[1])
        if line[2] is not None and not line[1]:
            raise _SpoiltError(line[2].reason, unclosed=False)
        if len(self.taken) > MOST_LINES:
            raise _SpoiltError(f"has more than {MOST_LINES:,} lines: is a quote not closed?", unclosed=True)
        if self._length > self._longest:
            raise _SpoiltError(f"is longer than {self._longest:,} characters: is a quote not closed?", unclosed=True)
        return line[1]


def _quoted(file: TextFile, delimiter: str, row_errors: RowErrors) -> Iterator[tuple[int, list[str]]]:
    """Yield rows whose cells may be quoted and contain line ends.

    A row with an unclosed quote is a bad row; reading continues with its second line.
    """
    csv.field_size_limit(max(csv.field_size_limit(), file.longest + 1))
    feed = _Feed(file)
    reader = csv.reader(feed, delimiter=delimiter, strict=True)
    while True:
        feed.begin()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except (csv.Error, _SpoiltError) as error:
            unclosed = getattr(error, "unclosed", "unexpected end" in str(error))
            row_errors.reject(_broken(file, feed.taken[:1] if unclosed else feed.taken, error))
            if unclosed:
                feed.give_back()
            reader = csv.reader(feed, delimiter=delimiter, strict=True)
            continue
        if any(bad for _, _, bad in feed.taken):
            row_errors.reject(_broken(file, feed.taken))
        elif cells:
            yield feed.taken[0][0], cells


def _broken(file: TextFile, taken: Sequence[Line], error: Exception | None = None) -> BadRow:
    """Make the bad row of these lines, from the error of one of them or of the csv module."""
    fault = next((bad for _, _, bad in taken if bad), None)
    if fault and len(taken) == 1:
        return fault
    first, last = taken[0][0], taken[-1][0]
    reason = str(error)
    if fault:
        reason = fault.reason
    elif "unexpected end" in reason:
        reason = "a quote that opens in this line is not closed before the file ends"
    elif isinstance(error, csv.Error):
        reason = f"is not CSV: {reason}" + (
            " (a quote inside a quoted cell is written twice)" if "'\"'" in reason else ""
        )
    if last > first:
        reason = f"the row of the lines {first} to {last}: {reason}"
    text = "".join(line[1][:200] for line in taken[:3])[:200]
    return BadRow(file=file.display_name, line=first, column="", reason=reason, text=text)


def _literal(file: TextFile, delimiter: str, row_errors: RowErrors) -> Iterator[tuple[int, list[str]]]:
    """Yield rows in which quotes are ordinary characters."""
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
    least: int | None = None,
) -> Table:
    """Open a CSV or TSV file.

    Args:
        file: the file.
        row_errors: handles bad rows among the first two.
        delimiter: character between cells.
        quoted: whether cells may be quoted.
        is_header: whether the cells of the first row name the columns.
        least: number of cells that a row needs; None: as many as the first row.
    """

    def raw(row_errors: RowErrors) -> Iterator[tuple[int, list[str]]]:
        return (_quoted if quoted else _literal)(file, delimiter, row_errors)

    top = list(islice(raw(row_errors), 2))
    if not top:
        raise NoRowsError(f"{file.display_name}: has no rows")
    start, cells = top[0]
    header = is_header(cells)
    names = tuple(cell.strip() for cell in cells) if header else tuple(str(n) for n in range(1, len(cells) + 1))
    if len(top) == header:
        raise NoRowsError(f"{file.display_name}: has a header and no rows")
    if header and (twice := [name for name in names if names.count(name) > 1 and name]):
        raise DataError(f"{file.display_name}:{start}: two columns are called {shown(twice[0])}")
    width = len(cells)

    def rows(row_errors: RowErrors) -> Rows:
        for number, cells in raw(row_errors):
            if header and number == start:
                continue
            if len(cells) == width if least is None else len(cells) >= least:
                yield number, cells
            else:
                row_errors.reject(
                    _ragged(file, number, cells, width if least is None else least, start, delimiter, quoted)
                )

    return Table(
        display_name=file.display_name,
        names=names,
        first=top[header][1],
        rows=rows,
        notes=() if header else (f"{file.path.name}: no header",),
    )


def _ragged(
    file: TextFile, number: int, cells: list[str], width: int, start: int, delimiter: str, quoted: bool
) -> BadRow:
    mark = "tab" if delimiter == "\t" else delimiter
    hint = (
        f"a {mark} inside a text needs quotes around it"
        if quoted
        else "quotes count as text here: if they wrap cells, say --data.quoting=quoted"
    )
    reason = f"has {len(cells)} cells, expected {width} as in line {start}; {hint}"
    return BadRow(file=file.display_name, line=number, column="", reason=reason, text=delimiter.join(cells)[:200])


# ---------------------------------------------------------------------------------------------------- JSON


def read_json_lines(file: TextFile, row_errors: RowErrors) -> Table:
    """Open a file with one JSON object on each line."""

    def rows(row_errors: RowErrors) -> Rows:
        for number, line in read_text_lines(file, row_errors):
            if not line.strip():
                continue
            try:
                value = json.loads(line, object_pairs_hook=unique_keys)
                if not isinstance(value, dict):
                    raise CellError("", f"is {shown(value)}, expected a JSON object")
            except CellError as wrong:
                row_errors.reject(
                    BadRow(file=file.display_name, line=number, column="", reason=wrong.reason, text=line[:200])
                )
            except (ValueError, RecursionError) as error:
                column = str(getattr(error, "colno", ""))
                reason = f"is not valid JSON: {getattr(error, 'msg', error)}"
                row_errors.reject(
                    BadRow(file=file.display_name, line=number, column=column, reason=reason, text=line[:200])
                )
            else:
                yield number, value

    return _named(file.display_name, rows, row_errors)


def read_json_list(file: TextFile, row_errors: RowErrors) -> Table:
    """Open a JSON file: a list of objects, or an object with such a list under "data"."""

    def rows(row_errors: RowErrors) -> Rows:
        with open_json(file) as text:
            if text.peek() == "[":
                yield from walk(text, row_errors)
                text.end()
                return
            has_rows = False
            for key in text.keys():  # noqa: SIM118  # iterates, looks nothing up
                if key == "data" and text.peek() == "[":
                    has_rows = True
                    yield from walk(text, row_errors)
                else:
                    text.value()
            text.end()
            if not has_rows:
                raise NoRowsError(
                    f'{file.display_name}: has no rows: it is one object without a list of them under "data" (if '
                    "each line is an object, set --data.format=jsonl)"
                )

    def walk(text: JsonStream, row_errors: RowErrors) -> Rows:
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
                row_errors.reject(bad, number=index)

    return _named(file.display_name, rows, row_errors)


def _named(
    name: str,
    rows: Callable[[RowErrors], Rows],
    row_errors: RowErrors,
    words: Mapping[str, tuple[str, ...]] | None = None,
) -> Table:
    first = next(rows(row_errors), None)
    if first is None:
        raise NoRowsError(f"{name}: has no rows")
    top = islice(rows(RowErrors(Skip())), HEAD_ROWS)  # later rows may have other keys
    names = dict.fromkeys(chain(first[1], *(cells for _, cells in top)))
    notes = tuple(f"the names of {shown(name)} come with the data" for name in words or {})
    return Table(display_name=name, names=tuple(names), first=first[1], rows=rows, words=words or {}, notes=notes)


# ---------------------------------------------------------------------------------------------------- Parquet, objects


def read_parquet(path: Path, row_errors: RowErrors) -> Table:
    """Open a Parquet file, read in batches of rows.

    Raises:
        DataError: If it is damaged or decompresses to too many bytes.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    faults = (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        MemoryError,
    )  # raised for damaged files

    def rows(row_errors: RowErrors) -> Rows:
        number = characters = 0
        try:
            with ParquetFile(path, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_size=BATCH, use_threads=False):
                    for cells in _cells(batch):
                        number += 1
                        characters += _text_size(cells)
                        if characters > FREE and characters > MOST_RATIO * packed:
                            raise _too_much(path, f"{characters:,} characters up to row {number:,}")
                        yield number, cells
        except HeedfulError:
            raise
        except faults as error:
            raise DataError(f"{path}: cannot be read after row {number}: {error}") from None

    try:
        with ParquetFile(path, pre_buffer=False) as file:
            size = sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups))
            datasets_metadata, names = (file.schema_arrow.metadata or {}).get(b"huggingface"), file.schema_arrow.names
            packed = path.stat().st_size
    except faults as error:
        raise DataError(f"{path}: is no Parquet file that can be read: {error}") from None
    if size > FREE and size > MOST_RATIO * packed:
        raise _too_much(path, f"{size:,} bytes")
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: two columns are called {shown(twice[0])}")
    return _named(str(path), rows, row_errors, _kept_words(datasets_metadata))


def _text_size(cells: dict[str, object]) -> int:
    """Count the characters of a row's texts and lists of texts (a dictionary in the file may repeat a long text)."""
    size = 0
    for value in cells.values():
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, list):
            size += sum(len(text) for text in value if isinstance(text, str | bytes))
    return size


def _too_much(path: Path, what: str) -> HeedfulError:
    return DataError(
        f"{path}: unpacks to more than {MOST_RATIO} times its size ({what}), which text seldom does: if you trust it, "
        "write its columns without a dictionary, or as CSV or JSON lines"
    )


def _cells(batch: pyarrow.RecordBatch) -> Iterator[dict[str, object]]:
    """Yield the rows of a batch; a time that Python cannot represent (nanoseconds, years past 9999) is its number."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for row in zip(*batch.columns, strict=True):
            yield dict(zip(batch.schema.names, map(_cell, row), strict=True))


def _cell(scalar: pyarrow.Scalar) -> object:
    import pyarrow

    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        match scalar:
            case pyarrow.StructScalar():
                return {name: _cell(field_value) for name, field_value in scalar.items()}
            case pyarrow.ListScalar():
                return [_cell(field_value) for field_value in scalar.values]
        return getattr(scalar, "value", None) or str(scalar)


def _kept_words(datasets_metadata: bytes | None) -> dict[str, tuple[str, ...]]:
    """Read the label names that the `datasets` library stores in a Parquet file's metadata."""
    try:
        features = json.loads(datasets_metadata or b"{}")["info"]["features"]
        return {name: words for name, feature in features.items() if (words := class_label_names(feature))}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def class_label_names(feature: object) -> tuple[str, ...]:
    """Label names of a feature of the `datasets` library, or of a list of it; () if it has none."""
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
    """Open a `datasets.Dataset`: rows in order, label names from its features."""

    def rows(row_errors: RowErrors) -> Rows:
        for number, cells in enumerate(data, start=1):
            if isinstance(cells, Mapping):
                yield number, dict(cells)
            else:
                reason = f"is {type(cells).__name__}, expected a mapping from columns to values"
                row_errors.reject(BadRow(file=name, line=number, column="", reason=reason, text=str(cells)[:200]))

    features = data.features or {}
    words = {key: names for key in features if (names := class_label_names(features[key]))}
    return _named(name, rows, row_errors, words)
