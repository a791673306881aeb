"""`heedful distil` for a teacher that is a masked language model: a student learns its predictions on plain text.

The student is trained by the loop of `pretrain`, in a run folder. `runs.distil.run` calls `distil_masked`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import overload

from heedful.atomic_io import remove
from heedful.checkpoint import RUN_MODEL, ModelBundle, load, save
from heedful.data.bad_rows import OnBadRow
from heedful.data.sampler import derive_seed
from heedful.device import CPU, resolve_device
from heedful.errors import ModelError, RunError, SettingError
from heedful.objectives import Sample
from heedful.objectives.distillation.objective import Distillation, DistillationTarget, RunTeacher, state_projections
from heedful.objectives.distillation.teacher import SampleAlignment, Teacher
from heedful.objectives.masked_lm import MaskedLM
from heedful.random_streams import Stream
from heedful.runs.card.pretrained import write_pretrained_card
from heedful.runs.card.verdict import VERDICT
from heedful.runs.distil.plan import (
    STUDENT_BEFORE,
    TEACHER_FILE,
    accept_verdict_settings,
    settings_without_verdict,
    student_origin,
)
from heedful.runs.distil.settings import (
    DEFAULT_PRETRAIN,
    ClassicStudent,
    MaskedDistilSettings,
    SizeStudent,
    StaticStudent,
)
from heedful.runs.distil.students import build_student, head_untrained, hidden_size_for_lr, resolve_losses
from heedful.runs.distil.teacher_cache import CacheFormat, cache_teacher_outputs, online_teacher
from heedful.runs.distil.verdict import compare_speeds, quality_over_seeds, write_verdict
from heedful.runs.overrides import Overrides
from heedful.runs.pretrain.build import build_samples
from heedful.runs.pretrain.components import load_components
from heedful.runs.pretrain.objective_builder import Components
from heedful.runs.pretrain.run import PretrainSetup, PretrainTraining, TextLearner
from heedful.runs.pretrain.settings import PretrainSettings, pretrain_defaults
from heedful.runs.pretrain.specs.mlm import MlmSettings
from heedful.runs.results import JOURNAL, JsonObject, RunResult
from heedful.runs.run import Run
from heedful.runs.run_folder import CORPUS, START_MODEL, init_run_folder, read_run_json, write_file
from heedful.settings import from_file, to_toml
from heedful.tasks.answering import require_tokenizer
from heedful.train.fit import Reporter
from heedful.train.output_cache import CachedOutputs
from heedful.train.ranks import Ranks
from heedful.train.run_lock import lock_run

SETTINGS = "distil.toml"
OUTPUTS = "outputs"  # folder of the teacher's cached outputs
BASELINE_FOLDER = "baseline"
UNUSED = ("model", "tokenizer")  # pretrain settings without effect: student and teacher determine model and tokenizer


def distil_masked(
    teacher: ModelBundle,
    overrides: Overrides,
    data: object,
    folder: Path,
    on_bad_row: OnBadRow,
    *,
    reporter: Reporter | None,
    ranks: Ranks,
) -> RunResult:
    """Distil a masked language model into a student.

    Args:
        teacher: The teacher. It is loaded again with its masked head.
        overrides: Settings given by hand, the teacher's folder among them.
        data: Files and folders of plain text.
        folder: The run folder.
        on_bad_row: "raise", or "skip" to leave rows out that cannot be read.
        reporter: Receives progress.
        ranks: The processes that train together.

    Raises:
        HeedfulError: If teacher, student, data, a setting or the folder cannot be used.
    """
    if overrides.mentions("unlabelled"):
        raise SettingError(
            "unlabelled is for a teacher of a task, and a masked language model reads plain text: give it as DATA",
            path="unlabelled",
        )
    teacher_name = overrides.resolve(MaskedDistilSettings(teacher="?")).settings.teacher
    teacher = load(teacher_name, head="masked_lm")
    settings = _resolve_settings(teacher, overrides, data)
    run = Run.open(folder, reporter, ranks)
    settings = run.resolve(settings, "pretrain.train")
    pretrain = replace(settings.pretrain, model=replace(settings.pretrain.model, init_from=str(folder / START_MODEL)))
    with run.locked():
        run.begin(partial(_begin, run, settings, pretrain, teacher))
        learner = MlmTeacherLearner(teacher, settings, pretrain, run)
        student = run.execute(PretrainTraining(pretrain, run, learner, on_bad_row))
        if student.status == "interrupted":
            return student
        baseline = None
        if settings.verdict.baseline != "none":
            baseline = _train_baseline(pretrain, run, on_bad_row)
            if baseline.status == "interrupted":
                return replace(student, status="interrupted", results={})
        if not (folder / VERDICT).exists():
            _write_verdict(teacher, settings, run, load_components(pretrain, run, on_bad_row), baseline)
        if ranks.is_main:
            write_pretrained_card(folder)  # rewrite it with the verdict
        ranks.barrier()
        return run.result(**({"verdict": read_run_json(folder / VERDICT)} if ranks.is_main else {}))


def _resolve_settings(teacher: ModelBundle, overrides: Overrides, data: object) -> MaskedDistilSettings:
    """Merge overrides over the defaults for this teacher, and set the paths of the data.

    Raises:
        SettingError: If a setting would change nothing, or does not fit the teacher.
    """
    preview = overrides.resolve(MaskedDistilSettings(teacher="?")).settings  # its student determines other defaults
    if isinstance(preview.student, ClassicStudent | StaticStudent):
        raise SettingError(
            f"a {preview.student.kind} student has no head for masked tokens: distil it from a teacher of a task",
            path="student.kind",
        )
    for name in ("data", *UNUSED):
        if getattr(preview.pretrain, name) != getattr(DEFAULT_PRETRAIN, name):
            raise SettingError(
                f"pretrain.{name} would change nothing: student and teacher read the text that is given as DATA with "
                "the teacher's vocabulary, and the student is set under student; leave it out",
                path=f"pretrain.{name}",
            )
    continued = not isinstance(preview.student, SizeStudent)
    defaults = pretrain_defaults("mlm", hidden_size_for_lr(preview.student, teacher), continued=continued)
    defaults = replace(
        defaults, max_seq_length=min(defaults.max_seq_length, teacher.max_length or defaults.max_seq_length)
    )
    settings = overrides.resolve(replace(MaskedDistilSettings(teacher="?"), pretrain=defaults)).settings
    max_tokens = max(settings.pretrain.lengths)
    if teacher.max_length is not None and max_tokens > teacher.max_length:
        raise SettingError(
            f"pretrain.max_seq_length is {max_tokens}, but {teacher.source} reads {teacher.max_length} tokens, and has "
            f"to read all that the student reads: set it to {teacher.max_length} or less",
            path="pretrain.max_seq_length",
        )
    paths = list(data) if isinstance(data, Iterable) and not isinstance(data, str) else [data]
    return replace(settings, pretrain=replace(settings.pretrain, data=tuple(map(str, paths))))


def _begin(run: Run, settings: MaskedDistilSettings, pretrain: PretrainSettings, teacher: ModelBundle) -> None:
    """Write the settings and the untrained student of a new run, or check that the run in the folder is the same.

    Raises:
        RunError: If the run in the folder has other settings or another teacher.
        ModelError: If the student has another vocabulary than the teacher.
    """
    folder, teacher_facts = run.folder, {"weights": teacher.weights_digest()}
    accept_verdict_settings(folder, SETTINGS, settings)
    if (folder / SETTINGS).exists():
        stored, teacher_file = from_file(MaskedDistilSettings, folder / SETTINGS), folder / TEACHER_FILE
        if stored == settings and teacher_file.exists() and read_run_json(teacher_file) == teacher_facts:
            init_run_folder(folder, pretrain)
            return
        if (folder / OUTPUTS).exists() or (folder / JOURNAL).exists():
            difference = "settings" if stored != settings else "weights of the teacher"
            raise RunError(
                f"{folder} holds a run with other {difference} (see {SETTINGS}). Give another folder with --output, or "
                "the same to resume it"
            )
        for path in (teacher_file, folder / SETTINGS):  # the run has no outputs or steps yet: replace it
            remove(path)
    student = build_student(
        settings.student,
        teacher,
        (),
        max_length=max(pretrain.lengths),
        seed=pretrain.train.seed,
        log=run.reporter.message,
    )
    if require_tokenizer(student).fingerprint != require_tokenizer(teacher).fingerprint:
        raise ModelError(
            f"{student.source} has another vocabulary than {teacher.source}, so that probabilities of tokens cannot be "
            "compared. Take a student with the teacher's, or heedful pretrain --objective mlm+hidden_states"
        )
    resolve_losses(settings.loss, student, teacher)
    if head_untrained(settings.loss, student, teacher):
        run.reporter.message(
            "no loss reaches the student's head for masked tokens, so that its accuracy says nothing about its "
            "layers: fine-tune it for a task, or set loss.label_weight=1"
        )
    init_run_folder(folder, pretrain)
    save(student, folder / START_MODEL, overwrite=True)
    write_file(folder / TEACHER_FILE, teacher_facts)
    write_file(folder / SETTINGS, to_toml(settings))


# -- baseline and verdict ---------------------------------------------------------------------------------------------


def _train_baseline(pretrain: PretrainSettings, student_run: Run, on_bad_row: OnBadRow) -> RunResult:
    """Pre-train the same student without the teacher, on the corpus of the student's run."""
    student_run.reporter.message("the same student, without the teacher")
    run = Run(folder=student_run.folder / BASELINE_FOLDER, reporter=student_run.reporter, ranks=student_run.ranks)
    with lock_run(run.folder) if run.ranks.is_main else nullcontext():
        run.begin(partial(init_run_folder, run.folder, pretrain))
        learner = TextLearner(pretrain, run, base=STUDENT_BEFORE)
        return run.execute(PretrainTraining(pretrain, run, learner, on_bad_row, student_run.folder / CORPUS))


def _write_verdict(
    teacher: ModelBundle, settings: MaskedDistilSettings, run: Run, components: Components, baseline: RunResult | None
) -> None:
    """Measure accuracy and speed of teacher, student and baseline, and write the verdict. All ranks must call this."""
    models = {"teacher": teacher, "student": load(run.folder / RUN_MODEL, head="masked_lm")}
    if baseline is not None:
        models["baseline"] = load(baseline.output_dir / RUN_MODEL, head="masked_lm")
    quality = _masked_accuracy(models, components)
    if run.ranks.is_main:
        counts = {name: models[name].count() for name in ("teacher", "student")}
        paths = {"teacher": settings.teacher, "student": str(run.folder / RUN_MODEL)}
        speeds = compare_speeds(paths, settings.verdict)
        write_verdict(run.folder, ("mlm_accuracy", "validation"), quality, counts, speeds)


def _masked_accuracy(models: Mapping[str, ModelBundle], components: Components) -> dict[str, JsonObject]:
    """Measure the accuracy of each model on masked tokens of the validation documents, with equal masks, in float32."""
    samples, validation = build_samples(components)
    seed = components.settings.train.seed
    accuracies = {}
    for name, model in models.items():
        objective = components.builder.objectives(components, model.to(CPU).eval(), samples)[0]
        correct = masked_tokens = 0.0
        for index in range(len(validation)):
            mask_key = derive_seed(seed, Stream.VALIDATION, index)
            batch = objective.batch([validation[index]], [mask_key])
            batch_correct, batch_masked_tokens = objective.measure(model, batch)["mlm_accuracy"]
            correct += batch_correct
            masked_tokens += batch_masked_tokens
        accuracies[name] = quality_over_seeds([correct / masked_tokens], "float32")
    return accuracies


# -- the student ------------------------------------------------------------------------------------------------------


class IndexedSamples(Sequence[Sample]):
    """The samples of a phase, with their indices among the samples of all phases as targets.

    Args:
        samples: The samples of the phase.
        first_index: The index of the first sample of the phase among the samples of all phases.
    """

    def __init__(self, samples: Sequence[Sample], first_index: int) -> None:
        self.samples = samples
        self.first_index = first_index

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        target = DistillationTarget(target=None, sample_index=self.first_index + index, labelled=True, share=1.0)
        return replace(self.samples[index], target=target)


class MlmTeacherLearner:
    """Trains a student on the teacher's predictions of masked tokens, and on the masked tokens themselves."""

    def __init__(
        self, teacher: ModelBundle, settings: MaskedDistilSettings, pretrain: PretrainSettings, run: Run
    ) -> None:
        self.teacher = teacher
        self.pretrain = pretrain
        self.run = run
        self._settings = settings

    @property
    def base(self) -> str:
        """Description of the student before training, and of its teacher."""
        return student_origin(self._settings)

    def settings(self) -> JsonObject:
        """Return the settings of the distillation for results.json, without those of the verdict or without effect."""
        table = settings_without_verdict(self._settings)
        return table | {"pretrain": {name: value for name, value in table["pretrain"].items() if name not in UNUSED}}

    def training_setup(
        self, components: Components, model: ModelBundle, samples: Sequence[Sequence[Sample]]
    ) -> PretrainSetup:
        """Return the objective, which is the same in each phase, and the samples of each phase.

        Raises:
            SettingError: If a phase has another share of masked tokens.
        """
        if any(objective != self.pretrain.objective for objective in self.pretrain.objectives()):
            raise SettingError(
                "mask_prob of a phase has no effect in a distillation: leave it out of pretrain.phases",
                path="pretrain.phases",
            )
        masked_lm = components.builder.objectives(components, model, samples)[0]
        assert isinstance(masked_lm, MaskedLM)
        losses = resolve_losses(self._settings.loss, model, self.teacher)
        self.teacher.to(resolve_device(self.pretrain.train.device))
        # the tokenizers are equal, but one embedding may be padded to a larger size
        vocab_size = min(bundle.config.model.embedding.vocabulary for bundle in (model, self.teacher))
        teacher = Teacher(self.teacher, masked_lm, "masked", losses.capture_spec("teacher"), classes=vocab_size)
        hidden_sizes = model.config.model.width, self.teacher.config.model.width
        num_samples = sum(map(len, samples))
        objective = Distillation(
            base_objective=masked_lm,
            kind="masked",
            losses=losses,
            run_teacher=self._teacher_outputs(teacher, samples),
            alignment=SampleAlignment(
                same_tokens=True,
                teacher_indices=[(index,) for index in range(num_samples)],
                words=None,
            ),
            projections=state_projections(
                losses, hidden_sizes, derive_seed(self.pretrain.train.seed, Stream.PROJECTION)
            ),
            first_term="label",
            classes=vocab_size,
        )
        indexed: list[IndexedSamples] = []
        first_index = 0
        for phase_samples in samples:
            indexed.append(IndexedSamples(phase_samples, first_index))
            first_index += len(phase_samples)
        return PretrainSetup(objectives=[objective] * len(samples), samples=indexed, evaluated=masked_lm)

    def _teacher_outputs(self, teacher: Teacher, samples: Sequence[Sequence[Sample]]) -> RunTeacher:
        """Return a function from sample indices to the teacher's outputs, read from a cache or computed in each step.

        Raises:
            HeedfulError: If the cache holds outputs of another teacher, or the disk is too small.
        """
        cache, objective = self._settings.teacher_cache, self.pretrain.objective
        assert isinstance(objective, MlmSettings)
        if not cache.enabled:
            if len(samples) == 1:
                return online_teacher(teacher, samples[0])
            return online_teacher(teacher, [sample for phase in samples for sample in phase])
        assert objective.num_static_masks is not None  # checked by the settings
        seed, num_samples = self.pretrain.train.seed, len(samples[0])  # a cache is refused with several phases
        mask_keys = [
            [derive_seed(seed, mask_index, index) for index in range(num_samples)]
            for mask_index in range(objective.num_static_masks)
        ]
        outputs = cache_teacher_outputs(
            self.run.folder / OUTPUTS,
            teacher,
            samples[0],
            CacheFormat(
                half=cache.precision == "float16",
                top=cache.top_k,
                temperature=self._settings.loss.temperature,
            ),
            {
                "weights": read_run_json(self.run.folder / TEACHER_FILE)["weights"],
                "num_static_masks": objective.num_static_masks,
                "seed": seed,
            },
            mask_keys=mask_keys,
            ranks=self.run.ranks,
            log=self.run.reporter.message,
        )

        def cache_row(index: int, key: int) -> int:
            """Return the cached row of a sample with the static mask that has this key."""
            mask_index = next(mask_index for mask_index, keys in enumerate(mask_keys) if keys[index] == key)
            return mask_index * num_samples + index

        return CachedOutputs(outputs.folder, outputs.count, cache_row)
