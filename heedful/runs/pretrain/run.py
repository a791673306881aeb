"""`heedful pretrain`: train a model on raw text, in a run folder. transformers can load the trained model.

`heedful distil` uses the same training, `PretrainTraining`, if the teacher is a masked language model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from heedful.checkpoint import RUN_MODEL, ModelBundle, load, save
from heedful.data.bad_rows import OnBadRow
from heedful.data.corpus.build import contains_corpus
from heedful.errors import DataError, ModelError
from heedful.objectives import Objective, Sample, SelfSupervised
from heedful.runs.card.baseline import baseline_before_training
from heedful.runs.card.pretrained import CORPUS_KEYS, corpus_notes, write_pretrained_card
from heedful.runs.checkpoints import (
    CHECKPOINTS,
    LAST,
    CheckpointEntry,
    checkpoint_entry,
    continued_run_note,
    remove_training_state,
)
from heedful.runs.overrides import Overrides
from heedful.runs.pretrain.build import (
    build_model,
    build_samples,
    check_ignored_settings,
    model_to_save,
)
from heedful.runs.pretrain.builders import GENERATOR
from heedful.runs.pretrain.checks import warn_of_stalling
from heedful.runs.pretrain.components import load_components
from heedful.runs.pretrain.evaluate import combine_shares, measure_share
from heedful.runs.pretrain.objective_builder import Components
from heedful.runs.pretrain.settings import PretrainSettings, resolve_pretrain
from heedful.runs.results import BEFORE, JsonObject, RunResult
from heedful.runs.run import Run
from heedful.runs.run_folder import init_run_folder, read_run_json, write_file
from heedful.settings import to_mapping
from heedful.train.fit import EvalResult, Reporter, fit
from heedful.train.ranks import SINGLE_PROCESS, Ranks
from heedful.train.trainer import Stage, Trainer


def pretrain(
    data: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    *,
    objective: str = "",
    size: str = "",
    model: str | Path = "",
    tokenizer: str | Path = "",
    teacher: str | Path = "",
    recipe: str | Path | Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, object] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> RunResult:
    """Pre-train a model on text; an interrupted run in `output_dir` is resumed.

    Args:
        data: Files and folders of text, or one folder with a corpus (see data.corpus.build).
        output_dir: The run folder.
        objective: An objective, or terms of a distillation such as "mlm+hidden_states". If empty, "mlm".
        size: Size of a model with random weights. If empty, "mini".
        model: A model to continue from: a folder, or NAME[@REVISION] on the hub. If empty, weights are random.
        tokenizer: A folder with a tokenizer. If empty, the tokenizer of the model or the corpus is used, else one is
            trained on the text.
        teacher: A trained encoder as teacher of a distillation: a folder, or NAME[@REVISION] on the hub.
        recipe: A .toml or .json file of settings.
        assignments: Texts such as "lr=0.1".
        overrides: Settings by path or short name, or overrides that were collected before.
        on_bad_row: "raise", or "skip" to write rows that cannot be read to a file instead.
        reporter: Receives progress.
        ranks: The processes that train together.

    Raises:
        HeedfulError: If the text, a setting or the folder cannot be used.
    """
    settings = resolve_pretrain(
        data,
        objective=objective,
        size=size,
        model=str(model),
        tokenizer=str(tokenizer),
        teacher=str(teacher),
        recipe=recipe,
        assignments=assignments,
        overrides=overrides,
    )
    return pretrain_with(settings, output_dir, on_bad_row=on_bad_row, reporter=reporter, ranks=ranks)


def pretrain_with(
    settings: PretrainSettings,
    output_dir: str | Path,
    *,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> RunResult:
    """Pre-train with complete settings, which also name the text. See `pretrain` for the other arguments.

    Raises:
        HeedfulError: If the text, a setting or the folder cannot be used.
    """
    if not settings.data:
        raise DataError("no text was given: name files or folders of text, or put data into the recipe")
    check_ignored_settings(settings, from_corpus=len(settings.data) == 1 and contains_corpus(Path(settings.data[0])))
    run = Run.open(output_dir, reporter, ranks)
    settings = run.resolve(settings)
    with run.locked():
        run.begin(partial(init_run_folder, run.folder, settings))
        return run.execute(PretrainTraining(settings, run, TextLearner(settings, run), on_bad_row))


# -- objectives and samples -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainSetup:
    """Objectives and training samples of a pre-training run."""

    objectives: Sequence[Objective]  # one for each phase
    samples: Sequence[Sequence[Sample]]  # training samples of each phase
    evaluated: SelfSupervised  # the objective with which validation samples are evaluated


class PretrainLearner(Protocol):
    """Provides the objectives of a pre-training run: of its settings, or of the distillation of a language model."""

    @property
    def base(self) -> str:
        """Description of the initial weights for results.json, or "" if they are random."""

    def settings(self) -> JsonObject:
        """Return all settings that the model depends on, for results.json."""

    def training_setup(
        self, components: Components, model: ModelBundle, samples: Sequence[Sequence[Sample]]
    ) -> PretrainSetup:
        """Return objectives and training samples.

        Args:
            components: The components of the run.
            model: The model that is trained, with the objective's head.
            samples: The packed rows of each phase.
        """


class TextLearner:
    """Trains with the objective of the settings, which may have a trained encoder as teacher.

    Args:
        settings: The settings of the run.
        run: The run folder, reporter and ranks.
        base: A description of the initial weights. If None, the name of the model that training continues from.
    """

    def __init__(self, settings: PretrainSettings, run: Run, base: str | None = None) -> None:
        self._settings = settings
        self.run = run
        self._base = settings.model.init_from if base is None else base

    @property
    def base(self) -> str:
        """Description of the initial weights, or "" if they are random."""
        return self._base

    def settings(self) -> JsonObject:
        """Return the settings of the run."""
        return to_mapping(self._settings)

    def training_setup(
        self, components: Components, model: ModelBundle, samples: Sequence[Sequence[Sample]]
    ) -> PretrainSetup:
        """Return the objectives of the settings, and the samples unchanged."""
        objectives = components.builder.objectives(components, model, samples)
        for note in components.builder.notes(components):
            self.run.reporter.message(note)
        evaluated = components.builder.for_validation(objectives[0])
        return PretrainSetup(objectives=objectives, samples=samples, evaluated=evaluated)


# -- the run ----------------------------------------------------------------------------------------------------------


class PretrainTraining:
    """Trains a model on text, and evaluates it on validation documents. It implements the protocol `Training`.

    Args:
        settings: The settings of the run.
        run: The run folder, reporter and ranks.
        learner: Provides the objectives and the training samples.
        on_bad_row: "raise", or "skip" to write rows that cannot be read to a file instead.
        corpus_folder: A corpus that another run has built from the same text. If None, the corpus of the run folder.
    """

    def __init__(
        self,
        settings: PretrainSettings,
        run: Run,
        learner: PretrainLearner,
        on_bad_row: OnBadRow,
        corpus_folder: Path | None = None,
    ) -> None:
        self.settings = settings
        self.run = run
        self.learner = learner
        self._load = partial(load_components, settings, run, on_bad_row, corpus_folder)

    def notes(self) -> Iterable[str]:
        """Return a sentence about the run whose model is trained further, or an empty one."""
        return (continued_run_note(self.settings.model.init_from, "pretrain"),)

    def train(self) -> bool:
        """Train the model, and write the results. Return whether training has finished; a signal may interrupt it."""
        settings = self.settings
        run = self.run
        components = self._load()
        for note in corpus_notes(components.corpus.about):
            run.reporter.message(note)
        run.report_bad_rows()
        samples, validation = build_samples(components)
        model = build_model(components)
        setup = self.learner.training_setup(components, model, samples)
        self._report_sizes(components, model, setup)
        if run.ranks.is_main:
            warn_of_stalling(settings, components.corpus, setup.samples[0])
        trainer = self._trainer(model, setup)
        evaluate = partial(measure_share, trainer, setup.evaluated, validation, components.probes)
        self._score_before_training(trainer, evaluate, setup.evaluated)
        fitted = fit(
            trainer,
            run.folder,
            replace(settings.fit, eval_every_epochs=settings.eval_every_steps / trainer.order.steps_per_epoch),
            evaluate=evaluate,
            merge_evaluations=partial(combine_shares, setup.evaluated),
            save_last=partial(self._save_last, components, model),
            reporter=run.reporter,
        )
        if fitted.stop_reason == "interrupted":
            return False
        entry = checkpoint_entry(
            fitted.best_step,
            fitted.best_metric,
            trainer.step,
            fitted.last_metric,
            settings.fit.load_best_at_end,
        )
        with trainer.full_params():
            shares = run.ranks.all_gather_object(evaluate())
            if run.ranks.is_main:
                scores = combine_shares(setup.evaluated, shares)
                self._write_results(components, model_to_save(model, components), trainer, scores, entry)
        run.ranks.barrier()
        return True

    def finish(self) -> None:
        """Remove the training state unless checkpoints are kept, and write plots and the model card."""
        if not self.settings.fit.keep_checkpoints:
            remove_training_state(self.run.folder)
        self.run.illustrate(write_pretrained_card)

    def _trainer(self, model: ModelBundle, setup: PretrainSetup) -> Trainer:
        """Return the trainer of the model, with a stage for each phase of the settings."""
        later_phases = [
            Stage(phase.start_fraction, rows, phase.batch_size, objective)
            for phase, rows, objective in zip(
                self.settings.phases, setup.samples[1:], setup.objectives[1:], strict=True
            )
        ]
        return Trainer(
            model,
            setup.objectives[0],
            setup.samples[0],
            self.settings.train,
            self.run.ranks,
            later_stages=later_phases,
        )

    def _report_sizes(self, components: Components, model: ModelBundle, setup: PretrainSetup) -> None:
        """Report the sizes of corpus, model and first phase."""
        counts = components.corpus.about["counts"]
        self.run.reporter.message(
            f"{counts['documents']:,} documents of {counts['tokens']:,} tokens; a model of {model.count():,} "
            f"parameters; {len(setup.samples[0]):,} rows of up to {self.settings.pack_length:,} tokens, "
            f"{self.settings.train.batch_size} in a step"
        )

    def _score_before_training(
        self, trainer: Trainer, evaluate: Callable[[], dict[str, tuple[float, float]]], objective: SelfSupervised
    ) -> None:
        """Evaluate the model that training continues from, and write its scores to the run folder.

        Nothing is done for random weights, or if the scores are in the folder already. All ranks must call this.

        Args:
            trainer: The trainer before its first step.
            evaluate: Returns this rank's share of an evaluation; see `measure_share`.
            objective: The objective with which validation samples are evaluated.

        Raises:
            ModelError: If a score is not finite.
        """
        init_from = self.settings.model.init_from
        path = self.run.folder / BEFORE
        ranks = self.run.ranks
        if not init_from or init_from != self.learner.base or ranks.all_gather_object(path.exists())[0]:
            return
        self.run.reporter.message("the score before training")
        with trainer.full_params():
            shares = ranks.all_gather_object(evaluate())
        metrics = combine_shares(objective, shares).metrics
        if not all(map(math.isfinite, metrics.values())):
            raise ModelError(
                f"{init_from} has a validation loss of {metrics['loss']}: training cannot start from its weights"
            )
        if ranks.is_main:
            write_file(path, baseline_before_training({"validation": {"numbers": metrics}}))

    def _save_last(self, components: Components, model: ModelBundle) -> None:
        """Save the weights of the last step as a checkpoint, since the run's model may be that of an earlier step."""
        if self.run.ranks.is_main:
            save(
                model_to_save(model, components),
                self.run.folder / CHECKPOINTS / LAST,
                overwrite=True,
                pooling=self.settings.objective.pooling,
            )

    def _write_results(
        self, components: Components, model: ModelBundle, trainer: Trainer, scores: EvalResult, entry: CheckpointEntry
    ) -> None:
        """Save the model, and for replaced token detection its generator, and write results.json and results.csv.

        Args:
            components: The components of the run.
            model: The model to save.
            trainer: The trainer after its last step.
            scores: The evaluation of the model on the validation samples.
            entry: Which checkpoints the run has, for results.json.
        """
        folder = self.run.folder
        corpus = components.corpus.about
        pooling = self.settings.objective.pooling
        save(model, folder / RUN_MODEL, overwrite=True, pooling=pooling)
        generator = trainer.objective.extra_module
        if isinstance(generator, ModelBundle):
            save(generator, folder / GENERATOR, overwrite=True)
        results = {
            "task": "pretrain",
            "objective": self.settings.kind,
            "metric": next((name for name in scores.metrics if name.endswith("_accuracy")), "loss"),
            "base": self.learner.base,
            "steps": trainer.step,
            "checkpoints": entry,
            "epochs": trainer.epoch,
            "tokens": trainer.tokens_seen,
            "seconds": round(trainer.seconds, 1),
            "splits": {"validation": {"numbers": scores.metrics}},
            "corpus": {key: corpus[key] for key in CORPUS_KEYS if key in corpus},
        }
        baseline = read_run_json(folder / BEFORE) if (folder / BEFORE).exists() else None
        head = None if pooling is None or model.config.head is None else model.config.head.kind
        self.run.write_results(results, load(folder / RUN_MODEL, head=head), self.learner.settings(), baseline=baseline)
