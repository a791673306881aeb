"""`Progress`, which commands that train use: a live line on a terminal, or else a line every 30 seconds, on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from heedful.cli.output import escape, format_duration, note
from heedful.runs.timing import peak_memory
from heedful.train.fit import EvalResult, Reporter
from heedful.train.trainer import Step, Trainer

LINE_INTERVAL = 30.0  # seconds between lines, if there is no live line
COUNTS = ("correct", "count")  # metrics that count examples


class Progress(Reporter):
    """Reports steps, loss, tokens per second, time left and memory on stderr.

    Args:
        quiet: Whether to print nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._tokens = 0
        self._seconds = 0.0
        self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        if self._live:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[measurements]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("reading data", total=None, measurements="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()
        if kind is KeyboardInterrupt and not self._quiet:
            note("interrupted; finished work is kept, and the same command resumes.")

    def step(self, step: Step, trainer: Trainer) -> None:
        """Report an optimizer step."""
        self._tokens += step.tokens
        self._seconds += step.seconds
        speed = f"{self._tokens / self._seconds:,.0f} tokens/s" if self._seconds else ""
        measurements = f"loss {step.loss:.4f}  {speed}  {peak_memory() / 2**30:.1f} GiB"
        if self._live:
            description = f"epoch {step.epoch:.1f}, step {step.number:,}"
            self._bar.update(
                self._task, description=description, total=1.0, completed=trainer.progress, measurements=measurements
            )
        elif not self._quiet and time.monotonic() - self._last_line >= LINE_INTERVAL:
            self._last_line = time.monotonic()
            seconds_left = trainer.seconds / max(trainer.progress, 1e-9) * (1 - trainer.progress)
            time_left = format_duration(seconds_left)
            note(f"step {step.number:,}, epoch {step.epoch:.2f}: {measurements}, about {time_left} left")

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        """Report the metrics of an evaluation."""
        from heedful.tasks.metrics import format_metric

        metrics = {name: value for name, value in result.metrics.items() if name not in COUNTS}
        # find the metric by which checkpoints are ranked; metric_value is its value, or the negative value of a loss
        ranked_by = next((name for name, value in metrics.items() if abs(value) == abs(result.metric_value)), "")
        value = metrics.get(ranked_by, result.metric_value)
        texts = [f"{ranked_by or 'metric'} {format_metric(ranked_by or 'loss', value)}"]
        if best:
            texts[0] += " (best so far)"
        for name, other_value in list(metrics.items())[:3]:
            if name != ranked_by and other_value != value:  # accuracy and micro F1 of single labels are equal
                texts.append(f"{name} {format_metric(name, other_value)}")
        self.message(f"step {step:,}, dev: {', '.join(texts)}")

    def message(self, text: str) -> None:
        """Report a message."""
        if self._quiet:
            return
        if self._live:
            self._bar.console.print(escape(text), markup=False, highlight=False)
        else:
            note(escape(text))
