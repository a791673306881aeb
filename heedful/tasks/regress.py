"""Give a text or a pair of texts a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.checkpoint.new_head import rescaled
from heedful.data import Example, ScoredExample
from heedful.model.config import ProblemType
from heedful.tasks.answering import Answer
from heedful.tasks.classify import Scores, TextTask
from heedful.tasks.metrics import Bootstrap, RankedRegressionScores, Result
from heedful.tasks.metrics.regression import RowStore
from heedful.tasks.task import SEED, EvalMetrics, ScoredAnswer, Task, TaskSetup

Sums = Float64[np.ndarray, "replicates statistics"]
NUMBER = "score"  # what a regression's one output is called, unless a teacher calls it otherwise
FARTHEST = 512.0  # standard deviations, or more, are what a bootstrap's sums have room for
ROUNDED = 1e-7  # a variance below it, of 1, is what rounding left


@dataclass(frozen=True, kw_only=True)
class Regress(TextTask):
    """One number: squared error of (score - mean) / deviation, those of train, so that its unit does not matter.

    What learns gives such numbers; what answers has them folded into its last layer, and gives scores.
    """

    example: ClassVar[type[Example]] = ScoredExample
    metric: str = "pearson"  # ranks of scores that are nearly the same are noise, by which a poor step may be the best
    problem_type: ClassVar[ProblemType] = "regression"
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        """Numbers are learned by their distance from the mean, in deviations; without a bias, from 0."""
        task, made = cls.with_new_head(setup, labels=setup.labels or (NUMBER,))
        known, now = setup.loaded.named_tensors(), made.named_tensors()
        mean, deviation = setup.survey.mean, setup.survey.deviation
        if "head.out.bias" not in now:
            mean, deviation = 0.0, hypot(mean, deviation)
        task = replace(task, mean=mean, deviation=deviation)
        if "head.out.weight" in known and torch.equal(known["head.out.weight"], now["head.out.weight"]):
            made = task.for_training(made)  # it gave scores before
        made.label_scaling = {"mean": mean, "std": deviation}
        return task, made

    def target(self, example: ScoredExample) -> float:
        return (example.score - self.mean) / self.deviation

    def for_training(self, loaded: ModelBundle) -> ModelBundle:
        return rescaled(loaded, 1 / self.deviation, -self.mean / self.deviation)

    def for_inference(self, loaded: ModelBundle) -> ModelBundle:
        return rescaled(loaded, self.deviation, self.mean)

    def losses(self, scores: Scores, targets: Tensor) -> Float[Tensor, " sequences"]:
        return (scores[:, 0] - targets.to(scores)).square()

    def new_metrics(self) -> EvalMetrics:
        return correlation_metrics()

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[ScoredExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        return update_correlation(metrics, list(map(_number, answers)), [example.score for example in examples], ids)

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        found: Result = metrics.metrics["numbers"].compute()
        return found

    def score_answer(self, example: ScoredExample, answer: Answer) -> ScoredAnswer:
        said = _number(answer)
        return ScoredAnswer(example.score, said, None, abs(said - example.score))


def _number(answer: Answer) -> float:
    (number,) = answer["numbers"].values()
    found: float = number
    return found


def correlation_metrics() -> EvalMetrics:
    """Numbers beside what is right, with an interval of Pearson's r; nothing was seen yet."""
    return EvalMetrics(metrics={"numbers": RankedRegressionScores()}, bootstraps={"pearson": PearsonBootstrap()})


def update_correlation(
    metrics: EvalMetrics, said: Sequence[float], gold: Sequence[float], ids: Sequence[int]
) -> EvalMetrics:
    """With more numbers."""
    return EvalMetrics(
        metrics={"numbers": metrics.metrics["numbers"].update(said, gold)},
        bootstraps={"pearson": metrics.bootstraps["pearson"].update(ids, np.stack([said, gold], 1))},
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PearsonBootstrap:
    """Numbers beside what is right, kept until an interval is asked for: 24 bytes for each example.

    Only then are their means and deviations known, without which sums of squares would cancel, or overflow.
    """

    kept: RowStore = field(default_factory=RowStore)

    def update(self, ids: Sequence[int], pairs: Float64[np.ndarray, "examples 2"]) -> PearsonBootstrap:
        """With more examples: the number of each in the data set, and its two numbers."""
        rows = np.concatenate([np.array(ids, dtype=np.float64)[:, None], pairs], 1)
        return replace(self, kept=self.kept.added(rows))

    def merge_state(self, other: PearsonBootstrap) -> PearsonBootstrap:
        """Both as one."""
        return replace(self, kept=self.kept.merge_state(other.kept))

    def interval(self) -> Result:
        """Where the middle of the replicates lies."""
        return self._sums().interval(pearson_of)

    def values(self) -> Float64[np.ndarray, " replicates"]:
        """Pearson's r in each replicate."""
        return self._sums().values(pearson_of)

    def _sums(self) -> Bootstrap:
        rows = self.kept.rows(3)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        x, y = standardize(rows[:, 1]), standardize(rows[:, 2])
        moments = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], 1)
        return Bootstrap(seed=SEED, statistics=6).update(rows[:, 0].astype(np.int64), moments)


def standardize(values: Float64[np.ndarray, " examples"]) -> Float64[np.ndarray, " examples"]:
    """(x - mean) / deviation, or all of it a little smaller where one value is farther off than FARTHEST; else 0.

    >>> standardize(np.array([1.0, 2.0])).tolist(), standardize(np.array([2.0, 2.0])).tolist()
    ([-1.0, 1.0], [0.0, 0.0])
    """
    if not len(values) or (values == values[0]).all():
        return np.zeros_like(values)
    values = values / np.abs(values).max()
    away: Float64[np.ndarray, " examples"] = values - values.mean()
    away /= max(away.std(), np.abs(away).max() / FARTHEST)
    return away


def pearson_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """cov / sqrt(var var) of each replicate, from its sums of 1, x, y, x², y² and xy; 0 where one does not vary."""
    n, x, y, xx, yy, xy = sums.T
    var_x, var_y = n * xx - x * x, n * yy - y * y
    varies = np.minimum(var_x, var_y) > ROUNDED * n * n
    r: Float64[np.ndarray, " replicates"] = np.divide(
        n * xy - x * y, np.sqrt(np.abs(var_x * var_y)), out=np.zeros_like(n), where=varies
    )
    return r.clip(-1.0, 1.0)
