"""Answers of classifiers from probabilities; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

THRESHOLD = 0.5  # probability from which a label of a multi-label model is predicted, unless one was tuned

Answer = dict[str, Any]  # plain data: text, numbers, lists and dicts of them


def single_label_answer(
    probabilities: Mapping[str, float], *, min_confidence: float = 0.0, least_probability: float | None = None
) -> Answer:
    """Answer with the most probable label; it is "" where its probability is below `min_confidence`.

    Args:
        probabilities: Of each label; they add up to 1.
        min_confidence: Least probability of a label that is given.
        least_probability: Of the labels in the prediction set, which always has the most probable one; None: the answer
            has no set.
    """
    best = max(probabilities, key=probabilities.__getitem__)
    label = best if probabilities[best] >= min_confidence else ""
    answer = {"label": label, "probability": probabilities[best], "probabilities": dict(probabilities)}
    if least_probability is not None:
        answer["prediction_set"] = [
            name for name, probability in probabilities.items() if probability >= least_probability or name == best
        ]
    return answer


def multi_label_answer(probabilities: Mapping[str, float], thresholds: Mapping[str, float]) -> Answer:
    """Answer with the labels whose probabilities reach their thresholds, THRESHOLD unless there is another one."""
    chosen = [name for name, value in probabilities.items() if value >= thresholds.get(name, THRESHOLD)]
    return {"labels": chosen, "probabilities": dict(probabilities)}


def unique_label_names(labels: tuple[str, ...] | list[str]) -> list[str]:
    """Return the labels, with their numbers appended if two are equal.

    >>> unique_label_names(["good", "bad"]), unique_label_names(["x", "x"])
    (['good', 'bad'], ['x/0', 'x/1'])
    """
    if len(set(labels)) == len(labels):
        return list(labels)
    return [f"{label}/{number}" for number, label in enumerate(labels)]
