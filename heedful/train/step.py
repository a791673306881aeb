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

    number: int  # from 1
    epoch: float  # passes over the samples, after this step
    loss: float  # mean over all targets of the step; 0 without targets
    lr: float  # the largest learning rate of all parameters
    grad_norm: float  # before clipping
    tokens: int  # of all ranks
    seconds: float
    updated: bool  # False: skipped, because the loss or the gradient is not finite

    @property
    def record(self) -> dict[str, float | bool]:
        """The values of the journal: all but times, which differ between equal runs."""
        record = {
            "step": self.number,
            "epoch": self.epoch,
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
        }
        return record if self.updated else record | {"skipped": True}


class DivergedError(RunError):
    """The loss, the gradient or an evaluation is not finite; the weights are those from before the step."""

    def __init__(self, message: str, step: Step | None = None) -> None:
        super().__init__(message)
        self.step = step  # the one that was not applied


class StoppedError(Exception):
    """A stop was requested on some rank; the running step is abandoned, and nothing has changed."""


class Stage(NamedTuple):
    """The samples, batch size and objective used from `share` (0 to 1) of training onwards; None: as before."""

    share: float
    samples: Sequence[Sample]
    batch_size: int | None = None
    objective: Objective | None = None


def round_to_groups(batch_size: int, group_size: int) -> int:
    """Round a batch size down to whole groups of samples that one loss sees at once, at least one group."""
    return max(batch_size, group_size) // group_size * group_size


def divergence_error(step: Step, gradients: Mapping[str, Tensor]) -> DivergedError:
    """Return the error for a step whose loss or gradient is not finite, with the names of such gradients."""
    values = {name: grad.values() if grad.is_sparse else grad for name, grad in gradients.items()}
    bad = [name for name, grad in values.items() if not grad.isfinite().all()]
    where = f"; gradients that are not finite: {', '.join(bad[:3])}" + (" and more" if bad[3:] else "")
    return DivergedError(
        f"step {step.number}: the loss is {step.loss} and the norm of the gradient {step.grad_norm}"
        f"{where if bad else ''}. "
        f"The weights are those from before this step. {DIVERGENCE_ADVICE}",
        step,
    )
