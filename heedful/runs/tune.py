"""`heedful tune`: a search for the best settings by successive halving within a time budget, and the final training."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from heedful.atomic_io import make_folder
from heedful.data.bad_rows import OnBadRow
from heedful.errors import HeedfulError, RunError, SettingError
from heedful.runs.finetune.dry_run import dry_run
from heedful.runs.finetune.plan import FinetunePlan, OpenedData, plan_finetune
from heedful.runs.finetune.run import finetune
from heedful.runs.finetune.settings import FinetuneSettings, check_task, finetune_overrides
from heedful.runs.overrides import Overrides, find_setting, flatten_settings
from heedful.runs.plots.style import save_plot
from heedful.runs.results import JsonObject, RunResult
from heedful.runs.run_folder import visible_names, write_file
from heedful.runs.scoring import tie_breaker
from heedful.runs.trials import (
    MAX_TRIALS,
    OTHER_FOLDER,
    Configuration,
    SearchState,
    Trial,
    best_trial,
    configurations,
    format_configuration,
    plot_trials,
    ranked_trials,
    read_search_state,
    rungs_within,
    trials_csv,
)
from heedful.settings import to_mapping
from heedful.tasks.metrics import format_metric
from heedful.toml_json import Json, to_plain_data
from heedful.train.fit import Reporter
from heedful.train.run_lock import LOCK, lock_run
from heedful.train.settings import TrainSettings, parse_minutes
from heedful.train.trainer import DivergedError

TUNE_FILE = "tune.json"  # state of the search
BEST_FOLDER = "best"  # folder of the final run
TRIALS_FOLDER = "trials"  # folder of the runs of trials
TRIALS_CSV = "trials.csv"
SAME_DURATION = ("seeds", "train.optimizer", "train.schedule", "train.seed")  # do not change the seconds of a seed
LR_FACTORS = (1.0, 1 / 3, 3.0)  # multiples of the default learning rate in the default search space


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
    for three times as long, and so on up to the full duration. Configurations are compared on dev. A configuration
    whose training diverges is the worst. Only the final model, in output_dir/best, is evaluated on test.
    `results["tune"]` lists the trials.

    The same call resumes a search that was interrupted. A different time budget then changes when trials stop, but not
    which trials are planned.

    Args:
        task: Name of a task.
        data: Labelled data in any form that `heedful.data.read` accepts.
        output_dir: The folder of the search.
        time_budget: Time for the whole search, including the final training: "20m", "1h30m", or minutes as a number. If
            it is too short to compare full trainings, the final model is trained with the first values of `space`.
        space: Mapping from the name of a setting to the values to try. If None or {}, the default learning rate times
            1, 1/3 and 3.
        model: A folder, or NAME[@REVISION] on the hub. If "", the encoder that ships with Heedful.
        recipe: A .toml or .json file of settings.
        assignments: Strings such as "batch_size=16".
        overrides: Settings by path or short name.
        on_bad_row: "raise", or "skip" to leave out rows that cannot be read.
        reporter: Receives progress events. If None, they are ignored.

    Raises:
        HeedfulError: If the data, a setting or a value to try cannot be used, or if training diverges with all
            configurations that were tried.
        RunError: If the folder has other files, or a search with another task, space, data or other settings.
    """
    folder = Path(output_dir)
    minutes = _minutes(time_budget)
    _check_folder(folder)
    collected = finetune_overrides(overrides, model=model, recipe=recipe, assignments=assignments)
    search = _Search(task, data, folder, collected, on_bad_row, reporter or Reporter())
    search.set_space(space or {})
    with lock_run(folder):
        search.begin(minutes)
        chosen = search.choose()
        if chosen is None:
            return RunResult(output_dir=folder, status="interrupted", results={})
        search.reporter.message(f"the final model is trained with {format_configuration(chosen)}")
        result = search.train_final(chosen)
        if result.status == "completed":
            search.write_trials()
            result = replace(result, results=result.results | {"tune": search.state.to_json()})
        return result


def _minutes(time_budget: float | str) -> float:
    """Return a time budget in minutes. Raise a SettingError if it is not above 0 and finite."""
    minutes = parse_minutes(time_budget) if isinstance(time_budget, str) else float(time_budget)
    if not 0 < minutes < math.inf:
        raise SettingError(f"time_budget is {time_budget}; expected minutes above 0", path="time_budget")
    return minutes


def _check_folder(folder: Path) -> None:
    """Raise a RunError for a folder that has files but no state of a search."""
    names = sorted(visible_names(folder) - {LOCK})
    if names and TUNE_FILE not in names:
        content = ", ".join(names[:3])
        raise RunError(
            f"{folder} is not the folder of a search: it holds {content}, but no {TUNE_FILE}; give {OTHER_FOLDER}"
        )


def _default_lrs(train: TrainSettings) -> list[Json]:
    """Return the learning rates to try, rounded to two significant digits."""
    return [float(f"{factor * train.optimizer.lr:.2g}") for factor in LR_FACTORS]


class _Search:
    """A search in a folder: its trials, and the training of the final model.

    `set_space` checks the values to try, and `begin` provides the state. Call them first, in this order.
    """

    space: dict[str, list[Json]]
    state: SearchState

    def __init__(
        self, task: str, data: object, folder: Path, overrides: Overrides, on_bad_row: OnBadRow, reporter: Reporter
    ) -> None:
        self.began = time.monotonic()
        self.earlier_seconds = 0.0  # time that earlier calls have taken
        self.task = check_task(task)
        self.data = data
        self.folder = folder
        self.overrides = overrides
        self.on_bad_row = on_bad_row
        self.reporter = reporter
        self.opened = OpenedData(self.task, data, on_bad_row)  # read once for all plans
        self.paths: dict[str, str] = {}  # full path of each setting of the space, by its name there
        self.estimates: dict[str, float] = {}  # seconds of a full training, by the values that change them
        self.base = self.plan({})
        if "dev" not in self.base.stats.non_empty_splits:
            message = "trials are compared on dev, but there is no dev split: give a dev file or set dev_fraction"
            raise HeedfulError(message)
        _check_duration(self.base)

    # -- settings -------------------------------------------------------------------------------------------------

    def plan(self, configuration: Configuration) -> FinetunePlan:
        """Return the plan of a full training with a configuration, and with a dev split, as trials have."""
        return plan_finetune(
            self.task,
            self.data,
            overrides=self._overrides_with(configuration),
            on_bad_row=self.on_bad_row,
            opened=self.opened,
            needs_dev=True,
        )

    def _overrides_with(
        self, configuration: Configuration, trial_overrides: Mapping[str, Json] | None = None
    ) -> Overrides:
        """Return the settings given by hand, overridden by a configuration and then by the settings of a trial.

        The method of classification is "finetune" unless it is set, since a run with few labels would otherwise compare
        methods.

        Args:
            configuration: Values by name of a setting, as in the space.
            trial_overrides: Values by full path.
        """
        values = dict(flatten_settings({self.paths[name]: value for name, value in configuration.items()}))
        is_method_set = "method" in values or self.overrides.mentions("method")
        if not is_method_set and self.task == "classify":
            values["method"] = "finetune"
        return self.overrides.with_values(values | dict(trial_overrides or {}))

    def set_space(self, space: Mapping[str, Sequence[Json]]) -> None:
        """Set the values to try after checking them. An empty space becomes the default one.

        Raises:
            SettingError: If a setting is unknown, is given twice or by hand, or has no values, or if a configuration
                cannot be used.
        """
        by_hand = self.overrides.resolve(self.base.settings)
        self.space = {}
        for name, values in (space or {"train.optimizer.lr": _default_lrs(self.base.settings.train)}).items():
            path = find_setting(FinetuneSettings, name)
            if len(values) < 1:
                raise SettingError(f"{name} has no values to try: give one or more", path=path)
            if by_hand.has(path):
                message = f"{path} is set by hand, and values of it are to be tried: leave one out"
                raise SettingError(message, path=path)
            for earlier_name, earlier_path in self.paths.items():
                if f"{path}.".startswith(f"{earlier_path}.") or f"{earlier_path}.".startswith(f"{path}."):
                    message = f"values to try are given for {earlier_name} and for {name}, which both set {path}"
                    raise SettingError(f"{message}: leave one out", path=path, code="duplicate")
            self.paths[name] = path
            self.space[name] = [to_plain_data(value, (name,), "space") for value in values]
        # settings may exclude each other, and plan() refuses those that the method ignores, so check combinations
        for configuration in configurations(self.space, self.base.settings.train.seed)[:MAX_TRIALS]:
            _check_duration(self.plan(configuration))

    @property
    def final_seeds(self) -> int:
        """How many seeds the final training has; the largest number to try if numbers of seeds are tried."""
        tried = [value for name, path in self.paths.items() if path == "seeds" for value in self.space[name]]
        return max(value for value in tried or [self.base.settings.seeds] if isinstance(value, int))

    # -- state ----------------------------------------------------------------------------------------------------

    def begin(self, minutes: float) -> None:
        """Load the state to resume, or create it.

        A new search first estimates the duration of a full training with the first values of the space.

        Args:
            minutes: Time for the whole search.

        Raises:
            RunError: If the folder has another search, or one that another time budget cannot change any more.
        """
        path = self.folder / TUNE_FILE
        settings, data = to_mapping(self.base.settings), _hash_examples(self.base)
        first = {name: values[0] for name, values in self.space.items()}
        if path.exists():
            self.state = read_search_state(path)
            self._check_same_search(settings, data, minutes)
            self.state.minutes = minutes
            self.earlier_seconds = self.state.seconds
            self.estimates[json.dumps(self._duration_values(first))] = self.state.full_seconds
            return
        full_seconds = self._full_seconds(first)
        num_candidates = math.prod(map(len, self.space.values()))
        self.state = SearchState(
            task=self.task,
            space=self.space,
            settings=settings,
            data=data,
            minutes=minutes,
            full_seconds=full_seconds,
            rungs=rungs_within(num_candidates, full_seconds, 60 * minutes - self._spent(), self.final_seeds),
            trials=[],
            seconds=0.0,
        )
        self._save()

    def _check_same_search(self, settings: JsonObject, data: str, minutes: float) -> None:
        """Raise a RunError if the stored state is of another search.

        Args:
            settings: Settings that all trials share.
            data: Hash of the examples.
            minutes: Time for the whole search.
        """
        state = self.state
        differences = []
        if state.task != self.task:
            differences.append("another task")
        if state.space != self.space:
            differences.append("another space")
        if changed := _changed_settings(state.settings, settings):
            more = " and more" if changed[4:] else ""
            differences.append(f"other settings ({', '.join(changed[:4])}{more})")
        if state.data != data:
            differences.append("other data")
        if differences:
            raise RunError(
                f"{self.folder} holds a search with {' and '.join(differences)}: give {OTHER_FOLDER}, or the same "
                "task, values to try, settings and data to resume it"
            )
        if state.chosen is not None and state.minutes != minutes:
            raise RunError(
                f"{self.folder} holds a search whose trials are finished, so another time budget would change nothing: "
                f"give {state.minutes:g} minutes to resume it, or {OTHER_FOLDER}"
            )

    def _duration_values(self, configuration: Configuration) -> Configuration:
        """Return the values of a configuration that may change the duration of a training."""
        return {name: value for name, value in configuration.items() if not self.paths[name].startswith(SAME_DURATION)}

    def _full_seconds(self, configuration: Configuration) -> float:
        """Return the estimated seconds of a full training with a configuration, by a dry run if none is known yet."""
        values = self._duration_values(configuration)
        key = json.dumps(values)
        if key not in self.estimates:
            estimate = dry_run(
                self.task,
                self.data,
                self.folder / BEST_FOLDER,
                overrides=self._overrides_with(values),
                on_bad_row=self.on_bad_row,
            )
            self.estimates[key] = round(estimate.seconds, 1)
        return self.estimates[key]

    def _has_time(self, trial_seconds: float, final_seconds: float) -> bool:
        """Return whether there is time for a trial and the final training, given the seconds of each of its seeds."""
        return self._spent() + trial_seconds + self.final_seeds * final_seconds <= 60 * self.state.minutes

    def _fits(self, configuration: Configuration, share: float, trials: Sequence[Trial]) -> bool:
        """Return whether there is time for another trial of a rung, and for the final training with the slowest one.

        Args:
            configuration: The configuration of the trial.
            share: Share of the full duration.
            trials: The finished trials of the rung.
        """
        seconds = self._full_seconds(configuration)
        slowest = max([seconds, *(self._full_seconds(trial.settings) for trial in trials)])
        return self._has_time(share * seconds, slowest)

    def _spent(self) -> float:
        """Return the seconds that the search has taken, over all calls."""
        return self.earlier_seconds + time.monotonic() - self.began

    def _save(self) -> None:
        self.state.seconds = round(self._spent(), 1)
        write_file(self.folder / TUNE_FILE, self.state.to_json())

    # -- trials ---------------------------------------------------------------------------------------------------

    def choose(self) -> Configuration | None:
        """Return the configuration of the final model, after the missing trials.

        Returns:
            The configuration, or None if a signal interrupted a trial.

        Raises:
            RunError: If training diverged in all trials.
        """
        state = self.state
        if state.chosen is None:
            candidates = configurations(state.space, self.base.settings.train.seed)
            self._report_schedule(candidates)
            if not self._run_trials(candidates):
                return None
            best = best_trial(state.trials)
            if state.trials and best is None:
                example = format_configuration(state.trials[0].settings)
                raise RunError(
                    f"training diverged with every configuration that was tried, such as {example}: try other values, "
                    f"such as lower learning rates, with {OTHER_FOLDER}"
                )
            state.chosen = candidates[0] if best is None else best.settings
            self._save()
        return state.chosen

    def _report_schedule(self, candidates: Sequence[Configuration]) -> None:
        """Report how many configurations are tried, and the duration of a full training."""
        rungs = self.state.rungs
        duration = f"a full training takes about {self.state.full_seconds:.0f} s, without evaluations"
        if self.final_seeds > 1:
            duration += f", and the final model is trained with {self.final_seeds} seeds"
        if not rungs:
            reason = "there is no time for trials" if len(candidates) > 1 else "there is only one configuration"
            self.reporter.message(f"{reason}, so nothing is compared; {duration}")
            return
        skipped = len(candidates) - rungs[0].num_trials
        suffix = f"; for {skipped} there is no time" if skipped else ""
        self.reporter.message(
            f"{rungs[0].num_trials} of {len(candidates)} configurations are tried, rungs: {len(rungs)}; "
            f"{duration}{suffix}"
        )

    def _run_trials(self, candidates: Sequence[Configuration]) -> bool:
        """Run the missing trials, rung by rung, while there is time. Return False if a signal interrupted a trial.

        In the first rung, configurations whose training takes too long are left out.
        """
        state = self.state
        entrants = candidates
        for rung_index, rung in enumerate(state.rungs):
            trials: list[Trial] = []
            for configuration in entrants[: rung.num_trials]:
                trial = state.find_trial(rung_index, configuration)
                if trial is None:
                    fastest = min(self.estimates.values())
                    is_time_left = self._has_time(rung.share * fastest, fastest)
                    fits = is_time_left and self._fits(configuration, rung.share, trials)
                    if is_time_left and not fits and rung_index == 0:
                        full = f"a full training takes about {self._full_seconds(configuration):.0f} s"
                        self.reporter.message(f"{format_configuration(configuration)} is left out, since {full}")
                        continue
                    if not fits:
                        spent = f"{self._spent():.0f} s"
                        self.reporter.message(f"stopping the search after {spent} to leave time for the final training")
                        return True
                    trial = self._run_trial(rung_index, configuration)
                if trial is None:
                    return False
                trials.append(trial)
            entrants = [trial.settings for trial in ranked_trials(trials) if trial.metric_value is not None]
        return True

    def _run_trial(self, rung_index: int, configuration: Configuration) -> Trial | None:
        """Train one configuration for the share of a rung, evaluate it, and add the trial to the state.

        Returns:
            The trial, or None if a signal interrupted it.
        """
        began = time.monotonic()
        share = self.state.rungs[rung_index].share
        trial_index = sum(trial.rung_index == rung_index for trial in self.state.trials)
        name = f"{TRIALS_FOLDER}/{rung_index}-{trial_index:02}"
        scores: JsonObject = {}
        try:
            result = finetune(
                self.task,
                self.data,
                self.folder / name,
                overrides=self._overrides_with(configuration, self._trial_overrides(configuration, share)),
                on_bad_row=self.on_bad_row,
                reporter=Reporter(),
                only_dev=True,
            )
        except DivergedError:
            outcome = "training diverged"
        else:
            if result.status == "interrupted":
                self._save()
                return None
            scores = _dev_scores(result.results)
            outcome = f"dev {scores['metric']} {format_metric(scores['metric'], scores['metric_value'])}"
        seconds = round(time.monotonic() - began, 1)
        trial = Trial(
            rung_index=rung_index, share=share, settings=configuration, folder=name, seconds=seconds, **scores
        )
        self.state.trials.append(trial)
        self._save()
        self.reporter.message(
            f"rung {rung_index + 1}, {100 * share:.0f} % of the training: {format_configuration(configuration)}: "
            f"{outcome} ({seconds:.0f} s)"
        )
        return trial

    def _trial_overrides(self, configuration: Configuration, share: float) -> dict[str, Json]:
        """Return the settings of a trial by full path: a share of the duration, one seed, no folds and no baseline."""
        settings = self.plan(configuration).settings
        train = settings.train
        overrides: dict[str, Json] = {"eval_baseline": False, "seeds": 1, "folds": 0}
        if settings.method == "linear":  # trains no weights by steps
            return overrides
        if train.epochs is not None:
            return overrides | {"train.epochs": train.epochs * share}
        assert train.max_steps is not None, "a time budget is refused"
        return overrides | {"train.max_steps": max(1, round(train.max_steps * share))}

    # -- the final model ------------------------------------------------------------------------------------------

    def train_final(self, configuration: Configuration) -> RunResult:
        """Train the final model for the full duration."""
        return finetune(
            self.task,
            self.data,
            self.folder / BEST_FOLDER,
            overrides=self._overrides_with(configuration),
            on_bad_row=self.on_bad_row,
            reporter=self.reporter,
        )

    def write_trials(self) -> None:
        """Write the table and the plot of the trials, if there are trials."""
        if self.state.trials:
            write_file(self.folder / TRIALS_CSV, trials_csv(self.state))
            make_folder(self.folder / "plots")
            save_plot(self.folder / "plots" / "trials.png", plot_trials(self.state))


def _check_duration(plan: FinetunePlan) -> None:
    """Raise a SettingError if trials cannot train for a share of the full duration.

    A share of a time budget depends on the machine's load, and the method "auto" trains with several durations.
    """
    if plan.settings.method == "auto":
        message = 'method is "auto", which compares methods itself: name the methods to try, as in --try'
        raise SettingError(f"{message} method=contrastive,finetune", path="method")
    if (time_budget := plan.settings.train.time_budget) is not None:
        message = f"train.time_budget is {time_budget}, but trials train for a share of the epochs or steps"
        raise SettingError(f"{message}: give epochs or max_steps", path="train.time_budget")


# -- state ------------------------------------------------------------------------------------------------------------


def _hash_examples(plan: FinetunePlan) -> str:
    """Return a hash of the examples on which trials are trained and compared."""
    digest = hashlib.blake2b(digest_size=16)
    for split in ("train", "dev"):
        for example in plan.source.examples(split):
            text = repr((split, replace(example, file="", line=0)))
            digest.update(text.encode(errors="backslashreplace"))
    return digest.hexdigest()


def _changed_settings(old: JsonObject, new: JsonObject) -> list[str]:
    """Return the full paths of the settings that differ, sorted."""
    old_values, new_values = dict(flatten_settings(old)), dict(flatten_settings(new))
    return sorted(path for path in {*old_values, *new_values} if old_values.get(path) != new_values.get(path))


# -- trials -----------------------------------------------------------------------------------------------------------


def _dev_scores(results: JsonObject) -> JsonObject:
    """Return the fields of a `Trial` that results.json of its run determines."""
    metric, dev = results["metric"], results["splits"]["dev"]
    return {
        "metric": metric,
        "metric_value": dev["numbers"][metric],
        "tie_breaker": tie_breaker(dev["numbers"], metric),
        "interval": dev["intervals"].get(metric),
    }
