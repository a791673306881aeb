"""Checkpoints of a finished run: which ones remain in its folder, and how commands find and use them."""

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
from heedful.runs.finetune import run as run_module
from heedful.train.fit import EvalResult
from tests.support.generated_data import finetune_tiny, write_splits
from tests.support.reporters import Messages

pytestmark = pytest.mark.usefixtures("quick")

FOUR_EPOCHS = {"train.epochs": 4}  # with an evaluation after each


class DecreasingResults:
    """Replaces `eval_result`: the n-th evaluation gets a metric that is lower by n, so that the first one is best."""

    def __init__(self) -> None:
        self.num_evaluations = 0
        self.eval_result = run_module.eval_result

    def __call__(self, task: Any, metrics_of_ranks: list[Any]) -> EvalResult:
        self.num_evaluations += 1
        result = self.eval_result(task, metrics_of_ranks)
        return EvalResult(
            metric_value=result.metric_value - self.num_evaluations,
            tie_breaker=result.tie_breaker,
            metrics=result.metrics,
        )


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    return write_splits("single", tmp_path / "data")


def finetune_best_first(
    labelled: Path, run: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Fine-tune for four epochs, the first one with the best metric, and return the results."""
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "eval_result", DecreasingResults())
        return finetune_tiny("classify", labelled, run, FOUR_EPOCHS | settings).results


def test_a_finished_run_has_best_and_last_weights_and_no_training_state(
    tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    results = finetune_best_first(labelled, run, {}, monkeypatch)
    entry = results["checkpoints"]
    best_step, last_step = entry["best"]["step"], entry["last"]["step"]
    assert entry["model"] == "best"
    assert best_step < last_step == results["seeds"][0]["steps"]
    assert not (run / "state").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["last"]
    last_files = {path.name for path in (run / "checkpoints" / "last").iterdir()}
    model_files = {path.name for path in (run / "model").iterdir()}
    assert last_files == model_files - {"README.md", "plots"}
    assert find_checkpoint(run, "best") == find_checkpoint(run, str(best_step)) == run
    last = run / "checkpoints" / "last"
    assert find_checkpoint(run, "last") == find_checkpoint(run, str(last_step)) == last
    for which, evaluation in (("best", 1), ("last", 4)):
        accuracy = entry[which]["metric_value"] + evaluation  # without the change by `DecreasingResults`
        numbers = evaluate(run, labelled, split="dev", checkpoint=which).numbers
        assert numbers["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    best_answer, last_answer = (Engine(folder)(["the dog ran"])[0] for folder in (run, last))
    assert best_answer["probabilities"] != last_answer["probabilities"]


def test_keep_checkpoints_keeps_the_training_states(
    tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    settings = {"fit.keep_checkpoints": "true", "fit.keep_last": 3}
    results = finetune_best_first(labelled, run, settings, monkeypatch)
    steps = sorted(int(path.name.removeprefix("step-")) for path in (run / "state").glob("step-*"))
    last_step = results["checkpoints"]["last"]["step"]
    assert len(steps) == 3
    assert steps[-1] == last_step
    assert find_checkpoint(run, str(steps[1])) == run / "state" / f"step-{steps[1]:08d}"
    from_state = load(run / "state" / f"step-{last_step:08d}")
    from_checkpoint = load(find_checkpoint(run, "last"))
    assert from_state.source.endswith(f"step-{last_step:08d}")
    for state_weight, weight in zip(from_state.parameters(), from_checkpoint.parameters(), strict=True):
        assert torch.equal(state_weight, weight)
    numbers = evaluate(run, labelled, split="dev", checkpoint=steps[1], precision="bfloat16").numbers
    assert numbers["count"] == 8


def test_the_same_command_removes_the_training_state_that_a_killed_process_left(
    tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(folder: Path) -> None:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "remove_training_state", interrupt)
        with pytest.raises(KeyboardInterrupt):
            finetune_tiny("classify", labelled, run, FOUR_EPOCHS)
    assert (run / "state").is_dir()
    assert (run / "seed.json").is_file()
    finetune_tiny("classify", labelled, run, FOUR_EPOCHS)
    assert not (run / "state").exists()


def test_the_checkpoints_of_several_seeds_are_those_of_the_chosen_seed(
    tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    results = finetune_best_first(labelled, run, {"seeds": 2}, monkeypatch)
    assert not list(run.rglob("state"))
    assert find_checkpoint(run, "last") == run / f"seed-{results['seed']}" / "checkpoints" / "last"


def test_a_run_without_dev_has_only_the_last_checkpoint(tmp_path: Path) -> None:
    labelled = write_splits("single", tmp_path / "data")
    run = tmp_path / "run"
    settings = FOUR_EPOCHS | {"data.dev_fraction": 0.0}
    results = finetune_tiny("classify", labelled / "train.csv", run, settings).results
    assert results["checkpoints"]["best"] is None
    assert find_checkpoint(run, "last") == run
    with pytest.raises(HeedfulError, match="was not evaluated on dev"):
        find_checkpoint(run, "best")


def entry_of_steps(best_step: int, last_step: int, gain: float, load_best: bool = True) -> dict[str, Any]:
    """The entry of a run whose best checkpoint has a metric that is higher by `gain` than the last one's, 0.5."""
    return checkpoint_entry(best_step, 0.5 + gain, last_step, 0.5, load_best)


@pytest.mark.parametrize(
    ("entry", "interval", "warns"),
    [
        (entry_of_steps(80, 100, 0.02), {"low": 0.4, "high": 0.6}, True),
        (entry_of_steps(80, 100, 0.02), {"low": 0.50, "high": 0.51}, False),  # the interval is narrower than the gain
        (entry_of_steps(100, 100, 0.0), {"low": 0.4, "high": 0.6}, False),  # the best step is the last one
        (entry_of_steps(80, 100, 0.02, load_best=False), {"low": 0.4, "high": 0.6}, False),
        (entry_of_steps(80, 100, 0.02), None, False),
    ],
)
def test_a_dev_split_that_is_too_small_to_choose_a_checkpoint_is_noted(entry: Any, interval: Any, warns: bool) -> None:
    assert bool(small_dev_note(entry, "accuracy", interval)) == warns


def test_the_note_on_a_small_dev_split_is_reported_and_in_the_results(
    tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Messages()
    metric_values = iter((0.51, 0.5, 0.5, 0.5))

    def eval_result(task: Any, metrics_of_ranks: list[Any]) -> EvalResult:
        return EvalResult(metric_value=next(metric_values), metrics={})

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "eval_result", eval_result)
        results = finetune_tiny("classify", labelled, tmp_path / "run", FOUR_EPOCHS, reporter=recorder).results
    (note,) = [message for message in recorder.messages if message.startswith("dev is too small to choose")]
    assert note in results["notes"]
    assert "1.0 points above" in note


@pytest.mark.parametrize(
    ("which", "match"),
    [("worst", "use best, last, or the number"), ("7", "has no weights of step 7"), ("-1", "use best, last")],
)
def test_an_unknown_or_missing_checkpoint_is_refused(tmp_path: Path, which: str, match: str) -> None:
    checkpoints = entry_of_steps(3, 3, 0.0)
    results = {"task": "classify", "metric": "accuracy", "splits": {}, "checkpoints": checkpoints}
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(HeedfulError, match=match):
        find_checkpoint(tmp_path, which)
    with pytest.raises(HeedfulError, match="not a finished run"):
        find_checkpoint(tmp_path / "none", "best")


def test_state_behind_a_link_is_emptied(tmp_path: Path) -> None:
    target = tmp_path / "other-disk"
    (target / "step-00000001").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state").symlink_to(target)
    remove_training_state(tmp_path / "run")
    assert list(target.iterdir()) == []
    assert (tmp_path / "run" / "state").is_symlink()


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
    assert any("the optimizer and its schedule start anew" in message for message in recorder.messages)
    assert not continued_run_note(str(run), "tag"), "a run of another task"
    assert not continued_run_note("heedful-mini-en", "classify"), "not a run"


def test_the_commands_take_a_checkpoint(
    tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    finetune_best_first(labelled, run, {}, monkeypatch)

    def run_command(*arguments: str) -> None:
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 0

    def json_output(*arguments: str) -> Any:
        run_command(*arguments, "--json")
        return json.loads(capsys.readouterr().out)

    for command in (("predict", str(run), "the dog ran"), ("evaluate", str(run), "--data", str(labelled))):
        best, last = (json_output(*command, "--checkpoint", which) for which in ("best", "last"))
        assert best == json_output(*command)
        assert best != last
    for which in ("best", "last"):
        run_command("look", str(run), "the dog ran", "--html", str(tmp_path / f"{which}.html"), "--checkpoint", which)
    assert (tmp_path / "best.html").read_bytes() != (tmp_path / "last.html").read_bytes()
    with pytest.raises(SystemExit):
        main(["predict", str(run), "the dog ran", "--checkpoint", "worst"])
    assert "use best, last" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["predict", str(run), "the dog ran", "--checkpoint", "worst"])
    assert "use best, last" in capsys.readouterr().err
