"""fit: evaluations, the best weights, checkpoints, resuming, signals, and unusual folders and clocks."""

from __future__ import annotations

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
    LINES,
    FaultyObjective,
    copy_weights,
    evaluate_with_peak,
    make_settings,
    make_trainer,
    tensors_equal,
)


class RecordingReporter(Reporter):
    """Records events; requests a stop after step `stop_step`, and calls `after_step` after each step."""

    def __init__(self, stop_step: int = 0, after_step: Callable[[Step], None] = lambda step: None) -> None:
        self.stop_step, self.after_step = stop_step, after_step
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
    """One process that trains in a run folder; another instance resumes the run as another process would."""

    def __init__(
        self, folder: Path, evaluate: Callable[[Trainer], EvalResult] | None = evaluate_with_peak, **train: Any
    ) -> None:
        self.folder = folder
        self.trainer = make_trainer(**train)
        self.evaluate = evaluate
        self.weights: dict[int, dict[str, Tensor]] = {}  # weights at each evaluation, by step

    def evaluate_and_record(self) -> EvalResult:
        assert self.evaluate is not None
        assert not self.trainer.loaded.training
        self.weights[self.trainer.step] = self.current_weights()
        return self.evaluate(self.trainer)

    def current_weights(self) -> dict[str, Tensor]:
        return copy_weights(self.trainer)

    def fit(self, reporter: Reporter | None = None, **settings: Any) -> FitResult:
        evaluate = None if self.evaluate is None else self.evaluate_and_record
        return fit(self.trainer, self.folder, make_settings({}, settings)[1], evaluate=evaluate, reporter=reporter)


def journal_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the journal of a run."""
    return list(read_journal(folder / "journal.jsonl"))


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints of a run."""
    return sorted(path.name for path in (folder / "state").glob("step-*"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, FitResult]:
    """An uninterrupted run and its result."""
    run = Run(tmp_path_factory.mktemp("uninterrupted"))
    return run, run.fit()


# -- a run --------------------------------------------------------------------------------------------------------


def test_the_journal_and_the_checkpoints_of_a_run(uninterrupted: tuple[Run, FitResult]) -> None:
    run, result = uninterrupted
    journal = journal_records(run.folder)
    assert [record["step"] for record in journal if "loss" in record] == list(range(1, 13))
    assert [record["step"] for record in journal if "dev" in record] == [2, 4, 6, 8, 10, 12]
    assert list(journal[0]) == ["step", "epoch", "loss", "lr", "grad_norm"]
    assert journal[2] | {"metric_value": 0, "dev": 0} == {"step": 2, "dev": 0, "metric_value": 0, "best": True}
    assert checkpoint_names(run.folder) == ["step-00000011", "step-00000012"]
    assert sorted(os.listdir(run.folder)) == ["journal.jsonl", "state"]
    assert result == FitResult(
        stop_reason="completed",
        best_step=result.best_step,
        best_metric=result.best_metric,
        last_metric=result.last_metric,
        resumed_from=0,
    )
    assert (
        result.best_step in (6, 8)
        and result.best_metric
        == journal[-1 - journal[::-1].index(next(r for r in journal[::-1] if r.get("best")))]["metric_value"]
    )


def test_the_model_has_the_best_weights_or_the_last(tmp_path: Path, uninterrupted: tuple[Run, FitResult]) -> None:
    run, result = uninterrupted
    assert tensors_equal(run.current_weights(), run.weights[result.best_step])
    assert not tensors_equal(run.current_weights(), run.weights[12])
    last = Run(tmp_path)
    last_result = last.fit(load_best_at_end=False)
    assert tensors_equal(last.current_weights(), run.weights[12]) and tensors_equal(
        last.current_weights(), last.weights[12]
    )
    assert last_result == result
    assert not [name for name in checkpoint_tensors(tmp_path) if name.startswith("best/")]
    assert not last.trainer.loaded.training


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the newest checkpoint of a run."""
    from safetensors.torch import load_file

    return load_file(max((folder / "state").glob("step-*")) / "tensors.safetensors")


def test_without_an_evaluation_the_last_weights_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, evaluate=None)
    assert run.fit() == FitResult(
        stop_reason="completed", best_step=0, best_metric=None, last_metric=None, resumed_from=0
    )
    assert not [record for record in journal_records(tmp_path) if "dev" in record]
    assert tensors_equal(
        {f"model/{name}": tensor for name, tensor in run.current_weights().items()} | checkpoint_tensors(tmp_path),
        checkpoint_tensors(tmp_path),
    )


@pytest.mark.parametrize(
    ("evaluate", "length", "expected"),
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
    tmp_path: Path, evaluate: float, length: int, expected: list[int]
) -> None:
    reporter = RecordingReporter()
    Run(tmp_path, max_steps=length).fit(reporter, eval_every_epochs=evaluate)
    assert [step for step, _, _ in reporter.evaluations] == expected
    assert reporter.steps == list(range(1, length + 1))


def test_early_stopping(tmp_path: Path) -> None:
    scores = iter([0.1, 0.3, 0.2, 0.3, 0.2, 0.9])
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=next(scores), metrics={}))
    first_reporter = RecordingReporter()
    result = run.fit(first_reporter, patience=3)
    assert first_reporter.messages == ["early stopping: 3 evaluations without a better metric (fit.patience)"]
    assert result == FitResult(
        stop_reason="early_stopping", best_step=8, best_metric=0.3, last_metric=0.2, resumed_from=0
    )  # step 8 equals step 4, and is later
    assert run.trainer.step == 10 and checkpoint_names(tmp_path)[-1] == "step-00000010"
    assert tensors_equal(run.current_weights(), run.weights[8])
    resumed = Run(tmp_path, lambda trainer: EvalResult(metric_value=1.0, metrics={}))
    reporter = RecordingReporter()
    assert resumed.fit(reporter, patience=3) == FitResult(
        stop_reason="early_stopping", best_step=8, best_metric=0.3, last_metric=0.2, resumed_from=10
    )
    assert reporter.steps == [] and tensors_equal(resumed.current_weights(), run.current_weights())
    without_patience = Run(tmp_path, lambda trainer: EvalResult(metric_value=next(scores), metrics={}))
    assert without_patience.fit(patience=0) == FitResult(
        stop_reason="completed", best_step=12, best_metric=0.9, last_metric=0.9, resumed_from=10
    )


TIES = {  # name -> metric and tie breaker of the evaluations at steps 2, 4, ..., 12; step of the best one
    "the metric decides": ([(0.1, 9.0), (0.5, 0.0), (0.4, 9.0), (0.3, 0.0), (0.2, 0.0), (0.1, 9.0)], 4),
    "then the tie breaker": ([(0.5, -0.3), (0.5, -0.1), (0.5, -0.2), (0.4, 0.0), (0.5, -0.3), (0.5, -0.4)], 4),
    "then the later step": ([(0.5, -0.1), (0.5, -0.1), (0.5, -0.2), (0.5, -0.1), (0.5, -0.2), (0.4, 0.0)], 8),
    "rounded to nine digits": (
        [(0.5, -0.1), (0.5 + 1e-12, -0.2), (0.5, -0.1 - 1e-12), (0.4, 0.0), (0.4, 0.0), (0.4, 0.0)],
        6,
    ),
}


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("case", TIES)
def test_equal_evaluations_are_ranked_by_the_tie_and_then_the_later_step(
    tmp_path: Path, case: str, is_stopped: bool
) -> None:
    scores, best = TIES[case]

    def score(trainer: Trainer) -> EvalResult:
        metric, tie_breaker = scores[trainer.step // 2 - 1]
        return EvalResult(metric_value=metric, tie_breaker=tie_breaker, metrics={})

    if is_stopped:  # the best metric and its tie breaker are in the checkpoint
        assert Run(tmp_path, score).fit(RecordingReporter(stop_step=9)).stop_reason == "interrupted"
    run = Run(tmp_path, score)
    result = run.fit()
    assert (result.best_step, result.best_metric, result.last_metric) == (best, scores[best // 2 - 1][0], scores[-1][0])
    if not is_stopped:
        assert tensors_equal(run.current_weights(), run.weights[best])


def test_a_better_tie_does_not_reset_patience(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=0.5, tie_breaker=trainer.step, metrics={}))
    result = run.fit(patience=2)
    assert (result.stop_reason, result.best_step, run.trainer.step) == ("early_stopping", 6, 6)


def test_save_last_is_called_if_earlier_weights_are_better(tmp_path: Path) -> None:
    for name, metrics, load_best in (("early", [3, 2, 1], True), ("late", [1, 2, 3], True), ("last", [3, 2, 1], False)):
        scores, saved = iter(metrics), []
        run = Run(tmp_path / name, lambda trainer, scores=scores: EvalResult(metric_value=next(scores), metrics={}))
        fit_settings = make_settings({}, {"load_best_at_end": load_best, "eval_every_epochs": 1.0})[1]
        fit(
            run.trainer,
            run.folder,
            fit_settings,
            evaluate=run.evaluate_and_record,
            save_last=lambda run=run, saved=saved: saved.append(run.current_weights()),
        )
        assert len(saved) == (name == "early")
        if saved:
            assert tensors_equal(saved[0], run.weights[12]) and tensors_equal(run.current_weights(), run.weights[4])


def test_a_metric_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=math.nan, metrics={}))
    with pytest.raises(DivergedError, match=r"^step 2: .*nan for its metric"):
        run.fit()


def test_other_metrics_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    numbers = {"loss": math.nan, "accuracy": 1.0, "perplexity": math.inf, "count": 3}
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=1.0, metrics=numbers))
    with pytest.raises(
        DivergedError, match=r"^step 2: the evaluation gave nan for loss and inf for perplexity, so .*optimizer.lr"
    ):
        run.fit()
    assert not [record for record in journal_records(tmp_path) if "dev" in record]


def test_checkpoints_are_saved_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(fit_module, "time", SimpleNamespace(monotonic=lambda: now))
    saved: list[int] = []
    original = CheckpointManager.save

    def save(manager: CheckpointManager, step: int, *arguments: Any) -> Path:
        saved.append(step)
        return original(manager, step, *arguments)

    monkeypatch.setattr(CheckpointManager, "save", save)

    def tick(step: Step) -> None:
        nonlocal now
        now += 25.0

    Run(tmp_path, evaluate=None).fit(RecordingReporter(after_step=tick), checkpoint_every_minutes=1.0, keep_last=3)
    assert saved == [3, 6, 9, 12]
    assert checkpoint_names(tmp_path) == ["step-00000006", "step-00000009", "step-00000012"]
    saved.clear()
    Run(tmp_path / "b").fit(RecordingReporter(after_step=tick), checkpoint_every_minutes=1.0, eval_every_epochs=1.25)
    assert saved == [3, 5, 8, 10, 12]


def test_the_journal_is_synced_before_a_checkpoint_stores_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = [0]
    original_sync, original_save = Journal.sync, CheckpointManager.save

    def sync(journal: Journal) -> None:
        original_sync(journal)
        synced.append(journal.num_bytes)

    def save(manager: CheckpointManager, step: int, tensors: Any, values: dict[str, Any]) -> Path:
        assert values["journal"] == synced[-1] > synced[-2]
        return original_save(manager, step, tensors, values)

    monkeypatch.setattr(Journal, "sync", sync)
    monkeypatch.setattr(CheckpointManager, "save", save)
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert len(synced) == 13


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_stopped_run_resumes_exactly(tmp_path: Path, uninterrupted: tuple[Run, FitResult], stop: int) -> None:
    first = Run(tmp_path)
    assert first.fit(RecordingReporter(stop_step=stop)).stop_reason == "interrupted"
    assert first.trainer.step == stop and checkpoint_names(tmp_path)[-1] == f"step-{stop:08d}"
    reporter = RecordingReporter()
    second = Run(tmp_path)
    result = second.fit(reporter)
    assert (result.resumed_from, result.stop_reason, result.best_metric, result.best_step) == (
        stop,
        "completed",
        uninterrupted[1].best_metric,
        uninterrupted[1].best_step,
    )
    assert reporter.steps == list(range(stop + 1, 13)) and reporter.messages == [f"resuming after step {stop}"]
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted[0].folder)
    assert tensors_equal(second.current_weights(), uninterrupted[0].current_weights())
    third = Run(tmp_path)
    assert third.fit(reporter).resumed_from == 12  # the run was finished
    assert tensors_equal(third.current_weights(), uninterrupted[0].current_weights()) and reproducible_files(
        tmp_path
    ) == reproducible_files(uninterrupted[0].folder)


def test_a_failed_run_resumes_from_its_last_checkpoint(tmp_path: Path, uninterrupted: tuple[Run, FitResult]) -> None:
    def fail(step: Step) -> None:
        if step.number == 9:
            raise KeyError

    with pytest.raises(KeyError):
        Run(tmp_path).fit(RecordingReporter(after_step=fail), checkpoint_every_minutes=60.0, eval_every_epochs=1.0)
    assert checkpoint_names(tmp_path) == ["step-00000004", "step-00000008"]
    assert journal_records(tmp_path)[-1]["step"] == 9
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"step": 10, "lo')
    run = Run(tmp_path)
    assert run.fit(eval_every_epochs=1.0, checkpoint_every_minutes=60.0).resumed_from == 8
    steady = Run(tmp_path / "steady")
    steady.fit(eval_every_epochs=1.0, checkpoint_every_minutes=60.0)
    assert reproducible_files(tmp_path) == reproducible_files(tmp_path / "steady")


def test_a_damaged_checkpoint_costs_one_checkpoint(tmp_path: Path, uninterrupted: tuple[Run, FitResult]) -> None:
    Run(tmp_path).fit(RecordingReporter(stop_step=7))
    (tmp_path / "state" / "step-00000007" / "values.json").write_text("{}")
    run = Run(tmp_path)
    with pytest.warns(HeedfulWarning, match="step-00000007 is damaged"):
        assert run.fit().resumed_from == 6
    assert reproducible_files(tmp_path)["tensors"] == reproducible_files(uninterrupted[0].folder)["tensors"]
    assert reproducible_files(tmp_path)["journal"] == reproducible_files(uninterrupted[0].folder)["journal"]


def test_other_settings_or_a_shorter_journal_are_refused(tmp_path: Path) -> None:
    Run(tmp_path).fit(RecordingReporter(stop_step=3))
    before = reproducible_files(tmp_path)
    with pytest.raises(HeedfulError, match=r"batch_size = 5, .* 6"):
        Run(tmp_path, batch_size=6).fit()
    assert reproducible_files(tmp_path) == before
    (tmp_path / "journal.jsonl").write_bytes(b"")
    with pytest.raises(HeedfulError, match=r"journal.jsonl has 0 bytes"):
        Run(tmp_path).fit()


def test_a_resumed_run_may_drop_the_best_weights(tmp_path: Path, uninterrupted: tuple[Run, FitResult]) -> None:
    Run(tmp_path).fit(RecordingReporter(stop_step=9))
    assert [name for name in checkpoint_tensors(tmp_path) if name.startswith("best/")]
    run = Run(tmp_path)
    run.fit(load_best_at_end=False)
    assert tensors_equal(run.current_weights(), uninterrupted[0].weights[12])


def test_disk_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(CheckpointManager, "check_space", lambda manager, size: sizes.append(size))
    run = Run(tmp_path, evaluate=None)
    run.fit(RecordingReporter(stop_step=1))
    numbers = run.trainer.loaded.count()
    assert numbers * 16 <= sizes[0] <= numbers * 16 + 4 * 100  # weights, two moments, the best weights; step counts


# -- numbers that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nan loss", "nan gradient"])
def test_a_diverging_run_stops_and_keeps_its_checkpoint(
    tmp_path: Path, uninterrupted: tuple[Run, FitResult], fault: str
) -> None:
    run = Run(tmp_path)
    run.trainer.objective = FaultyObjective(run.trainer.objective, run.trainer, FAULTS[fault], step=7)
    with pytest.raises(DivergedError, match=r"^step 7: "):
        run.fit()
    last = journal_records(tmp_path)[-1]
    assert last["step"] == 7 and last["grad_norm"] == "NaN" and last["skipped"] is True
    assert (last["loss"] == "NaN") == (fault == "nan loss")
    assert checkpoint_names(tmp_path)[-1] == "step-00000006"
    assert all(tensor.isfinite().all() for tensor in checkpoint_tensors(tmp_path).values())
    Run(tmp_path).fit()  # now without a fault
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted[0].folder)


def test_skipped_steps_are_in_the_journal(tmp_path: Path) -> None:
    run = Run(tmp_path, max_nonfinite_steps=1)
    run.trainer.objective = FaultyObjective(run.trainer.objective, run.trainer, FAULTS["nan loss"], step=7)
    assert run.fit().stop_reason == "completed"
    records = [record for record in journal_records(tmp_path) if "loss" in record]
    assert [record["step"] for record in records if "skipped" in record] == [7]
    assert records[6]["loss"] == "NaN" and records[7]["loss"] < 10


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_makes_a_checkpoint(tmp_path: Path, uninterrupted: tuple[Run, FitResult], name: str) -> None:
    before = {number: signal.getsignal(number) for number in fit_module.SIGNALS}
    run = Run(tmp_path)
    run.trainer.objective = FaultyObjective(run.trainer.objective, run.trainer, FAULTS[name], step=6)
    assert run.fit().stop_reason == "interrupted"
    assert {number: signal.getsignal(number) for number in fit_module.SIGNALS} == before
    assert run.trainer.step == 5  # the step with the signal was abandoned
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted[0].folder)


def test_a_second_sigint_stops_at_once(tmp_path: Path, uninterrupted: tuple[Run, FitResult]) -> None:
    def twice(step: Step) -> None:
        if step.number == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path).fit(RecordingReporter(after_step=twice))
    assert signal.getsignal(signal.SIGINT) == before and checkpoint_names(tmp_path)[-1] == "step-00000004"
    assert Run(tmp_path).fit().resumed_from == 4
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted[0].folder)


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """A shell script ignores SIGINT in commands that it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = Run(tmp_path, evaluate=None)
        run.trainer.objective = FaultyObjective(run.trainer.objective, run.trainer, FAULTS["SIGINT"], step=3)
        assert run.fit(
            RecordingReporter(
                after_step=lambda step: os.kill(os.getpid(), signal.SIGTERM) if step.number == 5 else None
            )
        ).stop_reason
        assert run.trainer.step == 5 and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("step", [4, 12])
def test_a_signal_stops_an_evaluation(tmp_path: Path, uninterrupted: tuple[Run, FitResult], step: int) -> None:
    def evaluate(trainer: Trainer) -> EvalResult:
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return evaluate_with_peak(trainer)

    started = time.monotonic()
    run = Run(tmp_path, evaluate)
    assert run.fit().stop_reason == "interrupted"
    assert time.monotonic() - started < 30
    assert run.trainer.step == step and checkpoint_names(tmp_path)[-1] == f"step-{step:08d}"
    assert journal_records(tmp_path)[-1]["step"] == step and "loss" in journal_records(tmp_path)[-1]
    reporter = RecordingReporter()
    result = Run(tmp_path).fit(reporter)
    assert reporter.evaluations[0][0] == step  # the interrupted evaluation comes first
    assert (result.stop_reason, result.best_step, result.resumed_from) == (
        "completed",
        uninterrupted[1].best_step,
        step,
    )
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted[0].folder)


def test_a_signal_before_an_evaluation_skips_it(tmp_path: Path, uninterrupted: tuple[Run, FitResult]) -> None:
    run = Run(tmp_path)
    assert run.fit(RecordingReporter(stop_step=6)).stop_reason == "interrupted"
    assert 6 not in run.weights
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted[0].folder)


def test_a_signal_at_the_last_step_is_handled(tmp_path: Path) -> None:
    """The run is interrupted, so that nothing begins after it, such as another seed; a resume finds it finished."""
    run = Run(tmp_path, evaluate=None)
    assert run.fit(RecordingReporter(stop_step=12)).stop_reason == "interrupted"
    resumed = Run(tmp_path, evaluate=None)
    assert resumed.fit().stop_reason == "completed" and resumed.trainer.step == run.trainer.step == 12


def test_a_signal_at_early_stopping_is_handled(tmp_path: Path) -> None:
    scores = iter([0.3, 0.2])
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=next(scores), metrics={}))

    class StopAfterWorseEvaluation(RecordingReporter):
        def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
            run.trainer.stop_requested = not best

    assert run.fit(StopAfterWorseEvaluation(), patience=1).stop_reason == "interrupted"
    resumed = Run(tmp_path, lambda trainer: EvalResult(metric_value=1.0, metrics={}))
    assert resumed.fit(patience=1).stop_reason == "early_stopping" and resumed.trainer.step == run.trainer.step


def test_a_signal_before_the_first_step(tmp_path: Path, uninterrupted: tuple[Run, FitResult]) -> None:
    run = Run(tmp_path)
    run.trainer.stop_requested = True
    assert run.fit() == FitResult(
        stop_reason="interrupted", best_step=0, best_metric=None, last_metric=None, resumed_from=0
    )
    assert not (tmp_path / "state").exists()
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert reproducible_files(tmp_path) == reproducible_files(uninterrupted[0].folder)


def test_fit_runs_in_a_thread_that_cannot_handle_signals(tmp_path: Path) -> None:
    results: list[FitResult] = []
    thread = threading.Thread(target=lambda: results.append(Run(tmp_path).fit()))
    thread.start()
    thread.join()
    assert results[0].stop_reason == "completed"


# -- unusual folders and clocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Übung ☃ 文, with 'spaces'", "100% {x} [a] *\n"])
def test_odd_folder_names(tmp_path: Path, uninterrupted: tuple[Run, FitResult], name: str) -> None:
    Run(tmp_path / name / name).fit(RecordingReporter(stop_step=5))
    Run(tmp_path / name / name).fit()
    assert reproducible_files(tmp_path / name / name) == reproducible_files(uninterrupted[0].folder)


def test_a_folder_behind_a_link(
    tmp_path: Path, uninterrupted: tuple[Run, FitResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    Run(Path("link")).fit(RecordingReporter(stop_step=5, after_step=lambda step: monkeypatch.chdir("/")))
    Run(tmp_path / "real").fit()
    assert reproducible_files(tmp_path / "link") == reproducible_files(uninterrupted[0].folder)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HeedfulError, match=r"file/journal.jsonl cannot be written: File exists"):
        Run(tmp_path / "file").fit()

    def refuse(path: Path) -> None:
        raise OSError(30, os.strerror(30))

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
    run = Run(tmp_path, max_steps=None, time_budget=0.005)
    assert run.fit(reporter, eval_every_epochs=1000.0).stop_reason == "completed"
    assert run.trainer.seconds >= 0.3 and reporter.evaluations[0][0] == run.trainer.step == reporter.steps[-1]
    assert json.loads((max((tmp_path / "state").glob("step-*")) / "values.json").read_text())["seconds"] >= 0.3


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"eval_every_epochs": 0.0}, r"^eval_every_epochs is 0.0; expected a number above 0"),
        ({"patience": -1}, r"^patience is -1; expected a whole number from 0"),
        ({"checkpoint_every_minutes": -1.0}, r"^checkpoint_every_minutes is -1.0; expected a number from 0"),
        ({"checkpoint_every_minutes": math.nan}, r"^checkpoint_every_minutes is nan"),
        ({"keep_last": 0}, r"^keep_last is 0; expected a whole number from 1"),
    ],
)
def test_invalid_settings_are_refused(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(HeedfulError, match=match):
        FitSettings(**changed)


def test_fit_prints_nothing_by_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path).fit(RecordingReporter(stop_step=3))
    Run(tmp_path).fit()
    assert capfd.readouterr() == ("", "")
    assert LINES and torch.is_grad_enabled()
