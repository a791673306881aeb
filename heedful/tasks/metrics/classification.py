"""Metrics of classification: accuracy, the confusion matrix and its scores, and scores for sets of labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from heedful.errors import HeedfulError, did_you_mean
from heedful.tasks.metrics.base import (
    Ids,
    Result,
    Values,
    as_array,
    as_finite,
    example_name,
    f1_scores,
    not_finite_error,
    require_equal,
    require_examples,
    require_same_length,
    safe_divide,
)

Cell = TypeVar("Cell")
Counts = Shaped[np.ndarray, "*more classes classes"]  # confusion matrices, gold by predicted; more: replicates
PerClass = Float64[np.ndarray, "*more classes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Accuracy: the share of examples whose prediction is the gold label.

    >>> Accuracy().update(["a", "b"], ["a", "c"]).compute()
    {'accuracy': 0.5, 'correct': 1, 'count': 2}
    """

    correct: int = 0  # correct examples
    count: int = 0  # examples

    def update(self, predicted: Values, gold: Values, ids: Ids = None) -> Accuracy:
        """Add examples by their predicted and gold labels: names of classes in both, or ids of classes in both."""
        sides = []
        for values, what in ((predicted, "prediction"), (gold, "gold label")):
            array = as_array(values)
            if array.ndim != 1:
                raise HeedfulError(f"each {what} should be one label, got an array of shape {array.shape}")
            sides.append(as_finite(array, what, ids) if array.dtype.kind == "f" else array)
        require_same_length(len(sides[0]), len(sides[1]), "predictions", "gold labels")
        if len(sides[0]) and (sides[0].dtype.kind in "biuf") != (sides[1].dtype.kind in "biuf"):
            prediction, gold_label = (side.tolist()[0] for side in sides)
            raise HeedfulError(
                f"a prediction is {prediction!r} and a gold label {gold_label!r}: they can never be equal; "
                "give the names of the classes, or their numbers, on both sides"
            )
        correct = int(np.count_nonzero(sides[0] == sides[1]))
        return replace(self, correct=self.correct + correct, count=self.count + len(sides[0]))

    def update_choices(self, scores: Values, gold: Values, ids: Ids = None) -> Accuracy:
        """Add multiple-choice questions: the scores of the choices of each, and the index of its correct choice.

        >>> Accuracy().update_choices([[0.1, 2.0], [3.0, 1.0, 2.0]], [1, 2]).compute()["accuracy"]
        0.5
        """
        require_same_length(len(scores), len(gold), "questions with scores", "gold choices")
        chosen = []
        for index in range(len(scores)):
            choice_scores = as_array(scores[index])
            gold_choice = int(gold[index])
            name = example_name(ids, index)
            if not 0 <= gold_choice < len(choice_scores):
                raise HeedfulError(
                    f"the gold choice of {name} is {gold_choice}, but it has {len(choice_scores)} choices, counted "
                    "from 0"
                )
            if not np.isfinite(choice_scores).all():
                raise not_finite_error(choice_scores[~np.isfinite(choice_scores)][0], "score", name)
            chosen.append(int(choice_scores.argmax()))  # the first one among equals
        return self.update(chosen, gold, ids)

    def merge_state(self, incoming: Accuracy) -> Accuracy:
        """Return the metric over the examples of both metrics."""
        return replace(self, correct=self.correct + incoming.correct, count=self.count + incoming.count)

    def compute(self) -> Result:
        """Return {"accuracy", "correct", "count"}."""
        require_examples(self.count, "the accuracy")
        return {"accuracy": self.correct / self.count, "correct": self.correct, "count": self.count}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfusionMatrix:
    """Confusion matrix: how often each gold class was predicted as each class. Memory is constant in the examples.

    >>> scores = ConfusionMatrix(labels=("no", "yes"), positive="yes").update(["yes", "yes"], ["yes", "no"]).compute()
    >>> scores["accuracy"], scores["recall"], scores["confusion"]
    (0.5, 1.0, [[0, 1], [0, 1]])
    """

    labels: tuple[str, ...]  # name of each class, in the order of the class ids
    positive: str | None = None  # class for which "f1", "precision" and "recall" are computed; None: no class
    # examples by (gold class, predicted class); never modified
    cells: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.labels) < 2 or len(set(self.labels)) < len(self.labels):
            raise HeedfulError(f"labels should be two or more different names, got {list(self.labels)}")
        if self.positive is not None and self.positive not in self.labels:
            raise HeedfulError(
                f'positive should be one of {list(self.labels)}, got "{self.positive}"'
                + did_you_mean(self.positive, self.labels)
            )

    def update(self, predicted: Values, gold: Values, ids: Ids = None) -> ConfusionMatrix:
        """Add examples by their predicted and gold classes, as names or as class ids."""
        predicted_ids = self._class_ids(predicted, "prediction", ids)
        gold_ids = self._class_ids(gold, "gold label", ids)
        require_same_length(len(predicted_ids), len(gold_ids), "predictions", "gold labels")
        pairs, counts = np.unique(gold_ids * len(self.labels) + predicted_ids, return_counts=True)
        new_cells = {divmod(int(pair), len(self.labels)): int(count) for pair, count in zip(pairs, counts, strict=True)}
        return replace(self, cells=_add_counts(self.cells, new_cells))

    def merge_state(self, incoming: ConfusionMatrix) -> ConfusionMatrix:
        """Return the metric over the examples of both metrics."""
        require_equal((self.labels, self.positive), (incoming.labels, incoming.positive), "labels")
        return replace(self, cells=_add_counts(self.cells, incoming.cells))

    def counts(self) -> Int64[np.ndarray, "classes classes"]:
        """Return the matrix, with a row for each gold class and a column for each predicted class."""
        matrix = np.zeros((len(self.labels), len(self.labels)), dtype=np.int64)
        for cell, count in self.cells.items():
            matrix[cell] = count
        return matrix

    def compute(self) -> Result:
        """Return accuracy, Matthews, micro, macro and weighted scores, the scores of each class, the matrix, and notes.

        Macro averages are over the classes that occur as gold label or prediction. Micro F1 is the accuracy.
        """
        matrix = self.counts()
        count = int(matrix.sum())
        require_examples(count, "the confusion matrix")
        precision, recall, f1 = class_scores(matrix)
        support = matrix.sum(1)
        present = (support + matrix.sum(0)) > 0
        scores: Result = {"accuracy": float(np.trace(matrix) / count), "matthews": float(matthews(matrix))}
        if self.positive is not None:
            k = self.labels.index(self.positive)
            scores |= {"precision": float(precision[k]), "recall": float(recall[k]), "f1": float(f1[k])}
        scores |= {"micro_f1": scores["accuracy"]}
        for name, values in (("precision", precision), ("recall", recall), ("f1", f1)):
            scores[f"macro_{name}"] = float(values[present].mean())
            scores[f"weighted_{name}"] = float((values * support).sum() / count)
        scores["classes"] = {
            label: {
                "precision": float(precision[k]),
                "recall": float(recall[k]),
                "f1": float(f1[k]),
                "count": int(support[k]),
            }
            for k, label in enumerate(self.labels)
        }
        return scores | {"confusion": matrix.tolist(), "count": count, "notes": self._notes(matrix)}

    def _notes(self, matrix: Int64[np.ndarray, "classes classes"]) -> list[str]:
        """Return notes on scores that are 0 by convention, and on classes that never occur."""
        notes = []
        for axis, what in ((1, "gold label"), (0, "prediction")):
            used = matrix.sum(axis).nonzero()[0]
            if len(used) == 1:
                notes.append(f'every {what} is "{self.labels[int(used[0])]}": Matthews is 0 by convention')
        never = [self.labels[k] for k in np.flatnonzero(matrix.sum(0) + matrix.sum(1) == 0)]
        if never:
            notes.append(f"not in the macro averages, because they never occur: {', '.join(never)}")
        return notes

    def _class_ids(self, values: Values, what: str, ids: Ids) -> Int64[np.ndarray, " examples"]:
        """Convert names or ids of classes to class ids.

        Raises:
            HeedfulError: If a value is not a class. The message names its example.
        """
        array = as_array(values)
        if array.ndim != 1:
            hint = ": take the largest score, scores.argmax(-1)" if array.ndim == 2 else ""
            raise HeedfulError(f"each {what} should be one class, got an array of shape {array.shape}{hint}")
        if array.size == 0:
            return array.astype(np.int64)
        id_of = {label: class_id for class_id, label in enumerate(self.labels)}
        if array.dtype.kind not in "biuf":
            for index, name in enumerate(array.tolist()):
                if name not in id_of:
                    hint = did_you_mean(name, self.labels) if isinstance(name, str) else ""
                    raise HeedfulError(
                        f"the {what} of {example_name(ids, index)} is {name!r}, which is none of the classes "
                        f"{', '.join(self.labels)}{hint}"
                    )
            return np.array([id_of[name] for name in array.tolist()], dtype=np.int64)
        class_ids = as_finite(array, what, ids)
        bad = (class_ids < 0) | (class_ids >= len(self.labels)) | (class_ids % 1 != 0)
        if bad.any():
            index = int(bad.argmax())
            raise HeedfulError(
                f"the {what} of {example_name(ids, index)} is {array[index]}, but the classes are the numbers 0 to "
                f"{len(self.labels) - 1} ({', '.join(self.labels)}); leave out what should not count"
            )
        return class_ids.astype(np.int64)


def _add_counts(left: Mapping[Cell, int], right: Mapping[Cell, int]) -> dict[Cell, int]:
    """Return the sums of two mappings of counts."""
    return dict(Counter(left) + Counter(right))


def class_scores(matrix: Counts) -> tuple[PerClass, PerClass, PerClass]:
    """Return precision, recall and F1 of each class, from one confusion matrix or a stack of them."""
    matrix = np.asarray(matrix, dtype=np.float64)
    correct = np.diagonal(matrix, axis1=-2, axis2=-1)
    gold, predicted = matrix.sum(-1), matrix.sum(-2)
    return safe_divide(correct, predicted), safe_divide(correct, gold), safe_divide(2 * correct, gold + predicted)


def macro_f1(matrix: Counts) -> Float64[np.ndarray, "*more"]:
    """Return the mean F1 of the classes that occur, from one confusion matrix or a stack of them."""
    matrix = np.asarray(matrix, dtype=np.float64)
    present = (matrix.sum(-1) + matrix.sum(-2)) > 0
    return safe_divide((class_scores(matrix)[2] * present).sum(-1), present.sum(-1).astype(np.float64))


def matthews(matrix: Counts) -> Float64[np.ndarray, "*more"]:
    """Return (c s - Σ p t) / sqrt((s² - Σ p²) (s² - Σ t²)), or 0 for a constant side (Matthews 1975, Gorodkin 2004).

    Here s counts the examples and c the correct ones. For each class, p counts its predictions and t its gold labels.
    """
    matrix = np.asarray(matrix, dtype=np.float64)
    t, p, s = matrix.sum(-1), matrix.sum(-2), matrix.sum((-2, -1))
    c = np.trace(matrix, axis1=-2, axis2=-1)
    # one root, not two, makes the result exactly 1 if all predictions are correct
    denominator = np.sqrt((s**2 - (p**2).sum(-1)) * (s**2 - (t**2).sum(-1)))
    return safe_divide(c * s - (p * t).sum(-1), denominator)


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiLabelScores:
    """Scores of examples with any number of labels: precision, recall, F1 and subset accuracy."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, int, int], ...] = ()  # (correct, gold, predicted) of each label; (): no examples yet
    subsets: int = 0  # examples whose labels are all correct
    count: int = 0  # examples

    def update(self, predicted: Values, gold: Values, ids: Ids = None) -> MultiLabelScores:
        """Add examples by multi-hot vectors of predicted and gold labels, [examples, labels]."""
        predicted_rows, gold_rows = self._rows(predicted, "prediction", ids), self._rows(gold, "gold label", ids)
        require_same_length(len(predicted_rows), len(gold_rows), "predictions", "gold labels")
        correct = (predicted_rows & gold_rows).sum(0).tolist()
        sums = (correct, gold_rows.sum(0).tolist(), predicted_rows.sum(0).tolist())
        subsets = int((predicted_rows == gold_rows).all(1).sum())
        new = replace(self, counts=tuple(zip(*sums, strict=True)), subsets=subsets, count=len(gold_rows))
        return self.merge_state(new)

    def merge_state(self, incoming: MultiLabelScores) -> MultiLabelScores:
        """Return the metric over the examples of both metrics."""
        require_equal(self.labels, incoming.labels, "labels")
        if not self.counts or not incoming.counts:
            counts = self.counts or incoming.counts
        else:
            counts = tuple(
                (a + d, b + e, c + f) for (a, b, c), (d, e, f) in zip(self.counts, incoming.counts, strict=True)
            )
        return replace(self, counts=counts, subsets=self.subsets + incoming.subsets, count=self.count + incoming.count)

    def compute(self) -> Result:
        """Return micro and macro scores over all labels, the subset accuracy, and the scores of each label."""
        require_examples(self.count, "the scores")
        label_scores = {label: f1_scores(*counts) for label, counts in zip(self.labels, self.counts, strict=True)}
        total = f1_scores(*(sum(column) for column in zip(*self.counts, strict=True)))
        result: Result = {"subset_accuracy": self.subsets / self.count}
        result |= {f"micro_{name}": value for name, value in total.items()}
        for name in total:
            result[f"macro_{name}"] = sum(scores[name] for scores in label_scores.values()) / len(label_scores)
        never = [
            label for label, (_, gold, predicted) in zip(self.labels, self.counts, strict=True) if not gold + predicted
        ]
        notes = [f"these labels never occur and count 0 in the macro averages: {', '.join(never)}"] if never else []
        labels = {
            label: scores | {"count": gold}
            for (label, scores), (_, gold, _) in zip(label_scores.items(), self.counts, strict=True)
        }
        return result | {"labels": labels, "count": self.count, "notes": notes}

    def _rows(self, values: Values, what: str, ids: Ids) -> Int64[np.ndarray, "examples labels"]:
        """Convert values to multi-hot vectors; raise HeedfulError for values other than 0 and 1."""
        array = as_finite(values, what, ids, "0 or 1 for each label")
        if not array.size:
            return np.zeros((0, len(self.labels)), dtype=np.int64)
        if array.ndim != 2 or array.shape[1] != len(self.labels):
            raise HeedfulError(
                f"each {what} should be a row of 0 or 1 for the {len(self.labels)} labels, got an array of shape "
                f"{array.shape}"
            )
        bad = (array != 0) & (array != 1)
        if bad.any():
            index = int(bad.any(1).argmax())
            raise HeedfulError(
                f"the {what} of {example_name(ids, index)} has {array[index][bad[index]][0]}; expected 0 or 1: "
                "compare the probabilities with a threshold first"
            )
        return array.astype(np.int64)
