"""Settings of `heedful distil`, with its named students and losses.

This module imports nothing heavy, so that a wrong setting is refused immediately.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from heedful.data import DataSettings
from heedful.errors import HeedfulError, did_you_mean
from heedful.model.classic_config import AttentionPooling, BagPooling, HierarchicalPooling, Recurrent, StructuredPooling
from heedful.runs.finetune.init_settings import WordSettings, name_with_revision
from heedful.runs.finetune.settings import check_batch_groups, finetune_defaults
from heedful.runs.overrides import Overrides, flatten_settings
from heedful.runs.pretrain.settings import SIZES, PretrainSettings, Size
from heedful.runs.pretrain.specs.mlm import MlmSettings
from heedful.settings import to_mapping
from heedful.tasks.settings import TaskSettings
from heedful.tasks.specs import SPECS
from heedful.toml_json import as_json
from heedful.train.settings import FitSettings, TrainSettings

DEFAULT_POOLING = BagPooling()
DEFAULT_WORDS = WordSettings()
DEFAULT_DATA = DataSettings()
DEFAULT_PRETRAIN = PretrainSettings()

# -- the student --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersStudent:
    """A student with some of the teacher's layers."""

    kind: Literal["layers"] = "layers"
    layers: int = 3  # Transformer blocks of the student
    teacher_layers: tuple[int, ...] = ()  # layers of the teacher to copy, counted from 0; (): evenly spread
    family: str = ""  # model family; "": the teacher's

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise HeedfulError(f"layers is {self.layers}; expected a whole number from 1")
        if self.teacher_layers and len(self.teacher_layers) != self.layers:
            raise HeedfulError(
                f"teacher_layers names {len(self.teacher_layers)} layers, but the student has {self.layers}: name as "
                "many, or change layers"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeStudent:
    """A student with random weights, of a named size, with the teacher's vocabulary."""

    kind: Literal["size"] = "size"
    size: Size = "tiny"  # named shape: layers, hidden size and heads
    family: str = ""  # model family; "": the teacher's
    layers: int | None = None  # Transformer blocks; None: as in the size
    width: int | None = None  # hidden size; None: as in the size
    heads: int | None = None  # attention heads; None: as in the size


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderStudent:
    """A trained model as student."""

    kind: Literal["folder"] = "folder"
    model: str  # a folder, or NAME[@REVISION] on the hub
    revision: str = ""  # revision on the hub, instead of NAME@REVISION

    def __post_init__(self) -> None:
        for name, value in zip(("model", "revision"), name_with_revision(self.model, self.revision), strict=True):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassicStudent:
    """A student from before the Transformer, over the words of the texts."""

    kind: Literal["classic"] = "classic"
    reader: BagPooling | AttentionPooling | StructuredPooling | HierarchicalPooling = DEFAULT_POOLING
    words: WordSettings = DEFAULT_WORDS
    skipgram_steps: int = 0  # skip-gram steps that train the word vectors first, 64 texts each


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticStudent:
    """A student with a vector for each token of the teacher's vocabulary, made from the teacher's hidden states."""

    kind: Literal["static"] = "static"
    width: int = 256  # dimension of the token vectors: principal components of the teacher's hidden states
    # a in the weight a / (a + p) of a token that is a share p of all tokens (Arora et al. 2017); None: no weights
    sif_coefficient: float | None = 1e-3
    dropout: float = 0.0  # dropout of token vectors

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("width", self.width >= 1, "a whole number from 1"),
            ("sif_coefficient", self.sif_coefficient is None or 0 < self.sif_coefficient < 1, "a number from 0 to 1"),
            ("dropout", 0 <= self.dropout < 1, "a number from 0 to below 1"),
        ):
            if not is_valid:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")


StudentSettings = LayersStudent | SizeStudent | FolderStudent | ClassicStudent | StaticStudent
CLASSIC_STUDENTS: dict[str, BagPooling | AttentionPooling | StructuredPooling | HierarchicalPooling] = {
    "bag": BagPooling(),
    "attention": AttentionPooling(keys="tanh"),
    "bilstm": BagPooling(over=Recurrent()),
    "structured": StructuredPooling(),
    "hierarchical": HierarchicalPooling(),
}
STATIC_STUDENT = "static"

NAMED_BY_STUDENT = {  # kind of a student -> settings that the option --student decides; setting them again is an error
    "layers": ("student.kind", "student.layers"),
    "size": ("student.kind", "student.size"),
    "folder": ("student.kind", "student.model", "student.revision"),
    "classic": ("student.kind", "student.reader.kind"),
    "static": ("student.kind",),
}


def parse_student(name: str) -> StudentSettings:
    """Return the settings of a student by its name on the command line.

    >>> parse_student("layers=3").layers, parse_student("mini").size, parse_student("bilstm").kind
    (3, 'mini', 'classic')
    """
    if match := re.fullmatch(r"layers=(\d{1,3})", name):
        return LayersStudent(layers=int(match[1]))
    if name in SIZES:
        return SizeStudent(size=name)  # type: ignore[arg-type]
    if name in CLASSIC_STUDENTS:
        return ClassicStudent(reader=CLASSIC_STUDENTS[name])
    if name == STATIC_STUDENT:
        return StaticStudent()
    if re.fullmatch(r"\w+(=.*)?", name) and not Path(name).exists() and (hint := _student_hint(name)):
        raise HeedfulError(f'"{name}" is not a student{hint}')
    return FolderStudent(model=name)


def _student_hint(name: str) -> str:
    """Return the end of an error message about an unknown student: the most similar name, and all names."""
    known = [*SIZES, *CLASSIC_STUDENTS, STATIC_STUDENT, "layers=3"]
    return f"{did_you_mean(name, known)}: use one of {', '.join(known)}, or the folder of a model"


# -- the losses ---------------------------------------------------------------------------------------------------


class _WeightedLoss:
    """Base class of the settings of a loss term. It checks that `weight` is positive and finite."""

    __slots__ = ()

    def __post_init__(self) -> None:
        if not 0 < getattr(self, "weight", 1.0) < float("inf"):
            raise HeedfulError(f"weight is {getattr(self, 'weight', None)}; expected a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class StatesSettings(_WeightedLoss):
    """A loss on hidden states. State 0 is the input of the first layer, state n the output of the n-th layer."""

    weight: float = 1.0  # weight of the loss on hidden states
    how: Literal["mse", "cosine"] = "mse"  # distance of hidden states: squared error, or 1 - cosine
    layers: Literal["last", "spread"] = "last"  # spread: all student layers, with evenly spaced teacher layers
    pairs: tuple[tuple[int, int], ...] = ()  # pairs of a student layer and a teacher layer, instead of layers


@dataclass(frozen=True, kw_only=True, slots=True)
class RelationsSettings(_WeightedLoss):
    """A loss on how tokens relate in a layer: "qk" is attention (MiniLM); "qq", "kk" and "vv" are from MiniLMv2."""

    weight: float = 1.0  # weight of the loss on attention relations
    # vectors whose scaled products are compared: queries, keys, values
    of: tuple[Literal["qk", "qq", "kk", "vv"], ...] = ("qq", "kk", "vv")
    layers: Literal["last", "spread"] = "last"  # spread: all student layers, with evenly spaced teacher layers
    layer: int | None = None  # layer of the student, from 0, instead of layers
    teacher: int | None = None  # layer of the teacher, from 0
    heads: int | None = None  # heads into which the vectors of both models are split; None: as many as the teacher has
    squares: bool = False  # compare scores before the softmax by squared error, instead of KL after it


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """Weights of the loss terms; each term is the mean over its own targets."""

    kd_weight: float = 1.0  # weight of the loss on the teacher's outputs
    temperature: float = 2.0  # temperature of soft labels
    # how a reranker learns the teacher's scores of the texts of a query: listwise: KL divergence of their softmax;
    # margin_mse: squared error of their differences from the first text's score
    ranking: Literal["listwise", "margin_mse"] = "listwise"
    label_weight: float = 1.0  # weight of the loss on labels, or on masked tokens
    states: StatesSettings | None = None  # loss on hidden states; None: none
    relations: RelationsSettings | None = None  # loss on attention relations; None: none

    def __post_init__(self) -> None:
        for name in ("kd_weight", "label_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected a number from 0")
        if not 0 < self.temperature < float("inf"):
            raise HeedfulError(f"temperature is {self.temperature}; expected a number above 0")
        if not self.kd_weight and self.states is None and self.relations is None:
            raise HeedfulError(
                "kd_weight is 0, and neither states nor relations are set: set one, to learn from the teacher"
            )


LOSS_PRESETS: dict[str, LossSettings] = {  # published combinations, with the weights of their papers
    "logits": LossSettings(),
    "distilbert": LossSettings(kd_weight=5.0, label_weight=2.0, states=StatesSettings(weight=1.0, how="cosine")),
    "minilm": LossSettings(kd_weight=0.0, label_weight=0.0, relations=RelationsSettings(of=("qk", "vv"))),
    "minilmv2": LossSettings(kd_weight=0.0, label_weight=0.0, relations=RelationsSettings()),
    "tinybert": LossSettings(
        temperature=1.0,
        label_weight=0.0,
        states=StatesSettings(layers="spread"),
        relations=RelationsSettings(of=("qk",), layers="spread", squares=True),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherCacheSettings:
    """A cache of the teacher's outputs on the disk."""

    enabled: bool = True  # write the teacher's outputs to the disk once; false: run the teacher in each step
    precision: Literal["float16", "float32"] = "float16"  # number format of the teacher's outputs on the disk
    top_k: int | None = None  # likeliest tokens stored for each masked token, the others as one sum; None: all

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise HeedfulError(f"top_k is {self.top_k}; expected a whole number from 1")
        if not self.enabled and (self.top_k is not None or self.precision != "float16"):
            name = "precision" if self.top_k is None else "top_k"
            raise HeedfulError(f"teacher_cache.{name} has no effect with teacher_cache.enabled=false: leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentSettings:
    """Data augmentation: words are replaced by predictions of a masked language model (Jiao et al. 2020)."""

    copies: int = 1  # variants of each text
    replace_prob: float = 0.15  # share of the words that are replaced
    top_k: int = 20  # likeliest tokens of the masked language model to sample from
    model: str = ""  # a folder, or NAME[@REVISION], with a masked head; "": the teacher's own

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("copies", self.copies >= 1, "a whole number from 1"),
            ("replace_prob", 0 < self.replace_prob < 1, "a share between 0 and 1"),
            ("top_k", self.top_k >= 1, "a whole number from 1"),
        ):
            if not is_valid:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictSettings:
    """Settings of the comparison of student and teacher. Only `baseline` adds a training run."""

    # also train the student without the teacher, for equally many steps or epochs; for masked tokens both are equal
    baseline: Literal["steps", "epochs", "none"] = "steps"
    precision: Literal["auto", "float32", "bfloat16", "int8"] = "auto"  # precision of student and teacher when measured
    texts: int = 64  # how many texts are used to measure speed
    split: Literal["test", "dev"] = "test"  # split on which quality is measured; the other one if it is missing
    rounds: int | None = None  # latency measurements of each model; None: the default of heedful bench

    def __post_init__(self) -> None:
        for name in ("texts", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise HeedfulError(f"{name} is {value}; expected a whole number from 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeSettings:
    """A cascade: the student answers the texts for which it is confident enough, and the teacher the others."""

    max_loss: float = 0.5  # percentage points of accuracy that may be lost to the teacher: 95 % bound on held-out rows
    stages: tuple[str, ...] = ()  # models between student and teacher, the fastest first: folders, or NAME[@REVISION]

    def __post_init__(self) -> None:
        if not 0 <= self.max_loss < 100:
            raise HeedfulError(f"max_loss is {self.max_loss}; expected percentage points from 0 to below 100")


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilSettings:
    """Settings of the distillation of a task."""

    task: TaskSettings
    teacher: str  # a run, a model folder, or NAME[@REVISION] on the hub
    student: StudentSettings = LayersStudent()
    unlabelled: tuple[str, ...] = ()  # files and folders of texts without labels
    augment: AugmentSettings | None = None  # data augmentation by replacing words; None: off
    loss: LossSettings = LossSettings()
    teacher_cache: TeacherCacheSettings = TeacherCacheSettings()
    verdict: VerdictSettings = VerdictSettings()
    cascade: CascadeSettings | None = None  # a cascade of student and teacher; None: off
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings(epochs=3.0)
    fit: FitSettings = FitSettings()
    seeds: int = 3  # how many runs, with train.seed, train.seed + 1, ...; also those of the baseline
    max_length: int | None = None  # maximum tokens of a sequence; None: the student's maximum
    long_inputs: Literal["stride", "truncate"] = "stride"  # longer texts: overlapping windows, or truncation
    eval_precision: Literal["float32", "bfloat16"] = "float32"  # precision of the final evaluation

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise HeedfulError(f"seeds is {self.seeds}; expected a whole number from 1")
        if self.max_length is not None and self.max_length < 8:
            raise HeedfulError(f"max_length is {self.max_length}; expected a number of tokens from 8")


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedDistilSettings:
    """Settings of the distillation of a masked language model, on plain text."""

    teacher: str  # a masked language model: a folder, or NAME[@REVISION] on the hub
    student: StudentSettings = LayersStudent()
    loss: LossSettings = LossSettings()
    # enabled=true needs pretrain.objective.num_static_masks
    teacher_cache: TeacherCacheSettings = TeacherCacheSettings(enabled=False)
    verdict: VerdictSettings = VerdictSettings()
    pretrain: PretrainSettings = DEFAULT_PRETRAIN

    def __post_init__(self) -> None:
        objective = self.pretrain.objective
        if not isinstance(objective, MlmSettings):
            raise HeedfulError(f'pretrain.objective.kind is "{objective.kind}"; expected "mlm"')
        if self.loss.ranking != LossSettings().ranking:
            raise HeedfulError("loss.ranking would change nothing: it is for a reranker; leave it out")
        if self.teacher_cache.enabled and (objective.num_static_masks is None or self.pretrain.phases):
            raise HeedfulError(
                "teacher_cache.enabled is true, but masks are new in each epoch, or rows change with phases: set "
                "pretrain.objective.num_static_masks to the number of static masks, and no phases, or "
                "teacher_cache.enabled=false"
            )


def distil_overrides(
    teacher: str,
    *,
    student: str = "",
    loss: str = "",
    unlabelled: Sequence[str | Path] = (),
    cascade: bool = False,
    max_loss: float | None = None,
    recipe: str | Path | Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, object] | Overrides | None = None,
) -> Overrides:
    """Collect the settings of options, recipe and assignments; return `overrides` unchanged if it is an `Overrides`."""
    if isinstance(overrides, Overrides):
        return overrides
    presets: dict[str, Mapping[str, object]] = {}  # settings that flags and assignments may replace
    flags: dict[str, Mapping[str, object]] = {f"TEACHER {teacher}": {"teacher": teacher}}
    if student:
        option, table = f"--student {student}", to_mapping(parse_student(student))
        presets[option] = {"student": table}
        decided_paths = NAMED_BY_STUDENT[str(table["kind"])]
        flags[option] = {path: value for path, value in flatten_settings({"student": table}) if path in decided_paths}
    if loss:
        presets[f"--loss {loss}"] = {"loss": to_mapping(_loss_preset(loss))}
    if unlabelled:
        paths = [str(path) for path in unlabelled]
        flags[f"--unlabelled {', '.join(paths)}"] = {"unlabelled": paths}
    if cascade:
        presets["--cascade"] = {"cascade": to_mapping(CascadeSettings())}
    if max_loss is not None:
        flags[f"--max-loss {max_loss:g}"] = {"cascade.max_loss": max_loss}
    return Overrides.of(overrides, recipe=recipe, presets=presets, flags=flags, assignments=assignments)


def check_overrides(overrides: Overrides) -> TrainSettings:
    """Check before the teacher is loaded that some task accepts the overrides, and return its training settings.

    Raises:
        HeedfulError: The error for the first task, if no task and no masked language model accepts them.
    """
    first_error: HeedfulError | None = None
    for task in SPECS:
        try:
            return preview_distil_settings(overrides, task).train
        except HeedfulError as error:
            first_error = first_error or error
    try:
        return overrides.resolve(MaskedDistilSettings(teacher="?")).settings.pretrain.train
    except HeedfulError:
        assert first_error is not None
        raise first_error from None


def preview_distil_settings(
    overrides: Overrides, task: str = "classify", data: DataSettings = DEFAULT_DATA
) -> DistilSettings:
    """Resolve settings before the data are read, with the defaults of a task.

    Raises:
        HeedfulError: If a setting is wrong.
    """
    return resolve_distil(overrides, DistilSettings(task=SPECS[task].settings(), teacher="?", data=data))


def resolve_distil(overrides: Overrides, defaults: DistilSettings) -> DistilSettings:
    """Merge overrides over the defaults of a task. An override of `task.kind` with another task is an error."""
    decided_by = f"the teacher's head decides it ({as_json(defaults.task.kind)})"
    return overrides.resolve(defaults, fixed={"task.kind": decided_by}).settings


def _loss_preset(name: str) -> LossSettings:
    if name not in LOSS_PRESETS:
        hint = did_you_mean(name, list(LOSS_PRESETS))
        raise HeedfulError(f'"{name}" is not a combination of losses{hint}: use one of {", ".join(LOSS_PRESETS)}')
    return LOSS_PRESETS[name]


def distil_settings(
    overrides: Overrides,
    task: str,
    labelled_examples: int,
    all_examples: int,
    *,
    random_init: bool,
    width: int,
    classic: bool,
    group_size: int = 1,
    data: DataSettings = DEFAULT_DATA,
    task_settings: TaskSettings | None = None,
) -> DistilSettings:
    """Merge overrides over defaults that depend on the data.

    The defaults are those of fine-tuning, but with twice the epochs. A student learns from the teacher's distribution
    over all labels, so it profits from longer training.

    Args:
        overrides: Settings given by hand.
        task: Name of the task.
        labelled_examples: How many labelled examples there are.
        all_examples: How many examples there are, with and without labels.
        random_init: Whether the student starts from random weights.
        width: Hidden size for which the default learning rate is chosen.
        classic: Whether the student is a classic model.
        group_size: Samples whose loss is computed together, as in-batch negatives; the batch size must divide by it.
        data: Defaults of the data settings.
        task_settings: Defaults of the task. If None, those of fine-tuning.

    Raises:
        HeedfulError: If a setting is wrong, or the batch size does not fit the group size.
    """
    defaults, _ = finetune_defaults(
        task,
        max(labelled_examples, all_examples),
        random_init=random_init,
        width=width,
        classic=classic,
        group_size=group_size,
    )
    assert defaults.train.epochs is not None
    distil_defaults = DistilSettings(
        task=task_settings or defaults.task,
        teacher="?",
        data=data,
        train=defaults.train.with_duration(epochs=2 * defaults.train.epochs),
        fit=replace(defaults.fit, eval_every_epochs=1.0),
    )
    settings = resolve_distil(overrides, distil_defaults)
    check_batch_groups(settings.train, group_size)
    return settings


def parse_share(text: str) -> float:
    """Parse a share of the teacher's quality, in percent or as a number from 0 to 1.

    >>> parse_share("97%"), parse_share("0.9")
    (0.97, 0.9)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value <= 1:
        raise HeedfulError(f'"{text}" is not a share of the quality: write 97% or 0.97')
    return value


def parse_milliseconds(text: str) -> float:
    """Parse a duration into milliseconds.

    >>> parse_milliseconds("5ms"), parse_milliseconds("0.5"), parse_milliseconds("1s")
    (5.0, 0.5, 1000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|)", text.strip())
    value = float(match[1]) * (1000 if match[2] == "s" else 1) if match else 0.0
    if not value > 0:
        raise HeedfulError(f'"{text}" is not a duration: write 5ms')
    return value
