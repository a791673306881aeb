"""Classification of a text or a pair of texts: the tasks `Classify` (one label) and `ClassifyMultiLabel`.

`CLASSIFY_HEAD` makes the answers of regression heads too. `TextTask` is also the base class of regression.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.data import Example, LabelledExample, MultiLabelExample, ScoredExample
from heedful.model.config import Classes, ProblemType
from heedful.objectives import Batch, Sample
from heedful.objectives.base import pack_samples, weights_of_samples
from heedful.tasks.answering import (
    Answer,
    AnswerContext,
    AnswerHead,
    AnswerInputs,
    Window,
    read_pair,
    read_text,
)
from heedful.tasks.label_answers import THRESHOLD, multi_label_answer, single_label_answer, unique_label_names
from heedful.tasks.metrics import (
    Calibration,
    ConfusionMatrix,
    Coverage,
    MultiLabelScores,
    Result,
    TokenLoss,
    best_temperature,
    confusion_of,
    confusion_statistics,
    f1_of,
    macro_f1,
    macro_f1_of,
    mean_of,
)
from heedful.tasks.metrics.conformal import MIN_SET_EXAMPLES, calibration_probabilities
from heedful.tasks.predictions import Classification, MultiLabelClassification, Prediction, Regression
from heedful.tasks.specs.classify import ClassifySettings, MultiLabelSettings
from heedful.tasks.task import EvalMetrics, ScoredAnswer, Task, TaskSetup, bootstrap_stat, evaluate_task, log_loss
from heedful.tokenizer import Encoding, TokenizerInput

if TYPE_CHECKING:
    from heedful.tasks.generation import GenerationConfig

Scores = Float[Tensor, "sequences scores"]

Labelled = TypeVar("Labelled", bound=LabelledExample | MultiLabelExample | ScoredExample)
MIN_CALIBRATION_EXAMPLES = 100  # minimum examples in dev for fitting a temperature
MIN_CALIBRATION_MISTAKES = 10  # minimum wrong answers in dev for fitting a temperature
MAX_BOOTSTRAP_SUMS = 400  # maximum sums per replicate for which macro F1 gets a bootstrap interval


def classify_inputs(engine_input: object) -> list[TokenizerInput] | None:
    """Return a text or a pair of texts as tokenizer input, or None if the input has a different form."""
    return read_text(engine_input) or read_pair(engine_input)


def classify_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Return the answer to an input: one label, all labels that reach their thresholds, or the values of a regression.

    For a text in several windows, the outputs of the windows are averaged after the activation: softmax for one label,
    sigmoid for several labels and for cross-encoders with that activation, none for other regression heads. See
    `single_label_answer` for abstention and prediction sets.
    """
    head = context.head
    assert isinstance(head, Classes)
    scores = torch.stack([window.scores for window in windows])
    names = unique_label_names(head.labels)
    window_count = {"windows": len(windows)}
    if head.problem_type == "regression":
        scores = scores.sigmoid() if head.score_activation == "sigmoid" else scores  # a cross-encoder
        return {"values": _named(names, scores.mean(0))} | window_count
    if head.problem_type == "multi_label_classification":
        return multi_label_answer(_named(names, scores.sigmoid().mean(0)), context.thresholds) | window_count
    answer = single_label_answer(
        _named(names, scores.softmax(-1).mean(0)),
        min_confidence=context.min_confidence,
        least_probability=context.least_probability,
    )
    return answer | window_count


def _named(names: list[str], values: Tensor) -> dict[str, float]:
    """Return a dict from each name to its value."""
    return dict(zip(names, values.tolist(), strict=True))


def _prediction(answer: Answer) -> Prediction:
    """Convert an answer to its dataclass."""
    if "values" in answer:
        return Regression.from_answer(answer)
    if "labels" in answer:
        return MultiLabelClassification.from_answer({**answer, "labels": tuple(answer["labels"])})
    return Classification.from_answer(answer | {"prediction_set": tuple(answer.get("prediction_set", ()))})


def _columns(loaded: ModelBundle, generation: GenerationConfig) -> dict[str, object]:
    """Return the type of each field of an answer."""
    head = loaded.config.head
    assert isinstance(head, Classes)
    label_types = dict.fromkeys(unique_label_names(head.labels), float)
    match head.problem_type:
        case "regression":
            return {"values": label_types, "windows": int}
        case "multi_label_classification":
            return {"labels": [str], "probabilities": label_types, "windows": int}
    return {"label": str, "probability": float, "probabilities": label_types, "windows": int}


CLASSIFY_HEAD = AnswerHead(
    expects='texts or pairs of texts, like ["a text", ("first text", "second text")]',
    tokenizer_inputs=classify_inputs,
    answer=classify_answer,
    prediction=_prediction,
    columns=_columns,
)


@dataclass(frozen=True, kw_only=True)
class TextTask(Task[Labelled]):
    """Base class of tasks over a text or a pair of texts.

    Each window of a long text is a sample. Its weight in the loss is the weight of the example / number of windows.
    """

    answerers: ClassVar[tuple[AnswerHead, ...]] = (CLASSIFY_HEAD,)
    takes_pairs: ClassVar[bool] = True

    def tokenizer_inputs(self, example: Labelled) -> list[TokenizerInput]:
        return [example.text if example.text_pair is None else (example.text, example.text_pair)]

    def engine_input(self, example: Labelled) -> object:
        return self.tokenizer_inputs(example)[0]

    @abstractmethod
    def target(self, example: Labelled) -> object:
        """Return the target of the loss for an example."""

    def weight(self, example: Labelled) -> float:
        """Return the weight of an example in the loss."""
        return 1.0

    def make_samples(self, example: Labelled, item_windows: list[list[Encoding]]) -> list[Sample]:
        """Return a sample for each window, all with the target of the example."""
        (windows,) = item_windows
        target, weight = self.target(example), self.weight(example) / len(windows)
        return [Sample.of([window.ids], [window.types], target=target, weight=weight) for window in windows]

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        targets = torch.from_numpy(np.array([sample.target for sample in samples]))
        return Batch(packed=pack_samples(samples), targets=targets, weights=weights_of_samples(samples))

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        losses: Tensor = self.losses(scores, batch.targets)
        return losses

    def fit_temperature(self, engine: AnswerInputs, examples: Iterable[Labelled]) -> float | None:
        """Return the temperature with the smallest loss, or None if there are too few examples or mistakes."""
        probabilities: list[NDArray[np.float64]] = []
        targets: list[object] = []
        mistakes = 0

        def record(index: int, example: Labelled, answer: Answer, scored: ScoredAnswer) -> None:
            nonlocal mistakes
            probabilities.append(np.array(list(answer["probabilities"].values())))
            targets.append(self.target(example))
            mistakes += not scored.correct

        evaluate_task(self, engine, examples, on_answer=record)
        if len(targets) < MIN_CALIBRATION_EXAMPLES or mistakes < MIN_CALIBRATION_MISTAKES:
            return None
        return self.best_temperature(np.array(probabilities), np.array(targets))

    def best_temperature(self, probabilities: NDArray[np.float64], targets: NDArray[np.float64]) -> float:
        """Return the temperature with the smallest loss of the gold labels.

        Args:
            probabilities: Probabilities in the answers, [examples, labels].
            targets: Target of each example.
        """
        raise NotImplementedError

    @abstractmethod
    def losses(self, scores: Scores, targets: Tensor) -> Float[Tensor, " sequences"]:
        """Return the loss of each sequence."""


@dataclass(frozen=True, kw_only=True)
class Classify(TextTask[LabelledExample]):
    """Classification with one label of several. The loss is the cross-entropy, optionally with class weights."""

    example: ClassVar[type[Example]] = LabelledExample
    metric: str = "accuracy"
    weights: tuple[float, ...] = ()  # weight of each class in the loss; (): 1 for each class

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        assert isinstance(setup.settings, ClassifySettings)
        weights: tuple[float, ...] = ()
        if setup.settings.class_weight == "balanced":  # examples / (classes * examples of the class)
            labels, counts = setup.labels, setup.stats.labels
            weights = tuple(counts.total() / (len(labels) * max(1, counts[label])) for label in labels)
        return cls.with_new_head(setup, labels=setup.labels, weights=weights)

    def target(self, example: LabelledExample) -> int:
        """Return the index of the label."""
        return self.labels.index(example.label)

    def weight(self, example: LabelledExample) -> float:
        """Return the class weight of the example's label."""
        return self.weights[self.target(example)] if self.weights else 1.0

    def losses(self, scores: Scores, targets: Tensor) -> Float[Tensor, " sequences"]:
        """Return the loss of each sequence."""
        return F.cross_entropy(scores, targets, reduction="none")

    def best_temperature(self, probabilities: NDArray[np.float64], targets: NDArray[np.float64]) -> float:
        return best_temperature(probabilities, targets)

    def calibration(self, engine: AnswerInputs, examples: Iterable[LabelledExample]) -> tuple[float, ...]:
        """Return the probabilities of the gold labels for prediction sets, or () if there are too few examples."""
        gold: list[float] = []

        def record(index: int, example: LabelledExample, answer: Answer, scored: ScoredAnswer) -> None:
            gold.append(answer["probabilities"][example.label])

        evaluate_task(self, engine, examples, on_answer=record)
        return calibration_probabilities(gold) if len(gold) >= MIN_SET_EXAMPLES else ()

    def new_metrics(self) -> EvalMetrics:
        count = len(self.labels)
        bootstraps = {"accuracy": bootstrap_stat(2, mean_of)}
        if count**2 <= MAX_BOOTSTRAP_SUMS:
            bootstraps["macro_f1"] = bootstrap_stat(count**2, confusion_of(count, macro_f1))
        metrics = {
            "matrix": ConfusionMatrix(labels=self.labels, positive=self.labels[1] if count == 2 else None),
            "loss": TokenLoss(),
            "calibration": Calibration(),
            "coverage": Coverage(),
        }
        return EvalMetrics(metrics=metrics, bootstraps=bootstraps)

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[LabelledExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        scored = [self.score_answer(example, answer) for example, answer in zip(examples, answers, strict=True)]
        predicted = [answer_score.prediction for answer_score in scored]
        gold = [answer_score.label for answer_score in scored]
        correct = [answer_score.correct for answer_score in scored]
        losses = [answer_score.loss for answer_score in scored]
        confidences = [min(answer["probability"], 1.0) for answer in answers]
        summands: dict[str, object] = {"accuracy": [(is_correct, 1) for is_correct in correct]}
        if "macro_f1" in metrics.bootstraps:
            index_of = {label: index for index, label in enumerate(self.labels)}
            predicted_ids = [index_of[label] for label in predicted]
            gold_ids = [index_of[label] for label in gold]
            summands["macro_f1"] = confusion_statistics(predicted_ids, gold_ids, len(self.labels))
        return EvalMetrics(
            metrics={
                "matrix": metrics.metrics["matrix"].update(predicted, gold),
                "loss": metrics.metrics["loss"].update(losses, [1] * len(losses)),
                "calibration": metrics.metrics["calibration"].update(confidences, correct),
                "coverage": metrics.metrics["coverage"].update(confidences, correct),
            },
            bootstraps={name: bootstrap.update(ids, summands[name]) for name, bootstrap in metrics.bootstraps.items()},
        )

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        matrix = metrics.metrics["matrix"]
        results: Result = matrix.compute()
        if matrix.positive is not None:
            results["notes"] = [f'precision, recall and f1 are those of "{matrix.positive}"', *results["notes"]]
        calibration = metrics.metrics["calibration"].compute()
        loss = metrics.metrics["loss"].compute()["loss"]
        coverage = metrics.metrics["coverage"].compute()["table"]
        return results | {
            "loss": loss,
            "ece": calibration["ece"],
            "calibration": calibration["table"],
            "coverage": coverage,
        }

    def score_answer(self, example: LabelledExample, answer: Answer) -> ScoredAnswer:
        """Compare an answer with the label. The loss is -log of the probability of the gold label."""
        loss = log_loss(answer["probabilities"][example.label])
        return ScoredAnswer(example.label, answer["label"], answer["label"] == example.label, loss)


@dataclass(frozen=True, kw_only=True)
class ClassifyMultiLabel(TextTask[MultiLabelExample]):
    """Classification with any number of labels. The loss is the mean over labels of binary cross-entropies."""

    example: ClassVar[type[Example]] = MultiLabelExample
    metric: str = "micro_f1"
    problem_type: ClassVar[ProblemType] = "multi_label_classification"
    weights: tuple[float, ...] = ()  # weight of the positive examples of each label in the loss; (): 1 for each label

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        settings, labels = setup.settings, setup.labels
        assert isinstance(settings, MultiLabelSettings)
        weights: tuple[float, ...] = ()
        if settings.class_weight == "balanced":  # negatives / positives of each label
            train_count = next(iter(setup.stats.counts.values()))  # train is the first split
            positives = setup.stats.labels
            weights = tuple(max(1, train_count - positives[label]) / max(1, positives[label]) for label in labels)
        task, bundle = cls.with_new_head(setup, labels=labels, weights=weights)
        if settings.thresholds not in (THRESHOLD, "tuned"):
            bundle.thresholds = dict.fromkeys(labels, float(settings.thresholds))
        return task, bundle

    def tune_thresholds(self, engine: AnswerInputs, examples: Iterable[MultiLabelExample]) -> dict[str, float]:
        """Return for each label the threshold with the best F1."""
        probabilities: list[list[float]] = []
        labels: list[list[float]] = []

        def record(index: int, example: MultiLabelExample, answer: Answer, scored: ScoredAnswer) -> None:
            probabilities.append(list(answer["probabilities"].values()))
            labels.append(self.target(example))

        evaluate_task(self, engine, examples, on_answer=record)
        predicted, actual = np.array(probabilities), np.array(labels)
        return {label: best_threshold(predicted[:, k], actual[:, k]) for k, label in enumerate(self.labels)}

    def target(self, example: MultiLabelExample) -> list[float]:
        """Return a value for each label: 1 if the example has the label, else 0."""
        return [float(label in example.labels) for label in self.labels]

    def losses(self, scores: Scores, targets: Tensor) -> Float[Tensor, " sequences"]:
        """Return the loss of each sequence."""
        positive = torch.tensor(self.weights).to(scores) if self.weights else None
        losses = F.binary_cross_entropy_with_logits(scores, targets.to(scores), pos_weight=positive, reduction="none")
        return losses.mean(1)

    def best_temperature(self, probabilities: NDArray[np.float64], targets: NDArray[np.float64]) -> float:
        """Return the best temperature, with each label of each example as a binary decision (absent or present)."""
        positive = probabilities.ravel()
        return best_temperature(np.stack([1 - positive, positive], axis=1), targets.ravel())

    def new_metrics(self) -> EvalMetrics:
        bootstraps = {"micro_f1": bootstrap_stat(3, f1_of), "subset_accuracy": bootstrap_stat(2, mean_of)}
        if 3 * len(self.labels) <= MAX_BOOTSTRAP_SUMS:
            bootstraps["macro_f1"] = bootstrap_stat(3 * len(self.labels), macro_f1_of)
        return EvalMetrics(
            metrics={"labels": MultiLabelScores(labels=self.labels), "loss": TokenLoss()}, bootstraps=bootstraps
        )

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[MultiLabelExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        scored = [self.score_answer(example, answer) for example, answer in zip(examples, answers, strict=True)]
        losses = [answer_score.loss for answer_score in scored]
        predicted = self._multi_hot([answer_score.prediction for answer_score in scored])
        gold = self._multi_hot([answer_score.label for answer_score in scored])
        counts = np.stack([gold & predicted, gold, predicted], 2)
        summands: dict[str, object] = {
            "micro_f1": counts.sum(1),
            "subset_accuracy": [(answer_score.correct, 1) for answer_score in scored],
            "macro_f1": counts.reshape(len(scored), -1),
        }
        return EvalMetrics(
            metrics={
                "labels": metrics.metrics["labels"].update(predicted, gold),
                "loss": metrics.metrics["loss"].update(losses, [1] * len(losses)),
            },
            bootstraps={name: bootstrap.update(ids, summands[name]) for name, bootstrap in metrics.bootstraps.items()},
        )

    def _multi_hot(self, label_lists: list[list[str]]) -> Int64[np.ndarray, "examples labels"]:
        """Return multi-hot vectors: 1 for each label that an example has, else 0."""
        return np.array([[label in labels for label in self.labels] for labels in label_lists], dtype=np.int64)

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        results: Result = metrics.metrics["labels"].compute()
        return results | {"loss": metrics.metrics["loss"].compute()["loss"]}

    def score_answer(self, example: MultiLabelExample, answer: Answer) -> ScoredAnswer:
        """Compare an answer with the labels. It is correct if all labels are; the loss is the mean cross-entropy."""
        gold = [label for label in self.labels if label in example.labels]
        probabilities = answer["probabilities"]
        losses = [
            log_loss(probabilities[label] if label in gold else 1 - probabilities[label]) for label in self.labels
        ]
        is_correct = set(gold) == set(answer["labels"])
        return ScoredAnswer(gold, answer["labels"], is_correct, sum(losses) / len(self.labels))


def best_threshold(probabilities: NDArray[np.float64], gold: NDArray[np.float64]) -> float:
    """Return the threshold of a label's probability with the best F1, or 0.5 if no example has the label.

    The threshold lies midway between two neighbouring probabilities.

    Args:
        probabilities: Probability of the label for each example.
        gold: 1 for examples with the label, else 0.

    >>> best_threshold(np.array([0.1, 0.4, 0.8]), np.array([0, 1, 1]))
    0.25
    """
    if not gold.any():
        return 0.5
    order = np.argsort(-probabilities, kind="stable")
    probabilities, gold = probabilities[order], gold[order]
    ends_tie = np.append(probabilities[1:] != probabilities[:-1], True)  # equal probabilities share a threshold
    f1 = np.where(ends_tie, 2 * np.cumsum(gold) / (gold.sum() + np.arange(1, len(gold) + 1)), -1)
    best = int(f1.argmax())
    below = probabilities[best + 1] if best + 1 < len(probabilities) else 0.0
    return float((probabilities[best] + below) / 2)
