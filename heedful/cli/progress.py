"""Progress of a run on stderr: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from heedful.cli.output import escape, format_duration, note
from heedful.runs.timing import peak_memory
from heedful.train.fit import EvalResult, Reporter
from heedful.train.trainer import Step, Trainer

EVERY = 30.0  # seconds between plain lines


class Progress(Reporter):
    """Shows steps, loss, tokens per second, time left and memory."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._tokens = 0
        self._seconds = 0.0
        self._said = time.monotonic()

    def __enter__(self) -> Progress:
        if self._live:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[rest]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("reading", total=None, rest="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()
        if kind is KeyboardInterrupt and not self._quiet:
            note("interrupted; finished work is kept, and the same command resumes.")

    def step(self, step: Step, trainer: Trainer) -> None:
        """Show progress after an update."""
        self._tokens += step.tokens
        self._seconds += step.seconds
        speed = f"{self._tokens / self._seconds:,.0f} tokens/s" if self._seconds else ""
        rest = f"loss {step.loss:.4f}  {speed}  {peak_memory() / 2**30:.1f} GiB"
        if self._live:
            shown = f"epoch {step.epoch:.1f}, step {step.number:,}"
            self._bar.update(self._task, description=shown, total=1.0, completed=trainer.done, rest=rest)
        elif not self._quiet and time.monotonic() - self._said >= EVERY:
            self._said = time.monotonic()
            left = trainer.seconds / max(trainer.done, 1e-9) * (1 - trainer.done)
            note(f"step {step.number:,}, epoch {step.epoch:.2f}: {rest}, about {format_duration(left)} left")

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        """Show the metrics of an evaluation."""
        shown = ", ".join(f"{name} {value:.4f}" for name, value in list(result.numbers.items())[:4] if name != "count")
        self.message(f"step {step:,}, dev: {result.metric_value:.4f}{' (best so far)' if best else ''}; {shown}")

    def message(self, text: str) -> None:
        """Show a message."""
        if self._quiet:
            return
        if self._live:
            self._bar.console.print(escape(text), markup=False, highlight=False)
        else:
            note(escape(text))
