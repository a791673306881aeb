"""TaskSettings: the base class of the settings of a task. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from heedful.data.labelled.statistics import DatasetStats


class TaskSettings:
    """Base class of the settings of a task; `kind` tells them apart."""

    __slots__ = ()
    MEMBERS: ClassVar[list[type[TaskSettings]]] = []  # the settings class of each registered task
    UNTUNED: ClassVar[str] = ""  # the assignment by which no threshold is fitted, if some may be
    kind: str

    def check(self) -> None:
        """Refuse settings that cannot be honoured on this machine."""

    def check_data(self, survey: DatasetStats) -> None:
        """Refuse settings that the data does not allow."""

    def group(self, *, scored: bool) -> int:
        """Return the number of samples that are learned together; `scored`: the data have scores."""
        return 1

    def tunes_thresholds(self, survey: DatasetStats) -> bool:
        """Tell whether thresholds are fitted on dev."""
        return False

    def fits_temperature(self) -> bool:
        """Tell whether a temperature of the scores is fitted on dev, if there is one."""
        return False

    def of_teacher(self, thresholds: Mapping[str, float], *, has_dev: bool) -> TaskSettings:
        """Return the defaults for a student, from the thresholds of its teacher."""
        return self

    def unused(self, survey: DatasetStats) -> dict[str, str]:
        """Return the settings that were changed and would change nothing, each with the reason."""
        return {}

    def summary(self) -> str:
        """Return what the summary of a training says about the task."""
        return ""
