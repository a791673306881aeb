"""The page: plain ES modules beside a style sheet, served as they are, or joined in one file with what it shows."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from typing import Any
from urllib.parse import quote

from heedful.errors import HeedfulError
from heedful.look.inspection import Inspection
from heedful.look.page_api import NOT_FINITE, PageAPI
from heedful.model.config import Classes, NextToken
from heedful.model.trace import within

MODULES = (  # in an order in which each needs only those before it
    *("parts.js", "numbers.js", "source.js", "draw.js", "plots.js", "tokens.js"),
    *("head.js", "model.js", "neuron.js", "steps.js", "predict.js", "places.js"),
    *("decoder.js", "align.js", "compare.js", "words.js", "patterns.js", "main.js"),
)
STYLE = "look.css"
PLAIN = "!'()*"  # what encodeURIComponent leaves beside letters, as the page asks
IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?function|const|class)", re.MULTILINE)
BUDGET = 16_000_000  # bytes of data in a file
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src {connect}; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def read_asset(name: str) -> str:
    """A file of the page."""
    return (files("heedful.look") / "web" / name).read_text(encoding="utf-8")


def bundled_script() -> str:
    """All modules as one, which needs no other: they share one scope, so imports and exports fall away."""
    return "".join(EXPORT.sub("", IMPORT.sub("", read_asset(name))) for name in MODULES)


def question_key(name: str, params: dict[str, Any]) -> str:
    """How a question is written: the name, and its parameters in the order of their names."""
    told = "&".join(f"{each}={quote(str(params[each]), safe=PLAIN)}" for each in sorted(params))
    return f"{name}?{told}"


def to_json(found: Any) -> str:
    """Return an answer as JSON; one with a number that is not finite is a HeedfulError."""
    try:
        return json.dumps(found, allow_nan=False)
    except ValueError:
        raise HeedfulError(NOT_FINITE) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedAnswers:
    """What a file holds: answers by their questions, and how many of each kind had no room."""

    answers: dict[str, Any]
    left_out: dict[str, int]
    bytes: int


def collect_answers(
    asks: PageAPI, *, layers: list[int] | None = None, heads: list[int] | None = None, budget: int = BUDGET
) -> SavedAnswers:
    """Answers to all that a page may ask of the chosen layers and heads, the most needed first, within the budget.

    `layers` and `heads` count from 0, None stands for all; one that no part of a look has is a HeedfulError, as is an
    empty list. `budget` is in bytes of JSON.
    """
    views = [view for look in asks.inspections for view in look.views]
    for what, asked, count in (
        ("layers", layers, max(view.layers for view in views)),
        ("heads", heads, max(view.heads for view in views)),
    ):
        within(what, asked, count)
        if asked is not None and not asked:
            raise HeedfulError(f"no {what} were asked for: give numbers from 0 to {count - 1}, or None for all")
    answers: dict[str, Any] = {}
    left_out: dict[str, int] = {}
    size = 0
    for name, params in _questions(asks, layers, heads):
        if name in left_out:  # others of a kind are as large
            left_out[name] = left_out.get(name, 0) + 1
            continue
        try:
            found: dict[str, Any] = asks(name, {each: str(value) for each, value in params.items()})
            taken = len(to_json(found))
        except HeedfulError as error:
            found = {"error": str(error)}
            taken = len(to_json(found))
        if size + taken > budget and name != "about":
            left_out[name] = 1
            continue
        answers[question_key(name, params)] = found
        size += taken
    return SavedAnswers(answers=answers, left_out=left_out, bytes=size)


def _questions(
    asks: PageAPI, layers: list[int] | None, heads: list[int] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "about", {}
    if asks.report is not None:
        yield "heads", {}
    sides = range(len(asks.inspections))
    places: list[dict[str, Any]] = [
        {"side": side, "part": view.part, "layer": layer, "head": head}
        for side in sides
        for view in asks.inspections[side].views
        for layer in range(view.layers)
        if layers is None or layer in layers
        for head in range(view.heads)
        if heads is None or head in heads
    ]
    each_layer = {(each["side"], each["part"], each["layer"]): each for each in places}
    for each in each_layer.values():
        yield "thumbnails", {name: each[name] for name in ("side", "part", "layer")}
    for side in sides:
        yield "prediction", {"side": side}
        yield from (("prediction", {"side": side} | more) for more in _other_scores(asks.inspections[side]))
        yield "positions", {"side": side}
        yield "writing", {"side": side}
        for view in asks.inspections[side].views:
            yield "rollout", {"side": side, "part": view.part}
    if asks.word:
        yield "words", {"word": asks.word}
    yield from (("weights", each) for each in places)
    if len(asks.inspections) > 1:
        theirs = {view.part: view.layers for view in asks.inspections[1].views}
        for each in (each for each in places if each["side"] == 0 and each["part"] in theirs):
            other = min(each["layer"], theirs[each["part"]] - 1)
            pair = {"part": each["part"], "layer": each["layer"], "other_layer": other}
            if each["head"] == min(heads or [0]):
                yield "compare", pair | {"head": "mean", "other_head": "mean"}
            yield "compare", pair | {"head": each["head"], "other_head": each["head"]}
    yield from (("neuron", each) for each in places)
    yield from (("similarity", each) for each in places)
    for each, row in product((each for each in places if each["part"] in ("encoder", "decoder")), range(LONG)):
        inside = asks.inspections[each["side"]]
        if row < len(inside.sides[inside.view(each["part"]).rows]):
            yield "steps", each | {"row": row}


def _other_scores(inside: Inspection) -> Iterator[dict[str, int]]:
    """What else than the first score a reader may ask for: each class, or each token that is written."""
    match inside.loaded.config.head:
        case Classes(labels=labels) if len(labels) > 1:
            yield from ({"label": number} for number in range(min(SCORES, len(labels))))
        case NextToken():
            yield from ({"place": place} for place in range(min(SCORES, len(inside.sides.get("said", ())))))


SCORES = 24  # of one look that may be kept
LONG = 512  # rows of which steps may be kept


def render_html(
    asks: PageAPI, *, layers: list[int] | None = None, heads: list[int] | None = None, budget: int = BUDGET
) -> str:
    """One self-contained file: style, script and data in it, and a policy that lets nothing else in or out."""
    kept = collect_answers(asks, layers=layers, heads=heads, budget=budget)
    data = _inert({"answers": kept.answers, "left_out": kept.left_out})
    script = bundled_script() + "\nstartFile();\n"
    style = read_asset(STYLE)
    policy = POLICY.format(script=_hash(script), style=_hash(style), connect="'none'")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{head}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="referrer" '
        f'content="no-referrer">\n<title>Heedful look</title>\n<style>{style}</style>\n</head>\n<body>\n'
        f'<div id="look"></div>\n<script type="application/json" id="kept">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def _inert(value: Any) -> str:
    """JSON that ends no script and starts none."""
    plain = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
