"""results.json and predictions are read, and errors say what is wrong with a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from heedful.errors import HeedfulError
from heedful.runs.results import as_float, headline_split, read_predictions, read_results
from tests.support import run_folders


def test_what_was_written_is_read(tmp_path: Path) -> None:
    numbers, lines = run_folders.classification_result(["a", "b"], 20)
    written = run_folders.results_json("classify", "accuracy", {"dev": numbers, "test": numbers | {"accuracy": 0.25}})
    folder = run_folders.write_run_folder(tmp_path, written, dev=lines)
    assert read_results(folder) == json.loads(json.dumps(written))
    assert list(read_predictions(folder, "dev")) == lines
    assert list(read_predictions(folder, "test")) == [], "a missing file has no predictions"


def test_test_comes_before_dev() -> None:
    splits = {name: {"numbers": {"name": name}} for name in ("other", "dev", "test")}
    assert headline_split({"splits": splits}) == ("test", {"name": "test"})
    del splits["test"]
    assert headline_split({"splits": splits}) == ("dev", {"name": "dev"})
    del splits["dev"]
    assert headline_split({"splits": splits}) == ("other", {"name": "other"})
    assert headline_split({"splits": {}}) is None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "has no results.json: no run has finished there"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", 'lacks "task", "metric" or "splits"'),
        ('{"task": "tag", "metric": "f1"}', 'lacks "task", "metric" or "splits"'),
        ('{"task": "tag", "metric": "f1", "splits": {"dev": {}}}', 'lacks "task", "metric" or "splits"'),
    ],
)
def test_an_error_says_what_is_wrong_with_results(tmp_path: Path, text: str | None, match: str) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(HeedfulError, match=match):
        read_results(tmp_path)


@pytest.mark.parametrize(("value", "expected"), [(1, 1.0), ("NaN", None), ("-Infinity", -math.inf), ([], None)])
def test_numbers_of_json(value: Any, expected: float | None) -> None:
    number = as_float(value)
    if expected is None:
        assert math.isnan(number)
    else:
        assert number == expected
