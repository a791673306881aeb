"""Label a text or a pair of texts: one label, any number of labels, or numbers."""

from __future__ import annotations

from typing import Any

import torch

from heedful.model.config import Classes
from heedful.tasks.base import Answer, Answerer, Setting, Window, label_names, read_pair, read_text
from heedful.tokenizer import Item

THRESHOLD = 0.5  # from this probability on a label is given, where any number of labels may be


def items(given: Any) -> list[Item] | None:
    """A text or a pair."""
    return read_text(given) or read_pair(given)


def answer(given: Any, windows: list[Window], setting: Setting) -> Answer:
    """One label with its probability, the labels over the threshold, or numbers; the mean over the windows.

    Probabilities are averaged, not scores: softmax(s) where one label is given, sigmoid(s) where several may be.
    """
    head = setting.head
    assert isinstance(head, Classes)
    scores = torch.stack([window.scores for window in windows])
    names, count = label_names(head.labels), {"windows": len(windows)}
    if head.problem == "regression":
        return {"numbers": _named(names, scores.mean(0))} | count
    if head.problem == "multiple":
        each = _named(names, scores.sigmoid().mean(0))
        return {"labels": [name for name in names if each[name] >= THRESHOLD], "probabilities": each} | count
    each = _named(names, scores.softmax(-1).mean(0))
    label = max(each, key=each.__getitem__)
    return {"label": label, "probability": each[label], "probabilities": each} | count


def _named(names: list[str], values: torch.Tensor) -> dict[str, float]:
    return dict(zip(names, values.tolist(), strict=True))


CLASSIFY = Answerer(
    expects='texts or pairs of texts, like ["a text", ("first text", "second text")]', items=items, answer=answer
)
