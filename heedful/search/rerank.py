"""Relevance of texts to a query, by a model that reads both (a cross-encoder)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.model.config import Classes
from heedful.tasks.answering import Answer


def relevance(answer: Answer, *, raw: bool = False) -> float:
    """Return the relevance of a pair of texts from the answer of a model.

    Args:
        answer: An answer with one number, or with the probabilities of two labels: that of the second is the relevance.
        raw: Return the number as it is; otherwise its sigmoid, between 0 and 1.

    Raises:
        HeedfulError: If the answer has other numbers, or two probabilities and `raw` is set.
    """
    if "values" in answer and len(answer["values"]) == 1:
        (number,) = answer["values"].values()
        return float(number) if raw else 0.5 * (1 + math.tanh(number / 2))
    if "label" in answer and len(answer["probabilities"]) == 2 and not raw:
        return float(list(answer["probabilities"].values())[1])
    raise HeedfulError("this model gives the probability of two labels: raw_scores has to be false")


def rerank_scores(engine: BundleEngine, query: str, texts: Sequence[str], *, raw: bool = False) -> list[float]:
    """Return the relevance of each text to a query, between 0 and 1 unless raw.

    Raises:
        HeedfulError: If the model does not give a pair of texts one score.
    """
    if engine.kind != "sequence_classification":
        raise HeedfulError(
            f"{engine.loaded.source} has a {engine.kind} head; results are reranked by a model that scores pairs of "
            "texts, such as one of heedful finetune rank"
        )
    raw = raw or has_sigmoid(engine.loaded)
    return [relevance(answer, raw=raw) for answer in engine([(query, text) for text in texts])]


def has_sigmoid(loaded: ModelBundle | None) -> bool:
    """Return whether a cross-encoder applies a sigmoid itself, so that its scores are between 0 and 1."""
    head = None if loaded is None else loaded.config.head
    return isinstance(head, Classes) and head.score_activation == "sigmoid"
