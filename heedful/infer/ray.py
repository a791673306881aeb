"""Answers for Ray Data: a model in each worker, batches of columns in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from heedful.data.bad_rows import CellError, shown
from heedful.data.formats.tables import Table
from heedful.data.formats.text_files import MAX_ROW_BYTES
from heedful.data.inputs.input_files import PAIR_ROLES, choose_spec
from heedful.data.labelled.columns import RowReader
from heedful.errors import HeedfulError
from heedful.infer.batch.per_input import answer_each
from heedful.infer.batch.writers import answer_arrow_types
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.engine import Engine
from heedful.tasks.answering import Answer

Columns = dict[str, np.ndarray]


class Predict:
    """For `dataset.map_batches(Predict, fn_constructor_kwargs={"model": FOLDER}, batch_size=...)`.

    Takes and gives columns as numpy arrays, and needs no Ray itself. Columns are found by name, or given by role, as
    {"text": "review"}. Each field of an answer is a column, in every batch; so is `error`: why a row has none.
    """

    def __init__(
        self,
        model: str | Path | BundleEngine,
        *,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        keep: bool = True,
        prefix: str = "",
        top_k: int = 5,
    ) -> None:
        """`keep`: whether the columns of the input stay; `prefix` goes before the names of the new ones."""
        self.engine = model if isinstance(model, BundleEngine) else Engine(model)
        self._given, self._keep, self._prefix, self._top_k = dict(columns or {}), keep, prefix, top_k

    def __call__(self, batch: Columns) -> Columns:
        """The answers of a batch of rows."""
        count = len(next(iter(batch.values()))) if batch else 0
        rows = [{name: _plain(column[number]) for name, column in batch.items()} for number in range(count)]
        inputs, pair = self._inputs(tuple(batch), rows)
        answers = answer_each(self.engine, inputs, top_k=self._top_k)
        output: Columns = {}
        for name, kind in answer_arrow_types(self.engine, pair=pair).items():
            values = [_of(answer, name) for answer in answers]
            output[self._prefix + name] = self._matrix(kind, values) if name == "vector" else _column(kind, values)
        output[self._prefix + "error"] = _objects([answer if isinstance(answer, str) else None for answer in answers])
        if not self._keep:
            return output
        if twice := [name for name in output if name in batch]:
            raise HeedfulError(
                f"the answers have a column {shown(twice[0])}, and so has the input: give prefix=, or keep=False"
            )
        return {**batch, **output}

    def _inputs(
        self, names: tuple[str, ...], rows: list[dict[str, object]]
    ) -> tuple[list[tuple[object, str | None]], bool]:
        """Return the input of each row or why it has none, and whether inputs are pairs of texts."""
        first = rows[0] if rows else dict.fromkeys(names)
        table = Table(display_name="the batch", names=names, first_row=first, rows=lambda row_errors: iter(()))
        ask, columns = choose_spec(table, self.engine.input_kind, self._given)
        reader = RowReader(table, columns, MAX_ROW_BYTES)
        inputs: list[tuple[object, str | None]] = []
        for row in rows:
            try:
                inputs.append((ask.make(reader, row), None))
            except CellError as wrong:
                inputs.append((None, f"{wrong.column}: {wrong.reason}"))
        return inputs, bool(PAIR_ROLES & {*columns.names_by_role})

    def _matrix(self, kind: pa.DataType, vectors: list[Any]) -> np.ndarray:
        """Return a matrix of vectors, with a row of NaN for each missing one."""
        known = next((vector for vector in vectors if vector is not None), None)
        width = len(known or self.engine([""])[0]["vector"])
        rows = [[np.nan] * width if vector is None else vector for vector in vectors]
        return np.array(rows, kind.value_type.to_pandas_dtype()).reshape(-1, width)


def _of(answer: Answer | str, name: str) -> object:
    return None if isinstance(answer, str) else answer.get(name)


def _plain(value: object) -> object:
    """A cell as plain data."""
    match value:
        case np.ndarray() | np.generic():
            return value.tolist()
    return value


def _column(kind: pa.DataType, values: list[object]) -> np.ndarray:
    """Return a numeric column with NaN for missing values, or a column of objects."""
    if pa.types.is_floating(kind):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    if pa.types.is_integer(kind) and None not in values:
        return np.array(values, np.int64)
    return _objects(values)


def _objects(values: list[object]) -> np.ndarray:
    column = np.empty(len(values), object)
    for number, value in enumerate(values):  # all at once, lists would become a matrix
        column[number] = value
    return column
