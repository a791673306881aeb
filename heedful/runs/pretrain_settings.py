"""Settings of a pre-training run; imports nothing heavy, so that a wrong one is told at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from heedful.data.documents import CorpusSettings
from heedful.errors import HeedfulError, SettingError, did_you_mean
from heedful.runs.distillation_settings import TERMS, Choose, DistillationSettings, Probe, TermWeights, settings_of
from heedful.runs.overrides import Overrides
from heedful.tokenizer.settings import TokenizerSettings
from heedful.train.settings import AdamW, FitSettings, Linear, Minutes, Steps, TrainSettings

VOCABULARY = TokenizerSettings(vocabulary=16_000)
CORPUS = CorpusSettings()


class _Rate:
    __slots__ = ()

    def __post_init__(self) -> None:
        if not 0 < getattr(self, "rate", 0.5) < 1:
            raise HeedfulError(f"rate is {getattr(self, 'rate', None)}; expected a share between 0 and 1")
        versions = getattr(self, "versions", None)
        if versions is not None and versions < 1:
            raise HeedfulError(f"versions is {versions}; expected a whole number from 1, or none for new draws always")


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedSettings(_Rate):
    """Hidden tokens."""

    kind: Literal["masked"] = "masked"
    rate: float = 0.15
    choose: Choose = "tokens"
    versions: int | None = None  # so many static masks of each row, used in turn; none: dynamic


@dataclass(frozen=True, kw_only=True, slots=True)
class NextSettings(_Rate):
    """Hidden tokens, and whether the second segment follows the first."""

    kind: Literal["masked+next"] = "masked+next"
    rate: float = 0.15
    choose: Choose = "tokens"
    versions: int | None = None  # so many sets of pairs with static masks, used in turn; none: new ones
    short: float = 0.1  # the probability that the pairs of a document are shorter


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings(_Rate):
    """Hidden tokens, and whether two consecutive segments were swapped."""

    kind: Literal["masked+order"] = "masked+order"
    rate: float = 0.15
    choose: Choose = "tokens"
    versions: int | None = None
    short: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PermutedSettings:
    """Tokens in any order, in two streams."""

    kind: Literal["permuted"] = "permuted"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpansSettings(_Rate):
    """Spans that a decoder writes."""

    kind: Literal["spans"] = "spans"
    rate: float = 0.15
    mean: float = 3.0  # tokens of a span


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalSettings:
    """The next token."""

    kind: Literal["causal"] = "causal"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedSettings(_Rate):
    """Tokens that a small generator replaced."""

    kind: Literal["replaced"] = "replaced"
    rate: float = 0.15
    weight: float = 50.0  # of the discriminator's term
    part: float = 0.25  # of the model's width, heads and inner width: the generator


ObjectiveSettings = (
    MaskedSettings
    | NextSettings
    | OrderSettings
    | PermutedSettings
    | SpansSettings
    | CausalSettings
    | ReplacedSettings
    | DistillationSettings
)
OBJECTIVES: dict[str, type] = {
    "masked": MaskedSettings,
    "masked+next": NextSettings,
    "masked+order": OrderSettings,
    "permuted": PermutedSettings,
    "spans": SpansSettings,
    "causal": CausalSettings,
    "replaced": ReplacedSettings,
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
    """What is trained: a fresh model of a family and a size, or a trained one that goes on."""

    start: str = ""  # a model folder, or NAME@REVISION on the hub, that goes on; "": a fresh model
    family: str = ""  # "": the one that fits the objective
    size: Size = "mini"
    layers: int | None = None  # instead of the size's
    width: int | None = None
    heads: int | None = None
    dropout: float = 0.0  # while pre-training; the model that is saved has its family's own

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
    """A part of the run with settings of its own; what is none stays as it was at the beginning of the run."""

    after: float  # share of the run after which it begins
    length: int | None = None
    batch_size: int | None = None  # rows of a step
    mask_prob: float | None = None
    term_weights: TermWeights | None = None

    def __post_init__(self) -> None:
        if not 0 < self.after < 1:
            raise HeedfulError(f"after is {self.after}; expected a share of the run between 0 and 1")
        if self.batch_size is not None and self.batch_size < 1:
            raise HeedfulError(f"batch_size is {self.batch_size}; expected a whole number from 1")
        if self.mask_prob is not None and not 0 < self.mask_prob < 1:
            raise HeedfulError(f"mask_prob is {self.mask_prob}; expected a share between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainSettings:
    """Everything that decides what a run does."""

    data: tuple[str, ...] = ()  # files and folders of text, or a corpus that was made before
    objective: ObjectiveSettings = MaskedSettings()
    model: ModelSettings = ModelSettings()
    tokenizer: str = ""  # the folder of one; "": the started model's, or one trained on the corpus
    vocabulary: TokenizerSettings = VOCABULARY  # of one that is trained
    characters: int = 30_000_000  # that it is trained on, at most, from all over the text
    corpus: CorpusSettings = CORPUS
    length: int = 128  # tokens of a sequence, at most
    phases: tuple[Phase, ...] = ()  # longer sequences towards the end, say
    row: int = 1024  # tokens of a sample: several whole sequences that fill it
    sequences: int | None = None  # of a row, filled up, so that no shape ever changes; none: as many as fit
    held_out: float = 0.01  # share of the documents that are measured and not learned from
    held_tokens: int = 100_000  # of them, at most, in an evaluation
    evaluate: int = 500  # steps between two evaluations
    probes: tuple[Probe, ...] = ()
    train: TrainSettings = TrainSettings()
    fit: FitSettings = FitSettings(keep="last")

    def __post_init__(self) -> None:
        lengths = self.lengths
        shares = [phase.after for phase in self.phases]
        for name, right, expected in (
            ("length", min(lengths) >= 8, "8 tokens or more in each phase"),
            ("phases", shares == sorted(set(shares)), "each phase after the one before it"),
            ("row", self.row >= 8, "8 tokens or more"),
            ("held_out", 0 < self.held_out < 1, "a share between 0 and 1"),
            ("held_tokens", self.held_tokens >= 1, "a whole number from 1"),
            ("evaluate", self.evaluate >= 1, "a whole number from 1"),
            ("characters", self.characters >= 1, "a whole number from 1"),
        ):
            if not right:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")
        if len({probe.name for probe in self.probes}) < len(self.probes):
            raise HeedfulError(f"probes has a name twice: {', '.join(probe.name for probe in self.probes)}")
        for phase in self.phases:
            if phase.term_weights is not None and not isinstance(self.objective, DistillationSettings):
                raise HeedfulError(f'term_weights of a phase is for objective.kind = "distillation", not "{self.kind}"')
            if phase.mask_prob is not None and not hasattr(self.objective, "choose"):
                raise HeedfulError(f'mask_prob of a phase is for objectives with masked tokens, not "{self.kind}"')

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each phase, the first one's in front."""
        return self.length, *(self.length if phase.length is None else phase.length for phase in self.phases)

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
                name = "mask_prob" if isinstance(made, DistillationSettings) else "rate"
                made = replace(made, **{name: phase.mask_prob})
            if phase.term_weights is not None:
                made = replace(made, term_weights=phase.term_weights)
            found.append(made)
        return tuple(found)

    @property
    def text(self) -> tuple[Any, ...]:
        """What decides which tokenizer and which corpus a run makes, beside the bytes of its files."""
        spans = isinstance(self.objective, SpansSettings)
        return self.data, self.corpus, self.tokenizer, self.model.start, self.vocabulary, self.characters, spans


def defaults(objective: str, width: int, *, going_on: bool) -> PretrainSettings:
    """Settings for an objective and a width.

    The rate falls with the width, 0.25 / width, as the published ones do; a trained model goes on at a tenth of that.
    """
    rate = min(2e-3, 0.25 / width) * (0.1 if going_on else 1.0)
    kind = OBJECTIVES[objective]
    return PretrainSettings(
        objective=kind(teacher="?") if kind is DistillationSettings else kind(),
        vocabulary=replace(VOCABULARY, kind="bpe") if kind is CausalSettings else VOCABULARY,  # as published
        train=TrainSettings(
            length=Steps(count=10_000),
            batch=4,
            optimiser=AdamW(rate=rate, betas=(0.9, 0.98), eps=1e-6),
            schedule=Linear(warmup=0.05),
        ),
    )


def overrides_of(
    data: str | Path | Sequence[str | Path] = (),
    *,
    objective: str = "",
    size: str = "",
    model: str = "",
    tokenizer: str = "",
    teacher: str = "",
    duration: str = "",
    recipe: str | Path | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    overrides: Mapping[str, Any] | Overrides | None = None,
) -> Overrides:
    """Collect what was given by hand; overrides that were collected before are returned as they are."""
    places = [str(each) for each in ([data] if isinstance(data, str | Path) else data) if str(each)]
    if recipes := [each for each in places if each.endswith(".toml")]:
        raise HeedfulError(
            f"{recipes[0]} is a recipe and stands among text: give it alone, to learn from the text that it names, or "
            f"as --recipe {recipes[0]}, to learn from other text"
        )
    flags = dict(flags or {})
    if places:
        flags[f"DATA {', '.join(places)}"] = {"data": places}
    if objective:
        flags[f"--objective {objective}"] = _objective(objective)
    if duration:
        flags[f"--for {duration}"] = {"train.length": {"kind": "minutes", "count": minutes(duration)}}
    for option, given, path in (
        ("--size", size, "model.size"),
        ("--model", model, "model.start"),
        ("--tokenizer", tokenizer, "tokenizer"),
        ("--teacher", teacher, "objective.teacher"),
    ):
        if given:
            flags[f"{option} {given}"] = {path: given}
    return Overrides.of(overrides, recipe=recipe, flags=flags, assignments=assignments)


def settled(data: str | Path | Sequence[str | Path] = (), **given: Any) -> PretrainSettings:
    """Return the defaults with overrides laid over them; the arguments are those of `overrides_of`."""
    overrides = overrides_of(data, **given)
    first = overrides.resolve(defaults("masked", 256, going_on=False))
    model, kind = first.settings.model, first.settings.objective.kind
    if first.has("model.size") and model.start:
        raise SettingError(
            f"model.size would change nothing: {model.start} has a shape of its own; leave it out", path="model.size"
        )
    width = model.shape[1]
    if model.start and not first.has("train.optimiser.rate"):
        width = _width(model.start)
    usual = replace(defaults(kind, width, going_on=bool(model.start)), objective=first.settings.objective)
    return overrides.resolve(usual).settings


def _objective(name: str) -> dict[str, Any]:
    """The settings that choose an objective by its name, or a distillation by its terms joined by +."""
    if name in OBJECTIVES:
        return {"objective.kind": name}
    if set(terms := name.split("+")) <= TERMS.keys():
        return settings_of(terms)
    raise HeedfulError(
        f'"{name}" is no objective{did_you_mean(name, [*OBJECTIVES, *TERMS])}: use one of {", ".join(OBJECTIVES)}, or '
        f"terms of a distillation joined by +: {', '.join(TERMS)}"
    )


def _width(start: str) -> int:
    from heedful.checkpoint import config_of  # which imports torch

    return config_of(start).model.width


def minutes(given: str) -> float:
    """A duration in words.

    >>> minutes("1h30m"), minutes("90s"), minutes("45")
    (90.0, 1.5, 45.0)
    """
    found = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)(?:m|$))?(?:(\d+(?:\.\d+)?)s)?", given.strip())
    if not found or not any(found.groups()):
        raise HeedfulError(f'"{given}" is no duration: write 1h, 90m, 1h30m or 45s')
    hours, whole, seconds = (float(each or 0) for each in found.groups())
    total = 60 * hours + whole + seconds / 60
    if not total > 0:
        raise HeedfulError(f'"{given}" is no time at all: write 1h, 90m, 1h30m or 45s')
    return total


__all__ = ["Minutes", "PretrainSettings", "defaults", "minutes", "settled"]
