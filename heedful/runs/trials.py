"""The trials of `heedful tune`: their schedule, ranking, state on disk, table and plot."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from heedful.errors import RunError
from heedful.runs.plots.style import GREY, ORANGE, new_figure, set_title, style_axes
from heedful.runs.results import JsonObject
from heedful.runs.run_folder import read_run_json
from heedful.toml_json import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REDUCTION = 3  # each rung keeps the best third of its trials, and trains it three times as long
MAX_TRIALS = 81  # maximum trials in the first rung
OTHER_FOLDER = "another output_dir (--output)"  # advice of errors
Configuration = dict[str, Json]  # a value for each setting of the search space


# -- state ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """Trials that train for the same share of the full duration."""

    share: float  # share of the full duration, above 0 and at most 1
    num_trials: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A configuration that was trained for the share of a rung and evaluated on dev."""

    rung_index: int
    share: float  # share of the full duration
    settings: Configuration
    folder: str  # folder of the run, within the folder of the search
    metric: str = ""  # name of the metric that ranks trials; "": training diverged
    metric_value: float | None = None  # larger is better; None: training diverged
    tie_breaker: float = 0.0  # larger is better
    interval: dict[str, float] | None = None  # 95 % interval of the metric as {"low", "high"}, if it has one
    seconds: float  # duration of training and evaluation

    @property
    def rank(self) -> tuple[float, float]:
        """The sort key within a rung, (metric, tie breaker). Larger is better, and diverged trials are the worst."""
        return (-math.inf, -math.inf) if self.metric_value is None else (self.metric_value, self.tie_breaker)

    def to_json(self) -> JsonObject:
        """Return the entry of the trial in tune.json."""
        record = asdict(self)
        return {"rung": record.pop("rung_index"), **record}

    @classmethod
    def from_json(cls, record: JsonObject) -> Trial:
        """Return the trial of an entry in tune.json."""
        values = dict(record)
        return cls(rung_index=values.pop("rung"), **values)


@dataclass(kw_only=True, slots=True)
class SearchState:
    """The state of a search, which is stored in tune.json. The entry "tune" of the results has the same content."""

    task: str
    space: dict[str, list[Json]]  # the values to try, by name of a setting
    settings: JsonObject  # settings of fine-tuning that all trials share
    data: str  # hash of the examples of train and dev
    minutes: float  # time for the whole search
    full_seconds: float  # estimated duration of a full training, without evaluations
    rungs: list[Rung]  # schedule of the trials; []: no trials, since there is no time or nothing to compare
    trials: list[Trial]  # finished trials
    seconds: float  # duration of the search until the last trial, over all calls
    chosen: Configuration | None = None  # configuration of the final model; None: trials are missing

    def find_trial(self, rung_index: int, configuration: Configuration) -> Trial | None:
        """Return the trial of a rung with a configuration, or None if it has not run."""
        for trial in self.trials:
            if trial.rung_index == rung_index and trial.settings == configuration:
                return trial
        return None

    def to_json(self) -> JsonObject:
        """Return the content of tune.json."""
        return asdict(self) | {"trials": [trial.to_json() for trial in self.trials]}

    @classmethod
    def from_json(cls, record: JsonObject) -> SearchState:
        """Return the state with the content of a tune.json.

        Raises:
            KeyError, TypeError, ValueError: If a key is missing or unknown, or if a value has another type.
        """
        rungs = [Rung(**rung) for rung in record["rungs"]]
        trials = [Trial.from_json(trial) for trial in record["trials"]]
        return cls(**record | {"rungs": rungs, "trials": trials})


def read_search_state(path: Path) -> SearchState:
    """Read tune.json. Raise a RunError if it is damaged or was written by another version of Heedful."""
    try:
        return SearchState.from_json(read_run_json(path))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; give {OTHER_FOLDER}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{path} is damaged or was written by another version of Heedful, so the search cannot be resumed; "
            f"give {OTHER_FOLDER}"
        ) from error


# -- schedule ---------------------------------------------------------------------------------------------------------


def rungs_within(candidates: int, full_seconds: float, seconds: float, final_seeds: int = 1) -> list[Rung]:
    """Return the largest schedule that fits into `seconds`, ordered by duration (Li et al. 2018, algorithm 1).

    The schedule leaves time for the final training. It is [] if two full trainings do not fit beside it, or if there is
    nothing to compare.

    Args:
        candidates: How many configurations there are.
        full_seconds: Duration of a full training with one seed, in seconds.
        seconds: Time for trials and the final training, in seconds.
        final_seeds: How many seeds the final training has.

    >>> [(rung.share, rung.num_trials) for rung in rungs_within(9, 60, 600)]
    [(0.1111111111111111, 9), (0.3333333333333333, 3), (1.0, 1)]
    >>> rungs_within(9, 60, 150)
    []
    >>> [(rung.share, rung.num_trials) for rung in rungs_within(9, 60, 300, final_seeds=3)]
    [(0.3333333333333333, 3), (1.0, 1)]
    """
    for first_trials in range(min(candidates, MAX_TRIALS), 1, -1):
        counts = [first_trials]
        while counts[-1] >= REDUCTION:
            counts.append(counts[-1] // REDUCTION)
        last = len(counts) - 1
        rungs = [Rung(share=float(REDUCTION) ** (index - last), num_trials=count) for index, count in enumerate(counts)]
        if full_seconds * (final_seeds + sum(rung.share * rung.num_trials for rung in rungs)) <= seconds:
            return rungs
    return []


def configurations(space: Mapping[str, Sequence[Json]], seed: int) -> list[Configuration]:
    """Return all combinations of values. The combination of all first values comes first, and the rest is shuffled.

    Args:
        space: Mapping from the name of a setting to the values to try.
        seed: Seed of the order.
    """
    combinations = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    rest = combinations[1:]
    random.Random(seed).shuffle(rest)
    return combinations[:1] + rest


def format_configuration(configuration: Configuration) -> str:
    """Return a configuration as text.

    >>> format_configuration({"lr": 0.001, "batch_size": 8})
    'lr=0.001, batch_size=8'
    """
    return ", ".join(f"{name}={value}" for name, value in configuration.items())


# -- ranking ----------------------------------------------------------------------------------------------------------


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the best trial with the longest duration, or None without one.

    Configurations whose training diverged, in any rung, are left out.
    """
    diverged = [trial.settings for trial in trials if trial.metric_value is None]
    ranked = ranked_trials([trial for trial in trials if trial.settings not in diverged])
    return ranked[0] if ranked else None


def ranked_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Return trials sorted by decreasing duration, and the best first among trials of a rung."""
    return sorted(trials, key=lambda trial: (trial.rung_index, trial.rank), reverse=True)


def metric_name(trials: Sequence[Trial]) -> str:
    """Return the name of the metric that ranks trials, or "" if training diverged in all of them."""
    return next((trial.metric for trial in trials if trial.metric), "")


# -- table and plot ---------------------------------------------------------------------------------------------------


def trials_csv(state: SearchState) -> str:
    """Return the trials as CSV, ranked. The value of a trial that diverged is "NaN"."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*state.space, "share of the training", "dev metric", "value", "low", "high", "seconds", "folder"])
    for trial in ranked_trials(state.trials):
        values = [trial.settings[name] for name in state.space]
        score = "NaN" if trial.metric_value is None else trial.metric_value
        bounds = [trial.interval["low"], trial.interval["high"]] if trial.interval else ["", ""]
        scores = [metric_name(state.trials), score, *bounds]
        writer.writerow([*values, trial.share, *scores, trial.seconds, trial.folder])
    return out.getvalue()


def plot_trials(state: SearchState) -> Figure:
    """Plot the dev metric of each configuration over the share of the training, with the chosen one highlighted."""
    figure = new_figure(6.4, 3.8)
    axes = figure.add_subplot()
    style_axes(axes, grid="y")
    for trials in _trials_by_configuration(state.trials):
        settings = trials[0].settings
        is_chosen = settings == state.chosen
        color, line_width = (ORANGE, 1.5) if is_chosen else (GREY, 0.8)
        shares = [trial.share for trial in trials]
        values = [trial.rank[0] for trial in trials]
        axes.plot(shares, values, "o-", color=color, lw=line_width, ms=4, zorder=3)
        if is_chosen:
            axes.annotate(
                format_configuration(settings),
                (shares[-1], values[-1]),
                xytext=(0, 7),
                textcoords="offset points",
                fontsize=8,
                ha="right",
                color=color,
                parse_math=False,
            )
    axes.set_xscale("log")
    ticks = sorted({trial.share for trial in state.trials})
    axes.set_xticks(ticks, [f"{100 * share:.0f} %" for share in ticks])
    axes.minorticks_off()
    axes.set_xlabel("share of the full training", fontsize=8)
    axes.set_ylabel(f"dev {metric_name(state.trials)}", fontsize=8)
    title = f"{len(state.trials)} trials; each line is one configuration, and the chosen one is orange"
    set_title(figure, title)
    return figure


def _trials_by_configuration(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Group trials by configuration, each group sorted by duration, without trials that diverged."""
    groups: dict[str, list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: trial.rung_index):
        if trial.metric_value is not None:
            groups.setdefault(json.dumps(trial.settings), []).append(trial)
    return list(groups.values())
