"""Data in memory as labelled data: frames of pandas, polars and pyarrow, lists of dicts, and pairs (inputs, targets).

The libraries are not imported. Their objects are recognised by their methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from heedful.data.bad_rows import shown
from heedful.data.examples import (
    Example,
    LabelledExample,
    MultiLabelExample,
    PairExample,
    ScoredExample,
    Seq2SeqExample,
    TaggedExample,
)
from heedful.data.formats.tables import DatasetObject
from heedful.errors import DataError

PAIR_COLUMNS: dict[type[Example], tuple[str, str]] = {  # column names for a pair (inputs, targets)
    LabelledExample: ("text", "label"),
    MultiLabelExample: ("text", "labels"),
    ScoredExample: ("text", "score"),
    TaggedExample: ("words", "tags"),
    PairExample: ("anchor", "positive"),
    Seq2SeqExample: ("source", "target"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class InMemoryRows:
    """Rows in memory with the interface of a `datasets.Dataset`. Each iteration starts from the first row."""

    column_names: tuple[str, ...]
    source: object  # a frame, or rows as mappings from columns to values
    features: None = None  # label names, which only a `datasets.Dataset` has

    def __iter__(self) -> Iterator[dict[str, object]]:
        for row in _iterate_rows(self.source):
            yield {str(name): _to_python_value(value) for name, value in row.items()}


def is_in_memory(value: object) -> bool:
    """Whether a value is data in memory: a `datasets.Dataset`, a frame, a list of dicts, or (inputs, targets)."""
    return isinstance(value, DatasetObject) or _is_frame(value) or _is_list_of_dicts(value) or _is_pair(value)


def to_dataset_object(value: object, kind: type[Example] | None) -> DatasetObject:
    """Wrap data in memory as an object with the interface of a `datasets.Dataset`.

    Args:
        value: data for which `is_in_memory` is true.
        kind: class of the examples, which decides the column names for a pair (inputs, targets). If None, targets are
            labels or lists of labels.

    Raises:
        DataError: If there are not equally many inputs and targets, or if the class needs more than a pair.
    """
    if isinstance(value, DatasetObject):
        return value
    if _is_pair(value):
        inputs, targets = map(_to_list, value)
        return _pair_rows(inputs, targets, kind)
    names: Iterable[object]
    if hasattr(value, "to_batches") and hasattr(value, "column_names"):
        names = value.column_names
    elif _is_frame(value) and hasattr(value, "columns"):
        names = value.columns
    else:
        assert isinstance(value, Iterable)
        names = dict.fromkeys(name for row in value for name in row)
    return InMemoryRows(column_names=tuple(map(str, names)), source=value)


def _pair_rows(inputs: list[Any], targets: list[object], kind: type[Example] | None) -> InMemoryRows:
    if len(inputs) != len(targets):
        raise DataError(f"data has {len(inputs)} inputs and {len(targets)} targets; expected as many of both")
    if kind is None:
        are_lists = bool(targets) and isinstance(targets[0], list | tuple)
        kind = MultiLabelExample if are_lists else LabelledExample
    if kind not in PAIR_COLUMNS:
        raise DataError("data is a pair of inputs and targets, expected rows: give a list of dicts")
    input_column, target_column = PAIR_COLUMNS[kind]
    may_be_pairs = kind in (LabelledExample, MultiLabelExample, ScoredExample)
    are_pairs = may_be_pairs and bool(inputs) and isinstance(inputs[0], list | tuple)
    rows: list[dict[str, object]] = []
    for number, (input_value, target) in enumerate(zip(inputs, targets, strict=True), start=1):
        if are_pairs:
            if not isinstance(input_value, list | tuple) or len(input_value) != 2:
                raise DataError(
                    f"input {number} is {shown(input_value)}, expected two texts, since the first input is a list: "
                    'give two texts for each input, with "" for a missing second text'
                )
            rows.append({input_column: input_value[0], "text_pair": input_value[1], target_column: target})
        else:
            rows.append({input_column: input_value, target_column: target})
    columns = (input_column, "text_pair", target_column) if are_pairs else (input_column, target_column)
    return InMemoryRows(column_names=columns, source=rows)


def _iterate_rows(source: object) -> Iterator[Mapping[object, object]]:
    """Yield the rows of a frame, or of a list of mappings."""
    if hasattr(source, "iter_rows"):  # polars
        yield from source.iter_rows(named=True)
    elif hasattr(source, "itertuples") and hasattr(source, "columns"):  # pandas
        names = list(source.columns)
        for values in source.itertuples(index=False, name=None):
            yield dict(zip(names, values, strict=True))
    elif hasattr(source, "to_batches"):  # pyarrow
        for batch in source.to_batches():
            yield from batch.to_pylist()
    else:
        assert isinstance(source, Iterable)
        yield from source


def _to_python_value(value: object) -> object:
    """Convert a NumPy value to a Python value."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_frame(value: object) -> bool:
    tabular = hasattr(value, "columns") and (hasattr(value, "iter_rows") or hasattr(value, "itertuples"))
    return tabular or (hasattr(value, "to_batches") and hasattr(value, "column_names"))


def _is_list_of_dicts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _is_pair(value: object) -> TypeGuard[tuple[object, object]]:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_column, value))


def _is_column(value: object) -> bool:
    """Whether a value is a list, an array or a series."""
    is_list_like = isinstance(value, list | tuple) or hasattr(value, "tolist") or hasattr(value, "to_list")
    return is_list_like and not isinstance(value, str | Path) and not _is_frame(value)


def _to_list(column: object) -> list[Any]:
    """Convert a list, an array or a series to a list of Python values."""
    for name in ("tolist", "to_list"):
        if hasattr(column, name):
            return list(getattr(column, name)())
    assert isinstance(column, Iterable)
    return [_to_python_value(value) for value in column]
