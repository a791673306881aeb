"""Answers of classifiers from probabilities of labels. This module does not import torch.

Both the neural classifiers in `classify` and the static classifier of the engine use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

THRESHOLD = 0.5  # default minimum probability of a predicted label of a multi-label model

Answer = dict[str, Any]  # plain data: texts, numbers, and lists and dicts of them


def single_label_answer(
    probabilities: Mapping[str, float], *, min_confidence: float = 0.0, least_probability: float | None = None
) -> Answer:
    """Return the answer with the most probable label, or with "" if its probability is below `min_confidence`.

    Args:
        probabilities: Probability of each label. The sum of the probabilities is 1.
        min_confidence: Minimum probability of the label.
        least_probability: Minimum probability of the labels in the prediction set, which always has the most probable
            label. If None, the answer has no prediction set.
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
    """Return the answer with all labels whose probability is at least their threshold, by default THRESHOLD."""
    labels = [name for name, value in probabilities.items() if value >= thresholds.get(name, THRESHOLD)]
    return {"labels": labels, "probabilities": dict(probabilities)}


def unique_label_names(labels: tuple[str, ...] | list[str]) -> list[str]:
    """Return the labels, each with its index appended if any two of them are equal.

    >>> unique_label_names(["good", "bad"]), unique_label_names(["x", "x"])
    (['good', 'bad'], ['x/0', 'x/1'])
    """
    if len(set(labels)) == len(labels):
        return list(labels)
    return [f"{label}/{index}" for index, label in enumerate(labels)]
