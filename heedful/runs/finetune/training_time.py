"""Estimation of the training time from a few steps, for fine-tuning, its dry run and the choice of a method."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.objectives import Objective, Sample
from heedful.train.settings import TrainSettings
from heedful.train.trainer import Trainer

TIMED_STEPS = 4  # timed steps, after a warm-up step
MIN_STEPS = 20 * TIMED_STEPS  # minimum steps of a run whose time is estimated


def estimate_seconds(trainer: Trainer, tokens: int) -> tuple[float, float]:
    """Estimate the duration of training by running the next steps.

    Args:
        trainer: The trainer, which runs the steps.
        tokens: Tokens in one epoch.

    Returns:
        Seconds of the whole training, and tokens per second.
    """
    try:
        _, *steps = [trainer.train_step() for _ in range(1 + TIMED_STEPS)]  # without the warm-up step
    finally:
        trainer.close()
    tokens_per_second = sum(step.tokens for step in steps) / sum(step.seconds for step in steps)
    if (budget := trainer.settings.budget_seconds) is not None:
        return budget, tokens_per_second
    assert trainer.total_steps is not None
    epochs = trainer.total_steps / trainer.order.steps_per_epoch
    return tokens * epochs / tokens_per_second, tokens_per_second


def training_time_note(
    loaded: ModelBundle, objective: Objective, samples: Sequence[Sample], tokens: int, settings: TrainSettings
) -> str:
    """Return a sentence with the estimated time of training, or "" if training is short or cannot be timed.

    The timed steps use a copy of the model, so that the training itself does not change. An objective with an extra
    module is not timed, since the steps would change that module.

    Args:
        loaded: The model, with the task's head.
        objective: The objective of training.
        samples: The training samples.
        tokens: Tokens in one epoch.
        settings: Settings of training.
    """
    if settings.time_budget is not None or settings.compile or objective.extra_module is not None:
        return ""
    try:
        trainer = Trainer(deepcopy(loaded), objective, samples, settings)
        if trainer.total_steps is None or trainer.total_steps < MIN_STEPS:
            return ""
        seconds, tokens_per_second = estimate_seconds(trainer, tokens)
    except HeedfulError:  # training will raise it at the same step
        return ""
    duration = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(1, seconds):.0f} s"
    pace = f"{trainer.total_steps:,} steps at {tokens_per_second:,.0f} tokens/s"
    return f"training will take about {duration}, without evaluations: {pace}"
