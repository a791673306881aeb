"""Training progress on stderr: a live line on a terminal, else a line every 30 seconds, and nothing if quiet."""

from __future__ import annotations

import io
import sys

import pytest

from heedful.cli import progress as module
from heedful.cli.progress import Progress
from heedful.train.fit import EvalResult
from heedful.train.trainer import Step, Trainer

EVAL_RESULT = EvalResult(
    metric_value=0.9, metrics={"accuracy": 0.9, "count": 8, "macro_f1": 0.8, "loss": 0.3, "ece": 0.1, "mse": 1.0}
)


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def step(number: int) -> Step:
    """Return an optimizer step: 100 tokens in half a second, and four steps in an epoch."""
    return Step(number, number / 4, 1.25, 1e-3, 0.5, 100, 0.5, True)


class StubTrainer(Trainer):
    """A trainer that has done a share of its training, from 0 to 1, in a number of seconds."""

    progress = 0.0

    def __init__(self, progress: float, seconds: float) -> None:
        self.progress, self.seconds = progress, seconds


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with Progress() as progress:
        progress.step(step(1), StubTrainer(0.1, 10.0))
        now[0] += 29
        progress.step(step(2), StubTrainer(0.2, 20.0))
        assert capsys.readouterr() == ("", "")
        now[0] += 2
        progress.step(step(3), StubTrainer(0.25, 30.0))  # a resumed run: 30 s with the time before the interruption
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("step 3, epoch 0.75: loss 1.2500  200 tokens/s  ")
        assert err.endswith(" GiB, about 1 min 30 s left\n")
        progress.step(step(4), StubTrainer(0.3, 31.0))
        progress.evaluated(4, EVAL_RESULT, True)
        progress.message("a\x1b[31m text")
        _, err = capsys.readouterr()
        assert err.splitlines() == [
            "step 4, dev: accuracy 90.0 % (best so far), macro_f1 80.0 %, loss 0.3000",
            "a\\x1b[31m text",
        ]


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_INTERVAL", 0.0)
    with Progress(quiet=True) as progress:
        progress.step(step(1), StubTrainer(0.5, 1.0))
        progress.evaluated(1, EVAL_RESULT, False)
        progress.message("text")
    assert capsys.readouterr() == ("", "")


def test_a_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress() as progress:
        progress.step(step(3), StubTrainer(0.75, 3.0))
        progress.message("[bold]not markup[/bold]")
        progress._bar.refresh()
    shown = terminal.getvalue()
    assert "epoch 0.8, step 3" in shown and "75 %" in shown and "200 tokens/s" in shown
    assert "[bold]not markup[/bold]" in shown
    assert shown.endswith("\x1b[2K"), "the line is gone in the end"


@pytest.mark.parametrize("quiet", [False, True])
def test_an_interruption_before_the_first_step_is_reported(capsys: pytest.CaptureFixture[str], quiet: bool) -> None:
    progress = Progress(quiet=quiet)
    progress.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    progress.__exit__(ValueError, ValueError(), None)
    message = "" if quiet else "interrupted; finished work is kept, and the same command resumes.\n"
    assert capsys.readouterr() == ("", message)


def test_counts_of_examples_are_not_printed_as_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"accuracy": 0.67, "correct": 67, "count": 100}
    with Progress() as progress:
        progress.evaluated(60, EvalResult(metric_value=0.67, metrics=metrics), best=True)
    assert "step 60, dev: accuracy 67.0 % (best so far)\n" in capsys.readouterr().err
