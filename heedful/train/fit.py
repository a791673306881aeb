"""The training loop around the trainer: evaluation, early stopping, checkpoints, and interruption by signals."""

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
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from heedful.device import device_name
from heedful.errors import RunError
from heedful.train.async_checkpoint import AsyncCheckpointer
from heedful.train.checkpoint import CheckpointManager
from heedful.train.journal import Journal
from heedful.train.memory import MemoryTrimmer
from heedful.train.settings import DIVERGENCE_ADVICE, FitSettings
from heedful.train.trainer import DivergedError, Step, Trainer, select_prefix

__all__ = ["EvalResult", "FitResult", "FitSettings", "Reporter", "fit"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # signals that interrupt a run
DIGITS = 9  # decimals of metrics that are compared; with several ranks, rounding of sums changes later decimals

Share = TypeVar("Share")  # the evaluation of one rank's share of the data


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """Metrics of one evaluation; checkpoints are ranked by `metric_value`, then by `tie_breaker`."""

    metric_value: float  # larger is better
    metrics: dict[str, Any]  # plain JSON data
    tie_breaker: float = 0.0  # larger is better, if metric values are equal; for example minus the loss

    @property
    def rank(self) -> tuple[float, float]:
        """The two numbers that rank checkpoints, rounded."""
        return round(self.metric_value, DIGITS), round(self.tie_breaker, DIGITS)


StopReason = Literal["completed", "early_stopping", "interrupted"]  # interrupted by a signal: it can be resumed


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """The end of training; unless it was interrupted, the trainer's model has the final weights."""

    stop_reason: StopReason
    best_step: int  # step of the best evaluation, or 0 without an evaluation
    best_metric: float | None  # metric value of the best evaluation, or None without an evaluation
    last_metric: float | None  # metric value of the last evaluation, or None without an evaluation
    resumed_from: int  # step of the checkpoint that training resumed from, or 0 if it started anew


class Reporter:
    """Receives progress events of a run. The base class ignores them."""

    def step(self, step: Step, trainer: Trainer) -> None:
        """Called after each update."""

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        """Called after each evaluation; `best`: the result is the best one so far."""

    def started(self, folder: Path, step: int) -> None:
        """Called before the first update of a run in `folder`; `step`: that of the resumed checkpoint, or 0."""

    def recorded(self, record: Mapping[str, Any]) -> None:
        """Called with each record that is written to the journal."""

    def ended(self, finished: bool) -> None:
        """Called after the last update; `finished`: false if the run was interrupted or failed."""

    def message(self, text: str) -> None:
        """Called with any other message for the user."""


def fit(
    trainer: Trainer,
    folder: Path,
    settings: FitSettings,
    *,
    evaluate: Callable[[], Share] | None = None,
    merge_evaluations: Callable[[list[Share]], EvalResult] = itemgetter(0),
    save_last: Callable[[], None] | None = None,
    reporter: Reporter | None = None,
) -> FitResult:
    """Train to the end, resuming from the newest checkpoint in folder/state.

    A signal (SIGTERM, SIGINT, SIGUSR1) or trainer.stop_requested = True interrupts training: the running step or
    evaluation is abandoned, the last complete step is saved as a checkpoint, and stop_reason is "interrupted". Ranks
    without a signal finish their share of an evaluation first. A second SIGINT raises KeyboardInterrupt.

    The best evaluation is the one with the largest metric value; ties are decided by the tie breaker, then by the later
    step.

    Args:
        trainer: Trains the model.
        folder: Folder of the run, for the journal and for checkpoints in `state`.
        settings: When to evaluate and to save.
        evaluate: Evaluates the share of the data of this rank, without waiting for other ranks. None for no evaluation.
        merge_evaluations: Merges the shares of all ranks, in their order; by default the first share is the result.
        save_last: Called on all ranks with the last weights in the model, before weights of an earlier step replace
            them.
        reporter: Receives progress events.

    Raises:
        DivergedError: If the loss, the gradient or an evaluation is not finite.
        RunError: If checkpoints cannot be read or written, or ranks have different checkpoints or data.
    """
    loop = _FitLoop(trainer, folder, settings, evaluate, merge_evaluations, save_last, reporter or Reporter())
    return loop.run()


def describe_device(trainer: Trainer) -> str:
    """Return a line about the GPU that trains, for the user."""
    dtype = str(trainer.precision).removeprefix("torch.")
    size = f"micro-batches of up to {trainer.max_tokens_per_microbatch:,} tokens"
    return f"training on {device_name(trainer.device)} in {dtype}, in {size}"


class _InterruptedError(BaseException):
    """A signal interrupted an evaluation, which is repeated after resuming."""


class _FitLoop(Generic[Share]):
    """The state of one call of `fit`."""

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        settings: FitSettings,
        evaluate: Callable[[], Share] | None,
        merge_evaluations: Callable[[list[Share]], EvalResult],
        save_last: Callable[[], None] | None,
        reporter: Reporter,
    ) -> None:
        self.trainer, self.settings, self.reporter = trainer, settings, reporter
        self.evaluate, self.merge_evaluations, self.save_last = evaluate, merge_evaluations, save_last
        self.checkpoints = CheckpointManager(folder / "state", keep_last=settings.keep_last)
        self.checkpointer = AsyncCheckpointer(self.checkpoints, trainer, background=settings.async_checkpoint)
        self.journal = Journal(folder / "journal.jsonl") if trainer.ranks.is_main else None
        self.best_metric: float | None = None  # metric value of the best evaluation
        self.best_tie_breaker = 0.0
        self.best_step = 0
        self.last_metric: float | None = None  # metric value of the last evaluation
        self.best_weights: dict[str, Tensor] = {}
        self.evaluations_without_gain = 0  # evaluations since the metric last improved
        self.evaluated_step = 0  # step of the last evaluation
        self.may_interrupt = False  # whether a signal may interrupt an evaluation now
        self.eval_every = max(
            1, round(settings.eval_every_epochs * trainer.order.steps_per_epoch)
        )  # steps between evaluations
        self.saved_step = 0  # step of the last checkpoint
        self.saved_at = time.monotonic()  # time of the last checkpoint
        self.memory = MemoryTrimmer()

    def run(self) -> FitResult:
        """Resume, train, and put the final weights into the model."""
        reason: StopReason = "interrupted"
        try:
            resumed_from = self._resume()
            if self.trainer.device.type == "cuda":
                self.reporter.message(describe_device(self.trainer))
            if self.journal is not None:
                self.reporter.started(self.journal.path.parent, resumed_from)
            with self._signal_handlers():
                reason = self._train()
            self.checkpointer.wait()
            if self.trainer.overflows:
                self.reporter.message(
                    f"{self.trainer.overflows:,} of {self.trainer.step:,} steps were skipped: gradients were too large "
                    "for float16, and the loss scale was halved"
                )
        finally:
            if self.journal is not None:
                self.reporter.ended(reason != "interrupted")
                self.journal.close()
        final = self.best_weights or self.trainer.average.tensors
        if reason != "interrupted" and final:
            if self.best_weights and self.save_last is not None and self.best_step != self.trainer.step:
                with self.trainer.average.applied(), self.trainer.full_params():
                    self.save_last()
            with torch.no_grad():
                for name, tensor in self.trainer.parameters.items():
                    tensor.copy_(final[name])
        return FitResult(
            stop_reason=reason,
            best_step=self.best_step,
            best_metric=self.best_metric,
            last_metric=self.last_metric,
            resumed_from=resumed_from,
        )

    def _train(self) -> StopReason:
        """Take the remaining steps; returns why training stopped."""
        try:
            if self._evaluate_if_due():  # an interrupted evaluation of the resumed run
                self._save()
            if self._has_patience():
                for step in self.trainer:
                    self._after_step(step)
                    if not self._has_patience():
                        count = self.evaluations_without_gain
                        waited = f"{count} evaluation{'s' * (count > 1)}"
                        self.reporter.message(f"early stopping: {waited} without a better metric (fit.patience)")
                        break
        except DivergedError as error:
            if error.step is not None:
                self._record(error.step.record)
            raise
        except _InterruptedError:
            pass
        if not self._has_patience() or (self.trainer.progress >= 1 and not self._evaluation_is_due()):
            # a stop may have been requested after the last step
            requests = self.trainer.ranks.all_gather_scalars(self.trainer.stop_requested)
            if any(requested for (requested,) in requests):
                return "interrupted"
            return "completed" if self._has_patience() else "early_stopping"
        if self.trainer.step != self.saved_step:
            self._save()
        return "interrupted"

    def _after_step(self, step: Step) -> None:
        """Record a step; then evaluate and save, if these are due."""
        self._record(step.record)
        self.reporter.step(step, self.trainer)
        self.memory.trim()
        if self._evaluate_if_due() or self.trainer.progress >= 1 or self._checkpoint_is_due():
            self._save()

    def _evaluation_is_due(self) -> bool:
        """Return whether the current step is to be evaluated and was not."""
        step = self.trainer.step
        at_interval = step % self.eval_every == 0 or self.trainer.progress >= 1
        return self.evaluate is not None and step > self.evaluated_step and at_interval

    def _evaluate_if_due(self) -> bool:
        """Evaluate if an evaluation is due, and keep the best weights; returns whether one was due."""
        if not self._evaluation_is_due():
            return False
        result, step = self._evaluate(), self.trainer.step
        values = {"its metric": result.metric_value, **result.metrics}
        if bad := [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]:
            bad_values = " and ".join(f"{values[name]} for {name}" for name in bad)
            raise DivergedError(
                f"step {step}: the evaluation gave {bad_values}, so the model is no result. {DIVERGENCE_ADVICE}"
            )
        old_rank = None
        if self.best_metric is not None:
            old_rank = EvalResult(metric_value=self.best_metric, tie_breaker=self.best_tie_breaker, metrics={}).rank
        improved, best = old_rank is None or result.rank[0] > old_rank[0], old_rank is None or result.rank >= old_rank
        self._record({"step": step, "dev": result.metrics, "metric_value": result.metric_value, "best": best})
        self.evaluated_step, self.last_metric = step, result.metric_value
        self.evaluations_without_gain = 0 if improved else self.evaluations_without_gain + 1
        if best:
            self.best_metric, self.best_tie_breaker, self.best_step = result.metric_value, result.tie_breaker, step
            if self.settings.load_best_at_end:
                weights = self._evaluated_weights()
                # on the CPU, since a GPU may need the memory
                self.best_weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        self.reporter.evaluated(step, result, best)
        return True

    def _evaluate(self) -> EvalResult:
        """Evaluate on all ranks; raises _InterruptedError if a rank was interrupted."""
        assert self.evaluate is not None
        own_share: tuple[Share] | None = None  # None: interrupted
        with (
            self.trainer.algorithms(),
            self.trainer.average.applied(),
            self.trainer.full_params(),
            suppress(_InterruptedError),
        ):
            self.may_interrupt = True
            try:
                if not self.trainer.stop_requested:
                    own_share = (self.evaluate(),)
            finally:
                self.may_interrupt = False
        shares = self.trainer.ranks.all_gather_object(own_share)
        complete = [share[0] for share in shares if share is not None]
        if len(complete) < len(shares):
            raise _InterruptedError
        return self.merge_evaluations(complete)

    def _has_patience(self) -> bool:
        """Return whether early stopping does not end training yet."""
        return not self.settings.patience or self.evaluations_without_gain < self.settings.patience

    def _checkpoint_is_due(self) -> bool:
        """Return whether a checkpoint is due by the clock of rank 0."""
        due = time.monotonic() - self.saved_at >= 60 * self.settings.checkpoint_every_minutes
        return bool(self.trainer.ranks.all_gather_scalars(due)[0][0])

    def _evaluated_weights(self) -> dict[str, Tensor]:
        """Return the weights that are evaluated: the averages if there are any, otherwise the trained weights."""
        return self.trainer.average.tensors or self.trainer.parameters

    def _save(self) -> None:
        """Save a checkpoint of the trainer and of this loop."""
        tensors, values = self.trainer.state()
        tensors |= {f"best/{name}": tensor for name, tensor in self.best_weights.items()}
        loop_values: dict[str, float | None] = {
            "best": self.best_metric,
            "best_tie": self.best_tie_breaker,
            "best_step": self.best_step,
            "last": self.last_metric,
            "since": self.evaluations_without_gain,
            "looked": self.evaluated_step,
        }
        if self.journal is not None:
            self.journal.sync()
            loop_values["journal"] = self.journal.num_bytes
        self.checkpointer.save(self.trainer.step, tensors, values | loop_values)
        self.saved_step, self.saved_at = self.trainer.step, time.monotonic()

    def _resume(self) -> int:
        """Load the newest valid checkpoint on all ranks; returns its step, or 0 without a checkpoint."""
        trainer = self.trainer
        own_state = trainer.state()[0]
        state = own_state | {f"best/{name}": tensor for name, tensor in self._evaluated_weights().items()}
        keeps_best = self.settings.load_best_at_end and self.evaluate is not None
        to_save = state if keeps_best else own_state
        sizes = trainer.ranks.all_gather_scalars(sum(tensor.nbytes for tensor in to_save.values()))
        if trainer.ranks.is_main:
            self.checkpoints.check_space(round(sum(size for (size,) in sizes) / trainer.num_replicas))
        trainer.ranks.barrier()
        saved = self.checkpoints.load(trainer.as_dtensors(state) if trainer.is_sharded else None)
        starts = trainer.ranks.all_gather_scalars(0 if saved is None else saved.step, trainer.order.num_samples)
        if any(start != starts[0] for start in starts):
            raise RunError(
                f"the ranks differ: the steps of their newest checkpoints and the numbers of their samples are "
                f"{starts}, by rank. Give all of them the same data and one folder"
            )
        if saved is not None:
            values = saved.values
            trainer.load_state(saved.tensors, values)
            self.best_metric, self.best_tie_breaker, self.best_step = (
                values["best"],
                values["best_tie"],
                values["best_step"],
            )
            self.last_metric, self.evaluations_without_gain = values["last"], values["since"]
            self.evaluated_step, self.saved_step = values["looked"], saved.step
            if self.settings.load_best_at_end:
                self.best_weights = select_prefix("best/", saved.tensors)
            self.reporter.message(f"resuming after step {saved.step:,}")
        if self.journal is not None:
            self.journal.rewind(0 if saved is None else saved.values["journal"])
        return self.saved_step

    def _record(self, record: dict[str, Any]) -> None:
        """Write a record to the journal, on rank 0."""
        if self.journal is not None:
            self.journal.write(record)
            self.reporter.recorded(record)

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """Context in which signals request a stop; after the first one, SIGINT raises KeyboardInterrupt.

        Signals that were ignored stay ignored.
        """
        old_handlers = {number: signal.getsignal(number) for number in SIGNALS}
        handled = [number for number, handler in old_handlers.items() if handler != signal.SIG_IGN]

        def request_stop(number: int, frame: FrameType | None) -> None:
            self.trainer.stop_requested = True
            if signal.SIGINT in handled:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.may_interrupt:
                self.may_interrupt = False
                raise _InterruptedError

        if threading.current_thread() is not threading.main_thread():  # other threads cannot handle signals
            yield
            return
        try:
            for number in handled:
                signal.signal(number, request_stop)
            yield
        finally:
            for number in handled:
                signal.signal(number, old_handlers[number])
