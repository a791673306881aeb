"""The plan of a distillation: settings, data and teacher, and what is refused before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from heedful.checkpoint import ModelBundle
from heedful.checkpoint.bundle import cascade_refusal
from heedful.data import DataOptions, Dataset, DataSettings, Raise, Skip, TaggedExample, read
from heedful.data.bad_rows import BadRowPolicy, OnBadRow
from heedful.data.examples import Example
from heedful.data.inputs.inherited_settings import columns_by_name, list_data_files
from heedful.data.labelled.columns import MissingColumnError
from heedful.data.labelled.statistics import (
    DatasetStats,
    check_learnable,
    compute_stats,
    dev_split_problem,
    split_warnings,
)
from heedful.data.tag_schemes import unknown_labels
from heedful.errors import DataError, HeedfulError, RunError, SettingError
from heedful.objectives.distillation.teacher import ScoreKind
from heedful.runs.card.cascade import CASCADE
from heedful.runs.card.verdict import VERDICT
from heedful.runs.data_settings import data_settings_for
from heedful.runs.distil.augment import check_augmentation
from heedful.runs.distil.cascade import check_cascade
from heedful.runs.distil.settings import (
    DEFAULT_POOLING,
    ClassicStudent,
    DistilSettings,
    FolderStudent,
    LayersStudent,
    LossSettings,
    MaskedDistilSettings,
    SizeStudent,
    StaticStudent,
    StudentSettings,
    distil_settings,
    preview_distil_settings,
)
from heedful.runs.distil.students import width_for_lr
from heedful.runs.distil.unlabelled import Unlabelled, read_unlabelled, teacher_tasks, without_evaluated
from heedful.runs.finetune.checks import check_dev_split, check_unused_settings
from heedful.runs.finetune.init_settings import Scratch
from heedful.runs.finetune.plan import FinetunePlan
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.runs.overrides import Overrides, changed_settings
from heedful.runs.results import JsonObject
from heedful.runs.run_folder import DATA, SETTINGS, files_trained_on, read_run_json, read_settings, write_file
from heedful.runs.statistics import seed_count
from heedful.settings import load_mapping, to_mapping, to_toml
from heedful.tasks.answering import require_tokenizer
from heedful.tasks.specs import SPECS
from heedful.tasks.specs.rank import RankSettings

TEACHER_FILE = "teacher.json"
DEFAULTS = DataSettings()
STUDENT_BEFORE = "the student as it was before it learned"  # initial weights of the baseline


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilPlan:
    """Settings, data and teacher."""

    settings: DistilSettings
    task: str
    teacher: ModelBundle
    source: Dataset[Example]
    survey: DatasetStats
    unlabelled: Unlabelled
    notes: tuple[str, ...]
    labels: tuple[str, ...] | None  # of the teacher's head

    @property
    def kind(self) -> ScoreKind:
        """The kind of soft labels."""
        kind = SPECS[self.task].distillation
        assert kind is not None, "teacher_task refuses other teachers"
        return kind

    def finetune_plan(self, **changed: Any) -> FinetunePlan:
        """The fine-tuning plan of the student, or of the baseline without the teacher."""
        names = ("task", "data", "train", "fit", "seeds", "max_length", "long_inputs", "eval_precision")
        settings = FinetuneSettings(
            init=Scratch(), eval_baseline=False, **{name: getattr(self.settings, name) for name in names}
        )
        settings = replace(settings, **changed)
        return FinetunePlan(
            settings=settings,
            source=self.source,
            survey=self.survey,
            notes=self.notes,
            why=_why(settings),
            labels=self.labels,
        )


def _why(settings: FinetuneSettings) -> str:
    train = settings.train
    return f"{train.duration}, batches of {train.batch_size}, lr {train.optimizer.lr:g}, {seed_count(settings.seeds)}"


def plan_distil(
    teacher: ModelBundle, overrides: Overrides, data: object, *, on_bad_row: OnBadRow = "raise", exclude: Path
) -> DistilPlan:
    """Resolve the settings, open the data, and check both against the teacher, before anything is written.

    Args:
        teacher: With the head of its task.
        overrides: Settings given by hand, the teacher's folder among them.
        data: Labelled data.
        on_bad_row: "raise", or "skip" to leave rows out that cannot be read.
        exclude: A folder whose files are not read as unlabelled texts.

    Raises:
        HeedfulError: If the data or a setting cannot be used with this teacher.
    """
    require_tokenizer(teacher)
    if teacher.early_stages:
        raise cascade_refusal(teacher.source, "a teacher")
    task = _task_of_data(teacher, overrides, data)
    preview = preview_distil_settings(overrides, task)
    if preview.cascade is not None:
        check_cascade(preview.cascade, teacher)
    inherited = data_settings_for(preview.teacher, data, preview.data)[0]
    inherited = replace(inherited, dev_fraction=DEFAULTS.dev_fraction, seed=DEFAULTS.seed)
    preview = preview_distil_settings(overrides, task, inherited)
    check_classic_student(task, preview.student, preview.verdict.precision)
    _check_ranking(preview)
    if preview.augment is not None:
        check_augmentation(task, preview.teacher, preview.augment)
    if preview.teacher_cache.top_k is not None:
        raise SettingError(
            "teacher_cache.top_k is for a masked language model, whose likeliest tokens are kept: unset it",
            path="teacher_cache.top_k",
        )
    rows = Skip if on_bad_row == "skip" else Raise
    source = open_labelled(task, data, preview, rows())
    if source.has_generated_dev and files_trained_on(preview.teacher, source.places["train"]):
        preview = preview_distil_settings(overrides, task, replace(inherited, **dev_split_settings(preview.teacher)))
        source = open_labelled(task, data, preview, rows())
    stats = compute_stats(source, ("train", *(split for split in source.splits if split != "train")))
    if dev_problem := dev_split_problem(source, stats):
        raise DataError(f"student and teacher are compared on dev, but {dev_problem}: give a dev or a test file")
    check_learnable(source, stats)
    if stats.non_empty_splits == ("train",):
        raise DataError(
            "there is neither dev nor test to compare student and teacher on: give a file that the teacher was not "
            "trained on, or set data.dev_fraction"
        )
    labels = getattr(teacher.config.head, "labels", None)
    if labels is not None and (unknown := unknown_labels(source.labels, labels, tags=source.kind is TaggedExample)):
        raise DataError(
            f"the data has the labels {', '.join(source.labels[:10])}, but {teacher.source} knows "
            f"{', '.join(labels[:10])}: the teacher cannot teach {', '.join(unknown[:5])}. Rename them in the data"
        )
    unlabelled = _read_unlabelled(preview, teacher, source, stats, labels, exclude)
    count = stats.counts["train"]
    augmented = 0 if preview.augment is None else preview.augment.copies * (len(unlabelled.examples) or count)
    settings = distil_settings(
        overrides,
        task,
        count,
        count + len(unlabelled.examples) + augmented,
        random_init=isinstance(preview.student, SizeStudent),
        width=width_for_lr(preview.student, teacher),
        classic=isinstance(preview.student, ClassicStudent | StaticStudent),
        group_size=preview.task.group(scored=stats.min_score is not None),
        data=preview.data,
        task_settings=SPECS[task].settings().of_teacher(teacher.thresholds, has_dev="dev" in stats.non_empty_splits),
    )
    check_dev_split(settings, stats, dev_problem)
    check_unused_settings(settings, stats, classic=isinstance(settings.student, ClassicStudent | StaticStudent))
    notes = (*_inherited_notes(inherited), *_data_notes(stats, unlabelled, source))
    return DistilPlan(
        settings=settings,
        task=task,
        teacher=teacher,
        source=source,
        survey=stats,
        unlabelled=unlabelled,
        notes=(*notes, *_contamination_notes(preview.teacher, source, stats)),
        labels=labels,
    )


def _task_of_data(teacher: ModelBundle, overrides: Overrides, data: object) -> str:
    """Return the first task of the teacher's head whose columns the data has."""
    *tasks, last = teacher_tasks(teacher)
    for task in tasks:
        preview = preview_distil_settings(overrides, task)
        try:
            read(data, SPECS[task].example, data_settings_for(preview.teacher, data, preview.data)[0])
        except MissingColumnError:
            continue
        return task
    return last


def _check_ranking(settings: DistilSettings) -> None:
    """Refuse losses of rankings that would have no effect, or two teachers."""
    is_ranking = isinstance(settings.task, RankSettings)
    if isinstance(settings.task, RankSettings) and settings.task.loss == "margin_mse":
        raise SettingError(
            "task.loss is margin_mse, which learns the column teacher_scores of the data: to learn the margins of "
            "this teacher set loss.ranking=margin_mse, and leave task.loss out",
            path="task.loss",
        )
    if is_ranking and settings.unlabelled:
        raise SettingError(
            "unlabelled names texts, but a reranker learns queries with texts to rank: give these as labelled data",
            path="unlabelled",
        )
    if not is_ranking and settings.loss.ranking != LossSettings().ranking:
        raise SettingError(
            f"loss.ranking would change nothing: it is for a reranker, and the task is {settings.task.kind}; leave it "
            "out",
            path="loss.ranking",
        )


def _read_unlabelled(
    settings: DistilSettings,
    teacher: ModelBundle,
    source: Dataset[Example],
    stats: DatasetStats,
    labels: tuple[str, ...] | None,
    exclude: Path,
) -> Unlabelled:
    """Read the texts without labels that the settings name, without those that are evaluated on."""
    if not settings.unlabelled:
        return Unlabelled(examples=(), bad_rows=0, in_evaluation=0)
    head = teacher.config.head
    assert head is not None
    evaluated = [example for split in stats.non_empty_splits if split != "train" for example in source.examples(split)]
    unlabelled = read_unlabelled(
        settings.unlabelled,
        source.kind,
        head.kind,
        labels or source.labels or ("O",),
        columns_by_name(settings.data, source.columns),
        evaluated,
        names=[path.name for path in list_data_files(source.places)],
        exclude=exclude,
    )
    return without_evaluated(unlabelled, evaluated)


def _inherited_notes(inherited: DataSettings) -> list[str]:
    changed = changed_settings(DataOptions(data=inherited), DataOptions(data=DEFAULTS))
    return [f"data are read as the teacher's run read its own: {', '.join(changed)}"] if changed else []


def _data_notes(stats: DatasetStats, unlabelled: Unlabelled, source: Dataset[Example]) -> list[str]:
    """Sentences about empty splits, bad rows, and examples without labels."""
    notes = [*split_warnings(stats)]
    notes += [
        f"bad rows of {Path(name).name} that are left out: {count:,}" for name, count in source.row_errors.bad.items()
    ]
    notes += [f"without labels, {note}" for note in unlabelled.notes]
    if unlabelled.examples:
        notes.append(f"{len(unlabelled.examples):,} examples without labels are learned from")
    if unlabelled.bad_rows:
        notes.append(f"bad rows without labels that are left out: {unlabelled.bad_rows:,}")
    if unlabelled.in_evaluation:
        count = unlabelled.in_evaluation
        notes.append(f"examples without labels that are left out, since dev or test has them: {count:,}")
    return notes


def check_classic_student(task: str, student: StudentSettings, precision: str) -> None:
    """Refuse a classic student whose pooling does not fit the task, or that would be served in int8."""
    if isinstance(student, ClassicStudent | StaticStudent):
        reader = student.reader if isinstance(student, ClassicStudent) else DEFAULT_POOLING
        try:
            SPECS[task].check_reader(reader, "student.reader", 2)
        except HeedfulError as error:
            if isinstance(student, ClassicStudent):
                raise
            message = str(error).replace('student.reader.kind is "bag"', 'student.kind is "static"')
            raise SettingError(message, path="student.kind") from None
        if precision == "int8":
            raise SettingError(
                f"verdict.precision is int8, which rounds the linear layers of blocks, and a {student.kind} student "
                "has none: "
                "take float32, bfloat16 or auto",
                path="verdict.precision",
            )


def dev_split_settings(run: str) -> JsonObject:
    """The settings that decide which examples of a run's train split became its dev split."""
    table = load_mapping(Path(run) / SETTINGS).get("data")
    table = table if isinstance(table, dict) else {}
    defaults = {"dev_fraction": DEFAULTS.dev_fraction, "seed": DEFAULTS.seed}
    return {name: table.get(name, value) for name, value in defaults.items()}


def _contamination_notes(teacher: str, source: Dataset[Example], stats: DatasetStats) -> list[str]:
    """A sentence if the teacher was trained on texts of dev or test, which makes its quality there optimistic."""
    splits = [
        split
        for split in stats.non_empty_splits
        if split != "train" and files_trained_on(teacher, source.places.get(split, ()))
    ]
    if source.has_generated_dev and files_trained_on(teacher, source.places["train"]):
        own, teachers = source.settings, DataSettings(**dev_split_settings(teacher))
        has_generated_dev = read_run_json(Path(teacher) / DATA).get("made_dev", True)
        if not (has_generated_dev and own.seed == teachers.seed and own.dev_fraction <= teachers.dev_fraction):
            splits.append("dev")
    if not splits:
        return []
    return [
        f"the teacher was trained on texts of {' and '.join(splits)}: its quality there is optimistic, and how much "
        "the student keeps of it says little; give other texts, or split dev off as the teacher did"
    ]


def open_labelled(task: str, data: object, settings: DistilSettings, on_bad_row: BadRowPolicy) -> Dataset[Example]:
    """Open labelled data of a task."""
    return read(data, SPECS[task].example, settings.data, on_bad_row=on_bad_row)


def check_same_teacher(folder: Path, plan: DistilPlan) -> None:
    """Write down weights and unlabelled texts of a run, or check that they are those that the run began with."""
    digest = sha256()
    for example in plan.unlabelled.examples:
        digest.update("\x1e".join(example.texts).encode(errors="backslashreplace") + b"\x1d")
    about = {"weights": plan.teacher.weights_digest(), "unlabelled": digest.hexdigest()}
    path = folder / TEACHER_FILE
    if not path.exists():
        write_file(path, about)
    elif (before := read_run_json(path)) != about:
        changed = " and ".join(name for name in about if before.get(name) != about[name])
        raise RunError(
            f"{folder} holds a run with another teacher, or other texts ({changed} changed). Give another folder with "
            "--output, or put them back to resume it"
        )


def accept_verdict_settings(folder: Path, name: str, settings: DistilSettings | MaskedDistilSettings) -> None:
    """Replace the settings of verdict and cascade of a run, which change no training, and remove what they change."""
    path = folder / name
    if not path.exists():
        return
    before = read_settings(folder, type(settings), name)
    updated = replace(before, verdict=replace(settings.verdict, baseline=before.verdict.baseline))
    if isinstance(updated, DistilSettings) and isinstance(settings, DistilSettings):
        updated = replace(updated, cascade=settings.cascade)
    if before != settings and updated == settings:
        if before.verdict != settings.verdict:
            (folder / VERDICT).unlink(missing_ok=True)
        (folder / CASCADE).unlink(missing_ok=True)
        write_file(path, to_toml(settings))


def settings_without_verdict(settings: DistilSettings | MaskedDistilSettings) -> JsonObject:
    """Settings of a run for results.json, without those of verdict and cascade, which may change later."""
    return {name: value for name, value in to_mapping(settings).items() if name not in ("verdict", "cascade")}


def student_origin(settings: DistilSettings | MaskedDistilSettings) -> str:
    """Describe the student before training, and its teacher."""
    taught = f"taught by {Path(settings.teacher).name}"
    match settings.student:
        case LayersStudent(layers=layers):
            return f"{layers} of the layers of {Path(settings.teacher).name}, {taught}"
        case SizeStudent(size=size):
            return f"a fresh model of size {size}, {taught}"
        case FolderStudent(model=model):
            return f"{Path(model).name}, {taught}"
        case StaticStudent():
            return f"a table of token vectors, {taught}"
    return f"a classic model, {taught}"
