"""`PageAPI`: the questions of the page and their answers as JSON, for the local server, HTML files and notebooks."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from heedful.errors import RequestError
from heedful.look.attribution import Attribution
from heedful.look.block_steps import block_steps
from heedful.look.compare import attention_difference, hidden_state_similarity
from heedful.look.decoding import decoding_report
from heedful.look.head_patterns import NamedHead, telling_heads
from heedful.look.inspection import Inspection, View, inspect_choices
from heedful.look.interventions import Head, intervene
from heedful.look.model_title import model_title
from heedful.look.positions_view import positions_view
from heedful.look.prediction import TextExplanation, explain_prediction
from heedful.look.qk_spectrum import qk_spectrum
from heedful.look.word_map import Suggestion, map_methods, suggest_words, word_map
from heedful.look.word_vectors import analogy, check_occurs, contextual_similarity, find_occurrences

Kind = Literal["f4", "f2", "u2", "u1"]
LEVELS: dict[Kind, int] = {"u2": 65535, "u1": 255}  # the integer that encodes 1.0
MAX_HALF = 65504.0  # the largest number of float16
MAX_WORD_CHARS = 200  # maximum characters of a word that replaces a token
NOT_FINITE = "the model computes a number here that is not finite, so there is nothing to show"
Params = Mapping[str, str]  # parameters of a question
Json: TypeAlias = dict[str, object]


class EncodedTensor(TypedDict):
    """A tensor as plain data."""

    kind: Kind  # type of the elements: float32, float16, uint16, uint8
    shape: list[int]
    data: str  # base64 of the bytes, little-endian


def encode_tensor(values: Tensor, kind: Kind = "f4") -> EncodedTensor:
    """Encode a tensor: "f4" in float32; "u2" and "u1", for values from 0 to 1, as integers of 16 and 8 bits.

    >>> encode_tensor(torch.tensor([0.0, 1.0]), "u1")
    {'kind': 'u1', 'shape': [2], 'data': 'AP8='}

    Raises:
        RequestError: If an element is not finite and is to be stored as an integer.
    """
    flat = values.detach().to("cpu", torch.float32)
    if kind == "f4":
        array = flat.contiguous().numpy().astype("<f4")
    else:
        if flat.isnan().any():
            raise RequestError(NOT_FINITE)
        array = (flat.double().clamp(0, 1) * LEVELS[kind]).round().numpy().astype(f"<{kind}")
    return {"kind": kind, "shape": list(values.shape), "data": base64.b64encode(array.tobytes()).decode()}


def in_half_precision(answer: object) -> object:
    """Return an answer with float32 tensors converted to float16, except those with finite values out of its range."""
    match answer:
        case {"kind": "f4", "shape": shape, "data": str(data)}:
            values = np.frombuffer(base64.b64decode(data), dtype="<f4")
            finite = values[np.isfinite(values)]
            if len(finite) and float(np.abs(finite).max()) > MAX_HALF:
                return answer
            half_data = base64.b64encode(values.astype("<f2").tobytes()).decode()
            return {"kind": "f2", "shape": shape, "data": half_data}
        case dict():
            return {name: in_half_precision(value) for name, value in answer.items()}
        case list():
            return [in_half_precision(value) for value in answer]
    return answer


class PageAPI:
    """Answers the questions of a page about one inspection, or about several side by side.

    Each question has the name of a method. Its parameters are texts: "side" is the index of the inspection (0, 1),
    "part", "layer", "head" and "row" select a part of the model.

    Args:
        inspections: One text, two texts to compare, or all candidates of a multiple-choice prompt.
        extra: Further texts in which `word` is looked up.
        word: A word to follow through all texts.
        report: The report on the heads (head_report.py), if there is one.

    Raises:
        RequestError: If the word occurs in no text, or more than two texts are given without a word.
    """

    def __init__(
        self,
        inspections: Sequence[Inspection],
        *,
        extra: Sequence[Inspection] = (),
        word: str = "",
        report: Mapping[str, object] | None = None,
    ) -> None:
        self.inspections = list(inspections)
        self.extra = list(extra)
        self.word, self.report = word, report
        self._named_heads: WeakKeyDictionary[Inspection, list[NamedHead]] = WeakKeyDictionary()
        self._suggestions: WeakKeyDictionary[Inspection, Suggestion] = WeakKeyDictionary()
        if word:
            check_occurs([*self.inspections[:1], *self.extra], word)
        elif len(self.extra) > 1:
            raise RequestError(
                f"{1 + len(extra)} texts were given: give one or two, or a word to follow through all of them"
            )

    def __call__(self, name: str, params: Params) -> Json:
        """Answer a question.

        Args:
            name: A key of `ENDPOINTS`.
            params: Parameters by name.

        Raises:
            HeedfulError: If there is no such question, a parameter is wrong, or there is no answer.
        """
        if name not in ENDPOINTS:
            raise RequestError(f'"{name[:40]}" is not a question of the page: use one of {", ".join(ENDPOINTS)}')
        return ENDPOINTS[name](self, params)

    def side(self, params: Params) -> Inspection:
        """Return the inspection that a question is about."""
        return self.inspections[parse_index(params, "side", len(self.inspections), default=0)]

    def look(self, params: Params) -> Json:
        """Replace an inspection by one of another text, or add one; returns the answer to `about`."""
        text, pair = params.get("text", ""), params.get("pair", "")
        side = parse_index(params, "side", max(2, len(self.inspections)), default=0)
        replaced = self.inspections[min(side, len(self.inspections) - 1)]
        if replaced.choices and side < len(self.inspections) and pair:
            choices = [*replaced.choices]
            choices[side] = pair
            self.inspections = inspect_choices(replaced.loaded, text, choices, name=replaced.name)
            return self.about({})
        item = (text, pair) if pair else text
        target = params.get("target") or None
        self.inspections[side : side + 1] = [Inspection(replaced.loaded, item, target=target, name=replaced.name)]
        return self.about({})

    def about(self, params: Params) -> Json:
        """Return models, texts and tokens."""
        return {
            "looks": [
                _inspection_record(inspection) | {"telling": self._telling(inspection)}
                for inspection in self.inspections
            ],
            "word": self.word,
            "texts": [inspection.item for inspection in self.extra],
            "report": self.report is not None,
        }

    def _telling(self, inspection: Inspection) -> list[NamedHead]:
        """Return the heads that follow a pattern in the text, computed once."""
        if inspection not in self._named_heads:
            self._named_heads[inspection] = telling_heads(inspection)
        return self._named_heads[inspection]

    def suggestion(self, inspection: Inspection) -> Suggestion:
        """Return words that the page shows before the user enters any, computed once."""
        if inspection not in self._suggestions:
            self._suggestions[inspection] = suggest_words(inspection)
        return self._suggestions[inspection]

    def weights(self, params: Params) -> Json:
        """Return the attention weights of one head, [rows, keys]."""
        inspection = self.side(params)
        view, layer, head = _view_layer_head(inspection, params)
        return {"weights": encode_tensor(inspection.weights(view.part, layer, [head])[0], "u2")}

    def thumbnails(self, params: Params) -> Json:
        """Return the weights of all heads of one layer, [heads, at most 48, at most 48]."""
        inspection = self.side(params)
        view, layer, _ = _view_layer_head(inspection, params)
        return {"heads": encode_tensor(inspection.thumbnails(view.part, layer), "u1")}

    def rollout(self, params: Params) -> Json:
        """Return attention rollout through all layers, [rows, keys]."""
        inspection = self.side(params)
        return {"weights": encode_tensor(inspection.rollout(params.get("part", inspection.views[0].part)), "u2")}

    def neuron(self, params: Params) -> Json:
        """Return q [rows, d], k and v [keys, d] of one head of dimension d, and its scores scale * q k^T (+ bias)."""
        inspection = self.side(params)
        view, layer, head = _view_layer_head(inspection, params)
        attention = inspection.attention(view.part, layer, ("q", "k", "v", "scores"), heads=[head])
        if attention.q is None or attention.k is None or attention.v is None or attention.scores is None:
            raise RequestError(f"{view.part} of this model has no queries and keys to show")
        q, k, scores = attention.q[:, 0], attention.k[:, 0], attention.scores[0]
        visible = scores > -torch.inf
        bias = (attention.scale * q @ k.T - scores)[visible]
        return {
            "q": encode_tensor(q),
            "k": encode_tensor(k),
            "v": encode_tensor(attention.v[:, 0]),
            "scale": attention.scale,
            "biased": bool(visible.any()) and bool(bias.abs().max() > 1e-4),
            "scores": encode_tensor(scores),
        }

    def steps(self, params: Params) -> Json:
        """Return the steps of one block for one token; vectors of a head are left out, since `neuron` has them."""
        inspection = self.side(params)
        view, layer, _ = _view_layer_head(inspection, params)
        row = parse_index(params, "row", len(inspection.sides[view.rows]), default=0)
        return {
            "steps": [
                {
                    "name": step.name,
                    "formula": step.formula,
                    "about": step.about,
                    "over": step.over,
                    "vectors": [
                        {"name": name} if step.of_head else {"name": name, "values": encode_tensor(vector)}
                        for name, vector in step.vectors.items()
                    ],
                }
                for step in block_steps(inspection, view.part, layer, 0, row)
            ]
        }

    def prediction(self, params: Params) -> Json:
        """Return the prediction and its attribution to tokens."""
        position, label = (int(params[key]) if params.get(key, "").isdecimal() else None for key in ("place", "label"))
        side = parse_index(params, "side", len(self.inspections), default=0)
        explanation = explain_prediction(self.inspections, side, position, label)
        score, shares = explanation.score, explanation.attention.shares
        choices = score and {
            "place": score.row,
            "label": score.label,
            "places": score.positions,
            "labels": score.labels,
        }
        return {
            "answer": explanation.answer,
            "told": explanation.answer_error,
            "attribution": explanation.attribution and _attribution_record(explanation.attribution),
            "why": explanation.attribution_error,
            "choices": choices,
            "texts": explanation.texts and [_text_record(text) for text in explanation.texts],
            "attention": None if shares is None else encode_tensor(shares),
            "from": explanation.attention.source,
        }

    def changed(self, params: Params) -> Json:
        """Return the prediction before and after heads are switched off and tokens replaced."""
        side = parse_index(params, "side", len(self.inspections), default=0)
        heads = [_parse_gate(text) for text in params.get("off", "").split(",") if text]
        result = intervene(self.inspections, side, heads, _parse_words(params.get("tokens", "")))
        return {"before": result.before, "after": result.after, "item": result.changed_item, "cosine": result.cosine}

    def positions(self, params: Params) -> Json:
        """Return how the model represents positions."""
        return {
            "views": [
                {"name": view.name, "description": view.description}
                | {name: encode_tensor(tensor) for name, tensor in view.tensors.items()}
                for view in positions_view(self.side(params).loaded)
            ]
        }

    def writing(self, params: Params) -> Json:
        """Return the steps of greedy decoding, and the texts that greedy decoding and beam search generate."""
        return {**decoding_report(self.side(params))}

    def compare(self, params: Params) -> Json:
        """Return the attention of both inspections, its difference, and the similarity of hidden states."""
        if len(self.inspections) < 2:
            raise RequestError("there is one text: give another one to compare it with")
        a, b = self.inspections[:2]
        view = a.view(params.get("part", a.views[0].part))
        view_b = b.view(view.part)
        layer = parse_index(params, "layer", view.layers, default=0)
        layers = layer, parse_index(params, "other_layer", view_b.layers, default=layer)
        heads = _parse_head(params, "head", view.heads), _parse_head(params, "other_head", view_b.heads)
        comparison = attention_difference(a, b, view.part, layers, heads)
        answer: Json = {
            "a": encode_tensor(comparison.a, "u2"),
            "b": encode_tensor(comparison.b, "u2"),
            "difference": encode_tensor(comparison.difference),
            "rows": comparison.rows,
            "keys": comparison.keys,
        }
        try:
            similarity = hidden_state_similarity(a, b, view.part)
        except RequestError as error:
            return answer | {"apart": str(error)}
        return answer | {"tokens": similarity.tokens, "cosines": encode_tensor(similarity.cosines)}

    def words(self, params: Params) -> Json:
        """Return the similarity of all occurrences of a word."""
        word = params.get("word", "") or self.word
        similarity = contextual_similarity([*self.inspections[:1], *self.extra], word)
        return {
            "places": similarity.occurrences,
            "layers": [encode_tensor(layer) for layer in similarity.layers],
            "names": similarity.layer_names,
            "neighbours": similarity.neighbours,
            "static": similarity.static_neighbours,
            "unknown": similarity.static_error,
        }

    def suggested(self, params: Params) -> Json:
        """Return a word of the text to follow, words for a plane, and an analogy; all have static vectors."""
        suggestion = self.suggestion(self.side(params))
        first = self.inspections[0]
        occurs = self.word and any(find_occurrences(inspection, self.word) for inspection in (first, *self.extra))
        word = self.word if occurs else self.suggestion(first).word
        return {
            "word": word,
            "words": suggestion.words,
            "own": suggestion.own,
            "analogy": suggestion.analogy,
            "methods": map_methods(),
        }

    def scatter(self, params: Params) -> Json:
        """Return static vectors in a plane: of the words in "words", separated by spaces, or of the suggested words."""
        inspection = self.side(params)
        words = params.get("words", "").split() or self.suggestion(inspection).words
        plane = word_map(inspection.loaded, words, params.get("method") or "pca")
        return {
            "words": plane.words,
            "points": encode_tensor(plane.points),
            "variance": plane.variance,
            "unknown": plane.unknown,
        }

    def analogy(self, params: Params) -> Json:
        """Return the words d for which a is to b as c is to d."""
        a, b, c = (params.get(name, "") for name in "abc")
        return {"words": analogy(self.side(params).loaded, a, b, c)}

    def similarity(self, params: Params) -> Json:
        """Return the spectrum of one head's query-key matrix, or why it has no such matrix."""
        inspection = self.side(params)
        view, layer, head = _view_layer_head(inspection, params)
        try:
            spectrum = qk_spectrum(inspection.loaded, view.part, layer, head)
        except RequestError as error:
            return {"told": str(error)}
        return {
            "singular": encode_tensor(spectrum.singular_values),
            "eigenvalues": encode_tensor(spectrum.eigenvalues),
            "symmetric": spectrum.symmetric_share,
            "positive": spectrum.positive_share,
            "summary": spectrum.summary,
        }

    def heads(self, params: Params) -> Json:
        """Return the report on the heads."""
        if self.report is None:
            raise RequestError("there is no report on the heads: run heedful look RUN --heads DATA")
        return dict(self.report)


ENDPOINTS: dict[str, Callable[[PageAPI, Params], Json]] = {
    method.__name__: method
    for method in (
        PageAPI.about,
        PageAPI.look,
        PageAPI.weights,
        PageAPI.thumbnails,
        PageAPI.rollout,
        PageAPI.neuron,
        PageAPI.steps,
        PageAPI.prediction,
        PageAPI.changed,
        PageAPI.positions,
        PageAPI.writing,
        PageAPI.compare,
        PageAPI.words,
        PageAPI.suggested,
        PageAPI.scatter,
        PageAPI.analogy,
        PageAPI.similarity,
        PageAPI.heads,
    )
}


def parse_index(params: Params, name: str, count: int, *, default: int) -> int:
    """Return a parameter as an index from 0 to count - 1, or the default if it is missing.

    Raises:
        RequestError: If the parameter is no such index.
    """
    text = params.get(name, "")
    if not text:
        return min(default, count - 1)
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) >= count:
        raise RequestError(f"{name} is {text[:40]!r}; expected a whole number from 0 to {count - 1}")
    return int(text)


def _parse_gate(text: str) -> Head:
    """Return part, layer and head from PART.LAYER.HEAD."""
    part, *indices = text.split(".")
    if len(indices) != 2 or not all(index.isascii() and index.isdecimal() and len(index) < 7 for index in indices):
        raise RequestError(f"off has {text[:40]!r}; expected PART.LAYER.HEAD, such as encoder.1.8")
    return part, int(indices[0]), int(indices[1])


def _parse_words(text: str) -> dict[int, str]:
    """Return words by the position of the token that they replace, from a JSON object {"POSITION": "WORD"}."""
    try:
        words = json.loads(text or "{}")
    except (ValueError, RecursionError):
        words = None
    match words:
        case dict() if all(row.isascii() and row.isdecimal() and len(row) < 7 for row in words):
            if all(isinstance(word, str) and len(word) <= MAX_WORD_CHARS for word in words.values()):
                return {int(row): word for row, word in words.items()}
    raise RequestError(f"tokens is {text[:40]!r}; expected words of up to {MAX_WORD_CHARS} characters by position")


def _parse_head(params: Params, name: str, count: int) -> int | None:
    """Return the index of a head, or None for the mean over heads."""
    return None if params.get(name, "") in ("", "mean") else parse_index(params, name, count, default=0)


def _view_layer_head(inspection: Inspection, params: Params) -> tuple[View, int, int]:
    """Return the part, the layer and the head of a question; by default the first ones."""
    view = inspection.view(params.get("part", inspection.views[0].part))
    layer = parse_index(params, "layer", view.layers, default=0)
    return view, layer, parse_index(params, "head", view.heads, default=0)


def _attribution_record(attribution: Attribution) -> Json:
    """Return an attribution as plain data."""
    return {
        "score": attribution.score,
        "values": encode_tensor(attribution.values),
        "at_text": attribution.at_text,
        "at_baseline": attribution.at_baseline,
        "missing": attribution.missing,
    }


def _text_record(text: TextExplanation) -> Json:
    """Return the explanation of one of two compared texts as plain data."""
    shares = text.attention.shares
    return {
        "item": text.item,
        "tokens": text.tokens,
        "attribution": _attribution_record(text.attribution),
        "attention": None if shares is None else encode_tensor(shares),
        "from": text.attention.source,
    }


def _inspection_record(inspection: Inspection) -> Json:
    """Return model, text and tokens of an inspection as plain data."""
    loaded = inspection.loaded
    head = loaded.config.head
    return {
        "name": inspection.name,
        "title": model_title(inspection.name),
        "family": loaded.config.family,
        "head": None if head is None else head.kind,
        "parameters": loaded.count(),
        "item": inspection.item,
        "written": inspection.target_is_generated,
        "choices": list(inspection.choices),
        "sides": inspection.sides,
        "views": [
            {
                "part": view.part,
                "layers": view.layers,
                "heads": view.heads,
                "rows": view.rows,
                "keys": view.keys,
                "names": list(view.names),
            }
            for view in inspection.views
        ],
        "takes_target": loaded.needs_target,
    }
