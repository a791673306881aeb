"""Regression: the task `Regress`, which predicts a score for a text or a pair of texts, and the metrics of scores.

Sentence embeddings of pairs with scores use the same metrics.
"""

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
from heedful.tasks.metrics.row_store import RowStore
from heedful.tasks.task import BOOTSTRAP_SEED, EvalMetrics, ScoredAnswer, Task, TaskSetup

Sums = Float64[np.ndarray, "replicates statistics"]
DEFAULT_OUTPUT_NAME = "score"
MAX_DEVIATIONS = 512.0  # maximum distance from the mean that fits the sums of a bootstrap, in standard deviations
MIN_VARIANCE = 1e-7  # a smaller variance of standardized values is a rounding error


@dataclass(frozen=True, kw_only=True)
class Regress(TextTask[ScoredExample]):
    """Regression of one score.

    The loss is the squared error of (score - mean) / deviation, with mean and standard deviation of the training data,
    so that the unit of scores does not matter. In training the model outputs standardized scores. For inference, mean
    and deviation are folded into its last layer, so that it outputs scores.
    """

    example: ClassVar[type[Example]] = ScoredExample
    # not Spearman's rho: ranks of nearly equal scores are noise, which may favour a poor checkpoint
    metric: str = "pearson"
    problem_type: ClassVar[ProblemType] = "regression"
    mean: float = 0.0  # mean score of the training data
    deviation: float = 1.0  # standard deviation of the scores of the training data

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        """Return task and model. If the last layer has no bias, scores are only divided by their root mean square."""
        task, bundle = cls.with_new_head(setup, labels=setup.labels or (DEFAULT_OUTPUT_NAME,))
        old, new = setup.loaded.named_tensors(), bundle.named_tensors()
        mean, deviation = setup.stats.score_mean, setup.stats.score_std
        if "head.out.bias" not in new:
            mean, deviation = 0.0, hypot(mean, deviation)
        task = replace(task, mean=mean, deviation=deviation)
        if "head.out.weight" in old and torch.equal(old["head.out.weight"], new["head.out.weight"]):
            bundle = task.for_training(bundle)  # the head is a trained regression head, which outputs scores
        bundle.label_scaling = {"mean": mean, "std": deviation}
        return task, bundle

    def target(self, example: ScoredExample) -> float:
        """Return the standardized score."""
        return (example.score - self.mean) / self.deviation

    def for_training(self, loaded: ModelBundle) -> ModelBundle:
        """Make the model output standardized scores instead of scores."""
        return rescaled(loaded, 1 / self.deviation, -self.mean / self.deviation)

    def for_inference(self, loaded: ModelBundle) -> ModelBundle:
        """Make the model output scores instead of standardized scores."""
        return rescaled(loaded, self.deviation, self.mean)

    def losses(self, scores: Scores, targets: Tensor) -> Float[Tensor, " sequences"]:
        """Return the squared error of each sequence."""
        return (scores[:, 0] - targets.to(scores)).square()

    def new_metrics(self) -> EvalMetrics:
        return correlation_metrics()

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[ScoredExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        predicted = [_predicted_score(answer) for answer in answers]
        return update_correlation(metrics, predicted, [example.score for example in examples], ids)

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        results: Result = metrics.metrics["numbers"].compute()
        return results

    def score_answer(self, example: ScoredExample, answer: Answer) -> ScoredAnswer:
        """Compare an answer with the score. The loss is the absolute error."""
        predicted = _predicted_score(answer)
        return ScoredAnswer(example.score, predicted, None, abs(predicted - example.score))


def _predicted_score(answer: Answer) -> float:
    """Return the only value of an answer."""
    score: float
    (score,) = answer["values"].values()
    return score


def correlation_metrics() -> EvalMetrics:
    """Return empty metrics of predicted scores, with a bootstrap of Pearson's r."""
    return EvalMetrics(metrics={"numbers": RankedRegressionScores()}, bootstraps={"pearson": PearsonBootstrap()})


def update_correlation(
    metrics: EvalMetrics, predicted: Sequence[float], gold: Sequence[float], ids: Sequence[int]
) -> EvalMetrics:
    """Return the metrics with predicted and gold scores added; `ids` are the indices of the examples."""
    return EvalMetrics(
        metrics={"numbers": metrics.metrics["numbers"].update(predicted, gold)},
        bootstraps={"pearson": metrics.bootstraps["pearson"].update(ids, np.stack([predicted, gold], 1))},
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PearsonBootstrap:
    """Bootstrap of Pearson's r. It stores ids, predictions and scores: 24 bytes for each example.

    Values are standardized before they are summed, since sums of squares could cancel or overflow. They must be stored
    because mean and deviation are known only after the last example.
    """

    store: RowStore = field(default_factory=RowStore)

    def update(self, ids: Sequence[int], pairs: Float64[np.ndarray, "examples 2"]) -> PearsonBootstrap:
        """Return the bootstrap with examples added: the index of each in the data set, its prediction and its score."""
        rows = np.concatenate([np.array(ids, dtype=np.float64)[:, None], pairs], 1)
        return replace(self, store=self.store.append(rows))

    def merge_state(self, incoming: PearsonBootstrap) -> PearsonBootstrap:
        """Return the bootstrap over the examples of both bootstraps."""
        return replace(self, store=self.store.merge_state(incoming.store))

    def interval(self) -> Result:
        """Return the interval, from the quantiles of the replicates."""
        return self._sums().interval(pearson_of)

    def values(self) -> Float64[np.ndarray, " replicates"]:
        """Return Pearson's r in each replicate."""
        return self._sums().values(pearson_of)

    def _sums(self) -> Bootstrap:
        """Return a bootstrap of the moments of the standardized values."""
        rows = self.store.rows(3)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        x, y = standardize(rows[:, 1]), standardize(rows[:, 2])
        moments = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], 1)
        return Bootstrap(seed=BOOTSTRAP_SEED, statistics=6).update(rows[:, 0].astype(np.int64), moments)


def standardize(values: Float64[np.ndarray, " examples"]) -> Float64[np.ndarray, " examples"]:
    """Return (x - mean) / deviation, scaled down if a value exceeds MAX_DEVIATIONS; zeros if all values are equal.

    >>> standardize(np.array([1.0, 2.0])).tolist(), standardize(np.array([2.0, 2.0])).tolist()
    ([-1.0, 1.0], [0.0, 0.0])
    """
    if not len(values) or (values == values[0]).all():
        return np.zeros_like(values)
    values = values / np.abs(values).max()
    deviations: Float64[np.ndarray, " examples"] = values - values.mean()
    deviations /= max(deviations.std(), np.abs(deviations).max() / MAX_DEVIATIONS)
    return deviations


def pearson_of(sums: Sums) -> Float64[np.ndarray, " replicates"]:
    """Return Pearson's r of each replicate, or 0 if x or y is constant, from its sums of 1, x, y, x², y² and xy."""
    n, x, y, xx, yy, xy = sums.T
    var_x, var_y = n * xx - x * x, n * yy - y * y
    both_vary = np.minimum(var_x, var_y) > MIN_VARIANCE * n * n
    r: Float64[np.ndarray, " replicates"] = np.divide(
        n * xy - x * y, np.sqrt(np.abs(var_x * var_y)), out=np.zeros_like(n), where=both_vary
    )
    return r.clip(-1.0, 1.0)
