"""Settings of `heedful pretrain`, their defaults, and the flags that set them.

This module imports nothing heavy, so that a wrong setting is refused immediately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from heedful.data.corpus.documents import CorpusSettings
from heedful.errors import HeedfulError, SettingError, did_you_mean
from heedful.runs.overrides import Overrides
from heedful.runs.pretrain.spec import ObjectiveSettings, ObjectiveSpec
from heedful.runs.pretrain.specs import OBJECTIVES
from heedful.runs.pretrain.specs.distillation import TermWeights
from heedful.runs.pretrain.specs.mlm import MlmSettings
from heedful.tokenizer.settings import PretrainTokenizer
from heedful.train.settings import AdamW, FitSettings, Linear, TrainSettings, check_uncached

DEFAULT_OBJECTIVE = MlmSettings()
DEFAULT_TOKENIZER = PretrainTokenizer()
DEFAULT_CORPUS = CorpusSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A score of frozen vectors on a small labelled file, measured at each evaluation of a run.

    A `similarity` probe is the Spearman correlation between cosines of mean vectors and the labels of pairs. A
    `classify` probe is the accuracy of a linear classifier (ridge regression to one-hot targets) on mean vectors. A
    `tag` probe is the accuracy of such a classifier on the hidden state of each word's first token, without words
    tagged O. Classifiers are fitted on the first two thirds of the file and scored on the rest.
    """

    name: str  # name in the journal, after probe_
    kind: Literal["similarity", "classify", "tag"]
    data: str  # a file in a format of `finetune regress`, `finetune classify` or `finetune tag`


Size = Literal["tiny", "mini", "small", "medium", "base", "large"]
SIZES: dict[str, tuple[int, int, int]] = {  # layers, hidden size, heads (Turc et al. 2019; Devlin et al. 2019)
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
    family: str = ""  # model family; "": the default family of the objective
    size: Size = "mini"  # named shape: layers, hidden size and heads
    layers: int | None = None  # Transformer blocks; none: as in the size
    width: int | None = None  # hidden size; none: as in the size
    heads: int | None = None  # attention heads; none: as in the size
    dropout: float = 0.0  # dropout during pre-training; the saved model has the dropout of its family

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
        """Number of layers, hidden size, and number of heads."""
        layers, width, heads = SIZES[self.size]
        return self.layers or layers, self.width or width, self.heads or heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of the training with other settings. Where a value is None, the setting of the run is used."""

    start_fraction: float  # share of the training, 0 to 1, after which the phase begins
    max_seq_length: int | None = None  # maximum tokens of a sequence
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

    def objective_values(self) -> dict[str, object]:
        """Return the values of the objective's settings that the phase changes, by name of the setting."""
        values = {"mask_prob": self.mask_prob, "term_weights": self.term_weights}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainSettings:
    """Settings of a pre-training run."""

    data: tuple[str, ...] = ()  # files and folders of text, or the folder of a corpus
    objective: ObjectiveSettings = DEFAULT_OBJECTIVE
    model: ModelSettings = ModelSettings()
    tokenizer: PretrainTokenizer = DEFAULT_TOKENIZER
    corpus: CorpusSettings = DEFAULT_CORPUS
    max_seq_length: int = 128  # maximum tokens of a sequence
    phases: tuple[Phase, ...] = ()  # later parts of the training with other settings, such as longer sequences
    pack_length: int = 1024  # tokens of a packed row: several whole sequences, end to end
    sequences_per_pack: int | None = None  # sequences of a packed row, padded to one shape; none: all that fit
    eval_fraction: float = 0.01  # share of the documents that are the validation split
    eval_tokens: int = 100_000  # minimum tokens of an evaluation, in whole packed rows; all if there are fewer
    eval_every_steps: int = 500  # steps between evaluations
    probes: tuple[Probe, ...] = ()  # small labelled files on which frozen vectors are scored at each evaluation
    train: TrainSettings = TrainSettings(epochs=3.0)
    fit: FitSettings = FitSettings(load_best_at_end=False)

    def __post_init__(self) -> None:
        starts = [phase.start_fraction for phase in self.phases]
        for name, is_valid, expected in (
            ("max_seq_length", min(self.lengths) >= 8, "8 tokens or more in each phase"),
            ("phases", starts == sorted(set(starts)), "each phase after the one before it"),
            ("pack_length", self.pack_length >= 8, "8 tokens or more"),
            ("eval_fraction", 0 < self.eval_fraction < 1, "a share between 0 and 1"),
            ("eval_tokens", self.eval_tokens >= 1, "a whole number from 1"),
            ("eval_every_steps", self.eval_every_steps >= 1, "a whole number from 1"),
        ):
            if not is_valid:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")
        if self.train.freeze_layers and not self.model.init_from:
            raise HeedfulError(
                f"train.freeze_layers is {self.train.freeze_layers}, but training starts from random weights, which "
                "should not stay as they are: leave it out, or set model.init_from"
            )
        check_uncached(self.train)
        if len({probe.name for probe in self.probes}) < len(self.probes):
            raise HeedfulError(f"probes has a name twice: {', '.join(probe.name for probe in self.probes)}")
        self._check_phases()

    def _check_phases(self) -> None:
        """Refuse settings of phases that the objective does not have."""
        for phase in self.phases:
            for name in phase.objective_values():
                if name not in self.spec.phase_settings:
                    objectives = [f'"{spec.name}"' for spec in OBJECTIVES.values() if name in spec.phase_settings]
                    raise HeedfulError(
                        f'{name} of a phase is for objective.kind = {" or ".join(objectives)}, not "{self.kind}"'
                    )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Maximum tokens of a sequence in the first phase, and then in each later phase."""
        return self.max_seq_length, *(
            self.max_seq_length if phase.max_seq_length is None else phase.max_seq_length for phase in self.phases
        )

    @property
    def spec(self) -> ObjectiveSpec:
        """The specification of the objective."""
        return OBJECTIVES[self.objective.kind]

    @property
    def kind(self) -> str:
        """The name of the objective in results. For a distillation, it is the names of its loss terms joined by +."""
        return self.objective.name

    def objectives(self) -> tuple[ObjectiveSettings, ...]:
        """Return the objective settings of the first phase, and then of each later phase."""
        return self.objective, *(self.objective.with_values(phase.objective_values()) for phase in self.phases)

    @property
    def corpus_key(self) -> tuple[object, ...]:
        """All settings that the tokenizer and the corpus depend on. Runs with equal keys can share them."""
        return self.data, self.corpus, self.tokenizer, self.model.init_from, self.spec.sentinels


def pretrain_defaults(objective: str, width: int, *, continued: bool) -> PretrainSettings:
    """Return the default settings for an objective and a hidden size.

    The learning rate is 0.25 / width, but at most 0.002, which is near published learning rates. It is a tenth of that
    if training continues from a trained model (`continued`).
    """
    lr = min(2e-3, 0.25 / width) * (0.1 if continued else 1.0)
    spec = OBJECTIVES[objective]
    return PretrainSettings(
        objective=spec.settings.defaults(),
        tokenizer=replace(DEFAULT_TOKENIZER, algorithm=spec.algorithm or DEFAULT_TOKENIZER.algorithm),
        train=TrainSettings(
            max_steps=10_000,
            batch_size=4,
            optimizer=AdamW(lr=lr, betas=(0.9, 0.98), eps=1e-6),
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
    recipe: str | Path | Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Mapping[str, object]] | None = None,
    overrides: Mapping[str, object] | Overrides | None = None,
) -> Overrides:
    """Collect settings from the arguments of `pretrain`, and from flags.

    Args:
        data: Files and folders of text, or one folder with a corpus.
        objective: See `pretrain`.
        size: See `pretrain`.
        model: See `pretrain`.
        tokenizer: See `pretrain`.
        teacher: See `pretrain`.
        recipe: See `Overrides`.
        assignments: See `Overrides`.
        flags: See `Overrides`.
        overrides: Python values, or an `Overrides` object. The latter must be the only argument.

    Raises:
        HeedfulError: If a recipe is among the text files, or an option has an unknown value.
    """
    paths = [str(path) for path in ([data] if isinstance(data, str | Path) else data) if str(path)]
    if recipes := [path for path in paths if path.endswith(".toml")]:
        raise HeedfulError(
            f"{recipes[0]} is a recipe among text files: give it alone, to learn from the text that it names, or "
            f"as --recipe {recipes[0]}, to learn from other text"
        )
    flags = dict(flags or {})
    if paths:
        flags[f"DATA {', '.join(paths)}"] = {"data": paths}
    if objective:
        flags[f"--objective {objective}"] = _objective_by_name(objective)
    for option, value, path in (
        ("--size", size, "model.size"),
        ("--model", model, "model.init_from"),
        ("--tokenizer", tokenizer, "tokenizer.path"),
        ("--teacher", teacher, "objective.teacher"),
    ):
        if value:
            flags[f"{option} {value}"] = {path: value}
    return Overrides.of(overrides, recipe=recipe, flags=flags, assignments=assignments)


def resolve_pretrain(data: str | Path | Sequence[str | Path] = (), **options: Any) -> PretrainSettings:
    """Return the complete settings of a run: the defaults, with the settings of the user merged over them.

    The defaults depend on the objective, the hidden size and whether a trained model is trained further. The arguments
    are those of `pretrain_overrides`.

    Raises:
        HeedfulError: If a setting is wrong or would change nothing.
    """
    overrides = pretrain_overrides(data, **options)
    preview = overrides.resolve(pretrain_defaults("mlm", 256, continued=False))
    model, objective = preview.settings.model, preview.settings.objective
    if preview.has("model.size") and model.init_from:
        raise SettingError(
            f"model.size would change nothing: {model.init_from} has a shape of its own; leave it out",
            path="model.size",
        )
    _, hidden_size, _ = model.shape
    if model.init_from and not preview.has("train.optimizer.lr"):
        hidden_size = _hidden_size(model.init_from)
    defaults = pretrain_defaults(objective.kind, hidden_size, continued=bool(model.init_from))
    return overrides.resolve(replace(defaults, objective=objective)).settings


def _objective_by_name(name: str) -> dict[str, object]:
    """Return settings by path that choose an objective, by its name or by some of its terms joined by +.

    Raises:
        HeedfulError: If there is no such objective.
    """
    if name in OBJECTIVES:
        return {"objective.kind": name}
    with_terms = [spec for spec in OBJECTIVES.values() if spec.terms]
    terms = name.split("+")
    for spec in with_terms:
        if set(terms) <= set(spec.terms):
            return spec.settings.of_terms(terms)
    hint = did_you_mean(name, [*OBJECTIVES, *(term for spec in with_terms for term in spec.terms)])
    choices = "".join(f", or terms of a {spec.name} joined by +: {', '.join(spec.terms)}" for spec in with_terms)
    raise HeedfulError(f'"{name}" is not an objective{hint}: use one of {", ".join(OBJECTIVES)}{choices}')


def _hidden_size(model: str) -> int:
    """Return the hidden size of the model in a folder or on the hub."""
    from heedful.checkpoint import config_of  # here, since it imports torch

    return config_of(model).model.width
