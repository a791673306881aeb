"""The page: ES modules and a style sheet, served as separate files, or bundled into one HTML file with its answers.

`local_server.py`, `notebook.py` and `heedful look --html` show it; `page_api.py` answers its questions.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from typing import NamedTuple, cast
from urllib.parse import quote

from heedful.errors import HeedfulError, RequestError
from heedful.look.inspection import Inspection
from heedful.look.page_api import NOT_FINITE, Json, PageAPI, in_half_precision
from heedful.model.config import Classes, NextToken
from heedful.model.trace import check_indices
from heedful.page.assets import bundle_modules, escape_json, source_hash

MODULES = (  # modules of the page; each imports only modules before it
    *("parts.js", "save.js", "numbers.js", "source.js", "draw.js", "tokens.js", "plots.js"),
    *("head.js", "model.js", "neuron.js", "steps.js", "predict.js", "change.js", "places.js"),
    *("decoder.js", "align.js", "compare.js", "words.js", "patterns.js", "main.js"),
)
STYLE = "look.css"
Params = dict[str, str | int]  # parameters of a question
UNRESERVED = "!'()*"  # characters that encodeURIComponent of JavaScript does not escape and `quote` does
MAX_ANSWER_BYTES = 16_000_000  # bytes of all answers in a file
MAX_SCORES = 24  # scores of one inspection whose attributions are saved
MAX_ROWS = 512  # rows whose block steps are saved
POLICY = (  # the Content-Security-Policy of a page, with allowed sources to be filled in
    "default-src 'none'; script-src {script}; style-src {style}; connect-src {connect}; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def read_asset(name: str) -> str:
    """Return a file of the page."""
    return (files("heedful.look") / "web" / name).read_text(encoding="utf-8")


def bundled_script() -> str:
    """Return all modules of the page as one script."""
    return bundle_modules(map(read_asset, MODULES))


def question_key(name: str, params: Params) -> str:
    """Return the key of a question in a file: its name and its parameters in alphabetical order.

    The page computes the same keys.
    """
    pairs = "&".join(f"{param}={quote(str(params[param]), safe=UNRESERVED)}" for param in sorted(params))
    return f"{name}?{pairs}"


def to_json(value: object) -> str:
    """Return an answer as JSON.

    Raises:
        RequestError: If a number is not finite.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise RequestError(NOT_FINITE) from None


# -- answers in a file -----------------------------------------------------------------------------------------------


class HeadPosition(NamedTuple):
    """A head of one of the inspections."""

    side: int  # index of the inspection
    part: str
    layer: int
    head: int

    def params(self) -> Params:
        """Return the parameters of a question about the head."""
        return {"side": self.side, "part": self.part, "layer": self.layer, "head": self.head}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedAnswers:
    """Answers to be saved in a file."""

    answers: dict[str, Json]  # by `question_key`
    left_out: dict[str, int]  # how many answers were left out for lack of space, by name of the question
    bytes: int  # size of all answers as JSON


def collect_answers(
    api: PageAPI,
    *,
    layers: list[int] | None = None,
    heads: list[int] | None = None,
    max_bytes: int = MAX_ANSWER_BYTES,
    names: Collection[str] | None = None,
) -> SavedAnswers:
    """Answer the questions that a page may ask, the most important first, until a size is reached.

    Args:
        api: Answers the questions.
        layers: Layers to include, from 0. If None, all.
        heads: Heads to include, from 0. If None, all.
        max_bytes: Maximum size of all answers as JSON, in bytes.
        names: Names of the questions to answer. If None, all.

    Raises:
        HeedfulError: If a list is empty, or names a layer or head that no part has.
    """
    views = [view for inspection in api.inspections for view in inspection.views]
    _check_selection("layers", layers, max(view.layers for view in views))
    _check_selection("heads", heads, max(view.heads for view in views))
    answers: dict[str, Json] = {}
    left_out: dict[str, int] = {}
    total = 0
    for name, params in _questions(api, layers, heads):
        if names is not None and name not in names:
            continue
        if name in left_out:  # answers to questions of one name have similar sizes
            left_out[name] += 1
            continue
        try:
            answer = cast(Json, in_half_precision(api(name, {param: str(value) for param, value in params.items()})))
            size = len(to_json(answer))
        except HeedfulError as error:
            answer = {"error": str(error)}
            size = len(to_json(answer))
        if total + size > max_bytes and name != "about":
            left_out[name] = 1
            continue
        answers[question_key(name, params)] = answer
        total += size
    return SavedAnswers(answers=answers, left_out=left_out, bytes=total)


def _check_selection(what: str, indices: list[int] | None, count: int) -> None:
    """Raise HeedfulError for an empty list of layers or heads, and for indices of `count` or more; None is valid."""
    check_indices(what, indices, count)
    if indices is not None and not indices:
        raise RequestError(f"{what} is empty: give numbers from 0 to {count - 1}, or None for all")


def _questions(api: PageAPI, layers: list[int] | None, heads: list[int] | None) -> Iterator[tuple[str, Params]]:
    """Yield the questions that a page may ask, as name and parameters, the most important first."""
    head_positions = [
        HeadPosition(side, view.part, layer, head)
        for side, inspection in enumerate(api.inspections)
        for view in inspection.views
        for layer in range(view.layers)
        if layers is None or layer in layers
        for head in range(view.heads)
        if heads is None or head in heads
    ]
    yield "about", {}
    if api.report is not None:
        yield "heads", {}
    for side, part, layer in dict.fromkeys(position[:3] for position in head_positions):
        yield "thumbnails", {"side": side, "part": part, "layer": layer}
    yield from _text_questions(api)
    yield from _word_questions(api)
    yield from (("weights", position.params()) for position in head_positions)
    if len(api.inspections) > 1:
        yield from (("compare", params) for params in _comparisons(api, head_positions, first_head=min(heads or [0])))
    yield from (("neuron", position.params()) for position in head_positions)
    yield from (("similarity", position.params()) for position in head_positions)
    blocks = dict.fromkeys(position[:3] for position in head_positions if position.part in ("encoder", "decoder"))
    for row, (side, part, layer) in product(range(MAX_ROWS), blocks):
        inspection = api.inspections[side]
        if row < len(inspection.sides[inspection.view(part).rows]):
            yield "steps", {"side": side, "part": part, "layer": layer, "row": row}


def _text_questions(api: PageAPI) -> Iterator[tuple[str, Params]]:
    """Yield the questions about each text and its model as a whole."""
    for side, inspection in enumerate(api.inspections):
        yield "prediction", {"side": side}
        for score in _other_scores(inspection):
            yield "prediction", {"side": side, **score}
        yield "positions", {"side": side}
        yield "writing", {"side": side}
        for view in inspection.views:
            yield "rollout", {"side": side, "part": view.part}


def _word_questions(api: PageAPI) -> Iterator[tuple[str, Params]]:
    """Yield the questions about word vectors."""
    if word := api.word or api.suggestion(api.inspections[0]).word:
        yield "words", {"word": word}
    for side, inspection in enumerate(api.inspections):
        yield "suggested", {"side": side}
        yield "scatter", {"side": side}
        if analogy := api.suggestion(inspection).analogy:
            yield "analogy", {"side": side, **dict(zip("abc", analogy, strict=True))}


def _comparisons(api: PageAPI, head_positions: list[HeadPosition], first_head: int) -> Iterator[Params]:
    """Yield the parameters of comparisons of two texts: for each layer the mean over heads, then each head.

    A layer that the second model does not have is compared with its last layer.

    Args:
        api: Has the two texts.
        head_positions: All heads of both texts that are included.
        first_head: Index of the first head that is included.
    """
    other_layers = {view.part: view.layers for view in api.inspections[1].views}
    for position in head_positions:
        if position.side != 0 or position.part not in other_layers:
            continue
        other_layer = min(position.layer, other_layers[position.part] - 1)
        layers: Params = {"part": position.part, "layer": position.layer, "other_layer": other_layer}
        if position.head == first_head:
            yield layers | {"head": "mean", "other_head": "mean"}
        yield layers | {"head": position.head, "other_head": position.head}


def _other_scores(inspection: Inspection) -> Iterator[Params]:
    """Yield the parameters of the scores that can be explained: of each class, or each generated token."""
    match inspection.loaded.config.head:
        case Classes(labels=labels) if len(labels) > 1:
            for label in range(min(MAX_SCORES, len(labels))):
                yield {"label": label}
        case NextToken():
            count = len(inspection.sides.get("generated", ()))
            for position in range(min(MAX_SCORES, count)):
                yield {"place": position}


def render_html(
    api: PageAPI, *, layers: list[int] | None = None, heads: list[int] | None = None, max_bytes: int = MAX_ANSWER_BYTES
) -> str:
    """Return the page as one HTML file, which loads nothing else. See `collect_answers` for the arguments."""
    saved = collect_answers(api, layers=layers, heads=heads, max_bytes=max_bytes)
    return html_file(saved, bundled_script() + "\nstartFile();\n")


def html_file(saved: SavedAnswers, script: str, *, allowed: str = "", elements: str = "") -> str:
    """Return an HTML file with its style, its script and its answers.

    Args:
        saved: The answers.
        script: All code of the page.
        allowed: Further sources of scripts for the Content-Security-Policy, each with a space before it.
        elements: HTML of further elements of the body.
    """
    data = escape_json({"answers": saved.answers, "left_out": saved.left_out, "bytes": saved.bytes})
    style = read_asset(STYLE)
    policy = POLICY.format(script=source_hash(script) + allowed, style=source_hash(style), connect="'none'")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{head}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="referrer" '
        f'content="no-referrer">\n<title>Heedful look</title>\n<style>{style}</style>\n</head>\n<body>\n'
        f'<div id="look"></div>\n<script type="application/json" id="kept">{data}</script>\n{elements}'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )
