"""Word vectors: one word in several texts, layer by layer; nearest neighbours of static vectors; analogies.

The page asks for them through `page_api.py`; `heedful look --analogy` prints analogies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError, ModelError, RequestError
from heedful.look.inspection import Inspection, readable_token
from heedful.model.classic import ClassicModel, SelfAttentionMean
from heedful.model.recurrent_seq2seq import RecurrentSeq2SeqModel

NEIGHBOURS = 10  # how many neighbours are listed


class Neighbour(TypedDict):
    """A word and its cosine similarity."""

    text: str
    cosine: float


class Occurrence(TypedDict):
    """An occurrence of a word in a text."""

    text: str
    start: int  # offset of the first character
    stop: int  # offset after the last character


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContextualSimilarity:
    """Cosine similarities of all occurrences of a word. A word's vector is the mean of its tokens' vectors."""

    occurrences: list[Occurrence]
    layers: list[Float[Tensor, "occurrences occurrences"]]  # similarities before the first layer and after each
    layer_names: list[str]  # names of `layers`
    neighbours: list[list[Neighbour]]  # for each occurrence the nearest tokens of its text after the last layer
    static_neighbours: list[Neighbour]  # nearest tokens in the embedding table
    static_error: str  # why the word has no static vector, or "" if it has one


def find_occurrences(inspection: Inspection, word: str) -> list[tuple[str, list[int]]]:
    """Return the text and the token positions of each occurrence of a word, ignoring case.

    Raises:
        RequestError: If the word is empty.
    """
    if not word.strip():
        raise RequestError("the word is empty: give one that occurs in the texts")
    pattern = re.compile(rf"(?<!\w){re.escape(word.strip())}(?!\w)", re.IGNORECASE)
    encoded, occurrences = inspection.encoded, []
    for segment, text in enumerate((inspection.item,) if isinstance(inspection.item, str) else inspection.item):
        for match in pattern.finditer(text):
            positions = [
                position
                for position, (start, stop) in enumerate(encoded.offsets)
                if encoded.segments[position] == segment and start < match.end() and stop > match.start()
            ]
            if positions:
                occurrences.append((text, positions))
    return occurrences


def check_occurs(inspections: Sequence[Inspection], word: str) -> None:
    """Raise a RequestError if a word occurs in none of the texts."""
    if not any(find_occurrences(inspection, word) for inspection in inspections):
        raise RequestError(f'"{word}" occurs in none of the texts: give texts that contain it')


def contextual_similarity(inspections: Sequence[Inspection], word: str) -> ContextualSimilarity:
    """Compare the hidden states of all occurrences of a word, layer by layer.

    Args:
        inspections: Texts in one model.
        word: The word.

    Raises:
        RequestError: If the word occurs in none of the texts.
    """
    check_occurs(inspections, word)
    layer_names: list[str] = []
    vectors: list[list[Tensor]] = []  # by occurrence and layer
    occurrences: list[Occurrence] = []
    other_tokens: list[list[tuple[str, Tensor]]] = []  # for each occurrence, see `_other_tokens`
    for inspection in inspections:
        layer_names, states = _layer_states(inspection)
        for text, positions in find_occurrences(inspection, word):
            vectors.append([state[positions].mean(0) for state in states])
            offsets = [inspection.encoded.offsets[position] for position in positions]
            occurrences.append({"text": text, "start": offsets[0][0], "stop": offsets[-1][1]})
            other_tokens.append(_other_tokens(inspection, states[-1], positions))
    layers = [F.normalize(torch.stack(layer), dim=-1) for layer in zip(*vectors, strict=True)]
    static_neighbours, static_error = list[Neighbour](), ""
    try:
        static_neighbours = nearest_words(inspections[0].loaded, word)
    except HeedfulError as error:
        static_error = str(error)
    return ContextualSimilarity(
        occurrences=occurrences,
        layers=[layer @ layer.T for layer in layers],
        layer_names=layer_names,
        neighbours=[_nearest(by_layer[-1], tokens) for by_layer, tokens in zip(vectors, other_tokens, strict=True)],
        static_neighbours=static_neighbours,
        static_error=static_error,
    )


def _layer_states(inspection: Inspection) -> tuple[list[str], list[Float[Tensor, "tokens width"]]]:
    """Return names and values of the token embeddings and of the hidden states after each layer."""
    model = inspection.loaded.model
    stack = next((name for name in ("encoder", "decoder") if getattr(model, name) is not None), None)
    if stack is not None:
        states = inspection.hidden_states(stack)
        return ["in the embeddings", *(f"after layer {layer}" for layer in range(len(states) - 1))], states
    with torch.no_grad():
        embeddings = model.embedding(inspection.source)
        if isinstance(model, RecurrentSeq2SeqModel):
            states = [embeddings, model.reading(embeddings, inspection.source.bounds)]
            return ["in the embeddings", "after the recurrent network"], states
    if not isinstance(model, ClassicModel) or model.over is None:
        return ["in the embeddings"], [embeddings]
    layer = "self-attention" if isinstance(model.over, SelfAttentionMean) else "the recurrent network"
    return ["in the embeddings", f"after {layer}"], [embeddings, inspection.last_hidden_state]


def _other_tokens(
    inspection: Inspection, states: Float[Tensor, "tokens width"], positions: list[int]
) -> list[tuple[str, Tensor]]:
    """Return names and states of the tokens that are neither special nor at `positions`."""
    tokens = enumerate(inspection.sides["source"])
    return [
        (token["text"], states[position])
        for position, token in tokens
        if position not in positions and not token["special"]
    ]


def _nearest(vector: Tensor, tokens: list[tuple[str, Tensor]]) -> list[Neighbour]:
    """Return the tokens whose vectors are most similar to a vector, the most similar first.

    Args:
        vector: The vector.
        tokens: Names and vectors of tokens.
    """
    if not tokens:
        return []
    names, vectors = zip(*tokens, strict=True)
    cosines = F.cosine_similarity(torch.stack(vectors), vector[None])
    top = cosines.topk(min(NEIGHBOURS, len(names)))
    ranked = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [{"text": names[position], "cosine": cosine} for position, cosine in ranked]


# -- static vectors ---------------------------------------------------------------------------------------------


def static_vector(loaded: ModelBundle, word: str) -> tuple[Float[Tensor, " width"], list[int]]:
    """Return the mean embedding of a word's tokens, from the embedding table, and the ids of these tokens.

    Raises:
        ModelError: If the model has no tokenizer.
        RequestError: If the word is empty or not in the vocabulary.
    """
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ModelError(f"{loaded.source} has no tokenizer: put its tokenizer.json beside config.json")
    encoded = tokenizer.encode(word)  # a byte-level vocabulary has another token for a word after a space
    ids = [id for id, is_special in zip(encoded.ids, encoded.special, strict=True) if not is_special]
    if not ids:
        raise RequestError(f'"{word}" has no tokens: give a word with letters')
    if tokenizer.special.unknown in ids:
        raise RequestError(f'"{word}" is not in the vocabulary, so it has no vector of its own: give another word')
    loaded.flush()  # lazy updates of the table may be pending in training
    return loaded.model.embedding.tokens.weight[ids].detach().float().mean(0), ids


def nearest_words(loaded: ModelBundle, word: str, count: int = NEIGHBOURS) -> list[Neighbour]:
    """Return the tokens whose static vectors are most similar to that of a word."""
    vector, ids = static_vector(loaded, word)
    return nearest_tokens(loaded, vector, set(ids), count)


def analogy(loaded: ModelBundle, a: str, b: str, c: str, count: int = NEIGHBOURS) -> list[Neighbour]:
    """Return the tokens d for which a is to b as c is to d: the tokens nearest to b - a + c (Mikolov et al. 2013).

    a, b and c are unit vectors. The tokens of the three words are left out.

    Raises:
        RequestError: If a word has no static vector.
    """
    words = [static_vector(loaded, word) for word in (a, b, c)]
    unit_a, unit_b, unit_c = (F.normalize(vector, dim=-1) for vector, _ in words)
    return nearest_tokens(loaded, unit_b - unit_a + unit_c, {id for _, ids in words for id in ids}, count)


def nearest_tokens(loaded: ModelBundle, vector: Tensor, exclude: set[int], count: int) -> list[Neighbour]:
    """Return the tokens whose static vectors are most similar to a vector, without special tokens.

    Args:
        loaded: The model, with a tokenizer.
        vector: The vector.
        exclude: Ids of further tokens to leave out.
        count: Maximum number of tokens.
    """
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    loaded.flush()
    table = loaded.model.embedding.tokens.weight.detach().float()[: tokenizer.size]
    cosines = table @ F.normalize(vector, dim=-1) / table.norm(dim=-1).clamp(min=1e-8)
    special = tokenizer.special
    left_out = exclude | {special.bos_or_cls, special.eos_or_sep, special.pad, special.mask, special.unknown}
    cosines[[id for id in left_out if id is not None and id < len(cosines)]] = -2.0
    tokens: list[Neighbour] = []
    for id in cosines.argsort(descending=True).tolist():
        if len(tokens) == count:
            break
        try:
            tokens.append({"text": readable_token(id, tokenizer), "cosine": float(cosines[id])})
        except HeedfulError:  # an id without a name
            continue
    return tokens
