"""Scores of entities in tagged sentences, by a scheme that is named in the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

from heedful.data.tag_schemes import OUTSIDE, parse_tag
from heedful.errors import HeedfulError
from heedful.tasks.metrics.base import (
    Ids,
    Result,
    example_name,
    f1_scores,
    ratio,
    require_equal,
    require_examples,
    require_same_length,
)

Scheme = Literal["conlleval", "strict-iob2", "strict-iobes"]
Tags = Sequence[str]

MARKS = {"conlleval": "BIES", "strict-iob2": "BI", "strict-iobes": "BIES"}


class EntitySpan(NamedTuple):
    """The words of one entity."""

    kind: str
    start: int
    stop: int  # the first word after it


def entity_spans(tags: Tags, scheme: Scheme) -> list[EntitySpan]:
    """Return the entities of one sentence.

    * conlleval (the script of CoNLL-2000 and later tasks): a tag continues an entity if it is I-x or E-x right
      after B-x or I-x; any other tag but O begins one. So I-x needs no B-x before it.
    * strict-iob2: B-x and all I-x that follow it; other I-x are nothing.
    * strict-iobes: S-x, or B-x, any number of I-x, and E-x; anything else is nothing.

    >>> entity_spans(["I-PER", "I-PER"], "conlleval"), entity_spans(["I-PER", "I-PER"], "strict-iob2")
    ([EntitySpan(kind='PER', start=0, stop=2)], [])
    """
    spans: list[EntitySpan] = []
    begun: tuple[str, int] | None = None  # the type and the start of the entity that may continue
    lenient, needs_end = scheme == "conlleval", scheme == "strict-iobes"
    for place, tag in enumerate([*tags, OUTSIDE]):
        mark, kind = parse_tag(tag)
        if mark != OUTSIDE and mark not in MARKS[scheme]:
            raise HeedfulError(_unknown(tag, scheme))
        continues = begun is not None and mark in "IE" and kind == begun[0]
        if continues and mark == "I":
            continue
        if begun is not None and (continues or not needs_end):
            spans.append(EntitySpan(*begun, place + continues))
        begun = None
        if continues or mark == OUTSIDE:
            continue
        if mark == "S" or (lenient and mark == "E"):
            spans.append(EntitySpan(kind, place, place + 1))
        elif mark == "B" or lenient:
            begun = kind, place
    return spans


def _unknown(tag: str, scheme: Scheme) -> str:
    known = ", ".join(f"{mark}-type" for mark in MARKS[scheme])
    hint = ""
    if scheme == "strict-iob2" and parse_tag(tag)[0] in "ES":
        hint = ': score with "strict-iobes", or turn both sides into IOB2 with heedful.data.tag_schemes.to_iob2'
    return f'"{tag}" is no tag of {scheme}, which knows {known} and O{hint}'


@dataclass(frozen=True, kw_only=True, slots=True)
class EntityScores:
    """Precision, recall and F1 of entities: correct if its type and all its words are.

    >>> both = [["B-PER", "I-PER"]], [["I-PER", "I-PER"]]
    >>> [EntityScores(scheme=name).update(*both).compute()["f1"] for name in ("conlleval", "strict-iob2")]
    [1.0, 0.0]
    """

    scheme: Scheme
    types: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)  # correct, gold, predicted; never changed
    tokens: int = 0
    right: int = 0  # tokens whose tags are equal
    sentences: int = 0

    def __post_init__(self) -> None:
        if self.scheme not in MARKS:
            raise HeedfulError(f'scheme should be one of {", ".join(MARKS)}, got "{self.scheme}"')

    def update(self, predicted: Sequence[Tags], gold: Sequence[Tags], ids: Ids = None) -> EntityScores:
        """Add sentences, each a list of tags, one for every word."""
        require_same_length(len(predicted), len(gold), "predicted sentences", "gold sentences")
        types: dict[str, tuple[int, int, int]] = {}
        tokens = right = 0
        for index, (predicted_tags, gold_tags) in enumerate(zip(predicted, gold, strict=True)):
            if len(predicted_tags) != len(gold_tags):
                raise HeedfulError(
                    f"{example_name(ids, index)} has {len(predicted_tags)} predicted tags for {len(gold_tags)} words: "
                    "every word needs a tag, also where a long sentence was cut"
                )
            for kind, counts in _by_type(
                self._spans(predicted_tags, ids, index), self._spans(gold_tags, ids, index)
            ).items():
                types[kind] = _plus(types.get(kind), counts)
            tokens += len(gold_tags)
            right += sum(a == b for a, b in zip(predicted_tags, gold_tags, strict=True))
        return self.merge_state(replace(self, types=types, tokens=tokens, right=right, sentences=len(gold)))

    def merge_state(self, incoming: EntityScores) -> EntityScores:
        """Return the metric over the examples of both metrics."""
        require_equal(self.scheme, incoming.scheme, "schemes")
        types = dict(self.types)
        for kind, counts in incoming.types.items():
            types[kind] = _plus(types.get(kind), counts)
        return replace(
            self,
            types=types,
            tokens=self.tokens + incoming.tokens,
            right=self.right + incoming.right,
            sentences=self.sentences + incoming.sentences,
        )

    def compute(self) -> Result:
        """Return {"precision", "recall", "f1" (micro), "token_accuracy", "scheme", "types", counts}."""
        require_examples(self.sentences, "the entity scores")
        correct, gold, predicted = (sum(counts[place] for counts in self.types.values()) for place in range(3))
        type_scores = {
            kind: {**f1_scores(*counts), "correct": counts[0], "gold": counts[1], "predicted": counts[2]}
            for kind, counts in sorted(self.types.items())
        }
        notes = [] if gold else ["no gold sentence has an entity: recall and F1 are 0 by convention"]
        return {
            **f1_scores(correct, gold, predicted),
            "token_accuracy": ratio(self.right, self.tokens),
            "scheme": self.scheme,
            "types": type_scores,
            "correct": correct,
            "gold": gold,
            "predicted": predicted,
            "tokens": self.tokens,
            "count": self.sentences,
            "notes": notes,
        }

    def _spans(self, tags: Tags, ids: Ids, index: int) -> list[EntitySpan]:
        try:
            return entity_spans(tags, self.scheme)
        except HeedfulError as error:
            raise HeedfulError(f"{example_name(ids, index)}: {error}") from None


def entity_counts(
    predicted: Sequence[Tags], gold: Sequence[Tags], scheme: Scheme
) -> Int64[np.ndarray, "sentences counts"]:
    """Return (correct, gold, predicted) for each sentence, from which a bootstrap of F1 samples."""
    pairs = [
        (entity_spans(tags, scheme), entity_spans(gold_tags, scheme))
        for tags, gold_tags in zip(predicted, gold, strict=True)
    ]
    rows = [(len(set(spans) & set(gold_spans)), len(gold_spans), len(spans)) for spans, gold_spans in pairs]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _by_type(predicted: list[EntitySpan], gold: list[EntitySpan]) -> dict[str, tuple[int, int, int]]:
    hits = Counter(span.kind for span in set(predicted) & set(gold))
    golds, guesses = Counter(span.kind for span in gold), Counter(span.kind for span in predicted)
    return {kind: (hits[kind], golds[kind], guesses[kind]) for kind in golds | guesses}


def _plus(left: tuple[int, int, int] | None, right: tuple[int, int, int]) -> tuple[int, int, int]:
    a, b, c = left or (0, 0, 0)
    return a + right[0], b + right[1], c + right[2]
