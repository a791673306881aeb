"""Relevance scores of a cross-encoder: a model that reads a query and a text together.

`SearchIndex.search`, the mining of hard negatives and the server's `/rerank` call it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.model.config import Classes
from heedful.tasks.answering import Answer


def relevance(answer: Answer, *, raw: bool = False) -> float:
    """Return the relevance of a text to a query from the model's answer for the pair.

    Args:
        answer: The answer of a regression model with one output, or of a classifier with two labels, whose probability
            of the second label is the relevance.
        raw: Return the regression output unchanged. If False, return its sigmoid, between 0 and 1.

    Raises:
        HeedfulError: If the answer is of another kind, or if a classifier is asked for a raw score.
    """
    if "values" in answer and len(answer["values"]) == 1:
        (value,) = answer["values"].values()
        return float(value) if raw else 0.5 * (1 + math.tanh(value / 2))
    if "label" in answer and len(answer["probabilities"]) == 2 and not raw:
        return float(list(answer["probabilities"].values())[1])
    raise HeedfulError("this model gives the probability of two labels: raw_scores has to be false")


def rerank_scores(engine: BundleEngine, query: str, texts: Sequence[str], *, raw: bool = False) -> list[float]:
    """Return the relevance of each text to a query, between 0 and 1 unless raw.

    Raises:
        HeedfulError: If the model does not return one score per pair of texts.
    """
    if engine.kind != "sequence_classification":
        raise HeedfulError(
            f"{engine.loaded.source} has a {engine.kind} head; results are reranked by a model that scores pairs of "
            "texts, such as one of heedful finetune rank"
        )
    raw = raw or has_sigmoid(engine.loaded)
    return [relevance(answer, raw=raw) for answer in engine([(query, text) for text in texts])]


def has_sigmoid(loaded: ModelBundle | None) -> bool:
    """Return whether the head of a cross-encoder ends with a sigmoid, so that its raw scores are between 0 and 1."""
    head = None if loaded is None else loaded.config.head
    return isinstance(head, Classes) and head.score_activation == "sigmoid"
