"""Plots of alignments: which predictions are shown, and their tokens. test_seq2seq_runs.py tests them with models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from heedful.runs.plots import alignments
from heedful.runs.plots.alignments import Alignment, draw_alignments


def test_the_first_examples_are_shown_and_not_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is sorted by loss, so the first examples may be anywhere in it. Example 1 has no prediction."""
    ids_by_loss = (10, 3, 1, 2, 0)
    predictions = [{"id": id, "input": "a", "prediction": None if id == 1 else "b"} for id in ids_by_loss]
    (tmp_path / "predictions-dev.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in predictions))
    monkeypatch.setattr(alignments, "MAX_PREDICTIONS", 3)
    first_predictions = alignments._first_predictions(tmp_path, "dev")
    assert [prediction["id"] for prediction in first_predictions] == [0, 2, 3]
    assert alignments._first_predictions(tmp_path, "test") == []


def test_equal_tokens_have_equal_labels() -> None:
    alignment = Alignment(source=("a", "b", "a"), target=("b", "</s>"), weights=np.full((2, 3), 1 / 3))
    figure = draw_alignments([alignment] * 3, "first line", "second line")
    assert figure.get_suptitle() == "first line\nsecond line"
    assert [len(axes.images) for axes in figure.axes] == [1, 1, 1, 0], "three alignments in a grid of four"
    first_axes = figure.axes[0]
    assert [tick.get_text() for tick in first_axes.get_xticklabels()] == ["a", "b", "a"]
    assert [tick.get_text() for tick in first_axes.get_yticklabels()] == ["b", "</s>"]
