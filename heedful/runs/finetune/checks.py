"""Checks of the settings of a fine-tuning run against its data, before anything is written."""

from __future__ import annotations

from typing import Protocol

from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import DataError, SettingError
from heedful.tasks.settings import TaskSettings
from heedful.train.settings import FitSettings, TrainSettings


class TaskRunSettings(Protocol):
    """Settings of a run on a task, which is fine-tuning or distillation."""

    @property
    def task(self) -> TaskSettings: ...
    @property
    def train(self) -> TrainSettings: ...
    @property
    def fit(self) -> FitSettings: ...


def check_dev_split(settings: TaskRunSettings, stats: DatasetStats, dev_problem: str) -> None:
    """Raise a SettingError if thresholds are tuned and there is no dev split.

    Args:
        settings: Settings of the run.
        stats: Statistics of the data.
        dev_problem: The reason why no dev split could be generated, or "" if none was requested.
    """
    if "dev" not in stats.non_empty_splits and settings.task.tunes_thresholds(stats):
        advice = f"{dev_problem}; give a dev file" if dev_problem else "set data.dev_fraction"
        raise SettingError(
            f"thresholds are tuned on dev, but there is no dev split: {advice}, or task.{settings.task.UNTUNED}",
            path="data.dev_fraction",
        )


def check_unused_settings(settings: TaskRunSettings, stats: DatasetStats, *, classic: bool) -> None:
    """Raise an error for settings that would change nothing with this data and model.

    Args:
        settings: Settings of the run.
        stats: Statistics of the data.
        classic: Whether the model has no Transformer blocks.

    Raises:
        DataError: If all scores of dev are equal, but evaluations on dev choose the best step.
        SettingError: If a setting would change nothing.
    """
    train, fit = settings.train, settings.fit
    has_dev = "dev" in stats.non_empty_splits
    if "dev" in stats.constant_score_splits and (fit.load_best_at_end or fit.patience):
        raise DataError(
            "all scores of dev are the same, so that nothing correlates with them and no step is the best: give other "
            "rows, or set fit.load_best_at_end=false and no fit.patience"
        )
    unused = {}  # reasons by the path of a setting
    if fit.patience and not has_dev:
        unused["fit.patience"] = "it counts evaluations on dev, and there is no dev split"
    if train.gradient_checkpointing and classic:
        unused["train.gradient_checkpointing"] = "a classic model has no blocks to recompute"
    if train.compile and classic:
        unused["train.compile"] = "a classic model has no blocks to compile"
    unused |= {f"task.{name}": reason for name, reason in settings.task.unused_settings(stats).items()}
    for path, reason in unused.items():
        raise SettingError(f"{path} would change nothing: {reason}; leave it out", path=path)
