"""Distillation without a task: a student that finds hidden tokens as its teacher does, on plain text.

The student is a run like that of pre-training, in the same loop and the same folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from heedful.atomic_io import remove
from heedful.checkpoint import RUN_MODEL, Loaded, load, save
from heedful.checkpoint.digest import weights_digest
from heedful.data.bad_rows import OnBadRow
from heedful.data.corpus.shards import Corpus
from heedful.data.sampler import mixed
from heedful.device import CPU, device_of
from heedful.errors import HeedfulError
from heedful.objectives import Objective, Sample, SelfSupervised
from heedful.objectives.distillation.objective import AskTeacher, Distillation, DistillationTarget, state_projections
from heedful.objectives.distillation.teacher import SampleAlignment, Teacher
from heedful.objectives.masked_lm import MaskedLM
from heedful.objectives.packing import HELD
from heedful.runs.card.pretrained import write_pretrained_card
from heedful.runs.distil.plan import STUDENT_BEFORE, accept_verdict_settings, settings_without_verdict, student_origin
from heedful.runs.distil.settings import PRETRAIN, ClassicStudent, MaskedDistilSettings, SizeStudent
from heedful.runs.distil.students import build_student, head_untrained, resolve_losses, width_for_lr
from heedful.runs.distil.teacher_cache import CachedOutputs, CacheFormat, cache_teacher_outputs, online_teacher
from heedful.runs.distil.verdict import VERDICT, across_numbers, compare_speeds, write_verdict
from heedful.runs.finetune.run import Finished
from heedful.runs.overrides import Overrides
from heedful.runs.pin_models import pin_models
from heedful.runs.pretrain.build import Components, build_objectives, build_samples
from heedful.runs.pretrain.run import Pretrained, Run
from heedful.runs.pretrain.settings import MlmSettings, PretrainSettings, pretrain_defaults
from heedful.runs.results import JOURNAL, read_results
from heedful.runs.run_folder import (
    CORPUS,
    START_MODEL,
    check_run_folder,
    init_run_folder,
    read_json,
    resolve_precision,
    translate_io_errors,
    write_file,
)
from heedful.settings import from_file, to_toml
from heedful.tasks.answering import require_tokenizer
from heedful.tokenizer import Tokenizer
from heedful.train.checkpoint import lock_run
from heedful.train.fit import Reporter
from heedful.train.ranks import Ranks

SETTINGS, OUTPUTS, BASELINE, TAUGHT = "distil.toml", "outputs", "baseline", "teacher.json"
PROJECT = 7
UNUSED = ("model", "tokenizer")  # settings of pre-training that change nothing here


def distil_masked(
    teacher: Loaded,
    overrides: Overrides,
    data: Any,
    folder: Path,
    on_bad_row: OnBadRow,
    *,
    reporter: Reporter,
    ranks: Ranks,
) -> Finished:
    """Let a student find hidden tokens as a teacher does; `data` are files and folders of text."""
    if overrides.mentions("unlabelled"):
        raise HeedfulError("a teacher of hidden tokens reads plain text alone: give all of it as DATA")
    source = overrides.resolve(MaskedDistilSettings(teacher="?")).settings.teacher
    teacher = load(source, head="masked_lm")
    settings = _settled(teacher, overrides, data)
    check_run_folder(folder)
    reporter = reporter if ranks.first else Reporter()
    settings = pin_models(settings, folder)
    train = resolve_precision(settings.pretrain.train, folder, ranks, reporter.message)
    settings = replace(settings, pretrain=replace(settings.pretrain, train=train))
    with lock_run(folder) if ranks.first else nullcontext(), translate_io_errors(folder):
        if ranks.first:
            _begin(folder, settings, teacher, reporter)
        ranks.wait()
        return _carried_out(teacher, settings, folder, on_bad_row, reporter, ranks)


def _settled(teacher: Loaded, overrides: Overrides, data: Any) -> MaskedDistilSettings:
    places = [data] if isinstance(data, str | Path) else list(data)
    told = overrides.resolve(MaskedDistilSettings(teacher="?")).settings
    if isinstance(told.student, ClassicStudent):
        raise HeedfulError("a classic model has no head for hidden tokens: distil it from a teacher of a task")
    for name in ("data", *UNUSED):
        if getattr(told.pretrain, name) != getattr(PRETRAIN, name):
            raise HeedfulError(
                f"pretrain.{name} would change nothing: student and teacher read the text that is given as DATA with "
                "the teacher's vocabulary, and the student is set under student; leave it out"
            )
    width = width_for_lr(told.student, teacher)
    usual = pretrain_defaults("mlm", width, continued=not isinstance(told.student, SizeStudent))
    usual = replace(usual, max_seq_length=min(usual.max_seq_length, teacher.limit or usual.max_seq_length))
    settings: MaskedDistilSettings = overrides.resolve(
        replace(MaskedDistilSettings(teacher="?"), pretrain=usual)
    ).settings
    longest = max(settings.pretrain.lengths)
    if teacher.limit is not None and longest > teacher.limit:
        raise HeedfulError(
            f"pretrain.max_seq_length is {longest}, but {teacher.source} reads {teacher.limit} tokens, and has to "
            f"read all that the student reads: set it to {teacher.limit} or less"
        )
    return replace(settings, pretrain=replace(settings.pretrain, data=tuple(map(str, places))))


def _begin(folder: Path, settings: MaskedDistilSettings, teacher: Loaded, reporter: Reporter) -> None:
    """Write what the run is, and the student as it begins, or see that what is there is the same."""
    about = {"weights": weights_digest(teacher)}
    accept_verdict_settings(folder, SETTINGS, settings)
    if (folder / SETTINGS).exists():
        before, taught = from_file(MaskedDistilSettings, folder / SETTINGS), folder / TAUGHT
        if before == settings and taught.exists() and read_json(taught) == about:
            return
        if (folder / OUTPUTS).exists() or (folder / JOURNAL).exists():
            what = "settings" if before != settings else "weights of the teacher"
            raise HeedfulError(
                f"{folder} holds a run with other {what} (see {SETTINGS}). Give another folder with --output, or the "
                "same to resume it"
            )
        for path in (taught, folder / SETTINGS):  # of a run that has nothing yet
            remove(path)
    train = settings.pretrain.train
    student = build_student(
        settings.student, teacher, (), longest=max(settings.pretrain.lengths), seed=train.seed, log=reporter.message
    )
    if require_tokenizer(student).fingerprint != require_tokenizer(teacher).fingerprint:
        raise HeedfulError(
            f"{student.source} has another vocabulary than {teacher.source}: shares of hidden tokens cannot be "
            "compared over two vocabularies. Take a student with the teacher's, or heedful pretrain --objective "
            "mlm+hidden_states"
        )
    resolve_losses(settings.loss, student, teacher)
    if head_untrained(settings.loss, student, teacher):
        reporter.message(
            "no loss reaches the student's head for hidden tokens, so that the share that it finds says nothing of its "
            "layers: fine-tune it for a task, or set loss.label_weight=1"
        )
    init_run_folder(folder, _run_settings(settings, folder))
    save(student, folder / START_MODEL, overwrite=True)
    write_file(folder / TAUGHT, about)
    write_file(folder / SETTINGS, to_toml(settings))


def _carried_out(
    teacher: Loaded,
    settings: MaskedDistilSettings,
    folder: Path,
    on_bad_row: OnBadRow,
    reporter: Reporter,
    ranks: Ranks,
) -> Finished:
    pretrain = _run_settings(settings, folder)
    student = _Student(teacher, settings, pretrain, folder, on_bad_row, reporter, ranks)
    done = student.run()
    if done.stop_reason == "interrupted":
        return Finished(folder=folder, stop_reason="interrupted", results={})
    baseline: Pretrained | None = None
    if settings.verdict.baseline != "none":
        reporter.message("the same student, without the teacher")
        under = folder / BASELINE
        with lock_run(under) if ranks.first else nullcontext():
            baseline = _Baseline(pretrain, under, reporter, ranks, on_bad_row).run()
        if baseline.stop_reason == "interrupted":
            return Finished(folder=folder, stop_reason="interrupted", results={})
    if not (folder / VERDICT).exists():
        models = {"teacher": teacher, "student": load(folder / RUN_MODEL, head="masked_lm")}
        if baseline is not None:
            models["baseline"] = load(folder / BASELINE / RUN_MODEL, head="masked_lm")
        quality = student.found(models)  # all ranks look for the corpus together
        if ranks.first:
            counts = {name: models[name].count() for name in ("teacher", "student")}
            places = {"teacher": settings.teacher, "student": str(folder / RUN_MODEL)}
            speeds = compare_speeds(places, settings.verdict)
            write_verdict(folder, ("mlm_accuracy", "validation"), quality, counts, speeds)
    if ranks.first:
        write_pretrained_card(folder)  # again, with the verdict
    ranks.wait()
    results = read_results(folder) | {"verdict": read_json(folder / VERDICT)} if ranks.first else {}
    return Finished(folder=folder, stop_reason="completed", results=results)


def _run_settings(settings: MaskedDistilSettings, folder: Path) -> PretrainSettings:
    """Of the run in the loop of pre-training, with the teacher and without it."""
    return replace(settings.pretrain, model=replace(settings.pretrain.model, init_from=str(folder / START_MODEL)))


class _Baseline(Run):
    """The run without the teacher, on the text that the student has read."""

    base = STUDENT_BEFORE

    def _corpus(self, tokenizer: Tokenizer) -> Corpus:
        return Corpus.open(self.folder.parent / CORPUS) if self._given() is None else super()._corpus(tokenizer)


class Numbered(Sequence[Sample]):
    """Samples that know their numbers."""

    def __init__(self, samples: Sequence[Sample], first: int) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Sample]: ...

    def __getitem__(self, number: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        return replace(self.samples[number], target=DistillationTarget(None, self.first + number, True, 1.0))


class _Student(Run):
    """Pre-training with a teacher beside it."""

    def __init__(
        self,
        teacher: Loaded,
        asked: MaskedDistilSettings,
        settings: Any,
        folder: Path,
        on_bad_row: OnBadRow,
        reporter: Reporter,
        ranks: Ranks,
    ) -> None:
        super().__init__(settings, folder, reporter, ranks, on_bad_row)
        self.teacher, self.asked = teacher, asked

    @property
    def base(self) -> str:
        """What the student began as, and who taught it."""
        return student_origin(self.asked)

    @property
    def decisive(self) -> dict[str, Any]:
        """Those of the distillation, without what changes nothing in one, nor the verdict, which may be made anew."""
        found = settings_without_verdict(self.asked)
        pretrain = {name: each for name, each in found["pretrain"].items() if name not in UNUSED}
        return found | {"pretrain": pretrain}

    def _learning(
        self, pieces: Components, loaded: Loaded, samples: list[Sequence[Sample]]
    ) -> tuple[Sequence[Objective], list[Sequence[Sample]], SelfSupervised]:
        if any(asked != self.settings.objective for asked in self.settings.objectives()):
            raise HeedfulError("mask_prob of a phase has no effect in a distillation: leave it out of pretrain.phases")
        masked = build_objectives(pieces, loaded, samples)[0]
        assert isinstance(masked, MaskedLM)
        losses = resolve_losses(self.asked.loss, loaded, self.teacher)
        self.teacher.to(device_of(self.settings.train.device or CPU))
        both = min(each.config.model.embedding.vocabulary for each in (loaded, self.teacher))  # padded differently
        teacher = Teacher(self.teacher, masked, "masked", losses.wanted(1), classes=both)
        widths = loaded.config.model.width, self.teacher.config.model.width
        objective = Distillation(
            learner=masked,
            kind="masked",
            losses=losses,
            ask=self._ask(teacher, samples),
            pairing=SampleAlignment(same=True, theirs=[(n,) for n in range(sum(map(len, samples)))], words=None),
            project=state_projections(losses, widths, mixed(self.settings.train.seed, PROJECT)),
            first="label",
            classes=both,
        )
        starts = [sum(map(len, samples[:number])) for number in range(len(samples))]
        return (
            [objective] * len(samples),
            [Numbered(each, at) for each, at in zip(samples, starts, strict=True)],
            masked,
        )

    def _ask(self, teacher: Teacher, samples: list[Sequence[Sample]]) -> AskTeacher:
        outputs, objective = self.asked.teacher_cache, self.settings.objective
        assert isinstance(objective, MlmSettings)
        if not outputs.enabled:
            if len(samples) == 1:
                return online_teacher(teacher, samples[0])
            return online_teacher(teacher, [each for phase in samples for each in phase])
        assert objective.num_static_masks is not None  # settings see to it
        seed, count = self.settings.train.seed, len(samples[0])
        keys = [
            [mixed(seed, version, number) for number in range(count)] for version in range(objective.num_static_masks)
        ]
        facts = {
            "weights": read_json(self.folder / TAUGHT)["weights"],
            "num_static_masks": objective.num_static_masks,
            "seed": seed,
        }
        form = CacheFormat(
            half=outputs.precision == "float16", top=outputs.top_k, temperature=self.asked.loss.temperature
        )
        found = cache_teacher_outputs(
            self.folder / OUTPUTS,
            teacher,
            samples[0],
            form,
            facts,
            mask_keys=keys,
            ranks=self.ranks,
            log=self.reporter.message,
        )

        def at(number: int, key: int) -> int:
            return next(v * count + number for v in range(len(keys)) if keys[v][number] == key)

        return CachedOutputs(found.folder, found.count, at)

    def found(self, models: Mapping[str, Loaded]) -> dict[str, dict[str, Any]]:
        """How often each finds what is hidden in the documents that are held out: the same masks, in float32."""
        pieces = self._pieces()
        samples, held = build_samples(pieces)
        shares = {}
        for name, loaded in models.items():
            masked = build_objectives(pieces, loaded.to(CPU).eval(), samples)[0]
            right = total = 0.0
            for number in range(len(held)):
                batch = masked.batch([held[number]], [mixed(self.settings.train.seed, HELD, number)])
                of = masked.measure(loaded, batch)["mlm_accuracy"]
                right, total = right + of[0], total + of[1]
            shares[name] = across_numbers([right / total], "float32")
        return shares
