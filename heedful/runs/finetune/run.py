"""Fine-tuning: from labelled data to a run folder with a trained and evaluated model that transformers loads too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from heedful.atomic_io import atomic_path, remove, write_synced
from heedful.checkpoint import RUN_MODEL, ModelBundle, load, save
from heedful.checkpoint.new_head import rescaled
from heedful.data import dataset_for_task
from heedful.data.bad_rows import OnBadRow
from heedful.device import resolve_device, resolve_dtype
from heedful.objectives import Objective, Sample
from heedful.objectives.contrastive import ContrastiveClasses
from heedful.runs.card.baseline import baseline_before_training
from heedful.runs.card.finetuned import write_finetuned_card
from heedful.runs.checkpoints import (
    CHECKPOINTS,
    LAST,
    STATE,
    checkpoint_entry,
    continued_run_note,
    remove_training_state,
    small_dev_note,
)
from heedful.runs.finetune.build import build_task, initial_model
from heedful.runs.finetune.encoder_advice import reading_notes
from heedful.runs.finetune.few_labels import body_objective, fit_last_layer, with_vector_head
from heedful.runs.finetune.init_settings import Pretrained, model_name
from heedful.runs.finetune.method_choice import compare_methods, without_key
from heedful.runs.finetune.plan import FinetunePlan, plan_finetune
from heedful.runs.finetune.settings import FinetuneSettings, Method, finetune_overrides
from heedful.runs.finetune.training_time import training_time_note
from heedful.runs.finetune.word_baseline import linear_model_of, score_words, seconds_allowed
from heedful.runs.overrides import Overrides
from heedful.runs.results import BEFORE, JOURNAL, JsonObject, RunResult, across_seeds, seed_entry
from heedful.runs.run import Run
from heedful.runs.run_folder import DATA, METHOD, START_MODEL, init_labelled_run, read_run_json, write_file
from heedful.runs.scoring import calibration_of, eval_result, fit_temperature, measure_split, tune_thresholds
from heedful.settings import to_mapping
from heedful.tasks.specs import SPECS
from heedful.tasks.task import EncodedSplit, EvalMetrics, Task
from heedful.train.fit import FitResult, Reporter, fit
from heedful.train.freezing import freezing_note
from heedful.train.frozen_outputs import cache_frozen_outputs
from heedful.train.ranks import SINGLE_PROCESS, Ranks
from heedful.train.trainer import Trainer

SEED = "seed.json"  # scores of one seed
FROZEN = "frozen"  # outputs of frozen layers, for all seeds
NOT_TRAINED = FitResult(stop_reason="completed", best_step=0, best_metric=None, last_metric=None, resumed_from=0)
INIT_NAMES = {  # what results call a model that is made for a run
    "scratch": "a small encoder, trained on the spot",
    "classic": "a classic model",
    "recurrent": "a classic model",
    "transformer": "a Transformer with random weights",
}


def finetune(
    task: str,
    data: object,
    output_dir: str | Path,
    *,
    model: str | Path = "",
    recipe: str | Path | Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, object] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    only_dev: bool = False,
) -> RunResult:
    """Fine-tune a model on labelled data; an interrupted run in `output_dir` is resumed.

    Args:
        task: Name of a task.
        data: As `data.source_of` takes it.
        output_dir: The run folder.
        model: A folder, or NAME[@REVISION] on the hub; "": the encoder that ships with Heedful.
        recipe: A .toml or .json file of settings.
        assignments: Texts such as "lr=0.1".
        overrides: Settings by path or short name, or overrides that were collected before.
        on_bad_row: "raise", or "skip" to set rows aside that cannot be read.
        reporter: Receives progress.
        ranks: The processes that train together.
        only_dev: Evaluate dev alone, and make no plots and no model card.

    Raises:
        HeedfulError: If the data, a setting or the folder cannot be used.
    """
    overrides = finetune_overrides(overrides, model=model, recipe=recipe, assignments=assignments)
    plan = plan_finetune(task, data, overrides=overrides, on_bad_row=on_bad_row)
    run = Run.open(output_dir, reporter, ranks)

    def replan(method: Method) -> FinetunePlan:
        return plan_finetune(task, data, overrides=overrides.with_values({"method": method}), on_bad_row=on_bad_row)

    with run.locked():
        plan = compare_methods(plan, run, replan)
        plan = replace(plan, settings=run.resolve(plan.settings))
        reopen = partial(dataset_for_task, plan.source.kind, data, plan.settings.data)
        run.begin(partial(init_labelled_run, run.folder, plan.settings, plan.source, plan.survey.counts, reopen))
        if plan.comparison is not None and ranks.is_main:
            write_file(run.folder / METHOD, plan.comparison)
        training = FinetuneTraining(plan, run, LabelLearner(plan, run), on_its_own=not only_dev)
        if only_dev:
            training.splits = tuple(split for split in training.splits if split == "dev")
        return run.execute(training)


# -- what is learned --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """An objective, its samples, and what encoding the training examples cost."""

    objective: Objective
    samples: Sequence[Sample]
    encoded: EncodedSplit


class Learner(Protocol):
    """The objective and the initial weights of a fine-tuning run."""

    @property
    def init_varies(self) -> bool:
        """Whether each seed starts from weights of its own."""

    def settings(self) -> JsonObject:
        """All settings that decided what the model is, for results.json."""

    def initial_model(self, seed: int) -> ModelBundle:
        """Return the model that training with this seed starts from, without the task's head."""

    def lesson(self, task: Task, model: ModelBundle, seed: int) -> Lesson:
        """Return what `model`, which has the task's head, learns."""


class LabelLearner:
    """Learns the labels of the data, from the model that the settings name or describe."""

    def __init__(self, plan: FinetunePlan, run: Run) -> None:
        self.plan, self.run = plan, run

    @property
    def init_varies(self) -> bool:
        """Whether the seed decides the initial weights."""
        return not isinstance(self.plan.settings.init, Pretrained)

    def settings(self) -> JsonObject:
        """The settings of the run."""
        return to_mapping(self.plan.settings)

    def initial_model(self, seed: int) -> ModelBundle:
        """Load the model, or the one that was made for this run, which its folder holds."""
        plan, init, log = self.plan, self.plan.settings.init, self.run.reporter.message
        make = partial(initial_model, init, plan.source, plan.survey.counts, seed, plan.settings.max_length, log)
        if model_name(init):
            return make()
        base = self.run.saved_once(start_name(plan.settings, seed), make)
        base.source = INIT_NAMES[init.kind]
        return base

    def lesson(self, task: Task, model: ModelBundle, seed: int) -> Lesson:
        """Encode the training examples."""
        return label_lesson(task, self.plan)


def label_lesson(task: Task, plan: FinetunePlan) -> Lesson:
    """Return what a task learns from the labelled training examples alone."""
    encoded = task.encode_split(plan.source.examples("train"))
    return Lesson(objective=task, samples=encoded.samples, encoded=encoded)


def start_name(settings: FinetuneSettings, seed: int) -> str:
    """The name in the run folder of the model that was made to start from with a seed."""
    return START_MODEL if seed == settings.train.seed else f"{START_MODEL}-{seed}"


# -- the run ----------------------------------------------------------------------------------------------------------


class FinetuneTraining:
    """Trains and evaluates one model per seed, and reports them together.

    Args:
        plan: Settings and data.
        run: The run folder, reporter and ranks.
        learner: What is learned, and from which weights.
        on_its_own: Whether the run reports about its data and gets plots and a model card; a baseline does not.
    """

    def __init__(self, plan: FinetunePlan, run: Run, learner: Learner, *, on_its_own: bool = True) -> None:
        self.plan, self.run, self.learner, self.on_its_own = plan, run, learner, on_its_own
        self.settings, self.source, self.survey = plan.settings, plan.source, plan.survey
        self.splits = tuple(split for split in plan.survey.non_empty_splits if split != "train")  # that are evaluated

    def notes(self) -> Iterable[str]:
        """Sentences about data, defaults and the model."""
        continued = continued_run_note(model_name(self.settings.init), self.settings.task.kind)
        about_data = (*self.source.stated, *self.plan.notes) if self.on_its_own else ()
        return *about_data, self.plan.why, continued

    def train(self) -> bool:
        """Train and evaluate each seed, and write the results; False if a signal interrupted it."""
        self.run.report_bad_rows()
        first = self.settings.train.seed
        seeds = range(first, first + self.settings.seeds)
        base = self.learner.initial_model(first)
        finished = []
        for seed in seeds:
            folder = self.run.folder if len(seeds) == 1 else self.run.folder / f"seed-{seed}"
            shared = seed == first or not self.learner.init_varies
            results = self._train_seed(base if shared else None, seed, folder)
            if results is None:
                return False
            finished.append((folder, results))
        if self.run.ranks.is_main:
            if (cache := self.run.folder / FROZEN).exists():
                remove(cache)
            self._write_results(base.source, finished)
        return True

    def finish(self) -> None:
        """Write plots and the model card."""
        if self.on_its_own:
            self.run.illustrate(write_finetuned_card)

    def _train_seed(self, base: ModelBundle | None, seed: int, folder: Path) -> JsonObject | None:
        """Train and evaluate with one seed, from `base` or a model of its own; None if a signal interrupted it."""
        if (folder / SEED).exists():
            self._tidy(folder)
            return read_run_json(folder / SEED)
        base = base or self.learner.initial_model(seed)
        settings = replace(self.settings, train=replace(self.settings.train, seed=seed))
        task, model = build_task(settings, self.source, self.survey, base, self.plan.labels)
        finetunes = settings.method == "finetune"
        if not finetunes:
            model = with_vector_head(model, base)
        model.to(resolve_device(settings.train.device))
        for split in self.splits:
            task.check(self.source.examples(split))
        lesson = self.learner.lesson(task, model, seed)
        notes = reading_notes(settings, self.source, self.survey, task, lesson.encoded)
        for note in notes:
            self.run.reporter.message(note)
        folder.mkdir(exist_ok=True)
        self._score_before_training(task, model, folder)
        objective = lesson.objective if finetunes else body_objective(settings, task)
        trainer = Trainer(model, objective, lesson.samples, settings.train, self.run.ranks)
        if settings.train.freeze_layers and isinstance(objective, Task | ContrastiveClasses):
            cache_frozen_outputs(trainer, self.run.folder / FROZEN, self.run.reporter.message)
        elif settings.train.freeze_layers:
            self.run.reporter.message(f"{freezing_note(settings.train.freeze_layers)}, and recomputed in every step")
        if self.run.ranks.size == 1 and finetunes and not (folder / STATE).exists():
            note = training_time_note(model, objective, trainer.samples, lesson.encoded.tokens, settings.train)
            if note:
                self.run.reporter.message(note)
        if settings.method == "linear":
            fitted = NOT_TRAINED
            (folder / JOURNAL).touch()
        else:
            fitted = fit(
                trainer,
                folder,
                settings.fit,
                evaluate=partial(self._dev_share, task, model, trainer.precision)
                if "dev" in self.splits and finetunes
                else None,
                merge_evaluations=partial(eval_result, task),
                save_last=partial(self._save_last, settings, task, model, folder),
                reporter=self.run.reporter,
            )
        if fitted.stop_reason == "interrupted":
            return None
        with trainer.full_params():
            if not finetunes:
                fit_last_layer(model, lesson.samples, task)
            results = self._evaluate(settings, task, model, trainer, fitted, lesson, notes, folder)
        self._tidy(folder)
        self.run.ranks.barrier()
        return results

    def _evaluate(
        self, settings: FinetuneSettings, task: Task, model: ModelBundle, trainer: Trainer, fitted: FitResult,
        lesson: Lesson, notes: list[str], folder: Path,
    ) -> JsonObject:  # fmt: skip
        """Save the trained model first, so that no failure in evaluating loses it, and evaluate it."""
        model = task.for_inference(model)
        self._save(model, folder)
        temperature = self._temperature(settings, task, model)
        if temperature is not None:
            model = rescaled(model, 1 / temperature, 0.0)
            self._save(model, folder)
            notes = [*notes, f"probabilities are calibrated: scores are divided by {temperature:.3g}, fitted on dev"]
            self.run.reporter.message(notes[-1])
        elif settings.task.fits_temperature() and "dev" in self.splits:
            notes = [*notes, "probabilities are not calibrated: dev needs 100 examples, 10 of them answered wrongly"]
            self.run.reporter.message(notes[-1])
        if "dev" in self.splits and settings.task.fits_temperature():
            model.calibration = calibration_of(task, model, self.source.examples("dev"))
            self._save(model, folder)
        if settings.task.tunes_thresholds(self.survey):
            model.thresholds |= tune_thresholds(task, model, self.source.examples("dev"))
            self._save(model, folder)
        splits = {split: self._evaluate_split(task, model, split, folder) for split in self.splits}
        entry = checkpoint_entry(
            fitted.best_step, fitted.best_metric, trainer.step, fitted.last_metric, settings.fit.load_best_at_end
        )
        small_dev = small_dev_note(entry, task.metric, splits.get("dev", {}).get("intervals", {}).get(task.metric))
        if small_dev:
            self.run.reporter.message(small_dev)
        results = {
            "seed": settings.train.seed,
            "metric": task.metric,
            "best_step": fitted.best_step or trainer.step,
            "steps": trainer.step,
            "seconds": round(trainer.seconds, 1),
            "splits": splits,
            "checkpoints": entry,
            "label_scaling": model.label_scaling,
            "temperature": temperature,
            "notes": [*notes, *filter(None, [small_dev])],
        }
        if self.run.ranks.is_main:
            results |= self._baseline(task, model, trainer, lesson.encoded, folder)
            write_file(folder / SEED, results)
        return results

    # -- baselines ----------------------------------------------------------------------------------------------------

    def _score_before_training(self, task: Task, model: ModelBundle, folder: Path) -> None:
        """Evaluate the untrained model if it may do the task already; once, also for a run that resumes."""
        zero_shot = SPECS[self.settings.task.kind].zero_shot
        if not zero_shot or not self.settings.eval_baseline or (folder / BEFORE).exists():
            return
        self.run.reporter.message("the score before training")
        baseline = baseline_before_training({split: self._evaluate_split(task, model, split) for split in self.splits})
        if self.run.ranks.is_main:
            write_file(folder / BEFORE, baseline)

    def _baseline(
        self, task: Task, model: ModelBundle, trainer: Trainer, encoded: EncodedSplit, folder: Path
    ) -> dict[str, JsonObject]:
        """The scores before training, or those of a bag of words; {} if the task has no baseline."""
        if not self.settings.eval_baseline or not self.splits:
            return {}
        if (folder / BEFORE).exists():
            return {"baseline": read_run_json(folder / BEFORE)}
        if linear_model_of(task) is None:
            return {}
        self.run.reporter.message("fitting a bag of words")
        words = score_words(
            task,
            model,
            self.source,
            self.survey,
            self.splits,
            seed=self.settings.train.seed,
            seconds=seconds_allowed(trainer, encoded.tokens),
            folder=folder,
        )
        return {"baseline": words}

    # -- models and scores --------------------------------------------------------------------------------------------

    def _save(self, model: ModelBundle, folder: Path, name: str = RUN_MODEL) -> None:
        if self.run.ranks.is_main:
            save(model, folder / name, overwrite=True)

    def _save_last(self, settings: FinetuneSettings, task: Task, model: ModelBundle, folder: Path) -> None:
        """Save the last weights, with a temperature and thresholds of their own, beside the best ones, the model."""
        model = copy(task.for_inference(model))
        if (temperature := self._temperature(settings, task, model)) is not None:
            model = rescaled(model, 1 / temperature, 0.0)
        if settings.task.tunes_thresholds(self.survey):
            model.thresholds = model.thresholds | tune_thresholds(task, model, self.source.examples("dev"))
        self._save(model, folder, f"{CHECKPOINTS}/{LAST}")

    def _temperature(self, settings: FinetuneSettings, task: Task, model: ModelBundle) -> float | None:
        """Fit the temperature of the scores on dev; None: it is not asked for, or dev is too small."""
        if "dev" not in self.splits or not settings.task.fits_temperature():
            return None
        return fit_temperature(task, model, self.source.examples("dev"))

    def _tidy(self, folder: Path) -> None:
        """Remove the training state of a seed that is evaluated, unless checkpoints are kept."""
        if self.run.ranks.is_main and not self.settings.fit.keep_checkpoints:
            remove_training_state(folder)

    def _dev_share(self, task: Task, model: ModelBundle, dtype: torch.dtype) -> EvalMetrics:
        """Evaluate this rank's share of dev."""
        examples = self.source.examples("dev")
        return measure_split(task, task.for_inference(model), examples, precision=dtype, ranks=self.run.ranks)

    def _evaluate_split(self, task: Task, model: ModelBundle, split: str, folder: Path | None = None) -> JsonObject:
        """Evaluate a split. Each rank evaluates all of it, so that none waits, and the first one writes."""
        self.run.reporter.message(f"measuring {split}")
        path = folder / f"predictions-{split}.jsonl" if folder and self.run.ranks.is_main else None
        dtype = resolve_dtype(self.settings.eval_precision, next(model.parameters()).device)
        task, model = task.for_split(model, lambda: self.survey, split)
        measure = measure_split(task, model, self.source.examples(split), precision=dtype, predictions=path)
        return {"numbers": task.report(measure), "intervals": measure.intervals()}

    def _write_results(self, base: str, finished: list[tuple[Path, JsonObject]]) -> None:
        """Write the results of all seeds, and the model of the best one on dev (of the first one without dev)."""
        run, (folder, best) = self.run, finished[0]
        metric = best["metric"]
        if "dev" in self.splits:
            folder, best = max(finished, key=lambda seed: float(seed[1]["splits"]["dev"]["numbers"][metric]))
        if folder != run.folder:
            for name in (JOURNAL, *(f"predictions-{split}.jsonl" for split in self.splits)):
                with atomic_path(run.folder / name) as part, (folder / name).open("rb") as file:
                    write_synced(part, iter(partial(file.read, 1 << 20), b""))
            save(load(folder / RUN_MODEL), run.folder / RUN_MODEL, overwrite=True)
        seeds = [results for _, results in finished]
        learned = {
            "task": self.settings.task.kind,
            "metric": metric,
            "labels": list(self.source.labels),
            "base": base,
            "seed": best["seed"],
            "seeds": [seed_entry(results) for results in seeds],
            "across_seeds": {split: across_seeds(seeds, split) for split in self.splits},
            "splits": best["splits"],
            "checkpoints": best["checkpoints"],
            "data": read_run_json(run.folder / DATA),
        }
        run.write_results(
            learned,
            load(run.folder / RUN_MODEL),
            self.learner.settings(),
            notes=[*self.plan.notes, *best["notes"]],
            label_scaling=best["label_scaling"] or None,
            temperature=best["temperature"],
            baseline=best.get("baseline"),
            method_comparison=self.plan.comparison and without_key(self.plan.comparison),
        )
