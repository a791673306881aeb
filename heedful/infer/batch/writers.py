"""Answers as the bytes of Parquet or of JSON lines, a chunk of rows at a time."""

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
ROW_GROUP_BYTES = 64_000_000  # bytes of a row group in memory
LOCATION_TYPES = {"file": pa.string(), "row": pa.int64(), "line": pa.int64()}
TEXT, NUMBER, WHOLE = pa.string(), pa.float64(), pa.int64()


class AnswerRow(NamedTuple):
    """One row of the output."""

    file: str
    row: int
    line: int
    cells: dict[str, object] | None  # None: the row could not be read
    answer: Answer | None
    error: str | None


# ---------------------------------------------------------------------------------------------------- JSON lines


def write_jsonl(chunks: Iterable[Sequence[AnswerRow]], *, inputs: bool) -> Iterator[bytes]:
    """An object on each line."""
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
    except ValueError:  # an input that is not finite
        text = json.dumps(replace_nonfinite(record), ensure_ascii=False, allow_nan=False, default=jsonable)
    return text.encode(errors="backslashreplace") + b"\n"  # half a surrogate pair becomes \udxxx, as JSON writes it


def jsonable(value: object) -> str:
    """Convert a Parquet value without a JSON form: times to ISO 8601, bytes to base64, anything else to text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


# ---------------------------------------------------------------------------------------------------- Parquet


class _Sink:
    """Takes what a writer writes until it is fetched."""

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
        parts, self._parts = self._parts, []
        return b"".join(parts)


def write_parquet(chunks: Iterable[Sequence[AnswerRow]], schema: pa.Schema) -> Iterator[bytes]:
    """A file whose columns are the schema's."""
    sink = _Sink()
    with ParquetWriter(pa.PythonFile(sink, mode="w"), schema, compression="zstd") as writer:
        waiting: list[pa.RecordBatch] = []
        for chunk in chunks:
            waiting.append(record_batch(chunk, schema))
            if sum(batch.nbytes for batch in waiting) > ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(waiting, schema))
                waiting.clear()
                yield sink.fetch()
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting, schema))
    yield sink.fetch()


def record_batch(chunk: Sequence[AnswerRow], schema: pa.Schema) -> pa.RecordBatch:
    """Rows as columns."""
    return pa.RecordBatch.from_arrays([_column(field, chunk) for field in schema], schema=schema)


def _column(field: pa.Field, chunk: Sequence[AnswerRow]) -> pa.Array:
    if field.name in (*LOCATION_TYPES, "error"):
        return _array([getattr(row, field.name) for row in chunk], field.type)
    if field.name != "input":
        return _array([None if row.answer is None else row.answer.get(field.name) for row in chunk], field.type)
    cells = [
        _array(
            [None if row.cells is None else _fitting(row.cells.get(inner.name), inner.type) for row in chunk],
            inner.type,
        )
        for inner in field.type
    ]
    missing = pa.array([row.cells is None for row in chunk], pa.bool_())
    return pa.StructArray.from_arrays(cells, fields=list(field.type), mask=missing)


def _array(values: list[object], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # half a surrogate pair
        return pa.array([_whole(value) for value in values], kind)


def _whole(value: object) -> object:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_whole(name): _whole(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_whole(inner) for inner in value]
    return value


def _fitting(value: object, kind: pa.DataType) -> object:
    """The value itself, or where text is expected and it is none, as JSON."""
    if value is None or isinstance(value, str) or kind != TEXT:
        return value
    return json.dumps(replace_nonfinite(value), ensure_ascii=False, allow_nan=False, default=jsonable)


# ---------------------------------------------------------------------------------------------------- schemas


def answer_schema(engine: BundleEngine, several: Sequence[InputFile], *, inputs: bool) -> pa.Schema:
    """The columns of every part: the place, the input's columns, the answer's fields, and the error."""
    fields = list(LOCATION_TYPES.items())
    if inputs and (columns := input_arrow_types(several)):
        fields.append(("input", pa.struct(list(columns.items()))))
    roles = next((input_file.roles for input_file in several if input_file.table is not None), ())
    fields += answer_arrow_types(engine, pair=bool(PAIR_ROLES & {*roles})).items()
    return pa.schema([*fields, ("error", TEXT)])


def input_arrow_types(several: Sequence[InputFile]) -> dict[str, pa.DataType]:
    """Parquet's own types; of other files, and where files do not agree, text."""
    types: dict[str, pa.DataType] = {}
    for input_file in several:
        if input_file.table is None:
            continue
        own = (
            {field.name: _kept(field.type) for field in read_schema(input_file.path)}
            if input_file.file_format == "parquet"
            else {}
        )
        for there, name in input_file.display_names.items():
            kind = own.get(there, TEXT)
            types[name] = kind if types.get(name, kind) == kind else TEXT
    return types


def _kept(kind: pa.DataType) -> pa.DataType:
    """A type that values keep on their way through Python, or text."""
    if pa.types.is_dictionary(kind):
        return _kept(kind.value_type)
    if pa.types.is_struct(kind):
        inner = [(field.name, _kept(field.type)) for field in kind]
        return (
            pa.struct(inner)
            if all(inner_kind == field.type for (_, inner_kind), field in zip(inner, kind, strict=True))
            else TEXT
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return kind if _kept(kind.value_type) == kind.value_type else TEXT
    plain = (pa.types.is_primitive, pa.types.is_string, pa.types.is_large_string, pa.types.is_decimal)
    return kind if any(test(kind) for test in (*plain, pa.types.is_binary, pa.types.is_large_binary)) else TEXT


def answer_arrow_types(engine: BundleEngine, *, pair: bool) -> dict[str, pa.DataType]:
    """The fields of an answer of this engine."""
    types = {name: _arrow(kind) for name, kind in engine.columns(pairs=pair).items()}
    return types if engine.max_length is None else types | {"truncated_tokens": WHOLE}


def _arrow(kind: object) -> pa.DataType:
    """Return the type of a field, see `Answerer.columns`."""
    if isinstance(kind, list):
        return pa.list_(_arrow(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, _arrow(field_kind)) for name, field_kind in kind.items()])
    assert isinstance(kind, type)
    return {str: TEXT, float: NUMBER, int: WHOLE, bool: pa.bool_(), np.float32: pa.float32()}[kind]
