"""Settings of a distillation. Imports nothing heavy, so that a wrong setting is refused at once."""

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

BAG, WORDS, DATA, PRETRAIN = BagPooling(), WordSettings(), DataSettings(), PretrainSettings()

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
                f"teacher_layers names {len(self.teacher_layers)} layers, but the student has {self.layers}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeStudent:
    """A student with random weights, of a named size, with the teacher's vocabulary."""

    kind: Literal["size"] = "size"
    size: Size = "tiny"  # named shape: layers, width and heads
    family: str = ""  # model family; "": the teacher's
    layers: int | None = None  # Transformer blocks, instead of those of the size
    width: int | None = None  # width of the hidden states; None: that of the size
    heads: int | None = None  # attention heads; None: those of the size


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
    reader: BagPooling | AttentionPooling | StructuredPooling | HierarchicalPooling = BAG
    words: WordSettings = WORDS
    skipgram_steps: int = 0  # skip-gram steps that train the word vectors first, 64 texts each


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticStudent:
    """A student with a vector for each token of the teacher's vocabulary, made from the teacher's hidden states."""

    kind: Literal["static"] = "static"
    width: int = 256  # width of the token vectors: principal components of the teacher's hidden states
    # a of the weight a / (a + p) of a token whose share of the texts is p (Arora et al. 2017); none: all alike
    sif_coefficient: float | None = 1e-3
    dropout: float = 0.0  # dropout of token vectors

    def __post_init__(self) -> None:
        for name, right, expected in (
            ("width", self.width >= 1, "a whole number from 1"),
            ("sif_coefficient", self.sif_coefficient is None or 0 < self.sif_coefficient < 1, "a number from 0 to 1"),
            ("dropout", 0 <= self.dropout < 1, "a number from 0 to below 1"),
        ):
            if not right:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")


StudentSettings = LayersStudent | SizeStudent | FolderStudent | ClassicStudent | StaticStudent
CLASSIC: dict[str, BagPooling | AttentionPooling | StructuredPooling | HierarchicalPooling] = {
    "bag": BagPooling(),
    "attention": AttentionPooling(keys="tanh"),
    "bilstm": BagPooling(over=Recurrent()),
    "structured": StructuredPooling(),
    "hierarchical": HierarchicalPooling(),
}
STATIC = "static"

NAMED_BY_STUDENT = {  # settings that the name of a student sets, by its kind
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
    if name in CLASSIC:
        return ClassicStudent(reader=CLASSIC[name])
    if name == STATIC:
        return StaticStudent()
    if re.fullmatch(r"\w+(=.*)?", name) and not Path(name).exists() and (close := _close(name)):
        raise HeedfulError(f'"{name}" is not a student{close}')
    return FolderStudent(model=name)


def _close(name: str) -> str:
    known = [*SIZES, *CLASSIC, STATIC, "layers=3"]
    return f"{did_you_mean(name, known)}: use one of {', '.join(known)}, or the folder of a model"


# -- what is learned ----------------------------------------------------------------------------------------------


class _Weight:
    __slots__ = ()

    def __post_init__(self) -> None:
        if not 0 < getattr(self, "weight", 1.0) < float("inf"):
            raise HeedfulError(f"weight is {getattr(self, 'weight', None)}; expected a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class StatesSettings(_Weight):
    """Hidden states of layers: 0 is what enters the first one, the number of layers what leaves the last."""

    weight: float = 1.0  # weight of the loss on hidden states
    how: Literal["mse", "cosine"] = "mse"  # distance of hidden states: squared error, or 1 - cosine
    layers: Literal["last", "spread"] = "last"  # spread: all of the student, with evenly spread ones of the teacher
    pairs: tuple[tuple[int, int], ...] = ()  # pairs of a student layer and a teacher layer, instead of layers


@dataclass(frozen=True, kw_only=True, slots=True)
class RelationsSettings(_Weight):
    """How tokens are related in an attention layer: "qk" is attention; "qq", "kk" and "vv" those of MiniLMv2."""

    weight: float = 1.0  # weight of the loss on attention relations
    # vectors whose scaled products are compared: queries, keys, values
    of: tuple[Literal["qk", "qq", "kk", "vv"], ...] = ("qq", "kk", "vv")
    layers: Literal["last", "spread"] = "last"  # spread: all of the student, with evenly spread ones of the teacher
    layer: int | None = None  # layer of the student, from 0, instead of layers
    teacher: int | None = None  # layer of the teacher, from 0
    heads: int | None = None  # heads into which both are regrouped; none: as many as the teacher has
    squares: bool = False  # squared differences before the softmax, instead of KL after it


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """Weights of the loss terms; each term is the mean over its own targets."""

    kd_weight: float = 1.0  # weight of the loss on the teacher's outputs
    temperature: float = 2.0  # temperature of soft labels
    # how a reranker learns the teacher's scores of a query's texts: listwise, by KL of their softmax; or margin_mse, by
    # the squared error of their differences from the first text's score
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
    top_k: int | None = None  # most likely tokens kept per masked token, the others as one sum; none: all

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
        for name, right, expected in (
            ("copies", self.copies >= 1, "a whole number from 1"),
            ("replace_prob", 0 < self.replace_prob < 1, "a share between 0 and 1"),
            ("top_k", self.top_k >= 1, "a whole number from 1"),
        ):
            if not right:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected {expected}")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictSettings:
    """Settings of the student's evaluation: baseline, metric and speed. `baseline` alone adds a training run."""

    baseline: Literal["steps", "epochs", "none"] = (
        "steps"  # train the student without the teacher too, for as many steps or epochs; the same for masked tokens
    )
    precision: Literal["auto", "float32", "bfloat16", "int8"] = "auto"  # precision in which both are measured
    texts: int = 64  # texts whose speed is measured
    split: Literal["test", "dev"] = "test"  # split on which quality is measured; the other one if it is missing
    rounds: int | None = None  # measurements of the latency of each text; none: as many as bench makes

    def __post_init__(self) -> None:
        for name in ("texts", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise HeedfulError(f"{name} is {value}; expected a whole number from 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeSettings:
    """A cascade in which the student answers where it is confident enough, and the teacher elsewhere."""

    max_loss: float = 0.5  # percentage points of accuracy, on held-out rows, that the cascade may lose to the teacher
    stages: tuple[str, ...] = ()  # models between student and teacher, the fastest first: folders, or NAME[@REVISION]

    def __post_init__(self) -> None:
        if not 0 <= self.max_loss < 100:
            raise HeedfulError(f"max_loss is {self.max_loss}; expected percentage points from 0 to below 100")


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilSettings:
    """Everything that decides what a run does."""

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
    seeds: int = 3  # number of runs, with train.seed, train.seed + 1, ...; as many without the teacher
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
    teacher_cache: TeacherCacheSettings = TeacherCacheSettings(
        enabled=False
    )  # true needs pretrain.objective.num_static_masks
    verdict: VerdictSettings = VerdictSettings()
    pretrain: PretrainSettings = PRETRAIN

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
    """Collect what was given by hand; `Overrides` are returned as they are."""
    if isinstance(overrides, Overrides):
        return overrides
    presets: dict[str, Mapping[str, object]] = {}
    flags: dict[str, Mapping[str, object]] = {f"TEACHER {teacher}": {"teacher": teacher}}
    if student:
        name, table = f"--student {student}", to_mapping(parse_student(student))
        presets[name] = {"student": table}
        named = {
            path: value
            for path, value in flatten_settings({"student": table})
            if path in NAMED_BY_STUDENT[str(table["kind"])]
        }
        flags[name] = named
    if loss:
        presets[f"--loss {loss}"] = {"loss": to_mapping(_recipe(loss))}
    if unlabelled:
        places = [str(file) for file in unlabelled]
        flags[f"--unlabelled {', '.join(places)}"] = {"unlabelled": places}
    if cascade:
        presets["--cascade"] = {"cascade": to_mapping(CascadeSettings())}
    if max_loss is not None:
        flags[f"--max-loss {max_loss:g}"] = {"cascade.max_loss": max_loss}
    return Overrides.of(overrides, recipe=recipe, presets=presets, flags=flags, assignments=assignments)


def check_overrides(overrides: Overrides) -> None:
    """Refuse overrides that are wrong for a teacher of any task, before the teacher is loaded."""
    first: HeedfulError | None = None
    for kind in SPECS:
        try:
            preview_distil_settings(overrides, kind)
        except HeedfulError as error:
            first = first or error
        else:
            return
    try:
        overrides.resolve(MaskedDistilSettings(teacher="?"))
    except HeedfulError:
        assert first is not None
        raise first from None


def preview_distil_settings(overrides: Overrides, task: str = "classify", data: DataSettings = DATA) -> DistilSettings:
    """Return the settings as far as they are known before the data are read, and refuse wrong ones."""
    return resolve_distil(overrides, DistilSettings(task=SPECS[task].settings(), teacher="?", data=data))


def resolve_distil(overrides: Overrides, defaults: DistilSettings) -> DistilSettings:
    """Lay overrides over the defaults of a task."""
    decided_by = f"the teacher's head decides it ({as_json(defaults.task.kind)})"
    return overrides.resolve(defaults, fixed={"task.kind": decided_by}).settings


def _recipe(name: str) -> LossSettings:
    if name not in LOSS_PRESETS:
        close = did_you_mean(name, list(LOSS_PRESETS))
        raise HeedfulError(f'"{name}" is not a combination of losses{close}: use one of {", ".join(LOSS_PRESETS)}')
    return LOSS_PRESETS[name]


def distil_settings(
    overrides: Overrides,
    task: str,
    examples: int,
    texts: int,
    *,
    random_init: bool,
    width: int,
    classic: bool,
    group_size: int = 1,
    data: DataSettings = DATA,
    task_settings: TaskSettings | None = None,
) -> DistilSettings:
    """Lay overrides over defaults that follow from the data.

    The defaults are those of fine-tuning with twice the epochs: a longer training suits a student, which learns from
    the whole distribution of each text.

    Args:
        overrides: Settings given by hand.
        task: Name of the task's specification.
        examples: Number of labelled examples.
        texts: Number of examples with and without labels.
        random_init: Whether the student starts from random weights.
        width: By which the learning rate is chosen.
        classic: Whether the student is a classic model.
        group_size: Samples that are learned together.
        data: Defaults of the data settings.
        task_settings: Defaults of the task; None: those of fine-tuning.
    """
    defaults, _ = finetune_defaults(
        task, max(examples, texts), random_init=random_init, width=width, classic=classic, group_size=group_size
    )
    assert defaults.train.epochs is not None
    settings = DistilSettings(
        task=task_settings or defaults.task,
        teacher="?",
        data=data,
        train=defaults.train.with_duration(epochs=2 * defaults.train.epochs),
        fit=replace(defaults.fit, eval_every_epochs=1.0),
    )
    settings = resolve_distil(overrides, settings)
    check_batch_groups(settings.train, group_size)
    return settings


def parse_share(text: str) -> float:
    """Parse a share of the quality, in percent or as a number.

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
