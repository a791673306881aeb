"""Data in memory gives the same examples as a file with the same rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from heedful.data import (
    DataSettings,
    LabelledExample,
    MultiLabelExample,
    PairExample,
    ScoredExample,
    TaggedExample,
    read,
)
from heedful.data.inputs.inherited_settings import list_data_files
from heedful.errors import HeedfulError

ROWS = [{"text": "the cat", "label": "good"}, {"text": "a dog", "label": "bad"}]
WHOLE = DataSettings(dev_fraction=0.0)
TEXTS, LABELS = (tuple(row[name] for row in ROWS) for name in ("text", "label"))


class Pandas:
    """A stand-in for a pandas DataFrame, with the attributes that Heedful uses."""

    columns = np.array(["text", "label"])

    def itertuples(self, index: bool, name: None) -> Iterator[tuple[Any, ...]]:
        return (tuple(row.values()) for row in ROWS)


class Polars:
    """A stand-in for a polars DataFrame, with the attributes that Heedful uses."""

    columns = ("text", "label")

    def iter_rows(self, named: bool) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


def examples(data: Any, kind: type[Any], split: str = "train") -> list[Any]:
    """The examples without their file and line, which data in memory do not have."""
    return [replace(example, file="", line=0) for example in read(data, kind, WHOLE).examples(split)]


@pytest.mark.parametrize(
    "data",
    [
        Pandas(),
        Polars(),
        ROWS,
        pyarrow.Table.from_pylist(ROWS),
        (TEXTS, LABELS),
        (list(TEXTS), np.array(LABELS)),
        {"train": ROWS},
        {"train": Pandas(), "dev": (TEXTS, LABELS)},
    ],
    ids=["pandas", "polars", "rows", "arrow", "pair", "array", "split", "splits"],
)
def test_objects_give_the_examples_of_a_file(data: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert examples(data, LabelledExample) == examples(path, LabelledExample)
    assert read(data, LabelledExample).labels == ("bad", "good")
    assert list_data_files(data) == []


def test_targets_in_memory_are_converted_for_the_task() -> None:
    assert [example.label for example in examples((["a"], np.array([1])), LabelledExample)] == ["1"]
    assert [example.labels for example in examples({"train": (["a"], [["x", "y"]])}, MultiLabelExample)] == [("x", "y")]
    assert [example.score for example in examples({"train": (["a"], np.array([1.5]))}, ScoredExample)] == [1.5]
    assert [example.tags for example in examples({"train": ([["a", "b"]], [["O", "B-x"]])}, TaggedExample)] == [
        ("O", "B-x")
    ]
    assert [example.texts for example in examples({"train": (["a"], ["b"])}, PairExample)] == [("a", "b")]
    (pair,) = examples({"train": ([("a", "b")], ["x"])}, LabelledExample)
    assert (pair.text, pair.text_pair) == ("a", "b")


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        pytest.param([("a", "b"), "cd"], 'input 2 is "cd", expected two texts', id="a text"),
        pytest.param([("a", "b"), ("c",)], r'input 2 is \["c"\], expected two texts', id="one text"),
        pytest.param(
            [("a", "b", "c")], r"input 1 is .*: give two texts for each input, with \"\" for a", id="three texts"
        ),
    ],
)
def test_each_pair_needs_two_texts(inputs: list[Any], match: str) -> None:
    with pytest.raises(HeedfulError, match=match):
        read((inputs, ["x"] * len(inputs)), LabelledExample)


def test_inputs_and_targets_must_be_equally_many() -> None:
    with pytest.raises(HeedfulError, match="2 inputs and 1 targets"):
        read((["a", "b"], ["x"]), LabelledExample)
