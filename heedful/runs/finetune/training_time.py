"""An estimate of how long training takes, from a few steps of a copy of the model."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.objectives import Objective, Sample
from heedful.train.settings import TrainSettings
from heedful.train.trainer import Trainer

PROBE = 4  # steps that are timed, after one that warms up
LEAST = 20 * PROBE  # steps of a run from which timing them pays


def estimate_seconds(trainer: Trainer, tokens: int) -> tuple[float, float]:
    """Estimate the duration of training from its next steps.

    Args:
        trainer: Makes the steps.
        tokens: Of one epoch.

    Returns:
        Seconds of training, and tokens a second.
    """
    steps = [trainer.train_step() for _ in range(1 + PROBE)][1:]
    speed = sum(step.tokens for step in steps) / sum(step.seconds for step in steps)
    if (budget := trainer.settings.budget_seconds) is not None:
        return budget, speed
    assert trainer.total_steps is not None
    return tokens * trainer.total_steps / trainer.order.steps_per_epoch / speed, speed


def training_time_note(
    loaded: ModelBundle, objective: Objective, samples: Sequence[Sample], tokens: int, settings: TrainSettings
) -> str:
    """A sentence with the estimated time of training; "" if it is short, or cannot be estimated.

    Steps are made with a copy of the model, so that training is the same to the last bit. An objective that trains
    modules of its own is not timed, since that would change them.
    """
    if settings.time_budget is not None or settings.compile or objective.extra_module is not None:
        return ""
    try:
        trainer = Trainer(deepcopy(loaded), objective, samples, settings)
        if trainer.total_steps is None or trainer.total_steps < LEAST:
            return ""
        seconds, speed = estimate_seconds(trainer, tokens)
    except HeedfulError:  # training raises it again, if it gets there
        return ""
    shown = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(1, seconds):.0f} s"
    pace = f"{trainer.total_steps:,} steps at {speed:,.0f} tokens/s"
    return f"training will take about {shown}, without evaluations: {pace}"
