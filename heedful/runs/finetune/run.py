"""`heedful finetune`: from labelled data to a run folder with a trained and evaluated model.

Distillation trains with `FinetuneTraining` too, with other objectives and samples.
"""

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
from heedful.data.examples import LabelledExample, MultiLabelExample
from heedful.device import resolve_device, resolve_dtype
from heedful.objectives import Objective, Sample
from heedful.objectives.contrastive import ContrastiveClasses
from heedful.runs.card.baseline import baseline_before_training
from heedful.runs.card.finetuned import write_finetuned_card
from heedful.runs.card.pruning import pruning_note
from heedful.runs.checkpoints import (
    CHECKPOINTS,
    LAST,
    STATE,
    checkpoint_entry,
    continued_run_note,
    remove_training_state,
    small_dev_note,
)
from heedful.runs.finetune.build import build_task, evenly_spaced, initial_model
from heedful.runs.finetune.encoder_advice import reading_notes
from heedful.runs.finetune.few_labels import body_objective, fit_last_layer, with_vector_head
from heedful.runs.finetune.init_settings import Pretrained, model_name
from heedful.runs.finetune.method_choice import compare_methods, public_comparison
from heedful.runs.finetune.plan import FinetunePlan, plan_finetune
from heedful.runs.finetune.settings import FinetuneSettings, Method, finetune_overrides
from heedful.runs.finetune.training_time import training_time_note
from heedful.runs.finetune.word_baseline import linear_model_of, score_words, seconds_allowed
from heedful.runs.overrides import Overrides
from heedful.runs.results import BEFORE, JOURNAL, JsonObject, RunResult, across_seeds, seed_entry
from heedful.runs.run import Run
from heedful.runs.run_folder import DATA, METHOD, START_MODEL, init_labelled_run, read_run_json, write_file
from heedful.runs.scoring import (
    calibration_of,
    eval_result,
    fit_temperature,
    measure_split,
    training_vectors_of,
    tune_thresholds,
)
from heedful.settings import to_mapping
from heedful.tasks.specs import SPECS
from heedful.tasks.task import EncodedSplit, EvalMetrics, Task
from heedful.train.fit import FitResult, Reporter, fit
from heedful.train.freezing import freezing_note
from heedful.train.frozen_outputs import cache_frozen_outputs
from heedful.train.ranks import SINGLE_PROCESS, Ranks
from heedful.train.trainer import Trainer

SEED = "seed.json"  # file with the results of one seed
VECTOR_EXAMPLES = 512  # examples of train and of dev whose vectors are summarized
FROZEN = "frozen"  # folder with the cached outputs of frozen layers, for all seeds
NOT_TRAINED = FitResult(stop_reason="completed", best_step=0, best_metric=None, last_metric=None, resumed_from=0)
INIT_NAMES = {  # description of an initial model that the run creates, for results.json, by `init.kind`
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
    """Fine-tune a model on labelled data. An interrupted run in `output_dir` is resumed.

    Args:
        task: Name of a task.
        data: Labelled data in any form that `heedful.data.read` accepts.
        output_dir: The run folder.
        model: A folder, or NAME[@REVISION] on the hub. If "", the encoder that ships with Heedful.
        recipe: A .toml or .json file of settings.
        assignments: Texts such as "lr=0.1".
        overrides: Settings by path or short name, or `Overrides`.
        on_bad_row: "raise", or "skip" to write rows that cannot be read to a file of the run folder.
        reporter: Receives progress events. If None, they are ignored.
        ranks: The processes that train together.
        only_dev: Whether only dev is evaluated, without plots and a model card.

    Raises:
        HeedfulError: If the data, a setting or the folder cannot be used.
    """
    overrides = finetune_overrides(overrides, model=model, recipe=recipe, assignments=assignments)
    plan_with = partial(plan_finetune, task, data, on_bad_row=on_bad_row, needs_dev=only_dev)
    plan = plan_with(overrides=overrides)
    run = Run.open(output_dir, reporter, ranks)

    def replan(method: Method) -> FinetunePlan:
        return plan_with(overrides=overrides.with_values({"method": method}))

    with run.locked():
        plan = compare_methods(plan, run, replan)
        plan = replace(plan, settings=run.resolve(plan.settings))
        reopen = partial(dataset_for_task, plan.source.kind, data, plan.settings.data)
        run.begin(partial(init_labelled_run, run.folder, plan.settings, plan.source, plan.stats.counts, reopen))
        if plan.comparison is not None and ranks.is_main:
            write_file(run.folder / METHOD, plan.comparison)
        training = FinetuneTraining(plan, run, LabelLearner(plan, run), standalone=not only_dev)
        if only_dev:
            training.splits = tuple(split for split in training.splits if split == "dev")
        return run.execute(training)


# -- objective, samples and initial weights ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """The objective and the samples of a training."""

    objective: Objective
    samples: Sequence[Sample]
    encoded: EncodedSplit  # the encoded training examples, with counts


class Learner(Protocol):
    """Provides the initial weights, the objective and the samples of a fine-tuning run."""

    @property
    def init_varies(self) -> bool:
        """Whether the initial weights depend on the seed."""

    def settings(self) -> JsonObject:
        """Return all settings of the run, for results.json."""

    def initial_model(self, seed: int) -> ModelBundle:
        """Return the initial model of a seed, without the task's head."""

    def training_setup(self, task: Task, model: ModelBundle, seed: int) -> TrainingSetup:
        """Return the objective and the samples that train `model`, which has the task's head."""


class LabelLearner:
    """The `Learner` of a fine-tuning run: it learns labels, from the model that the settings name or describe."""

    def __init__(self, plan: FinetunePlan, run: Run) -> None:
        self.plan = plan
        self.run = run

    @property
    def init_varies(self) -> bool:
        """Whether the initial weights depend on the seed, which is false for a pretrained model."""
        return not isinstance(self.plan.settings.init, Pretrained)

    def settings(self) -> JsonObject:
        """Return all settings of the run."""
        return to_mapping(self.plan.settings)

    def initial_model(self, seed: int) -> ModelBundle:
        """Load the pretrained model, or the model that was created for this run and saved in its folder."""
        plan = self.plan
        init = plan.settings.init
        make = partial(
            initial_model,
            init,
            plan.source,
            plan.stats.counts,
            seed,
            plan.settings.max_length,
            self.run.reporter.message,
        )
        if model_name(init):
            return make()
        base = self.run.saved_once(start_name(plan.settings, seed), make)
        base.source = INIT_NAMES[init.kind]
        return base

    def training_setup(self, task: Task, model: ModelBundle, seed: int) -> TrainingSetup:
        """Return the task as objective, with the samples of the training examples."""
        return label_setup(task, self.plan)


def label_setup(task: Task, plan: FinetunePlan) -> TrainingSetup:
    """Return a task as objective, with the samples of the labelled training examples."""
    encoded = task.encode_split(plan.source.examples("train"))
    return TrainingSetup(objective=task, samples=encoded.samples, encoded=encoded)


def start_name(settings: FinetuneSettings, seed: int) -> str:
    """Return the name of the folder for the initial model of a seed, within the run folder."""
    return START_MODEL if seed == settings.train.seed else f"{START_MODEL}-{seed}"


# -- the run ----------------------------------------------------------------------------------------------------------


class FinetuneTraining:
    """Trains and evaluates one model per seed, and writes the results of all seeds.

    Args:
        plan: Settings and data.
        run: The run folder, reporter and ranks.
        learner: Provides initial weights, objective and samples.
        standalone: Whether the run reports about its data and gets plots and a model card. False for the baseline of
            another run, and for the trial of a search.
    """

    def __init__(self, plan: FinetunePlan, run: Run, learner: Learner, *, standalone: bool = True) -> None:
        self.plan = plan
        self.run = run
        self.learner = learner
        self.standalone = standalone
        self.settings = plan.settings
        self.source = plan.source
        self.stats = plan.stats
        self.splits = tuple(split for split in plan.stats.non_empty_splits if split != "train")  # splits to evaluate

    def notes(self) -> Iterable[str]:
        """Return sentences about data, defaults and the model."""
        model_note = continued_run_note(model_name(self.settings.init), self.settings.task.kind)
        data_notes = (*self.source.stated, *self.plan.notes) if self.standalone else ()
        return *data_notes, self.plan.why, model_note

    def train(self) -> bool:
        """Train and evaluate each seed, and write the results. Return False if a signal interrupted training."""
        self.run.report_bad_rows()
        first_seed = self.settings.train.seed
        seeds = range(first_seed, first_seed + self.settings.seeds)
        base = self.learner.initial_model(first_seed)
        finished = []  # (folder, results) of each seed
        for seed in seeds:
            folder = self.run.folder if len(seeds) == 1 else self.run.folder / f"seed-{seed}"
            has_same_base = seed == first_seed or not self.learner.init_varies
            results = self._train_seed(base if has_same_base else None, seed, folder)
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
        if self.standalone:
            self.run.illustrate(write_finetuned_card)

    def _train_seed(self, base: ModelBundle | None, seed: int, folder: Path) -> JsonObject | None:
        """Train and evaluate with one seed.

        Args:
            base: The initial model. If None, the initial model of the seed.
            seed: The seed.
            folder: The folder of the seed.

        Returns:
            The results, or None if a signal interrupted training.
        """
        if (folder / SEED).exists():
            self._remove_state(folder)
            return read_run_json(folder / SEED)
        base = base or self.learner.initial_model(seed)
        settings = replace(self.settings, train=replace(self.settings.train, seed=seed))
        task, model = build_task(settings, self.source, self.stats, base, self.plan.labels)
        if settings.method != "finetune":
            model = with_vector_head(model, base)
        model.to(resolve_device(settings.train.device))
        for split in self.splits:
            task.check(self.source.examples(split))
        setup = self.learner.training_setup(task, model, seed)
        notes = reading_notes(settings, self.source, self.stats, task, setup.encoded)
        if model.token_pruning is not None:
            notes.append(pruning_note(model.token_pruning))
        for note in notes:
            self.run.reporter.message(note)
        folder.mkdir(exist_ok=True)
        self._score_before_training(task, model, folder)
        trainer = self._make_trainer(settings, task, model, setup, folder)
        fitted = self._fit(settings, task, model, trainer, folder)
        if fitted.stop_reason == "interrupted":
            return None
        with trainer.full_params():
            if settings.method != "finetune":
                fit_last_layer(model, setup.samples, task)
            results = self._evaluate(settings, task, model, trainer, fitted, setup, notes, folder)
        self._remove_state(folder)
        self.run.ranks.barrier()
        return results

    def _make_trainer(
        self, settings: FinetuneSettings, task: Task, model: ModelBundle, setup: TrainingSetup, folder: Path
    ) -> Trainer:
        """Return the trainer of a seed, after caching outputs of frozen layers and reporting the training time."""
        objective = setup.objective if settings.method == "finetune" else body_objective(settings, task)
        trainer = Trainer(model, objective, setup.samples, settings.train, self.run.ranks)
        if settings.train.freeze_layers and isinstance(objective, Task | ContrastiveClasses):
            # a checkpoint has the state of training and the best weights
            weights = sum(parameter.nbytes for parameter in trainer.loaded.parameters())
            checkpoint = weights + sum(tensor.nbytes for tensor in trainer.state()[0].values())
            reserved = checkpoint * (settings.fit.keep_last + 1)
            cache_frozen_outputs(trainer, self.run.folder / FROZEN, self.run.reporter.message, reserved_bytes=reserved)
        elif settings.train.freeze_layers:
            self.run.reporter.message(f"{freezing_note(settings.train.freeze_layers)}, and recomputed in every step")
        if self.run.ranks.size == 1 and settings.method == "finetune" and not (folder / STATE).exists():
            note = training_time_note(model, objective, trainer.samples, setup.encoded.tokens, settings.train)
            if note:
                self.run.reporter.message(note)
        return trainer

    def _fit(
        self, settings: FinetuneSettings, task: Task, model: ModelBundle, trainer: Trainer, folder: Path
    ) -> FitResult:
        """Train the weights. The method "linear" only gets an empty journal, since its last layer is fitted later."""
        if settings.method == "linear":
            (folder / JOURNAL).touch()
            return NOT_TRAINED
        evaluate = None
        if "dev" in self.splits and settings.method == "finetune":
            evaluate = partial(self._evaluate_dev_share, task, model, trainer.precision)
        return fit(
            trainer,
            folder,
            settings.fit,
            evaluate=evaluate,
            merge_evaluations=partial(eval_result, task),
            save_last=partial(self._save_last, settings, task, model, folder),
            reporter=self.run.reporter,
        )

    def _evaluate(
        self, settings: FinetuneSettings, task: Task, model: ModelBundle, trainer: Trainer, fitted: FitResult,
        setup: TrainingSetup, notes: list[str], folder: Path,
    ) -> JsonObject:  # fmt: skip
        """Save, calibrate and evaluate the trained model, and return its results, which are written to seed.json.

        The model is saved first, so that no later failure loses it.
        """
        model = task.for_inference(model)
        self._save(model, folder)
        model, temperature, calibration_notes = self._calibrate(settings, task, model, folder)
        self._summarize_vectors(task, model, folder)
        splits = {split: self._evaluate_split(task, model, split, folder) for split in self.splits}
        entry = checkpoint_entry(
            fitted.best_step, fitted.best_metric, trainer.step, fitted.last_metric, settings.fit.load_best_at_end
        )
        dev_note = small_dev_note(entry, task.metric, splits.get("dev", {}).get("intervals", {}).get(task.metric))
        if dev_note:
            self.run.reporter.message(dev_note)
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
            "notes": [*notes, *calibration_notes, *filter(None, [dev_note])],
        }
        if self.run.ranks.is_main:
            results |= self._baseline(task, model, trainer, setup.encoded, folder)
            write_file(folder / SEED, results)
        return results

    def _calibrate(
        self, settings: FinetuneSettings, task: Task, model: ModelBundle, folder: Path
    ) -> tuple[ModelBundle, float | None, list[str]]:
        """Set temperature, prediction sets and thresholds if the task uses them, and save the model with them.

        They are fitted on dev. If methods were compared by folds of train, temperature and prediction sets are fitted
        on the out-of-fold answers instead: they cover all rows, while a generated dev split has a tenth of them.

        Returns:
            The model, the temperature or None if none was fitted, and notes about the calibration.
        """
        notes = []
        out_of_fold = self._out_of_fold_calibration()
        uses_dev = out_of_fold is None and "dev" in self.splits and settings.task.fits_temperature()
        temperature = self._fit_temperature(settings, task, model)
        if temperature is not None:
            model = rescaled(model, 1 / temperature, 0.0)
            self._save(model, folder)
            fitted_on = "dev"
            if out_of_fold is not None:
                count = out_of_fold["methods"][out_of_fold["method"]]["numbers"]["count"]
                fitted_on = f"out-of-fold probabilities of {count:,} rows"
            notes.append(
                f"probabilities are calibrated: scores are divided by {temperature:.3g}, fitted on {fitted_on}"
            )
        elif uses_dev or out_of_fold is not None:
            name = "dev" if uses_dev else "train"
            notes.append(f"probabilities are not calibrated: {name} needs 100 examples, 10 of them answered wrongly")
        for note in notes:
            self.run.reporter.message(note)
        if uses_dev:
            model.calibration = calibration_of(task, model, self.source.examples("dev"))
            self._save(model, folder)
        elif out_of_fold is not None:
            model.calibration = tuple(out_of_fold["calibration"])
            self._save(model, folder)
        if settings.task.tunes_thresholds(self.stats):
            model.thresholds |= tune_thresholds(task, model, self.source.examples("dev"))
            self._save(model, folder)
        return model, temperature, notes

    def _summarize_vectors(self, task: Task, model: ModelBundle, folder: Path) -> None:
        """Save the model with a summary of the vectors of training texts, if dev is large enough for one."""
        if "dev" in self.splits:
            samples = (
                evenly_spaced(self.source.examples(split), self.stats.counts[split], VECTOR_EXAMPLES)
                for split in ("train", "dev")
            )
            model.training_vectors = training_vectors_of(task, model, *samples)
            self._save(model, folder)

    # -- baselines ----------------------------------------------------------------------------------------------------

    def _score_before_training(self, task: Task, model: ModelBundle, folder: Path) -> None:
        """Evaluate the untrained model if the task is zero-shot, unless its scores are already in the folder."""
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
        """Return the entry "baseline" with the scores before training or of a bag of words, or {} without either."""
        if not self.settings.eval_baseline or not self.splits:
            return {}
        if (folder / BEFORE).exists():
            return {"baseline": read_run_json(folder / BEFORE)}
        if linear_model_of(task) is None:
            return {}
        self.run.reporter.message("fitting a bag of words")
        word_scores = score_words(
            task,
            model,
            self.source,
            self.stats,
            self.splits,
            seed=self.settings.train.seed,
            seconds=seconds_allowed(trainer, encoded.tokens),
            folder=folder,
        )
        return {"baseline": word_scores}

    # -- models and scores --------------------------------------------------------------------------------------------

    def _save(self, model: ModelBundle, folder: Path, name: str = RUN_MODEL) -> None:
        if self.run.ranks.is_main:
            save(model, folder / name, overwrite=True)

    def _save_last(self, settings: FinetuneSettings, task: Task, model: ModelBundle, folder: Path) -> None:
        """Save the last weights in checkpoints/last, with a temperature and thresholds fitted for them."""
        model = copy(task.for_inference(model))
        if (temperature := self._fit_temperature(settings, task, model)) is not None:
            model = rescaled(model, 1 / temperature, 0.0)
        if settings.task.tunes_thresholds(self.stats):
            model.thresholds = model.thresholds | tune_thresholds(task, model, self.source.examples("dev"))
        self._save(model, folder, f"{CHECKPOINTS}/{LAST}")

    def _fit_temperature(self, settings: FinetuneSettings, task: Task, model: ModelBundle) -> float | None:
        """Return the temperature, or None if the task has no temperature or there are too few held-out examples."""
        out_of_fold = self._out_of_fold_calibration()
        if out_of_fold is not None:
            temperature: float | None = out_of_fold["temperature"]
            return temperature
        if "dev" in self.splits and settings.task.fits_temperature():
            return fit_temperature(task, model, self.source.examples("dev"))
        return None

    def _out_of_fold_calibration(self) -> JsonObject | None:
        """Return the entries "temperature" and "calibration" of out-of-fold answers, or None without such answers."""
        comparison = self.plan.comparison
        return dict(comparison) if comparison and "calibration" in comparison else None

    def _remove_state(self, folder: Path) -> None:
        """Remove the training state of a seed after its evaluation, unless `fit.keep_checkpoints` is set."""
        if self.run.ranks.is_main and not self.settings.fit.keep_checkpoints:
            remove_training_state(folder)

    def _evaluate_dev_share(self, task: Task, model: ModelBundle, dtype: torch.dtype) -> EvalMetrics:
        """Evaluate this rank's share of dev."""
        examples = self.source.examples("dev")
        return measure_split(task, task.for_inference(model), examples, precision=dtype, ranks=self.run.ranks)

    def _evaluate_split(self, task: Task, model: ModelBundle, split: str, folder: Path | None = None) -> JsonObject:
        """Evaluate a split. All ranks evaluate the whole split, so that no rank waits. Only the first one writes.

        Args:
            task: The task.
            model: The model.
            split: Name of the split.
            folder: The folder of the seed, for the file of predictions. If None, no predictions are written.
        """
        self.run.reporter.message(f"measuring {split}")
        predictions = folder / f"predictions-{split}.jsonl" if folder and self.run.ranks.is_main else None
        dtype = resolve_dtype(self.settings.eval_precision, next(model.parameters()).device)
        task, model = task.for_split(model, lambda: self.stats, split)
        metrics = measure_split(task, model, self.source.examples(split), precision=dtype, predictions=predictions)
        return {"numbers": task.report(metrics), "intervals": metrics.intervals()}

    def _label_counts(self) -> dict[str, int] | None:
        """Return how many training examples have each label, or None if the task is no classification of texts."""
        if self.source.kind not in (LabelledExample, MultiLabelExample):
            return None
        return {label: self.stats.labels[label] for label in self.source.labels}

    def _write_results(self, base: str, finished: list[tuple[Path, JsonObject]]) -> None:
        """Write the results of all seeds, and the model of the seed that is best on dev (the first seed without dev).

        Args:
            base: Name of the initial model.
            finished: Folder and results of each seed.
        """
        run = self.run
        folder, best = finished[0]
        metric = best["metric"]
        if "dev" in self.splits:
            folder, best = max(finished, key=lambda entry: float(entry[1]["splits"]["dev"]["numbers"][metric]))
        if folder != run.folder:  # a run of several seeds has the files of the best one
            for name in (JOURNAL, *(f"predictions-{split}.jsonl" for split in self.splits)):
                with atomic_path(run.folder / name) as temporary, (folder / name).open("rb") as file:
                    write_synced(temporary, iter(partial(file.read, 1 << 20), b""))
            save(load(folder / RUN_MODEL), run.folder / RUN_MODEL, overwrite=True)
        results_of_seeds = [results for _, results in finished]
        scores = {
            "task": self.settings.task.kind,
            "metric": metric,
            "labels": list(self.source.labels),
            "base": base,
            "seed": best["seed"],
            "seeds": [seed_entry(results) for results in results_of_seeds],
            "across_seeds": {split: across_seeds(results_of_seeds, split) for split in self.splits},
            "splits": best["splits"],
            "checkpoints": best["checkpoints"],
            "data": read_run_json(run.folder / DATA),
        }
        run.write_results(
            scores,
            load(run.folder / RUN_MODEL),
            self.learner.settings(),
            notes=[*self.plan.notes, *best["notes"]],
            label_counts=self._label_counts(),
            label_scaling=best["label_scaling"] or None,
            temperature=best["temperature"],
            baseline=best.get("baseline"),
            method_comparison=self.plan.comparison and public_comparison(self.plan.comparison),
        )
