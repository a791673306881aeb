"""Refusals of settings that the data of a fine-tuning run cannot honour, before anything is written."""

from __future__ import annotations

from typing import Any

from heedful.errors import HeedfulError
from heedful.runs.settings import EmbedSettings, MultipleSettings, QASettings, RegressSettings
from heedful.runs.survey import Survey


def need_dev(settings: Any, found: Survey, lacking: str) -> None:
    """Refuse to calibrate thresholds without dev; what is `lacking` for one is told."""
    if "dev" not in found.splits and calibrates(settings, found):
        raise HeedfulError(
            f"thresholds are tuned on dev, but there is no dev split: {lacking or 'set data.dev_fraction'}"
            + ("; give a dev file, or " if lacking else ", or ")
            + ("task.no_answer_threshold=0" if isinstance(settings.task, QASettings) else "task.thresholds=0.5")
        )


def unused_settings(settings: Any, found: Survey, *, classic: bool) -> None:
    """Refuse what was asked for and would change nothing."""
    task, train = settings.task, settings.train
    usual = EmbedSettings()
    paired = task if isinstance(task, EmbedSettings) and found.low is not None else usual
    scored, dev = isinstance(task, EmbedSettings | RegressSettings), "dev" in found.splits
    if scored and "dev" in found.alike and (settings.fit.load_best_at_end or settings.fit.patience):
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
        ("task.group_size", paired.group_size != usual.group_size, "pairs with scores have no negatives"),
        ("task.scale", paired.scale != usual.scale, "pairs with scores learn their cosine itself"),
    ):
        if asked:
            raise HeedfulError(f"{name} would change nothing: {why}; leave it out")


def calibrates(settings: Any, found: Survey) -> bool:
    """Tell whether thresholds are fitted on dev."""
    match settings.task:
        case MultipleSettings(thresholds="tuned"):
            return True
        case QASettings(no_answer_threshold="tuned"):
            return found.impossible
    return False
