"""`TrackingReporter`, which copies the journal of a run to experiment trackers during training, for --track."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.errors import HeedfulError
from heedful.runs.overrides import flatten_settings
from heedful.runs.results import JOURNAL, JsonObject, as_float
from heedful.runs.run_folder import SETTINGS, read_run_json, write_file
from heedful.runs.trackers import TRACKERS, Tracker
from heedful.train.fit import EvalResult, Reporter
from heedful.train.trainer import Step, Trainer

TRACKING = "tracking.json"  # file of a run folder with the run's id at each tracker, for a resumed run


class TrackingReporter(Reporter):
    """Passes all events to another reporter, and copies the records of the journal to trackers.

    If a tracker fails during training, for example because of the network or a full disk, this is reported once and the
    tracker is not used any more. Training continues, since the journal has all values. If a tracker cannot be opened,
    the run stops before its first step.
    """

    def __init__(self, reporter: Reporter, names: Sequence[str]) -> None:
        """Initialize with a reporter and trackers.

        Args:
            reporter: Receives all events, and messages about trackers that fail.
            names: Names of trackers that `check_trackers` has checked.
        """
        self._reporter, self._names = reporter, tuple(names)
        self._trackers: dict[str, Tracker] = {}

    def step(self, step: Step, trainer: Trainer) -> None:
        """Pass the event of an update on."""
        self._reporter.step(step, trainer)

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        """Pass the event of an evaluation on."""
        self._reporter.evaluated(step, result, best)

    def message(self, text: str) -> None:
        """Pass a message on."""
        self._reporter.message(text)

    def started(self, folder: Path, step: int) -> None:
        """Open the trackers before the first update, or again when a run resumes after `step`.

        Raises:
            HeedfulError: If a tracker cannot be opened.
        """
        self._reporter.started(folder, step)
        ids = read_run_json(folder / TRACKING) if (folder / TRACKING).exists() else {}
        settings = dict(flatten_settings(_settings(folder)))
        for name in self._names:
            try:
                self._trackers[name] = TRACKERS[name](folder, ids.get(name, ""), step, settings)
            except Exception as error:  # errors of trackers have no common base class
                raise HeedfulError(
                    f"the tracker {name} cannot be opened: {_one_line(error)}. Fix that, or leave out --track {name}"
                ) from error
        write_file(folder / TRACKING, ids | {name: tracker.run_id for name, tracker in self._trackers.items()})

    def recorded(self, record: Mapping[str, Any]) -> None:
        """Pass a record of the journal on, and copy it to the trackers."""
        self._reporter.recorded(record)
        values = scalars(record)
        self._for_each("no longer written to", lambda tracker: tracker.log(int(record["step"]), values))

    def ended(self, finished: bool) -> None:
        """Pass the end of training on, and close the trackers."""
        self._reporter.ended(finished)
        self._for_each("not closed", lambda tracker: tracker.close(finished))
        self._trackers.clear()

    def _for_each(self, consequence: str, use: Callable[[Tracker], None]) -> None:
        """Call `use` with each tracker. If that fails, remove the tracker, and report the consequence."""
        for name, tracker in list(self._trackers.items()):
            try:
                use(tracker)
            except Exception as error:  # a failing tracker must not stop training
                del self._trackers[name]
                self._reporter.message(
                    f"the tracker {name} failed and is {consequence}: {_one_line(error)}. {JOURNAL} has all values"
                )


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a journal record, by their names in trackers.

    >>> scalars({"step": 8, "epoch": 0.5, "loss": 0.25, "lr": 1e-4})
    {'train/epoch': 0.5, 'train/loss': 0.25, 'train/lr': 0.0001}
    >>> scalars({"step": 8, "dev": {"accuracy": 0.5, "labels": ["a"]}, "best": True})
    {'dev/accuracy': 0.5}
    """
    if "dev" in record:
        group, values = "dev", record["dev"]
    else:
        group, values = "train", {key: value for key, value in record.items() if key != "step"}
    numbers = {key: as_float(value) for key, value in values.items() if not isinstance(value, bool | list | dict)}
    return {f"{group}/{key}": value for key, value in numbers.items() if math.isfinite(value)}


def _settings(folder: Path) -> JsonObject:
    """Read the settings file of a run, or of its parent folder if the folder is that of one seed of several."""
    for path in (folder / SETTINGS, folder.parent / SETTINGS):
        if path.is_file():
            return tomllib.loads(path.read_text("utf-8"))
    return {}


def _one_line(error: Exception) -> str:
    """Return the class and the text of an error on one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
