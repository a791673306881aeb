"""What a distillation is going to do: settings, data and teacher, and what is refused before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heedful.checkpoint import Loaded
from heedful.checkpoint.digest import weights_digest
from heedful.data import DataOptions, DataSettings, LeaveOut, Source, Stop, Tagged, read
from heedful.data.bad_rows import OnBadRow
from heedful.data.inputs.inherited_settings import by_names, files_of
from heedful.data.labelled.statistics import Survey, of_splits, refuse_dull, survey, undivided
from heedful.data.tag_schemes import unsaid
from heedful.errors import HeedfulError
from heedful.objectives.distillation.teacher import ScoreKind
from heedful.runs.card.verdict import VERDICT
from heedful.runs.data_settings import data_settings_for
from heedful.runs.distil.augment import check_augmentation as foresee_more
from heedful.runs.distil.settings import (
    ClassicStudent,
    DistilSettings,
    FolderStudent,
    LayersStudent,
    MaskedDistilSettings,
    SizeStudent,
    StudentSettings,
    distil_settings,
    preview_distil_settings,
)
from heedful.runs.distil.students import width_for_lr
from heedful.runs.distil.unlabelled import Unlabelled, read_unlabelled, teacher_task, without_evaluated
from heedful.runs.finetune.checks import check_dev_split, check_unused_settings
from heedful.runs.finetune.init_settings import Scratch
from heedful.runs.finetune.plan import FinetunePlan
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.runs.overrides import Overrides, changed_settings
from heedful.runs.run_folder import DATA, SETTINGS, files_trained_on, read_json, read_settings, write_file
from heedful.settings import load_mapping, to_mapping, to_toml
from heedful.tasks.answering import require_tokenizer
from heedful.tasks.specs import SPECS

TEACHER_FILE = "teacher.json"
USUAL = DataSettings()
STUDENT_BEFORE = "the student as it was before it learned"  # initial weights of the baseline


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilPlan:
    """Settings, data and teacher."""

    settings: DistilSettings
    task: str
    teacher: Loaded
    source: Source[Any]
    survey: Survey
    unlabelled: Unlabelled
    notes: tuple[str, ...]
    labels: tuple[str, ...] | None  # the teacher's

    @property
    def kind(self) -> ScoreKind:
        """The kind of soft labels."""
        kind = SPECS[self.task].distillation
        assert kind is not None, "task_of refuses other teachers"
        return kind

    def finetune_plan(self, **changed: Any) -> FinetunePlan:
        """The fine-tuning plan of the student, or of the baseline without the teacher."""
        given = self.settings
        names = ("task", "data", "train", "fit", "seeds", "max_length", "long_inputs", "eval_precision")
        settings = FinetuneSettings(
            init=Scratch(), eval_baseline=False, **{name: getattr(given, name) for name in names}
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
    return f"{train.duration}, batches of {train.batch_size}, lr {train.optimizer.lr:g}, {settings.seeds} seeds"


def plan_distil(
    teacher: Loaded, overrides: Overrides, data: Any, *, on_bad_row: OnBadRow = "raise", exclude: Path
) -> DistilPlan:
    """All that can be known before anything is written; what would be found out after hours is refused here."""
    task = teacher_task(teacher)
    require_tokenizer(teacher)
    told = preview_distil_settings(overrides, task)
    usual = replace(
        data_settings_for(told.teacher, data, told.data)[0], dev_fraction=USUAL.dev_fraction, seed=USUAL.seed
    )
    told = preview_distil_settings(overrides, task, usual)
    check_classic_student(task, told.student, told.verdict.precision)
    if told.augment is not None:
        foresee_more(task, told.teacher, told.augment)
    if told.teacher_cache.top_k is not None:
        raise HeedfulError(
            "teacher_cache.top_k is for a vocabulary, of which the most likely tokens are kept: unset it"
        )
    rows = LeaveOut if on_bad_row == "skip" else Stop
    source = open_labelled(task, data, told, rows())
    if source.made_dev and files_trained_on(told.teacher, source.places["train"]):
        told = preview_distil_settings(overrides, task, replace(usual, **dev_split_settings(told.teacher)))
        source = open_labelled(task, data, told, rows())
    found = survey(source, ("train", *(split for split in source.splits if split != "train")))
    if lacking := undivided(source, found):
        raise HeedfulError(f"student and teacher are compared on dev, but {lacking}: give a dev or a test file")
    refuse_dull(source, found)
    if found.splits == ("train",):
        raise HeedfulError(
            "there is neither dev nor test to compare student and teacher on: give a file that the teacher has not "
            "learned from, or set data.dev_fraction"
        )
    labels = getattr(teacher.config.head, "labels", None)
    if labels is not None and (unknown := unsaid(source.labels, labels, tags=source.kind is Tagged)):
        raise HeedfulError(
            f"the data has the labels {', '.join(source.labels[:10])}, but {teacher.source} knows "
            f"{', '.join(labels[:10])}: nothing is taught of {', '.join(unknown[:5])}. Rename them in the data"
        )
    extra = Unlabelled(examples=(), bad=0, known=0)
    if told.unlabelled:
        head = teacher.config.head
        assert head is not None
        measured = [each for split in found.splits if split != "train" for each in source.examples(split)]
        known = labels or source.labels or ("O",)
        names = [path.name for path in files_of(source.places)]
        how = by_names(told.data, source.columns)
        also: dict[str, Any] = {"names": names, "exclude": exclude}
        extra = read_unlabelled(told.unlabelled, source.kind, head.kind, known, how, measured, **also)
        extra = without_evaluated(extra, measured)
    count = found.counts["train"]
    made = 0 if told.augment is None else told.augment.copies * (len(extra.examples) or count)
    together = told.task.group(scored=found.low is not None)
    texts = count + len(extra.examples) + made
    settings = distil_settings(
        overrides,
        task,
        count,
        texts,
        fresh=isinstance(told.student, SizeStudent),
        width=width_for_lr(told.student, teacher),
        classic=isinstance(told.student, ClassicStudent),
        together=together,
        data=told.data,
        given=SPECS[task].settings().of_teacher(teacher.thresholds, has_dev="dev" in found.splits),
    )
    check_dev_split(settings, found, lacking)
    check_unused_settings(settings, found, classic=isinstance(settings.student, ClassicStudent))
    return DistilPlan(
        settings=settings,
        task=task,
        teacher=teacher,
        source=source,
        survey=found,
        unlabelled=extra,
        notes=(*_read_alike(usual), *_notes(found, extra, source), *_remembered(told.teacher, source, found)),
        labels=labels,
    )


def _read_alike(usual: DataSettings) -> list[str]:
    kept = changed_settings(DataOptions(data=usual), DataOptions(data=USUAL))
    return [f"data are read as the teacher's run read its own: {', '.join(kept)}"] if kept else []


def _notes(found: Survey, extra: Unlabelled, source: Source[Any]) -> tuple[str, ...]:
    notes = of_splits(found)
    notes += [f"bad rows of {Path(name).name} that are left out: {n:,}" for name, n in source.sieve.bad.items()]
    notes += (f"without labels, {each}" for each in extra.said)
    if extra.examples:
        notes.append(f"{len(extra.examples):,} examples without labels are learned from")
    if extra.bad:
        notes.append(f"bad rows without labels that are left out: {extra.bad:,}")
    if extra.known:
        notes.append(f"examples without labels that are left out, since dev or test has them: {extra.known:,}")
    return tuple(notes)


def check_classic_student(task: str, student: StudentSettings, precision: str) -> None:
    """Refuse a classic student of which the task would take no more than the rows, and int8, in which none answers."""
    if isinstance(student, ClassicStudent):
        SPECS[task].check_reader(student.reader, "student.reader", 2)
        if precision == "int8":
            raise HeedfulError(
                "verdict.precision is int8, which rounds the linear layers of blocks, and a classic student has none: "
                "take float32, bfloat16 or auto"
            )


def dev_split_settings(run: str) -> dict[str, Any]:
    """Return the settings that decide which examples of a run's train split became its dev split."""
    given = load_mapping(Path(run) / SETTINGS).get("data", {})
    usual = {"dev_fraction": USUAL.dev_fraction, "seed": USUAL.seed}
    return {name: given.get(name, value) for name, value in usual.items()}


def _remembered(teacher: str, source: Source[Any], found: Survey) -> tuple[str, ...]:
    """Which splits a teacher that is a run has learned from, so that its quality there is what it remembers."""
    splits = [
        split for split in found.splits if split != "train" and files_trained_on(teacher, source.places.get(split, ()))
    ]
    if source.made_dev and files_trained_on(teacher, source.places["train"]):
        ours, theirs = source.settings, DataSettings(**dev_split_settings(teacher))
        made = read_json(Path(teacher) / DATA).get("made_dev", True)
        if not (made and ours.seed == theirs.seed and ours.dev_fraction <= theirs.dev_fraction):
            splits.append("dev")
    if not splits:
        return ()
    return (
        f"the teacher has learned from texts of {' and '.join(splits)}: its quality there is what it remembers, and "
        "how much the student keeps of it says little; give other texts, or part dev as the teacher did",
    )


def open_labelled(task: str, data: Any, settings: DistilSettings, on_bad_row: Any) -> Source[Any]:
    return read(data, SPECS[task].example, settings.data, on_bad_row=on_bad_row)


def check_same_teacher(folder: Path, planned: DistilPlan) -> None:
    """Written down once; another teacher, or other unlabelled texts, cannot go on with the run."""
    from hashlib import sha256

    texts = sha256()
    for each in planned.unlabelled.examples:
        texts.update("\x1e".join(each.texts).encode(errors="backslashreplace") + b"\x1d")
    about = {"weights": weights_digest(planned.teacher), "unlabelled": texts.hexdigest()}
    path = folder / TEACHER_FILE
    if not path.exists():
        write_file(path, about)
    elif (before := read_json(path)) != about:
        other = " and ".join(name for name in about if before.get(name) != about[name])
        raise HeedfulError(
            f"{folder} holds a run with another teacher, or other texts ({other} changed). Give another folder with "
            "--output, or put them back to resume it"
        )


def accept_verdict_settings(folder: Path, name: str, settings: DistilSettings | MaskedDistilSettings) -> None:
    """Take over other settings of the verdict, which change nothing that is trained: it is made again with them."""
    path = folder / name
    if not path.exists():
        return
    before = read_settings(folder, type(settings), name)
    same = replace(before, verdict=replace(settings.verdict, baseline=before.verdict.baseline))
    if before != settings and same == settings:
        (folder / VERDICT).unlink(missing_ok=True)
        write_file(path, to_toml(settings))


def settings_without_verdict(settings: DistilSettings | MaskedDistilSettings) -> dict[str, Any]:
    """What a run tells of its settings: those of the verdict may change after it."""
    return {name: each for name, each in to_mapping(settings).items() if name != "verdict"}


def student_origin(settings: DistilSettings | MaskedDistilSettings) -> str:
    """What the student began as, in words."""
    taught = f"taught by {Path(settings.teacher).name}"
    match settings.student:
        case LayersStudent(layers=layers):
            return f"{layers} of the layers of {Path(settings.teacher).name}, {taught}"
        case SizeStudent(size=size):
            return f"a fresh model of size {size}, {taught}"
        case FolderStudent(model=model):
            return f"{Path(model).name}, {taught}"
    return f"a classic model, {taught}"
