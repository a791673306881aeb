"""The plan of a distillation: settings, data and teacher, checked against each other before anything is written.

`runs.distil.run` and `runs.distil.search` call `plan_distil`. A preview is the settings with the defaults that are
known before the data are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from heedful.checkpoint import ModelBundle
from heedful.checkpoint.bundle import cascade_refusal, pruned_refusal
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
from heedful.data.tag_schemes import OUTSIDE, unknown_labels
from heedful.errors import DataError, HeedfulError, RunError, SettingError
from heedful.objectives.distillation.teacher import ScoreKind
from heedful.runs.card.cascade import CASCADE
from heedful.runs.card.verdict import VERDICT
from heedful.runs.data_settings import data_settings_for
from heedful.runs.distil.augment import check_augmentation
from heedful.runs.distil.cascade import check_cascade, check_row_counts
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
from heedful.runs.distil.students import hidden_size_for_lr
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

TEACHER_FILE = "teacher.json"  # hashes of the teacher's weights and of the unlabelled texts
DEFAULTS = DataSettings()
STUDENT_BEFORE = "the student as it was before it learned"  # name of the baseline's initial weights in results


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilPlan:
    """Settings, data and teacher of the distillation of a task."""

    settings: DistilSettings
    task: str  # name of the task
    teacher: ModelBundle
    source: Dataset[Example]  # labelled data
    stats: DatasetStats  # statistics of the labelled data
    unlabelled: Unlabelled
    notes: tuple[str, ...]  # sentences about the data, for the user
    labels: tuple[str, ...] | None  # labels of the teacher's head, if it has any

    @property
    def kind(self) -> ScoreKind:
        """Kind of the teacher's scores, which are the soft labels."""
        kind = SPECS[self.task].distillation
        assert kind is not None, "teacher_tasks returns only tasks with distillation"
        return kind

    def finetune_plan(self, **changed: Any) -> FinetunePlan:
        """Return the fine-tuning plan of the student, or of the baseline without the teacher.

        `changed` are fields of FinetuneSettings that differ from the settings of the distillation.
        """
        shared = ("task", "data", "train", "fit", "seeds", "max_length", "long_inputs", "eval_precision")
        settings = FinetuneSettings(
            init=Scratch(), eval_baseline=False, **{name: getattr(self.settings, name) for name in shared}
        )
        settings = replace(settings, **changed)
        return FinetunePlan(
            settings=settings,
            source=self.source,
            stats=self.stats,
            notes=self.notes,
            why=_training_summary(settings),
            labels=self.labels,
        )


def _training_summary(settings: FinetuneSettings) -> str:
    """Return duration, batch size, learning rate and count of seeds, in one line for the user."""
    train = settings.train
    return f"{train.duration}, batches of {train.batch_size}, lr {train.optimizer.lr:g}, {seed_count(settings.seeds)}"


def plan_distil(
    teacher: ModelBundle, overrides: Overrides, data: object, *, on_bad_row: OnBadRow = "raise", exclude: Path
) -> DistilPlan:
    """Resolve the settings, open the data, and check both against the teacher, before anything is written.

    Args:
        teacher: The teacher with the head of its task.
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
    inherited, _ = data_settings_for(preview.teacher, data, preview.data)
    inherited = replace(inherited, dev_fraction=DEFAULTS.dev_fraction, seed=DEFAULTS.seed)
    preview = preview_distil_settings(overrides, task, inherited)
    _check_preview(task, preview)
    uses_hidden_states = preview.loss.states is not None or preview.loss.relations is not None
    if teacher.token_pruning is not None and (uses_hidden_states or isinstance(preview.student, StaticStudent)):
        raise pruned_refusal(teacher.source, "a teacher whose hidden states are learned")
    row_policy = Skip if on_bad_row == "skip" else Raise
    dataset = open_labelled(task, data, preview, row_policy())
    if dataset.has_generated_dev and files_trained_on(preview.teacher, dataset.names_by_split["train"]):
        # split dev off as the teacher's run did, so that the teacher was not trained on it
        preview = preview_distil_settings(overrides, task, replace(inherited, **dev_split_settings(preview.teacher)))
        dataset = open_labelled(task, data, preview, row_policy())
    stats = compute_stats(dataset, ("train", *(split for split in dataset.splits if split != "train")))
    labels = getattr(teacher.config.head, "labels", None)
    _check_data(dataset, stats, teacher.source, labels)
    if preview.cascade is not None:
        check_row_counts(stats.counts, stats.non_empty_splits)
    unlabelled = _read_unlabelled(preview, teacher, dataset, stats, labels, exclude)
    num_labelled = stats.counts["train"]
    num_augmented = 0
    if preview.augment is not None:
        num_augmented = preview.augment.copies * (len(unlabelled.examples) or num_labelled)
    settings = distil_settings(
        overrides,
        task,
        num_labelled,
        num_labelled + len(unlabelled.examples) + num_augmented,
        random_init=isinstance(preview.student, SizeStudent),
        width=hidden_size_for_lr(preview.student, teacher),
        classic=isinstance(preview.student, ClassicStudent | StaticStudent),
        group_size=preview.task.samples_per_group(scored=stats.min_score is not None),
        data=preview.data,
        task_settings=SPECS[task].settings().for_student(teacher.thresholds, has_dev="dev" in stats.non_empty_splits),
    )
    check_dev_split(settings, stats, dev_problem="")
    check_unused_settings(settings, stats, classic=isinstance(settings.student, ClassicStudent | StaticStudent))
    return DistilPlan(
        settings=settings,
        task=task,
        teacher=teacher,
        source=dataset,
        stats=stats,
        unlabelled=unlabelled,
        notes=(
            *_inherited_notes(inherited),
            *_data_notes(stats, unlabelled, dataset),
            *_contamination_notes(preview.teacher, dataset, stats),
        ),
        labels=labels,
    )


def _task_of_data(teacher: ModelBundle, overrides: Overrides, data: object) -> str:
    """Return the first task of the teacher's head whose columns the data has, or the last task without trying it."""
    *tasks, last_task = teacher_tasks(teacher)
    for task in tasks:
        preview = preview_distil_settings(overrides, task)
        data_settings, _ = data_settings_for(preview.teacher, data, preview.data)
        try:
            read(data, SPECS[task].example, data_settings)
        except MissingColumnError:
            continue
        return task
    return last_task


def _check_preview(task: str, settings: DistilSettings) -> None:
    """Check settings of the student, the ranking loss, augmentation and the cache, before the data are read.

    Raises:
        HeedfulError: If a setting does not fit the task.
    """
    check_classic_student(task, settings.student, settings.verdict.precision)
    _check_ranking(settings)
    if settings.augment is not None:
        check_augmentation(task, settings.teacher, settings.augment)
    if settings.teacher_cache.top_k is not None:
        raise SettingError(
            "teacher_cache.top_k is for a masked language model, whose likeliest tokens are kept: unset it",
            path="teacher_cache.top_k",
        )


def _check_data(
    dataset: Dataset[Example], stats: DatasetStats, teacher_name: str, labels: tuple[str, ...] | None
) -> None:
    """Check that the data has examples to train and to evaluate on, and no label that the teacher does not know.

    Raises:
        DataError: If a split is missing, nothing could be learned, or a label is unknown.
    """
    if dev_problem := dev_split_problem(dataset, stats):
        raise DataError(f"student and teacher are compared on dev, but {dev_problem}: give a dev or a test file")
    check_learnable(dataset, stats)
    if stats.non_empty_splits == ("train",):
        raise DataError(
            "there is neither dev nor test to compare student and teacher on: give a file that the teacher was not "
            "trained on, or set data.dev_fraction"
        )
    if labels is None:
        return
    if unknown := unknown_labels(dataset.labels, labels, tags=dataset.kind is TaggedExample):
        raise DataError(
            f"the data has the labels {', '.join(dataset.labels[:10])}, but {teacher_name} knows "
            f"{', '.join(labels[:10])}: the teacher cannot teach {', '.join(unknown[:5])}. Rename them in the data"
        )


def _check_ranking(settings: DistilSettings) -> None:
    """Raise a SettingError if `loss.ranking` is set without a reranker, or a reranker has settings of other tasks."""
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
    dataset: Dataset[Example],
    stats: DatasetStats,
    labels: tuple[str, ...] | None,
    exclude: Path,
) -> Unlabelled:
    """Read the unlabelled texts that the settings name; leave out texts of dev and test."""
    if not settings.unlabelled:
        return Unlabelled(examples=(), bad_rows=0, in_evaluation=0)
    head = teacher.config.head
    assert head is not None
    evaluated = [example for split in stats.non_empty_splits if split != "train" for example in dataset.examples(split)]
    unlabelled = read_unlabelled(
        settings.unlabelled,
        dataset.kind,
        head.kind,
        labels or dataset.labels or (OUTSIDE,),
        columns_by_name(settings.data, dataset.columns),
        evaluated,
        names=[path.name for path in list_data_files(dataset.names_by_split)],
        exclude=exclude,
    )
    return without_evaluated(unlabelled, evaluated)


def _inherited_notes(inherited: DataSettings) -> list[str]:
    """Return a sentence about data settings that are those of the teacher's run, or [] if all are defaults."""
    changed = changed_settings(DataOptions(data=inherited), DataOptions(data=DEFAULTS))
    return [f"data are read as the teacher's run read its own: {', '.join(changed)}"] if changed else []


def _data_notes(stats: DatasetStats, unlabelled: Unlabelled, dataset: Dataset[Example]) -> list[str]:
    """Return sentences about empty splits, bad rows, and examples without labels."""
    notes = [*split_warnings(stats)]
    for name, count in dataset.row_errors.bad.items():
        notes.append(f"bad rows of {Path(name).name} that are left out: {count:,}")
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
            SPECS[task].check_pooling(reader, "student.reader", 2)
        except HeedfulError as error:
            if isinstance(student, ClassicStudent):
                raise
            message = str(error).replace('student.reader.kind is "bag"', 'student.kind is "static"')
            raise SettingError(message, path="student.kind") from None
        if precision == "int8":
            raise SettingError(
                f"verdict.precision is int8, which rounds the linear layers of blocks, and a {student.kind} student "
                "has none: take float32, bfloat16 or auto",
                path="verdict.precision",
            )


def dev_split_settings(run: str) -> JsonObject:
    """Return the data settings of a run that decide which examples of train became dev: dev_fraction and seed."""
    data_table = load_mapping(Path(run) / SETTINGS).get("data")
    if not isinstance(data_table, dict):
        data_table = {}
    return {name: data_table.get(name, getattr(DEFAULTS, name)) for name in ("dev_fraction", "seed")}


def _contamination_notes(teacher: str, dataset: Dataset[Example], stats: DatasetStats) -> list[str]:
    """Return a list of one sentence if the teacher was trained on texts of dev or test, else [].

    The sentence warns that the teacher's quality is optimistic there.
    """
    contaminated = [
        split
        for split in stats.non_empty_splits
        if split != "train" and files_trained_on(teacher, dataset.names_by_split.get(split, ()))
    ]
    if dataset.has_generated_dev and files_trained_on(teacher, dataset.names_by_split["train"]):
        own_data, teacher_data = dataset.settings, DataSettings(**dev_split_settings(teacher))
        teacher_generated_dev = read_run_json(Path(teacher) / DATA).get("made_dev", True)
        same_seed = own_data.seed == teacher_data.seed
        dev_is_held_out = teacher_generated_dev and same_seed and own_data.dev_fraction <= teacher_data.dev_fraction
        if not dev_is_held_out:
            contaminated.append("dev")
    if not contaminated:
        return []
    return [
        f"the teacher was trained on texts of {' and '.join(contaminated)}: its quality there is optimistic, and how "
        "much the student keeps of it says little; give other texts, or split dev off as the teacher did"
    ]


def open_labelled(task: str, data: object, settings: DistilSettings, on_bad_row: BadRowPolicy) -> Dataset[Example]:
    """Open labelled data of a task."""
    return read(data, SPECS[task].example, settings.data, on_bad_row=on_bad_row)


def check_same_teacher(folder: Path, plan: DistilPlan) -> None:
    """Write hashes of the teacher's weights and the unlabelled texts of a new run, or check those of a resumed one.

    Raises:
        RunError: If the run in the folder began with other weights or texts.
    """
    digest = sha256()
    for example in plan.unlabelled.examples:
        digest.update("\x1e".join(example.texts).encode(errors="backslashreplace") + b"\x1d")
    hashes = {"weights": plan.teacher.weights_digest(), "unlabelled": digest.hexdigest()}
    path = folder / TEACHER_FILE
    if not path.exists():
        write_file(path, hashes)
    elif (stored := read_run_json(path)) != hashes:
        changed = " and ".join(name for name in hashes if stored.get(name) != hashes[name])
        raise RunError(
            f"{folder} holds a run with another teacher, or other texts ({changed} changed). Give another folder with "
            "--output, or put them back to resume it"
        )


def accept_verdict_settings(folder: Path, name: str, settings: DistilSettings | MaskedDistilSettings) -> None:
    """Accept changed settings of verdict and cascade for a run that is resumed, as they do not change the training.

    The settings file `name` is rewritten, and verdict.json and cascade.json are removed if they are out of date.
    verdict.baseline may not change. Nothing happens if other settings differ too.
    """
    path = folder / name
    if not path.exists():
        return
    stored = read_settings(folder, type(settings), name)
    updated = replace(stored, verdict=replace(settings.verdict, baseline=stored.verdict.baseline))
    if isinstance(updated, DistilSettings) and isinstance(settings, DistilSettings):
        updated = replace(updated, cascade=settings.cascade)
    if stored != settings and updated == settings:
        if stored.verdict != settings.verdict:
            (folder / VERDICT).unlink(missing_ok=True)
        (folder / CASCADE).unlink(missing_ok=True)
        write_file(path, to_toml(settings))


def settings_without_verdict(settings: DistilSettings | MaskedDistilSettings) -> JsonObject:
    """Return the settings of a run for results.json, without those of verdict and cascade, which may change later."""
    return {name: value for name, value in to_mapping(settings).items() if name not in ("verdict", "cascade")}


def student_origin(settings: DistilSettings | MaskedDistilSettings) -> str:
    """Describe the student before training, and its teacher, for results and model card."""
    teacher = Path(settings.teacher).name
    match settings.student:
        case LayersStudent(layers=layers):
            student = f"{layers} of the layers of {teacher}"
        case SizeStudent(size=size):
            student = f"a fresh model of size {size}"
        case FolderStudent(model=model):
            student = Path(model).name
        case StaticStudent():
            student = "a table of token vectors"
        case ClassicStudent():
            student = "a classic model"
    return f"{student}, taught by {teacher}"
