"""Predictions on a terminal: untrusted text is escaped, and every predicted class is listed."""

from __future__ import annotations

from typing import Any

import pytest

from heedful.cli.output import print_table, show_answer

ESCAPE = "\x1b]0;title\x07"  # sets the title of a terminal


@pytest.mark.parametrize(
    "answer",
    [
        {"entities": [{"probability": 0.5, "label": f"PER{ESCAPE}", "text": "Ada"}], "words": []},
        {"masks": [], "note": f"nothing to fill in: write {ESCAPE} where a token is wanted"},
        {f"depth{ESCAPE}": 0.5},
        {"probabilities": {f"good{ESCAPE}": 1.0}, "label": f"good{ESCAPE}"},
        {"values": {f"stars{ESCAPE}": 1.0}},
    ],
)
def test_names_in_a_model_folder_cannot_control_the_terminal(
    answer: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    show_answer("a text", answer, 3)
    printed = capsys.readouterr().out
    assert r"\x1b]0;title\x07" in printed and not {"\x1b", "\x07"} & {*printed}


def table_of(answer: dict[str, Any], top_k: int, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The label and the remark in each row."""
    show_answer("a text", answer, top_k)
    return [line.split(maxsplit=3)[2:] for line in capsys.readouterr().out.splitlines()[1:] if line]


def test_all_predicted_labels_are_listed_before_others(capsys: pytest.CaptureFixture[str]) -> None:
    """A label above its own threshold may be less probable than labels below theirs."""
    probabilities = {"a": 0.6, "b": 0.5, "c": 0.4, "d": 0.3, "e": 0.1}
    answer = {"labels": ["d", "c"], "probabilities": probabilities}
    assert table_of(answer, 3, capsys) == [["c", "predicted"], ["d", "predicted"], ["a"]]
    assert table_of(answer, 1, capsys) == [["c", "predicted"], ["d", "predicted"]]
    assert table_of({"labels": [], "probabilities": probabilities}, 2, capsys) == [["a"], ["b"]]


def test_the_prediction_set_follows_the_predicted_label(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"label": "b", "probabilities": {"a": 0.3, "b": 0.6, "c": 0.1}, "prediction_set": ["a", "b"]}
    assert table_of(answer, 1, capsys) == [["b", "predicted"], ["a", "in the prediction set"]]
    assert table_of(answer, 3, capsys)[2:] == [["c"]]
    assert table_of(answer | {"label": "", "prediction_set": ["b"]}, 1, capsys)[0] == ["b", "in the prediction set"]


def test_rows_may_be_longer_than_the_head(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([["1", "2", "3"], ["4"]], head=["a", "b"])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["a", "b"], ["1", "2", "3"], ["4"]]
