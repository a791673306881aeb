"""Tuning: configurations are compared on dev by successive halving, and the best one trains the final model."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.cli import main
from heedful.errors import HeedfulError, RunError, SettingError
from heedful.runs.results import RunResult
from heedful.runs.tune import best_trial, configurations, rungs_within
from heedful.train.fit import Reporter
from tests.support.generated_data import SMALL, classification_rows

DATA = {"train": classification_rows(24), "dev": classification_rows(8, 1), "test": classification_rows(8, 2)}
SPACE = {"lr": [1e-3, 1e-2], "batch_size": [8, 16]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing, one thread; a full training is estimated to take a second."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def search(folder: Path, minutes: float = 30.0, **more: Any) -> RunResult:
    usual = {"time_budget": minutes, "space": SPACE, "overrides": SMALL | {"train.epochs": 3}}
    return heedful.tune("classify", DATA, folder, **usual | more)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A search that came to its end."""
    return search(tmp_path_factory.mktemp("searched") / "tuned")


# -- the plan of a search ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("candidates", [1, 2, 3, 8, 9, 27, 100])
@pytest.mark.parametrize("seconds", [10, 100, 1000, 10_000])
def test_rungs_fit_the_time_with_the_final_training(candidates: int, seconds: int) -> None:
    rungs = rungs_within(candidates, 60, seconds)
    assert 1 <= rungs[0].trials <= candidates and rungs[-1].share == 1.0
    for shorter, longer in pairwise(rungs):
        assert longer.trials == shorter.trials // 3 and longer.share == pytest.approx(3 * shorter.share)
    if rungs[0].trials > 1:
        assert 60 * (1 + sum(rung.share * rung.trials for rung in rungs)) <= seconds
    more = rungs_within(candidates, 60, 10 * seconds)
    assert more[0].trials >= rungs[0].trials


def test_the_first_configuration_has_the_first_values_and_the_others_are_shuffled() -> None:
    space = {"lr": [1, 2, 3], "batch_size": [8, 16, 32]}
    listed = configurations(space, seed=1)
    assert listed[0] == {"lr": 1, "batch_size": 8} and len(listed) == len({str(one) for one in listed}) == 9
    assert listed == configurations(space, seed=1) != configurations(space, seed=2)


def test_the_best_trial_is_of_the_longest_rung() -> None:
    trials = [
        {"rung": 0, "metric_value": 0.9, "tie_breaker": 0.0},
        {"rung": 1, "metric_value": 0.7, "tie_breaker": -2.0},
        {"rung": 1, "metric_value": 0.7, "tie_breaker": -1.0},
    ]
    assert best_trial(trials) == trials[2]


# -- searches ---------------------------------------------------------------------------------------------------------


def test_a_search_trains_the_final_model_with_the_best_settings(searched: RunResult) -> None:
    folder, state = searched.output_dir.parent, searched.results["tune"]
    first, last = ([trial for trial in state["trials"] if trial["rung"] == rung] for rung in (0, 1))
    assert len(first) == 4 and len(last) == 1, "one of four enters the second rung"
    best = max(first, key=lambda trial: (trial["metric_value"], trial["tie_breaker"]))
    assert last[0]["settings"] == best["settings"] == state["chosen"]
    for trial in state["trials"]:
        results = json.loads((folder / trial["folder"] / "results.json").read_text())
        assert list(results["splits"]) == ["dev"], "test is not read by trials"
        assert results["settings"]["train"]["epochs"] == pytest.approx(3 * trial["share"])
        assert results["settings"]["train"]["optimizer"]["lr"] == trial["settings"]["lr"]
    final = json.loads((folder / "best/results.json").read_text())
    assert set(final["splits"]) == {"dev", "test"}
    assert final["settings"]["train"]["batch_size"] == state["chosen"]["batch_size"]
    assert final["splits"]["dev"]["numbers"]["accuracy"] == last[0]["metric_value"], "the same run, trained again"
    rows = list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))
    assert len(rows) == 5 and rows[0]["share of the training"] == "1.0"
    assert (folder / "plots/trials.svg").is_file()
    assert heedful.Engine(folder / "best")(["the cat sat"])[0]["label"] in ("bad", "good")


def test_a_search_resumes_without_repeating_trials(tmp_path: Path, searched: RunResult) -> None:
    whole = searched.results["tune"]

    class StoppedError(Exception):
        pass

    class StopAfterTwo(Reporter):
        trials = 0

        def message(self, text: str) -> None:
            self.trials += text.startswith("rung ")
            if self.trials == 2:
                raise StoppedError

    with pytest.raises(StoppedError):
        search(tmp_path / "tuned", reporter=StopAfterTwo())
    before = json.loads((tmp_path / "tuned/tune.json").read_text())["trials"]
    assert len(before) == 2
    resumed = search(tmp_path / "tuned").results["tune"]
    assert resumed["trials"][:2] == before, "with their seconds"
    strip = [{name: trial[name] for name in ("settings", "rung", "metric_value")} for trial in whole["trials"]]
    assert [
        {name: trial[name] for name in ("settings", "rung", "metric_value")} for trial in resumed["trials"]
    ] == strip


def test_time_that_is_used_up_ends_the_search(tmp_path: Path) -> None:
    state = search(tmp_path / "tuned", minutes=1e-4).results["tune"]
    assert len(state["trials"]) == 1 and state["trials"][0]["settings"] == {"lr": 1e-3, "batch_size": 8}


def test_by_default_the_learning_rate_is_tried(tmp_path: Path) -> None:
    state = search(tmp_path / "tuned", minutes=1e-4, space=None).results["tune"]
    assert state["space"] == {"train.optimizer.lr": [5e-4, 1.7e-4, 1.5e-3]}


def test_what_cannot_be_tried_is_refused_before_anything_is_written(tmp_path: Path, searched: RunResult) -> None:
    folder = tmp_path / "tuned"
    for space, path in (({"epochs": [1, 2]}, "train.epochs"), ({"lr": []}, "lr"), ({"nothing": [1]}, "nothing")):
        with pytest.raises(SettingError) as refused:
            search(folder, space=space)
        assert refused.value.path == path
    with pytest.raises(HeedfulError):
        search(folder, space={"lr": [-1.0]})
    with pytest.raises(SettingError):
        search(
            folder,
            overrides={name: value for name, value in SMALL.items() if name != "train.epochs"}
            | {"train.time_budget": "1m"},
        )
    with pytest.raises(SettingError):
        search(folder, minutes=0.0)
    with pytest.raises(HeedfulError, match="there is no dev split"):
        heedful.tune(
            "classify",
            {"train": classification_rows(24)},
            folder,
            time_budget="1m",
            overrides=SMALL | {"dev_fraction": 0.0},
        )
    assert not folder.exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(RunError, match="is not the folder of a search"):
        search(tmp_path / "other")
    with pytest.raises(RunError, match="another space"):
        search(searched.output_dir.parent, space={"lr": [1e-3]})


def test_the_command_prints_the_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{row['text']},{row['label']}" for row in classification_rows(30)]
    (tmp_path / "data.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    arguments = [
        "tune",
        "classify",
        str(tmp_path / "data.csv"),
        "--output",
        str(tmp_path / "tuned"),
        "--time-budget",
        "5m",
    ]
    settings = [f"{name}={value}" for name, value in (SMALL | {"data.dev_fraction": 0.3}).items()]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--try", "lr=1e-3,5e-3", *settings])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "of the training" in printed and "0.005" in printed and "trials.csv" in printed
    for wrong in ("lr", "=1", "lr="):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--try", wrong])
        assert ended.value.code == 2
