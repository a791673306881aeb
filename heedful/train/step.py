"""Records of the training loop: a step, a stage of the training, and the errors that end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from heedful.errors import RunError
from heedful.objectives import Objective, Sample
from heedful.train.settings import DIVERGENCE_ADVICE


class Step(NamedTuple):
    """The record of one update."""

    number: int  # number of the step, from 1
    epoch: float  # passes over the samples, after this step
    loss: float  # mean over all targets of the step; 0 without targets
    lr: float  # largest learning rate of all parameters
    grad_norm: float  # norm of the gradient before clipping
    tokens: int  # tokens of the step, on all ranks together
    seconds: float  # duration of the step
    updated: bool  # whether weights were updated, which needs a finite loss and gradient
    loss_scale: float | None = None  # factor of the loss in the backward pass, or None unless training in float16

    @property
    def record(self) -> dict[str, float | bool]:
        """Values for the journal: all but times, which differ between equal runs."""
        record: dict[str, float | bool] = {
            "step": self.number,
            "epoch": self.epoch,
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
        }
        if self.loss_scale is not None:
            record["loss_scale"] = self.loss_scale
        return record if self.updated else record | {"skipped": True}


class DivergedError(RunError):
    """The loss, the gradient or an evaluation is not finite; the weights are those from before the step."""

    def __init__(self, message: str, step: Step | None = None) -> None:
        super().__init__(message)
        self.step = step  # the step that did not update the weights, or None if an evaluation was not finite


class StoppedError(Exception):
    """A rank was asked to stop; the running step is abandoned, and nothing has changed."""


class Stage(NamedTuple):
    """A part of training with its own samples, batch size and objective."""

    share: float  # share of training after which the stage begins, from 0 to 1
    samples: Sequence[Sample]
    batch_size: int | None = None  # samples of an update, or None for the batch size of the settings
    objective: Objective | None = None  # None for the objective of the trainer


def round_to_groups(batch_size: int, group_size: int) -> int:
    """Round a batch size down to whole groups of samples, which one loss is computed from; at least one group."""
    return max(batch_size, group_size) // group_size * group_size


def divergence_error(step: Step, gradients: Mapping[str, Tensor]) -> DivergedError:
    """Return the error for a step whose loss or gradient is not finite, naming gradients that are not."""
    values = {name: grad.values() if grad.is_sparse else grad for name, grad in gradients.items()}
    bad = [name for name, grad in values.items() if not grad.isfinite().all()]
    where = f"; gradients that are not finite: {', '.join(bad[:3])}" + (" and more" if bad[3:] else "")
    return DivergedError(
        f"step {step.number}: the loss is {step.loss} and the norm of the gradient {step.grad_norm}"
        f"{where if bad else ''}. "
        f"The weights are those from before this step. {DIVERGENCE_ADVICE}",
        step,
    )
