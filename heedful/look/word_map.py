"""Static word vectors in a plane, by PCA or UMAP; words and an analogy that a page shows first.

The page asks for `word_map` and `suggest_words` through `page_api.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError, RequestError
from heedful.look.inspection import Inspection
from heedful.look.word_vectors import find_occurrences, nearest_words, static_vector

MAX_WORDS = 120  # maximum words in a plane
SUGGESTED_WORDS = 10  # maximum words of a text that are suggested
SUGGESTED_NEIGHBOURS = 3  # maximum neighbours that are suggested with each word
ANALOGIES = (  # a, b and c of "a is to b as c is to d"
    ("man", "king", "woman"),
    ("good", "better", "bad"),
    ("day", "days", "year"),
    ("france", "paris", "germany"),
    ("France", "Paris", "Germany"),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WordMap:
    """Words in a plane. Words with similar vectors are near each other; the axes themselves have no meaning."""

    words: list[str]
    points: Float[Tensor, "words 2"]
    variance: tuple[float, float] | None  # share of the variance along each axis of PCA; None for UMAP
    unknown: list[str]  # words without a vector


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """Words that a page shows before the user enters any. All have static vectors; fields may be empty."""

    word: str  # the longest word of the text, to be followed through several texts
    analogy: tuple[str, ...]  # a, b and c of "a is to b as c is to d"
    words: list[str]  # words of the text, each followed by its nearest neighbours
    own: list[str]  # the words of the text among `words`


def map_methods() -> list[str]:
    """Return the names of the available methods: "umap" only if umap-learn is installed."""
    return ["pca", "umap"] if find_spec("umap") else ["pca"]


def word_map(loaded: ModelBundle, words: Sequence[str], method: str = "pca") -> WordMap:
    """Project the static vectors of words, as unit vectors, to a plane.

    Args:
        loaded: The model.
        words: At least three words that have vectors, and at most `MAX_WORDS`.
        method: "pca", or "umap" (McInnes et al. 2018).

    Raises:
        RequestError: If there are too many or too few words, or the method is not available.
    """
    unique = list(dict.fromkeys(word for word in words if word.strip()))
    if len(unique) > MAX_WORDS:
        raise RequestError(f"{len(unique)} words were given: give at most {MAX_WORDS}")
    if method not in map_methods():
        known = " or ".join(map_methods())
        hint = "; pip install umap-learn for umap" if method == "umap" else ""
        raise RequestError(f'the method "{method[:40]}" is not available: use {known}{hint}')
    vectors, known_words, unknown = [], [], []
    for word in unique:
        try:
            vector, _ = static_vector(loaded, word)
        except RequestError:
            unknown.append(word)
        else:
            vectors.append(F.normalize(vector, dim=-1))
            known_words.append(word)
    if len(vectors) < 3:
        raise RequestError(
            f"{len(vectors)} of these words have a vector in this model: give at least three that have one"
        )
    rows = torch.stack(vectors)
    points, variance = principal_components(rows) if method == "pca" else (_umap(rows), None)
    return WordMap(words=known_words, points=points, variance=variance, unknown=unknown)


def principal_components(
    rows: Float[Tensor, "rows width"],
) -> tuple[Float[Tensor, "rows 2"], tuple[float, float]]:
    """Project rows to their first two principal components.

    Signs are chosen so that the coordinate of largest magnitude on each axis is positive.

    Returns:
        The coordinates, and the share of the variance along each axis.
    """
    centred = rows.double() - rows.double().mean(0)
    left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
    points = left[:, :2] * singular[:2]
    points = points * points.gather(0, points.abs().argmax(0, keepdim=True)).sign()
    points = F.pad(points, (0, 2 - points.shape[1]))
    shares = F.pad(singular.square() / singular.square().sum().clamp(min=1e-30), (0, 2))
    return points.float(), (float(shares[0]), float(shares[1]))


def _umap(rows: Float[Tensor, "rows width"]) -> Float[Tensor, "rows 2"]:
    neighbours = min(15, len(rows) - 1)
    init = "spectral" if len(rows) > 4 else "random"  # the spectral initialisation needs more rows than dimensions
    reducer = import_module("umap").UMAP(n_neighbors=neighbours, metric="cosine", init=init, random_state=0, n_jobs=1)
    return torch.as_tensor(reducer.fit_transform(rows.numpy())).float()


def suggest_words(inspection: Inspection) -> Suggestion:
    """Return words of a text with their neighbours, and an analogy; words that are one token come before others."""
    loaded = inspection.loaded
    known_words = list(_known_words(inspection))
    candidates = [word for word in known_words if _is_single_token(loaded, word)] or known_words
    longest_first = sorted(candidates, key=len, reverse=True)
    own = [word for word in candidates if word in longest_first[:SUGGESTED_WORDS]]
    words: list[str] = []
    for word in own:
        nearest = [token["text"] for token in nearest_words(loaded, word, 3 * SUGGESTED_NEIGHBOURS)]
        neighbours = [text for text in nearest if _is_single_token(loaded, text)]
        words += [word, *neighbours[:SUGGESTED_NEIGHBOURS]]
    return Suggestion(
        word=next((word for word in longest_first if find_occurrences(inspection, word)), ""),
        analogy=_suggest_analogy(loaded, longest_first),
        words=list(dict.fromkeys(words)),
        own=own,
    )


def _suggest_analogy(loaded: ModelBundle, text_words: Sequence[str]) -> tuple[str, ...]:
    """Return the first of `ANALOGIES` whose words are tokens, or else the first three words of the text."""
    for words in ANALOGIES:
        if all(_is_single_token(loaded, word) for word in words):
            return words
    return tuple(text_words[:3]) if len(text_words) >= 3 else ()


def _known_words(inspection: Inspection) -> Iterator[str]:
    """Yield the words of a text that have a static vector, each once, without punctuation."""
    texts = [inspection.item] if isinstance(inspection.item, str) else inspection.item
    tokens = [token for token in inspection.sides["source"] if token["segment"] is not None]
    seen: set[tuple[int, ...]] = set()
    for position, token in enumerate(tokens):
        if token["continues"]:
            continue
        last = position  # the last token of the word
        while last + 1 < len(tokens) and tokens[last + 1]["continues"]:
            last += 1
        word = texts[token["segment"] or 0][token["start"] : tokens[last]["stop"]].strip()
        if not word.isalpha() or not _has_vector(inspection.loaded, word):
            continue
        _, ids = static_vector(inspection.loaded, word)
        if tuple(ids) not in seen:  # "The" and "the" may have the same ids
            seen.add(tuple(ids))
            yield word


def _has_vector(loaded: ModelBundle, word: str) -> bool:
    """Return whether a word has a static vector."""
    try:
        static_vector(loaded, word)
    except HeedfulError:
        return False
    return True


def _is_single_token(loaded: ModelBundle, text: str) -> bool:
    """Return whether a text is one token of letters, so that its vector is not a mean."""
    if not text.isalpha() or not _has_vector(loaded, text):
        return False
    return len(static_vector(loaded, text)[1]) == 1
