"""What a prediction rests on: integrated gradients of one score over the embedded tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import Loaded
from heedful.errors import HeedfulError
from heedful.look.inspection import Inspection, token_records
from heedful.model.classic import Classic
from heedful.model.config import Choice, Classes, SentenceEmbedding, TokenClasses
from heedful.model.heads import NextTokenAndChoiceScores, PretrainingScores
from heedful.packed import Packed
from heedful.tasks.qa import best_span, max_answer_tokens_of

STEPS = 32
ROWS = 4096  # of a batch of steps
LISTED = 8  # tokens of a vocabulary that can be asked for
Score = Callable[[Any, Packed], Float[Tensor, " copies"]]  # the head's outputs for copies of one text -> a number each


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attribution:
    """Of one score: what each token adds to it, beside the score of the same text with its tokens masked."""

    score: str  # which one, in words
    values: Float[Tensor, " tokens"]
    at_text: float
    at_baseline: float

    @property
    def missing(self) -> float:
        """By how much the values' sum misses the difference of both scores; with infinitely many steps, 0."""
        return self.at_text - self.at_baseline - float(self.values.sum())


@contextmanager
def _embedded(loaded: Loaded, rows: Tensor) -> Iterator[None]:
    """While it lasts, the first text that is embedded becomes these rows."""
    given = [rows]

    def replace(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return given.pop() if given else output

    handle = loaded.model.embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def integrated_gradients(
    inside: Inspection, score: Score, name: str, *, steps: int = STEPS, within: int | None = None
) -> Attribution:
    """(x - b) times the mean gradient of the score on the way from b to x (Sundararajan et al. 2017, section 3).

    x are the embedded tokens and b those of the same text with each token masked that stands for a part of it (or
    unknown, where there is no mask). The values of all numbers of a token are summed. Gradients are taken in the middle
    of each step.
    """
    loaded = inside.loaded
    training = loaded.training
    needs = [parameter.requires_grad for parameter in loaded.parameters()]
    loaded.eval().requires_grad_(False)
    try:
        with torch.no_grad():
            x = loaded.model.embedding(inside.source)
            b = loaded.model.embedding(_baseline(inside))
        if x.shape != b.shape:
            raise HeedfulError("the text and its baseline have different lengths")
        total = torch.zeros_like(x)
        together = max(1, (within or ROWS) // len(x))
        shares = [(number + 0.5) / steps for number in range(steps)]
        for first in range(0, steps, together):
            total += _gradients(inside, score, x, b, shares[first : first + together])
        with torch.no_grad():
            ends = [float(_scores(inside, score, rows, 1)[0]) for rows in (x, b)]
    finally:
        loaded.train(training)
        for parameter, need in zip(loaded.parameters(), needs, strict=True):
            parameter.requires_grad_(need)
    values = ((x - b) * total / steps).sum(-1)
    return Attribution(score=name, values=values, at_text=ends[0], at_baseline=ends[1])


def _gradients(inside: Inspection, score: Score, x: Tensor, b: Tensor, shares: list[float]) -> Tensor:
    """The sum of the gradients at those points of the way."""
    points = torch.cat([b + share * (x - b) for share in shares]).requires_grad_()
    with torch.enable_grad():
        found = _scores(inside, score, points, len(shares)).sum()
    (gradient,) = torch.autograd.grad(found, points)
    summed: Tensor = gradient.unflatten(0, (len(shares), len(x))).sum(0)
    return summed


def _scores(inside: Inspection, score: Score, rows: Tensor, copies: int) -> Tensor:
    batch = _copies(inside.source, copies)
    target = None if inside.target is None else _copies(inside.target, copies)
    with _embedded(inside.loaded, rows):
        return score(inside.loaded(batch, target), batch if target is None else target)


def _copies(batch: Packed, count: int) -> Packed:
    return Packed.of([batch.tokens.tolist()] * count, [batch.types.tolist()] * count)


def _baseline(inside: Inspection) -> Packed:
    special = inside.tokenizer.special
    blank = next((id for id in (special.mask, special.unknown, special.pad) if id is not None), None)
    if blank is None:
        raise HeedfulError("this tokenizer has no token for masked, unknown or padding: there is no baseline to take")
    ids = [id if around else blank for id, around in zip(inside.encoded.ids, inside.encoded.special, strict=True)]
    return Packed.of([ids], [inside.encoded.types])


# -- which score ------------------------------------------------------------------------------------------------

Choices = tuple[tuple[int, str], ...]  # numbers and what they stand for


class ExplainedScore(NamedTuple):
    """The score that a prediction rests on, what it is called, and what else could be asked for."""

    score: Score
    name: str
    row: int | None = None  # that it is read off; None: all of them
    label: int | None = None  # the class or token
    positions: Choices = ()
    labels: Choices = ()


def explained_score(inside: Inspection, position: int | None = None, label: int | None = None) -> ExplainedScore:
    """The score that a head's prediction rests on.

    `place` is the token that is tagged, filled in or written, `label` the class or token; None: what the model says.
    """
    head = inside.loaded.config.head
    with torch.no_grad():
        outputs = inside.loaded(inside.source, inside.target)
    if isinstance(outputs, PretrainingScores | NextTokenAndChoiceScores):
        outputs = outputs.tokens
    match head:
        case Classes(labels=labels):
            chosen = int(outputs[0].argmax()) if label is None else _within(label, len(labels))
            said = f'the score of "{labels[chosen]}"'
            score = _of_one(chosen) if getattr(inside.loaded.head, "one", False) else _of_class(chosen)
            return ExplainedScore(score, said, _pooled(inside), chosen, (), tuple(enumerate(labels)))
        case TokenClasses(labels=labels):
            row = _surest(inside, outputs) if position is None else _within(position, len(outputs))
            chosen = int(outputs[row].argmax()) if label is None else _within(label, len(labels))
            said = f'the score of "{labels[chosen]}" for "{_name(inside, row)}"'
            return ExplainedScore(_at(row, chosen), said, row, chosen, _inner(inside), tuple(enumerate(labels)))
        case Choice():
            return ExplainedScore(
                lambda out, _: out,
                "the score of this candidate, which counts against those of the others",
                _pooled(inside),
            )
    kind = "none" if head is None else head.kind
    if kind == "question_answering":
        return _span(inside, outputs)
    if kind in ("masked_lm", "pretraining", "language_model", "double_heads"):
        return _token(inside, kind, outputs, position, label)
    if kind == "next_sentence":
        return ExplainedScore(lambda out, _: out[:, 0], "the score of: the second text follows", 0)
    if isinstance(head, SentenceEmbedding):
        raise HeedfulError("a vector has no score: give a second text, and how alike both are is one")
    raise HeedfulError(f"a model with {kind} head has no single score whose reasons could be shown")


def similarity_score(inside: Inspection, other: Inspection) -> ExplainedScore:
    """The cosine of the first text's vector with the second's, which stays as it is."""
    with torch.no_grad():
        vector = other.loaded(other.source)
    what = "the likeness (cosine) to the other text, whose vector stays as it is"
    return ExplainedScore(lambda out, _: F.cosine_similarity(out, vector, dim=-1), what)


def _span(inside: Inspection, outputs: Tensor) -> ExplainedScore:
    """Of the span that the engine answers with."""
    inner = [n for n, segment in enumerate(inside.encoded.segments) if segment == max(_segments(inside))]
    start, end, _ = best_span(outputs, inner, inner[-1], max_answer_tokens_of(inside.loaded.thresholds))
    ends = f'"{_name(inside, start)}" as the start and "{_name(inside, end)}" as the end'
    first, last = _at(start, 0), _at(end, 1)
    said = f"the scores of {ends} of the best answer in the text"
    return ExplainedScore(lambda out, batch: first(out, batch) + last(out, batch), said, start)


def _token(inside: Inspection, kind: str, outputs: Tensor, place: int | None, label: int | None) -> ExplainedScore:
    """A token that is filled in or written."""
    writes = kind in ("language_model", "double_heads")
    places = _written(inside) if writes else _masks(inside)
    if not places:
        raise HeedfulError("there is no mask in this text: write one where a token is wanted")
    usual = places[0][0] if not writes or "said" in inside.sides else len(outputs) - 1
    row = usual if place is None else _within(place, len(outputs))
    chosen = int(outputs[row].argmax()) if label is None else _within(label, outputs.shape[1])
    best = outputs[row].topk(min(LISTED, outputs.shape[1])).indices.tolist()
    listed = best if chosen in best else [chosen, *best]
    labels = tuple(zip(listed, _names(inside, listed), strict=True))
    said = dict(labels)[chosen]
    return ExplainedScore(
        _at(row, chosen), f'the score of the token "{said}" at place {row}', row, chosen, places, labels
    )


def _pooled(inside: Inspection) -> int | None:
    """The row that stands for the text."""
    head = inside.loaded.config.head
    if not isinstance(head, Classes | Choice) or isinstance(inside.loaded.model, Classic):
        return None
    return {"first": 0, "last": -1}.get(head.pooling)


def _of_class(label: int) -> Score:
    return lambda out, _: out[:, label]


def _of_one(label: int) -> Score:
    """Of two labels that share one score: what counts for the second counts against the first, whose own is 0."""
    return lambda out, _: out[:, label] - out[:, 1 - label]


def _at(row: int, column: int) -> Score:
    def score(out: Any, batch: Packed) -> Tensor:
        rows: Tensor = out.tokens if isinstance(out, PretrainingScores | NextTokenAndChoiceScores) else out
        found: Tensor = rows.unflatten(0, (len(batch), -1))[:, row, column]
        return found

    return score


def _inner(inside: Inspection) -> Choices:
    """The tokens that stand for a part of the text."""
    return tuple((row, _name(inside, row)) for row, around in enumerate(inside.encoded.special) if not around)


def _masks(inside: Inspection) -> Choices:
    mask = inside.tokenizer.special.mask
    return tuple((row, _name(inside, row)) for row, id in enumerate(inside.encoded.ids) if id == mask)


def _written(inside: Inspection) -> Choices:
    """The places at which a token is written: of a decoder beside an encoder by that token, else by the one before."""
    if "said" in inside.sides:
        return tuple((row, str(each["text"])) for row, each in enumerate(inside.sides["said"]))
    return tuple((row, f"after {each['text']}") for row, each in enumerate(inside.sides["source"]))


def _surest(inside: Inspection, outputs: Tensor) -> int:
    """The token that is the surest to be no "O"; else the surest one."""
    around = torch.tensor(inside.encoded.special)
    sure = outputs.softmax(-1).max(-1).values.masked_fill(around, -1.0)
    other = sure.masked_fill(outputs.argmax(-1) == 0, -1.0)
    return int((other if bool((other >= 0).any()) else sure).argmax())


def _segments(inside: Inspection) -> list[int]:
    return [segment for segment in inside.encoded.segments if segment is not None] or [0]


def _name(inside: Inspection, row: int) -> str:
    return str(inside.sides["source"][row]["text"])


def _names(inside: Inspection, ids: Sequence[int]) -> list[str]:
    return [str(each["text"]) for each in token_records(ids, inside.tokenizer)]


def _within(number: int, count: int) -> int:
    if not 0 <= number < count:
        raise HeedfulError(f"{number} was asked for, but there are {count}, from 0")
    return number
