"""Estimation of the training time from a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.objectives import Objective, Sample
from heedful.train.settings import TrainSettings
from heedful.train.trainer import Trainer

TIMED_STEPS = 4  # steps that are timed, after a warm-up step
MIN_STEPS = 20 * TIMED_STEPS  # steps of a run; the time of a shorter one is not estimated


def estimate_seconds(trainer: Trainer, tokens: int) -> tuple[float, float]:
    """Estimate the duration of training by making its next steps.

    Args:
        trainer: The trainer, which makes the steps.
        tokens: Number of tokens in one epoch.

    Returns:
        Seconds of the whole training, and tokens a second.
    """
    try:
        steps = [trainer.train_step() for _ in range(1 + TIMED_STEPS)][1:]
    finally:
        trainer.close()
    speed = sum(step.tokens for step in steps) / sum(step.seconds for step in steps)
    if (budget := trainer.settings.budget_seconds) is not None:
        return budget, speed
    assert trainer.total_steps is not None
    return tokens * trainer.total_steps / trainer.order.steps_per_epoch / speed, speed


def training_time_note(
    loaded: ModelBundle, objective: Objective, samples: Sequence[Sample], tokens: int, settings: TrainSettings
) -> str:
    """Return a sentence with the estimated time of training; "" if training is short, or cannot be timed.

    Steps are made with a copy of the model, so that training is the same to the last bit. An objective that trains
    modules of its own is not timed, since that would change them.

    Args:
        loaded: The model, with the task's head.
        objective: The objective of training.
        samples: The training samples.
        tokens: Number of tokens in one epoch.
        settings: Settings of training.
    """
    if settings.time_budget is not None or settings.compile or objective.extra_module is not None:
        return ""
    try:
        trainer = Trainer(deepcopy(loaded), objective, samples, settings)
        if trainer.total_steps is None or trainer.total_steps < MIN_STEPS:
            return ""
        seconds, speed = estimate_seconds(trainer, tokens)
    except HeedfulError:  # training will raise it at the same step
        return ""
    duration = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(1, seconds):.0f} s"
    pace = f"{trainer.total_steps:,} steps at {speed:,.0f} tokens/s"
    return f"training will take about {duration}, without evaluations: {pace}"
