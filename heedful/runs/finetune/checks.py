"""Refusals of settings that the data of a fine-tuning run cannot honour, before anything is written."""

from __future__ import annotations

from typing import Any

from heedful.data.labelled.statistics import Survey
from heedful.errors import HeedfulError


def check_dev_split(settings: Any, found: Survey, lacking: str) -> None:
    """Refuse to calibrate thresholds without dev; what is `lacking` for one is told."""
    if "dev" not in found.splits and settings.task.tunes_thresholds(found):
        raise HeedfulError(
            f"thresholds are tuned on dev, but there is no dev split: {lacking or 'set data.dev_fraction'}"
            + ("; give a dev file, or " if lacking else ", or ")
            + f"task.{settings.task.UNTUNED}"
        )


def check_unused_settings(settings: Any, found: Survey, *, classic: bool) -> None:
    """Refuse what was asked for and would change nothing."""
    task, train = settings.task, settings.train
    dev = "dev" in found.splits
    if "dev" in found.alike and (settings.fit.load_best_at_end or settings.fit.patience):
        raise HeedfulError(
            "all scores of dev are the same, so that nothing correlates with them and no step is the best: give other "
            "rows, or set fit.load_best_at_end=false and no fit.patience"
        )
    for name, asked, why in (
        ("fit.patience", settings.fit.patience and not dev, "it counts evaluations on dev, and there is none"),
        (
            "train.gradient_checkpointing",
            train.gradient_checkpointing and classic,
            "a classic model has no blocks to compute again",
        ),
        ("train.compile", train.compile and classic, "a classic model has no blocks to compile"),
        *((f"task.{name}", True, why) for name, why in task.unused(found).items()),
    ):
        if asked:
            raise HeedfulError(f"{name} would change nothing: {why}; leave it out")
