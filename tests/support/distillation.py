"""Helpers for tests of distillation: quick settings, and reporters that stop or kill the run."""

from __future__ import annotations

from heedful.train.fit import Reporter
from heedful.train.trainer import Step, Trainer

QUICK = ("seeds=1", "train.epochs=2", "train.precision=float32", "verdict.precision=float32", "verdict.texts=8")
NO_BASELINE = (*QUICK, "verdict.baseline=none")
WITHOUT_DURATION = tuple(setting for setting in QUICK if not setting.startswith("train.epochs="))


class Told(Reporter):
    """A reporter that keeps all messages; it stops or dies after a step or a message; steps count from `after` on."""

    def __init__(self, *, stop: int = 0, die: int = 0, after: str = "") -> None:
        self.sentences: list[str] = []
        self.stop, self.die, self.after = stop, die, after

    def message(self, text: str) -> None:
        """Keep it."""
        self.sentences.append(text)
        if self.after and text.startswith(self.after):
            if not self.die:
                raise KeyError("the power failed")
            self.after = ""

    def step(self, step: Step, trainer: Trainer) -> None:
        """Stop, or die."""
        trainer.stop_requested = trainer.stop_requested or step.number == self.stop
        if step.number == self.die and not self.after:
            raise KeyError("the power failed")
