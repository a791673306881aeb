"""Settings of a pre-training run. Imports nothing heavy, so that a wrong setting is refused at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from heedful.data.corpus.documents import CorpusSettings
from heedful.errors import HeedfulError, SettingError, did_you_mean
from heedful.runs.overrides import Overrides
from heedful.tokenizer.settings import PretrainTokenizer
from heedful.train.settings import AdamW, FitSettings, Linear, TrainSettings

TOKENIZER = PretrainTokenizer()
CORPUS = CorpusSettings()
MaskUnit = Literal["tokens", "words", "spans"]
TERMS = {"mlm": 1.0, "hidden_states": 10.0, "sentence_embedding": 10.0, "pair_similarity": 10.0}  # usual weights


class _MaskProb:
    __slots__ = ()

    def __post_init__(self) -> None:
        if not 0 < getattr(self, "mask_prob", 0.5) < 1:
            raise HeedfulError(f"mask_prob is {getattr(self, 'mask_prob', None)}; expected a share between 0 and 1")
        static = getattr(self, "num_static_masks", None)
        if static is not None and static < 1:
            raise HeedfulError(
                f"num_static_masks is {static}; expected a whole number from 1, or none for new masks in each epoch"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MlmSettings(_MaskProb):
    """Masked language modelling."""

    kind: Literal["mlm"] = "mlm"
    mask_prob: float = 0.15  # share of the tokens that are masked
    mask_unit: MaskUnit = "tokens"  # what is masked together: tokens, whole words, or spans of words
    num_static_masks: int | None = None  # masks of each row, used in turn; none: new ones in each epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class MlmNspSettings(_MaskProb):
    """Masked language modelling and next sentence prediction."""

    kind: Literal["mlm+nsp"] = "mlm+nsp"
    mask_prob: float = 0.15  # share of the tokens that are masked
    mask_unit: MaskUnit = "tokens"  # what is masked together: tokens, whole words, or spans of words
    num_static_masks: int | None = None  # sets of pairs with their masks, used in turn; none: new ones in each epoch
    short_seq_prob: float = 0.1  # probability that the pairs of a document are shorter than max_seq_length


@dataclass(frozen=True, kw_only=True, slots=True)
class MlmSopSettings(_MaskProb):
    """Masked language modelling and sentence order prediction."""

    kind: Literal["mlm+sop"] = "mlm+sop"
    mask_prob: float = 0.15  # share of the tokens that are masked
    mask_unit: MaskUnit = "tokens"  # what is masked together: tokens, whole words, or spans of words
    num_static_masks: int | None = None  # sets of pairs with their masks, used in turn; none: new ones in each epoch
    short_seq_prob: float = 0.1  # probability that the pairs of a document are shorter than max_seq_length


@dataclass(frozen=True, kw_only=True, slots=True)
class PlmSettings:
    """Permuted language modelling, with two-stream attention."""

    kind: Literal["plm"] = "plm"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanCorruptionSettings(_MaskProb):
    """Span corruption: a decoder writes the spans that were taken out."""

    kind: Literal["span_corruption"] = "span_corruption"
    mask_prob: float = 0.15  # share of the tokens that are taken out (noise density)
    mean_noise_span_length: float = 3.0  # tokens of a span


@dataclass(frozen=True, kw_only=True, slots=True)
class ClmSettings:
    """Causal language modelling."""

    kind: Literal["clm"] = "clm"


@dataclass(frozen=True, kw_only=True, slots=True)
class RtdSettings(_MaskProb):
    """Replaced token detection: a small generator fills masked tokens, and the model finds the replaced ones."""

    kind: Literal["rtd"] = "rtd"
    mask_prob: float = 0.15  # share of the tokens that are masked for the generator
    disc_weight: float = 50.0  # weight of the discriminator's loss; the generator's is 1
    generator_size: float = 0.25  # the generator's width, heads and inner width as a share of the model's


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


ObjectiveSettings = (
    MlmSettings
    | MlmNspSettings
    | MlmSopSettings
    | PlmSettings
    | SpanCorruptionSettings
    | ClmSettings
    | RtdSettings
    | DistillationSettings
)
OBJECTIVES: dict[str, type] = {
    "mlm": MlmSettings,
    "mlm+nsp": MlmNspSettings,
    "mlm+sop": MlmSopSettings,
    "plm": PlmSettings,
    "span_corruption": SpanCorruptionSettings,
    "clm": ClmSettings,
    "rtd": RtdSettings,
    "distillation": DistillationSettings,
}
Size = Literal["tiny", "mini", "small", "medium", "base", "large"]
SIZES: dict[str, tuple[int, int, int]] = {  # layers, width, heads (Turc et al. 2019; Devlin et al. 2019)
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The model that is trained: a family and a size with random weights, or a trained model."""

    init_from: str = ""  # model to train further: a folder, or NAME[@REVISION] on the hub; "": random weights
    family: str = ""  # "": the usual one of the objective
    size: Size = "mini"  # named shape: layers, width and heads
    layers: int | None = None  # none: those of the size
    width: int | None = None  # none: that of the size
    heads: int | None = None  # none: those of the size
    dropout: float = 0.0  # probability while pre-training; the saved model has its family's own

    def __post_init__(self) -> None:
        layers, width, heads = self.shape
        if layers < 1 or heads < 1 or width < 1 or width % heads:
            raise HeedfulError(
                f"layers, width and heads are {layers}, {width} and {heads}; expected numbers from 1, and a width that "
                "the heads divide"
            )
        if not 0 <= self.dropout < 1:
            raise HeedfulError(f"dropout is {self.dropout}; expected a share from 0 to below 1")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, width and heads."""
        layers, width, heads = SIZES[self.size]
        return self.layers or layers, self.width or width, self.heads or heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of the training with settings of its own; none: the setting of the run."""

    start_fraction: float  # share of the training, 0 to 1, after which the phase begins
    max_seq_length: int | None = None  # tokens of a sequence, at most
    batch_size: int | None = None  # packed rows of a step
    mask_prob: float | None = None  # share of the tokens that are masked
    term_weights: TermWeights | None = None  # weights of the terms of a distillation

    def __post_init__(self) -> None:
        if not 0 < self.start_fraction < 1:
            raise HeedfulError(
                f"start_fraction is {self.start_fraction}; expected a share of the training between 0 and 1"
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise HeedfulError(f"batch_size is {self.batch_size}; expected a whole number from 1")
        if self.mask_prob is not None and not 0 < self.mask_prob < 1:
            raise HeedfulError(f"mask_prob is {self.mask_prob}; expected a share between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainSettings:
    """Everything that decides what a run does."""

    data: tuple[str, ...] = ()  # files and folders of text, or the folder of a corpus
    objective: ObjectiveSettings = MlmSettings()
    model: ModelSettings = ModelSettings()
    tokenizer: PretrainTokenizer = TOKENIZER
    corpus: CorpusSettings = CORPUS
    max_seq_length: int = 128  # tokens of a sequence, at most
    phases: tuple[Phase, ...] = ()  # later parts of the training with other settings, as longer sequences
    pack_length: int = 1024  # tokens of a packed row: several whole sequences, end to end
    sequences_per_pack: int | None = None  # sequences of a packed row, padded to one shape; none: as many as fit
    eval_fraction: float = 0.01  # share of the documents that are the validation split
    eval_tokens: int = 100_000  # tokens of an evaluation, at most
    eval_every_steps: int = 500  # steps between evaluations
    probes: tuple[Probe, ...] = ()  # small labelled files that frozen vectors are scored on at each evaluation
    train: TrainSettings = TrainSettings(epochs=3.0)
    fit: FitSettings = FitSettings(load_best_at_end=False)

    def __post_init__(self) -> None:
        lengths = self.lengths
        shares = [phase.start_fraction for phase in self.phases]
        for name, right, expected in (
            ("max_seq_length", min(lengths) >= 8, "8 tokens or more in each phase"),
            ("phases", shares == sorted(set(shares)), "each phase after the one before it"),
            ("pack_length", self.pack_length >= 8, "8 tokens or more"),
            ("eval_fraction", 0 < self.eval_fraction < 1, "a share between 0 and 1"),
            ("eval_tokens", self.eval_tokens >= 1, "a whole number from 1"),
            ("eval_every_steps", self.eval_every_steps >= 1, "a whole number from 1"),
        ):
            if not right:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")
        if len({probe.name for probe in self.probes}) < len(self.probes):
            raise HeedfulError(f"probes has a name twice: {', '.join(probe.name for probe in self.probes)}")
        for phase in self.phases:
            if phase.term_weights is not None and not isinstance(self.objective, DistillationSettings):
                raise HeedfulError(f'term_weights of a phase is for objective.kind = "distillation", not "{self.kind}"')
            if phase.mask_prob is not None and not hasattr(self.objective, "mask_unit"):
                raise HeedfulError(f'mask_prob of a phase is for objectives with masked tokens, not "{self.kind}"')

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each phase, the first one's in front."""
        return self.max_seq_length, *(
            self.max_seq_length if phase.max_seq_length is None else phase.max_seq_length for phase in self.phases
        )

    @property
    def kind(self) -> str:
        """The name of the objective; of a distillation its terms, joined by +."""
        objective = self.objective
        return "+".join(objective.term_weights.names) if isinstance(objective, DistillationSettings) else objective.kind

    def objectives(self) -> tuple[ObjectiveSettings, ...]:
        """The objective of each phase, the first one's in front."""
        found = [self.objective]
        for phase in self.phases:
            made: Any = self.objective
            if phase.mask_prob is not None:
                made = replace(made, mask_prob=phase.mask_prob)
            if phase.term_weights is not None:
                made = replace(made, term_weights=phase.term_weights)
            found.append(made)
        return tuple(found)

    @property
    def corpus_key(self) -> tuple[Any, ...]:
        """All settings that decide which tokenizer and corpus are made from the text."""
        spans = isinstance(self.objective, SpanCorruptionSettings)
        return self.data, self.corpus, self.tokenizer, self.model.init_from, spans


def pretrain_defaults(objective: str, width: int, *, continued: bool) -> PretrainSettings:
    """Default settings for an objective and a width.

    The learning rate is 0.25 / width, which follows published ones; a trained model continues at a tenth of that.
    """
    rate = min(2e-3, 0.25 / width) * (0.1 if continued else 1.0)
    kind = OBJECTIVES[objective]
    return PretrainSettings(
        objective=kind(teacher="?") if kind is DistillationSettings else kind(),
        tokenizer=replace(TOKENIZER, algorithm="bpe") if kind is ClmSettings else TOKENIZER,  # as published
        train=TrainSettings(
            max_steps=10_000,
            batch_size=4,
            optimizer=AdamW(lr=rate, betas=(0.9, 0.98), eps=1e-6),
            schedule=Linear(warmup_ratio=0.05),
        ),
    )


def pretrain_overrides(
    data: str | Path | Sequence[str | Path] = (),
    *,
    objective: str = "",
    size: str = "",
    model: str = "",
    tokenizer: str = "",
    teacher: str = "",
    recipe: str | Path | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Mapping[str, object]] | None = None,
    overrides: Mapping[str, object] | Overrides | None = None,
) -> Overrides:
    """Collect what was given by hand; `Overrides` are returned as they are."""
    places = [str(each) for each in ([data] if isinstance(data, str | Path) else data) if str(each)]
    if recipes := [each for each in places if each.endswith(".toml")]:
        raise HeedfulError(
            f"{recipes[0]} is a recipe among text files: give it alone, to learn from the text that it names, or "
            f"as --recipe {recipes[0]}, to learn from other text"
        )
    flags = dict(flags or {})
    if places:
        flags[f"DATA {', '.join(places)}"] = {"data": places}
    if objective:
        flags[f"--objective {objective}"] = _objective(objective)
    for option, given, path in (
        ("--size", size, "model.size"),
        ("--model", model, "model.init_from"),
        ("--tokenizer", tokenizer, "tokenizer.path"),
        ("--teacher", teacher, "objective.teacher"),
    ):
        if given:
            flags[f"{option} {given}"] = {path: given}
    return Overrides.of(overrides, recipe=recipe, flags=flags, assignments=assignments)


def resolve_pretrain(data: str | Path | Sequence[str | Path] = (), **given: Any) -> PretrainSettings:
    """Return the defaults with overrides laid over them; the arguments are those of `pretrain_overrides`."""
    overrides = pretrain_overrides(data, **given)
    first = overrides.resolve(pretrain_defaults("mlm", 256, continued=False))
    model, kind = first.settings.model, first.settings.objective.kind
    if first.has("model.size") and model.init_from:
        raise SettingError(
            f"model.size would change nothing: {model.init_from} has a shape of its own; leave it out",
            path="model.size",
        )
    width = model.shape[1]
    if model.init_from and not first.has("train.optimizer.lr"):
        width = _width(model.init_from)
    usual = replace(pretrain_defaults(kind, width, continued=bool(model.init_from)), objective=first.settings.objective)
    return overrides.resolve(usual).settings


def distillation_of_terms(terms: Sequence[str]) -> dict[str, Any]:
    """The settings of a distillation with these terms at their usual weights, by path."""
    settings: dict[str, Any] = {"objective.kind": "distillation"}
    for term, weight in TERMS.items():
        settings[f"objective.term_weights.{term}"] = weight if term in terms else 0.0
    if {"sentence_embedding", "pair_similarity"} & set(terms):
        settings["objective.short_window_prob"] = 0.5
    if "pair_similarity" in terms:
        settings["objective.pair_prob"] = 0.3
    return settings


def _objective(name: str) -> dict[str, Any]:
    """The settings that choose an objective by its name, or a distillation by its terms joined by +."""
    if name in OBJECTIVES:
        return {"objective.kind": name}
    if set(terms := name.split("+")) <= TERMS.keys():
        return distillation_of_terms(terms)
    raise HeedfulError(
        f'"{name}" is not an objective{did_you_mean(name, [*OBJECTIVES, *TERMS])}: use one of {", ".join(OBJECTIVES)}, '
        f"or terms of a distillation joined by +: {', '.join(TERMS)}"
    )


def _width(start: str) -> int:
    from heedful.checkpoint import config_of  # which imports torch

    return config_of(start).model.width
