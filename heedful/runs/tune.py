"""`heedful tune`: a search for the best settings by successive halving within a time budget, and the final training."""

from __future__ import annotations

import csv
import io
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from heedful.atomic_io import make_folder
from heedful.data.bad_rows import OnBadRow
from heedful.errors import HeedfulError, RunError, SettingError
from heedful.runs.finetune.dry_run import dry_run
from heedful.runs.finetune.plan import FinetunePlan, plan_finetune
from heedful.runs.finetune.run import finetune
from heedful.runs.finetune.settings import FinetuneSettings, check_task, finetune_overrides
from heedful.runs.overrides import Overrides, find_setting
from heedful.runs.plots.style import BLUE, GREY, ORANGE, new_figure, save_plot, set_title, style_axes
from heedful.runs.results import JsonObject, RunResult
from heedful.runs.run_folder import read_run_json, visible_names, write_file
from heedful.runs.scoring import tie_breaker
from heedful.tasks.metrics import format_metric
from heedful.toml_json import Json
from heedful.train.fit import Reporter
from heedful.train.run_lock import LOCK, lock_run
from heedful.train.settings import parse_minutes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TUNE_FILE = "tune.json"  # state of the search
BEST_FOLDER = "best"  # folder of the final run
TRIALS = "trials"  # folder of the runs of trials
TABLE = "trials.csv"
REDUCTION = 3  # the best 1 / REDUCTION of a rung enters the next rung, which trains REDUCTION times as long
LR_FACTORS = (1.0, 1 / 3, 3.0)  # multiples of the default learning rate in the default search space
MAX_TRIALS = 81  # maximum trials in the first rung


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """Trials that train for the same share of the full duration."""

    share: float  # share of the full duration, above 0 and at most 1
    trials: int  # how many trials


def rungs_within(candidates: int, full_seconds: float, seconds: float) -> list[Rung]:
    """Return the rungs with the most trials that fit into a time, the shortest first (Li et al. 2018, algorithm 1).

    Time for the full training of the final model is reserved.

    Args:
        candidates: How many configurations there are.
        full_seconds: Duration of a full training, in seconds.
        seconds: Time for the whole search, in seconds.

    >>> [(rung.share, rung.trials) for rung in rungs_within(9, 60, 600)]
    [(0.1111111111111111, 9), (0.3333333333333333, 3), (1.0, 1)]
    >>> [(rung.share, rung.trials) for rung in rungs_within(9, 60, 150)]
    [(1.0, 1)]
    """
    for first_trials in range(min(candidates, MAX_TRIALS), 1, -1):
        counts = [first_trials]
        while counts[-1] >= REDUCTION:
            counts.append(counts[-1] // REDUCTION)
        last = len(counts) - 1
        rungs = [Rung(share=float(REDUCTION) ** (rung - last), trials=count) for rung, count in enumerate(counts)]
        if full_seconds * (1 + sum(rung.share * rung.trials for rung in rungs)) <= seconds:
            return rungs
    return [Rung(share=1.0, trials=1)]


def configurations(space: Mapping[str, Sequence[Json]], seed: int) -> list[dict[str, Json]]:
    """Return all combinations of values. The combination of all first values comes first, and the rest is shuffled.

    Args:
        space: Values by setting.
        seed: Seed of the order.
    """
    combinations = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    rest = combinations[1:]
    random.Random(seed).shuffle(rest)
    return combinations[:1] + rest


def tune(
    task: str,
    data: object,
    output_dir: str | Path,
    *,
    time_budget: float | str,
    space: Mapping[str, Sequence[Json]] | None = None,
    model: str | Path = "",
    recipe: str | Path | Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, object] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
) -> RunResult:
    """Search settings of fine-tuning within a time budget, and train the final model with the best ones.

    The search is successive halving. Many configurations are trained for a short time. The best third is trained again
    for three times as long, and so on up to the full duration. Configurations are compared on dev. Only the final
    model, in output_dir/best, is evaluated on test. The entry "tune" of the results has the trials. The same call
    resumes a search that was interrupted.

    Args:
        task: Name of a task.
        data: Labelled data in any form that `heedful.data.read` accepts.
        output_dir: The folder of the search.
        time_budget: Time for the whole search, including the final training: "20m", "1h30m", or minutes as a number.
        space: Values to try by setting. If None, the default learning rate times 1, 1/3 and 3.
        model: A folder, or NAME[@REVISION] on the hub. If "", the encoder that ships with Heedful.
        recipe: A .toml or .json file of settings.
        assignments: Texts such as "batch_size=16".
        overrides: Settings by path or short name.
        on_bad_row: "raise", or "skip" to leave out rows that cannot be read.
        reporter: Receives progress events. If None, they are ignored.

    Raises:
        HeedfulError: If the data, a setting or a value to try cannot be used.
    """
    folder = Path(output_dir)
    reporter = reporter or Reporter()
    minutes = parse_minutes(time_budget) if isinstance(time_budget, str) else float(time_budget)
    collected = finetune_overrides(overrides, model=model, recipe=recipe, assignments=assignments)
    search = _Search(task, data, folder, collected, on_bad_row, reporter)
    if not 0 < minutes < float("inf"):
        raise SettingError(f"time_budget is {time_budget}; expected minutes above 0", path="time_budget")
    _check_folder(folder)
    plan = search.plan({})
    if "dev" not in plan.stats.non_empty_splits:
        raise HeedfulError("trials are compared on dev, but there is no dev split: give a dev file or set dev_fraction")
    if plan.settings.train.time_budget is not None:
        raise SettingError("trials train for a share of the epochs: give epochs or max_steps", path="train.time_budget")
    space = dict(space or {"train.optimizer.lr": _default_lrs(plan)})
    for name, values in space.items():
        search.check_values(name, values)
    if "method" in space:  # a setting that has no effect with a method is refused
        for settings in configurations(space, 0):
            search.plan(settings)
    with lock_run(folder):
        state = search.begin({"task": task, "space": {name: list(values) for name, values in space.items()}}, minutes)
        best = search.run(state, configurations(space, plan.settings.train.seed))
        if best is None:
            return RunResult(output_dir=folder, status="interrupted", results={})
        reporter.message(f"the final model is trained with {_format_settings(best['settings'])}")
        result = search.train_final(best)
        if result.status == "completed":
            state["chosen"] = best["settings"]
            write_file(folder / TUNE_FILE, state)
            write_file(folder / TABLE, _trials_csv(state))
            make_folder(folder / "plots")
            save_plot(folder / "plots" / "trials.png", plot_trials(state))
            result = replace(result, results=result.results | {"tune": state})
        return result


def _default_lrs(plan: FinetunePlan) -> list[Json]:
    """Return the learning rates to try, rounded to two digits."""
    return [float(f"{factor * plan.settings.train.optimizer.lr:.2g}") for factor in LR_FACTORS]


def _format_settings(settings: Mapping[str, Json]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _check_folder(folder: Path) -> None:
    """Raise a RunError for a folder that has files but no state of a search."""
    names = sorted(visible_names(folder) - {LOCK})
    if names and TUNE_FILE not in names:
        raise RunError(
            f"{folder} is not the folder of a search: it holds {', '.join(names[:3])}, but no {TUNE_FILE}; give "
            "another folder with --output"
        )


class _Search:
    """A search in a folder: its trials, and the training of the final model."""

    def __init__(
        self, task: str, data: object, folder: Path, overrides: Overrides, on_bad_row: OnBadRow, reporter: Reporter
    ) -> None:
        self.task, self.data, self.folder = task, data, folder
        self.overrides, self.on_bad_row, self.reporter = overrides, on_bad_row, reporter

    def plan(self, values: Mapping[str, Json]) -> FinetunePlan:
        """Return the plan of a run with these values by setting."""
        return plan_finetune(self.task, self.data, overrides=self._overrides_with(values), on_bad_row=self.on_bad_row)

    def _overrides_with(self, values: Mapping[str, Json]) -> Overrides:
        """Return the settings given by hand, overridden by values.

        The method of classification is "finetune" unless it is set, since a run with few labels would otherwise compare
        methods.
        """
        is_method_set = "method" in values or self.overrides.mentions("method")
        if not is_method_set and check_task(self.task) == "classify":
            values = {"method": "finetune", **values}
        return self.overrides.with_values(values)

    def check_values(self, name: str, values: Sequence[Json]) -> None:
        """Raise a SettingError if a setting of the search space is also set by hand, or if a value cannot be used."""
        if len(values) < 1:
            raise SettingError(f"{name} has no values to try: give one or more", path=name)
        path = find_setting(FinetuneSettings, name)
        if path in self.overrides.resolve(self.plan({}).settings).sources:
            raise SettingError(f"{path} is set by hand, and values of it are to be tried: leave one out", path=path)
        for value in values:
            self.plan({name: value})

    def begin(self, facts: JsonObject, minutes: float) -> JsonObject:
        """Return the state of the search in the folder. A new search first estimates the duration of a full training.

        Args:
            facts: Entries of the state that must be equal to resume a search.
            minutes: Time for the whole search.

        Raises:
            RunError: If the folder has a search with other facts.
        """
        path = self.folder / TUNE_FILE
        if path.exists():
            state = read_run_json(path)
            if changed := [name for name in facts if state.get(name) != facts[name]]:
                names = " and ".join(changed)
                raise RunError(
                    f"{self.folder} holds a search with another {names}: give another folder with --output, or the "
                    f"same {names} to resume it"
                )
            return state | {"minutes": minutes}
        estimate = dry_run(
            self.task,
            self.data,
            self.folder / BEST_FOLDER,
            overrides=self._overrides_with({}),
            on_bad_row=self.on_bad_row,
        )
        state = facts | {"minutes": minutes, "full_seconds": round(estimate.seconds, 1), "trials": []}
        write_file(path, state)
        return state

    def run(self, state: JsonObject, candidates: list[dict[str, Json]]) -> JsonObject | None:
        """Run the missing trials, rung by rung. Return the best trial, or None if a signal interrupted a trial.

        Args:
            state: State of the search, to which trials are added.
            candidates: Values by setting, for each configuration.
        """
        seconds = 60 * state["minutes"]
        full_seconds = state["full_seconds"]
        rungs = rungs_within(len(candidates), full_seconds, seconds)
        skipped = len(candidates) - rungs[0].trials
        self.reporter.message(
            f"{rungs[0].trials} of {len(candidates)} configurations are tried, rungs: {len(rungs)}; a full training "
            f"takes about {full_seconds:.0f} s, without evaluations"
            + (f"; for {skipped} there is no time" if skipped else "")
        )
        entrants = candidates
        for index, rung in enumerate(rungs):
            trials: list[JsonObject] = []
            for settings in entrants[: rung.trials]:
                trial = _find_trial(state, index, settings)
                spent = sum(earlier["seconds"] for earlier in state["trials"])
                if trial is None and state["trials"] and spent + full_seconds * (1 + rung.share) > seconds:
                    self.reporter.message(f"the search ends after {spent:.0f} s, for the final training to fit")
                    return best_trial(state["trials"])
                if trial is None:
                    trial = self._run_trial(state, index, rung, settings)
                if trial is None:
                    return None
                trials.append(trial)
            entrants = [trial["settings"] for trial in sorted(trials, key=_rank, reverse=True)]
        return best_trial(state["trials"])

    def _run_trial(self, state: JsonObject, index: int, rung: Rung, settings: dict[str, Json]) -> JsonObject | None:
        """Train one configuration for the share of a rung, evaluate it, and add the trial to the state.

        Returns:
            The trial, or None if a signal interrupted it.
        """
        began = time.monotonic()
        full_settings = self.plan(settings).settings
        train = full_settings.train
        duration: dict[str, Json] = {}
        if full_settings.method != "linear" and train.epochs is not None:
            duration = {"train.epochs": train.epochs * rung.share}
        elif full_settings.method != "linear":
            duration = {"train.max_steps": max(1, round((train.max_steps or 1) * rung.share))}
        trial_index = sum(trial["rung"] == index for trial in state["trials"])
        name = f"{TRIALS}/{index}-{trial_index:02}"
        trial_only: dict[str, Json] = {"eval_baseline": False, "seeds": 1}
        result = finetune(
            self.task,
            self.data,
            self.folder / name,
            overrides=self._overrides_with(settings | duration | trial_only),
            on_bad_row=self.on_bad_row,
            reporter=Reporter(),
            only_dev=True,
        )
        if result.status == "interrupted":
            return None
        metric = result.results["metric"]
        dev = result.results["splits"]["dev"]
        trial: JsonObject = {
            "rung": index,
            "share": rung.share,
            "settings": settings,
            "folder": name,
            "metric": metric,
            "metric_value": dev["numbers"][metric],
            "tie_breaker": tie_breaker(dev["numbers"], metric),
            "interval": dev["intervals"].get(metric),
            "seconds": round(time.monotonic() - began, 1),
        }
        state["trials"].append(trial)
        write_file(self.folder / TUNE_FILE, state)
        self.reporter.message(
            f"rung {index + 1}, {100 * rung.share:.0f} % of the training: {_format_settings(settings)}: dev {metric} "
            f"{format_metric(metric, trial['metric_value'])} ({trial['seconds']:.0f} s)"
        )
        return trial

    def train_final(self, best: JsonObject) -> RunResult:
        """Train the final model for the full duration with the settings of the best trial."""
        return finetune(
            self.task,
            self.data,
            self.folder / BEST_FOLDER,
            overrides=self._overrides_with(best["settings"]),
            on_bad_row=self.on_bad_row,
            reporter=self.reporter,
        )


def _find_trial(state: JsonObject, index: int, settings: Mapping[str, Json]) -> JsonObject | None:
    """Return the trial of a rung with these settings, or None before it exists."""
    trials: Sequence[JsonObject] = state["trials"]
    return next((trial for trial in trials if trial["rung"] == index and trial["settings"] == settings), None)


def _rank(trial: JsonObject) -> tuple[float, float]:
    """Return the sort key of a trial within its rung: (metric, tie breaker), larger is better."""
    return trial["metric_value"], trial["tie_breaker"]


def best_trial(trials: Sequence[JsonObject]) -> JsonObject:
    """Return the best trial of the highest rung."""
    return max(trials, key=lambda trial: (trial["rung"], *_rank(trial)))


def ranked_trials(state: JsonObject) -> list[JsonObject]:
    """Return the trials, sorted by decreasing duration, and the best first among trials of a rung."""
    return sorted(state["trials"], key=lambda trial: (trial["rung"], *_rank(trial)), reverse=True)


def _trials_csv(state: JsonObject) -> str:
    """Return the trials as CSV, ranked."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [*state["space"], "share of the training", "dev metric", "value", "low", "high", "seconds", "folder"]
    )
    for trial in ranked_trials(state):
        setting_values = [trial["settings"][name] for name in state["space"]]
        interval = trial["interval"] or {"low": "", "high": ""}
        scores = [trial["metric"], trial["metric_value"], interval["low"], interval["high"]]
        writer.writerow([*setting_values, trial["share"], *scores, trial["seconds"], trial["folder"]])
    return out.getvalue()


def plot_trials(state: JsonObject) -> Figure:
    """Plot the dev metric of each configuration over the share of the training, with the chosen one highlighted."""
    figure = new_figure(6.4, 3.8)
    axes = figure.add_subplot()
    style_axes(axes, grid="y")
    trials: Sequence[JsonObject] = state["trials"]
    for settings in {str(trial["settings"]): trial["settings"] for trial in trials}.values():
        same_settings = [trial for trial in trials if trial["settings"] == settings]
        same_settings.sort(key=lambda trial: float(trial["rung"]))
        is_chosen = settings == state.get("chosen")
        color, line_width = (ORANGE, 1.5) if is_chosen else (GREY, 0.8)
        shares = [trial["share"] for trial in same_settings]
        values = [trial["metric_value"] for trial in same_settings]
        axes.plot(shares, values, "o-", color=color, lw=line_width, ms=4, zorder=3)
        if is_chosen:
            axes.annotate(
                _format_settings(settings),
                (shares[-1], values[-1]),
                xytext=(0, 7),
                textcoords="offset points",
                fontsize=8,
                ha="right",
                color=BLUE,
                parse_math=False,
            )
    axes.set_xscale("log")
    ticks = sorted({trial["share"] for trial in trials})
    axes.set_xticks(ticks, [f"{100 * share:.0f} %" for share in ticks])
    axes.minorticks_off()
    axes.set_xlabel("share of the full training", fontsize=8)
    axes.set_ylabel(f"dev {trials[0]['metric']}", fontsize=8)
    set_title(figure, f"{len(trials)} trials; lines join those of one configuration, and the chosen one is orange")
    return figure
