"""Settings and specification of the distillation of a trained encoder, whose loss has up to four terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heedful.errors import HeedfulError
from heedful.runs.pretrain.spec import ObjectiveSettings, ObjectiveSpec
from heedful.runs.pretrain.specs.mlm import MaskUnit

if TYPE_CHECKING:
    from heedful.model.config import Pooling

# loss terms, each with its weight if the term is chosen without a weight
TERMS = {"mlm": 1.0, "hidden_states": 10.0, "sentence_embedding": 10.0, "pair_similarity": 10.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class TermWeights:
    """Weights of the loss terms. A weight of 0 leaves a term out. See heedful.objectives.distillation.encoder."""

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
        """The terms with a weight above 0."""
        return tuple(name for name in TERMS if getattr(self, name) > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationSettings(ObjectiveSettings):
    """Distillation of a trained encoder on masked tokens, hidden states, sentence vectors and similarities of pairs."""

    kind: Literal["distillation"] = "distillation"
    teacher: str  # a model folder, or NAME[@REVISION] on the hub
    term_weights: TermWeights = TermWeights()
    mask_prob: float = 0.15  # share of the tokens of a masked sequence
    mask_unit: MaskUnit = "tokens"  # unit of masking: tokens, whole words, or spans
    masked_sequence_prob: float = 1.0  # share of the sequences that are masked; the others have no mlm loss
    short_window_prob: float = 0.0  # probability that a window has 1 to max_sentences sentences and not the full length
    max_sentences: int = 3  # maximum sentences of a short window
    pair_prob: float = 0.0  # probability that a short window is the first text of a pair; for pair_similarity
    neighbour_texts: int = 0  # texts that are paired with their nearest neighbours by the teacher's vectors; 0: none

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("mask_prob", 0 < self.mask_prob < 1, "a share between 0 and 1"),
            ("masked_sequence_prob", 0 < self.masked_sequence_prob <= 1, "a probability above 0, at most 1"),
            ("short_window_prob", 0 <= self.short_window_prob <= 1, "a probability from 0 to 1"),
            ("max_sentences", self.max_sentences >= 1, "a whole number from 1"),
            ("pair_prob", 0 <= self.pair_prob <= 1, "a probability from 0 to 1"),
            ("neighbour_texts", self.neighbour_texts == 0 or self.neighbour_texts >= 2, "0, or 2 or more"),
        ):
            if not is_valid:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")
        if self.term_weights.pair_similarity and not (self.pair_prob and self.short_window_prob):
            raise HeedfulError(
                "term_weights.pair_similarity needs pairs: set pair_prob and short_window_prob above 0, say 0.3 and 0.5"
            )

    @property
    def name(self) -> str:
        """The terms of the loss, joined by +."""
        return "+".join(self.term_weights.names)

    @property
    def pooling(self) -> Pooling | None:
        """Mean pooling if the model learns the teacher's sentence vectors, else None."""
        return "mean" if self.term_weights.sentence_embedding else None

    @classmethod
    def defaults(cls) -> DistillationSettings:
        """Return the default settings with a placeholder for the teacher."""
        return cls(teacher="?")

    @classmethod
    def of_terms(cls, terms: Sequence[str]) -> dict[str, object]:
        """Return settings by path that choose a distillation with these terms, at their weights in TERMS."""
        settings: dict[str, object] = {"objective.kind": "distillation"}
        for term, weight in TERMS.items():
            settings[f"objective.term_weights.{term}"] = weight if term in terms else 0.0
        if {"sentence_embedding", "pair_similarity"} & set(terms):
            settings["objective.short_window_prob"] = 0.5
        if "pair_similarity" in terms:
            settings["objective.pair_prob"] = 0.3
        return settings


DISTILLATION = ObjectiveSpec(
    name="distillation",
    settings=DistillationSettings,
    builder_ref="heedful.runs.pretrain.builders:DistillationBuilder",
    head="masked_lm",
    terms=tuple(TERMS),
    phase_settings=("mask_prob", "term_weights"),
    fixed_shape=True,
)
