"""Checkpoints that a finished run keeps, and how each of them answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful import Engine, HeedfulError, load
from heedful.cli import main
from heedful.runs.checkpoints import (
    checkpoint_entry,
    continued_run_note,
    find_checkpoint,
    remove_training_state,
    small_dev_note,
)
from heedful.runs.evaluate import evaluate
from heedful.runs.finetune import run as module
from heedful.train.fit import EvalResult
from tests.support.generated_data import finetune_tiny, write_splits
from tests.support.reporters import Messages

pytestmark = pytest.mark.usefixtures("quick")

MANY = {"train.epochs": 4}


class Falling:
    """Scores of evaluations, by which the first one is the best."""

    def __init__(self) -> None:
        self.number = 0
        self.score = module.eval_result

    def __call__(self, task: Any, shares: list[Any]) -> EvalResult:
        self.number += 1
        evaluation = self.score(task, shares)
        return EvalResult(
            metric_value=evaluation.metric_value - self.number,
            tie_breaker=evaluation.tie_breaker,
            metrics=evaluation.metrics,
        )


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    return write_splits("single", tmp_path / "data")


def falling(labelled: Path, run: Path, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The results of a run whose first evaluation is its best."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "eval_result", Falling())
        return finetune_tiny("classify", labelled, run, MANY | more).results


def test_a_finished_run_keeps_best_and_last_weights_and_no_state(
    tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    results = falling(labelled, run, {}, monkeypatch)
    entry = results["checkpoints"]
    assert entry["model"] == "best" and entry["best"]["step"] < entry["last"]["step"] == results["seeds"][0]["steps"]
    assert not (run / "state").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["last"]
    names = {path.name for path in (run / "checkpoints" / "last").iterdir()}
    assert names == {path.name for path in (run / "model").iterdir()} - {"README.md", "plots"}
    assert find_checkpoint(run, "best") == run == find_checkpoint(run, str(entry["best"]["step"]))
    last = find_checkpoint(run, "last")
    assert last == find_checkpoint(run, str(entry["last"]["step"])) == run / "checkpoints" / "last"
    for which, number in (("best", 1), ("last", 4)):
        numbers = evaluate(run, labelled, split="dev", checkpoint=which).numbers
        assert numbers["accuracy"] == pytest.approx(entry[which]["metric_value"] + number, abs=1e-6)
    (first, second) = (Engine(each)(["the dog ran"])[0]["probabilities"] for each in (run, last))
    assert first != second


def test_the_state_stays_where_it_is_asked_for(tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    results = falling(labelled, run, {"fit.keep_checkpoints": "true", "fit.keep_last": 3}, monkeypatch)
    steps = sorted(int(path.name[5:]) for path in (run / "state").glob("step-*"))
    last = results["checkpoints"]["last"]["step"]
    assert len(steps) == 3 and steps[-1] == last
    assert find_checkpoint(run, str(steps[1])) == run / "state" / f"step-{steps[1]:08d}"
    by_file = load(run / "state" / f"step-{last:08d}")
    assert by_file.source.endswith(f"step-{last:08d}")
    for ours, theirs in zip(by_file.parameters(), load(find_checkpoint(run, "last")).parameters(), strict=True):
        assert torch.equal(ours, theirs)
    numbers = evaluate(run, labelled, split="dev", checkpoint=steps[1], precision="bfloat16").numbers
    assert numbers["count"] == 8


def test_state_that_a_killed_process_left_goes_with_the_same_command(
    tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(module, "remove_training_state", lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finetune_tiny("classify", labelled, run, MANY)
    assert (run / "state").is_dir() and (run / "seed.json").is_file()
    finetune_tiny("classify", labelled, run, MANY)
    assert not (run / "state").exists()


def test_of_several_seeds_the_checkpoints_are_those_of_the_chosen_one(
    tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    results = falling(labelled, run, {"seeds": 2}, monkeypatch)
    assert not list(run.rglob("state"))
    assert find_checkpoint(run, "last") == run / f"seed-{results['seed']}" / "checkpoints" / "last"


def test_without_dev_there_is_the_last_alone(tmp_path: Path) -> None:
    labelled = write_splits("single", tmp_path / "data")
    run = tmp_path / "run"
    run_results = finetune_tiny("classify", labelled / "train.csv", run, MANY | {"data.dev_fraction": 0.0}).results
    assert run_results["checkpoints"]["best"] is None and find_checkpoint(run, "last") == run
    with pytest.raises(HeedfulError, match="was not evaluated on dev"):
        find_checkpoint(run, "best")


def entry(best: int, last: int, gain: float, load_best: bool = True) -> dict[str, Any]:
    return checkpoint_entry(best, 0.5 + gain, last, 0.5, load_best)


@pytest.mark.parametrize(
    ("about", "interval", "expected"),
    [
        (entry(80, 100, 0.02), {"low": 0.4, "high": 0.6}, True),
        (entry(80, 100, 0.02), {"low": 0.50, "high": 0.51}, False),  # the gain is more than the interval is wide
        (entry(100, 100, 0.0), {"low": 0.4, "high": 0.6}, False),  # nothing was chosen
        (entry(80, 100, 0.02, False), {"low": 0.4, "high": 0.6}, False),
        (entry(80, 100, 0.02), None, False),
    ],
)
def test_a_dev_split_that_is_too_small_to_choose_is_told(about: Any, interval: Any, expected: bool) -> None:
    assert bool(small_dev_note(about, "accuracy", interval)) == expected


def test_the_sentence_is_in_the_results_and_told(
    tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Messages()

    with monkeypatch.context() as patch:
        scores = iter((0.51, 0.5, 0.5, 0.5))
        patch.setattr(module, "eval_result", lambda task, shares: EvalResult(metric_value=next(scores), metrics={}))
        run_results = finetune_tiny("classify", labelled, tmp_path / "run", MANY, reporter=recorder).results
    (sentence,) = [each for each in recorder.messages if each.startswith("dev is too small to choose")]
    assert sentence in run_results["notes"] and "1.0 points above" in sentence


@pytest.mark.parametrize(
    ("which", "match"),
    [("worst", "use best, last, or the number"), ("7", "has no weights of step 7"), ("-1", "use best, last")],
)
def test_checkpoints_that_are_not_there(tmp_path: Path, which: str, match: str) -> None:
    about = {"task": "classify", "metric": "accuracy", "splits": {}, "checkpoints": entry(3, 3, 0.0)}
    (tmp_path / "results.json").write_text(json.dumps(about))
    with pytest.raises(HeedfulError, match=match):
        find_checkpoint(tmp_path, which)
    with pytest.raises(HeedfulError, match="not a finished run"):
        find_checkpoint(tmp_path / "none", "best")


def test_state_behind_a_link_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "far" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state").symlink_to(tmp_path / "far")
    remove_training_state(tmp_path / "run")
    assert list((tmp_path / "far").iterdir()) == [] and (tmp_path / "run" / "state").is_symlink()


def test_a_finished_run_that_is_trained_further_says_that_the_optimizer_starts_anew(
    tmp_path: Path, labelled: Path
) -> None:
    recorder = Messages()

    run = tmp_path / "run"
    finetune_tiny("classify", labelled, run, {"train.epochs": 1})
    with pytest.raises(
        HeedfulError, match=r"train.epochs was 1.* --overwrite to replace it.* --model .* and another --output"
    ):
        finetune_tiny("classify", labelled, run, {"train.epochs": 2})
    finetune_tiny("classify", labelled, tmp_path / "more", {"train.epochs": 1}, model=run, reporter=recorder)
    assert any("the optimizer and its schedule start anew" in each for each in recorder.messages)
    assert not continued_run_note(str(run), "tag") and not continued_run_note("heedful-mini-en", "classify")


def test_the_commands_take_a_checkpoint(
    tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    falling(labelled, run, {}, monkeypatch)

    def run_command(*arguments: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0

    def out(*arguments: str) -> Any:
        run_command(*arguments, "--json")
        return json.loads(capsys.readouterr().out)

    asked = {which: out("predict", str(run), "the dog ran", "--checkpoint", which) for which in ("best", "last")}
    assert asked["best"] == out("predict", str(run), "the dog ran") != asked["last"]
    scores = {which: out("evaluate", str(run), "--data", str(labelled), "--checkpoint", which) for which in asked}
    assert scores["best"] == out("evaluate", str(run), "--data", str(labelled)) != scores["last"]
    for which in asked:
        run_command("look", str(run), "the dog ran", "--html", str(tmp_path / f"{which}.html"), "--checkpoint", which)
    assert (tmp_path / "best.html").read_bytes() != (tmp_path / "last.html").read_bytes()
    with pytest.raises(SystemExit):
        main(["predict", str(run), "the dog ran", "--checkpoint", "worst"])
    assert "use best, last" in capsys.readouterr().err
