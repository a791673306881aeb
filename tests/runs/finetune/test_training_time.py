"""The estimate of the training time is reported before training, and does not change its result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from heedful.runs.finetune import training_time as module
from heedful.train.fit import Reporter
from heedful.train.trainer import Step, Trainer
from tests.support.generated_data import finetune_tiny, write_splits

pytestmark = pytest.mark.usefixtures("quick")


class Told(Reporter):
    """Messages and step numbers, in their order."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def message(self, text: str) -> None:
        self.found.append(text)

    def step(self, step: Step, trainer: Trainer) -> None:
        self.found.append(step.number)


def test_the_time_is_told_before_the_first_step_and_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled, how = write_splits("single", tmp_path / "data"), {"train.epochs": 4}
    finetune_tiny("classify", labelled, tmp_path / "untold", how, reporter=(untold := Told()))
    assert not any("will take about" in str(each) for each in untold.found), "so few steps take no time"
    monkeypatch.setattr(module, "MIN_STEPS", 8)
    finetune_tiny("classify", labelled, tmp_path / "told", how, reporter=(recorder := Told()))
    (sentence,) = [each for each in recorder.found if "will take about" in str(each)]
    assert re.search(r"about \d+ s, without evaluations: 8 steps at [\d,]+ tokens/s$", sentence)
    assert recorder.found.index(sentence) < recorder.found.index(1)
    for name in ("model/model.safetensors", "journal.jsonl"):
        assert (tmp_path / "told" / name).read_bytes() == (tmp_path / "untold" / name).read_bytes()


@pytest.mark.parametrize("more", [{"train.time_budget": 0.005}, {"train.batch_size": 24}])
def test_where_the_clock_decides_or_training_is_short_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(module, "MIN_STEPS", 8)
    finetune_tiny(
        "classify",
        write_splits("single", tmp_path / "data"),
        tmp_path / "run",
        more if "train.time_budget" in more else {"train.epochs": 4} | more,
        reporter=(recorder := Told()),
    )
    assert not any("will take about" in str(each) for each in recorder.found)
