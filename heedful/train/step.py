"""Records of the training loop: a step, a stage of the training, and the errors that end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from heedful.errors import HeedfulError
from heedful.objectives import Objective, Sample
from heedful.train.settings import DIVERGENCE_ADVICE


class Step(NamedTuple):
    """The record of one update."""

    number: int  # from 1
    epoch: float  # how many times the samples have been seen, after this step
    loss: float  # the mean over all targets of the step; 0 where there are none
    lr: float  # the highest of all parameters
    grad_norm: float  # of the gradient, before clipping
    tokens: int  # of all ranks
    seconds: float
    updated: bool  # False: left out, because a number was not finite

    @property
    def record(self) -> dict[str, Any]:
        """The values that equal runs share: all but times."""
        said = {"step": self.number, "epoch": self.epoch, "loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm}
        return said if self.updated else said | {"skipped": True}


class DivergedError(HeedfulError):
    """A loss or a gradient is not finite, and the weights are those from before the step; or what was measured is."""

    def __init__(self, message: str, step: Step | None = None) -> None:
        super().__init__(message)
        self.step = step  # the one that was not done


class StoppedError(Exception):
    """A stop was asked for, on some rank; the step that was running is left, and nothing has changed."""


class Stage(NamedTuple):
    """Samples, batch size and objective from `share` (0 to 1) of the training on; None: those of the first stage."""

    share: float
    samples: Sequence[Sample]
    batch_size: int | None = None
    objective: Objective | None = None


def round_to_groups(batch: int, together: int) -> int:
    """The batch size in whole groups of samples that one loss sees, at least one group."""
    return max(batch, together) // together * together


def divergence_error(step: Step, gradients: Mapping[str, Tensor]) -> DivergedError:
    bad = [name for name, each in gradients.items() if not (each.values() if each.is_sparse else each).isfinite().all()]
    where = f"; gradients that are not finite: {', '.join(bad[:3])}" + (" and more" if bad[3:] else "")
    return DivergedError(
        f"step {step.number}: the loss is {step.loss} and the norm of the gradient {step.grad_norm}"
        f"{where if bad else ''}. "
        f"The weights are those from before this step. {DIVERGENCE_ADVICE}",
        step,
    )
