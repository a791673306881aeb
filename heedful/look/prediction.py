"""Explanation of a prediction: the engine's answer, its attribution to tokens, and attention to the same tokens.

`page_api.py` and `interventions.py` call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from heedful.errors import HeedfulError, RequestError
from heedful.infer.engine import Engine
from heedful.look.attribution import (
    Attribution,
    ExplainedScore,
    explained_score,
    integrated_gradients,
    similarity_score,
)
from heedful.look.classic_attention import HIERARCHY_NAMES
from heedful.look.head_masking import Gates, gated_heads
from heedful.look.inspection import Inspection
from heedful.tasks.answer_heads import answer_heads_of
from heedful.tasks.answering import Answer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionShares:
    """Attention to each token, to be compared with the attribution to the token."""

    shares: Tensor | None = None  # [tokens], or None if the model has no such attention
    source: str = ""  # sentence that says which attention the shares are computed from


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TextExplanation:
    """One of two texts whose embeddings are compared."""

    item: str | tuple[str, str]
    tokens: list[str]
    attribution: Attribution
    attention: AttentionShares


@dataclass(kw_only=True, slots=True, eq=False)
class Explanation:
    """The explanation of a prediction. Parts that are not available are None."""

    answer: Answer | None = None  # the engine's answer
    answer_error: str = ""  # why there is no answer
    attribution: Attribution | None = None
    score: ExplainedScore | None = None  # the score that `attribution` explains
    texts: list[TextExplanation] | None = None  # both texts, if the prediction is their similarity
    attribution_error: str = ""  # why there is no attribution
    attention: AttentionShares


def explain_prediction(
    inspections: Sequence[Inspection], side: int, position: int | None, label: int | None
) -> Explanation:
    """Explain the prediction for one of the inspected texts.

    The prediction of an embedding model is the similarity of two texts: those of a pair, or of two inspections.

    Args:
        inspections: All inspections.
        side: Index of the inspection to explain, from 0.
        position: See `explained_score`.
        label: See `explained_score`.
    """
    inspection = inspections[side]
    explanation = Explanation(attention=AttentionShares())
    pair = compared_texts(inspections, side)
    try:
        explanation.answer = engine_answer(inspection, pair)
    except HeedfulError as error:
        explanation.answer_error = str(error)
    score: ExplainedScore | None = None
    try:
        if pair is not None:
            explanation.texts = [_explain_similarity(text, reference) for text, reference in (pair, pair[::-1])]
        else:
            score = explained_score(inspection, position, label)
            explanation.attribution = integrated_gradients(inspection, score.score, score.name)
            explanation.score = score
    except HeedfulError as error:
        explanation.attribution_error = str(error)
    if explanation.texts is None:
        explanation.attention = attention_shares(inspection, score)
    return explanation


def engine_answer(
    inspection: Inspection,
    pair: tuple[Inspection, Inspection] | None = None,
    *,
    gates: Gates | None = None,
) -> Answer | None:
    """Return the engine's answer to the text, without embeddings, or None if the head answers no such input.

    Args:
        inspection: The model and the text.
        pair: The two texts whose embeddings are compared, if the model compares texts.
        gates: Gates of the attention heads. If None, all gates are open.

    Raises:
        RequestError: If the head chooses among candidates, and only one of them is known.
    """
    head = inspection.loaded.config.head
    if head is None or not answer_heads_of(head.kind):
        return None
    item = inspection.item
    engine_input: object = item
    if pair is not None:
        engine_input = tuple(text.item for text in pair)
    elif head.kind == "question_answering":
        if isinstance(item, str):
            return None
        engine_input = {"question": item[0], "context": item[1]}
    elif head.kind == "multiple_choice":
        if not inspection.choices:
            raise RequestError("one candidate has no probability: give all candidates, each with --choice")
        engine_input = {"prompt": item[0], "choices": list(inspection.choices)}
    elif head.kind == "next_sentence" and isinstance(item, str):
        return None
    engine = Engine(inspection.loaded).without_early_stages()
    with nullcontext() if gates is None else gated_heads(inspection.loaded.model, gates):
        answer = engine([engine_input], top_k=8)[0]
    if head.kind == "multiple_choice":
        answer["choices"] = list(inspection.choices)
    return {name: value for name, value in answer.items() if name not in ("vector", "vectors")}


def compared_texts(inspections: Sequence[Inspection], side: int) -> tuple[Inspection, Inspection] | None:
    """Return the two texts whose embeddings are compared; the first one is that of inspection `side`.

    Returns:
        The texts of a pair, or of two inspections with the same model; None if the model has no embeddings to compare.
    """
    inspection = inspections[side]
    head = inspection.loaded.config.head
    if head is None or head.kind != "embedding":
        return None
    if isinstance(inspection.item, tuple):
        first, second = (Inspection(inspection.loaded, text, name=inspection.name) for text in inspection.item)
        return first, second
    others = [
        candidate for candidate in inspections if candidate is not inspection and candidate.loaded is inspection.loaded
    ]
    return (inspection, others[0]) if others and isinstance(others[0].item, str) else None


def _explain_similarity(inspection: Inspection, reference: Inspection) -> TextExplanation:
    """Explain the similarity of a text to a reference text, whose embedding is held constant."""
    score = similarity_score(inspection, reference)
    return TextExplanation(
        item=inspection.item,
        tokens=[token["text"] for token in inspection.sides["source"]],
        attribution=integrated_gradients(inspection, score.score, score.name),
        attention=attention_shares(inspection, None),
    )


def attention_shares(inspection: Inspection, score: ExplainedScore | None) -> AttentionShares:
    """Return the attention to each source token: cross-attention, rollout, or the pooling of a classic model.

    Args:
        inspection: The model and the text.
        score: The explained score: attention is that of the row from which the score is computed. If None, it is the
            mean over all rows.
    """
    first_part, last_part = inspection.views[0].part, inspection.views[-1].part
    row = None if score is None else score.row
    if "generated" in inspection.sides and row is not None and last_part == "cross":
        layers = range(inspection.view("cross").layers)
        weights = torch.stack([inspection.weights("cross", layer)[:, row].mean(0) for layer in layers])
        return AttentionShares(
            shares=weights.mean(0), source="Cross-attention for this token: the mean of all layers and heads."
        )
    if first_part in ("encoder", "decoder"):
        return _rollout_shares(inspection, first_part, row if first_part == last_part else None)
    if last_part == "reader":
        return _pooling_shares(inspection, score)
    return AttentionShares()


def _rollout_shares(inspection: Inspection, part: str, row: int | None) -> AttentionShares:
    """Return attention rollout from one row, or the mean over all rows if `row` is None."""
    rollout = inspection.rollout(part)
    rows = "all rows" if row is None else f"the row of {inspection.sides['source'][row]['text']}"
    return AttentionShares(
        shares=rollout.mean(0) if row is None else rollout[row],
        source=f"Attention through all layers (rollout), from {rows}.",
    )


def _pooling_shares(inspection: Inspection, score: ExplainedScore | None) -> AttentionShares:
    """Return the weights with which a classic model pools the tokens for the explained class, or the mean weights."""
    heads, names = inspection.weights("reader", 0)[:, 0], inspection.views[-1].names
    source = "Weights with which the model pools the tokens"
    if names == HIERARCHY_NAMES:
        return AttentionShares(shares=heads[-1], source=f"{source}.")
    if score is not None and score.label is not None and names == tuple(name for _, name in score.labels):
        return AttentionShares(shares=heads[score.label], source=f'{source} for "{names[score.label]}".')
    mean = ": the mean of its queries'" if len(names) > 1 else ""
    return AttentionShares(shares=heads.mean(0), source=f"{source}{mean}.")
