"""Helpers for tests of distillation: quick settings, and a reporter that stops the run or raises an error."""

from __future__ import annotations

from heedful.train.fit import Reporter
from heedful.train.trainer import Step, Trainer

QUICK = ("seeds=1", "train.epochs=2", "train.precision=float32", "verdict.precision=float32", "verdict.texts=8")
NO_BASELINE = (*QUICK, "verdict.baseline=none")
WITHOUT_DURATION = tuple(setting for setting in QUICK if not setting.startswith("train.epochs="))


class RecordingReporter(Reporter):
    """Records messages, and stops the run or raises a KeyError at a given moment."""

    def __init__(self, *, stop_step: int = 0, fail_step: int = 0, after_message: str = "") -> None:
        """Set when to stop or to fail.

        Args:
            stop_step: Number of the step after which the run is asked to stop, or 0.
            fail_step: Number of the step after which an error is raised, or 0.
            after_message: Beginning of a message before which `fail_step` has no effect. Without `fail_step`, the
                error is raised when this message comes.
        """
        self.messages: list[str] = []
        self.stop_step, self.fail_step, self.after_message = stop_step, fail_step, after_message

    def message(self, text: str) -> None:
        """Record a message, and raise the error if it is due."""
        self.messages.append(text)
        if self.after_message and text.startswith(self.after_message):
            if not self.fail_step:
                raise KeyError("the power failed")
            self.after_message = ""

    def step(self, step: Step, trainer: Trainer) -> None:
        """Stop the run, or raise the error, if it is due."""
        trainer.stop_requested = trainer.stop_requested or step.number == self.stop_step
        if step.number == self.fail_step and not self.after_message:
            raise KeyError("the power failed")
