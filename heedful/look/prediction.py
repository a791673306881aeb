"""What the head says of a text, what that rests on, and what attention shows beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.look.attribution import ExplainedScore, explained_score, integrated_gradients, similarity_score
from heedful.look.classic_attention import HIERARCHY
from heedful.look.inspection import Inspection
from heedful.tasks.answer_heads import answer_heads_of


def explain_prediction(looks: Sequence[Inspection], side: int, place: int | None, label: int | None) -> dict[str, Any]:
    """Of one look: {"answer", "told", "attribution", "why", "texts", "choices", "attention", "from"}.

    `place` and `label` say which score is explained, see `score_of`. A model that gives vectors is asked how alike two
    texts are, each of which it reads by itself; "texts" are then both, each with what its tokens add.
    """
    inside = looks[side]
    found: dict[str, Any] = {"answer": None, "told": "", "attribution": None, "why": "", "choices": None, "texts": None}
    pair = _compared(looks, side)
    try:
        found["answer"] = engine_answer(inside, pair)
    except HeedfulError as error:
        found["told"] = str(error)
    aim: ExplainedScore | None = None
    try:
        if pair is not None:
            found["texts"] = [_text(one, other) for one, other in (pair, pair[::-1])]
        else:
            aim = explained_score(inside, place, label)
            found["attribution"] = _attributed(inside, aim)
            found["choices"] = {"place": aim.row, "label": aim.label, "places": aim.positions, "labels": aim.labels}
    except HeedfulError as error:
        found["why"] = str(error)
    shown = {"attention": None, "from": ""} if found["texts"] else _attention(inside, aim)
    return found | shown


def engine_answer(inside: Inspection, pair: tuple[Inspection, Inspection] | None = None) -> dict[str, Any] | None:
    """The engine's answer to the text; None: the model has no head that answers it."""
    head = inside.loaded.config.head
    if head is None or not answer_heads_of(head.kind):
        return None
    given: Any = inside.item
    if pair is not None:
        given = tuple(each.item for each in pair)
    elif head.kind == "question_answering":
        if isinstance(given, str):
            return None
        given = {"question": given[0], "context": given[1]}
    elif head.kind == "multiple_choice":
        if not inside.choices:
            raise HeedfulError("one candidate has no share: give all of them, each with --choice")
        given = {"prompt": given[0], "choices": list(inside.choices)}
    elif head.kind == "next_sentence" and isinstance(given, str):
        return None
    found = Engine(inside.loaded)([given], top_k=8)[0]
    if head.kind == "multiple_choice":
        found["choices"] = list(inside.choices)
    return {name: value for name, value in found.items() if name not in ("vector", "vectors")}


def _compared(looks: Sequence[Inspection], side: int) -> tuple[Inspection, Inspection] | None:
    """The two texts of which a model that gives vectors says how alike they are, the present one first."""
    inside = looks[side]
    head = inside.loaded.config.head
    if head is None or head.kind != "embedding":
        return None
    if isinstance(inside.item, tuple):
        one, other = (Inspection(inside.loaded, text, name=inside.name) for text in inside.item)
        return one, other
    others = [each for each in looks if each is not inside and each.loaded is inside.loaded]
    return (inside, others[0]) if others and isinstance(others[0].item, str) else None


def _text(one: Inspection, other: Inspection) -> dict[str, Any]:
    return {
        "item": one.item,
        "tokens": [each["text"] for each in one.sides["source"]],
        "attribution": _attributed(one, similarity_score(one, other)),
        **_attention(one, None),
    }


def _attributed(inside: Inspection, aim: ExplainedScore) -> dict[str, Any]:
    taken = integrated_gradients(inside, aim.score, aim.name)
    return {
        "score": taken.score,
        "values": taken.values,
        "at_text": taken.at_text,
        "at_baseline": taken.at_baseline,
        "missing": taken.missing,
    }


def _attention(inside: Inspection, aim: ExplainedScore | None) -> dict[str, Any]:
    """What attention says of the same tokens, as shares: {"attention", "from"}."""
    part, row = inside.views[0].part, None if aim is None else aim.row
    shares: Tensor | None = None
    told = ""
    if "said" in inside.sides and row is not None and inside.views[-1].part == "cross":
        layers = range(inside.view("cross").layers)
        shares = torch.stack([inside.weights("cross", layer)[:, row].mean(0) for layer in layers]).mean(0)
        told = "Where the decoder looked when it wrote this token: the mean of all layers and heads."
    elif part in ("encoder", "decoder"):
        mixed = inside.rollout(part)
        one = None if part != inside.views[-1].part else row  # the decoder's row is not one of the encoder's
        shares = mixed.mean(0) if one is None else mixed[one]
        where = "all rows" if one is None else f"the row of {inside.sides['source'][one]['text']}"
        told = f"Attention through all layers (rollout), from {where}."
    elif inside.views[-1].part == "reader":
        shares, told = _read(inside, aim)
    return {"attention": shares, "from": told}


def _read(inside: Inspection, aim: ExplainedScore | None) -> tuple[Tensor, str]:
    """What a classic model takes of each token when it reads the text: for the class that is explained, or in all."""
    heads, names = inside.weights("reader", 0)[:, 0], inside.views[-1].names
    told = "What the model takes of each token when it reads the text"
    if names == HIERARCHY:
        return heads[-1], f"{told}."
    if aim is not None and aim.label is not None and names == tuple(name for _, name in aim.labels):
        return heads[aim.label], f'{told} for "{names[aim.label]}".'
    return heads.mean(0), f"{told}{': the mean of its queries' if len(names) > 1 else ''}."
