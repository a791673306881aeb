"""`heedful distil`: a small student is trained on the predictions of a large teacher, and compared with it.

The student is fine-tuned by the training loop of `finetune`, in a run folder. The folder also has:

* `start`: the student before training
* `outputs`: the cached outputs of the teacher
* `baseline`: a run of the same student without the teacher
* `verdict.json`: the comparison of teacher, student and baseline
* `cascade` and `cascade.json`: a cascade of student and teacher with its measurements, if `cascade` is set
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from heapq import nlargest
from math import ceil
from pathlib import Path
from statistics import fmean

from heedful.checkpoint import ModelBundle, load, save
from heedful.checkpoint.bundle import pruned_refusal
from heedful.data import Example
from heedful.data.bad_rows import OnBadRow
from heedful.data.sampler import derive_seed
from heedful.data.tag_schemes import OUTSIDE
from heedful.device import CPU, resolve_device
from heedful.errors import SettingError
from heedful.objectives import Sample
from heedful.objectives.distillation.objective import GROUP, Distillation, RunTeacher, state_projections
from heedful.objectives.distillation.teacher import OwnedSamples, SampleAlignment, Teacher, align_samples
from heedful.random_streams import Stream
from heedful.runs.card.cascade import CASCADE
from heedful.runs.card.finetuned import write_finetuned_card
from heedful.runs.card.verdict import VERDICT
from heedful.runs.distil.augment import augmented_examples
from heedful.runs.distil.cascade import build_cascade
from heedful.runs.distil.mlm import distil_masked
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
from heedful.runs.distil.settings import ClassicStudent, SizeStudent, StaticStudent, distil_overrides
from heedful.runs.distil.students import build_student, head_untrained, resolve_losses, sentence_dimension
from heedful.runs.distil.teacher_cache import CacheFormat, cache_teacher_outputs, online_teacher
from heedful.runs.distil.unlabelled import encode_both, teacher_task
from heedful.runs.distil.verdict import judge_student
from heedful.runs.finetune.build import build_task
from heedful.runs.finetune.plan import FinetunePlan
from heedful.runs.finetune.run import FinetuneTraining, TrainingSetup, label_setup, start_name
from heedful.runs.finetune.settings import check_batch_groups
from heedful.runs.overrides import Overrides
from heedful.runs.report import write_report
from heedful.runs.results import RESULTS, JsonObject, RunResult
from heedful.runs.run import Run
from heedful.runs.run_folder import SETTINGS, init_labelled_run, read_run_json
from heedful.settings import to_mapping
from heedful.tasks.answering import require_tokenizer
from heedful.tasks.task import EncodedSplit, Task
from heedful.train.fit import Reporter
from heedful.train.freezing import check_freezing
from heedful.train.ranks import SINGLE_PROCESS, Ranks
from heedful.train.run_lock import lock_run
from heedful.train.settings import FitSettings, TrainSettings, check_uncached

OUTPUTS = "outputs"  # folder of the teacher's cached outputs
BASELINE_FOLDER = "baseline"
AUGMENTED = "more.jsonl"  # file of augmented examples
CHECKED_EXAMPLES = 64  # how many of the longest examples are tokenized before training, to check the alignment


def distil(
    teacher: str | Path,
    data: object,
    output_dir: str | Path,
    *,
    student: str = "",
    loss: str = "",
    unlabelled: Sequence[str | Path] = (),
    cascade: bool = False,
    recipe: str | Path | Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, object] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> RunResult:
    """Distil a teacher into a student; an interrupted run in `output_dir` is resumed.

    Args:
        teacher: A run, a model folder, or NAME[@REVISION]; its head decides the task. A masked language model is
            distilled on files of plain text.
        data: Labelled data, or files and folders of text.
        output_dir: The run folder.
        student: "layers=3", a size ("tiny", "mini"), a folder, "static", or a classic model ("bag", "attention",
            "bilstm", "structured", "hierarchical").
        loss: A published combination of losses ("logits", "distilbert", "minilm", "minilmv2", "tinybert").
        unlabelled: Files and folders of texts without labels.
        cascade: Also build a cascade of student and teacher, in output_dir/cascade; cascade.max_loss is its setting.
        recipe: A .toml or .json file of settings.
        assignments: Texts such as "lr=0.1".
        overrides: Settings by path or short name, or overrides that were collected before.
        on_bad_row: "raise", or "skip" to set rows aside that cannot be read.
        reporter: Receives progress.
        ranks: The processes that train together.

    Raises:
        HeedfulError: If teacher, student, data, a setting or the folder cannot be used.
    """
    overrides = distil_overrides(
        str(teacher),
        student=student,
        loss=loss,
        unlabelled=unlabelled,
        cascade=cascade,
        recipe=recipe,
        assignments=assignments,
        overrides=overrides,
    )
    model = load(teacher)
    masked = teacher_task(model) == "masked"
    if masked and overrides.mentions("cascade"):
        raise SettingError(
            f"a cascade is for classifiers, and {model.source} is a masked language model: leave --cascade and "
            "--max-loss out, or fine-tune it with `heedful finetune classify` first",
            path="cascade",
        )
    run_distillation = distil_masked if masked else distil_task
    return run_distillation(model, overrides, data, Path(output_dir), on_bad_row, reporter=reporter, ranks=ranks)


def distil_task(
    teacher: ModelBundle,
    overrides: Overrides,
    data: object,
    folder: Path,
    on_bad_row: OnBadRow,
    *,
    reporter: Reporter | None,
    ranks: Ranks,
    parent_dir: Path | None = None,
) -> RunResult:
    """Distil a teacher of a task into a student.

    Args:
        teacher: The teacher with the head of its task.
        overrides: Settings given by hand, the teacher's folder among them.
        data: Labelled data.
        folder: The run folder. Files inside it are not read as unlabelled texts.
        on_bad_row: "raise", or "skip" to set rows aside that cannot be read.
        reporter: Receives progress.
        ranks: The processes that train together.
        parent_dir: The folder of a search, with the run folders of several students, if there is a search. The students
            share cached outputs of the teacher. Files inside this folder are not read as unlabelled texts.

    Raises:
        HeedfulError: If teacher, student, data, a setting or the folder cannot be used.
    """
    plan = plan_distil(teacher, overrides, data, on_bad_row=on_bad_row, exclude=parent_dir or folder)
    run = Run.open(folder, reporter, ranks)
    plan = replace(plan, settings=run.resolve(plan.settings))
    learner = TeacherLearner(plan, run, parent_dir)
    learner.check()
    with run.locked():
        run.begin(partial(_begin, plan, data, folder))
        student = run.execute(FinetuneTraining(learner.student_plan, run, learner))
        if student.status == "interrupted":
            return student
        baseline = None
        if plan.settings.verdict.baseline != "none":
            baseline = _train_baseline(learner, student)
            if baseline.status == "interrupted":
                return replace(student, status="interrupted", results={})
        if ranks.is_main:
            if not (folder / VERDICT).exists():
                baseline_folder = None if baseline is None else baseline.output_dir
                plan.teacher.to(CPU)
                judge_student(folder, plan.teacher, plan.source, plan.settings, baseline_folder, run.reporter)
            if plan.settings.cascade is not None and not (folder / CASCADE).exists():
                precision = read_run_json(folder / VERDICT)["models"]["teacher"]["precision"]
                build_cascade(folder, plan.source, plan.stats.non_empty_splits, plan.settings, precision, run.reporter)
            write_report(folder)  # rewrite report and card with verdict and cascade
            write_finetuned_card(folder)
        ranks.barrier()
        if not ranks.is_main:
            return run.result()
        reports = {"verdict": read_run_json(folder / VERDICT)}
        if plan.settings.cascade is not None:
            reports["cascade"] = read_run_json(folder / CASCADE)
        return run.result(**reports)


def _begin(plan: DistilPlan, data: object, folder: Path) -> None:
    """Write settings and hashes of a new run, or check that the run in the folder is the same."""
    accept_verdict_settings(folder, SETTINGS, plan.settings)
    reopen = partial(open_labelled, plan.task, data, plan.settings)
    init_labelled_run(folder, plan.settings, plan.source, plan.stats.counts, reopen)
    check_same_teacher(folder, plan)


# -- the baseline -----------------------------------------------------------------------------------------------------


def _train_baseline(learner: TeacherLearner, student: RunResult) -> RunResult:
    """Fine-tune the same student on the labels only, for as many steps or epochs as it was trained by the teacher."""
    ranks = learner.run.ranks
    run = Run(folder=learner.run.folder / BASELINE_FOLDER, reporter=learner.run.reporter, ranks=ranks)
    if (run.folder / RESULTS).exists():
        return run.result()
    run.reporter.message("the same student, without the teacher")
    train, fit = _baseline_duration(learner, student)
    plan = replace(learner.plan.finetune_plan(train=train, fit=fit), notes=())  # the student's run reports the notes
    with lock_run(run.folder) if ranks.is_main else nullcontext():
        counts = plan.stats.counts
        run.begin(partial(init_labelled_run, run.folder, plan.settings, plan.source, counts, lambda _: plan.source))
        return run.execute(FinetuneTraining(plan, run, BaselineLearner(plan, learner), standalone=False))


def _baseline_duration(learner: TeacherLearner, student: RunResult) -> tuple[TrainSettings, FitSettings]:
    """Return training settings of the baseline with the student's number of steps, or of epochs (verdict.baseline).

    Equal steps are not equal epochs if the student has unlabelled texts, which lengthen its epochs. With equal steps,
    dev is evaluated after the same steps as in the student's run.

    Args:
        learner: The learner of the student.
        student: The result of the student's run. Only the first rank has the steps of its seeds.
    """
    settings = learner.plan.settings
    train, fit = settings.train, settings.fit
    num_samples, num_labelled = learner.sample_counts()
    steps_per_epoch = ceil(num_samples / train.batch_size)
    baseline_steps_per_epoch = ceil(num_labelled / train.batch_size)
    if train.epochs is not None:
        epochs, steps = train.epochs, max(1, round(train.epochs * steps_per_epoch))
    else:
        if train.max_steps is not None:
            steps = train.max_steps
        else:  # a time budget, in which seeds train for different numbers of steps: take the mean
            steps_by_rank = learner.run.ranks.all_gather_object(
                [seed["steps"] for seed in student.results.get("seeds", ())]
            )
            steps = round(fmean(steps_by_rank[0]))
        epochs = steps / steps_per_epoch
    if settings.verdict.baseline == "steps":
        fit = replace(fit, eval_every_epochs=fit.eval_every_epochs * steps_per_epoch / baseline_steps_per_epoch)
        return train.with_duration(max_steps=steps), fit
    return train.with_duration(epochs=epochs), fit


class BaselineLearner:
    """Trains the student on the labels only, from its initial weights.

    Args:
        plan: The plan of the baseline.
        student_learner: The learner that trained the student with the teacher, in whose run folder these weights are.
    """

    def __init__(self, plan: FinetunePlan, student_learner: TeacherLearner) -> None:
        self.plan = plan
        self.student_learner = student_learner

    @property
    def init_varies(self) -> bool:
        """Whether the initial weights of the student depend on the seed."""
        return self.student_learner.init_varies

    def settings(self) -> JsonObject:
        """Return the settings of fine-tuning."""
        return to_mapping(self.plan.settings)

    def initial_model(self, seed: int) -> ModelBundle:
        """Load the student as it was before training."""
        settings = self.student_learner.student_plan.settings
        base = load(self.student_learner.run.folder / start_name(settings, seed))
        base.source = STUDENT_BEFORE
        return base

    def training_setup(self, task: Task, model: ModelBundle, seed: int) -> TrainingSetup:
        """Return the task as objective, and the labelled examples as samples."""
        return label_setup(task, self.plan)


# -- the student ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """The student's training samples, and a function that returns the teacher's outputs for them.

    An example has several samples if it is read in windows.
    """

    student_samples: OwnedSamples  # samples of all examples, labelled examples first
    is_labelled: list[bool]  # for each example, whether it has a label
    labelled_samples: int  # how many samples have labels
    encoded: EncodedSplit  # the labelled examples only
    alignment: SampleAlignment  # the teacher's samples for each sample of the student
    run_teacher: RunTeacher  # from indices of the teacher's samples to its outputs


class TeacherLearner:
    """Trains the student on the teacher's outputs and on the labels.

    Args:
        plan: The plan of the distillation.
        run: The run.
        parent_dir: The folder of a search, whose students share cached outputs of the teacher, if there is a search.
    """

    def __init__(self, plan: DistilPlan, run: Run, parent_dir: Path | None = None) -> None:
        self.plan = plan
        self.run = run
        self.parent_dir = parent_dir
        self.student_plan = plan.finetune_plan()
        self._settings = plan.settings
        self._inputs: _Inputs | None = None
        self._student: ModelBundle | None = None

    def check(self) -> None:
        """Make the student on the first rank, and check that it can learn from the teacher. Nothing is written.

        Raises:
            HeedfulError: If no loss trains the student's head, or a loss compares tokens that cannot be aligned.
        """
        seed, teacher = self._settings.train.seed, self.plan.teacher
        if (self.run.folder / start_name(self.student_plan.settings, seed)).exists() or not self.run.ranks.is_main:
            return
        student = self._build_student(seed)
        if count := self._settings.train.freeze_layers:
            config = None if self.init_varies else student.config.model
            check_freezing(config, count, pruning=student.token_pruning)
            check_uncached(self._settings.train)
        losses = resolve_losses(self._settings.loss, student, teacher)
        if student.token_pruning is not None and (losses.states or losses.relations):
            raise pruned_refusal(student.source, "a student that learns hidden states")
        if head_untrained(self._settings.loss, student, teacher):
            raise SettingError(
                f"nothing would train the head of {student.source}: it has random weights, and loss.kd_weight and "
                "loss.label_weight are 0. Set loss.label_weight=1 or loss.kd_weight=1, or copy layers of the teacher, "
                "as layers=3, with its head",
                path="loss.label_weight",
            )
        plan = self.student_plan
        task, model = build_task(plan.settings, plan.source, plan.stats, student, plan.labels)
        longest = nlargest(CHECKED_EXAMPLES, self._examples(), key=lambda example: sum(map(len, example.texts)))
        student_samples, _ = self._encode(task, [], longest)
        teacher_samples, _ = self._encode(self._teacher_task(task), [], longest)
        self._align(model, student_samples, teacher_samples)  # raises an error if tokens that are compared differ
        self._student = student

    @property
    def init_varies(self) -> bool:
        """Whether the initial weights depend on the seed, since none come from the teacher or another model."""
        return isinstance(self._settings.student, SizeStudent | ClassicStudent)

    def settings(self) -> JsonObject:
        """Return the settings of the distillation for results.json, without those of verdict and cascade."""
        return settings_without_verdict(self._settings)

    def initial_model(self, seed: int) -> ModelBundle:
        """Load the untrained student from the run folder, after saving it there if it is missing."""
        name = start_name(self.student_plan.settings, seed)
        if seed == self._settings.train.seed:
            if self._student is not None and self.run.ranks.is_main:
                save(self._student, self.run.folder / name)
                self._student = None
            self.run.ranks.barrier()
            base = load(self.run.folder / name)
        else:
            base = self.run.saved_once(name, partial(self._build_student, seed))
        base.source = student_origin(self._settings)
        return base

    def training_setup(self, task: Task, model: ModelBundle, seed: int) -> TrainingSetup:
        """Return the objective with all loss terms, and samples of labelled and unlabelled examples."""
        teacher = self.plan.teacher
        losses = resolve_losses(self._settings.loss, model, teacher)
        hidden_sizes = model.config.model.width, teacher.config.model.width
        if self._inputs is None:
            self._inputs = self._make_inputs(task, model)
        inputs = self._inputs
        kind = self.plan.kind
        batch_size = self._settings.train.batch_size
        default_group = GROUP if batch_size % GROUP == 0 else max(2, batch_size)
        group_size = task.group_size if task.group_size > 1 else default_group
        # vectors of another dimension than the teacher's are compared by their similarities within a group
        compares_similarities = kind == "vectors" and sentence_dimension(model) != sentence_dimension(teacher)
        objective = Distillation(
            base_objective=task,
            kind=kind,
            losses=losses,
            run_teacher=inputs.run_teacher,
            alignment=inputs.alignment,
            projections=state_projections(losses, hidden_sizes, derive_seed(seed, Stream.PROJECTION)),
            vector_group_size=group_size if compares_similarities else 1,
        )
        check_batch_groups(self._settings.train, objective.group_size)
        samples = objective.add_teacher_targets(
            inputs.student_samples.samples, inputs.student_samples.example_indices, inputs.is_labelled
        )
        return TrainingSetup(objective=objective, samples=samples, encoded=inputs.encoded)

    def sample_counts(self) -> tuple[int, int]:
        """Return how many samples the student has, and how many of them have labels."""
        if self._inputs is None:  # the student was trained by an earlier, interrupted process
            plan, base = self.student_plan, self.initial_model(self._settings.train.seed)
            task, model = build_task(plan.settings, plan.source, plan.stats, base, plan.labels)
            self._inputs = self._make_inputs(task, model)
        return len(self._inputs.student_samples.samples), self._inputs.labelled_samples

    def _build_student(self, seed: int) -> ModelBundle:
        texts = [text for example in self._examples() for text in example.texts]
        if isinstance(self._settings.student, StaticStudent):  # the teacher encodes all texts
            self.plan.teacher.to(resolve_device(self._settings.train.device))
        return build_student(
            self._settings.student,
            self.plan.teacher,
            texts,
            max_length=self._settings.max_length,
            seed=seed,
            log=self.run.reporter.message,
        )

    def _examples(self) -> list[Example]:
        return [*self.plan.source.examples("train"), *self.plan.unlabelled.examples]

    def _make_inputs(self, task: Task, model: ModelBundle) -> _Inputs:
        """Encode all examples for student and teacher, and prepare the teacher's outputs for them."""
        plan, settings = self.plan, self._settings
        unlabelled = self._unlabelled_examples()
        teacher_task = self._teacher_task(task)
        student_samples, encoded = self._encode(task, unlabelled)
        teacher_samples, _ = self._encode(teacher_task, unlabelled)
        losses, kind = resolve_losses(settings.loss, model, plan.teacher), plan.kind
        alignment, hidden_terms = self._align(model, student_samples, teacher_samples)
        if kind == "tokens":
            num_unaligned = sum(not alignment.fits(index) for index in range(len(student_samples.samples)))
            if num_unaligned:
                self.run.reporter.message(
                    f"{num_unaligned:,} samples have other words for the teacher, and are learned without its outputs"
                )
        teacher_model = plan.teacher.to(resolve_device(settings.train.device))
        teacher = Teacher(task.for_training(teacher_model), teacher_task, kind, losses.capture_spec("teacher"))
        return _Inputs(
            student_samples=student_samples,
            is_labelled=[True] * encoded.examples + [False] * len(unlabelled),
            labelled_samples=len(encoded.samples),
            encoded=encoded,
            alignment=alignment,
            run_teacher=self._teacher_outputs(teacher, teacher_samples.samples, hidden_terms),
        )

    def _unlabelled_examples(self) -> Sequence[Example]:
        """Return the unlabelled examples, and augmented ones if `augment` is set."""
        plan, settings = self.plan, self._settings
        if settings.augment is None:
            return plan.unlabelled.examples
        placeholder_label = (plan.labels or plan.source.labels or (OUTSIDE,))[0]
        variants = augmented_examples(
            settings.augment,
            plan.task,
            settings.teacher,
            plan.unlabelled.examples or list(plan.source.examples("train")),
            self.run.folder / AUGMENTED,
            label=placeholder_label,
            seed=settings.train.seed,
            ranks=self.run.ranks,
            log=self.run.reporter.message,
        )
        return [*plan.unlabelled.examples, *variants]

    def _align(
        self, model: ModelBundle, student_samples: OwnedSamples, teacher_samples: OwnedSamples
    ) -> tuple[SampleAlignment, list[str]]:
        """Align the student's samples with the teacher's, and name the loss terms on hidden layers.

        Raises:
            HeedfulError: If there is such a term, and the tokens of student and teacher differ.
        """
        losses = resolve_losses(self._settings.loss, model, self.plan.teacher)
        hidden_terms = [name for name, terms in (("states", losses.states), ("relations", losses.relations)) if terms]
        return align_samples(student_samples, teacher_samples, self.plan.kind, hidden_terms), hidden_terms

    def _encode(
        self, task: Task, unlabelled: Sequence[Example], labelled: Sequence[Example] | None = None
    ) -> tuple[OwnedSamples, EncodedSplit]:
        """Encode examples by a task.

        Args:
            task: The task of student or teacher.
            unlabelled: Unlabelled examples.
            labelled: Labelled examples. If None, those of train.

        Returns:
            All samples with their examples, labelled ones first, and the encoded labelled examples.
        """
        labelled_examples = self.plan.source.examples("train") if labelled is None else labelled
        labelled_split, unlabelled_split = encode_both(task, labelled_examples, unlabelled)
        unlabelled_indices = (labelled_split.examples + index for index in unlabelled_split.example_indices)
        return (
            OwnedSamples(
                samples=[*labelled_split.samples, *unlabelled_split.samples],
                example_indices=[*labelled_split.example_indices, *unlabelled_indices],
            ),
            labelled_split,
        )

    def _teacher_task(self, task: Task) -> Task:
        """Return the task with the teacher's tokenizer and maximum length.

        If student and teacher have equal tokenizers, the length is also limited by the task's maximum.
        """
        tokenizer, limit = require_tokenizer(self.plan.teacher), self.plan.teacher.max_length
        if tokenizer.fingerprint == task.tokenizer.fingerprint and task.limit is not None:
            limit = task.limit if limit is None else min(limit, task.limit)
        return replace(task, tokenizer=tokenizer, limit=limit)

    def _teacher_outputs(self, teacher: Teacher, samples: Sequence[Sample], hidden_terms: Sequence[str]) -> RunTeacher:
        """Return a function from sample indices to the teacher's outputs, read from a cache or computed in each step.

        Raises:
            HeedfulError: If the cache holds outputs of another teacher, or the disk is too small.
        """
        loss, cache = self._settings.loss, self._settings.teacher_cache
        if not (loss.kd_weight or hidden_terms) or not cache.enabled:
            return online_teacher(teacher, samples)
        facts = {"weights": read_run_json(self.run.folder / TEACHER_FILE)["weights"], "tokens": _tokens_hash(samples)}
        folder = self.run.folder / OUTPUTS
        if self.parent_dir is not None:  # students share a cache only if they need the same outputs
            needed_outputs = json.dumps([facts, teacher.capture_spec.names, cache.precision])
            folder = self.parent_dir / OUTPUTS / sha256(needed_outputs.encode()).hexdigest()[:16]
        return cache_teacher_outputs(
            folder,
            teacher,
            samples,
            CacheFormat(half=cache.precision == "float16"),
            facts,
            ranks=self.run.ranks,
            log=self.run.reporter.message,
        )


def _tokens_hash(samples: Sequence[Sample]) -> str:
    """Return the SHA-256 hash of the token ids, token types and sequence bounds of all samples."""
    digest = sha256()
    for sample in samples:
        digest.update(json.dumps(sample.bounds).encode())
        digest.update(sample.tokens.tobytes())
        digest.update(sample.types.tobytes())
    return digest.hexdigest()
