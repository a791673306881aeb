"""Tuning: settings are searched within a time budget by successive halving, and the best ones train the final model."""

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

TUNE_FILE, BEST_FOLDER, TRIALS, TABLE = "tune.json", "best", "trials", "trials.csv"
REDUCTION = 3  # the best third of a rung enters the next one, which trains three times as long
RATE_FACTORS = (1.0, 1 / 3, 3.0)  # of the default learning rate, in the space that is searched by default
MAX_TRIALS = 81
DURATIONS = ("epochs", "max_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """Trials that train for the same share of the full duration."""

    share: float
    trials: int


def rungs_within(candidates: int, full_seconds: float, seconds: float) -> list[Rung]:
    """Return the rungs with the most trials that fit, the shortest first (Li et al. 2018, algorithm 1).

    One full training is kept back for the final model.

    Args:
        candidates: Number of configurations.
        full_seconds: Duration of a full training.
        seconds: All the time there is.

    >>> [(rung.share, rung.trials) for rung in rungs_within(9, 60, 600)]
    [(0.1111111111111111, 9), (0.3333333333333333, 3), (1.0, 1)]
    >>> [(rung.share, rung.trials) for rung in rungs_within(9, 60, 150)]
    [(1.0, 1)]
    """
    for first in range(min(candidates, MAX_TRIALS), 1, -1):
        counts = [first]
        while counts[-1] >= REDUCTION:
            counts.append(counts[-1] // REDUCTION)
        shares = [float(REDUCTION) ** -(len(counts) - 1 - place) for place in range(len(counts))]
        if full_seconds * (1 + sum(share * count for share, count in zip(shares, counts, strict=True))) <= seconds:
            return [Rung(share=share, trials=count) for share, count in zip(shares, counts, strict=True)]
    return [Rung(share=1.0, trials=1)]


def configurations(space: Mapping[str, Sequence[Json]], seed: int) -> list[dict[str, Json]]:
    """Return all combinations of the values, the first value of each setting first, the others shuffled by the seed."""
    combined = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    others = combined[1:]
    random.Random(seed).shuffle(others)
    return combined[:1] + others


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

    By successive halving many configurations train for a short time, and the best third of them continues for three
    times as long, up to the full duration. They are compared on dev; test is evaluated for the final model alone, which
    is in output_dir/best. The results have the trials under "tune". A search that was interrupted resumes.

    Args:
        task: Name of a task.
        data: As `data.source_of` takes it.
        output_dir: The folder of the search.
        time_budget: Of the whole search, final training included: "20m", "1h30m", or a number of minutes.
        space: Values to try by setting; None: the default learning rate, a third of it and three times it.
        model: A folder, or NAME[@REVISION] on the hub; "": the encoder that ships with Heedful.
        recipe: A .toml or .json file of settings.
        assignments: Texts such as "batch_size=16".
        overrides: Settings by path or short name.
        on_bad_row: "raise", or "skip" to set rows aside that cannot be read.
        reporter: Receives progress.

    Raises:
        HeedfulError: If the data, a setting or a value to try cannot be used.
    """
    folder, reporter = Path(output_dir), reporter or Reporter()
    minutes = parse_minutes(time_budget) if isinstance(time_budget, str) else float(time_budget)
    collected = finetune_overrides(overrides, model=model, recipe=recipe, assignments=assignments)
    search = _Search(task, data, folder, collected, on_bad_row, reporter)
    if not 0 < minutes < float("inf"):
        raise SettingError(f"time_budget is {time_budget}; expected minutes above 0", path="time_budget")
    _check_folder(folder)
    plan = search.plan({})
    if "dev" not in plan.survey.non_empty_splits:
        raise HeedfulError("trials are compared on dev, but there is no dev split: give a dev file or set dev_fraction")
    if plan.settings.train.time_budget is not None:
        raise SettingError("trials train for a share of the epochs: give epochs or max_steps", path="train.time_budget")
    space = dict(space or {"train.optimizer.lr": _rates(plan)})
    for name, values in space.items():
        search.check_values(name, values)
    if "method" in space:  # not every setting has an effect with every method
        for settings in configurations(space, 0):
            search.plan(settings)
    with lock_run(folder):
        state = search.begin({"task": task, "space": {name: list(values) for name, values in space.items()}}, minutes)
        best = search.run(state, configurations(space, plan.settings.train.seed))
        if best is None:
            return RunResult(output_dir=folder, status="interrupted", results={})
        reporter.message(f"the final model is trained with {_named(best['settings'])}")
        done = search.final(best)
        if done.status == "completed":
            state["chosen"] = best["settings"]
            write_file(folder / TUNE_FILE, state)
            write_file(folder / TABLE, _table(state))
            make_folder(folder / "plots")
            save_plot(folder / "plots" / "trials.png", plot_trials(state))
            done = replace(done, results=done.results | {"tune": state})
        return done


def _rates(plan: FinetunePlan) -> list[Json]:
    return [float(f"{factor * plan.settings.train.optimizer.lr:.2g}") for factor in RATE_FACTORS]


def _named(settings: Mapping[str, Json]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _check_folder(folder: Path) -> None:
    names = sorted(visible_names(folder) - {LOCK})
    if names and TUNE_FILE not in names:
        raise RunError(
            f"{folder} is no search of settings: it holds {', '.join(names[:3])}, but no {TUNE_FILE}; give another "
            "folder with --output"
        )


class _Search:
    """The trials of one folder."""

    def __init__(
        self, task: str, data: object, folder: Path, overrides: Overrides, on_bad_row: OnBadRow, reporter: Reporter
    ) -> None:
        self.task, self.data, self.folder = task, data, folder
        self.overrides, self.on_bad_row, self.reporter = overrides, on_bad_row, reporter

    def plan(self, values: Mapping[str, Json]) -> FinetunePlan:
        """Return the plan of a run with these values; fine-tuning is meant, unless a method is given."""
        return plan_finetune(self.task, self.data, overrides=self._with(values), on_bad_row=self.on_bad_row)

    def _with(self, values: Mapping[str, Json]) -> Overrides:
        return self.overrides.with_values({**self._method(values), **values})

    def _method(self, values: Mapping[str, Json]) -> dict[str, Json]:
        """Return method "finetune" where few labels would make a run choose between methods by itself."""
        named = "method" in values or self.overrides.mentions("method")
        return {} if named or check_task(self.task) != "classify" else {"method": "finetune"}

    def check_values(self, name: str, values: Sequence[Json]) -> None:
        """Raise a SettingError if a setting is also given by hand, or if one of its values cannot be used."""
        if len(values) < 1:
            raise SettingError(f"{name} has no values to try: give one or more", path=name)
        path = find_setting(FinetuneSettings, name)
        if path in self.overrides.resolve(self.plan({}).settings).sources:
            raise SettingError(f"{path} is set by hand, and values of it are to be tried: leave one out", path=path)
        for value in values:
            self.plan({name: value})

    def begin(self, facts: JsonObject, minutes: float) -> JsonObject:
        """Return the state in the folder, or a new one, after a full training was estimated by a few steps."""
        path = self.folder / TUNE_FILE
        if path.exists():
            state = read_run_json(path)
            if changed := [name for name in facts if state.get(name) != facts[name]]:
                raise RunError(
                    f"{self.folder} holds a search with another {' and '.join(changed)}: give another folder with "
                    "--output, or the same to resume it"
                )
            return state | {"minutes": minutes}
        estimate = dry_run(
            self.task, self.data, self.folder / BEST_FOLDER, overrides=self._with({}), on_bad_row=self.on_bad_row
        )
        state = facts | {"minutes": minutes, "full_seconds": round(estimate.seconds, 1), "trials": []}
        write_file(path, state)
        return state

    def run(self, state: JsonObject, candidates: list[dict[str, Json]]) -> JsonObject | None:
        """Run the trials that are left, rung after rung, and return the best one; None if a signal interrupted one."""
        seconds, full = 60 * state["minutes"], state["full_seconds"]
        rungs = rungs_within(len(candidates), full, seconds)
        skipped = len(candidates) - rungs[0].trials
        self.reporter.message(
            f"{rungs[0].trials} of {len(candidates)} configurations are tried, rungs: {len(rungs)}; a full training "
            f"takes about {full:.0f} s, without evaluations" + (f"; for {skipped} there is no time" if skipped else "")
        )
        entrants = candidates
        for place, rung in enumerate(rungs):
            finished: list[JsonObject] = []
            for settings in entrants[: rung.trials]:
                trial = self._recorded(state, place, settings)
                spent = sum(earlier["seconds"] for earlier in state["trials"])
                if trial is None and state["trials"] and spent + full * (1 + rung.share) > seconds:
                    self.reporter.message(f"the search ends after {spent:.0f} s, for the final training to fit")
                    return best_trial(state["trials"])
                if trial is None:
                    trial = self._trial(state, place, rung, settings)
                if trial is None:
                    return None
                finished.append(trial)
            ranked = sorted(finished, key=_rank, reverse=True)
            entrants = [trial["settings"] for trial in ranked]
        return best_trial(state["trials"])

    def _recorded(self, state: JsonObject, place: int, settings: Mapping[str, Json]) -> JsonObject | None:
        same = (trial for trial in state["trials"] if trial["rung"] == place and trial["settings"] == settings)
        return next(same, None)

    def _trial(self, state: JsonObject, place: int, rung: Rung, settings: dict[str, Json]) -> JsonObject | None:
        """Train and evaluate one configuration for a share of the duration, and record it."""
        began = time.monotonic()
        planned = self.plan(settings).settings
        train = planned.train
        duration: dict[str, Json] = {}
        if planned.method != "linear":
            duration = (
                {"train.epochs": train.epochs * rung.share}
                if train.epochs is not None
                else {"train.max_steps": max(1, round((train.max_steps or 1) * rung.share))}
            )
        name = f"{TRIALS}/{place}-{len([trial for trial in state['trials'] if trial['rung'] == place]):02}"
        brief: dict[str, Json] = {"eval_baseline": False, "seeds": 1}
        done = finetune(
            self.task, self.data, self.folder / name, overrides=self._with(settings | duration | brief),
            on_bad_row=self.on_bad_row, reporter=Reporter(), only_dev=True,
        )  # fmt: skip
        if done.status == "interrupted":
            return None
        metric, dev = done.results["metric"], done.results["splits"]["dev"]
        trial: JsonObject = {
            "rung": place,
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
        shown = format_metric(metric, trial["metric_value"])
        self.reporter.message(
            f"rung {place + 1}, {100 * rung.share:.0f} % of the training: {_named(settings)}: dev {metric} {shown} "
            f"({trial['seconds']:.0f} s)"
        )
        return trial

    def final(self, best: JsonObject) -> RunResult:
        """Train the final model for the full duration."""
        return finetune(
            self.task, self.data, self.folder / BEST_FOLDER, overrides=self._with(best["settings"]),
            on_bad_row=self.on_bad_row, reporter=self.reporter,
        )  # fmt: skip


def _rank(trial: JsonObject) -> tuple[float, float]:
    return trial["metric_value"], trial["tie_breaker"]


def best_trial(trials: Sequence[JsonObject]) -> JsonObject:
    """Return the best trial of the highest rung."""
    return max(trials, key=lambda trial: (trial["rung"], *_rank(trial)))


def ranked_trials(state: JsonObject) -> list[JsonObject]:
    """Return the trials, those that trained longest first, then the best."""
    return sorted(state["trials"], key=lambda trial: (trial["rung"], *_rank(trial)), reverse=True)


def _table(state: JsonObject) -> str:
    """Return the trials as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [*state["space"], "share of the training", "dev metric", "value", "low", "high", "seconds", "folder"]
    )
    for trial in ranked_trials(state):
        tried = [trial["settings"][name] for name in state["space"]]
        interval = trial["interval"] or {"low": "", "high": ""}
        scores = [trial["metric"], trial["metric_value"], interval["low"], interval["high"]]
        writer.writerow([*tried, trial["share"], *scores, trial["seconds"], trial["folder"]])
    return out.getvalue()


def plot_trials(state: JsonObject) -> Figure:
    """Plot the dev metric of each configuration over the share of the training; the chosen one is highlighted."""
    figure = new_figure(6.4, 3.8)
    axes = figure.add_subplot()
    style_axes(axes, grid="y")
    trials: Sequence[JsonObject] = state["trials"]
    for settings in {str(trial["settings"]): trial["settings"] for trial in trials}.values():
        own = sorted(
            (trial for trial in trials if trial["settings"] == settings), key=lambda trial: float(trial["rung"])
        )
        chosen = settings == state.get("chosen")
        shares, values = [trial["share"] for trial in own], [trial["metric_value"] for trial in own]
        axes.plot(shares, values, "o-", color=ORANGE if chosen else GREY, lw=1.5 if chosen else 0.8, ms=4, zorder=3)
        if chosen:
            label = _named(settings)
            axes.annotate(label, (shares[-1], values[-1]), xytext=(0, 7), textcoords="offset points", fontsize=8,
                          ha="right", color=BLUE, parse_math=False)  # fmt: skip
    axes.set_xscale("log")
    ticks = sorted({trial["share"] for trial in trials})
    axes.set_xticks(ticks, [f"{100 * share:.0f} %" for share in ticks])
    axes.minorticks_off()
    axes.set_xlabel("share of the full training", fontsize=8)
    axes.set_ylabel(f"dev {trials[0]['metric']}", fontsize=8)
    set_title(figure, f"{len(trials)} trials; lines join those of one configuration, and the chosen one is orange")
    return figure
