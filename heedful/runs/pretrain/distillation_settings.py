"""Settings of pre-training with a trained encoder as teacher, and of probes; imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from heedful.errors import HeedfulError

MaskUnit = Literal["tokens", "words", "spans"]
TERMS = {"mlm": 1.0, "hidden_states": 10.0, "sentence_embedding": 10.0, "pair_similarity": 10.0}  # usual weights


@dataclass(frozen=True, kw_only=True, slots=True)
class TermWeights:
    """Weights of the terms of a distillation; 0 leaves a term out. See objectives.encoder_distillation."""

    mlm: float = TERMS["mlm"]  # weight of masked language modelling
    hidden_states: float = TERMS["hidden_states"]  # weight of the squared error of the last hidden states
    sentence_embedding: float = 0.0  # weight of the distance between sentence embeddings
    pair_similarity: float = 0.0  # weight of the error of cosines of pairs

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in TERMS}
        for name, weight in weights.items():
            if not 0 <= weight < math.inf:
                raise HeedfulError(f"{name} is {weight}; expected a weight from 0")
        if not any(weights.values()):
            raise HeedfulError(f"all weights are 0; give one of {', '.join(TERMS)} a weight")

    @property
    def names(self) -> tuple[str, ...]:
        """The terms whose weight is above 0."""
        return tuple(name for name in TERMS if getattr(self, name) > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationSettings:
    """A trained encoder as teacher: masked tokens, hidden states, sentence vectors and similarities of pairs."""

    kind: Literal["distillation"] = "distillation"
    teacher: str  # a model folder, or NAME[@REVISION] on the hub
    term_weights: TermWeights = TermWeights()
    mask_prob: float = 0.15  # share of the tokens of a masked sequence
    mask_unit: MaskUnit = "tokens"  # what is masked together: single tokens, whole words, or spans
    masked_sequence_prob: float = 1.0  # the other sequences are read whole, and have no masked tokens to find
    short_window_prob: float = 0.0  # probability that a window has 1 to max_sentences sentences; else it is full
    max_sentences: int = 3  # sentences of a short window, at most
    pair_prob: float = 0.0  # probability that a short window begins a pair; for pair_similarity
    neighbour_texts: int = 0  # texts among which the teacher's nearest make pairs; 0: no such pairs

    def __post_init__(self) -> None:
        for name, right, expected in (
            ("mask_prob", 0 < self.mask_prob < 1, "a share between 0 and 1"),
            ("masked_sequence_prob", 0 < self.masked_sequence_prob <= 1, "a probability above 0, at most 1"),
            ("short_window_prob", 0 <= self.short_window_prob <= 1, "a probability from 0 to 1"),
            ("max_sentences", self.max_sentences >= 1, "a whole number from 1"),
            ("pair_prob", 0 <= self.pair_prob <= 1, "a probability from 0 to 1"),
            ("neighbour_texts", self.neighbour_texts == 0 or self.neighbour_texts >= 2, "0, or 2 or more"),
        ):
            if not right:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")
        if self.term_weights.pair_similarity and not (self.pair_prob and self.short_window_prob):
            raise HeedfulError(
                "term_weights.pair_similarity needs pairs: set pair_prob and short_window_prob above 0, say 0.3 and 0.5"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A score of frozen vectors on a small labelled file, measured at each evaluation of a run.

    `similarity`: Spearman correlation of cosines of mean vectors with the scores of pairs. `classify`: accuracy of a
    linear classifier (ridge regression to one-hot targets) on mean vectors. `tag`: accuracy of one on the first row of
    each word, without words tagged O. Both are fitted on the first two thirds of the file and scored on the rest.
    """

    name: str
    kind: Literal["similarity", "classify", "tag"]
    data: str  # a file as `finetune regress`, `classify` and `tag` read it


def settings_of(terms: Sequence[str]) -> dict[str, Any]:
    """The settings of a distillation with these terms at their usual weights, by path."""
    settings: dict[str, Any] = {"objective.kind": "distillation"}
    for term, weight in TERMS.items():
        settings[f"objective.term_weights.{term}"] = weight if term in terms else 0.0
    if {"sentence_embedding", "pair_similarity"} & set(terms):
        settings["objective.short_window_prob"] = 0.5
    if "pair_similarity" in terms:
        settings["objective.pair_prob"] = 0.3
    return settings
