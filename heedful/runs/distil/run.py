"""distil: a large teacher and a small student that learns what it says, ending in a verdict on whether it was worth it.

The student is a run like that of fine-tuning, in the same loop and the same folder. The folder also holds `start` (the
untrained student), `outputs` (the teacher's), `baseline` (the same student fine-tuned without the teacher) and
`verdict.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from heapq import nlargest
from pathlib import Path
from statistics import fmean
from typing import Any

from heedful.checkpoint import Loaded, load, save
from heedful.data import Example
from heedful.data.bad_rows import OnBadRow
from heedful.data.sampler import mixed
from heedful.device import CPU, device_of
from heedful.errors import HeedfulError
from heedful.objectives import Objective, Sample
from heedful.objectives.distillation.objective import GROUP, AskTeacher, Distillation, state_projections
from heedful.objectives.distillation.teacher import OwnedSamples, SampleAlignment, Teacher, align_samples
from heedful.runs.card.finetuned import write_finetuned_card
from heedful.runs.distil.augment import augmented_examples
from heedful.runs.distil.plan import (
    STUDENT_BEFORE,
    TEACHER_FILE,
    DistilPlan,
    accept_verdict_settings,
    check_same_teacher,
    open_labelled,
    plan_distil,
    settings_without_verdict,
    student_origin,
)
from heedful.runs.distil.settings import ClassicStudent, SizeStudent, distil_overrides
from heedful.runs.distil.students import build_student, head_untrained, resolve_losses, sentence_vector_width
from heedful.runs.distil.teacher_cache import CacheFormat, cache_teacher_outputs, online_teacher
from heedful.runs.distil.unlabelled import read_both, teacher_task
from heedful.runs.distil.verdict import VERDICT, judge_student
from heedful.runs.finetune.build import build_task
from heedful.runs.finetune.run import FinetunePlan, Finished, Run
from heedful.runs.finetune.settings import check_batch_groups
from heedful.runs.overrides import Overrides
from heedful.runs.pin_models import pin_models
from heedful.runs.results import RESULTS, read_results
from heedful.runs.run_folder import (
    SETTINGS,
    check_run_folder,
    init_labelled_run,
    read_json,
    resolve_precision,
    translate_io_errors,
)
from heedful.tasks.answering import require_tokenizer
from heedful.tasks.task import EncodedSplit, Task
from heedful.train.checkpoint import lock_run
from heedful.train.fit import Reporter
from heedful.train.ranks import SINGLE_PROCESS, Ranks
from heedful.train.settings import FitSettings, TrainSettings

OUTPUTS, BASELINE, MORE = "outputs", "baseline", "more.jsonl"
PROJECT = 7  # what a seed is mixed with here
FEW = 64  # of the longest examples, by which it is foreseen whether tokens fit


def distil(
    teacher: str | Path,
    data: Any,
    output_dir: str | Path,
    *,
    student: str = "",
    loss: str = "",
    unlabelled: Sequence[str | Path] = (),
    recipe: str | Path | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, Any] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> Finished:
    """Distil a teacher into a student; `output_dir` is the run folder, an interrupted run in it is resumed.

    `teacher` is a run, a model folder, or NAME[@REVISION]; its head decides the task, and one for masked tokens is
    distilled on files of plain text. `student` is "layers=3", a size ("tiny", "mini"), a folder, or "bag",
    "attention", "bilstm"; `loss` that of a paper ("logits", "distilbert", "minilm", "minilmv2", "tinybert").
    `overrides` are settings by path or short name.
    """
    given = distil_overrides(
        str(teacher),
        student=student,
        loss=loss,
        unlabelled=unlabelled,
        recipe=recipe,
        assignments=assignments,
        overrides=overrides,
    )
    known = load(teacher)
    if teacher_task(known) == "masked":
        from heedful.runs.distil.mlm import distil_masked

        return distil_masked(
            known, given, data, Path(output_dir), on_bad_row, reporter=reporter or Reporter(), ranks=ranks
        )
    return distil_task(known, given, data, Path(output_dir), on_bad_row, reporter=reporter or Reporter(), ranks=ranks)


def distil_task(
    teacher: Loaded,
    overrides: Overrides,
    data: Any,
    folder: Path,
    on_bad_row: OnBadRow,
    *,
    reporter: Reporter,
    ranks: Ranks,
    parent_dir: Path | None = None,
) -> Finished:
    """Distil a task into a student. Files inside `folder`, or `parent_dir` that holds it, are not used as data.

    Students in one `parent_dir` share cached outputs of the teacher, where they need the same ones.
    """
    planned = plan_distil(teacher, overrides, data, on_bad_row=on_bad_row, exclude=parent_dir or folder)
    check_run_folder(folder)
    reporter = reporter if ranks.first else Reporter()
    train = resolve_precision(planned.settings.train, folder, ranks, reporter.message)
    planned = replace(planned, settings=replace(pin_models(planned.settings, folder), train=train))
    settings, source = planned.settings, planned.source
    student = _Student(planned, folder, reporter, ranks, parent_dir)
    student.foresee()
    with lock_run(folder) if ranks.first else nullcontext(), translate_io_errors(folder):
        if ranks.first:
            again = partial(open_labelled, planned.task, data, settings)
            accept_verdict_settings(folder, SETTINGS, settings)
            init_labelled_run(folder, settings, source, planned.survey.counts, again)
            check_same_teacher(folder, planned)
        ranks.wait()
        return _Distillation(planned, student).run()


# -- the run ------------------------------------------------------------------------------------------------------


class _Distillation:
    def __init__(self, planned: DistilPlan, student: _Student) -> None:
        self.planned, self.student, self.settings = planned, student, planned.settings
        self.folder, self.reporter, self.ranks = student.folder, student.reporter, student.ranks

    def run(self) -> Finished:
        done = self.student.run()
        if done.stop_reason == "interrupted":
            return done
        baseline = self._train_baseline(done)
        if baseline is not None and baseline.stop_reason == "interrupted":
            return replace(done, stop_reason="interrupted", results={})
        if self.ranks.first:
            if not (self.folder / VERDICT).exists():
                without = None if baseline is None else baseline.folder
                self.planned.teacher.to(CPU)
                judge_student(
                    self.folder, self.planned.teacher, self.planned.source, self.settings, without, self.reporter
                )
            write_finetuned_card(self.folder)  # again, with the verdict
        self.ranks.wait()
        results = read_results(self.folder) | {"verdict": read_json(self.folder / VERDICT)} if self.ranks.first else {}
        return replace(done, results=results)

    def _train_baseline(self, done: Finished) -> Finished | None:
        """The same student, fine-tuned on the labels: as many steps, or epochs."""
        folder = self.folder / BASELINE
        if self.settings.verdict.baseline == "none":
            return None
        if (folder / RESULTS).exists():
            return Finished(folder=folder, stop_reason="completed", results=read_results(folder))
        self.reporter.message("the same student, without the teacher")
        train, fit = self._as_long(done)
        plan = self.planned.plan(train=train, fit=fit)
        plan = replace(plan, notes=())  # those of the student say it all
        with lock_run(folder) if self.ranks.first else nullcontext():
            if self.ranks.first:
                init_labelled_run(folder, plan.settings, plan.source, plan.survey.counts, lambda bad: plan.source)
            self.ranks.wait()
            return _Baseline(plan, folder, self.reporter, self.ranks, self.student).run()

    def _as_long(self, done: Finished) -> tuple[TrainSettings, FitSettings]:
        """Settings with as many steps as the student made, or as many epochs.

        With as many steps, dev is evaluated as often as in the student's run.
        """
        train, fit = self.settings.train, self.settings.fit
        mine, labelled = self.student.sizes()
        per, less = -(-mine // train.batch_size), -(-labelled // train.batch_size)
        if train.epochs is not None:
            epochs, steps = train.epochs, max(1, round(train.epochs * per))
        else:
            if train.max_steps is not None:
                steps = train.max_steps
            else:  # a time budget, in which each seed makes its own number of steps
                made = self.ranks.gather([each["steps"] for each in done.results.get("seeds", ())])[0]
                steps = round(fmean(made))
            epochs = steps / per
        if self.settings.verdict.baseline == "steps":
            fit = replace(fit, eval_every_epochs=fit.eval_every_epochs * per / less)
            return train.lasting(max_steps=steps), fit
        return train.lasting(epochs=epochs), fit


class _Baseline(Run):
    """Fine-tuning from the same start."""

    def __init__(self, plan: FinetunePlan, folder: Path, reporter: Reporter, ranks: Ranks, student: _Student) -> None:
        super().__init__(plan, folder, reporter, ranks)
        self.student, self.stated = student, ()  # the student has said it

    @property
    def fresh(self) -> bool:
        """As the student."""
        return self.student.fresh

    def _start(self, seed: int) -> Loaded:
        base = load(self.student.kept(seed))
        base.source = STUDENT_BEFORE
        return base

    def _show(self) -> None:
        """Nothing: what it found stands in the verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lessons:
    """Samples of the student, and what goes with them."""

    mine: OwnedSamples
    labelled: list[bool]  # of each example
    counted: int  # samples with labels
    read: EncodedSplit
    pairing: SampleAlignment
    ask: AskTeacher


class _Student(Run):
    """Fine-tuning with a teacher beside the labels."""

    def __init__(
        self, planned: DistilPlan, folder: Path, reporter: Reporter, ranks: Ranks, parent_dir: Path | None = None
    ) -> None:
        super().__init__(planned.plan(), folder, reporter, ranks)
        self.planned, self.asked, self.parent_dir = planned, planned.settings, parent_dir
        self._lessons: _Lessons | None = None
        self._made: Loaded | None = None

    def foresee(self) -> None:
        """Make the student, and refuse what these two cannot learn, before anything is written."""
        if self.kept(self.asked.train.seed).exists() or not self.ranks.first:
            return
        made, teacher = self._make(self.asked.train.seed), self.planned.teacher
        resolve_losses(self.asked.loss, made, teacher)
        if head_untrained(self.asked.loss, made, teacher):
            raise HeedfulError(
                f"nothing would train the head of {made.source}: it has random weights, and loss.kd_weight and "
                "loss.label_weight are 0. Set loss.label_weight=1 or loss.kd_weight=1, or copy layers of the teacher, "
                "as layers=3, with its head"
            )
        task, loaded = build_task(self.settings, self.source, self.survey, made, self.plan.labels)
        few = nlargest(FEW, self._examples(), key=lambda each: sum(map(len, each.texts)))
        self._paired(loaded, *(self._both(each, [], few)[0] for each in (task, self._taught(task))))
        self._made = made

    @property
    def fresh(self) -> bool:
        """Whether there is nothing in it of the teacher, or of another model."""
        return isinstance(self.asked.student, SizeStudent | ClassicStudent)

    def _make(self, seed: int) -> Loaded:
        texts = [text for example in self._examples() for text in example.texts]
        longest, said = self.asked.max_length, self.reporter.message
        return build_student(self.asked.student, self.planned.teacher, texts, longest=longest, seed=seed, log=said)

    def _start(self, seed: int) -> Loaded:
        """The student before it learns, which is kept."""
        kept = self.kept(seed)
        if seed == self.asked.train.seed:
            if self._made is not None and self.ranks.first:
                save(self._made, kept)
                self._made = None
            self.ranks.wait()
        else:
            self._keep(kept, partial(self._make, seed))
        base = load(kept)
        base.source = student_origin(self.asked)
        return base

    def _examples(self) -> list[Example]:
        return [*self.source.examples("train"), *self.planned.unlabelled.examples]

    @property
    def decisive(self) -> dict[str, Any]:
        """Those of the distillation, but for the verdict, which may be made anew."""
        return settings_without_verdict(self.asked)

    def sizes(self) -> tuple[int, int]:
        """How many samples there are, and how many of them have labels."""
        if self._lessons is None:
            task, loaded = self._task()
            self._lessons = self._read(task, loaded)
        return len(self._lessons.mine.samples), self._lessons.counted

    def _teacher(self) -> Loaded:
        """Where the student learns."""
        return self.planned.teacher.to(device_of(self.asked.train.device or CPU))

    def _task(self) -> tuple[Task, Loaded]:
        return build_task(self.settings, self.source, self.survey, self._start(self.asked.train.seed), self.plan.labels)

    def _learning(self, task: Task, loaded: Loaded, seed: int) -> tuple[Objective, Sequence[Sample], EncodedSplit]:
        losses = resolve_losses(self.asked.loss, loaded, self.planned.teacher)
        widths = loaded.config.model.width, self.planned.teacher.config.model.width
        if self._lessons is None:
            self._lessons = self._read(task, loaded)
        lessons, kind = self._lessons, self.planned.kind
        batch = self.asked.train.batch_size
        alone = GROUP if batch % GROUP == 0 else max(2, batch)
        together = task.together if task.together > 1 else alone  # vectors are compared in the groups of the task
        objective = Distillation(
            learner=task,
            kind=kind,
            losses=losses,
            ask=lessons.ask,
            pairing=lessons.pairing,
            project=state_projections(losses, widths, mixed(seed, PROJECT)),
            group=together
            if kind == "vectors" and sentence_vector_width(loaded) != sentence_vector_width(self.planned.teacher)
            else 1,
        )
        check_batch_groups(self.asked.train, objective.together)
        samples = objective.prepared(lessons.mine.samples, lessons.mine.owners, lessons.labelled)
        return objective, samples, lessons.read

    def _read(self, task: Task, loaded: Loaded) -> _Lessons:
        """Student and teacher read everything, and what the teacher says is kept, or said anew each time."""
        unlabelled: Sequence[Example] = self.planned.unlabelled.examples
        if self.asked.augment is not None:
            unlabelled = augmented_examples(
                self.planned, list(unlabelled) or list(self.source.examples("train")), self.folder / MORE,
                given=bool(unlabelled), ranks=self.ranks, log=self.reporter.message,
            )  # fmt: skip
        own, taught = self._both(task, unlabelled), self._both(self._taught(task), unlabelled)
        losses, kind = resolve_losses(self.asked.loss, loaded, self.planned.teacher), self.planned.kind
        pairing, needs = self._paired(loaded, own[0], taught[0])
        if kind == "tokens" and (lost := sum(not pairing.fits(n) for n in range(len(own[0].samples)))):
            self.reporter.message(f"{lost:,} samples have other words for the teacher, which says nothing of them")
        teacher = Teacher(task.learning(self._teacher()), self._taught(task), kind, losses.wanted(1))
        return _Lessons(
            mine=own[0],
            labelled=[True] * own[1].examples + [False] * len(unlabelled),
            counted=len(own[1].samples),
            read=own[1],
            pairing=pairing,
            ask=self._ask(teacher, taught[0].samples, needs),
        )

    def _paired(self, loaded: Loaded, own: OwnedSamples, taught: OwnedSamples) -> tuple[SampleAlignment, list[str]]:
        """What goes with what, and what is needed of the teacher's inside; refused where tokens do not fit."""
        losses = resolve_losses(self.asked.loss, loaded, self.planned.teacher)
        needs = [name for name, each in (("states", losses.states), ("relations", losses.relations)) if each]
        return align_samples(own, taught, self.planned.kind, needs), needs

    def _both(
        self, task: Task, unlabelled: Sequence[Example], labelled: Sequence[Example] | None = None
    ) -> tuple[OwnedSamples, EncodedSplit]:
        first, second = read_both(task, self.source.examples("train") if labelled is None else labelled, unlabelled)
        owners = [*first.owners, *(first.examples + owner for owner in second.owners)]
        return OwnedSamples(samples=[*first.samples, *second.samples], owners=owners), first

    def _taught(self, task: Task) -> Task:
        """The task as the teacher reads it: with its own tokenizer, token types and length."""
        teacher = self.planned.teacher
        tokenizer, limit = require_tokenizer(teacher), teacher.limit
        if tokenizer.fingerprint == tokenizer_of_task(task) and task.limit is not None:
            limit = task.limit if limit is None else min(limit, task.limit)
        return replace(task, tokenizer=tokenizer, limit=limit)

    def _ask(self, teacher: Teacher, samples: Sequence[Sample], needs: Sequence[str]) -> AskTeacher:
        loss, outputs = self.asked.loss, self.asked.teacher_cache
        if not (loss.kd_weight or needs) or not outputs.enabled:
            return online_teacher(teacher, samples)
        facts = {"weights": read_json(self.folder / TEACHER_FILE)["weights"], "tokens": _tokens(samples)}
        form = CacheFormat(half=outputs.precision == "float16")
        place = self.folder / OUTPUTS
        if self.parent_dir is not None:
            said = json.dumps([facts, teacher.wanted.names, outputs.precision])
            place = self.parent_dir / OUTPUTS / sha256(said.encode()).hexdigest()[:16]
        return cache_teacher_outputs(place, teacher, samples, form, facts, ranks=self.ranks, log=self.reporter.message)


def tokenizer_of_task(task: Task) -> str:
    """Which tokenizer a task reads with."""
    return task.tokenizer.fingerprint


def _tokens(samples: Sequence[Sample]) -> str:
    """A checksum of what is read."""
    found = sha256()
    for sample in samples:
        found.update(json.dumps(sample.bounds).encode())
        found.update(sample.tokens.tobytes())
        found.update(sample.types.tobytes())
    return found.hexdigest()
