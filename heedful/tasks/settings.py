"""TaskSettings: the base class of the settings of a task, and the questions that runs ask them.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from heedful.data.labelled.statistics import DatasetStats


class TaskSettings:
    """Base class of the settings of a task; `kind` tells the tasks apart."""

    __slots__ = ()
    MEMBERS: ClassVar[list[type[TaskSettings]]] = []  # the settings class of each registered task
    UNTUNED: ClassVar[str] = ""  # "name=value" that turns off the tuning of a threshold; "": no threshold
    kind: str

    def check(self) -> None:
        """Raise SettingError for settings that need a package that is not installed."""

    def check_data(self, stats: DatasetStats) -> None:
        """Raise SettingError for settings that do not suit the data."""

    def samples_per_group(self, *, scored: bool) -> int:
        """Return how many samples the loss compares with each other; 1 for a loss of single samples.

        Args:
            scored: Whether the examples have scores.
        """
        return 1

    def tunes_thresholds(self, stats: DatasetStats) -> bool:
        """Whether thresholds are tuned on the dev split."""
        return False

    def fits_temperature(self) -> bool:
        """Whether a temperature of the scores is fitted on the dev split, if there is one."""
        return False

    def for_student(self, thresholds: Mapping[str, float], *, has_dev: bool) -> TaskSettings:
        """Return the default settings for distilling a teacher.

        Args:
            thresholds: Thresholds of the teacher.
            has_dev: Whether there is a dev split.
        """
        return self

    def unused_settings(self, stats: DatasetStats) -> dict[str, str]:
        """Return settings that differ from their defaults but have no effect, by name, with the reason."""
        return {}

    def summary(self) -> str:
        """Return a text about these settings for the summary of a training, or "" for no text."""
        return ""
