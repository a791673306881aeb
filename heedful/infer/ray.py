"""`Predict`: a callable class for Ray Data that answers batches of columns with a model in each worker."""

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

Columns = dict[str, np.ndarray]


class Predict:
    """Answers batches of rows in Ray Data, as the class that `map_batches` gets.

    Use it as `dataset.map_batches(Predict, fn_constructor_kwargs={"model": FOLDER}, batch_size=...)`. A batch is a dict
    of columns, each a NumPy array. Every output batch has a column for each field of the answers, and a column `error`:
    the reason why a row has no answer, or None. This module does not import Ray.
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
        """Load the model.

        Args:
            model: An engine, or a model as for `Engine`.
            columns: Names of input columns by role, such as {"text": "review"}. If None, they are recognized by name.
            keep: Whether the output includes the input columns.
            prefix: Prefix of the names of the new columns.
            top_k: Number of candidates that are listed for each mask.
        """
        self.engine = model if isinstance(model, BundleEngine) else Engine(model)
        self._columns_by_role = dict(columns or {})
        self._keep, self._prefix, self._top_k = keep, prefix, top_k

    def __call__(self, batch: Columns) -> Columns:
        """Return a batch of input columns (unless `keep` is False) and answer columns."""
        count = len(next(iter(batch.values()))) if batch else 0
        rows = [{name: _plain_cell(column[number]) for name, column in batch.items()} for number in range(count)]
        inputs, are_pairs = self._inputs(tuple(batch), rows)
        answers = answer_each(self.engine, inputs, top_k=self._top_k)
        output: Columns = {}
        for name, kind in answer_arrow_types(self.engine, pairs=are_pairs).items():
            values = [None if isinstance(answer, str) else answer.get(name) for answer in answers]
            output[self._prefix + name] = self._matrix(kind, values) if name == "vector" else _column(kind, values)
        output[self._prefix + "error"] = _objects([answer if isinstance(answer, str) else None for answer in answers])
        if not self._keep:
            return output
        if repeated := [name for name in output if name in batch]:
            raise HeedfulError(
                f"the answers have a column {shown(repeated[0])}, and so has the input: give prefix=, or keep=False"
            )
        return {**batch, **output}

    def _inputs(
        self, names: tuple[str, ...], rows: list[dict[str, object]]
    ) -> tuple[list[tuple[object, str | None]], bool]:
        """Return (input, None) or (None, error) for each row, and whether inputs may be pairs of texts."""
        first_row = rows[0] if rows else dict.fromkeys(names)
        table = Table(display_name="the batch", names=names, first_row=first_row, rows=lambda row_errors: iter(()))
        spec, columns = choose_spec(table, self.engine.input_kind, self._columns_by_role)
        reader = RowReader(table, columns, MAX_ROW_BYTES)
        inputs: list[tuple[object, str | None]] = []
        for row in rows:
            try:
                inputs.append((spec.make(reader, row), None))
            except CellError as error:
                inputs.append((None, f"{error.column}: {error.reason}"))
        return inputs, bool(PAIR_ROLES & {*columns.names_by_role})

    def _matrix(self, kind: pa.DataType, vectors: list[Any]) -> np.ndarray:
        """Return vectors as a matrix, [rows, width], with a row of NaN in place of each None."""
        example = next((vector for vector in vectors if vector is not None), None)
        width = len(example or self.engine([""])[0]["vector"])
        rows = [[np.nan] * width if vector is None else vector for vector in vectors]
        return np.array(rows, kind.value_type.to_pandas_dtype()).reshape(-1, width)


def _plain_cell(value: object) -> object:
    """Return a cell as plain data."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _column(kind: pa.DataType, values: list[object]) -> np.ndarray:
    """Return values as a float column with NaN in place of None, an integer column, or a column of objects."""
    if pa.types.is_floating(kind):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    if pa.types.is_integer(kind) and None not in values:
        return np.array(values, np.int64)
    return _objects(values)


def _objects(values: list[object]) -> np.ndarray:
    """Return values as an array of objects."""
    column = np.empty(len(values), object)
    for number, value in enumerate(values):  # np.array(values) would make a matrix of lists
        column[number] = value
    return column
