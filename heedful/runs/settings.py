"""Settings of a fine-tuning run: defaults that follow from its data, a recipe over them, assignments over both.

Imports nothing heavy, so that a wrong one is told at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from heedful.data import DataSettings
from heedful.errors import HeedfulError, SettingError
from heedful.model.classic_config import Bag, Readers
from heedful.runs.aliases import canonical_task
from heedful.runs.init_settings import Classic, Init, Pretrained, Recurrent, Seq2Seq
from heedful.runs.overrides import Overrides, Resolved
from heedful.settings import load_mapping, overlay, to_mapping
from heedful.train.settings import AdamW, FitSettings, Linear, Noam, Schedule, TrainSettings

PRETRAINED = Pretrained()
LongInputs = Literal["stride", "truncate"]
ClassWeight = Literal["balanced"] | None  # balanced: examples / (classes * examples of the class)
Words = Literal["13a", "intl", "zh", "char", "none"]  # into which BLEU parts texts, in the names of sacrebleu
EPOCHS = ((500_000, 1.0), (50_000, 2.0), (2_000, 4.0), (500, 8.0), (0, 15.0))  # from so many examples on
TAG_EPOCHS = ((500_000, 1.0), (50_000, 2.0), (2_000, 6.0), (500, 8.0), (0, 15.0))  # results/tag-epochs-2026-11-25.md
LONG_TEXT = 512  # characters, about 128 tokens: so many of longer texts count as one example when epochs are chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifySettings:
    """One label of several."""

    kind: Literal["classify"] = "classify"
    class_weight: ClassWeight = None  # balanced: weights each class by the inverse of its frequency


@dataclass(frozen=True, kw_only=True, slots=True)
class MultipleSettings:
    """Any number of labels."""

    kind: Literal["multiple"] = "multiple"
    class_weight: ClassWeight = None  # balanced: a label's positives weigh as much as its negatives
    thresholds: float | Literal["tuned"] = 0.5  # probability from which a label is given; tuned: best F1 on dev

    def __post_init__(self) -> None:
        if self.thresholds != "tuned" and not 0 < self.thresholds < 1:
            raise HeedfulError(f'thresholds is {self.thresholds}; expected a number between 0 and 1, or "tuned"')


@dataclass(frozen=True, kw_only=True, slots=True)
class RegressSettings:
    """A number."""

    kind: Literal["regress"] = "regress"


@dataclass(frozen=True, kw_only=True, slots=True)
class TagSettings:
    """A label for every word."""

    kind: Literal["tag"] = "tag"


@dataclass(frozen=True, kw_only=True, slots=True)
class QASettings:
    """A span of the context."""

    kind: Literal["qa"] = "qa"
    no_answer_threshold: float | Literal["tuned"] = "tuned"  # lead of "no answer" over an answer; tuned: on dev
    max_answer_tokens: int = 30  # saved with the model

    def __post_init__(self) -> None:
        if self.max_answer_tokens < 1:
            raise HeedfulError(f"max_answer_tokens is {self.max_answer_tokens}; expected a whole number from 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class MultipleChoiceSettings:
    """One candidate."""

    kind: Literal["multiple-choice"] = "multiple-choice"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedSettings:
    """A vector."""

    kind: Literal["embed"] = "embed"
    group_size: int = 32  # pairs in a group of in-batch negatives, for pairs without scores
    scale: float = 20.0  # of their cosines

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise HeedfulError(f"group_size is {self.group_size}; expected a whole number of pairs from 2")
        if not 0 < self.scale < float("inf"):
            raise HeedfulError(f"scale is {self.scale}; expected a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seq2SeqSettings:
    """A text for a text."""

    kind: Literal["seq2seq"] = "seq2seq"
    max_new_tokens: int = 128  # per text in evaluations
    num_beams: int = 1  # in evaluations; 1: greedy
    label_smoothing: float = 0.0  # share of the target spread over the vocabulary (Szegedy et al. 2016, section 7)
    metric: Literal["f1", "bleu"] = "f1"  # ranks models; bleu needs sacrebleu
    bleu: Words = "13a"  # that it counts; char: characters, for texts without spaces or of few words

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_beams"):
            if getattr(self, name) < 1:
                raise HeedfulError(f"{name} is {getattr(self, name)}; expected a whole number from 1")
        if not 0 <= self.label_smoothing < 1:
            raise HeedfulError(f"label_smoothing is {self.label_smoothing}; expected a share from 0 to below 1")


TaskSettings = (
    ClassifySettings
    | MultipleSettings
    | RegressSettings
    | TagSettings
    | QASettings
    | MultipleChoiceSettings
    | EmbedSettings
    | Seq2SeqSettings
)
TASKS: dict[str, type] = {
    "classify": ClassifySettings,
    "multiple": MultipleSettings,
    "regress": RegressSettings,
    "tag": TagSettings,
    "qa": QASettings,
    "multiple-choice": MultipleChoiceSettings,
    "embed": EmbedSettings,
    "seq2seq": Seq2SeqSettings,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneSettings:
    """Everything that decides what a run does."""

    task: TaskSettings
    init: Init = PRETRAINED  # where training starts from
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings(epochs=3.0)
    fit: FitSettings = FitSettings()
    seeds: int = 1  # runs with train.seed, train.seed + 1, ...
    max_length: int | None = None  # tokens of a sequence, in training and afterwards; None: as many as the model reads
    long_inputs: LongInputs = "stride"  # longer texts: windows that overlap by half, or the end is dropped
    eval_precision: Literal["float32", "bfloat16"] = "float32"  # precision of the final evaluation
    eval_baseline: bool = True  # also score a bag of words (classify, regress) or the untrained model (embed)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise HeedfulError(f"seeds is {self.seeds}; expected a whole number from 1")
        if self.max_length is not None and self.max_length < 8:
            raise HeedfulError(f"max_length is {self.max_length}; expected a number of tokens from 8")
        if isinstance(self.init, Seq2Seq) and not isinstance(self.task, Seq2SeqSettings):
            kind = "classify" if self.task.kind == "multiple" else self.task.kind
            raise SettingError(f'init.kind is "{self.init.kind}", which is for seq2seq, not {kind}', path="init.kind")
        if isinstance(self.init, Classic):
            readable(self.task.kind, self.init.reader, "init.reader")


def readable(task: str, reader: Readers, name: str, labels: int = 2) -> None:
    """Refuse what nobody would take of a reader, which is set under that name, for so many labels."""
    if task == "classify" and reader.binary == "sigmoid" and labels != 2:
        raise HeedfulError(f'{name}.binary is "sigmoid", which is for two labels, but there are {labels}: leave it out')
    if task == "seq2seq":
        what = f'{name}.kind is "{reader.kind}", which reads texts and writes none'
        raise HeedfulError(f'{what}: for seq2seq, set init.kind to "transformer" or "recurrent"')
    if task in ("multiple", "regress") and reader.binary == "sigmoid":
        raise HeedfulError(f'{name}.binary is "sigmoid", which is of one label of two: leave it out')
    if task in ("qa", "multiple-choice"):
        raise HeedfulError(f'{name}.kind is "{reader.kind}": classic models have no head for {task}')
    if task in ("tag", "embed") and reader != Bag(over=reader.over):
        what = f'{name}.kind is "{reader.kind}", or has settings of classes: {task} takes the rows themselves'
        raise HeedfulError(f'{what}; give kind = "bag", and over')


def defaults(
    kind: str,
    examples: int,
    *,
    fresh: bool,
    width: int = 768,
    classic: bool = False,
    writer: Seq2Seq | None = None,
    together: int = 1,
    words: Words | None = "13a",
    characters: int = 0,
) -> tuple[FinetuneSettings, str]:
    """Settings for so many training examples, and why, in words; `fresh`: the encoder has seen little text.

    Epochs follow from the number of examples, or from the characters of all texts where these are long: 512 of them
    count as one example. 0: by examples alone.

    So many samples as are learned `together` are never parted: a batch has whole groups of them.
    What is written is compared by BLEU of those `words`, or, with None, by F1.
    Small data needs more passes to converge and a smaller batch (Mosbach et al. 2021); a fresh encoder a higher rate,
    and so does a narrow one: 0.04 / width is 5e-5 for the published base sizes (Devlin et al. 2019, appendix A.3).
    """
    if writer is not None:
        return _to_write(writer, examples, words)
    epochs = min(_epochs(kind, examples), _epochs(kind, characters // LONG_TEXT))
    batch = 32 if examples >= 10_000 else 16
    batch = max(batch, together) // together * together
    rate = 2e-3 if classic else 5e-4 if fresh else float(f"{0.04 / width:.0e}")
    settings = FinetuneSettings(
        task=TASKS[kind](),
        train=TrainSettings(epochs=epochs, batch_size=batch, optimizer=AdamW(lr=rate)),
        fit=FitSettings(eval_every_epochs=1.0 if epochs > 2 else 0.5),
    )
    start = "a classic model" if classic else "a fresh encoder" if fresh else f"a trained model {width} wide"
    long = f" of {characters:,} characters" if epochs < _epochs(kind, examples) else ""
    return settings, f"defaults for {examples:,} examples{long} and {start}"


def _epochs(kind: str, examples: int) -> float:
    """The default number of epochs; sentences whose words are tagged are short, and want more of them."""
    return next(count for least, count in (TAG_EPOCHS if kind == "tag" else EPOCHS) if examples >= least)


def whole_groups(train: TrainSettings, together: int) -> None:
    """Refuse a batch that would part samples that are learned together."""
    if train.batch_size % together:
        raise HeedfulError(
            f"train.batch_size is {train.batch_size}, but an update takes whole groups of {together} pairs "
            f"(task.group_size): set train.batch_size to {together} or a multiple of it"
        )


def _to_write(writer: Seq2Seq, examples: int, words: Words | None) -> tuple[FinetuneSettings, str]:
    """Of a model that learns to write from random weights: five times the passes, and smoothed targets.

    A Transformer has the rate at which the paper's warm-up of 4,000 steps ends, (4000 width)^-0.5, its betas and eps
    (Vaswani et al. 2017, sections 5.3 and 5.4).
    """
    epochs = 5 * _epochs("seq2seq", examples)
    batch = 64 if examples >= 2_000 else 16
    schedule: Schedule = Linear(warmup_ratio=0.1)
    if isinstance(writer, Recurrent):
        what, optimizer = "two recurrent nets", AdamW(lr=1e-3)
    else:
        rate = float(f"{(4000 * writer.shape.width) ** -0.5:.1e}")
        what, optimizer, schedule = "a Transformer", AdamW(lr=rate, betas=(0.9, 0.98), eps=1e-9), Noam(warmup_ratio=0.1)
    metric: Literal["f1", "bleu"] = "bleu" if words is not None and _has_bleu() else "f1"
    if metric == "f1":
        why = "most targets have fewer than 4 characters" if _has_bleu() else "sacrebleu, for BLEU, is not installed"
        by = f", compared by F1 of words, since {why}"
    else:
        by = ", compared by BLEU of characters, since most targets have fewer than 4 words" if words == "char" else ""
    settings = FinetuneSettings(
        task=Seq2SeqSettings(label_smoothing=0.1, metric=metric, bleu=words or "13a"),
        train=TrainSettings(epochs=epochs, batch_size=batch, optimizer=optimizer, schedule=schedule),
        fit=FitSettings(eval_every_epochs=max(1.0, epochs / 15)),
    )
    return settings, f"defaults for {examples:,} examples and {what} with random weights{by}"


def _has_bleu() -> bool:
    return find_spec("sacrebleu") is not None


def summary(settings: FinetuneSettings, why: str, by_hand: Sequence[str] = ()) -> str:
    """How a run trains: defaults for what `why` names, but for what was set by hand."""
    train = settings.train
    smoothing = (
        f", label smoothing {settings.task.label_smoothing:g}" if isinstance(settings.task, Seq2SeqSettings) else ""
    )
    said = f"{why}: {train.duration}, batches of {train.batch_size}, lr {train.optimizer.lr:g}{smoothing}"
    return said + (f"; set by hand: {', '.join(by_hand)}" if by_hand else "")


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their whole names.

    >>> list(flat({"seeds": 1, "train": {"optimizer": {"lr": 0.1}}}))
    [('seeds', 1), ('train.optimizer.lr', 0.1)]
    """
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def changed(settings: Any, usual: Any) -> list[str]:
    """What is not as usual, as arguments of a command.

    >>> changed(DataSettings(dev_fraction=0.2, columns={"text": "review"}), DataSettings())
    ['columns.text=review', 'dev_fraction=0.2']
    """
    now, before = (dict(flat(to_mapping(each))) for each in (settings, usual))
    return [f"{name}={value}" for name, value in now.items() if name not in before or value != before[name]]


def as_trained(run: str | Path) -> tuple[DataSettings, LongInputs]:
    """How a run read its data and long texts, without a dev split that is made; what is no run has the usual."""
    path = Path(run) / "settings.toml"
    table = load_mapping(path) if path.is_file() else {}
    data, given = DataSettings(), table.get("data")
    if isinstance(given, Mapping):  # text to pre-train on is named
        data = overlay(data, given, source=f"{path}: data")
    return replace(data, dev_fraction=0.0), table.get("long_inputs", "stride")


def told_apart(task: TaskSettings, scored: bool) -> int:
    """How many samples are learned together."""
    return task.group_size if isinstance(task, EmbedSettings) and not scored else 1


def known_task(task: str) -> str:
    """Return the task that a name means: its own, or that of a pipeline, as "ner".

    Raises:
        HeedfulError: If it means none.
    """
    if task == "multiple":
        raise HeedfulError('"multiple" is not a task of its own: classify takes one label or any number of them')
    return canonical_task(task, [name for name in TASKS if name != "multiple"])


def overrides_of(
    overrides: Mapping[str, Any] | Overrides | None = None,
    *,
    model: str | Path = "",
    recipe: str | Path | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Mapping[str, Any]] | None = None,
) -> Overrides:
    """Collect what was given by hand; overrides that were collected before are returned as they are."""
    named = {f"--model {model}": {"init.model": str(model), "init.revision": ""}} if str(model) else {}
    return Overrides.of(overrides, recipe=recipe, flags={**named, **(flags or {})}, assignments=assignments)


def foresee(task: str, overrides: Overrides) -> FinetuneSettings:
    """Return the settings as far as they are known before the data are read, and refuse what is wrong already."""
    task = known_task(task)
    try:
        return resolve(overrides, defaults(task, 1, fresh=False)[0]).settings
    except HeedfulError:
        if task != "classify":
            raise
        return resolve(overrides, defaults("multiple", 1, fresh=False)[0]).settings  # rows with any number of labels


def resolve(overrides: Overrides, usual: FinetuneSettings) -> Resolved[FinetuneSettings]:
    """Lay overrides over the defaults of a task, which they may not change."""
    resolved, kind = overrides.resolve(usual), usual.task.kind
    task = resolved.settings.task
    if isinstance(task, Seq2SeqSettings) and task.metric == "bleu" and not _has_bleu():
        raise SettingError(
            "task.metric is bleu, which sacrebleu measures, which is not installed: "
            "pip install 'heedful[translate]', or let models be compared by F1 of words: task.metric=f1",
            path="task.metric",
        )
    if task.kind != kind:
        name = "classify" if kind == "multiple" else kind
        message = f'task.kind is "{task.kind}", but the task, {name}, and its data decide it: leave it out'
        raise SettingError(message, path="task.kind")
    return resolved
