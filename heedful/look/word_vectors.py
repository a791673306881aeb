"""Words in context: the vectors of one word in several texts, layer by layer, beside its static one; analogies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import Loaded
from heedful.errors import HeedfulError
from heedful.look.inspection import Inspection, readable_token
from heedful.model.classic import Classic
from heedful.model.recurrent_seq2seq import RecurrentWriter

NEIGHBOURS = 10


def occurrences(inside: Inspection, word: str) -> list[tuple[str, list[int]]]:
    """The text and the rows of each occurrence of a word, whatever its case; one of several tokens has several rows."""
    if not word.strip():
        raise HeedfulError("the word is empty: give one that stands in the texts")
    whole = re.compile(rf"(?<!\w){re.escape(word.strip())}(?!\w)", re.IGNORECASE)
    encoded, found = inside.encoded, []
    for segment, text in enumerate((inside.item,) if isinstance(inside.item, str) else inside.item):
        for hit in whole.finditer(text):
            rows = [
                place
                for place, (first, last) in enumerate(encoded.offsets)
                if encoded.segments[place] == segment and first < hit.end() and last > hit.start()
            ]
            if rows:
                found.append((text, rows))
    return found


def check_occurs(insides: Sequence[Inspection], word: str) -> None:
    """A HeedfulError where a word stands in none of the texts."""
    if not any(occurrences(inside, word) for inside in insides):
        raise HeedfulError(f'"{word}" stands in none of the texts: give texts that hold it')


def contextual_similarity(insides: Sequence[Inspection], word: str) -> dict[str, Any]:
    """The cosines of all occurrences of a word with each other, before the first block and after each, and neighbours.

    {"places": [{"text", "start", "stop"}], "layers": [one matrix for each], "names": [of the layers], "neighbours":
    [for each place], "static": [{"text", "cosine"}], "unknown": why there are no static ones}; a word's vector is the
    mean of its tokens'.
    """
    check_occurs(insides, word)
    names: list[str] = []
    vectors: list[list[Tensor]] = []
    places: list[dict[str, Any]] = []
    others: list[list[tuple[str, list[Tensor]]]] = []
    for inside in insides:
        names, states = _states(inside)
        for text, rows in occurrences(inside, word):
            vectors.append([state[rows].mean(0) for state in states])
            spans = [inside.encoded.offsets[row] for row in rows]
            places.append({"text": text, "start": spans[0][0], "stop": spans[-1][1]})
            others.append(_others(inside, states, rows))
    layers = [F.normalize(torch.stack(each), dim=-1) for each in zip(*vectors, strict=True)]
    return {
        "places": places,
        "layers": [each @ each.T for each in layers],
        "names": names,
        "neighbours": [_nearest(mine, around) for mine, around in zip(vectors, others, strict=True)],
        **_static(insides[0].loaded, word),
    }


def _states(inside: Inspection) -> tuple[list[str], list[Tensor]]:
    """The rows of the text's tokens as they are embedded and after each layer, and what these are called."""
    model = inside.loaded.model
    part = next((name for name in ("encoder", "decoder") if getattr(model, name) is not None), None)
    if part is not None:
        states = inside.hidden_states(part)
        return ["in the embedding", *(f"after block {layer}" for layer in range(len(states) - 1))], states
    with torch.no_grad():
        table = model.embedding(inside.source)
        if isinstance(model, RecurrentWriter):
            return ["in the embedding", "after the net"], [table, model.reading(table, inside.source.bounds)]
    if not isinstance(model, Classic) or model.over is None:
        return ["in the embedding"], [table]
    return ["in the embedding", "after the net"], [table, inside.last_hidden_state]


def _static(loaded: Loaded, word: str) -> dict[str, Any]:
    try:
        return {"static": neighbours(loaded, word), "unknown": ""}
    except HeedfulError as error:
        return {"static": [], "unknown": str(error)}


def _others(inside: Inspection, states: list[Tensor], rows: list[int]) -> list[tuple[str, list[Tensor]]]:
    side = inside.sides["source"]
    rest = [place for place in range(len(side)) if place not in rows and not side[place]["special"]]
    return [(str(side[place]["text"]), [state[place] for state in states]) for place in rest]


def _nearest(mine: list[Tensor], around: list[tuple[str, list[Tensor]]]) -> list[dict[str, Any]]:
    """The words of the same text that are nearest to it after the last layer."""
    if not around:
        return []
    names, vectors = zip(*around, strict=True)
    last = torch.stack([each[-1] for each in vectors])
    cosines = F.cosine_similarity(last, mine[-1][None])
    best = cosines.topk(min(NEIGHBOURS, len(names)))
    return [
        {"text": names[place], "cosine": value}
        for place, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


# -- static vectors ---------------------------------------------------------------------------------------------


def static_vector(loaded: Loaded, word: str) -> tuple[Float[Tensor, " width"], list[int]]:
    """The mean of the embedding table's rows of a word's tokens, and these tokens' ids."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise HeedfulError(f"{loaded.source} has no tokenizer: put its tokenizer.json beside config.json")
    encoded = tokenizer.encode(word)
    ids = [id for id, special in zip(encoded.ids, encoded.special, strict=True) if not special]
    if not ids:
        raise HeedfulError(f'"{word}" has no tokens: give a word')
    if tokenizer.special.unknown in ids:
        raise HeedfulError(f'"{word}" is not in the vocabulary, so it has no vector of its own: give another word')
    loaded.settle()
    return loaded.model.embedding.tokens.weight[ids].detach().float().mean(0), ids


def neighbours(loaded: Loaded, word: str, count: int = NEIGHBOURS) -> list[dict[str, Any]]:
    """The tokens whose static vectors point most nearly the same way."""
    vector, ids = static_vector(loaded, word)
    return _closest(loaded, vector, set(ids), count)


def analogy(loaded: Loaded, a: str, b: str, c: str, count: int = NEIGHBOURS) -> list[dict[str, Any]]:
    """a is to b as c is to what? The tokens nearest to b - a + c, of unit vectors (Mikolov et al. 2013)."""
    parts = [static_vector(loaded, word) for word in (a, b, c)]
    one, two, three = (F.normalize(vector, dim=-1) for vector, _ in parts)
    return _closest(loaded, two - one + three, {id for _, ids in parts for id in ids}, count)


def _closest(loaded: Loaded, vector: Tensor, without: set[int], count: int) -> list[dict[str, Any]]:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    loaded.settle()
    table = loaded.model.embedding.tokens.weight.detach().float()[: tokenizer.size]
    cosines = F.cosine_similarity(table, vector[None])
    special = tokenizer.special
    left_out = without | {special.first, special.separator, special.pad, special.mask, special.unknown}
    cosines[[id for id in left_out if id is not None and id < len(cosines)]] = -2.0
    found: list[dict[str, Any]] = []
    for id in cosines.argsort(descending=True).tolist():
        if len(found) == count:
            break
        try:
            found.append({"text": readable_token(id, tokenizer), "cosine": float(cosines[id])})
        except HeedfulError:
            continue
    return found
