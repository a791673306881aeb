"""Attribution of a prediction to tokens: integrated gradients of one score over the token embeddings.

`prediction.py` asks `explained_score` for the score, and `integrated_gradients` for its attribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.errors import RequestError
from heedful.look.inspection import Inspection, frozen_in_eval_mode, token_records
from heedful.model.classic import ClassicModel
from heedful.model.config import Choice, Classes, SentenceEmbedding, TokenClasses
from heedful.model.heads import NextTokenAndChoiceScores, PretrainingScores, last_rows_of
from heedful.packed import Packed
from heedful.tasks.qa import best_span
from heedful.tasks.specs.qa import max_answer_tokens_of

STEPS = 32  # points on the path from the baseline to the text
ROWS_PER_BATCH = 4096  # maximum tokens in a batch of points; each point is a copy of the text
MAX_CANDIDATES = 8  # most probable tokens that a user may choose to explain
HeadOutputs: TypeAlias = Any  # a tensor, or the scores of a head with several parts
Score = Callable[[HeadOutputs, Packed], Float[Tensor, " copies"]]  # returns the score of each copy of the text
Choices = tuple[tuple[int, str], ...]  # rows or labels, each with its name


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attribution:
    """Contribution of each token to a score, relative to the same text with its tokens masked."""

    score: str  # name of the score
    values: Float[Tensor, " tokens"]
    at_text: float  # score of the text
    at_baseline: float  # score of the masked text

    @property
    def missing(self) -> float:
        """Approximation error: the difference of the two scores minus the sum of the values.

        The error tends to 0 with more points.
        """
        return self.at_text - self.at_baseline - float(self.values.sum())


class ExplainedScore(NamedTuple):
    """A score that can be explained, and the other scores of the same prediction."""

    score: Score
    name: str
    row: int | None = None  # row of the model's output that the score is computed from (default: all rows)
    label: int | None = None  # index of the class, or id of the token
    positions: Choices = ()  # rows that can be explained
    labels: Choices = ()  # labels that can be explained


# -- integrated gradients --------------------------------------------------------------------------------------------


def integrated_gradients(
    inspection: Inspection, score: Score, name: str, *, steps: int = STEPS, rows_per_batch: int = ROWS_PER_BATCH
) -> Attribution:
    """Return (x - b) times the mean gradient on the path from b to x (Sundararajan et al. 2017, section 3).

    x are the embeddings of the text, and b those of the baseline. In the baseline, the mask token replaces each token
    that is not special; a tokenizer without a mask token uses its unknown or padding token. Values are summed over the
    dimensions of embeddings. Gradients are computed in the middle of each step. A test compares the result with
    captum's.

    Args:
        inspection: The model and the text.
        score: The score to explain.
        name: Name of the score.
        steps: How many points the path has.
        rows_per_batch: Maximum number of tokens in a batch of points.

    Raises:
        RequestError: If the tokenizer has no token for the baseline.
    """
    embedding = inspection.loaded.model.embedding
    with frozen_in_eval_mode(inspection.loaded):
        with torch.no_grad():
            x, b = embedding(inspection.source), embedding(_baseline(inspection))
        total = torch.zeros_like(x)
        batch_size = max(1, rows_per_batch // len(x))
        shares = [(step + 0.5) / steps for step in range(steps)]
        for first in range(0, steps, batch_size):
            total += _sum_of_gradients(inspection, score, x, b, shares[first : first + batch_size])
        with torch.no_grad():
            at_text, at_baseline = (float(_scores(inspection, score, rows, 1)[0]) for rows in (x, b))
    values = ((x - b) * total / steps).sum(-1)
    return Attribution(score=name, values=values, at_text=at_text, at_baseline=at_baseline)


def _sum_of_gradients(inspection: Inspection, score: Score, x: Tensor, b: Tensor, shares: list[float]) -> Tensor:
    """Return the sum over `shares` of the gradients of the score at b + share (x - b)."""
    points = torch.cat([b + share * (x - b) for share in shares]).requires_grad_()
    with torch.enable_grad():
        total = _scores(inspection, score, points, len(shares)).sum()
    (gradient,) = torch.autograd.grad(total, points)
    summed: Tensor = gradient.unflatten(0, (len(shares), len(x))).sum(0)
    return summed


def _scores(inspection: Inspection, score: Score, rows: Tensor, copies: int) -> Float[Tensor, " copies"]:
    """Return the score of each of several copies of the text, whose embeddings are replaced by `rows`."""
    batch = _repeat(inspection.source, copies)
    target = None if inspection.target is None else _repeat(inspection.target, copies)
    with _replaced_embeddings(inspection.loaded, rows):
        return score(inspection.loaded(batch, target), batch if target is None else target)


@contextmanager
def _replaced_embeddings(loaded: ModelBundle, rows: Tensor) -> Iterator[None]:
    """Context in which the first output of the embedding layer is replaced by `rows`.

    The first one is the encoder's. A decoder may use the same layer afterwards, for the target.
    """
    replacements = [rows]

    def replace(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return replacements.pop() if replacements else output

    handle = loaded.model.embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def _repeat(batch: Packed, count: int) -> Packed:
    return Packed.of([batch.tokens.tolist()] * count, [batch.types.tolist()] * count)


def _baseline(inspection: Inspection) -> Packed:
    """Return the text with each token that is not special replaced by the mask token."""
    special = inspection.tokenizer.special
    mask = next((id for id in (special.mask, special.unknown, special.pad) if id is not None), None)
    if mask is None:
        raise RequestError("this tokenizer has no mask, unknown or padding token, so there is no baseline")
    encoded = inspection.encoded
    ids = [id if is_special else mask for id, is_special in zip(encoded.ids, encoded.special, strict=True)]
    return Packed.of([ids], [encoded.types])


# -- scores ----------------------------------------------------------------------------------------------------------


def explained_score(inspection: Inspection, position: int | None = None, label: int | None = None) -> ExplainedScore:
    """Return a score of the model's prediction, to be explained.

    Args:
        inspection: The model and the text.
        position: Row of the token that is tagged, filled in or generated. If None, it is the row with the most probable
            tag, the first mask, the first token of the target, or, without an encoder, the token after the text.
        label: Index of the class, or id of the token. If None, the predicted one.

    Raises:
        RequestError: If the head has no such score.
    """
    head = inspection.loaded.config.head
    with torch.no_grad():
        outputs = inspection.loaded(inspection.source, inspection.target)
    if isinstance(outputs, PretrainingScores | NextTokenAndChoiceScores):
        outputs = outputs.tokens
    match head:
        case Classes(labels=labels):
            chosen = int(outputs[0].argmax()) if label is None else _check_index(label, len(labels))
            name = f'the score of "{labels[chosen]}"'
            is_binary = getattr(inspection.loaded.head, "one_score", False)
            score = _binary_class_score(chosen) if is_binary else _class_score(chosen)
            row = _pooled_row(inspection)
            return ExplainedScore(score, name, row=row, label=chosen, labels=tuple(enumerate(labels)))
        case TokenClasses(labels=labels):
            row = _surest_tag(inspection, outputs) if position is None else _check_index(position, len(outputs))
            chosen = int(outputs[row].argmax()) if label is None else _check_index(label, len(labels))
            return ExplainedScore(
                _score_at(row, chosen),
                name=f'the score of "{labels[chosen]}" for "{_token_name(inspection, row)}"',
                row=row,
                label=chosen,
                positions=_text_tokens(inspection),
                labels=tuple(enumerate(labels)),
            )
        case Choice():
            name = "the score of this candidate, which competes with those of the others"
            return ExplainedScore(lambda outputs, _: outputs, name, row=_pooled_row(inspection))
    kind = "none" if head is None else head.kind
    if kind == "question_answering":
        return span_score(inspection, outputs)
    if kind in ("masked_lm", "pretraining", "language_model", "double_heads"):
        return _token_score(inspection, kind, outputs, position, label)
    if kind == "next_sentence":
        return ExplainedScore(lambda outputs, _: outputs[:, 0], "the score of: the second text follows", row=0)
    if isinstance(head, SentenceEmbedding):
        raise RequestError("an embedding has no score: give a second text to explain their similarity")
    reason = "without a head" if head is None else f"with a {kind} head"
    raise RequestError(f"a model {reason} has no single score to explain")


def similarity_score(inspection: Inspection, reference: Inspection) -> ExplainedScore:
    """Return the cosine similarity of the text's embedding to that of another text, which is held constant."""
    with torch.no_grad():
        vector = reference.loaded(reference.source)
    name = "the similarity (cosine) to the other text, whose embedding is constant"
    return ExplainedScore(lambda outputs, _: F.cosine_similarity(outputs, vector, dim=-1), name)


def span_score(inspection: Inspection, outputs: Float[Tensor, "rows 2"]) -> ExplainedScore:
    """Return the score of the predicted answer span: the sum of its start score and its end score."""
    encoded = inspection.encoded
    context = max(segment or 0 for segment in encoded.segments)
    rows = [row for row, segment in enumerate(encoded.segments) if segment == context]
    start, end, _ = best_span(outputs, rows, rows[-1], max_answer_tokens_of(inspection.loaded.thresholds))
    start_score, end_score = _score_at(start, 0), _score_at(end, 1)
    ends = f'"{_token_name(inspection, start)}" as the start and "{_token_name(inspection, end)}" as the end'
    return ExplainedScore(
        lambda outputs, batch: start_score(outputs, batch) + end_score(outputs, batch),
        f"the scores of {ends} of the best answer in the text",
        row=start,
    )


def _token_score(
    inspection: Inspection, kind: str, outputs: Tensor, position: int | None, label: int | None
) -> ExplainedScore:
    """Return the score of a token that is filled in or generated."""
    generates = kind in ("language_model", "double_heads")
    positions = _generated_positions(inspection) if generates else _mask_positions(inspection)
    if not positions:
        raise RequestError("the text has no mask token: write one where a token is to be predicted")
    has_decoder = "generated" in inspection.sides  # beside an encoder
    default_row = len(outputs) - 1 if generates and not has_decoder else positions[0][0]
    row = default_row if position is None else _check_index(position, len(outputs))
    chosen = int(outputs[row].argmax()) if label is None else _check_index(label, outputs.shape[1])
    top_ids = outputs[row].topk(min(MAX_CANDIDATES, outputs.shape[1])).indices.tolist()
    ids = top_ids if chosen in top_ids else [chosen, *top_ids]
    names = [token["text"] for token in token_records(ids, inspection.tokenizer)]
    labels = tuple(zip(ids, names, strict=True))
    name = f'the score of the token "{dict(labels)[chosen]}" at position {row}'
    return ExplainedScore(_score_at(row, chosen), name, row=row, label=chosen, positions=positions, labels=labels)


def _pooled_row(inspection: Inspection) -> int | None:
    """Return the row that the head reads as the representation of the text, or None if it reads several rows."""
    head = inspection.loaded.config.head
    if not isinstance(head, Classes | Choice) or isinstance(inspection.loaded.model, ClassicModel):
        return None
    if head.pooled_token is not None:
        return int(last_rows_of(inspection.source, head.pooled_token))
    return {"first": 0, "last": -1}.get(head.pooling)


def _class_score(label: int) -> Score:
    """Return the logit of a class."""
    return lambda outputs, _: outputs[:, label]


def _binary_class_score(label: int) -> Score:
    """Return the logit of a class minus the logit of the other class, which a model with one output fixes at 0."""
    return lambda outputs, _: outputs[:, label] - outputs[:, 1 - label]


def _score_at(row: int, column: int) -> Score:
    """Return the score of one class or token in one row of each copy of the text."""

    def score(outputs: HeadOutputs, batch: Packed) -> Tensor:
        rows: Tensor = outputs.tokens if isinstance(outputs, PretrainingScores | NextTokenAndChoiceScores) else outputs
        scores: Tensor = rows.unflatten(0, (len(batch), -1))[:, row, column]
        return scores

    return score


def _text_tokens(inspection: Inspection) -> Choices:
    """Return rows and names of the tokens that are not special."""
    special = inspection.encoded.special
    return tuple((row, _token_name(inspection, row)) for row, is_special in enumerate(special) if not is_special)


def _mask_positions(inspection: Inspection) -> Choices:
    """Return rows and names of the mask tokens."""
    mask = inspection.tokenizer.special.mask
    return tuple((row, _token_name(inspection, row)) for row, id in enumerate(inspection.encoded.ids) if id == mask)


def _generated_positions(inspection: Inspection) -> Choices:
    """Return the rows at which tokens are generated and their names: "after TOKEN" in a model without an encoder."""
    if "generated" in inspection.sides:
        return tuple((row, token["text"]) for row, token in enumerate(inspection.sides["generated"]))
    return tuple((row, f"after {token['text']}") for row, token in enumerate(inspection.sides["source"]))


def _surest_tag(inspection: Inspection, outputs: Float[Tensor, "rows tags"]) -> int:
    """Return the row whose predicted tag is the most probable.

    Rows that are predicted as the first tag ("O") are only considered if there are no others.
    """
    special = torch.tensor(inspection.encoded.special)
    probabilities = outputs.softmax(-1).max(-1).values.masked_fill(special, -1.0)
    tagged = probabilities.masked_fill(outputs.argmax(-1) == 0, -1.0)
    return int((tagged if bool((tagged >= 0).any()) else probabilities).argmax())


def _token_name(inspection: Inspection, row: int) -> str:
    return inspection.sides["source"][row]["text"]


def _check_index(index: int, count: int) -> int:
    """Return the index if it is from 0 to count - 1; otherwise raise a RequestError."""
    if not 0 <= index < count:
        raise RequestError(f"number {index} is out of range: give one from 0 to {count - 1}")
    return index
