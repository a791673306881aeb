"""Precision, recall and F1 of entities in tagged sentences, as conlleval or a strict tagging scheme defines them."""

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

MARKS: dict[str, str] = {  # marks of each scheme, except O
    "conlleval": "BIES",
    "strict-iob2": "BI",
    "strict-iobes": "BIES",
}


class EntitySpan(NamedTuple):
    """The type of an entity, and its span of words."""

    kind: str
    start: int  # index of the first word
    stop: int  # index of the first word after the entity


def entity_spans(tags: Tags, scheme: Scheme) -> list[EntitySpan]:
    """Return the entities of one sentence.

    * conlleval (the script of CoNLL-2000 and later tasks): I-x or E-x continues an entity directly after B-x or I-x.
      Any other tag but O begins an entity, so I-x needs no B-x before it.
    * strict-iob2: an entity is B-x and all I-x that follow it. Other I-x are ignored.
    * strict-iobes: an entity is S-x, or B-x, any number of I-x, and E-x. Other tags are ignored.

    >>> entity_spans(["I-PER", "I-PER"], "conlleval"), entity_spans(["I-PER", "I-PER"], "strict-iob2")
    ([EntitySpan(kind='PER', start=0, stop=2)], [])
    """
    spans: list[EntitySpan] = []
    open_entity: tuple[str, int] | None = None  # type and start of the entity that the next tag may continue
    lenient, needs_end = scheme == "conlleval", scheme == "strict-iobes"
    for index, tag in enumerate([*tags, OUTSIDE]):  # the added O ends an entity at the end of the sentence
        mark, kind = parse_tag(tag)
        if mark != OUTSIDE and mark not in MARKS[scheme]:
            raise HeedfulError(_unknown_tag(tag, scheme))
        continues = open_entity is not None and mark in "IE" and kind == open_entity[0]
        if continues and mark == "I":
            continue
        if open_entity is not None and (continues or not needs_end):
            spans.append(EntitySpan(*open_entity, index + continues))
        open_entity = None
        if continues or mark == OUTSIDE:
            continue
        if mark == "S" or (lenient and mark == "E"):
            spans.append(EntitySpan(kind, index, index + 1))
        elif mark == "B" or lenient:
            open_entity = kind, index
    return spans


def _unknown_tag(tag: str, scheme: Scheme) -> str:
    """Return the error message for a tag that the scheme does not have."""
    known = ", ".join(f"{mark}-type" for mark in MARKS[scheme])
    hint = ""
    if scheme == "strict-iob2" and parse_tag(tag)[0] in "ES":
        hint = ': score with "strict-iobes", or turn both sides into IOB2 with heedful.data.tag_schemes.to_iob2'
    return f'"{tag}" is not a tag of {scheme}, which has {known} and O{hint}'


@dataclass(frozen=True, kw_only=True, slots=True)
class EntityScores:
    """Precision, recall and F1 of entities. An entity is correct if its type and all its words are correct.

    >>> predicted, gold = [["B-PER", "I-PER"]], [["I-PER", "I-PER"]]
    >>> [EntityScores(scheme=name).update(predicted, gold).compute()["f1"] for name in ("conlleval", "strict-iob2")]
    [1.0, 0.0]
    """

    scheme: Scheme
    # (correct, gold, predicted) entities by type; never modified
    types: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    tokens: int = 0  # words
    correct_tokens: int = 0  # words whose predicted and gold tags are equal
    sentences: int = 0

    def __post_init__(self) -> None:
        if self.scheme not in MARKS:
            raise HeedfulError(f'scheme should be one of {", ".join(MARKS)}, got "{self.scheme}"')

    def update(self, predicted: Sequence[Tags], gold: Sequence[Tags], ids: Ids = None) -> EntityScores:
        """Add sentences by their predicted and gold tags, one per word."""
        require_same_length(len(predicted), len(gold), "predicted sentences", "gold sentences")
        types: dict[str, tuple[int, int, int]] = {}
        tokens = correct_tokens = 0
        for index, (predicted_tags, gold_tags) in enumerate(zip(predicted, gold, strict=True)):
            if len(predicted_tags) != len(gold_tags):
                raise HeedfulError(
                    f"{example_name(ids, index)} has {len(predicted_tags)} predicted tags for {len(gold_tags)} words: "
                    "every word needs a tag, also where a long sentence was cut"
                )
            predicted_spans = self._spans(predicted_tags, ids, index)
            gold_spans = self._spans(gold_tags, ids, index)
            for kind, counts in _by_type(predicted_spans, gold_spans).items():
                types[kind] = _add_counts(types.get(kind), counts)
            tokens += len(gold_tags)
            correct_tokens += sum(a == b for a, b in zip(predicted_tags, gold_tags, strict=True))
        return self.merge_state(
            replace(self, types=types, tokens=tokens, correct_tokens=correct_tokens, sentences=len(gold))
        )

    def merge_state(self, incoming: EntityScores) -> EntityScores:
        """Return the metric over the examples of both metrics."""
        require_equal(self.scheme, incoming.scheme, "schemes")
        types = dict(self.types)
        for kind, counts in incoming.types.items():
            types[kind] = _add_counts(types.get(kind), counts)
        return replace(
            self,
            types=types,
            tokens=self.tokens + incoming.tokens,
            correct_tokens=self.correct_tokens + incoming.correct_tokens,
            sentences=self.sentences + incoming.sentences,
        )

    def compute(self) -> Result:
        """Return micro-averaged "precision", "recall", "f1", the "token_accuracy", scores of each type, and counts."""
        require_examples(self.sentences, "the entity scores")
        correct, gold, predicted = (sum(counts[index] for counts in self.types.values()) for index in range(3))
        type_scores = {
            kind: {**f1_scores(*counts), "correct": counts[0], "gold": counts[1], "predicted": counts[2]}
            for kind, counts in sorted(self.types.items())
        }
        notes = [] if gold else ["no gold sentence has an entity: recall and F1 are 0 by convention"]
        return {
            **f1_scores(correct, gold, predicted),
            "token_accuracy": ratio(self.correct_tokens, self.tokens),
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
        """Return the entities of a sentence. Errors name the sentence."""
        try:
            return entity_spans(tags, self.scheme)
        except HeedfulError as error:
            raise HeedfulError(f"{example_name(ids, index)}: {error}") from None


def entity_counts(
    predicted: Sequence[Tags], gold: Sequence[Tags], scheme: Scheme
) -> Int64[np.ndarray, "sentences counts"]:
    """Return the counts of (correct, gold, predicted) entities of each sentence, for a bootstrap."""
    counts = []
    for tags, gold_tags in zip(predicted, gold, strict=True):
        spans = entity_spans(tags, scheme)
        gold_spans = entity_spans(gold_tags, scheme)
        counts.append((len(set(spans) & set(gold_spans)), len(gold_spans), len(spans)))
    return np.array(counts, dtype=np.int64).reshape(-1, 3)


def _by_type(predicted: list[EntitySpan], gold: list[EntitySpan]) -> dict[str, tuple[int, int, int]]:
    """Return the counts of (correct, gold, predicted) entities of a sentence, by type."""
    correct = Counter(span.kind for span in set(predicted) & set(gold))
    golds, predictions = Counter(span.kind for span in gold), Counter(span.kind for span in predicted)
    return {kind: (correct[kind], golds[kind], predictions[kind]) for kind in golds | predictions}


def _add_counts(left: tuple[int, int, int] | None, right: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the sums of two triples of counts. None means zeros."""
    a, b, c = left or (0, 0, 0)
    return a + right[0], b + right[1], c + right[2]
