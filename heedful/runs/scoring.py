"""Score a split: the answers of the engine measured, written down with the worst mistakes first, thresholds found."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch

from heedful.atomic_io import put, whole
from heedful.checkpoint import Loaded
from heedful.infer.engine import Engine
from heedful.infer.finite import replace_nonfinite
from heedful.tasks.answering import Answer
from heedful.tasks.metrics import merge_all
from heedful.tasks.task import EvalMetrics, ScoredAnswer, Task, evaluate_task
from heedful.train.fit import EvalResult
from heedful.train.ranks import SINGLE_PROCESS, Ranks

TIE_BREAKERS = {  # decides between equal metric values, the first of these that a task has: 1 where larger is better
    **{"loss": -1, "mse": -1, "exact": 1, "token_accuracy": 1, "mrr": 1},
    **{"pearson": 1, "accuracy": 1, "f1": 1},
}

AT_ONCE = 1000  # predictions that are put in order together
HIDDEN = ("vectors", "vector")  # of an answer: too long to be read


def engine_for(task: Task | None, loaded: Loaded, precision: torch.dtype) -> Callable[[list[Any]], list[Answer]]:
    """The engine over a model, its products in that precision."""
    engine = Engine(
        loaded,
        writing=None if task is None else task.writing,
        cut=task.cut if task is not None else None,
    )

    def ask(inputs: list[Any]) -> list[Answer]:
        device = next(loaded.parameters()).device.type
        with torch.autocast(device, torch.bfloat16) if precision == torch.bfloat16 else nullcontext():
            return engine(inputs)

    return ask


def measure_split(
    task: Task,
    loaded: Loaded,
    examples: Iterable[Any],
    *,
    precision: torch.dtype = torch.float32,
    ranks: Ranks = SINGLE_PROCESS,
    predictions: Path | None = None,
) -> EvalMetrics:
    """Ask for this rank's share of the examples; `predictions` gets a line for each, the worst mistakes first."""
    assert predictions is None or ranks.size == 1, "each rank would write its own share"
    with ExitStack() as stack:
        book = stack.enter_context(PredictionFile(predictions)) if predictions is not None else None
        measured = evaluate_task(
            task,
            engine_for(task, loaded, precision),
            examples,
            first=ranks.rank,
            step=ranks.size,
            judged=None if book is None else lambda *told: book.write(task, *told),
        )
        if book is not None:
            book.ranks = task.ranks(measured)
        return measured


class PredictionFile:
    """Predictions in a file: written as they come, put in order at the end; 17 bytes are kept for each.

    What is wrong comes first, then what is worse: with ranks, what was found later than another.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranks: Sequence[int] = ()  # of the lines as they came, where rank 1 is correct
        self._wrong, self._losses, self._places = array("b"), array("d"), array("q")
        self._stack = ExitStack()

    def __enter__(self) -> PredictionFile:
        self._file = self._stack.enter_context(TemporaryFile(dir=self.path.parent))
        return self

    def write(self, task: Task, number: int, example: Any, answer: Answer, judged: ScoredAnswer) -> None:
        """One line."""
        shown = {name: value for name, value in answer.items() if name not in HIDDEN}
        line = {"id": number, "input": task.ask(example), **judged._asdict(), "answer": shown}
        self._wrong.append(judged.correct is False)
        self._losses.append(judged.loss)
        self._places.append(self._file.tell())
        self._file.write(_line(line))

    def __exit__(self, *raised: Any) -> None:
        with self._stack:
            if raised[0] is None:
                for number, rank in enumerate(self.ranks):
                    if rank > 1:
                        self._wrong[number], self._losses[number] = True, rank
                order = np.lexsort((-np.array(self._losses), -np.array(self._wrong)))
                with whole(self.path) as part:
                    put(part, map(self._at, order.tolist()))

    def _at(self, number: int) -> bytes:
        self._file.seek(self._places[number])
        return self._judged(number, self._file.readline())

    def _judged(self, number: int, line: bytes) -> bytes:
        """The line; with its rank, where there are ranks."""
        if not self.ranks:
            return line
        found, rank = json.loads(line), self.ranks[number]
        return _line(found | {"correct": rank == 1, "loss": self._losses[number], "rank": rank})


def _line(found: dict[str, Any]) -> bytes:
    return (
        json.dumps(replace_nonfinite(found), ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")
        + b"\n"
    )


def tune_thresholds(task: Task, loaded: Loaded, examples: Iterable[Any]) -> dict[str, float]:
    """Thresholds that give the best F1 on these examples, in float32."""
    return task.calibrate(engine_for(task, loaded, torch.float32), examples)


def eval_result(task: Task, shares: list[EvalMetrics]) -> EvalResult:
    """The evaluation that the shares of all ranks make, for ranking checkpoints."""
    found = task.result(merge_all(shares))
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float) and math.isfinite(value)}
    tie = next(
        (sign * numbers[name] for name, sign in TIE_BREAKERS.items() if name in numbers and name != task.metric), 0.0
    )
    return EvalResult(metric_value=float(found[task.metric]), tie=tie, numbers=numbers)
