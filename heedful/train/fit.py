"""fit: the ordinary code around the trainer. It evaluates, keeps the best, saves, and stops when it should."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.train.async_checkpoint import AsyncCheckpointer
from heedful.train.checkpoint import CheckpointManager
from heedful.train.journal import Journal
from heedful.train.memory import MemoryTrimmer
from heedful.train.settings import DIVERGENCE_ADVICE, FitSettings
from heedful.train.trainer import DivergedError, Step, Trainer, select_prefix

__all__ = ["EvalResult", "FitResult", "FitSettings", "Reporter", "fit"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # those that ask a run to leave


DIGITS = 9  # after the point: sums over several ranks differ below that, and a tie must not hang on them


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """Metrics of one evaluation; checkpoints are ranked by `metric_value`, then by `tie`."""

    metric_value: float  # larger is better
    numbers: dict[str, Any]
    tie: float = 0.0  # decides where metric values are equal, as minus the loss

    @property
    def rank(self) -> tuple[float, float]:
        """The two numbers that rank checkpoints, rounded."""
        return round(self.metric_value, DIGITS), round(self.tie, DIGITS)


StopReason = Literal["completed", "early_stopping", "interrupted"]  # interrupted by a signal: it can be resumed


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """How training ended; unless it was interrupted, the trainer's model has the weights that are kept."""

    stop_reason: StopReason
    best_step: int  # 0: there was no evaluation
    best: float | None
    last: float | None  # metric of the last evaluation
    resumed_from: int


class Reporter:
    """Receives progress events of a run. The base class ignores them."""

    def step(self, step: Step, trainer: Trainer) -> None:
        """Called after each update."""

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        """Called after each evaluation; `best`: the result is the best one so far."""

    def started(self, folder: Path, step: int) -> None:
        """Called before the first update of a run in `folder`; `step` is that of the resumed checkpoint, or 0."""

    def recorded(self, record: Mapping[str, Any]) -> None:
        """Called with each record that is written to the journal."""

    def ended(self, finished: bool) -> None:
        """Called after the last update; `finished` is false if the run was interrupted or failed."""

    def message(self, text: str) -> None:
        """Called with any other message for the user."""


def fit(
    trainer: Trainer,
    folder: Path,
    settings: FitSettings,
    *,
    evaluate: Callable[[], Any] | None = None,
    score: Callable[[list[Any]], EvalResult] = itemgetter(0),
    save_last: Callable[[], None] | None = None,
    reporter: Reporter | None = None,
) -> FitResult:
    """Train to the end, from the newest checkpoint in folder/state where there is one.

    `evaluate` finds each rank's share, without waiting for other ranks, and `score` joins the shares of all, in the
    order of the ranks; where every share is the whole, the first one will do. A signal (SIGTERM, SIGINT, SIGUSR1), or
    trainer.stopping = True, leaves the step or the share that is running, makes a checkpoint of the last whole step and
    returns with stop_reason="interrupted"; ranks that got no signal finish their shares first. A second SIGINT raises
    KeyboardInterrupt.

    The best evaluation is the one with the largest metric value, then the largest `tie`, then the latest. `save_last`
    is called after training, on all ranks and with the last weights in the model, where those of an earlier step become
    the model.
    """
    return _Run(trainer, folder, settings, evaluate, score, save_last, reporter or Reporter()).run()


class _LeftError(BaseException):
    """A signal came during an evaluation, which is done anew after a resume."""


class _Run:
    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        settings: FitSettings,
        evaluate: Callable[[], Any] | None,
        score: Callable[[list[Any]], EvalResult],
        save_last: Callable[[], None] | None,
        reporter: Reporter,
    ) -> None:
        self.trainer, self.settings, self.reporter = trainer, settings, reporter
        self.evaluate, self.score, self.save_last = evaluate, score, save_last
        self.store = CheckpointManager(folder / "state", keep=settings.keep_last)
        self.saver = AsyncCheckpointer(self.store, trainer, behind=settings.async_checkpoint)
        self.journal = Journal(folder / "journal.jsonl") if trainer.ranks.first else None
        self.best: float | None = None
        self.best_tie = 0.0
        self.best_step = 0
        self.last: float | None = None  # metric of the last evaluation
        self.kept: dict[str, Tensor] = {}  # the weights of the best evaluation
        self.since = 0  # evaluations since the metric last improved
        self.looked = 0  # the step of the last evaluation
        self.looking = False  # whether a signal may leave an evaluation now
        self.every = max(1, round(settings.eval_every_epochs * trainer.order.steps))
        self.saved = 0  # the step of the last checkpoint
        self.saved_at = time.monotonic()
        self.freed = MemoryTrimmer()

    def run(self) -> FitResult:
        reason: StopReason = "interrupted"
        try:
            started = self._resume()
            if self.journal is not None:
                self.reporter.started(self.journal.path.parent, started)
            with self._signals():
                reason = self._train()
            self.saver.finish()
        finally:
            if self.journal is not None:
                self.reporter.ended(reason != "interrupted")
            if self.journal is not None:
                self.journal.close()
        final = self.kept or self.trainer.average.tensors
        if reason != "interrupted" and final:
            if self.kept and self.save_last is not None and self.best_step != self.trainer.step:
                with self.trainer.average.applied(), self.trainer.whole():
                    self.save_last()
            with torch.no_grad():
                for name, tensor in self.trainer.parameters.items():
                    tensor.copy_(final[name])
        return FitResult(
            stop_reason=reason, best_step=self.best_step, best=self.best, last=self.last, resumed_from=started
        )

    def _train(self) -> StopReason:
        try:
            if self._look():  # it was left before
                self._save()
            if self._patient():
                for step in self.trainer:
                    self._after(step)
                    if not self._patient():
                        waited = f"{self.since} evaluation{'s' * (self.since > 1)}"
                        self.reporter.message(f"early stopping: {waited} without a better metric (fit.patience)")
                        break
        except DivergedError as error:
            if error.step is not None:
                self._write(error.step.record)
            raise
        except _LeftError:
            pass
        if not self._patient() or (self.trainer.done >= 1 and not self._must_look()):
            stopping = self.trainer.ranks.numbers(self.trainer.stopping)  # it may have come after the last step
            if any(asked for (asked,) in stopping):
                return "interrupted"
            return "completed" if self._patient() else "early_stopping"
        if self.trainer.step != self.saved:
            self._save()
        return "interrupted"

    def _after(self, step: Step) -> None:
        self._write(step.record)
        self.reporter.step(step, self.trainer)
        self.freed.release()
        if self._look() or self.trainer.done >= 1 or self._due():
            self._save()

    def _must_look(self) -> bool:
        step = self.trainer.step
        now = step % self.every == 0 or self.trainer.done >= 1
        return self.evaluate is not None and step > self.looked and now

    def _look(self) -> bool:
        """Whether an evaluation was due, which then was made."""
        if not self._must_look():
            return False
        scored, step = self._scored(), self.trainer.step
        given = {"its metric": scored.metric_value, **scored.numbers}
        if odd := [name for name, each in given.items() if isinstance(each, float) and not math.isfinite(each)]:
            shown = " and ".join(f"{given[name]} for {name}" for name in odd)
            raise DivergedError(
                f"step {step}: the evaluation gave {shown}, so the model is no result. {DIVERGENCE_ADVICE}"
            )
        before = None if self.best is None else EvalResult(metric_value=self.best, tie=self.best_tie, numbers={}).rank
        raised, better = before is None or scored.rank[0] > before[0], before is None or scored.rank >= before
        self._write({"step": step, "dev": scored.numbers, "metric_value": scored.metric_value, "best": better})
        self.looked, self.last, self.since = step, scored.metric_value, 0 if raised else self.since + 1
        if better:
            self.best, self.best_tie, self.best_step = scored.metric_value, scored.tie, step
            if self.settings.load_best_at_end:
                self.kept = {name: each.detach().clone() for name, each in self._weights().items()}
        self.reporter.evaluated(step, scored, better)
        return True

    def _scored(self) -> EvalResult:
        assert self.evaluate is not None
        share, left = None, True
        with self.trainer.average.applied(), self.trainer.whole(), suppress(_LeftError):
            self.looking = True
            try:
                if not self.trainer.stopping:
                    share, left = self.evaluate(), False
            finally:
                self.looking = False
        found = self.trainer.ranks.gather((share, left))
        if any(left for _, left in found):
            raise _LeftError
        return self.score([share for share, _ in found])

    def _patient(self) -> bool:
        return not self.settings.patience or self.since < self.settings.patience

    def _due(self) -> bool:
        """Whether a checkpoint is due by the first rank's clock."""
        waited = time.monotonic() - self.saved_at >= 60 * self.settings.checkpoint_every_minutes
        return bool(self.trainer.ranks.numbers(waited)[0][0])

    def _weights(self) -> dict[str, Tensor]:
        """The weights that are evaluated: the averaged ones, or those that are trained."""
        return self.trainer.average.tensors or self.trainer.parameters

    def _save(self) -> None:
        tensors, values = self.trainer.state()
        tensors |= {f"best/{name}": tensor for name, tensor in self.kept.items()}
        mine = {"best": self.best, "best_tie": self.best_tie, "best_step": self.best_step, "last": self.last}
        mine |= {"since": self.since, "looked": self.looked}
        if self.journal is not None:
            self.journal.keep()
            mine["journal"] = self.journal.size
        self.saver.save(self.trainer.step, tensors, values | mine)
        self.saved, self.saved_at = self.trainer.step, time.monotonic()

    def _resume(self) -> int:
        """The step that the newest valid checkpoint was made after; all ranks read it."""
        trainer = self.trainer
        state = trainer.state()[0] | {f"best/{name}": tensor for name, tensor in self._weights().items()}
        sizes = trainer.ranks.numbers(sum(tensor.nbytes for tensor in state.values()))
        if trainer.ranks.first:
            self.store.need(round(sum(size for (size,) in sizes) / trainer.copies))
        trainer.ranks.wait()
        saved = self.store.load(trainer.placed(state) if trainer.parted else None)
        found = trainer.ranks.numbers(0 if saved is None else saved.step, trainer.order.count)
        if any(each != found[0] for each in found):
            raise HeedfulError(
                f"the ranks do not have the same: steps of the newest checkpoint and samples are {found}, in the order "
                "of the ranks. Give all of them the same data and one folder"
            )
        if saved is not None:
            values = saved.values
            trainer.load_state(saved.tensors, values)
            self.best, self.best_tie, self.best_step = values["best"], values["best_tie"], values["best_step"]
            self.last, self.since = values["last"], values["since"]
            self.looked, self.saved = values["looked"], saved.step
            if self.settings.load_best_at_end:
                self.kept = select_prefix("best/", saved.tensors)
            self.reporter.message(f"resuming after step {saved.step:,}")
        if self.journal is not None:
            self.journal.rewind(0 if saved is None else saved.values["journal"])
        return self.saved

    def _write(self, record: dict[str, Any]) -> None:
        if self.journal is not None:
            self.journal.write(record)
            self.reporter.recorded(record)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals ask for a stop; after the first one SIGINT is an ordinary one again. Ignored ones stay ignored."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        heard = [number for number, handler in before.items() if handler != signal.SIG_IGN]

        def ask(number: int, frame: FrameType | None) -> None:
            self.trainer.stopping = True
            if signal.SIGINT in heard:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.looking:
                self.looking = False
                raise _LeftError

        if threading.current_thread() is not threading.main_thread():  # no other can be told of signals
            yield
            return
        try:
            for number in heard:
                signal.signal(number, ask)
            yield
        finally:
            for number in heard:
                signal.signal(number, before[number])
