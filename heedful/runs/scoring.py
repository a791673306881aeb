"""Evaluation of a split with a task and a model: metrics, the file of predictions, tuned thresholds and temperatures.

Runs evaluate dev and test with it, and `heedful evaluate` any split. `training_vectors_of` summarizes vectors of texts.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from numpy.typing import NDArray

from heedful.atomic_io import atomic_path, write_synced
from heedful.checkpoint import ModelBundle
from heedful.checkpoint.notes import VECTOR_SAMPLE, TrainingVectors
from heedful.data.examples import Example
from heedful.device import autocast
from heedful.infer.engine import Engine
from heedful.infer.finite import replace_nonfinite
from heedful.infer.scores import window_vectors
from heedful.runs.results import JsonObject
from heedful.tasks.answering import Answer
from heedful.tasks.metrics import merge_all
from heedful.tasks.task import BOOTSTRAP_SEED, EvalMetrics, ScoredAnswer, Task, evaluate_task
from heedful.train.fit import EvalResult
from heedful.train.ranks import SINGLE_PROCESS, Ranks

# metrics that decide between checkpoints with equal values of the main metric; the first one that a task has is used
TIE_BREAKERS = {  # sign by metric; -1: smaller is better
    "loss": -1,
    "mse": -1,
    "exact": 1,
    "token_accuracy": 1,
    "mrr": 1,
    "pearson": 1,
    "accuracy": 1,
    "f1": 1,
}
MIN_VECTORS = 100  # minimum windows of held-out texts for a summary of vectors
VECTOR_DRAWS = 400  # samples of the vectors of held-out texts
UNWRITTEN_KEYS = ("vectors", "vector")  # keys of an answer that are too long for the file of predictions


def engine_for(
    task: Task | None, loaded: ModelBundle, precision: torch.dtype
) -> Callable[[list[object]], list[Answer]]:
    """Return a function that answers inputs with a model.

    Args:
        task: The task, whose generation settings and maximum input length are used. If None, those of the model are
            used.
        loaded: The model.
        precision: Precision of matrix products (autocast).
    """
    engine = Engine(
        loaded,
        writing=None if task is None else task.generation,
        max_length=task.truncation_length if task is not None else None,
    )

    def answer(inputs: list[object]) -> list[Answer]:
        with autocast(next(loaded.parameters()).device, precision):
            return engine(inputs)

    return answer


def measure_split(
    task: Task,
    loaded: ModelBundle,
    examples: Iterable[Example],
    *,
    precision: torch.dtype = torch.float32,
    ranks: Ranks = SINGLE_PROCESS,
    predictions: Path | None = None,
) -> EvalMetrics:
    """Evaluate this rank's share of the examples: with n ranks, every n-th one.

    Args:
        task: The task of the model's head.
        loaded: The model.
        examples: All labelled examples of a split, the same ones on all ranks.
        precision: Precision of matrix products.
        ranks: The processes that evaluate together.
        predictions: Path of a file for the predictions, with a line per example, the worst mistakes first. It may only
            be given if there is a single rank.
    """
    assert predictions is None or ranks.size == 1, "each rank would write its own share"
    with ExitStack() as stack:
        file = stack.enter_context(PredictionFile(predictions)) if predictions is not None else None
        metrics = evaluate_task(
            task,
            engine_for(task, loaded, precision),
            examples,
            first=ranks.rank,
            step=ranks.size,
            on_answer=None if file is None else partial(file.write, task),
        )
        if file is not None:
            file.ranks = task.ranks(metrics)
        return metrics


class PredictionFile:
    """A file of predictions in JSON lines, the worst mistakes first. Use it as a context manager.

    The lines are written to a temporary file in the order of the examples, and are sorted at the end. Wrong predictions
    come before correct ones, and each of these groups is sorted by decreasing loss. In retrieval, a prediction is wrong
    unless the correct answer has rank 1, and the rank is its loss. Sorting takes 17 bytes of memory per prediction.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranks: Sequence[int] = ()  # in retrieval: the rank, from 1, of the correct answer of each example
        self._wrong = array("b")  # whether the prediction of each example is wrong
        self._losses = array("d")  # loss of each example
        self._offsets = array("q")  # offset in bytes of each example's line in the temporary file
        self._stack = ExitStack()

    def __enter__(self) -> PredictionFile:
        self._file = self._stack.enter_context(TemporaryFile(dir=self.path.parent))
        return self

    def write(self, task: Task, index: int, example: Example, answer: Answer, scored: ScoredAnswer) -> None:
        """Write the prediction for one example. The arguments after `task` are those of `evaluate_task.on_answer`."""
        short_answer = {name: value for name, value in answer.items() if name not in UNWRITTEN_KEYS}
        line = {"id": index, "input": task.engine_input(example), **scored._asdict(), "answer": short_answer}
        self._wrong.append(scored.correct is False)
        self._losses.append(scored.loss)
        self._offsets.append(self._file.tell())
        self._file.write(_json_line(line))

    def __exit__(self, *raised: object) -> None:
        with self._stack:
            if raised[0] is None:
                for index, rank in enumerate(self.ranks):
                    if rank > 1:
                        self._wrong[index] = True
                        self._losses[index] = rank
                # wrong predictions first, then by decreasing loss; the last key of lexsort is the primary one
                order = np.lexsort((-np.array(self._losses), -np.array(self._wrong)))
                with atomic_path(self.path) as temporary:
                    write_synced(temporary, map(self._read, order.tolist()))

    def _read(self, index: int) -> bytes:
        """Return an example's line from the temporary file. In retrieval, the rank of the correct answer is added."""
        self._file.seek(self._offsets[index])
        line = self._file.readline()
        if not self.ranks:
            return line
        rank = self.ranks[index]
        return _json_line(json.loads(line) | {"correct": rank == 1, "loss": self._losses[index], "rank": rank})


def _json_line(table: JsonObject) -> bytes:
    """Return an object as a line of JSON in UTF-8, with numbers that are not finite as text."""
    text = json.dumps(replace_nonfinite(table), ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace") + b"\n"


def tune_thresholds(task: Task, loaded: ModelBundle, examples: Iterable[Example]) -> dict[str, float]:
    """Return for each label the probability threshold with the best F1 on these examples, computed in float32."""
    return task.tune_thresholds(engine_for(task, loaded, torch.float32), examples)


def fit_temperature(task: Task, loaded: ModelBundle, examples: Iterable[Example]) -> float | None:
    """Return the temperature that calibrates the probabilities on these examples, computed in float32.

    The result is None if there are too few examples.
    """
    return task.fit_temperature(engine_for(task, loaded, torch.float32), examples)


def calibration_of(task: Task, loaded: ModelBundle, examples: Iterable[Example]) -> tuple[float, ...]:
    """Return the calibration of prediction sets (see `Task.calibration`) on these examples, computed in float32.

    The result is empty if there are too few examples, or if the task has no prediction sets.
    """
    return task.calibration(engine_for(task, loaded, torch.float32), examples)


def training_vectors_of(
    task: Task, loaded: ModelBundle, train: Iterable[Example], held_out: Iterable[Example]
) -> TrainingVectors | None:
    """Return a summary of the vectors of training examples, in float32.

    Args:
        task: The task of the model's head.
        loaded: The model.
        train: Training examples.
        held_out: Examples that the model was not trained on, which show how far other texts of this kind are.

    Returns:
        The summary, or None if the task generates text, all vectors are equal, or held-out examples are too few.
    """
    if task.generation is not None:
        return None
    held_out_vectors = _vectors_of(task, loaded, held_out)
    if len(held_out_vectors) < MIN_VECTORS:
        return None
    vectors = _vectors_of(task, loaded, train)
    mean = vectors.mean(axis=0)
    radius = math.sqrt(((vectors - mean) ** 2).sum(axis=1).mean())
    if not 0 < radius < math.inf:
        return None
    count = len(held_out_vectors)
    draws = np.random.default_rng(BOOTSTRAP_SEED).multinomial(VECTOR_SAMPLE, np.full(count, 1 / count), VECTOR_DRAWS)
    distances = np.linalg.norm(draws / VECTOR_SAMPLE @ held_out_vectors - mean, axis=1) / radius
    return TrainingVectors(
        mean=tuple(map(_rounded, mean)),
        radius=_rounded(radius),
        held_out={str(quantile): _rounded(np.quantile(distances, quantile)) for quantile in (0.5, 0.99)},
    )


def _vectors_of(task: Task, loaded: ModelBundle, examples: Iterable[Example]) -> NDArray[np.float64]:
    """Return the vector of each window of examples, [windows, width]; see `TrainingVectors`."""
    engine = Engine(loaded, max_length=task.truncation_length)
    batches = [np.zeros((0, loaded.config.model.width))]
    engine.on_rows = lambda rows, counts: batches.append(window_vectors(rows, counts).astype(np.float64))
    engine([task.engine_input(example) for example in examples])
    return np.concatenate(batches)


def _rounded(number: float) -> float:
    """Return a number with five significant digits, which suffice for distances."""
    return float(f"{number:.5g}")


def eval_result(task: Task, shares: list[EvalMetrics]) -> EvalResult:
    """Merge the metrics of all ranks into the evaluation by which checkpoints are ranked."""
    result = task.compute_metrics(merge_all(shares))
    scalars = {name: value for name, value in result.items() if isinstance(value, int | float) and math.isfinite(value)}
    return EvalResult(
        metric_value=float(result[task.metric]), tie_breaker=tie_breaker(scalars, task.metric), metrics=scalars
    )


def tie_breaker(metrics: Mapping[str, float], main_metric: str) -> float:
    """Return the value that decides between checkpoints with equal values of the main metric. Larger is better.

    It is the first of TIE_BREAKERS that is among the metrics, with its sign, or 0 if none of them is.
    """
    for name, sign in TIE_BREAKERS.items():
        if name in metrics and name != main_metric:
            return sign * metrics[name]
    return 0.0
