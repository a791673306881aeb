"""GLUE: the official metrics of each task of the GLUE benchmark, for users who score predictions."""

from __future__ import annotations

from dataclasses import dataclass

from heedful.tasks.metrics.base import Result
from heedful.tasks.metrics.classification import ConfusionMatrix
from heedful.tasks.metrics.regression import RankedRegressionScores


@dataclass(frozen=True, kw_only=True, slots=True)
class GlueTask:
    """A task of the benchmark: its metric, and the names of its official scores."""

    metric: ConfusionMatrix | RankedRegressionScores  # an empty metric, to which examples are added
    official: tuple[str, ...]  # keys of the official scores in the result of the metric

    def scores(self, result: Result) -> dict[str, float]:
        """Return the official scores of a result, and their mean as "score", which GLUE averages over its tasks."""
        official_scores = {name: float(result[name]) for name in self.official}
        return official_scores | {"score": sum(official_scores.values()) / len(official_scores)}


def _classes(*labels: str, official: tuple[str, ...] = ("accuracy",), positive: str | None = None) -> GlueTask:
    """Return a classification task with these labels."""
    return GlueTask(metric=ConfusionMatrix(labels=labels, positive=positive), official=official)


# Wang et al. 2019. Labels are compared by name, since each model has its own order of classes.
GLUE: dict[str, GlueTask] = {
    "cola": _classes("0", "1", official=("matthews",)),
    "sst2": _classes("0", "1"),
    "mrpc": _classes("0", "1", official=("accuracy", "f1"), positive="1"),
    "qqp": _classes("0", "1", official=("accuracy", "f1"), positive="1"),
    "stsb": GlueTask(metric=RankedRegressionScores(), official=("pearson", "spearman")),
    "mnli": _classes("contradiction", "entailment", "neutral"),
    "mnli-mm": _classes("contradiction", "entailment", "neutral"),
    "qnli": _classes("entailment", "not_entailment"),
    "rte": _classes("entailment", "not_entailment"),
    "wnli": _classes("0", "1"),
}
