"""Tuning: configurations are compared on dev by successive halving, and the best one trains the final model."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import heedful
from heedful.checkpoint import save
from heedful.cli import main
from heedful.cli.tune import _parse_space
from heedful.errors import HeedfulError, RunError, SettingError
from heedful.runs.finetune import plan as plan_module
from heedful.runs.finetune.settings import FinetuneSettings, preview_settings
from heedful.runs.overrides import Overrides
from heedful.runs.plots.style import GREY, ORANGE
from heedful.runs.results import RunResult
from heedful.runs.trials import (
    SearchState,
    Trial,
    best_trial,
    configurations,
    plot_trials,
    ranked_trials,
    rungs_within,
    trials_csv,
)
from heedful.tasks.specs import SPECS
from heedful.train.fit import Reporter
from heedful.train.trainer import DivergedError
from tests.support.generated_data import SMALL, classification_rows
from tests.support.tiny_runs import classify

DATA = {"train": classification_rows(24), "dev": classification_rows(8, 1), "test": classification_rows(8, 2)}
SPACE = {"lr": [1e-3, 1e-2], "batch_size": [8, 16]}
NINE_LRS = [1e-3 * factor for factor in range(1, 10)]
WITHOUT_DURATION = {name: value for name, value in SMALL.items() if name != "train.epochs"}


@pytest.fixture(autouse=True)
def single_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Train with one thread, and leave measurements of latency out."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def search(folder: Path, minutes: float = 30.0, **arguments: Any) -> RunResult:
    """Search SPACE with a small model that trains for 3 epochs, unless `arguments` of `heedful.tune` differ."""
    defaults = {"time_budget": minutes, "space": SPACE, "overrides": SMALL | {"train.epochs": 3}}
    arguments = {"data": DATA} | defaults | arguments
    return heedful.tune("classify", arguments.pop("data"), folder, **arguments)


def stored_state(folder: Path) -> SearchState:
    """Return the state in tune.json."""
    return SearchState.from_json(json.loads((folder / "tune.json").read_text()))


class RecordingReporter(Reporter):
    """Records messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@dataclass
class FakeTraining:
    """Replaces training in a search, and its clock. A dry run estimates a minute for a full training by default."""

    score: Callable[[FinetuneSettings], float] = lambda settings: settings.train.optimizer.lr  # accuracy on dev
    dry_run_seconds: float = 0.0  # duration of each dry run
    full_seconds: Callable[[FinetuneSettings], float] = lambda settings: 60.0  # estimate of a full training
    run_seconds: float = 0.0  # duration of each run
    interrupted_run: int = 0  # number of the run that a signal interrupts, from 1; 0: none
    dry_runs: int = 0
    runs: list[tuple[str, FinetuneSettings]] = field(default_factory=list)  # (name of the folder, settings)
    now: float = 0.0  # seconds

    def dry_run(self, task: str, *arguments: Any, overrides: Overrides, **keywords: Any) -> SimpleNamespace:
        self.dry_runs += 1
        self.now += self.dry_run_seconds
        return SimpleNamespace(seconds=self.full_seconds(preview_settings(task, overrides)))

    def finetune(self, task: str, data: object, folder: Path, *, overrides: Overrides, **keywords: Any) -> RunResult:
        settings = preview_settings(task, overrides)
        self.runs.append((folder.name, settings))
        self.now += self.run_seconds
        if len(self.runs) == self.interrupted_run:
            return RunResult(output_dir=folder, status="interrupted", results={})
        numbers = {"accuracy": self.score(settings), "loss": 0.5}
        results = {"metric": "accuracy", "splits": {"dev": {"numbers": numbers, "intervals": {}}}}
        return RunResult(output_dir=folder, status="completed", results=results)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    """Searches of this test do not train."""
    fake = FakeTraining()
    monkeypatch.setattr("heedful.runs.tune.finetune", fake.finetune)
    monkeypatch.setattr("heedful.runs.tune.dry_run", fake.dry_run)
    monkeypatch.setattr("heedful.runs.tune.time", SimpleNamespace(monotonic=lambda: fake.now))
    return fake


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A finished search that trained its models."""
    return search(tmp_path_factory.mktemp("finished") / "tuned")


# -- schedule and ranking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("candidates", [1, 2, 3, 8, 9, 27, 100])
@pytest.mark.parametrize("seconds", [10, 100, 1000, 10_000])
def test_rungs_fit_the_time_with_the_final_training(candidates: int, seconds: int) -> None:
    rungs = rungs_within(candidates, 60, seconds)
    for shorter, longer in pairwise(rungs):
        assert longer.num_trials == shorter.num_trials // 3
        assert longer.share == pytest.approx(3 * shorter.share)
    if rungs:
        assert 2 <= rungs[0].num_trials <= candidates
        assert rungs[-1].share == 1.0
        assert 60 * (1 + sum(rung.share * rung.num_trials for rung in rungs)) <= seconds
        assert rungs_within(candidates, 60, 10 * seconds)[0].num_trials >= rungs[0].num_trials


@pytest.mark.parametrize(
    ("candidates", "seconds", "expected"),
    [
        pytest.param(1, 10_000, [], id="nothing to compare"),
        pytest.param(9, 179, [], id="no time for two full trainings and the final one"),
        pytest.param(2, 180, [(1.0, 2)], id="just enough time"),
        pytest.param(9, 240, [(1 / 9, 9), (1 / 3, 3), (1.0, 1)], id="all configurations"),
    ],
)
def test_rungs_of_trainings_that_take_a_minute(
    candidates: int, seconds: float, expected: list[tuple[float, int]]
) -> None:
    assert [(rung.share, rung.num_trials) for rung in rungs_within(candidates, 60, seconds)] == expected


def test_the_first_configuration_has_the_first_values_and_the_others_are_shuffled() -> None:
    space = {"lr": [1, 2, 3], "batch_size": [8, 16, 32]}
    candidates = configurations(space, seed=1)
    assert candidates[0] == {"lr": 1, "batch_size": 8}
    assert len(candidates) == len({str(candidate) for candidate in candidates}) == 9
    assert candidates == configurations(space, seed=1) != configurations(space, seed=2)


def make_trial(lr: float, rung_index: int, metric_value: float | None, tie_breaker: float = 0.0) -> Trial:
    """Return a trial in one of two rungs; without a metric value, one that diverged."""
    return Trial(
        rung_index=rung_index,
        share=(1 / 3, 1.0)[rung_index],
        settings={"lr": lr},
        folder=f"trials/{rung_index}-{lr}",
        metric="" if metric_value is None else "accuracy",
        metric_value=metric_value,
        tie_breaker=tie_breaker,
        seconds=1.0,
    )


def test_the_best_trial_is_in_the_longest_rung() -> None:
    trials = [make_trial(1, 0, 0.9), make_trial(2, 1, 0.7, -2.0), make_trial(3, 1, 0.7, -1.0), make_trial(4, 1, None)]
    assert best_trial(trials) == trials[2]
    assert ranked_trials(trials) == [trials[2], trials[1], trials[3], trials[0]]


def test_a_configuration_that_diverged_in_a_longer_rung_is_not_the_best() -> None:
    trials = [make_trial(1, 0, 0.9), make_trial(2, 0, 0.8), make_trial(1, 1, None)]
    assert best_trial(trials) == trials[1]
    assert best_trial(trials[2:]) is None


# -- searches that train ----------------------------------------------------------------------------------------------


def test_a_search_trains_the_final_model_with_the_best_settings(finished: RunResult) -> None:
    folder = finished.output_dir.parent
    state = SearchState.from_json(finished.results["tune"])
    first_rung = [trial for trial in state.trials if trial.rung_index == 0]
    (last_trial,) = [trial for trial in state.trials if trial.rung_index == 1]
    assert len(first_rung) == 4, "one of four enters the second rung"
    best = max(first_rung, key=lambda trial: trial.rank)
    assert last_trial.settings == best.settings == state.chosen
    for trial in state.trials:
        results = json.loads((folder / trial.folder / "results.json").read_text())
        assert list(results["splits"]) == ["dev"], "test is not read by trials"
        assert results["settings"]["train"]["epochs"] == pytest.approx(3 * trial.share)
        assert results["settings"]["train"]["optimizer"]["lr"] == trial.settings["lr"]
    final = json.loads((folder / "best/results.json").read_text())
    assert set(final["splits"]) == {"dev", "test"}
    assert final["settings"]["train"]["batch_size"] == state.chosen["batch_size"]
    assert final["splits"]["dev"]["numbers"]["accuracy"] == last_trial.metric_value, "the same run, trained again"
    assert heedful.Engine(folder / "best")(["the cat sat"])[0]["label"] in ("bad", "good")


def test_a_search_writes_its_trials(finished: RunResult) -> None:
    folder = finished.output_dir.parent
    rows = list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))
    assert len(rows) == 5
    assert rows[0]["share of the training"] == "1.0"
    assert (folder / "plots/trials.svg").is_file()
    assert finished.results["tune"] == json.loads((folder / "tune.json").read_text())
    keys = ["rung", "share", "settings", "folder", "metric", "metric_value", "tie_breaker", "interval", "seconds"]
    assert list(finished.results["tune"]["trials"][0]) == keys


def test_a_search_resumes_without_repeating_trials(tmp_path: Path, finished: RunResult) -> None:
    class StoppedError(Exception):
        pass

    class StopAfterTwoTrials(RecordingReporter):
        def message(self, text: str) -> None:
            super().message(text)
            if sum(earlier.startswith("rung ") for earlier in self.messages) == 2:
                raise StoppedError

    with pytest.raises(StoppedError):
        search(tmp_path / "tuned", reporter=StopAfterTwoTrials())
    trials_before = stored_state(tmp_path / "tuned").trials
    assert len(trials_before) == 2
    resumed = SearchState.from_json(search(tmp_path / "tuned").results["tune"])
    assert resumed.trials[:2] == trials_before, "with their seconds"
    uninterrupted = SearchState.from_json(finished.results["tune"])
    assert [(trial.settings, trial.rung_index, trial.metric_value) for trial in resumed.trials] == [
        (trial.settings, trial.rung_index, trial.metric_value) for trial in uninterrupted.trials
    ]


def test_a_search_ends_although_a_learning_rate_diverges(tmp_path: Path) -> None:
    results = search(tmp_path / "tuned", space={"lr": [1e30, 1e-3]}).results
    state = SearchState.from_json(results["tune"])
    assert [trial.metric_value is None for trial in state.trials] == [True, False]
    assert state.chosen == {"lr": 1e-3}
    assert set(results["splits"]) == {"dev", "test"}


def test_methods_for_few_labels_are_compared_on_a_generated_dev_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with few labels trains on all rows with some methods, and trials of these methods need a dev split too."""
    monkeypatch.setattr("heedful.runs.finetune.settings.MIN_CONTRASTIVE_STEPS", 5)
    monkeypatch.setitem(SPECS, "classify", replace(SPECS["classify"], epochs=((0, 2.0),)))
    model, *_ = classify()
    save(model.eval(), tmp_path / "encoder")
    data = {"train": classification_rows(40), "test": classification_rows(8, 2)}
    space = {"method": ["contrastive", "linear", "finetune"]}
    overrides = {"init.model": str(tmp_path / "encoder")}
    results = search(tmp_path / "tuned", data=data, space=space, overrides=overrides).results
    state = SearchState.from_json(results["tune"])
    assert {trial.settings["method"] for trial in state.trials if trial.rung_index == 0} == {*space["method"]}
    counts = [
        json.loads((tmp_path / "tuned" / trial.folder / "results.json").read_text())["data"]["splits"]
        for trial in state.trials
    ]
    sizes = [(splits["train"]["examples"], splits["dev"]["examples"]) for splits in counts]
    assert sum(sizes[0]) == 40 and sizes[0][1] > 0
    assert sizes == [sizes[0]] * 4, "all trials have the same dev split"
    assert state.chosen is not None
    trains_on_all = results["data"]["splits"]["train"]["examples"] == 40
    assert trains_on_all == (state.chosen["method"] != "finetune"), "the final run is one of its method"


@pytest.mark.parametrize("space", [None, {}])
def test_by_default_the_learning_rate_is_tried(
    tmp_path: Path, training: FakeTraining, space: dict[str, Any] | None
) -> None:
    state = search(tmp_path / "tuned", space=space).results["tune"]
    assert state["space"] == {"train.optimizer.lr": [5e-4, 1.7e-4, 1.5e-3]}


# -- durations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["epochs", "train.epochs", "num_train_epochs"])
def test_epochs_can_be_tried_by_any_name(tmp_path: Path, training: FakeTraining, name: str) -> None:
    state = search(tmp_path / "tuned", space={name: [3, 6, 9]}, overrides=WITHOUT_DURATION).results["tune"]
    epochs = [settings.train.epochs for _, settings in training.runs]
    assert sorted(epochs[:3]) == pytest.approx([1, 2, 3]), "a third of the values"
    assert epochs[3:] == [state["chosen"][name]] * 2


def test_max_steps_can_be_tried_by_a_short_name(tmp_path: Path, training: FakeTraining) -> None:
    search(tmp_path / "tuned", space={"max_steps": [30, 60, 90]}, overrides=WITHOUT_DURATION)
    assert sorted(settings.train.max_steps or 0 for _, settings in training.runs[:3]) == [10, 20, 30]


def test_without_time_nothing_is_compared(tmp_path: Path, training: FakeTraining) -> None:
    reporter = RecordingReporter()
    state = search(tmp_path / "tuned", minutes=1.0, reporter=reporter).results["tune"]
    assert state["trials"] == []
    assert state["chosen"] == {"lr": 1e-3, "batch_size": 8}
    assert [name for name, _ in training.runs] == ["best"]
    assert "there is no time for trials, so nothing is compared" in reporter.messages[0]
    assert not (tmp_path / "tuned/trials.csv").exists()


def test_a_single_configuration_is_not_compared(tmp_path: Path, training: FakeTraining) -> None:
    state = search(tmp_path / "tuned", space={"lr": [1e-3]}).results["tune"]
    assert state["trials"] == []
    assert [name for name, _ in training.runs] == ["best"]


def test_the_dry_run_takes_a_part_of_the_time_budget(tmp_path: Path, training: FakeTraining) -> None:
    training.dry_run_seconds = 500.0
    state = search(tmp_path / "tuned", minutes=10.0).results["tune"]
    assert state["trials"] == [], "trials and the final training need 200 of the 100 seconds that are left"
    assert state["seconds"] == 500.0


def test_time_for_every_seed_of_the_final_training_is_reserved(tmp_path: Path, training: FakeTraining) -> None:
    training.run_seconds = 60.0
    several = SMALL | {"train.epochs": 3, "seeds": 3}
    reporter = RecordingReporter()
    state = search(tmp_path / "few", minutes=5.0, overrides=several, reporter=reporter).results["tune"]
    assert sum(rung["share"] * rung["num_trials"] for rung in state["rungs"]) <= 2, "three of five minutes are reserved"
    assert len(state["trials"]) == 2, "another trial would leave no time for three seeds"
    assert "the final model is trained with 3 seeds" in reporter.messages[0]
    assert [settings.seeds for _, settings in training.runs] == [1] * (len(training.runs) - 1) + [3]
    state = search(tmp_path / "none", minutes=4.9, overrides=several).results["tune"]
    assert state["trials"] == [], "two full trials and three seeds take five minutes"


def test_trials_have_no_cross_validation(tmp_path: Path, training: FakeTraining) -> None:
    """Trials are compared on dev; only the final model has a score by folds of train."""
    search(tmp_path / "tuned", overrides=SMALL | {"train.epochs": 3, "folds": 4})
    *trials, final = [settings.folds for _, settings in training.runs]
    assert trials and set(trials) == {0}
    assert final == 4


def test_numbers_of_seeds_reserve_time_for_the_largest(tmp_path: Path, training: FakeTraining) -> None:
    space = {"seeds": [1, 4]}
    assert search(tmp_path / "few", minutes=5.9, space=space).results["tune"]["trials"] == []
    assert len(search(tmp_path / "enough", minutes=6.0, space=space).results["tune"]["trials"]) == 2


def test_an_interrupted_trial_takes_a_part_of_the_time_budget(tmp_path: Path, training: FakeTraining) -> None:
    training.run_seconds = 100.0
    training.interrupted_run = 2
    assert search(tmp_path / "tuned", minutes=5.0).status == "interrupted"
    assert stored_state(tmp_path / "tuned").seconds == 200.0
    reporter = RecordingReporter()
    state = search(tmp_path / "tuned", minutes=5.0, reporter=reporter).results["tune"]
    assert len(state["trials"]) == 2, "after 300 s there is no time for a third trial"
    assert "stopping the search after 300 s to leave time for the final training" in reporter.messages


def test_time_that_is_used_up_ends_the_trials(tmp_path: Path, training: FakeTraining) -> None:
    training.run_seconds = 250.0
    state = search(tmp_path / "tuned", minutes=5.0).results["tune"]
    assert [trial["settings"] for trial in state["trials"]] == [{"lr": 1e-3, "batch_size": 8}]
    assert [name for name, _ in training.runs] == ["0-00", "best"]


def test_configurations_that_take_too_long_are_left_out(tmp_path: Path, training: FakeTraining) -> None:
    """The first rung trains for a third of the duration; 600 s are enough for all but the 1,000 s of 50 epochs."""
    training.full_seconds = lambda settings: 20 * (settings.train.epochs or 0)
    reporter = RecordingReporter()
    space = {"epochs": [3, 50, 6], "lr": [1e-3, 2e-3]}
    result = search(tmp_path / "tuned", 10.0, space=space, overrides=WITHOUT_DURATION, reporter=reporter)
    state = SearchState.from_json(result.results["tune"])
    tried = [trial.settings["epochs"] for trial in state.trials if trial.rung_index == 0]
    assert sorted(map(str, tried)) == ["3", "3", "6", "6"]
    assert "epochs=50, lr=0.001 is left out, since a full training takes about 1000 s" in reporter.messages
    assert training.dry_runs == 3, "one for each number of epochs"
    assert state.full_seconds == 60.0, "with the first values"


def test_time_is_left_for_the_slowest_configuration(tmp_path: Path, training: FakeTraining) -> None:
    """After a minute, the second configuration needs two minutes for its trial and two for the final training."""
    training.full_seconds = lambda settings: 120.0 if settings.train.batch_size == 8 else 60.0
    training.run_seconds = 60.0
    arguments: dict[str, Any] = {"space": {"batch_size": [16, 8]}}
    state = search(tmp_path / "short", minutes=4.9, **arguments).results["tune"]
    assert [trial["settings"]["batch_size"] for trial in state["trials"]] == [16]
    state = search(tmp_path / "long", minutes=5.0, **arguments).results["tune"]
    assert [trial["settings"]["batch_size"] for trial in state["trials"]] == [16, 8]


def test_no_dry_run_begins_when_the_time_is_up(tmp_path: Path, training: FakeTraining) -> None:
    training.run_seconds, training.dry_run_seconds = 220.0, 10.0
    reporter = RecordingReporter()
    search(tmp_path / "tuned", minutes=5.0, space={"batch_size": [4, 8, 16]}, reporter=reporter)
    assert training.dry_runs == 1
    assert "stopping the search after 230 s to leave time for the final training" in reporter.messages


# -- trainings that diverge -------------------------------------------------------------------------------------------


def diverge_above(max_lr: float) -> Callable[[FinetuneSettings], float]:
    """Return a score that is the learning rate, and raises DivergedError for a learning rate above `max_lr`."""

    def score(settings: FinetuneSettings) -> float:
        if settings.train.optimizer.lr > max_lr:
            raise DivergedError("step 1: the loss is nan")
        return settings.train.optimizer.lr

    return score


def test_a_trial_that_diverges_is_the_worst_one(tmp_path: Path, training: FakeTraining) -> None:
    training.score = diverge_above(0.005)
    reporter = RecordingReporter()
    state = SearchState.from_json(search(tmp_path / "tuned", reporter=reporter).results["tune"])
    assert [trial.settings["lr"] for trial in state.trials if trial.metric_value is None] == [0.01, 0.01]
    assert state.chosen is not None
    assert state.chosen["lr"] == 0.001
    assert any("lr=0.01" in message and "training diverged" in message for message in reporter.messages)
    rows = list(csv.DictReader((tmp_path / "tuned/trials.csv").read_text().splitlines()))
    assert [row["value"] for row in rows].count("NaN") == 2
    num_runs = len(training.runs)
    search(tmp_path / "tuned")
    assert len(training.runs) == num_runs + 1, "only the final run, which resumes"


def test_a_search_in_which_everything_diverges_is_an_error(tmp_path: Path, training: FakeTraining) -> None:
    training.score = diverge_above(0.0)
    for _ in range(2):  # the second search resumes
        with pytest.raises(RunError, match=r"diverged with every configuration that was tried, such as lr=0\.001"):
            search(tmp_path / "tuned")
        assert len(training.runs) == 4


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_a_resumed_search_keeps_its_schedule(tmp_path: Path, training: FakeTraining) -> None:
    training.interrupted_run = 3
    arguments: dict[str, Any] = {"space": {"lr": NINE_LRS}}
    assert search(tmp_path / "tuned", minutes=10.0, **arguments).status == "interrupted"
    # a new search with 230 s would try 5 configurations for a third of the training
    state = SearchState.from_json(search(tmp_path / "tuned", minutes=230 / 60, **arguments).results["tune"])
    for rung_index, (share, num_trials) in enumerate([(1 / 9, 9), (1 / 3, 3), (1.0, 1)]):
        assert [trial.share for trial in state.trials if trial.rung_index == rung_index] == [share] * num_trials
    assert state.minutes == 230 / 60
    assert state.chosen == {"lr": max(NINE_LRS)}


def test_another_time_budget_is_refused_after_the_trials(tmp_path: Path, training: FakeTraining) -> None:
    search(tmp_path / "tuned", minutes=10.0)
    with pytest.raises(RunError, match="another time budget would change nothing: give 10 minutes to resume it"):
        search(tmp_path / "tuned", minutes=20.0)


def test_values_that_are_tuples_can_be_resumed(tmp_path: Path, training: FakeTraining) -> None:
    training.interrupted_run = 2
    arguments: dict[str, Any] = {"space": {"betas": [(0.9, 0.98), (0.9, 0.999)]}}
    assert search(tmp_path / "tuned", **arguments).status == "interrupted"
    assert len(search(tmp_path / "tuned", **arguments).results["tune"]["trials"]) == 2
    assert len(training.runs) == 4, "two trials, one of them in two calls, and the final run"


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        pytest.param({"space": {"lr": [1e-3]}}, "holds a search with another space", id="space"),
        pytest.param(
            {"overrides": SMALL | {"train.epochs": 4}},
            r"holds a search with other settings \(train.epochs\)",
            id="settings",
        ),
        pytest.param({"data": DATA | {"dev": classification_rows(8, 3)}}, "holds a search with other data", id="data"),
    ],
)
def test_another_search_in_the_folder_is_refused(finished: RunResult, changed: dict[str, Any], match: str) -> None:
    with pytest.raises(RunError, match=match):
        search(finished.output_dir.parent, **changed)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param('{"task": "classify"', id="damaged"),
        pytest.param("[]", id="a list"),
        pytest.param(
            json.dumps({"task": "classify", "space": SPACE, "minutes": 30.0, "full_seconds": 1.0, "trials": []}),
            id="without a schedule, settings and data",
        ),
    ],
)
def test_an_unreadable_state_is_refused(tmp_path: Path, training: FakeTraining, content: str) -> None:
    (tmp_path / "tune.json").write_text(content)
    with pytest.raises(RunError, match=r"tune.json is damaged or was written by another version of Heedful"):
        search(tmp_path)


# -- arguments --------------------------------------------------------------------------------------------------------


def test_the_data_is_read_once_before_the_trials(
    tmp_path: Path, training: FakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    open_dataset = plan_module.dataset_for_task

    def count(kind: Any, data: object, *arguments: Any) -> Any:
        opened.append(data)
        return open_dataset(kind, data, *arguments)

    monkeypatch.setattr(plan_module, "dataset_for_task", count)
    search(tmp_path / "tuned")
    assert len(opened) == 1


@pytest.mark.parametrize(
    ("space", "path"),
    [
        pytest.param({"epochs": [1, 2]}, "train.epochs", id="set by hand"),
        pytest.param({"lr": []}, "train.optimizer.lr", id="no values"),
        pytest.param({"nothing": [1]}, "nothing", id="unknown"),
        pytest.param({"lr": [-1.0]}, "train.optimizer.lr", id="invalid value"),
        pytest.param({"lr": [1.0], "learning_rate": [2.0]}, "train.optimizer.lr", id="one setting twice"),
        pytest.param({"time_budget": ["1m", "2m"]}, "train.time_budget", id="time budget"),
        pytest.param({"method": ["finetune", "auto"]}, "method", id="a comparison of methods"),
    ],
)
def test_a_space_that_cannot_be_tried_is_refused(tmp_path: Path, space: dict[str, Any], path: str) -> None:
    with pytest.raises(SettingError) as refused:
        search(tmp_path / "tuned", space=space)
    assert refused.value.path == path
    assert not (tmp_path / "tuned").exists()


def test_values_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"give one of train.epochs, train.max_steps, train.time_budget"):
        search(tmp_path / "tuned", space={"epochs": [1, 2], "max_steps": [3]}, overrides=WITHOUT_DURATION)
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        pytest.param({"minutes": 0.0}, "time_budget is 0.0; expected minutes above 0", id="no time"),
        pytest.param(
            {"overrides": WITHOUT_DURATION | {"train.time_budget": "1m"}}, "give epochs or max_steps", id="time budget"
        ),
        pytest.param(
            {"data": {"train": classification_rows(24)}, "overrides": SMALL | {"dev_fraction": 0.0}},
            "there is no dev split",
            id="no dev split",
        ),
    ],
)
def test_arguments_are_checked_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(HeedfulError, match=match):
        search(tmp_path / "tuned", **arguments)
    assert not (tmp_path / "tuned").exists()


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"is not the folder of a search: it holds file, but no tune.json"):
        search(tmp_path)


# -- table, plot and command ------------------------------------------------------------------------------------------


def make_state(trials: list[Trial], chosen: dict[str, Any]) -> SearchState:
    """Return the state of a finished search."""
    return SearchState(
        task="classify",
        space={"lr": [1, 2]},
        settings={},
        data="",
        minutes=1.0,
        full_seconds=1.0,
        rungs=[],
        trials=trials,
        seconds=1.0,
        chosen=chosen,
    )


def test_the_plot_highlights_the_chosen_configuration() -> None:
    trials = [make_trial(1, 0, 0.5), make_trial(2, 0, 0.6), make_trial(2, 1, 0.7), make_trial(3, 0, None)]
    (axes,) = plot_trials(make_state(trials, {"lr": 2})).axes
    assert [line.get_color() for line in axes.lines] == [GREY, ORANGE], "without the configuration that diverged"
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.5], [0.6, 0.7]]
    (label,) = axes.texts
    assert label.get_text() == "lr=2"
    assert label.get_color() == ORANGE


def test_the_table_has_the_metric_in_every_row() -> None:
    state = make_state([make_trial(1, 0, None), make_trial(2, 0, 0.5)], {"lr": 2})
    rows = list(csv.DictReader(trials_csv(state).splitlines()))
    assert [(row["lr"], row["dev metric"], row["value"]) for row in rows] == [
        ("2", "accuracy", "0.5"),
        ("1", "accuracy", "NaN"),
    ]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The arguments of `heedful tune` without the values to try, with small data and a small model."""
    rows = [f"{row['text']},{row['label']}" for row in classification_rows(30)]
    (tmp_path / "data.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    settings = [f"{name}={value}" for name, value in (SMALL | {"data.dev_fraction": 0.3}).items()]
    return ["tune", "classify", str(tmp_path / "data.csv"), "--output", str(tmp_path / "tuned"), *settings]


def run_command(arguments: list[str]) -> int | str | None:
    """Run `heedful` with arguments, and return its exit status."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    return exit_info.value.code


def test_the_command_prints_the_trials(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*command, "--time-budget", "5m", "--try", "lr=1e-3,5e-3"]) == 0
    printed = capsys.readouterr().out
    for text in ("of the training", "0.005", "trials.csv, plots/trials.png, and the final run in best"):
        assert text in printed


def test_the_command_says_that_nothing_was_compared(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*command, "--time-budget", "0.001s", "--try", "lr=1e-3,5e-3"]) == 0
    printed = capsys.readouterr().out
    assert "no configurations were compared" in printed
    assert "trials.csv" not in printed


def test_the_command_shows_a_trial_that_diverged(
    command: list[str], training: FakeTraining, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training.score = diverge_above(0.002)
    monkeypatch.setattr("heedful.cli.tune.show_results", lambda results: None)
    assert run_command([*command, "--time-budget", "5m", "--try", "lr=1e-3,5e-3"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "0.005" in line]
    assert "diverged" in row


@pytest.mark.parametrize("values_to_try", ["lr", "=1", "lr="])
def test_the_command_refuses_values_of_another_form(command: list[str], values_to_try: str) -> None:
    assert run_command([*command, "--try", values_to_try]) == 2


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("1e-4,3e-4", [1e-4, 3e-4]),
        ("cosine, linear", ["cosine", "linear"]),
        ("[1,2],[3]", [[1, 2], [3]]),
        ('["a,b", "c"],[]', [["a,b", "c"], []]),
        ('{kind = "adamw", lr = 0.1},2', [{"kind": "adamw", "lr": 0.1}, 2]),
        ("\"/models/a,b\", '/models/c,d',/models/e", ["/models/a,b", "/models/c,d", "/models/e"]),
        ("it's,a[1]", ["it's", "a[1]"]),
    ],
)
def test_values_may_have_commas(option: str, values: list[Any]) -> None:
    assert _parse_space([f"x={option}"]) == {"x": values}


@pytest.mark.parametrize("option", ["[1,2", "1,[a,b]", '"/a,b', "{a=1,2"])
def test_values_that_are_not_closed_are_refused(option: str) -> None:
    with pytest.raises(HeedfulError, match="close its brackets and quotation marks"):
        _parse_space([f"x={option}"])


def test_lists_are_tried(command: list[str], training: FakeTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heedful.cli.tune.show_results", lambda results: None)
    options = ["--time-budget", "5m", "--try", 'data.columns.text=["text"],text']
    assert run_command([*command, *options]) == 0
    columns = [settings.data.columns["text"] for _, settings in training.runs]
    assert sorted(map(str, columns[:2])) == ["('text',)", "text"]
