"""fit: evaluations, the best weights, checkpoints, resuming, signals, and unusual folders and clocks.

Unless a test has other settings, a run takes three epochs of four steps, is evaluated after every second step, and is
saved after every step (see TRAIN and FIT in tests/support/tiny_runs.py).
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heedful import atomic_io
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.train import fit as fit_module
from heedful.train.checkpoint import CheckpointManager
from heedful.train.fit import EvalResult, FitResult, FitSettings, Reporter, fit
from heedful.train.journal import Journal, read_journal
from heedful.train.trainer import DivergedError, Step, Trainer
from tests.support.processes import reproducible_files
from tests.support.tiny_runs import (
    FAULTS,
    FaultyObjective,
    copy_weights,
    evaluate_with_peak,
    make_settings,
    make_trainer,
    tensors_equal,
)

Evaluate = Callable[[Trainer], EvalResult]
EVALUATED_STEPS = (2, 4, 6, 8, 10, 12)


class RecordingReporter(Reporter):
    """Records events; requests a stop after step `stop_step`, and calls `after_step` after each step."""

    def __init__(self, stop_step: int = 0, after_step: Callable[[Step], None] = lambda step: None) -> None:
        self.stop_step = stop_step
        self.after_step = after_step
        self.steps: list[int] = []
        self.evaluations: list[tuple[int, float, bool]] = []
        self.messages: list[str] = []

    def step(self, step: Step, trainer: Trainer) -> None:
        self.steps.append(step.number)
        self.after_step(step)
        if step.number == self.stop_step:
            trainer.stop_requested = True

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        self.evaluations.append((step, result.metric_value, best))

    def message(self, text: str) -> None:
        self.messages.append(text)


class Run:
    """One process that trains in a run folder. Another instance resumes the run as another process would."""

    result: FitResult  # of the last call of `fit`

    def __init__(self, folder: Path, evaluate: Evaluate | None = evaluate_with_peak, **train: Any) -> None:
        self.folder = folder
        self.trainer = make_trainer(**train)
        self.evaluate = evaluate
        self.weights: dict[int, dict[str, Tensor]] = {}  # weights at each evaluation, by step

    def evaluate_and_record(self) -> EvalResult:
        """Evaluate the current weights, and record them."""
        assert self.evaluate is not None
        assert not self.trainer.loaded.training
        self.weights[self.trainer.step] = self.current_weights()
        return self.evaluate(self.trainer)

    def current_weights(self) -> dict[str, Tensor]:
        """Return a copy of the model's weights."""
        return copy_weights(self.trainer)

    def add_fault(self, name: str, step: int) -> None:
        """Add a fault, a key of FAULTS, to the first micro-batch of a step."""
        self.trainer.objective = FaultyObjective(self.trainer.objective, self.trainer, FAULTS[name], step=step)

    def fit(
        self, reporter: Reporter | None = None, save_last: Callable[[], None] | None = None, **settings: Any
    ) -> FitResult:
        """Train with the settings of FIT, overridden by `settings`."""
        self.result = fit(
            self.trainer,
            self.folder,
            make_settings({}, settings)[1],
            evaluate=None if self.evaluate is None else self.evaluate_and_record,
            save_last=save_last,
            reporter=reporter,
        )
        return self.result


def evaluate_in_order(*metric_values: float) -> Evaluate:
    """Return an evaluation that returns these metric values, one in each call."""
    remaining = iter(metric_values)
    return lambda trainer: EvalResult(metric_value=next(remaining), metrics={})


def journal_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the journal of a run."""
    return list(read_journal(folder / "journal.jsonl"))


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints of a run."""
    return sorted(path.name for path in (folder / "state").glob("step-*"))


def newest_checkpoint(folder: Path) -> Path:
    """Return the folder of the newest checkpoint of a run."""
    return folder / "state" / checkpoint_names(folder)[-1]


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the newest checkpoint of a run."""
    return load_file(newest_checkpoint(folder) / "tensors.safetensors")


def has_best_weights(folder: Path) -> bool:
    """Return whether the newest checkpoint of a run has the best weights beside the current ones."""
    return any(name.startswith("best/") for name in checkpoint_tensors(folder))


def send_signals(*numbers: signal.Signals, step: int) -> RecordingReporter:
    """Return a reporter that sends signals to this process after a step."""

    def after_step(finished: Step) -> None:
        if finished.number == step:
            for number in numbers:
                os.kill(os.getpid(), number)

    return RecordingReporter(after_step=after_step)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run that was not interrupted."""
    run = Run(tmp_path_factory.mktemp("uninterrupted"))
    run.fit()
    return run


# -- a run --------------------------------------------------------------------------------------------------------


def test_the_journal_has_a_record_of_each_step_and_of_each_evaluation(uninterrupted: Run) -> None:
    journal = journal_records(uninterrupted.folder)
    steps = [record for record in journal if "loss" in record]
    evaluations = [record for record in journal if "dev" in record]
    assert len(steps) + len(evaluations) == len(journal)
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert [record["step"] for record in evaluations] == list(EVALUATED_STEPS)
    assert list(steps[0]) == ["step", "epoch", "loss", "lr", "grad_norm"]
    assert list(evaluations[0]) == ["step", "dev", "metric_value", "best"]
    assert journal[2] == evaluations[0], "an evaluation comes after its step"
    assert evaluations[0]["best"] is True


def test_the_files_of_a_run(uninterrupted: Run) -> None:
    assert sorted(os.listdir(uninterrupted.folder)) == ["journal.jsonl", "state"]
    assert checkpoint_names(uninterrupted.folder) == ["step-00000011", "step-00000012"]


def test_the_result_of_a_run(uninterrupted: Run) -> None:
    result = uninterrupted.result
    evaluations = [record for record in journal_records(uninterrupted.folder) if "dev" in record]
    best_record = [record for record in evaluations if record["best"]][-1]
    assert result.stop_reason == "completed"
    assert result.resumed_from == 0
    assert result.best_step == best_record["step"]
    assert result.best_step in (6, 8), "the metric is best near step 7"
    assert result.best_metric == best_record["metric_value"]
    assert result.last_metric == evaluations[-1]["metric_value"]


def test_the_model_has_the_best_weights(uninterrupted: Run) -> None:
    assert tensors_equal(uninterrupted.current_weights(), uninterrupted.weights[uninterrupted.result.best_step])
    assert not tensors_equal(uninterrupted.current_weights(), uninterrupted.weights[12])


def test_the_model_may_have_the_last_weights(tmp_path: Path, uninterrupted: Run) -> None:
    run = Run(tmp_path)
    assert run.fit(load_best_at_end=False) == uninterrupted.result
    assert tensors_equal(run.current_weights(), run.weights[12])
    assert tensors_equal(run.current_weights(), uninterrupted.weights[12])
    assert not has_best_weights(tmp_path)
    assert not run.trainer.loaded.training


def test_without_an_evaluation_the_last_weights_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, evaluate=None)
    assert run.fit() == FitResult(
        stop_reason="completed", best_step=0, best_metric=None, last_metric=None, resumed_from=0
    )
    assert not [record for record in journal_records(tmp_path) if "dev" in record]
    weights, checkpoint = run.current_weights(), checkpoint_tensors(tmp_path)
    assert tensors_equal(weights, {name: checkpoint[f"model/{name}"] for name in weights})


@pytest.mark.parametrize(
    ("eval_every_epochs", "max_steps", "expected"),
    [
        (1.0, 12, [4, 8, 12]),
        (0.5, 7, [2, 4, 6, 7]),
        (0.01, 3, [1, 2, 3]),
        (2.0, 12, [8, 12]),
        (100.0, 5, [5]),
        (0.75, 12, [3, 6, 9, 12]),
    ],
)
def test_evaluations_are_at_equal_distances_and_at_the_end(
    tmp_path: Path, eval_every_epochs: float, max_steps: int, expected: list[int]
) -> None:
    reporter = RecordingReporter()
    Run(tmp_path, max_steps=max_steps).fit(reporter, eval_every_epochs=eval_every_epochs)
    assert [step for step, _, _ in reporter.evaluations] == expected
    assert reporter.steps == list(range(1, max_steps + 1))


# -- early stopping and ties ------------------------------------------------------------------------------------------


def stop_early(folder: Path) -> Run:
    """Return a run that stopped at step 10, after three evaluations without a better metric than 0.3."""
    run = Run(folder, evaluate_in_order(0.1, 0.3, 0.2, 0.3, 0.2))
    run.fit(patience=3)
    return run


def test_early_stopping(tmp_path: Path) -> None:
    reporter = RecordingReporter()
    run = Run(tmp_path, evaluate_in_order(0.1, 0.3, 0.2, 0.3, 0.2))
    result = run.fit(reporter, patience=3)
    assert reporter.messages == ["early stopping: 3 evaluations without a better metric (fit.patience)"]
    # steps 4 and 8 tie: the later step is the best one, but a tie does not reset patience
    assert result == FitResult(
        stop_reason="early_stopping", best_step=8, best_metric=0.3, last_metric=0.2, resumed_from=0
    )
    assert run.trainer.step == 10
    assert checkpoint_names(tmp_path)[-1] == "step-00000010"
    assert tensors_equal(run.current_weights(), run.weights[8])


def test_a_run_that_stopped_early_does_not_train_again(tmp_path: Path) -> None:
    run = stop_early(tmp_path)
    resumed, reporter = Run(tmp_path, evaluate_in_order()), RecordingReporter()
    assert resumed.fit(reporter, patience=3) == FitResult(
        stop_reason="early_stopping", best_step=8, best_metric=0.3, last_metric=0.2, resumed_from=10
    )
    assert reporter.steps == []
    assert tensors_equal(resumed.current_weights(), run.current_weights())


def test_a_run_that_stopped_early_resumes_without_patience(tmp_path: Path) -> None:
    stop_early(tmp_path)
    resumed = Run(tmp_path, evaluate_in_order(0.9))
    assert resumed.fit(patience=0) == FitResult(
        stop_reason="completed", best_step=12, best_metric=0.9, last_metric=0.9, resumed_from=10
    )


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize(
    ("scores", "best_step"),  # (metric value, tie breaker) at each of EVALUATED_STEPS
    [
        pytest.param(
            [(0.1, 9.0), (0.5, 0.0), (0.4, 9.0), (0.3, 0.0), (0.2, 0.0), (0.1, 9.0)], 4, id="the metric decides"
        ),
        pytest.param(
            [(0.5, -0.3), (0.5, -0.1), (0.5, -0.2), (0.4, 0.0), (0.5, -0.3), (0.5, -0.4)], 4, id="then the tie breaker"
        ),
        pytest.param(
            [(0.5, -0.1), (0.5, -0.1), (0.5, -0.2), (0.5, -0.1), (0.5, -0.2), (0.4, 0.0)], 8, id="then the later step"
        ),
        pytest.param(
            [(0.5, -0.1), (0.5 + 1e-12, -0.2), (0.5, -0.1 - 1e-12), (0.4, 0.0), (0.4, 0.0), (0.4, 0.0)],
            6,
            id="rounded to nine digits",
        ),
    ],
)
def test_equal_evaluations_are_ranked_by_the_tie_and_then_the_later_step(
    tmp_path: Path, scores: list[tuple[float, float]], best_step: int, is_stopped: bool
) -> None:
    score_by_step = dict(zip(EVALUATED_STEPS, scores, strict=True))

    def evaluate(trainer: Trainer) -> EvalResult:
        metric_value, tie_breaker = score_by_step[trainer.step]
        return EvalResult(metric_value=metric_value, tie_breaker=tie_breaker, metrics={})

    if is_stopped:  # the best metric and its tie breaker are in the checkpoint
        assert Run(tmp_path, evaluate).fit(RecordingReporter(stop_step=9)).stop_reason == "interrupted"
    run = Run(tmp_path, evaluate)
    result = run.fit()
    assert result.best_step == best_step
    assert result.best_metric == score_by_step[best_step][0]
    assert result.last_metric == score_by_step[12][0]
    if not is_stopped:
        assert tensors_equal(run.current_weights(), run.weights[best_step])


def test_a_better_tie_does_not_reset_patience(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=0.5, tie_breaker=trainer.step, metrics={}))
    result = run.fit(patience=2)
    assert result.stop_reason == "early_stopping"
    assert result.best_step == run.trainer.step == 6


@pytest.mark.parametrize(
    ("metric_values", "load_best_at_end", "is_saved"),
    [
        pytest.param([3, 2, 1], True, True, id="the best step is an earlier one"),
        pytest.param([1, 2, 3], True, False, id="the best step is the last one"),
        pytest.param([3, 2, 1], False, False, id="the last weights stay in the model"),
    ],
)
def test_save_last_is_called_if_earlier_weights_are_better(
    tmp_path: Path, metric_values: list[float], load_best_at_end: bool, is_saved: bool
) -> None:
    saved_weights = []
    run = Run(tmp_path, evaluate_in_order(*metric_values))
    run.fit(
        save_last=lambda: saved_weights.append(run.current_weights()),
        load_best_at_end=load_best_at_end,
        eval_every_epochs=1.0,  # at steps 4, 8 and 12
    )
    assert len(saved_weights) == is_saved
    if is_saved:
        assert tensors_equal(saved_weights[0], run.weights[12])
        assert tensors_equal(run.current_weights(), run.weights[4])


def test_a_metric_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"^step 2: .*nan for its metric"):
        Run(tmp_path, evaluate_in_order(math.nan)).fit()


def test_other_metrics_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    metrics = {"loss": math.nan, "accuracy": 1.0, "perplexity": math.inf, "count": 3}
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=1.0, metrics=metrics))
    with pytest.raises(
        DivergedError, match=r"^step 2: the evaluation gave nan for loss and inf for perplexity, so .*optimizer.lr"
    ):
        run.fit()
    assert not [record for record in journal_records(tmp_path) if "dev" in record]


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluate", "saved_steps"),
    [
        pytest.param(None, [3, 6, 9, 12], id="every minute"),
        # five steps are 1.25 epochs; a minute counts from the last checkpoint, whatever it was saved for
        pytest.param(evaluate_with_peak, [3, 5, 8, 10, 12], id="every minute and after evaluations at steps 5 and 10"),
    ],
)
def test_checkpoints_are_saved_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate: Evaluate | None, saved_steps: list[int]
) -> None:
    now = 0.0
    recorded_steps: list[int] = []
    save = CheckpointManager.save

    def advance_clock(step: Step) -> None:
        nonlocal now
        now += 25.0  # seconds, so that the third step after a checkpoint ends after more than a minute

    def record_and_save(manager: CheckpointManager, step: int, *arguments: Any) -> Path:
        recorded_steps.append(step)
        return save(manager, step, *arguments)

    monkeypatch.setattr(fit_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(CheckpointManager, "save", record_and_save)
    Run(tmp_path, evaluate).fit(
        RecordingReporter(after_step=advance_clock), checkpoint_every_minutes=1.0, eval_every_epochs=1.25, keep_last=3
    )
    assert recorded_steps == saved_steps
    assert checkpoint_names(tmp_path) == [f"step-{step:08d}" for step in saved_steps[-3:]]


def test_the_journal_is_synced_before_a_checkpoint_stores_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced_sizes: list[int] = []  # bytes of the journal at each sync
    sync, save = Journal.sync, CheckpointManager.save

    def sync_and_record(journal: Journal) -> None:
        sync(journal)
        synced_sizes.append(journal.num_bytes)

    def check_and_save(manager: CheckpointManager, step: int, tensors: Any, values: dict[str, Any]) -> Path:
        assert values["journal"] == synced_sizes[-1]
        return save(manager, step, tensors, values)

    monkeypatch.setattr(Journal, "sync", sync_and_record)
    monkeypatch.setattr(CheckpointManager, "save", check_and_save)
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert len(synced_sizes) == 12, "one for each checkpoint"
    assert synced_sizes == sorted(set(synced_sizes)), "the journal grows between checkpoints"


@pytest.mark.parametrize(
    ("evaluate", "load_best", "tensors"),
    [(evaluate_with_peak, True, 4), (evaluate_with_peak, False, 3), (None, True, 3), (None, False, 3)],
)
def test_disk_space_is_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate: Evaluate | None, load_best: bool, tensors: int
) -> None:
    """A checkpoint has the weights, two moments and, if an evaluation may find them, the best weights, in float32."""
    sizes: list[int] = []
    monkeypatch.setattr(CheckpointManager, "check_space", lambda manager, size: sizes.append(size))
    run = Run(tmp_path, evaluate)
    run.fit(RecordingReporter(stop_step=1), load_best_at_end=load_best)
    min_size = 4 * tensors * run.trainer.loaded.count()
    assert min_size <= sizes[0] <= min_size + 400, "beside them there are only counts of steps"


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_stopped_run_resumes_exactly(tmp_path: Path, uninterrupted: Run, stop: int) -> None:
    stopped = Run(tmp_path)
    assert stopped.fit(RecordingReporter(stop_step=stop)).stop_reason == "interrupted"
    assert stopped.trainer.step == stop
    assert checkpoint_names(tmp_path)[-1] == f"step-{stop:08d}"
    resumed, reporter = Run(tmp_path), RecordingReporter()
    result = resumed.fit(reporter)
    assert result.stop_reason == "completed"
    assert result.resumed_from == stop
    assert result.best_step == uninterrupted.result.best_step
    assert result.best_metric == uninterrupted.result.best_metric
    assert reporter.steps == list(range(stop + 1, 13))
    assert reporter.messages == [f"resuming after step {stop}"]
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted.folder)
    assert tensors_equal(resumed.current_weights(), uninterrupted.current_weights())


def test_a_finished_run_does_not_train_again(tmp_path: Path, uninterrupted: Run) -> None:
    Run(tmp_path).fit()
    resumed, reporter = Run(tmp_path), RecordingReporter()
    assert resumed.fit(reporter).resumed_from == 12
    assert reporter.steps == []
    assert tensors_equal(resumed.current_weights(), uninterrupted.current_weights())
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted.folder)


def test_a_failed_run_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    def fail(step: Step) -> None:
        if step.number == 9:
            raise RuntimeError("simulated")

    failed_folder, reference_folder = tmp_path / "failed", tmp_path / "reference"
    settings = {"eval_every_epochs": 1.0, "checkpoint_every_minutes": 60.0}  # checkpoints at steps 4, 8 and 12 only
    with pytest.raises(RuntimeError, match="simulated"):
        Run(failed_folder).fit(RecordingReporter(after_step=fail), **settings)
    assert checkpoint_names(failed_folder) == ["step-00000004", "step-00000008"]
    assert journal_records(failed_folder)[-1]["step"] == 9
    with (failed_folder / "journal.jsonl").open("ab") as file:
        file.write(b'{"step": 10, "lo')  # a record that was written in part
    assert Run(failed_folder).fit(**settings).resumed_from == 8
    Run(reference_folder).fit(**settings)
    assert reproducible_files(failed_folder) == reproducible_files(reference_folder)


def test_a_damaged_checkpoint_falls_back_to_the_previous_checkpoint(tmp_path: Path, uninterrupted: Run) -> None:
    Run(tmp_path).fit(RecordingReporter(stop_step=7))
    (tmp_path / "state" / "step-00000007" / "values.json").write_text("{}")
    with pytest.warns(HeedfulWarning, match="step-00000007 is damaged"):
        assert Run(tmp_path).fit().resumed_from == 6
    files, expected_files = reproducible_files(tmp_path), reproducible_files(uninterrupted.folder)
    assert files["tensors"] == expected_files["tensors"]
    assert files["journal"] == expected_files["journal"]


def test_other_settings_are_refused(tmp_path: Path) -> None:
    Run(tmp_path).fit(RecordingReporter(stop_step=3))
    files = reproducible_files(tmp_path)
    with pytest.raises(HeedfulError, match=r"batch_size = 5, .* 6"):
        Run(tmp_path, batch_size=6).fit()
    assert reproducible_files(tmp_path) == files


def test_a_journal_that_is_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    Run(tmp_path).fit(RecordingReporter(stop_step=3))
    (tmp_path / "journal.jsonl").write_bytes(b"")
    with pytest.raises(HeedfulError, match=r"journal.jsonl has 0 bytes"):
        Run(tmp_path).fit()


def test_a_resumed_run_may_drop_the_best_weights(tmp_path: Path, uninterrupted: Run) -> None:
    Run(tmp_path).fit(RecordingReporter(stop_step=9))
    assert has_best_weights(tmp_path)
    run = Run(tmp_path)
    run.fit(load_best_at_end=False)
    assert tensors_equal(run.current_weights(), uninterrupted.weights[12])
    assert not has_best_weights(tmp_path)


# -- numbers that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "loss_is_nan"), [("nan loss", True), ("nan gradient", False)])
def test_a_diverging_run_stops_and_keeps_its_checkpoint(
    tmp_path: Path, uninterrupted: Run, fault: str, loss_is_nan: bool
) -> None:
    run = Run(tmp_path)
    run.add_fault(fault, step=7)
    with pytest.raises(DivergedError, match=r"^step 7: "):
        run.fit()
    last_record = journal_records(tmp_path)[-1]
    assert last_record["step"] == 7
    assert last_record["grad_norm"] == "NaN"
    assert last_record["skipped"] is True
    assert (last_record["loss"] == "NaN") == loss_is_nan
    assert checkpoint_names(tmp_path)[-1] == "step-00000006"
    assert all(tensor.isfinite().all() for tensor in checkpoint_tensors(tmp_path).values())
    Run(tmp_path).fit()  # now without a fault
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted.folder)


def test_skipped_steps_are_in_the_journal(tmp_path: Path) -> None:
    run = Run(tmp_path, max_nonfinite_steps=1)
    run.add_fault("nan loss", step=7)
    assert run.fit().stop_reason == "completed"
    records = {record["step"]: record for record in journal_records(tmp_path) if "loss" in record}
    assert [step for step, record in records.items() if "skipped" in record] == [7]
    assert records[7]["loss"] == "NaN"
    assert records[8]["loss"] < 10


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_makes_a_checkpoint(tmp_path: Path, uninterrupted: Run, name: str) -> None:
    handlers = {number: signal.getsignal(number) for number in fit_module.SIGNALS}
    run = Run(tmp_path)
    run.add_fault(name, step=6)
    assert run.fit().stop_reason == "interrupted"
    assert {number: signal.getsignal(number) for number in fit_module.SIGNALS} == handlers
    assert run.trainer.step == 5, "the step with the signal was abandoned"
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted.folder)


def test_a_second_sigint_stops_at_once(tmp_path: Path, uninterrupted: Run) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path).fit(send_signals(signal.SIGTERM, signal.SIGINT, step=5))
    assert signal.getsignal(signal.SIGINT) == handler
    assert checkpoint_names(tmp_path)[-1] == "step-00000004"
    assert Run(tmp_path).fit().resumed_from == 4
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted.folder)


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """A shell script ignores SIGINT in commands that it starts in the background."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = Run(tmp_path, evaluate=None)
        run.add_fault("SIGINT", step=3)
        assert run.fit(send_signals(signal.SIGTERM, step=5)).stop_reason == "interrupted"
        assert run.trainer.step == 5
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("step", [4, 12])
def test_a_signal_stops_an_evaluation(tmp_path: Path, uninterrupted: Run, step: int) -> None:
    def evaluate(trainer: Trainer) -> EvalResult:
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # the signal interrupts it
        return evaluate_with_peak(trainer)

    started = time.monotonic()
    run = Run(tmp_path, evaluate)
    assert run.fit().stop_reason == "interrupted"
    assert time.monotonic() - started < 30
    assert run.trainer.step == step
    assert checkpoint_names(tmp_path)[-1] == f"step-{step:08d}"
    last_record = journal_records(tmp_path)[-1]
    assert last_record["step"] == step
    assert "loss" in last_record, "the step is recorded, and the evaluation is not"
    reporter = RecordingReporter()
    result = Run(tmp_path).fit(reporter)
    assert reporter.evaluations[0][0] == step, "the interrupted evaluation comes first"
    assert result.stop_reason == "completed"
    assert result.best_step == uninterrupted.result.best_step
    assert result.resumed_from == step
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted.folder)


def test_a_signal_before_an_evaluation_skips_it(tmp_path: Path, uninterrupted: Run) -> None:
    run = Run(tmp_path)
    assert run.fit(RecordingReporter(stop_step=6)).stop_reason == "interrupted"
    assert 6 not in run.weights
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted.folder)


def test_a_signal_at_the_last_step_is_handled(tmp_path: Path) -> None:
    """The run is interrupted, so that nothing begins after it, such as another seed; a resume finds it finished."""
    run = Run(tmp_path, evaluate=None)
    assert run.fit(RecordingReporter(stop_step=12)).stop_reason == "interrupted"
    resumed = Run(tmp_path, evaluate=None)
    assert resumed.fit().stop_reason == "completed"
    assert resumed.trainer.step == run.trainer.step == 12


def test_a_signal_at_early_stopping_is_handled(tmp_path: Path) -> None:
    run = Run(tmp_path, evaluate_in_order(0.3, 0.2))

    class StopAfterWorseEvaluation(RecordingReporter):
        def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
            run.trainer.stop_requested = not best

    assert run.fit(StopAfterWorseEvaluation(), patience=1).stop_reason == "interrupted"
    resumed = Run(tmp_path, evaluate_in_order())
    assert resumed.fit(patience=1).stop_reason == "early_stopping"
    assert resumed.trainer.step == run.trainer.step == 4


def test_a_signal_before_the_first_step(tmp_path: Path, uninterrupted: Run) -> None:
    run = Run(tmp_path)
    run.trainer.stop_requested = True
    assert run.fit() == FitResult(
        stop_reason="interrupted", best_step=0, best_metric=None, last_metric=None, resumed_from=0
    )
    assert not (tmp_path / "state").exists()
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted.folder)


def test_fit_runs_in_a_thread_that_cannot_handle_signals(tmp_path: Path) -> None:
    results: list[FitResult] = []
    thread = threading.Thread(target=lambda: results.append(Run(tmp_path).fit()))
    thread.start()
    thread.join()
    assert [result.stop_reason for result in results] == ["completed"]


# -- unusual folders and clocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Übung ☃ 文, with 'spaces'", "100% {x} [a] *\n"])
def test_odd_folder_names(tmp_path: Path, uninterrupted: Run, name: str) -> None:
    folder = tmp_path / name / name
    Run(folder).fit(RecordingReporter(stop_step=5))
    Run(folder).fit()
    assert reproducible_files(folder) == reproducible_files(uninterrupted.folder)


def test_a_folder_behind_a_link(tmp_path: Path, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    leave_folder = RecordingReporter(stop_step=5, after_step=lambda step: monkeypatch.chdir("/"))
    Run(Path("link")).fit(leave_folder)
    Run(tmp_path / "real").fit()
    assert reproducible_files(tmp_path / "link") == reproducible_files(uninterrupted.folder)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HeedfulError, match=r"file/journal.jsonl cannot be written: File exists"):
        Run(tmp_path / "file").fit()


def test_a_folder_on_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    Run(tmp_path).fit(RecordingReporter(stop_step=3))
    monkeypatch.setattr(atomic_io, "_mkdir", refuse)
    with pytest.raises(HeedfulError, match=r"step 4 .*Read-only file system"):
        Run(tmp_path).fit()
    assert checkpoint_names(tmp_path) == ["step-00000002", "step-00000003"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(HeedfulError, match=r"journal.jsonl cannot be written: Permission denied"):
            Run(tmp_path).fit()
    finally:
        tmp_path.chmod(0o755)


def test_only_the_monotonic_clock_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> float:
        raise AssertionError("the wall clock was read")

    monkeypatch.setattr(time, "time", fail)
    assert Run(tmp_path).fit(checkpoint_every_minutes=1e-9).stop_reason == "completed"


# -- time budgets and settings ----------------------------------------------------------------------------------------


def test_a_time_budget_ends_with_an_evaluation(tmp_path: Path) -> None:
    reporter = RecordingReporter()
    run = Run(tmp_path, max_steps=None, time_budget=0.005)  # minutes, which are 0.3 s
    assert run.fit(reporter, eval_every_epochs=1000.0).stop_reason == "completed"
    assert run.trainer.seconds >= 0.3
    assert [step for step, _, _ in reporter.evaluations] == [run.trainer.step] == reporter.steps[-1:]
    values = json.loads((newest_checkpoint(tmp_path) / "values.json").read_text())
    assert values["seconds"] >= 0.3


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"eval_every_epochs": 0.0}, r"^eval_every_epochs is 0.0; expected a number above 0"),
        ({"patience": -1}, r"^patience is -1; expected a whole number from 0"),
        ({"checkpoint_every_minutes": -1.0}, r"^checkpoint_every_minutes is -1.0; expected a number from 0"),
        ({"checkpoint_every_minutes": math.nan}, r"^checkpoint_every_minutes is nan"),
        ({"keep_last": 0}, r"^keep_last is 0; expected a whole number from 1"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(HeedfulError, match=match):
        FitSettings(**settings)


def test_fit_prints_nothing_by_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path).fit(RecordingReporter(stop_step=3))
    Run(tmp_path).fit()
    assert capfd.readouterr() == ("", "")


def test_fit_leaves_gradients_enabled(tmp_path: Path) -> None:
    Run(tmp_path).fit()
    assert torch.is_grad_enabled()
