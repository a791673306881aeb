"""What a page may ask for, as plain data: one function for each name, the same behind a server, a file, a notebook."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.look import words
from heedful.look.compare import difference, states
from heedful.look.inside import Inside, View, among
from heedful.look.places import clock
from heedful.look.prediction import prediction
from heedful.look.similarity import similarity
from heedful.look.steps import steps
from heedful.look.writing import writing

Kind = Literal["f4", "u2", "u1"]
LEVELS: dict[Kind, int] = {"u2": 65535, "u1": 255}  # shares from 0 to 1 in whole numbers
NOT_FINITE = "the model computes a number here that is not finite, so there is nothing to show"
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
        if flat.isnan().any():
            raise HeedfulError(NOT_FINITE)
        array = (flat.double().clamp(0, 1) * LEVELS[kind]).round().numpy().astype(f"<{kind}")
    return {"kind": kind, "shape": list(values.shape), "data": base64.b64encode(array.tobytes()).decode()}


def packed(found: Any) -> Any:
    """The same with its tensors packed."""
    match found:
        case Tensor():
            return pack(found)
        case dict():
            return {name: packed(each) for name, each in found.items()}
        case list():
            return [packed(each) for each in found]
    return found


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
        """`more` are further texts in which `word` is looked for; `report` is what heads were found to do.

        A word that stands in none of the texts is a HeedfulError, and so are more than two texts without a word.
        """
        self.looks, self.more, self.word, self.report = list(looks), list(more), word, report
        if word:
            words.stands_in([*self.looks[:1], *self.more], word)
        elif len(self.more) > 1:
            raise HeedfulError(
                f"{1 + len(more)} texts were given: two stand side by side, and a word is followed in more"
            )

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
        place = number(params, "side", max(2, len(self.looks)), usual=0)
        beside = self.looks[min(place, len(self.looks) - 1)]
        if beside.choices and place < len(self.looks) and pair:
            candidates = [*beside.choices]
            candidates[place] = pair
            self.looks = among(beside.loaded, text, candidates, name=beside.name)
            return self.about({})
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
        place, label = (int(params[key]) if params.get(key, "").isdecimal() else None for key in ("place", "label"))
        found = prediction(self.looks, number(params, "side", len(self.looks), usual=0), place, label)
        shown: dict[str, Any] = packed(found)
        return shown

    def positions(self, params: Params) -> dict[str, Any]:
        """How the model knows places."""
        return {"clocks": packed(clock(self.side(params).loaded))}

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
            alike = states(a, b, view.part)
            answer |= {"tokens": alike["tokens"], "cosines": pack(alike["cosines"])}
        except HeedfulError as error:
            answer["apart"] = str(error)
        return answer

    def words(self, params: Params) -> dict[str, Any]:
        """One word in all texts."""
        word = params.get("word", "") or self.word
        found = words.in_context([*self.looks[:1], *self.more], word)
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
        "choices": list(inside.choices),
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
