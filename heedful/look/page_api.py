"""What a page may ask for, as plain data: one function for each name, the same behind a server, a file, a notebook."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.look import word_vectors
from heedful.look.block_steps import block_steps
from heedful.look.compare import attention_difference, hidden_state_similarity
from heedful.look.decoding import decoding_report
from heedful.look.inspection import Inspection, View, inspect_choices
from heedful.look.positions_view import positions_view
from heedful.look.prediction import explain_prediction
from heedful.look.qk_spectrum import qk_spectrum

Kind = Literal["f4", "u2", "u1"]
LEVELS: dict[Kind, int] = {"u2": 65535, "u1": 255}  # shares from 0 to 1 in whole numbers
NOT_FINITE = "the model computes a number here that is not finite, so there is nothing to show"
Params = Mapping[str, str]


def encode_tensor(values: Tensor, kind: Kind = "f4") -> dict[str, Any]:
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


def encode_tensors(found: Any) -> Any:
    """The same with its tensors packed."""
    match found:
        case Tensor():
            return encode_tensor(found)
        case dict():
            return {name: encode_tensors(each) for name, each in found.items()}
        case list():
            return [encode_tensors(each) for each in found]
    return found


class PageAPI:
    """Answers a page's questions about one look, or about two side by side."""

    def __init__(
        self,
        inspections: Sequence[Inspection],
        *,
        extra: Sequence[Inspection] = (),
        word: str = "",
        report: Mapping[str, Any] | None = None,
    ) -> None:
        """`more` are further texts in which `word` is looked for; `report` is what heads were found to do.

        A word that stands in none of the texts is a HeedfulError, and so are more than two texts without a word.
        """
        self.inspections = list(inspections)
        self.extra = list(extra)
        self.word, self.report = word, report
        if word:
            word_vectors.check_occurs([*self.inspections[:1], *self.extra], word)
        elif len(self.extra) > 1:
            raise HeedfulError(
                f"{1 + len(extra)} texts were given: two stand side by side, and a word is followed in more"
            )

    def __call__(self, name: str, params: Params) -> dict[str, Any]:
        """The answer to one question; what cannot be answered is a HeedfulError."""
        if name not in ENDPOINTS:
            raise HeedfulError(f'a page asks for {", ".join(ENDPOINTS)}, not for "{name[:40]}"')
        return ENDPOINTS[name](self, params)

    def side(self, params: Params) -> Inspection:
        """Which of the looks is meant."""
        return self.inspections[parse_index(params, "side", len(self.inspections), usual=0)]

    def look(self, params: Params) -> dict[str, Any]:
        """Another text in the place of one look, or beside it."""
        text, pair = params.get("text", ""), params.get("pair", "")
        place = parse_index(params, "side", max(2, len(self.inspections)), usual=0)
        beside = self.inspections[min(place, len(self.inspections) - 1)]
        if beside.choices and place < len(self.inspections) and pair:
            candidates = [*beside.choices]
            candidates[place] = pair
            self.inspections = inspect_choices(beside.loaded, text, candidates, name=beside.name)
            return self.about({})
        target = params.get("target") or None
        self.inspections[place : place + 1] = [
            Inspection(beside.loaded, (text, pair) if pair else text, target=target, name=beside.name)
        ]
        return self.about({})

    def about(self, params: Params) -> dict[str, Any]:
        """What is looked at."""
        return {
            "looks": [_about(each) for each in self.inspections],
            "word": self.word,
            "texts": [each.item for each in self.extra],
            "report": self.report is not None,
        }

    def weights(self, params: Params) -> dict[str, Any]:
        """[rows, keys] of one head."""
        inside = self.side(params)
        view, layer, head = _place(inside, params)
        return {"weights": encode_tensor(inside.weights(view.part, layer, [head])[0], "u2")}

    def thumbnails(self, params: Params) -> dict[str, Any]:
        """[heads, at most 48, at most 48] of one layer."""
        inside = self.side(params)
        view, layer, _ = _place(inside, params)
        return {"heads": encode_tensor(inside.thumbnails(view.part, layer), "u1")}

    def rollout(self, params: Params) -> dict[str, Any]:
        """[rows, keys] through all layers."""
        inside = self.side(params)
        return {"weights": encode_tensor(inside.rollout(params.get("part", inside.views[0].part)), "u2")}

    def neuron(self, params: Params) -> dict[str, Any]:
        """q [rows, d] and k [keys, d] of one head, and its scores, which are scale q k + bias."""
        inside = self.side(params)
        view, layer, head = _place(inside, params)
        one = inside.attention(view.part, layer, ("q", "k", "scores", "weights"), heads=[head])
        if one.q is None or one.k is None or one.scores is None or one.weights is None:
            raise HeedfulError(f"the {view.part} of this model has no queries and keys to take apart")
        q, k, scores = one.q[:, 0], one.k[:, 0], one.scores[0]
        seen = scores > -torch.inf
        plain = one.scale * q @ k.T
        biased = bool((plain - scores)[seen].abs().max() > 1e-4) if bool(seen.any()) else False
        return {
            "q": encode_tensor(q),
            "k": encode_tensor(k),
            "scale": one.scale,
            "biased": biased,
            "scores": encode_tensor(scores),
        }

    def steps(self, params: Params) -> dict[str, Any]:
        """One block, step by step."""
        inside = self.side(params)
        view, layer, head = _place(inside, params)
        row = parse_index(params, "row", len(inside.sides[view.rows]), usual=0)
        found = block_steps(inside, view.part, layer, head, row)
        return {
            "steps": [
                {
                    "name": each.name,
                    "formula": each.formula,
                    "about": each.about,
                    "over": each.over,
                    "vectors": [
                        {"name": name, "values": encode_tensor(vector)} for name, vector in each.vectors.items()
                    ],
                }
                for each in found
            ]
        }

    def prediction(self, params: Params) -> dict[str, Any]:
        """What the head says, and what it rests on."""
        place, label = (int(params[key]) if params.get(key, "").isdecimal() else None for key in ("place", "label"))
        found = explain_prediction(
            self.inspections, parse_index(params, "side", len(self.inspections), usual=0), place, label
        )
        shown: dict[str, Any] = encode_tensors(found)
        return shown

    def positions(self, params: Params) -> dict[str, Any]:
        """How the model knows places."""
        return {"clocks": encode_tensors(positions_view(self.side(params).loaded))}

    def writing(self, params: Params) -> dict[str, Any]:
        """How the decoder writes."""
        return decoding_report(self.side(params))

    def compare(self, params: Params) -> dict[str, Any]:
        """Both looks and their difference."""
        if len(self.inspections) < 2:
            raise HeedfulError("there is one text: give another one to compare it with")
        a, b = self.inspections[:2]
        view = a.view(params.get("part", a.views[0].part))
        other = b.view(view.part)
        layer = parse_index(params, "layer", view.layers, usual=0)
        layers = layer, parse_index(params, "other_layer", other.layers, usual=layer)
        heads = _maybe(params, "head", view.heads), _maybe(params, "other_head", other.heads)
        found = attention_difference(a, b, view.part, layers, heads)
        answer = {
            "a": encode_tensor(found["a"], "u2"),
            "b": encode_tensor(found["b"], "u2"),
            "difference": encode_tensor(found["difference"]),
            "rows": found["rows"],
            "keys": found["keys"],
        }
        try:
            alike = hidden_state_similarity(a, b, view.part)
            answer |= {"tokens": alike["tokens"], "cosines": encode_tensor(alike["cosines"])}
        except HeedfulError as error:
            answer["apart"] = str(error)
        return answer

    def words(self, params: Params) -> dict[str, Any]:
        """One word in all texts."""
        word = params.get("word", "") or self.word
        found = word_vectors.contextual_similarity([*self.inspections[:1], *self.extra], word)
        return found | {"layers": [encode_tensor(each) for each in found["layers"]]}

    def analogy(self, params: Params) -> dict[str, Any]:
        """a is to b as c is to these."""
        loaded = self.side(params).loaded
        a, b, c = (params.get(each, "") for each in "abc")
        return {"words": word_vectors.analogy(loaded, a, b, c)}

    def similarity(self, params: Params) -> dict[str, Any]:
        """The spectrum of one head's W_Q W_K."""
        inside = self.side(params)
        view, layer, head = _place(inside, params)
        found = qk_spectrum(inside.loaded, view.part, layer, head)
        return {
            "singular": encode_tensor(found.singular_values),
            "eigenvalues": encode_tensor(found.eigenvalues),
            "symmetric": found.symmetric_share,
            "positive": found.positive_share,
            "said": found.summary,
        }

    def heads(self, params: Params) -> dict[str, Any]:
        """What the model's heads were found to do."""
        if self.report is None:
            raise HeedfulError("heads were not named: run heedful look RUN --heads DATA")
        return dict(self.report)


ENDPOINTS: dict[str, Callable[[PageAPI, Params], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        PageAPI.about,
        PageAPI.look,
        PageAPI.weights,
        PageAPI.thumbnails,
        PageAPI.rollout,
        PageAPI.neuron,
        PageAPI.steps,
        PageAPI.prediction,
        PageAPI.positions,
        PageAPI.writing,
        PageAPI.compare,
        PageAPI.words,
        PageAPI.analogy,
        PageAPI.similarity,
        PageAPI.heads,
    )
}


def parse_index(params: Params, name: str, count: int, *, usual: int) -> int:
    """A whole number from 0 to count - 1."""
    text = params.get(name, "")
    if not text:
        return min(usual, count - 1)
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) >= count:
        raise HeedfulError(f"{name} is {text[:40]!r}; expected a whole number from 0 to {count - 1}")
    return int(text)


def _maybe(params: Params, name: str, count: int) -> int | None:
    return None if params.get(name, "") in ("", "mean") else parse_index(params, name, count, usual=0)


def _place(inside: Inspection, params: Params) -> tuple[View, int, int]:
    view = inside.view(params.get("part", inside.views[0].part))
    return view, parse_index(params, "layer", view.layers, usual=0), parse_index(params, "head", view.heads, usual=0)


def _about(inside: Inspection) -> dict[str, Any]:
    loaded = inside.loaded
    head = loaded.config.head
    return {
        "name": inside.name,
        "family": loaded.config.family,
        "head": None if head is None else head.kind,
        "parameters": loaded.count(),
        "item": inside.item,
        "written": inside.target_is_generated,
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
