"""Patterns of attention heads: the share of a head's attention that follows a pattern, compared with chance.

The patterns are those of Vig 2019 ("Deconstructing BERT"): the next and the previous word, identical or related words
in the same and in the other sentence, words that predict a word, delimiters; and broad attention, a bag of words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from math import log, sqrt
from typing import NotRequired, TypedDict

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.errors import RequestError
from heedful.look.inspection import Inspection, TokenRecord, View, encode_item, readable_token
from heedful.nn.layout import allowed_pairs, relative_distances

PATTERNS = {
    "next": "the token that follows",
    "previous": "the token before",
    "same": "the same or a related word, in the same sentence",
    "other": "the same or a related word, in the other sentence",
    "predictive": "words that predict the word",
    "delimiters": "[CLS], [SEP] and punctuation",
    "itself": "the token itself",
    "broad": "many tokens alike, as a bag of words",
}
ONE_TEXT_PATTERNS = ("previous", "next", "same", "other", "delimiters")  # patterns that `telling_heads` recognises
MIN_ROWS = 4  # minimum words of one text for which the pattern points at a key
MAX_COMPARED_TOKENS = 1024  # tokens of a text up to which its words are compared with each other
PUNCTUATION = frozenset(".,;:!?。、…")
MIN_LIFT = 0.3  # minimum lift of a pattern that names a head
MIN_Z = 5.0  # minimum distance from chance of a pattern that names a head, in standard deviations
MIN_BROAD_LIFT = 0.3  # minimum lift of the entropy of a head that is called broad
MIN_COSINE = 0.6  # minimum cosine of the static vectors of two related tokens
MIN_RATIO = 10.83  # minimum log-likelihood ratio of two words that predict each other: p < 0.001 (Dunning 1993)
MAX_PAIRED_WORDS = 256  # words of a text that are paired with each other, the first ones in alphabetical order
MAX_TEXTS = 400
TOKEN_BUCKETS = 512  # buckets of tokens, by id modulo TOKEN_BUCKETS; standard deviations are summed within a bucket

WordPairs = dict[tuple[str, str], float]  # log-likelihood ratios of pairs of words; each pair is in alphabetical order


class PatternRecord(TypedDict):
    """A `PatternScore` as plain data."""

    score: float
    chance: float
    lift: float
    z: float
    rows: int


class HeadRecord(TypedDict):
    """A head as plain data. It has an importance and an effect if the model has a loss on the data."""

    part: str
    layer: int
    head: int
    name: str
    patterns: dict[str, PatternRecord]
    importance: NotRequired[float]  # see `HeadImportance` in head_report.py
    effect: NotRequired[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PatternScore:
    """The score of one pattern in one head."""

    score: float  # share of attention that follows the pattern
    chance: float  # share of attention that follows the pattern by chance
    z: float  # distance of the score from chance, in standard deviations
    rows: int  # count of rows for which the pattern points at a key

    @property
    def lift(self) -> float:
        """Score relative to chance: 0 for a score equal to chance, 1 if all attention follows the pattern."""
        return (self.score - self.chance) / (1 - self.chance) if self.chance < 1 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPatterns:
    """One head, the scores of all patterns, and the name of the strongest one."""

    part: str
    layer: int
    head: int
    name: str  # one of PATTERNS, or "mixed"
    patterns: Mapping[str, PatternScore]

    def to_dict(self) -> HeadRecord:
        """Return plain data."""
        patterns: dict[str, PatternRecord] = {
            name: {"score": score.score, "chance": score.chance, "lift": score.lift, "z": score.z, "rows": score.rows}
            for name, score in self.patterns.items()
        }
        return {"part": self.part, "layer": self.layer, "head": self.head, "name": self.name, "patterns": patterns}


@dataclass(eq=False)
class _Sums:
    """Sums of one pattern over the rows of all texts so far, for each layer and head."""

    mass: Float[Tensor, "layers heads"]  # attention that follows the pattern
    chance: Float[Tensor, "layers heads"]  # attention that follows the pattern by chance
    deviation: Float[Tensor, "buckets layers heads"]  # standard deviations of chance, by bucket of tokens
    rows: int = 0


PatternSums = dict[tuple[str, str], _Sums]  # by part and pattern


def find_head_patterns(
    loaded: ModelBundle, texts: Iterable[str | tuple[str, str]], *, max_texts: int = MAX_TEXTS, related: bool = True
) -> list[HeadPatterns]:
    """Score all patterns in every self-attention head.

    A row's score is the sum of its weights w_j over the keys j that the pattern points at; a head's score is the mean
    over rows. Chance is the expected score if the weights of a row are shuffled over its m visible keys: s keys then
    have the share s/m, with variance s (m - s) / (m - 1) var(w). z is the distance from chance in standard deviations
    of the mean. For rows with the same token, deviations are added instead of their squares, since a head treats equal
    tokens alike. The score of "broad" is entropy / log m; its chance is that of a random distribution over m keys,
    uniform on the simplex.

    Args:
        loaded: The model.
        texts: Texts or pairs; empty and too long ones are skipped.
        max_texts: Maximum number of texts to read.
        related: Whether tokens with similar static vectors are treated as related.

    Raises:
        RequestError: If there are no texts, or all are empty or too long.
    """
    first_texts = list(islice(texts, max_texts))
    items = [first_texts[index] for index in readable_indices(loaded, first_texts)]
    vectors = _static_unit_vectors(loaded) if related else None
    sums: PatternSums = {}
    pairs = _predictive_pairs(_word_sets(loaded, items))
    for item in items:
        inspection = Inspection(loaded, item)
        for view in inspection.views:
            if view.part in ("encoder", "decoder"):
                _add_text(inspection, view.part, sums, vectors, pairs)
    return _named_heads(sums)


def readable_indices(loaded: ModelBundle, texts: Sequence[str | tuple[str, str]]) -> list[int]:
    """Return the indices of texts that are neither empty nor too long for the model.

    Raises:
        RequestError: If no text can be read.
    """
    if not texts:
        raise RequestError("no texts were given: patterns are found over texts")
    indices = [index for index, text in enumerate(texts) if not encode_item(loaded, text)[1]]
    if not indices:
        raise RequestError(f"none of the {len(texts)} texts fits the model: give texts it can read at once")
    return indices


def _add_text(
    inspection: Inspection,
    part: str,
    sums: PatternSums,
    vectors: Float[Tensor, "tokens width"] | None,
    pairs: WordPairs,
) -> None:
    """Add the attention in one text to the sums. `find_head_patterns` defines m and s.

    Args:
        inspection: The model and the text.
        part: "encoder" or "decoder".
        sums: The sums so far.
        vectors: Unit vectors of all tokens of the vocabulary, to find related tokens. If None, they are not compared.
        pairs: Words that predict each other.
    """
    view = inspection.view(part)
    tokens = inspection.sides[view.rows]
    weights = torch.stack([inspection.weights(part, layer) for layer in range(view.layers)]).double()
    visible = torch.stack([_visible_keys(inspection, part, layer) for layer in range(view.layers)])[:, None]
    is_word = torch.tensor([not token["special"] for token in tokens])
    buckets = torch.tensor([token["id"] for token in tokens]) % TOKEN_BUCKETS
    m = visible.sum(-1).double()  # [layers, 1, n]
    variance = ((weights - (1 / m)[..., None]) ** 2 * visible).sum(-1) / m
    for name, points_at in pattern_targets(tokens, vectors, pairs).items():
        targets = points_at & visible
        s = targets.sum(-1).double()
        rows = (s > 0) & is_word & (m > s)
        mass = (weights * targets).sum(-1)
        deviation = (s * (m - s) / (m - 1).clamp(min=1) * variance).sqrt()
        _add_rows(sums, part, name, mass, s / m, deviation, rows, buckets)
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1) / m.log().clamp(min=1e-9)
    harmonic = torch.cat([torch.zeros(1), (1 / torch.arange(1, len(tokens) + 1)).cumsum(0)]).double()
    chance = (harmonic[m.long()] - 1) / m.log().clamp(min=1e-9)  # the expected entropy on the simplex is H_m - 1
    _add_rows(sums, part, "broad", entropy, chance, torch.zeros_like(entropy), (m > 3) & is_word, buckets)


def _visible_keys(inspection: Inspection, part: str, layer: int) -> Bool[Tensor, "n n"]:
    """Return for each row the keys that it may attend to."""
    q, *_, arguments = inspection.trace.calls[part, layer]
    return allowed_pairs(relative_distances(len(q), len(q)), arguments)


def _add_rows(
    sums: PatternSums,
    part: str,
    name: str,
    mass: Float[Tensor, "layers heads n"],
    chance: Float[Tensor, "layers 1 n"],
    deviation: Float[Tensor, "layers heads n"],
    rows: Bool[Tensor, "layers 1 n"],
    buckets: Tensor,
) -> None:
    """Add the rows of one text to the sums of one pattern.

    Args:
        sums: The sums so far, by part and pattern.
        part: "encoder" or "decoder".
        name: Name of the pattern.
        mass: Attention that follows the pattern.
        chance: Attention that follows the pattern by chance.
        deviation: Standard deviation of the attention that follows the pattern by chance.
        rows: Rows to add.
        buckets: Bucket of the token in each row, [n].
    """
    rows = rows.expand_as(chance)
    shape = mass.shape[:2]
    pattern_sums = sums.get((part, name))
    if pattern_sums is None:
        mass_sum, chance_sum = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        deviation_sum = torch.zeros(TOKEN_BUCKETS, *shape, dtype=torch.float64)
        pattern_sums = sums[part, name] = _Sums(mass_sum, chance_sum, deviation_sum)
    pattern_sums.mass += (mass * rows).sum(-1)
    pattern_sums.chance += (chance * rows).sum(-1).expand(shape)
    pattern_sums.deviation.index_add_(0, buckets, (deviation * rows).permute(2, 0, 1))
    pattern_sums.rows += int(rows[0].sum())


def _named_heads(sums: PatternSums) -> list[HeadPatterns]:
    """Return scores and name of each head, in the order of parts, layers and heads."""
    heads = []
    for part in dict.fromkeys(part for part, _ in sums):
        part_sums = {name: value for (sums_part, name), value in sums.items() if sums_part == part}
        layers, count = next(iter(part_sums.values())).mass.shape
        for layer, head in product(range(layers), range(count)):
            patterns = {name: _pattern_score(value, layer, head) for name, value in part_sums.items() if value.rows}
            name = _strongest_name(patterns)
            heads.append(HeadPatterns(part=part, layer=layer, head=head, name=name, patterns=patterns))
    return heads


def _pattern_score(sums: _Sums, layer: int, head: int) -> PatternScore:
    """Return the score of a pattern in one head, the mean over all rows."""
    mass, chance = float(sums.mass[layer, head]), float(sums.chance[layer, head])
    deviation = sqrt(float((sums.deviation[:, layer, head] ** 2).sum()))
    z = (mass - chance) / deviation if deviation > 1e-12 else 0.0
    return PatternScore(score=mass / sums.rows, chance=chance / sums.rows, z=z, rows=sums.rows)


def _strongest_name(patterns: Mapping[str, PatternScore]) -> str:
    """Return the name of the pattern with the largest lift among the significant ones; else "broad" or "mixed"."""
    lifts = {
        name: pattern.lift
        for name, pattern in patterns.items()
        if name != "broad" and pattern.z >= MIN_Z and pattern.lift >= MIN_LIFT
    }
    if lifts:
        return max(lifts, key=lifts.__getitem__)
    return "broad" if "broad" in patterns and patterns["broad"].lift >= MIN_BROAD_LIFT else "mixed"


# -- one text --------------------------------------------------------------------------------------------------------


class NamedHead(TypedDict):
    """A head that follows a pattern in one text."""

    part: str
    layer: int
    head: int
    name: str  # one of ONE_TEXT_PATTERNS
    share: float  # share of its attention that follows the pattern, the mean over words
    chance: float  # share of attention that follows the pattern by chance


def telling_heads(inspection: Inspection) -> list[NamedHead]:
    """Return the heads that follow a pattern in this text, sorted by lift, largest first.

    A pattern is one of `ONE_TEXT_PATTERNS`. A head follows it if its lift is `MIN_LIFT` or more over at least
    `MIN_ROWS` words. Delimiters come last, since many heads attend to them by default.
    """
    heads: list[NamedHead] = []
    for view in inspection.views:
        if view.part not in ("encoder", "decoder"):
            continue
        tokens = inspection.sides[view.rows]
        all_targets = pattern_targets(tokens) if len(tokens) <= MAX_COMPARED_TOKENS else _neighbour_targets(len(tokens))
        targets = {name: all_targets[name] for name in ONE_TEXT_PATTERNS if name in all_targets}
        for layer in range(view.layers):
            heads += _telling_heads_of_layer(inspection, view, layer, targets)

    def order(head: NamedHead) -> float:
        return float(head["name"] == "delimiters") - _lift(head["share"], head["chance"])

    return sorted(heads, key=order)


def _telling_heads_of_layer(
    inspection: Inspection, view: View, layer: int, targets: Mapping[str, Bool[Tensor, "n n"]]
) -> Iterator[NamedHead]:
    """Yield the heads of a layer that follow one of the patterns. `find_head_patterns` defines m and s."""
    is_word = torch.tensor([not token["special"] for token in inspection.sides[view.rows]])
    weights = inspection.weights(view.part, layer)
    visible = _visible_keys(inspection, view.part, layer)
    m = visible.sum(-1).float()
    for name, points_at in targets.items():
        visible_targets = points_at & visible
        s = visible_targets.sum(-1).float()
        rows = (s > 0) & is_word & (m > s)
        if int(rows.sum()) < MIN_ROWS:
            continue
        chance = float((s / m)[rows].mean())
        share_of_rows = torch.einsum("hij,ij->hi", weights, visible_targets.to(weights.dtype))
        for head, share in enumerate(share_of_rows[:, rows].mean(-1).tolist()):
            if _lift(share, chance) >= MIN_LIFT:
                yield NamedHead(part=view.part, layer=layer, head=head, name=name, share=share, chance=chance)


def _lift(share: float, chance: float) -> float:
    """Return a share relative to chance, as `PatternScore.lift`."""
    return (share - chance) / (1 - chance)


def _neighbour_targets(n: int) -> dict[str, Bool[Tensor, "n n"]]:
    """Return the targets of the next and of the previous token, which need no comparison of words."""
    positions = torch.arange(n)
    gap = positions[None, :] - positions[:, None]
    return {"next": gap == 1, "previous": gap == -1}


# -- targets of the patterns -----------------------------------------------------------------------------------------


def pattern_targets(
    tokens: Sequence[TokenRecord],
    vectors: Float[Tensor, "tokens width"] | None = None,
    pairs: WordPairs | None = None,
) -> dict[str, Bool[Tensor, "n n"]]:
    """Return for each pattern which keys it points at from each row, [rows, keys].

    Args:
        tokens: The tokens of a text.
        vectors: Unit vectors of all tokens of the vocabulary, to find related tokens. If None, they are not compared.
        pairs: Words that predict each other. If None, the pattern "predictive" is left out.
    """
    n = len(tokens)
    positions = torch.arange(n)
    gap = positions[None, :] - positions[:, None]
    special = torch.tensor([token["special"] for token in tokens])
    segment = torch.tensor([-1 if token["segment"] is None else token["segment"] for token in tokens])
    words = [_bare_word(token["text"]) for token in tokens]
    delimiters = special | torch.tensor([set(word) <= PUNCTUATION for word in words])
    same_word = _related_tokens(tokens, vectors) & ~delimiters[:, None] & ~delimiters[None, :] & (gap != 0)
    same_segment = segment[:, None] == segment[None, :]
    targets = {
        "next": gap == 1,
        "previous": gap == -1,
        "same": same_word & same_segment,
        "other": same_word & ~same_segment,
        "delimiters": delimiters.expand(n, n) & (gap != 0),
        "itself": gap == 0,
    }
    if pairs:
        is_pair = [[pairs.get(_word_pair(a, b), 0.0) >= MIN_RATIO for b in words] for a in words]
        targets["predictive"] = torch.tensor(is_pair).view(n, n) & (gap.abs() > 1) & ~same_word
    return targets


def _related_tokens(tokens: Sequence[TokenRecord], vectors: Tensor | None) -> Bool[Tensor, "n n"]:
    """Return whether two tokens are the same word ignoring case, share a stem, or have similar static vectors."""
    words = [_bare_word(token["text"]) for token in tokens]
    unique = list(dict.fromkeys(words))  # words are compared once, not once for each token
    index_of = {word: index for index, word in enumerate(unique)}
    indices, n = torch.tensor([index_of[word] for word in words], dtype=torch.long), len(unique)
    is_related = torch.tensor([[a == b or _share_stem(a, b) for b in unique] for a in unique]).view(n, n)
    related = is_related[indices][:, indices]
    if vectors is not None:
        token_vectors = vectors[torch.tensor([token["id"] for token in tokens])]
        related = related | (token_vectors @ token_vectors.T >= MIN_COSINE)
    return related


def _bare_word(name: str) -> str:
    """Return a token's name without the marks of its vocabulary, in lower case.

    >>> _bare_word("##Ing"), _bare_word("▁The"), _bare_word("Ġa")
    ('ing', 'the', 'a')
    """
    return name.removeprefix("##").lstrip("\u2581\u0120").casefold()


def _share_stem(a: str, b: str) -> bool:
    """Return whether two words share a prefix of at least four letters and half of the longer word.

    >>> _share_stem("attends", "attention"), _share_stem("cat", "cats"), _share_stem("sitting", "sings")
    (True, False, False)
    """
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    return common >= 4 and common >= 0.5 * max(len(a), len(b)) and a[:common].isalpha()


def _static_unit_vectors(loaded: ModelBundle) -> Float[Tensor, "tokens width"]:
    """Return the rows of the embedding table as unit vectors, after their mean is subtracted."""
    loaded.flush()
    table = loaded.model.embedding.tokens.weight.detach().float()
    return torch.nn.functional.normalize(table - table.mean(0), dim=-1)


# -- words that predict words -------------------------------------------------------------------------------------


def _word_sets(loaded: ModelBundle, items: Sequence[str | tuple[str, str]]) -> list[set[str]]:
    """Return the words of each text, without punctuation."""
    assert loaded.tokenizer is not None
    sets = []
    for item in items:
        encoded = loaded.tokenizer.encode(item)
        ids = [id for id, is_special in zip(encoded.ids, encoded.special, strict=True) if not is_special]
        words = {_bare_word(readable_token(id, loaded.tokenizer)) for id in ids}
        sets.append({word for word in words if word and not set(word) <= PUNCTUATION})
    return sets


def _predictive_pairs(texts: Sequence[set[str]]) -> WordPairs:
    """Return words that occur together more often than by chance, by log-likelihood ratio (Dunning 1993).

    Words of a single text and words of more than half of the texts are left out.

    Args:
        texts: The words of each text.
    """
    text_counts: Counter[str] = Counter(word for words in texts for word in words)
    pair_counts: Counter[tuple[str, str]] = Counter()
    for words in texts:
        frequent = sorted(word for word in words if 2 <= text_counts[word] <= 0.5 * len(texts))
        pair_counts.update(combinations(frequent[:MAX_PAIRED_WORDS], 2))
    pairs = {}
    for (a, b), k in pair_counts.items():
        if k >= 2 and k * len(texts) > text_counts[a] * text_counts[b]:
            ratio = _log_likelihood_ratio(k, text_counts[a], text_counts[b], len(texts))
            if ratio >= MIN_RATIO:
                pairs[a, b] = ratio
    return pairs


def _log_likelihood_ratio(k: int, a: int, b: int, n: int) -> float:
    """Return 2 sum k log(k n / (row column)) over the four cells of "has word a" against "has word b".

    Args:
        k: Texts that have both words.
        a: Texts that have the first word.
        b: Texts that have the second word.
        n: All texts.
    """
    # count, row total and column total of each cell
    cells = [(k, a, b), (a - k, a, n - b), (b - k, n - a, b), (n - a - b + k, n - a, n - b)]
    return 2 * sum(count * log(count * n / (row * column)) for count, row, column in cells if count)


def _word_pair(a: str, b: str) -> tuple[str, str]:
    """Return two words in alphabetical order."""
    return (a, b) if a < b else (b, a)


# -- summaries -------------------------------------------------------------------------------------------------------


def count_names(heads: Sequence[HeadPatterns]) -> dict[str, int]:
    """Return how many heads have each name, the most frequent name first."""
    return dict(Counter(head.name for head in heads).most_common())


def strongest_heads(heads: Sequence[HeadPatterns]) -> dict[str, HeadPatterns]:
    """Return for each pattern the head with the largest lift, whatever its name."""
    strongest = {}
    for name in PATTERNS:
        if candidates := [head for head in heads if name in head.patterns]:
            strongest[name] = max(candidates, key=lambda head: head.patterns[name].lift)
    return strongest


def name_table(heads: Sequence[HeadPatterns], part: str) -> np.ndarray:
    """Return the names of the heads of one part, [layers, heads]."""
    part_heads = [head for head in heads if head.part == part]
    shape = (1 + max(head.layer for head in part_heads), 1 + max(head.head for head in part_heads))
    return np.array([head.name for head in part_heads]).reshape(shape)
