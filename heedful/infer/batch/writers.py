"""Answers as Parquet or as JSON lines: the bytes of a file, yielded a few rows at a time."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetWriter, read_schema

from heedful.data.inputs.input_files import PAIR_ROLES, InputFile
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.finite import replace_nonfinite
from heedful.tasks.answering import Answer

Format = Literal["parquet", "jsonl", "csv", "conll"]
ROW_GROUP_BYTES = 64_000_000  # bytes in memory after which a Parquet row group ends
LOCATION_TYPES = {"file": pa.string(), "row": pa.int64(), "line": pa.int64()}
TEXT, FLOAT, INTEGER = pa.string(), pa.float64(), pa.int64()


class AnswerRow(NamedTuple):
    """A row of the output: a row of an input file, with its answer or its error."""

    file: str  # name of the input file
    row: int  # number of the row in the file, from 1
    line: int  # first line of the row in the file, from 1
    cells: dict[str, object] | None  # input cells by column, or None if the row could not be read
    answer: Answer | None  # None if the row has an error
    error: str | None  # None if the row has an answer


# ---------------------------------------------------------------------------------------------------- JSON lines


def write_jsonl(chunks: Iterable[Sequence[AnswerRow]], *, inputs: bool) -> Iterator[bytes]:
    """Yield the bytes of rows as JSON objects, one on each line.

    Args:
        chunks: The rows, in groups.
        inputs: Whether to write the input cells, too.
    """
    for chunk in chunks:
        yield b"".join(_line(row, inputs) for row in chunk)


def _line(row: AnswerRow, inputs: bool) -> bytes:
    record: dict[str, object] = {"file": row.file, "row": row.row, "line": row.line}
    if inputs:
        record["input"] = row.cells
    record |= row.answer or {}
    record["error"] = row.error
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=jsonable)
    except ValueError:  # a number in the input is not finite
        text = json.dumps(replace_nonfinite(record), ensure_ascii=False, allow_nan=False, default=jsonable)
    return text.encode(errors="backslashreplace") + b"\n"  # an unpaired surrogate becomes \udxxx, its form in JSON


def jsonable(value: object) -> str:
    """Convert a value that JSON does not have to a string: times to ISO 8601, bytes to base64, others by str()."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


# ---------------------------------------------------------------------------------------------------- Parquet


class _Sink:
    """A writable file object that collects bytes in memory until `fetch` takes them."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        self._parts.append(bytes(data))
        self._size += len(self._parts[-1])
        return len(self._parts[-1])

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def fetch(self) -> bytes:
        """Return the bytes that were written since the last call, and forget them."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


def write_parquet(chunks: Iterable[Sequence[AnswerRow]], schema: pa.Schema) -> Iterator[bytes]:
    """Yield the bytes of a Parquet file with the columns of a schema; see `answer_schema`."""
    sink = _Sink()
    with ParquetWriter(pa.PythonFile(sink, mode="w"), schema, compression="zstd") as writer:
        row_group: list[pa.RecordBatch] = []
        for chunk in chunks:
            row_group.append(record_batch(chunk, schema))
            if sum(batch.nbytes for batch in row_group) > ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(row_group, schema))
                row_group.clear()
                yield sink.fetch()
        if row_group:
            writer.write_table(pa.Table.from_batches(row_group, schema))
    yield sink.fetch()


def record_batch(chunk: Sequence[AnswerRow], schema: pa.Schema) -> pa.RecordBatch:
    """Return rows as an Arrow record batch."""
    return pa.RecordBatch.from_arrays([_column(field, chunk) for field in schema], schema=schema)


def _column(field: pa.Field, chunk: Sequence[AnswerRow]) -> pa.Array:
    """Return a column of rows as an Arrow array: location, error, input cells or a field of the answers."""
    if field.name in (*LOCATION_TYPES, "error"):
        return _array([getattr(row, field.name) for row in chunk], field.type)
    if field.name != "input":
        return _array([None if row.answer is None else row.answer.get(field.name) for row in chunk], field.type)
    cells = [
        _array(
            [None if row.cells is None else _cell_value(row.cells.get(inner.name), inner.type) for row in chunk],
            inner.type,
        )
        for inner in field.type
    ]
    missing = pa.array([row.cells is None for row in chunk], pa.bool_())
    return pa.StructArray.from_arrays(cells, fields=list(field.type), mask=missing)


def _array(values: list[object], kind: pa.DataType) -> pa.Array:
    """Return values as an Arrow array; unpaired surrogates are escaped, since UTF-8 cannot encode them."""
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_escape_surrogates(value) for value in values], kind)


def _escape_surrogates(value: object) -> object:
    """Replace unpaired surrogates in plain data by the text \\udxxx."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_escape_surrogates(name): _escape_surrogates(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_escape_surrogates(inner) for inner in value]
    return value


def _cell_value(value: object, kind: pa.DataType) -> object:
    """Convert a cell of the input to the type of its column.

    In a text column, dates, times and bytes are written as in JSON lines, without quotes, and other values as JSON.
    """
    if value is None or isinstance(value, str) or kind != TEXT:
        return value
    if isinstance(value, bytes) or hasattr(value, "isoformat"):
        return jsonable(value)
    return json.dumps(replace_nonfinite(value), ensure_ascii=False, allow_nan=False, default=jsonable)


# ---------------------------------------------------------------------------------------------------- schemas


def answer_schema(engine: BundleEngine, files: Sequence[InputFile], *, inputs: bool) -> pa.Schema:
    """Return the schema of every part: location, input columns, fields of the answers, and error.

    Args:
        engine: The engine that answers.
        files: The input files.
        inputs: Whether to write the input cells, too.
    """
    fields = list(LOCATION_TYPES.items())
    if inputs and (columns := input_arrow_types(files)):
        fields.append(("input", pa.struct(list(columns.items()))))
    roles = next((input_file.roles for input_file in files if input_file.table is not None), ())
    fields += answer_arrow_types(engine, pairs=bool(PAIR_ROLES & {*roles})).items()
    return pa.schema([*fields, ("error", TEXT)])


def input_arrow_types(files: Sequence[InputFile]) -> dict[str, pa.DataType]:
    """Return the Arrow types of the input columns: as in Parquet files; text for other files or if files differ."""
    types: dict[str, pa.DataType] = {}
    for input_file in files:
        if input_file.table is None:
            continue
        parquet_types: dict[str, pa.DataType] = {}
        if input_file.file_format == "parquet":
            parquet_types = {field.name: _lossless_type(field.type) for field in read_schema(input_file.path)}
        for name_in_table, name in zip(input_file.table.names, input_file.column_names, strict=True):
            kind = parquet_types.get(name_in_table, TEXT)
            types[name] = kind if types.get(name, kind) == kind else TEXT
    return types


def _lossless_type(kind: pa.DataType) -> pa.DataType:
    """Return the type if conversion to Python and back preserves its values; otherwise text."""
    if pa.types.is_dictionary(kind):
        return _lossless_type(kind.value_type)
    if pa.types.is_struct(kind):
        inner = [(field.name, _lossless_type(field.type)) for field in kind]
        is_lossless = all(inner_kind == field.type for (_, inner_kind), field in zip(inner, kind, strict=True))
        return pa.struct(inner) if is_lossless else TEXT
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return kind if _lossless_type(kind.value_type) == kind.value_type else TEXT
    lossless_tests = (
        pa.types.is_primitive,
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_decimal,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return kind if any(test(kind) for test in lossless_tests) else TEXT


def answer_arrow_types(engine: BundleEngine, *, pairs: bool) -> dict[str, pa.DataType]:
    """Return the Arrow type of each field of an answer, by name; `pairs` tells whether inputs are pairs of texts."""
    types = {name: _arrow_type(kind) for name, kind in engine.columns(pairs=pairs).items()}
    return types if engine.max_length is None else types | {"truncated_tokens": INTEGER}


def _arrow_type(kind: object) -> pa.DataType:
    """Return the Arrow type for a type as in `AnswerHead.columns`, such as str, [float] or {"name": str}."""
    if isinstance(kind, list):
        return pa.list_(_arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, _arrow_type(field_kind)) for name, field_kind in kind.items()])
    assert isinstance(kind, type)
    return {str: TEXT, float: FLOAT, int: INTEGER, bool: pa.bool_(), np.float32: pa.float32()}[kind]
