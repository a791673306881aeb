"""Patterns of heads, found over texts: what share of a head's attention goes where a pattern says, beside chance.

The patterns are those of Vig 2019 ("Deconstructing BERT"): the next and the previous word, identical or related words
in the same and in the other sentence, words that predict the word, delimiters; and broad attention, a bag of words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import log, sqrt
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.checkpoint import Loaded
from heedful.errors import HeedfulError
from heedful.look.inspection import Inspection, encode_item, readable_token
from heedful.nn.layout import allowed, gaps

PATTERNS = {
    "next": "the token that follows",
    "previous": "the token before",
    "same": "the same or a related word, in the same sentence",
    "other": "the same or a related word, in the other sentence",
    "predictive": "words that tell the word",
    "delimiters": "[CLS], [SEP] and punctuation",
    "itself": "the token itself",
    "broad": "many tokens alike, as a bag of words",
}
ENDS = frozenset(".,;:!?。、…")
LIFT = 0.3  # from which on a pattern gives a head its name
Z = 5.0  # and so many deviations from chance
BROAD = 0.3  # lift of the spread, from which on a head without a pattern is called broad
RELATED = 0.6  # cosine of two tokens' static vectors
KEEN = 10.83  # of the log-likelihood ratio of two words: p < 0.001 (Dunning 1993)
TEXTS = 400  # that are read
KINDS = 512  # of tokens that are told apart where deviations are summed


@dataclass(frozen=True, kw_only=True, slots=True)
class PatternScore:
    """One pattern in one head: share of attention, what chance gives, and how far from chance to all."""

    score: float
    chance: float
    z: float  # deviations from chance
    rows: int  # that have something the pattern speaks of

    @property
    def lift(self) -> float:
        """0: as much as by chance; 1: all."""
        return (self.score - self.chance) / (1 - self.chance) if self.chance < 1 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPatterns:
    """One head, its patterns, and the name that the strongest of them gives it."""

    part: str
    layer: int
    head: int
    name: str  # one of PATTERNS, or "mixed"
    patterns: Mapping[str, PatternScore]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        each = {
            name: {"score": found.score, "chance": found.chance, "lift": found.lift, "z": found.z, "rows": found.rows}
            for name, found in self.patterns.items()
        }
        return {"part": self.part, "layer": self.layer, "head": self.head, "name": self.name, "patterns": each}


@dataclass(eq=False)
class _Sums:
    """Over all rows so far, of each layer and head."""

    mass: Tensor
    chance: Tensor
    deviation: Tensor  # of each kind of token
    rows: int = 0


Sums = dict[tuple[str, str], _Sums]  # by part and pattern


def find_head_patterns(
    loaded: Loaded, texts: Iterable[str | tuple[str, str]], *, max_texts: int = TEXTS, related: bool = True
) -> list[HeadPatterns]:
    """Every self-attention head of a model, named by what it does on these texts, of which at most so many are taken.

    What the model does not read at once is passed over, see `readable`.
    score = mean over rows of the sum of weights w_j over the keys j that the pattern points at. Chance shuffles a row's
    weights over the keys it may see: s of m keys then have the share s/m, with the variance
    s (m - s) / (m - 1) var(w); z is the distance in deviations of the mean, where rows of one token count as one
    (their deviations add up), since a head does with a token what it always does. The spread of "broad" is
    entropy / log m, and its chance that of a random distribution over m keys, uniform on the simplex.
    """
    given = list(islice(texts, max_texts))
    items = [given[place] for place in readable_indices(loaded, given)]
    alike = _related(loaded) if related else None
    sums: Sums = {}
    pairs = _keen(_words(loaded, items))
    for item in items:
        inside = Inspection(loaded, item)
        for view in inside.views:
            if view.part in ("encoder", "decoder"):
                _add(inside, view.part, sums, alike, pairs)
    return _named(sums)


def readable_indices(loaded: Loaded, texts: Sequence[str | tuple[str, str]]) -> list[int]:
    """The numbers of those that the model reads at once, neither empty nor too long; without one, a HeedfulError."""
    if not texts:
        raise HeedfulError("no texts were given: patterns are found over texts")
    found = [number for number, text in enumerate(texts) if not encode_item(loaded, text)[1]]
    if not found:
        raise HeedfulError(f"none of the {len(texts)} texts fits the model: give texts it can read at once")
    return found


def _add(inside: Inspection, part: str, sums: Sums, alike: Any, pairs: Any) -> None:
    view = inside.view(part)
    side = inside.sides[view.rows]
    where = pattern_targets(side, alike, pairs)
    weights = torch.stack([inside.weights(part, layer) for layer in range(view.layers)]).double()
    sees = torch.stack([_sees(inside, part, layer, len(side)) for layer in range(view.layers)])[:, None]
    words = torch.tensor([not each["special"] for each in side])
    ids = torch.tensor([int(each["id"]) for each in side]) % KINDS
    counts = sees.sum(-1).double()  # [layers, 1, n]
    mean = 1 / counts
    spread = ((weights - mean[..., None]) ** 2 * sees).sum(-1) / counts
    for name, pointed in where.items():
        aimed = pointed & sees
        s = aimed.sum(-1).double()
        rows = (s > 0) & words & (counts > s)
        mass = (weights * aimed).sum(-1)
        variance = s * (counts - s) / (counts - 1).clamp(min=1) * spread
        _sum(sums, part, name, mass, s / counts, variance.sqrt(), rows, ids)
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1) / counts.log().clamp(min=1e-9)
    harmonic = torch.cat([torch.zeros(1), (1 / torch.arange(1, len(side) + 1)).cumsum(0)]).double()
    chance = (harmonic[counts.long()] - 1) / counts.log().clamp(min=1e-9)
    rows = (counts > 3) & words
    _sum(sums, part, "broad", entropy, chance, torch.zeros_like(entropy), rows, ids)


def _sees(inside: Inspection, part: str, layer: int, n: int) -> Bool[Tensor, "n n"]:
    *_, call = inside.trace.calls[part, layer]
    return allowed(gaps(n, n), call)


def _sum(
    sums: Sums, part: str, name: str, mass: Tensor, chance: Tensor, deviation: Tensor, rows: Tensor, ids: Tensor
) -> None:
    """mass and deviation are [layers, heads, n], chance and rows [layers, 1, n]."""
    rows = rows.expand_as(chance)
    shape = mass.shape[:2]
    held = sums.get((part, name))
    if held is None:
        mine, theirs = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        held = sums[part, name] = _Sums(mine, theirs, torch.zeros(KINDS, *shape, dtype=torch.float64))
    held.mass += (mass * rows).sum(-1)
    held.chance += (chance * rows).sum(-1).expand(shape)
    held.deviation.index_add_(0, ids, (deviation * rows).permute(2, 0, 1))
    held.rows += int(rows[0].sum())


def _named(sums: Sums) -> list[HeadPatterns]:
    found = []
    for part in dict.fromkeys(part for part, _ in sums):
        layers, count = next(held.mass.shape for (each, _), held in sums.items() if each == part)
        for layer in range(layers):
            for head in range(count):
                each = {
                    name: _found(held, layer, head)
                    for (where, name), held in sums.items()
                    if where == part and held.rows
                }
                found.append(HeadPatterns(part=part, layer=layer, head=head, name=_name(each), patterns=each))
    return found


def _found(held: _Sums, layer: int, head: int) -> PatternScore:
    mass, chance = float(held.mass[layer, head]), float(held.chance[layer, head])
    deviation = sqrt(float((held.deviation[:, layer, head] ** 2).sum()))
    z = (mass - chance) / deviation if deviation > 1e-12 else 0.0
    return PatternScore(score=mass / held.rows, chance=chance / held.rows, z=z, rows=held.rows)


def _name(patterns: Mapping[str, PatternScore]) -> str:
    """The pattern with the largest lift that is no chance; else broad, or mixed."""
    sure = {name: each.lift for name, each in patterns.items() if name != "broad" and each.z >= Z and each.lift >= LIFT}
    if sure:
        return max(sure, key=sure.__getitem__)
    return "broad" if "broad" in patterns and patterns["broad"].lift >= BROAD else "mixed"


# -- what the patterns point at -----------------------------------------------------------------------------------


def pattern_targets(
    side: Sequence[Mapping[str, Any]],
    alike: Float[Tensor, "tokens width"] | None = None,
    pairs: Mapping[tuple[str, str], float] | None = None,
) -> dict[str, Bool[Tensor, "n n"]]:
    """For each pattern, which keys it points at from each row."""
    n = len(side)
    place = torch.arange(n)
    gap = place[None, :] - place[:, None]
    special = torch.tensor([bool(each["special"]) for each in side])
    segment = torch.tensor([-1 if each["segment"] is None else int(each["segment"]) for each in side])
    ends = special | torch.tensor([_bare(each["text"]) == "" or set(_bare(each["text"])) <= ENDS for each in side])
    same = _alike(side, alike) & ~ends[:, None] & ~ends[None, :] & (gap != 0)
    near = segment[:, None] == segment[None, :]
    found = {
        "next": gap == 1,
        "previous": gap == -1,
        "same": same & near,
        "other": same & ~near,
        "delimiters": ends.expand(n, n) & (gap != 0),
        "itself": gap == 0,
    }
    if pairs:
        words = [_bare(each["text"]) for each in side]
        keen = torch.tensor([[pairs.get(_pair(a, b), 0.0) >= KEEN for b in words] for a in words]).view(n, n)
        found["predictive"] = keen & (gap.abs() > 1) & ~same
    return found


def _alike(side: Sequence[Mapping[str, Any]], vectors: Tensor | None) -> Bool[Tensor, "n n"]:
    """The same word whatever its case, one with the same stem, or one with a vector that points the same way."""
    words = [_bare(each["text"]) for each in side]
    found = torch.tensor([[a == b or _stem(a, b) for b in words] for a in words]).view(len(side), len(side))
    if vectors is not None:
        rows = vectors[torch.tensor([int(each["id"]) for each in side])]
        found = found | (rows @ rows.T >= RELATED)
    return found


def _bare(name: str) -> str:
    """A token without the marks of its vocabulary and without case.

    >>> _bare("##Ing"), _bare("▁The"), _bare("Ġa")
    ('ing', 'the', 'a')
    """
    return name.removeprefix("##").lstrip("\u2581\u0120").casefold()


def _stem(one: str, other: str) -> bool:
    """Whether both begin alike for four letters and half of the longer one.

    >>> _stem("attends", "attention"), _stem("cat", "cats"), _stem("sitting", "sings")
    (True, False, False)
    """
    common = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return common >= 4 and common >= 0.5 * max(len(one), len(other)) and one[:common].isalpha()


def _related(loaded: Loaded) -> Float[Tensor, "tokens width"]:
    """The unit vectors of the embedding table around their mean."""
    loaded.settle()
    table = loaded.model.embedding.tokens.weight.detach().float()
    return torch.nn.functional.normalize(table - table.mean(0), dim=-1)


# -- words that predict words -------------------------------------------------------------------------------------


def _words(loaded: Loaded, items: Sequence[str | tuple[str, str]]) -> list[set[str]]:
    """The words of each text that are no delimiters."""
    assert loaded.tokenizer is not None
    found = []
    for item in items:
        encoded = loaded.tokenizer.encode(item)
        inner = [id for id, special in zip(encoded.ids, encoded.special, strict=True) if not special]
        names = {_bare(readable_token(id, loaded.tokenizer)) for id in inner}
        found.append({name for name in names if name and not set(name) <= ENDS})
    return found


def _keen(texts: Sequence[set[str]]) -> dict[tuple[str, str], float]:
    """The log-likelihood ratio of two words that stand in one text more often than by chance (Dunning 1993)."""
    alone: Counter[str] = Counter(word for words in texts for word in words)
    both: Counter[tuple[str, str]] = Counter()
    for words in texts:
        often = sorted(word for word in words if 2 <= alone[word] <= 0.5 * len(texts))
        both.update(combinations(often[:256], 2))
    found = {}
    for (a, b), k in both.items():
        if k >= 2 and k * len(texts) > alone[a] * alone[b]:
            found[a, b] = _ratio(k, alone[a], alone[b], len(texts))
    return {pair: value for pair, value in found.items() if value >= KEEN}


def _ratio(k: int, a: int, b: int, n: int) -> float:
    """2 sum k log(k n / (row column)) over the four cells of "has the one" against "has the other"."""
    cells = [(k, a, b), (a - k, a, n - b), (b - k, n - a, b), (n - a - b + k, n - a, n - b)]
    return 2 * sum(seen * log(seen * n / (row * column)) for seen, row, column in cells if seen)


def _pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)


def count_names(found: Sequence[HeadPatterns]) -> dict[str, int]:
    """How many heads have each name, the most frequent one first."""
    names = Counter(head.name for head in found)
    return dict(names.most_common())


def strongest_heads(found: Sequence[HeadPatterns]) -> dict[str, HeadPatterns]:
    """The head in which each pattern is furthest above chance, whatever the head is called."""
    names = [name for name in PATTERNS if any(name in head.patterns for head in found)]
    return {
        name: max((head for head in found if name in head.patterns), key=lambda head: head.patterns[name].lift)
        for name in names
    }


def name_table(found: Sequence[HeadPatterns], part: str) -> np.ndarray:
    """The names as [layers, heads]."""
    mine = [head for head in found if head.part == part]
    shape = (1 + max(head.layer for head in mine), 1 + max(head.head for head in mine))
    return np.array([head.name for head in mine]).reshape(shape)
