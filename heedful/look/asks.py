"""What a page may ask for, as plain data: one function for each name, the same behind a server, a file, a notebook."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.look import words
from heedful.look.attribute import integrated_gradients, score_of
from heedful.look.compare import difference, states
from heedful.look.inside import Inside, View
from heedful.look.places import clock
from heedful.look.similarity import similarity
from heedful.look.steps import steps
from heedful.look.writing import writing
from heedful.tasks import ANSWERERS

Kind = Literal["f4", "u2", "u1"]
LEVELS: dict[Kind, int] = {"u2": 65535, "u1": 255}  # shares from 0 to 1 in whole numbers
Params = Mapping[str, str]


def pack(values: Tensor, kind: Kind = "f4") -> dict[str, Any]:
    """Numbers as a page reads them: their shape, and their bytes, little-endian, in base64.

    >>> pack(torch.tensor([0.0, 1.0]), "u1")
    {'kind': 'u1', 'shape': [2], 'data': 'AP8='}
    """
    flat = values.detach().to("cpu", torch.float32)
    if kind == "f4":
        array = flat.contiguous().numpy().astype("<f4")
    else:
        array = (flat.double().clamp(0, 1) * LEVELS[kind]).round().numpy().astype(f"<{kind}")
    return {"kind": kind, "shape": list(values.shape), "data": base64.b64encode(array.tobytes()).decode()}


class Asks:
    """Answers a page's questions about one look, or about two side by side."""

    def __init__(
        self,
        looks: Sequence[Inside],
        *,
        more: Sequence[Inside] = (),
        word: str = "",
        report: Mapping[str, Any] | None = None,
    ) -> None:
        """`more` are further texts in which `word` is looked for; `report` is what heads were found to do."""
        self.looks, self.more, self.word, self.report = list(looks), list(more), word, report

    def __call__(self, name: str, params: Params) -> dict[str, Any]:
        """The answer to one question; what cannot be answered is a HeedfulError."""
        if name not in ASKS:
            raise HeedfulError(f'a page asks for {", ".join(ASKS)}, not for "{name[:40]}"')
        return ASKS[name](self, params)

    def side(self, params: Params) -> Inside:
        """Which of the looks is meant."""
        return self.looks[number(params, "side", len(self.looks), usual=0)]

    def look(self, params: Params) -> dict[str, Any]:
        """Another text in the place of one look, or beside it."""
        text, pair = params.get("text", ""), params.get("pair", "")
        place = number(params, "side", 2, usual=0)
        beside = self.looks[min(place, len(self.looks) - 1)]
        target = params.get("target") or None
        self.looks[place : place + 1] = [
            Inside(beside.loaded, (text, pair) if pair else text, target=target, name=beside.name)
        ]
        return self.about({})

    def about(self, params: Params) -> dict[str, Any]:
        """What is looked at."""
        return {
            "looks": [_about(each) for each in self.looks],
            "word": self.word,
            "texts": [each.item for each in self.more],
            "report": self.report is not None,
        }

    def weights(self, params: Params) -> dict[str, Any]:
        """[rows, keys] of one head."""
        inside = self.side(params)
        view, layer, head = _place(inside, params)
        return {"weights": pack(inside.weights(view.part, layer, [head])[0], "u2")}

    def thumbnails(self, params: Params) -> dict[str, Any]:
        """[heads, at most 48, at most 48] of one layer."""
        inside = self.side(params)
        view, layer, _ = _place(inside, params)
        return {"heads": pack(inside.thumbnails(view.part, layer), "u1")}

    def rollout(self, params: Params) -> dict[str, Any]:
        """[rows, keys] through all layers."""
        inside = self.side(params)
        return {"weights": pack(inside.rollout(params.get("part", inside.views[0].part)), "u2")}

    def neuron(self, params: Params) -> dict[str, Any]:
        """q [rows, d] and k [keys, d] of one head, and its scores, which are scale q k + bias."""
        inside = self.side(params)
        view, layer, head = _place(inside, params)
        one = inside.attended(view.part, layer, ("q", "k", "scores", "weights"), heads=[head])
        if one.q is None or one.k is None or one.scores is None or one.weights is None:
            raise HeedfulError(f"the {view.part} of this model has no queries and keys to take apart")
        q, k, scores = one.q[:, 0], one.k[:, 0], one.scores[0]
        seen = scores > -torch.inf
        plain = one.scale * q @ k.T
        biased = bool((plain - scores)[seen].abs().max() > 1e-4) if bool(seen.any()) else False
        return {"q": pack(q), "k": pack(k), "scale": one.scale, "biased": biased, "scores": pack(scores)}

    def steps(self, params: Params) -> dict[str, Any]:
        """One block, step by step."""
        inside = self.side(params)
        view, layer, head = _place(inside, params)
        row = number(params, "row", len(inside.sides[view.rows]), usual=0)
        found = steps(inside, view.part, layer, head, row)
        return {
            "steps": [
                {
                    "name": each.name,
                    "formula": each.formula,
                    "about": each.about,
                    "over": each.over,
                    "vectors": [{"name": name, "values": pack(vector)} for name, vector in each.vectors.items()],
                }
                for each in found
            ]
        }

    def prediction(self, params: Params) -> dict[str, Any]:
        """What the head says, and what it rests on."""
        inside = self.side(params)
        found: dict[str, Any] = {
            "answer": None,
            "told": "",
            "attention": None,
            "attribution": None,
            "why": "",
            "from": "",
        }
        try:
            found["answer"] = answer(inside)
        except HeedfulError as error:
            found["told"] = str(error)
        place, label = (int(params[key]) if params.get(key, "").isdecimal() else None for key in ("place", "label"))
        row: int | None = None
        try:
            score, what, row = score_of(inside, place, label)
            taken = integrated_gradients(inside, score, what)
            found["attribution"] = {
                "score": taken.score,
                "values": pack(taken.values),
                "at_text": taken.at_text,
                "at_baseline": taken.at_baseline,
                "missing": taken.missing,
            }
        except HeedfulError as error:
            found["why"] = str(error)
        part = inside.views[0].part
        if part in ("encoder", "decoder"):
            mixed = inside.rollout(part)
            one = None if part != inside.views[-1].part else row  # the decoder's row is not one of the encoder's
            found["attention"] = pack(mixed.mean(0) if one is None else mixed[one], "u2")
            where = "all rows" if one is None else f"the row of {inside.sides['source'][one]['text']}"
            found["from"] = f"Attention through all layers (rollout), from {where}."
        elif part == "reader":
            found["attention"] = pack(inside.weights(part, 0)[-1, 0], "u2")
            found["from"] = "What the model takes of each token when it reads the text."
        return found

    def positions(self, params: Params) -> dict[str, Any]:
        """How the model knows places."""
        found = [
            {name: pack(value) if isinstance(value, Tensor) else value for name, value in each.items()}
            for each in clock(self.side(params).loaded)
        ]
        return {"clocks": found}

    def writing(self, params: Params) -> dict[str, Any]:
        """How the decoder writes."""
        return writing(self.side(params))

    def compare(self, params: Params) -> dict[str, Any]:
        """Both looks and their difference."""
        if len(self.looks) < 2:
            raise HeedfulError("there is one text: give another one to compare it with")
        a, b = self.looks[:2]
        view = a.view(params.get("part", a.views[0].part))
        other = b.view(view.part)
        layer = number(params, "layer", view.layers, usual=0)
        layers = layer, number(params, "other_layer", other.layers, usual=layer)
        heads = _maybe(params, "head", view.heads), _maybe(params, "other_head", other.heads)
        found = difference(a, b, view.part, layers, heads)
        answer = {
            "a": pack(found["a"], "u2"),
            "b": pack(found["b"], "u2"),
            "difference": pack(found["difference"]),
            "rows": found["rows"],
            "keys": found["keys"],
        }
        try:
            alike = states(a, b)
            answer |= {"tokens": alike["tokens"], "cosines": pack(alike["cosines"])}
        except HeedfulError as error:
            answer["apart"] = str(error)
        return answer

    def words(self, params: Params) -> dict[str, Any]:
        """One word in all texts."""
        word = params.get("word", "") or self.word
        plain = [each for each in (*self.looks[:1], *self.more) if isinstance(each.item, str)]
        found = words.in_context(plain, word)
        return found | {"layers": [pack(each) for each in found["layers"]]}

    def analogy(self, params: Params) -> dict[str, Any]:
        """a is to b as c is to these."""
        loaded = self.side(params).loaded
        a, b, c = (params.get(each, "") for each in "abc")
        return {"words": words.analogy(loaded, a, b, c)}

    def similarity(self, params: Params) -> dict[str, Any]:
        """The spectrum of one head's W_Q W_K."""
        inside = self.side(params)
        view, layer, head = _place(inside, params)
        found = similarity(inside.loaded, view.part, layer, head)
        return {
            "singular": pack(found.singular),
            "eigenvalues": pack(found.eigenvalues),
            "symmetric": found.symmetric,
            "positive": found.positive,
            "said": found.said,
        }

    def heads(self, params: Params) -> dict[str, Any]:
        """What the model's heads were found to do."""
        if self.report is None:
            raise HeedfulError("heads were not named: run heedful look RUN --heads DATA")
        return dict(self.report)


ASKS: dict[str, Callable[[Asks, Params], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        Asks.about,
        Asks.look,
        Asks.weights,
        Asks.thumbnails,
        Asks.rollout,
        Asks.neuron,
        Asks.steps,
        Asks.prediction,
        Asks.positions,
        Asks.writing,
        Asks.compare,
        Asks.words,
        Asks.analogy,
        Asks.similarity,
        Asks.heads,
    )
}


def number(params: Params, name: str, count: int, *, usual: int) -> int:
    """A whole number from 0 to count - 1."""
    text = params.get(name, "")
    if not text:
        return min(usual, count - 1)
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) >= count:
        raise HeedfulError(f"{name} is {text[:40]!r}; expected a whole number from 0 to {count - 1}")
    return int(text)


def _maybe(params: Params, name: str, count: int) -> int | None:
    return None if params.get(name, "") in ("", "mean") else number(params, name, count, usual=0)


def _place(inside: Inside, params: Params) -> tuple[View, int, int]:
    view = inside.view(params.get("part", inside.views[0].part))
    return view, number(params, "layer", view.layers, usual=0), number(params, "head", view.heads, usual=0)


def _about(inside: Inside) -> dict[str, Any]:
    loaded = inside.loaded
    head = loaded.config.head
    return {
        "name": inside.name,
        "family": loaded.config.family,
        "head": None if head is None else head.kind,
        "parameters": loaded.count(),
        "item": inside.item,
        "written": inside.written,
        "sides": inside.sides,
        "views": [
            {
                "part": view.part,
                "layers": view.layers,
                "heads": view.heads,
                "rows": view.rows,
                "keys": view.keys,
                "names": list(view.names),
            }
            for view in inside.views
        ],
        "takes_target": loaded.needs_target,
    }


def answer(inside: Inside) -> dict[str, Any] | None:
    """The engine's answer to the text; None: the model has no head that answers it."""
    head = inside.loaded.config.head
    if head is None or head.kind not in ANSWERERS:
        return None
    given: Any = inside.item
    if head.kind == "span":
        if isinstance(given, str):
            return None
        given = {"question": given[0], "context": given[1]}
    elif head.kind == "choice" or (head.kind == "next" and isinstance(given, str)):
        return None
    found = Engine(inside.loaded)([given], top_k=8)[0]
    return {name: value for name, value in found.items() if name not in ("vector", "vectors")}
