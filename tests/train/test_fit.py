"""fit: what is evaluated, saved and resumed, when it stops, signals and odd folders."""

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


class Told(Reporter):
    """What was told; a stop is asked for after a step, or something else happens there."""

    def __init__(self, stop: int = 0, after: Callable[[Step], None] = lambda step: None) -> None:
        self.stop, self.after = stop, after
        self.steps: list[int] = []
        self.scores: list[tuple[int, float, bool]] = []
        self.texts: list[str] = []

    def step(self, step: Step, trainer: Trainer) -> None:
        self.steps.append(step.number)
        self.after(step)
        if step.number == self.stop:
            trainer.stop_requested = True

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        self.scores.append((step, result.metric_value, best))

    def message(self, text: str) -> None:
        self.texts.append(text)


class Run:
    """One process of a run in a folder; the next one is another."""

    def __init__(
        self, folder: Path, scores: Callable[[Trainer], EvalResult] | None = evaluate_with_peak, **train: Any
    ) -> None:
        self.folder = folder
        self.trainer = make_trainer(**train)
        self.scores = scores
        self.weights: dict[int, dict[str, Tensor]] = {}  # at each evaluation

    def _scored(self) -> EvalResult:
        assert self.scores is not None
        assert not self.trainer.loaded.training
        self.weights[self.trainer.step] = self.now()
        return self.scores(self.trainer)

    def now(self) -> dict[str, Tensor]:
        return copy_weights(self.trainer)

    def fit(self, reporter: Reporter | None = None, **how: Any) -> FitResult:
        evaluate = None if self.scores is None else self._scored
        return fit(self.trainer, self.folder, make_settings({}, how)[1], evaluate=evaluate, reporter=reporter)


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_journal(folder / "journal.jsonl"))


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "state").glob("step-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, FitResult]:
    """A run that nothing happened to."""
    run = Run(tmp_path_factory.mktemp("whole"))
    return run, run.fit()


# -- a run --------------------------------------------------------------------------------------------------------


def test_what_a_run_leaves(whole: tuple[Run, FitResult]) -> None:
    run, end = whole
    found = lines(run.folder)
    assert [record["step"] for record in found if "loss" in record] == list(range(1, 13))
    assert [record["step"] for record in found if "dev" in record] == [2, 4, 6, 8, 10, 12]
    assert list(found[0]) == ["step", "epoch", "loss", "lr", "grad_norm"]
    assert found[2] | {"metric_value": 0, "dev": 0} == {"step": 2, "dev": 0, "metric_value": 0, "best": True}
    assert steps(run.folder) == ["step-00000011", "step-00000012"]
    assert sorted(os.listdir(run.folder)) == ["journal.jsonl", "state"]
    assert end == FitResult(
        stop_reason="completed",
        best_step=end.best_step,
        best_metric=end.best_metric,
        last_metric=end.last_metric,
        resumed_from=0,
    )
    assert (
        end.best_step in (6, 8)
        and end.best_metric
        == found[-1 - found[::-1].index(next(r for r in found[::-1] if r.get("best")))]["metric_value"]
    )


def test_the_best_weights_are_kept_or_the_last(tmp_path: Path, whole: tuple[Run, FitResult]) -> None:
    run, end = whole
    assert tensors_equal(run.now(), run.weights[end.best_step])
    assert not tensors_equal(run.now(), run.weights[12])
    last = Run(tmp_path)
    found = last.fit(load_best_at_end=False)
    assert tensors_equal(last.now(), run.weights[12]) and tensors_equal(last.now(), last.weights[12])
    assert found == end
    assert not [name for name in tensors(tmp_path) if name.startswith("best/")]
    assert not last.trainer.loaded.training


def tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(max((folder / "state").glob("step-*")) / "tensors.safetensors")


def test_without_an_evaluation_the_last_weights_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, scores=None)
    assert run.fit() == FitResult(
        stop_reason="completed", best_step=0, best_metric=None, last_metric=None, resumed_from=0
    )
    assert not [record for record in lines(tmp_path) if "dev" in record]
    assert tensors_equal(
        {f"model/{name}": each for name, each in run.now().items()} | tensors(tmp_path), tensors(tmp_path)
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
def test_when_it_evaluates(tmp_path: Path, evaluate: float, length: int, expected: list[int]) -> None:
    told = Told()
    Run(tmp_path, max_steps=length).fit(told, eval_every_epochs=evaluate)
    assert [step for step, _, _ in told.scores] == expected
    assert told.steps == list(range(1, length + 1))


def test_patience_ends_it(tmp_path: Path) -> None:
    scores = iter([0.1, 0.3, 0.2, 0.3, 0.2, 0.9])
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=next(scores), metrics={}))
    seen = Told()
    end = run.fit(seen, patience=3)
    assert seen.texts == ["early stopping: 3 evaluations without a better metric (fit.patience)"]
    assert end == FitResult(
        stop_reason="early_stopping", best_step=8, best_metric=0.3, last_metric=0.2, resumed_from=0
    )  # 8 is as good
    assert run.trainer.step == 10 and steps(tmp_path)[-1] == "step-00000010"
    assert tensors_equal(run.now(), run.weights[8])
    again = Run(tmp_path, lambda trainer: EvalResult(metric_value=1.0, metrics={}))
    told = Told()
    assert again.fit(told, patience=3) == FitResult(
        stop_reason="early_stopping", best_step=8, best_metric=0.3, last_metric=0.2, resumed_from=10
    )
    assert told.steps == [] and tensors_equal(again.now(), run.now())
    more = Run(tmp_path, lambda trainer: EvalResult(metric_value=next(scores), metrics={}))
    assert more.fit(patience=0) == FitResult(
        stop_reason="completed", best_step=12, best_metric=0.9, last_metric=0.9, resumed_from=10
    )


TIED = {  # main number and tie of six evaluations, at steps 2 to 12; the best one
    "the metric decides": ([(0.1, 9.0), (0.5, 0.0), (0.4, 9.0), (0.3, 0.0), (0.2, 0.0), (0.1, 9.0)], 4),
    "then the tie": ([(0.5, -0.3), (0.5, -0.1), (0.5, -0.2), (0.4, 0.0), (0.5, -0.3), (0.5, -0.4)], 4),
    "then the later step": ([(0.5, -0.1), (0.5, -0.1), (0.5, -0.2), (0.5, -0.1), (0.5, -0.2), (0.4, 0.0)], 8),
    "in nine digits": ([(0.5, -0.1), (0.5 + 1e-12, -0.2), (0.5, -0.1 - 1e-12), (0.4, 0.0), (0.4, 0.0), (0.4, 0.0)], 6),
}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("case", TIED)
def test_equal_evaluations_are_ranked_by_the_tie_and_then_the_later_step(
    tmp_path: Path, case: str, stopped: bool
) -> None:
    scores, best = TIED[case]

    def score(trainer: Trainer) -> EvalResult:
        main, tie = scores[trainer.step // 2 - 1]
        return EvalResult(metric_value=main, tie_breaker=tie, metrics={})

    if stopped:  # what decides is in the checkpoint
        assert Run(tmp_path, score).fit(Told(stop=9)).stop_reason == "interrupted"
    run = Run(tmp_path, score)
    end = run.fit()
    assert (end.best_step, end.best_metric, end.last_metric) == (best, scores[best // 2 - 1][0], scores[-1][0])
    if not stopped:
        assert tensors_equal(run.now(), run.weights[best])


def test_a_better_tie_does_not_reset_patience(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=0.5, tie_breaker=trainer.step, metrics={}))
    end = run.fit(patience=2)
    assert (end.stop_reason, end.best_step, run.trainer.step) == ("early_stopping", 6, 6)


def test_the_last_weights_are_handed_over_where_others_become_the_model(tmp_path: Path) -> None:
    for name, steps, load_best in (("early", [3, 2, 1], True), ("late", [1, 2, 3], True), ("last", [3, 2, 1], False)):
        scores, seen = iter(steps), []
        run = Run(tmp_path / name, lambda trainer, scores=scores: EvalResult(metric_value=next(scores), metrics={}))
        how = make_settings({}, {"load_best_at_end": load_best, "eval_every_epochs": 1.0})[1]
        fit(
            run.trainer,
            run.folder,
            how,
            evaluate=run._scored,
            save_last=lambda run=run, seen=seen: seen.append(run.now()),
        )
        assert len(seen) == (name == "early")
        if seen:
            assert tensors_equal(seen[0], run.weights[12]) and tensors_equal(run.now(), run.weights[4])


def test_an_evaluation_that_says_nothing_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=math.nan, metrics={}))
    with pytest.raises(DivergedError, match=r"^step 2: .*nan for its metric"):
        run.fit()


def test_a_loss_that_is_no_number_beside_a_good_score_is_refused(tmp_path: Path) -> None:
    numbers = {"loss": math.nan, "accuracy": 1.0, "perplexity": math.inf, "count": 3}
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=1.0, metrics=numbers))
    with pytest.raises(
        DivergedError, match=r"^step 2: the evaluation gave nan for loss and inf for perplexity, so .*optimizer.lr"
    ):
        run.fit()
    assert not [record for record in lines(tmp_path) if "dev" in record]


def test_checkpoints_come_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(fit_module, "time", SimpleNamespace(monotonic=lambda: now))
    saved: list[int] = []
    original = CheckpointManager.save

    def commit(store: CheckpointManager, step: int, *given: Any) -> Path:
        saved.append(step)
        return original(store, step, *given)

    monkeypatch.setattr(CheckpointManager, "save", commit)

    def tick(step: Step) -> None:
        nonlocal now
        now += 25.0

    Run(tmp_path, scores=None).fit(Told(after=tick), checkpoint_every_minutes=1.0, keep_last=3)
    assert saved == [3, 6, 9, 12]
    assert steps(tmp_path) == ["step-00000006", "step-00000009", "step-00000012"]
    saved.clear()
    Run(tmp_path / "b").fit(Told(after=tick), checkpoint_every_minutes=1.0, eval_every_epochs=1.25)
    assert saved == [3, 5, 8, 10, 12]


def test_the_journal_is_on_the_disk_before_a_checkpoint_counts_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = [0]
    keep, commit = Journal.sync, CheckpointManager.save

    def kept(journal: Journal) -> None:
        keep(journal)
        synced.append(journal.num_bytes)

    def committed(store: CheckpointManager, step: int, tensors: Any, values: dict[str, Any]) -> Path:
        assert values["journal"] == synced[-1] > synced[-2]
        return commit(store, step, tensors, values)

    monkeypatch.setattr(Journal, "sync", kept)
    monkeypatch.setattr(CheckpointManager, "save", committed)
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert len(synced) == 13


# -- a resume -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path, whole: tuple[Run, FitResult], stop: int
) -> None:
    first = Run(tmp_path)
    assert first.fit(Told(stop=stop)).stop_reason == "interrupted"
    assert first.trainer.step == stop and steps(tmp_path)[-1] == f"step-{stop:08d}"
    told = Told()
    second = Run(tmp_path)
    end = second.fit(told)
    assert (end.resumed_from, end.stop_reason, end.best_metric, end.best_step) == (
        stop,
        "completed",
        whole[1].best_metric,
        whole[1].best_step,
    )
    assert told.steps == list(range(stop + 1, 13)) and told.texts == [f"resuming after step {stop}"]
    assert reproducible_files(tmp_path) == reproducible_files(whole[0].folder)
    assert tensors_equal(second.now(), whole[0].now())
    third = Run(tmp_path)
    assert third.fit(told).resumed_from == 12  # it was over
    assert tensors_equal(third.now(), whole[0].now()) and reproducible_files(tmp_path) == reproducible_files(
        whole[0].folder
    )


def test_a_run_that_ended_badly_goes_on_from_its_last_checkpoint(tmp_path: Path, whole: tuple[Run, FitResult]) -> None:
    def fail(step: Step) -> None:
        if step.number == 9:
            raise KeyError

    with pytest.raises(KeyError):
        Run(tmp_path).fit(Told(after=fail), checkpoint_every_minutes=60.0, eval_every_epochs=1.0)
    assert steps(tmp_path) == ["step-00000004", "step-00000008"]
    assert lines(tmp_path)[-1]["step"] == 9
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"step": 10, "lo')
    run = Run(tmp_path)
    assert run.fit(eval_every_epochs=1.0, checkpoint_every_minutes=60.0).resumed_from == 8
    steady = Run(tmp_path / "steady")
    steady.fit(eval_every_epochs=1.0, checkpoint_every_minutes=60.0)
    assert reproducible_files(tmp_path) == reproducible_files(tmp_path / "steady")


def test_a_damaged_checkpoint_costs_one_checkpoint(tmp_path: Path, whole: tuple[Run, FitResult]) -> None:
    Run(tmp_path).fit(Told(stop=7))
    (tmp_path / "state" / "step-00000007" / "values.json").write_text("{}")
    run = Run(tmp_path)
    with pytest.warns(HeedfulWarning, match="step-00000007 is damaged"):
        assert run.fit().resumed_from == 6
    assert reproducible_files(tmp_path)["tensors"] == reproducible_files(whole[0].folder)["tensors"]
    assert reproducible_files(tmp_path)["journal"] == reproducible_files(whole[0].folder)["journal"]


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    Run(tmp_path).fit(Told(stop=3))
    before = reproducible_files(tmp_path)
    with pytest.raises(HeedfulError, match=r"batch_size = 5, .* 6"):
        Run(tmp_path, batch_size=6).fit()
    assert reproducible_files(tmp_path) == before
    (tmp_path / "journal.jsonl").write_bytes(b"")
    with pytest.raises(HeedfulError, match=r"journal.jsonl has 0 bytes"):
        Run(tmp_path).fit()


def test_best_weights_are_forgotten_where_the_last_are_asked_for(tmp_path: Path, whole: tuple[Run, FitResult]) -> None:
    Run(tmp_path).fit(Told(stop=9))
    assert [name for name in tensors(tmp_path) if name.startswith("best/")]
    run = Run(tmp_path)
    run.fit(load_best_at_end=False)
    assert tensors_equal(run.now(), whole[0].weights[12])


def test_room_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(CheckpointManager, "check_space", lambda store, count: asked.append(count))
    run = Run(tmp_path, scores=None)
    run.fit(Told(stop=1))
    numbers = run.trainer.loaded.count()
    assert numbers * 16 <= asked[0] <= numbers * 16 + 4 * 100  # weights, two moments, the best weights; step counts


# -- numbers that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nan loss", "nan gradient"])
def test_a_diverging_run_stops_and_keeps_its_checkpoint(
    tmp_path: Path, whole: tuple[Run, FitResult], fault: str
) -> None:
    run = Run(tmp_path)
    run.trainer.objective = FaultyObjective(run.trainer.objective, run.trainer, FAULTS[fault], step=7)
    with pytest.raises(DivergedError, match=r"^step 7: "):
        run.fit()
    last = lines(tmp_path)[-1]
    assert last["step"] == 7 and last["grad_norm"] == "NaN" and last["skipped"] is True
    assert (last["loss"] == "NaN") == (fault == "nan loss")
    assert steps(tmp_path)[-1] == "step-00000006"
    assert all(tensor.isfinite().all() for tensor in tensors(tmp_path).values())
    Run(tmp_path).fit()  # the fault is over
    assert reproducible_files(tmp_path) == reproducible_files(whole[0].folder)


def test_skipped_steps_are_in_the_journal(tmp_path: Path) -> None:
    run = Run(tmp_path, max_nonfinite_steps=1)
    run.trainer.objective = FaultyObjective(run.trainer.objective, run.trainer, FAULTS["nan loss"], step=7)
    assert run.fit().stop_reason == "completed"
    found = [record for record in lines(tmp_path) if "loss" in record]
    assert [record["step"] for record in found if "skipped" in record] == [7]
    assert found[6]["loss"] == "NaN" and found[7]["loss"] < 10


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_makes_a_checkpoint(tmp_path: Path, whole: tuple[Run, FitResult], name: str) -> None:
    before = {each: signal.getsignal(each) for each in fit_module.SIGNALS}
    run = Run(tmp_path)
    run.trainer.objective = FaultyObjective(run.trainer.objective, run.trainer, FAULTS[name], step=6)
    assert run.fit().stop_reason == "interrupted"
    assert {each: signal.getsignal(each) for each in fit_module.SIGNALS} == before
    assert run.trainer.step == 5  # the step in which it came is left
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert reproducible_files(tmp_path) == reproducible_files(whole[0].folder)


def test_a_second_sigint_stops_at_once(tmp_path: Path, whole: tuple[Run, FitResult]) -> None:
    def twice(step: Step) -> None:
        if step.number == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path).fit(Told(after=twice))
    assert signal.getsignal(signal.SIGINT) == before and steps(tmp_path)[-1] == "step-00000004"
    assert Run(tmp_path).fit().resumed_from == 4
    assert reproducible_files(tmp_path) == reproducible_files(whole[0].folder)


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As SIGINT is in what a script starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = Run(tmp_path, scores=None)
        run.trainer.objective = FaultyObjective(run.trainer.objective, run.trainer, FAULTS["SIGINT"], step=3)
        assert run.fit(
            Told(after=lambda step: os.kill(os.getpid(), signal.SIGTERM) if step.number == 5 else None)
        ).stop_reason
        assert run.trainer.step == 5 and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("step", [4, 12])
def test_a_signal_stops_an_evaluation(tmp_path: Path, whole: tuple[Run, FitResult], step: int) -> None:
    def interrupted(trainer: Trainer) -> EvalResult:
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return evaluate_with_peak(trainer)

    started = time.monotonic()
    run = Run(tmp_path, interrupted)
    assert run.fit().stop_reason == "interrupted"
    assert time.monotonic() - started < 30
    assert run.trainer.step == step and steps(tmp_path)[-1] == f"step-{step:08d}"
    assert lines(tmp_path)[-1]["step"] == step and "loss" in lines(tmp_path)[-1]
    told = Told()
    end = Run(tmp_path).fit(told)
    assert told.scores[0][0] == step  # it is made good before anything else
    assert (end.stop_reason, end.best_step, end.resumed_from) == ("completed", whole[1].best_step, step)
    assert reproducible_files(tmp_path) == reproducible_files(whole[0].folder)


def test_a_signal_before_an_evaluation_skips_it(tmp_path: Path, whole: tuple[Run, FitResult]) -> None:
    run = Run(tmp_path)
    assert run.fit(Told(stop=6)).stop_reason == "interrupted"
    assert 6 not in run.weights
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert reproducible_files(tmp_path) == reproducible_files(whole[0].folder)


def test_a_signal_at_the_last_step_is_handled(tmp_path: Path) -> None:
    """What would come next, another seed or an evaluation, does not begin; all of the run is there."""
    run = Run(tmp_path, scores=None)
    assert run.fit(Told(stop=12)).stop_reason == "interrupted"
    again = Run(tmp_path, scores=None)
    assert again.fit().stop_reason == "completed" and again.trainer.step == run.trainer.step == 12


def test_a_signal_at_early_stopping_is_handled(tmp_path: Path) -> None:
    scores = iter([0.3, 0.2])
    run = Run(tmp_path, lambda trainer: EvalResult(metric_value=next(scores), metrics={}))

    class Late(Told):
        def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
            run.trainer.stop_requested = not best

    assert run.fit(Late(), patience=1).stop_reason == "interrupted"
    again = Run(tmp_path, lambda trainer: EvalResult(metric_value=1.0, metrics={}))
    assert again.fit(patience=1).stop_reason == "early_stopping" and again.trainer.step == run.trainer.step


def test_a_signal_before_the_first_step(tmp_path: Path, whole: tuple[Run, FitResult]) -> None:
    run = Run(tmp_path)
    run.trainer.stop_requested = True
    assert run.fit() == FitResult(
        stop_reason="interrupted", best_step=0, best_metric=None, last_metric=None, resumed_from=0
    )
    assert not (tmp_path / "state").exists()
    assert Run(tmp_path).fit().stop_reason == "completed"
    assert reproducible_files(tmp_path) == reproducible_files(whole[0].folder)


def test_another_thread_is_not_told_of_signals(tmp_path: Path) -> None:
    ends: list[FitResult] = []
    thread = threading.Thread(target=lambda: ends.append(Run(tmp_path).fit()))
    thread.start()
    thread.join()
    assert ends[0].stop_reason == "completed"


# -- odd folders and clocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Übung ☃ 文, with 'spaces'", "100% {x} [a] *\n"])
def test_odd_folder_names(tmp_path: Path, whole: tuple[Run, FitResult], name: str) -> None:
    Run(tmp_path / name / name).fit(Told(stop=5))
    Run(tmp_path / name / name).fit()
    assert reproducible_files(tmp_path / name / name) == reproducible_files(whole[0].folder)


def test_a_folder_behind_a_link(tmp_path: Path, whole: tuple[Run, FitResult], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    Run(Path("link")).fit(Told(stop=5, after=lambda step: monkeypatch.chdir("/")))
    Run(tmp_path / "real").fit()
    assert reproducible_files(tmp_path / "link") == reproducible_files(whole[0].folder)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HeedfulError, match=r"file/journal.jsonl cannot be written: File exists"):
        Run(tmp_path / "file").fit()

    def refuse(path: Path) -> None:
        raise OSError(30, os.strerror(30))

    Run(tmp_path).fit(Told(stop=3))
    monkeypatch.setattr(atomic_io, "_mkdir", refuse)
    with pytest.raises(HeedfulError, match=r"step 4 .*Read-only file system"):
        Run(tmp_path).fit()
    assert steps(tmp_path) == ["step-00000002", "step-00000003"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(HeedfulError, match=r"journal.jsonl cannot be written: Permission denied"):
            Run(tmp_path).fit()
    finally:
        tmp_path.chmod(0o755)


def test_only_the_monotonic_clock_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def jumped() -> float:
        raise AssertionError("the time of day was asked for")

    monkeypatch.setattr(time, "time", jumped)
    assert Run(tmp_path).fit(checkpoint_every_minutes=1e-9).stop_reason == "completed"


# -- minutes, settings --------------------------------------------------------------------------------------------


def test_minutes_end_on_time_with_an_evaluation(tmp_path: Path) -> None:
    told = Told()
    run = Run(tmp_path, max_steps=None, time_budget=0.005)
    assert run.fit(told, eval_every_epochs=1000.0).stop_reason == "completed"
    assert run.trainer.seconds >= 0.3 and told.scores[0][0] == run.trainer.step == told.steps[-1]
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
def test_settings_that_make_no_sense(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(HeedfulError, match=match):
        FitSettings(**changed)


def test_a_watch_says_nothing_by_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path).fit(Told(stop=3))
    Run(tmp_path).fit()
    assert capfd.readouterr() == ("", "")
    assert LINES and torch.is_grad_enabled()
