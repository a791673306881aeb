"""Metrics with their official definitions, for tasks, `heedful evaluate` and users. See `base` for their interface."""

from __future__ import annotations

from heedful.tasks.metrics.base import (
    HasIntervals,
    Metric,
    Result,
    format_difference,
    format_metric,
    merge_all,
    metric_bounds,
)
from heedful.tasks.metrics.bleu import Bleu
from heedful.tasks.metrics.bootstrap import (
    Bootstrap,
    confusion_of,
    confusion_statistics,
    f1_of,
    macro_f1_of,
    mean_interval,
    mean_of,
    paired_difference,
    precision_of,
    recall_of,
)
from heedful.tasks.metrics.calibration import Calibration, best_temperature
from heedful.tasks.metrics.classification import Accuracy, ConfusionMatrix, MultiLabelScores, macro_f1, matthews
from heedful.tasks.metrics.coverage import Coverage
from heedful.tasks.metrics.entities import EntityScores, entity_counts, entity_spans
from heedful.tasks.metrics.glue import GLUE, GlueTask
from heedful.tasks.metrics.ranking import RankingScores
from heedful.tasks.metrics.regression import RankedRegressionScores, RegressionScores
from heedful.tasks.metrics.retrieval import Retrieval
from heedful.tasks.metrics.squad import SquadScore, SquadThreshold, answer_scores, apply_threshold, normalize_answer
from heedful.tasks.metrics.text_match import TextScore, text_scores
from heedful.tasks.metrics.token_loss import TokenLoss

__all__ = [
    "GLUE",
    "Accuracy",
    "Bleu",
    "Bootstrap",
    "Calibration",
    "ConfusionMatrix",
    "Coverage",
    "EntityScores",
    "GlueTask",
    "HasIntervals",
    "Metric",
    "MultiLabelScores",
    "RankedRegressionScores",
    "RankingScores",
    "RegressionScores",
    "Result",
    "Retrieval",
    "SquadScore",
    "SquadThreshold",
    "TextScore",
    "TokenLoss",
    "answer_scores",
    "apply_threshold",
    "best_temperature",
    "confusion_of",
    "confusion_statistics",
    "entity_counts",
    "entity_spans",
    "f1_of",
    "format_difference",
    "format_metric",
    "macro_f1",
    "macro_f1_of",
    "matthews",
    "mean_interval",
    "mean_of",
    "merge_all",
    "metric_bounds",
    "normalize_answer",
    "paired_difference",
    "precision_of",
    "recall_of",
    "text_scores",
]
