"""A reporter for tests of runs."""

from __future__ import annotations

from heedful.train.fit import Reporter
from heedful.train.trainer import Step, Trainer


class Messages(Reporter):
    """Records messages, and asks the run to stop after step `stop_after`, or never if `stop_after` is 0."""

    def __init__(self, stop_after: int = 0) -> None:
        self.messages: list[str] = []
        self._stop_after = stop_after

    def step(self, step: Step, trainer: Trainer) -> None:
        trainer.stop_requested = trainer.stop_requested or step.number == self._stop_after

    def message(self, text: str) -> None:
        self.messages.append(text)
