"""The estimate of the training time is reported before training, and does not change its result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from heedful.runs.finetune import training_time
from heedful.train.fit import Reporter
from heedful.train.trainer import Step, Trainer
from tests.support.generated_data import finetune_tiny, write_splits

pytestmark = pytest.mark.usefixtures("quick")


class Recorder(Reporter):
    """Records messages, and how many of them came before the first step."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.messages_before_training: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def step(self, step: Step, trainer: Trainer) -> None:
        if step.number == 1:
            self.messages_before_training = list(self.messages)


def estimates(messages: list[str]) -> list[str]:
    """Return the messages with an estimate of the training time."""
    return [message for message in messages if "will take about" in message]


def test_the_estimate_is_reported_before_training_and_does_not_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, settings = write_splits("single", tmp_path / "data"), {"train.epochs": 4}
    recorder, run = Recorder(), tmp_path / "without estimate"
    finetune_tiny("classify", data, run, settings, reporter=recorder)
    assert not estimates(recorder.messages), "the time of few steps is not estimated"
    monkeypatch.setattr(training_time, "MIN_STEPS", 8)
    recorder, run_with_estimate = Recorder(), tmp_path / "with estimate"
    finetune_tiny("classify", data, run_with_estimate, settings, reporter=recorder)
    (estimate,) = estimates(recorder.messages)
    assert re.search(r"about \d+ s, without evaluations: 8 steps at [\d,]+ tokens/s$", estimate)
    assert estimate in recorder.messages_before_training
    for name in ("model/model.safetensors", "journal.jsonl"):
        assert (run_with_estimate / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize(
    "settings",
    [{"train.time_budget": 0.005}, {"train.epochs": 4, "train.batch_size": 24}],
    ids=["time budget", "few steps"],
)
def test_the_time_of_a_time_budget_or_of_few_steps_is_not_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(training_time, "MIN_STEPS", 8)
    data, recorder = write_splits("single", tmp_path / "data"), Recorder()
    finetune_tiny("classify", data, tmp_path / "run", settings, reporter=recorder)
    assert not estimates(recorder.messages)
