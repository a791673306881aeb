"""Answers for Ray Data: a model in each worker, batches of columns in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heedful.data.bad import CellError, shown
from heedful.data.columns import Reader
from heedful.data.files import LONGEST
from heedful.data.inputs import find_ask
from heedful.data.rows import Table
from heedful.errors import HeedfulError
from heedful.infer.each import answer_each
from heedful.infer.engine import Engine

Columns = dict[str, np.ndarray]


class Predict:
    """For `dataset.map_batches(Predict, fn_constructor_kwargs={"model": FOLDER}, batch_size=...)`.

    Takes and gives columns as numpy arrays, and needs no Ray itself. Columns are found by name, or given by role, as
    {"text": "review"}. Each field of an answer is a column; so is `error`, which says why a row has no answer.
    """

    def __init__(
        self,
        model: str | Path | Engine,
        *,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        keep: bool = True,
        prefix: str = "",
        top_k: int = 5,
    ) -> None:
        """`keep`: whether the columns of the input stay; `prefix` goes before the names of the new ones."""
        self.engine = model if isinstance(model, Engine) else Engine(model)
        self._given, self._keep, self._prefix, self._top_k = dict(columns or {}), keep, prefix, top_k

    def __call__(self, batch: Columns) -> Columns:
        """The answers of a batch of rows."""
        count = len(next(iter(batch.values()))) if batch else 0
        if not count:
            return dict(batch) if self._keep else {}
        rows = [{name: _plain(column[number]) for name, column in batch.items()} for number in range(count)]
        found = answer_each(self.engine, self._inputs(rows), top_k=self._top_k)
        fields = dict.fromkeys(name for each in found if isinstance(each, dict) for name in each)
        made = {self._prefix + name: _column(name, [_of(each, name) for each in found]) for name in fields}
        made[self._prefix + "error"] = _objects([each if isinstance(each, str) else None for each in found])
        if not self._keep:
            return made
        if twice := [name for name in made if name in batch]:
            raise HeedfulError(
                f"the answers have a column {shown(twice[0])}, and so has the input: give prefix=, or keep=False"
            )
        return {**batch, **made}

    def _inputs(self, rows: list[dict[str, Any]]) -> list[tuple[Any, str | None]]:
        """What each row asks, or why it asks nothing."""
        table = Table(shown="the batch", names=tuple(rows[0]), first=rows[0], rows=lambda sieve: iter(()))
        ask, columns = find_ask(table, self.engine.kind, self._given)
        reader = Reader(table, columns, LONGEST)
        found: list[tuple[Any, str | None]] = []
        for row in rows:
            try:
                found.append((ask.make(reader, row), None))
            except CellError as wrong:
                found.append((None, f"{wrong.column}: {wrong.reason}"))
        return found


def _of(answer: Any, name: str) -> Any:
    return None if isinstance(answer, str) else answer.get(name)


def _plain(value: Any) -> Any:
    """A cell as plain data."""
    match value:
        case np.ndarray() | np.generic():
            return value.tolist()
    return value


def _column(name: str, values: list[Any]) -> np.ndarray:
    """Numbers as numbers, NaN where there is none; vectors as rows of a matrix; all else as objects."""
    known = [value for value in values if value is not None]
    if name == "vector":
        nothing = [np.nan] * len(known[0])
        return np.array([nothing if value is None else value for value in values], np.float32)
    if all(isinstance(value, float) for value in known):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    if len(known) == len(values) and all(type(value) is int for value in known):
        return np.array(values, np.int64)
    return _objects(values)


def _objects(values: list[Any]) -> np.ndarray:
    found = np.empty(len(values), object)
    for number, value in enumerate(values):  # all at once, lists would become a matrix
        found[number] = value
    return found
