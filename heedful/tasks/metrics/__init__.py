"""Metrics with their official definitions, in constant memory where that can be; each is updated, merged, read."""

from __future__ import annotations

from heedful.tasks.metrics.base import Metric, Result, Sure, merge_all
from heedful.tasks.metrics.bleu import Bleu, has_bleu
from heedful.tasks.metrics.bootstrap import (
    Bootstrap,
    confusion_of,
    confusion_statistics,
    f1_of,
    interval,
    macro_f1_of,
    mean_of,
    paired_difference,
    precision_of,
    recall_of,
)
from heedful.tasks.metrics.classification import Accuracy, ConfusionMatrix, MultiLabel, macro_f1, matthews
from heedful.tasks.metrics.entities import Entities, entity_counts, spans
from heedful.tasks.metrics.glue import GLUE, Suite
from heedful.tasks.metrics.regression import Calibration, RankedRegression, Regression, TokenLoss
from heedful.tasks.metrics.retrieval import Retrieval
from heedful.tasks.metrics.squad import SquadScore, SquadThreshold, answer_scores, apply_threshold, normalised
from heedful.tasks.metrics.text_match import TextScore, text_scores

__all__ = [
    "GLUE",
    "Accuracy",
    "Bleu",
    "Bootstrap",
    "Calibration",
    "ConfusionMatrix",
    "Entities",
    "Metric",
    "MultiLabel",
    "RankedRegression",
    "Regression",
    "Result",
    "Retrieval",
    "SquadScore",
    "SquadThreshold",
    "Suite",
    "Sure",
    "TextScore",
    "TokenLoss",
    "answer_scores",
    "apply_threshold",
    "confusion_of",
    "confusion_statistics",
    "entity_counts",
    "f1_of",
    "has_bleu",
    "interval",
    "macro_f1",
    "macro_f1_of",
    "matthews",
    "mean_of",
    "merge_all",
    "normalised",
    "paired_difference",
    "precision_of",
    "recall_of",
    "spans",
    "text_scores",
]
