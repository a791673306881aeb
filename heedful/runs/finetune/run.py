"""finetune: from labelled data to a run folder with a trained, measured model that transformers loads too."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from heedful.atomic_io import put, whole
from heedful.checkpoint import RUN_MODEL, Loaded, config_of, load, save
from heedful.csrc import unused
from heedful.data import DataSettings, LeaveOut, Source, Stop, source_of
from heedful.data.bad_rows import OnBadRow
from heedful.data.labelled.statistics import Survey, of_splits, refuse_dull, survey, undivided
from heedful.device import idle, precision
from heedful.objectives import Objective, Sample
from heedful.runs.card.baseline import BEFORE, baseline_before_training, baseline_csv_rows
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
from heedful.runs.finetune.checks import check_dev_split, check_unused_settings
from heedful.runs.finetune.encoder_advice import reading_notes
from heedful.runs.finetune.init_settings import Classic, Pretrained, Recurrent, Seq2Seq, model_name
from heedful.runs.finetune.seq2seq import check_bleu, default_bleu_units, sample_targets
from heedful.runs.finetune.settings import (
    FinetuneSettings,
    check_batch_groups,
    check_task,
    finetune_defaults,
    finetune_overrides,
    preview_settings,
    resolve_finetune,
    training_summary,
)
from heedful.runs.finetune.training_time import training_time_note
from heedful.runs.finetune.word_baseline import has_word_baseline, score_words, seconds_allowed
from heedful.runs.overrides import Overrides
from heedful.runs.pin_models import pin_models
from heedful.runs.plots.figures import draw_run_plots
from heedful.runs.results import JOURNAL, RESULTS, across_seeds, folder_bytes, read_results, seed_entry
from heedful.runs.run_folder import (
    BAD_ROWS,
    DATA,
    START_MODEL,
    check_run_folder,
    environment,
    init_labelled_run,
    journal_csv,
    read_json,
    resolve_precision,
    translate_io_errors,
    write_file,
)
from heedful.runs.scoring import eval_result, measure_split, tune_thresholds
from heedful.runs.timing import measure_latency, peak_memory
from heedful.settings import to_mapping
from heedful.tasks.specs import SPECS, specs_named
from heedful.tasks.task import EncodedSplit, EvalMetrics, Task
from heedful.train.checkpoint import lock_run
from heedful.train.fit import FitResult, Reporter, fit
from heedful.train.ranks import SINGLE_PROCESS, Ranks
from heedful.train.trainer import Trainer

SEED, CARD = "seed.json", "README.md"
INIT_NAMES = {  # what a model that is made for a run is called in results
    "scratch": "a small encoder, trained on the spot",
    "classic": "a classic model",
    "recurrent": "a classic model",
    "transformer": "a Transformer with random weights",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """How a run ended."""

    folder: Path
    stop_reason: Literal["completed", "interrupted"]  # interrupted by a signal: the same command resumes it
    results: dict[str, Any]  # those of RESULTS, on the first rank of a run that is done; else none


def finetune(
    task: str,
    data: Any,
    output_dir: str | Path,
    *,
    model: str | Path = "",
    recipe: str | Path | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, Any] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> Finished:
    """Fine-tune a model on labelled data; `output_dir` is the run folder, an interrupted run in it is resumed.

    `model` is a folder, or NAME[@REVISION] on the hub. `overrides` are settings by path or short name, as {"batch": 8}.
    What is not set follows from the size of the data, and is said.
    """
    task = check_task(task)
    folder, reporter = Path(output_dir), reporter if reporter and ranks.first else Reporter()
    given = finetune_overrides(overrides, model=model, recipe=recipe, assignments=assignments)
    plan = plan_finetune(task, data, overrides=given, on_bad_row=on_bad_row)
    check_run_folder(folder)
    train = resolve_precision(plan.settings.train, folder, ranks, reporter.message)
    plan = replace(plan, settings=replace(pin_models(plan.settings, folder), train=train))
    with lock_run(folder) if ranks.first else nullcontext(), translate_io_errors(folder):
        if ranks.first:
            again = partial(source_of, plan.source.kind, data, plan.settings.data)
            init_labelled_run(folder, plan.settings, plan.source, plan.survey.counts, again)
        ranks.wait()
        return Run(plan, folder, reporter, ranks).run()


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetunePlan:
    """What is going to be done."""

    settings: FinetuneSettings
    source: Source[Any]
    survey: Survey
    notes: tuple[str, ...]  # what of the data is left out, in sentences
    why: str  # the defaults
    labels: tuple[str, ...] | None = None  # that the model answers; None: those of the data


def plan_finetune(
    task: str,
    data: Any,
    *,
    model: str | Path = "",
    recipe: str | Path | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, Any] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
) -> FinetunePlan:
    """Look at the data, lay overrides over the defaults that follow from it, and refuse what could not be learned."""
    task = check_task(task)
    given = finetune_overrides(overrides, model=model, recipe=recipe, assignments=assignments)
    told = preview_settings(task, given)
    reading = told.data
    source, found = _looked_at(task, data, reading, on_bad_row)
    if lacking := undivided(source, found):
        reading = replace(reading, dev_fraction=0.0)
        source, found = _looked_at(task, data, reading, on_bad_row)
    refuse_dull(source, found)
    kind = next(spec.name for spec in specs_named(task) if spec.example is source.kind)
    init = told.init
    named, width = model_name(init), 0
    if isinstance(init, Pretrained | Classic) and named:
        if Path(named).is_dir():
            init = replace(init, model=os.path.normpath(named))  # one folder, however it is written
        width = config_of(init.model, revision=init.revision or None).model.width
    classic, writer = isinstance(init, Classic | Recurrent), init if isinstance(init, Seq2Seq) else None
    fresh, count, together = not named, found.counts["train"], told.task.group(scored=found.low is not None)
    golds = sample_targets(source, found.splits)
    words = default_bleu_units(golds)
    cut = classic or told.long_inputs == "truncate" or SPECS[kind].truncates  # one sample for each example
    settings, why = finetune_defaults(
        kind, count, random_init=fresh, width=width, classic=classic, seq2seq=writer, group_size=together,
        bleu_units=words, characters=0 if cut else found.characters["train"],
    )  # fmt: skip
    resolved = resolve_finetune(given, settings)
    settings = replace(resolved.settings, init=init, data=reading)
    if isinstance(init, Classic):
        SPECS[kind].check_reader(init.reader, "init.reader", len(source.labels))
    check_batch_groups(settings.train, together)
    check_bleu(settings.task, golds)
    check_dev_split(settings, found, lacking)
    check_unused_settings(settings, found, classic=classic and not named)
    empty = [*([f"{lacking}, so all are train"] if lacking else []), *of_splits(found)]
    bad = [f"bad rows of {Path(name).name} that are left out: {count:,}" for name, count in source.sieve.bad.items()]
    why = training_summary(settings, why, tuple(resolved.given))
    return FinetunePlan(settings=settings, source=source, survey=found, notes=(*empty, *bad), why=why)


def _looked_at(task: str, data: Any, settings: DataSettings, on_bad_row: OnBadRow) -> tuple[Source[Any], Survey]:
    source = source_of(specs_named(task)[0].example, data, settings, LeaveOut() if on_bad_row == "skip" else Stop())
    return source, survey(source, ("train", *(split for split in source.splits if split != "train")))


class Run:
    """A plan carried out in a folder: each seed trained and measured, then all of them together."""

    def __init__(self, plan: FinetunePlan, folder: Path, reporter: Reporter, ranks: Ranks) -> None:
        self.plan, self.folder, self.reporter, self.ranks = plan, folder, reporter, ranks
        self.settings, self.source, self.survey = plan.settings, plan.source, plan.survey
        self.measured = tuple(split for split in plan.survey.splits if split != "train")
        self.stated: Sequence[str] = plan.source.stated  # what was found out about the data, to be said

    def run(self) -> Finished:
        """To the end, or until a stop is asked for."""
        finished = (self.folder / RESULTS).exists()
        if finished:
            self.reporter.message(f"{self.folder} is finished already")
        else:
            further = continued_run_note(model_name(self.settings.init), self.settings.task.kind)
            said = (*self.stated, *self.plan.notes, self.plan.why, further, unused(), idle(self.settings.train.device))
            for sentence in filter(None, said):
                self.reporter.message(sentence)
            if (self.folder / BAD_ROWS).exists():
                self.reporter.message(f"bad rows are set aside in {self.folder / BAD_ROWS}")
            first, done = self.settings.train.seed, []
            base, seeds = self._start(first), range(first, first + self.settings.seeds)
            for seed in seeds:
                folder = self.folder if len(seeds) == 1 else self.folder / f"seed-{seed}"
                found = self._one(base if seed == first or not self.fresh else None, seed, folder)
                if found is None:
                    return Finished(folder=self.folder, stop_reason="interrupted", results={})
                done.append((folder, found))
            if self.ranks.first:
                self._together(base.source, done)
        if self.ranks.first and not (self.folder / RUN_MODEL / CARD).exists():
            self._show()
        self.ranks.wait()
        return Finished(
            folder=self.folder, stop_reason="completed", results=read_results(self.folder) if self.ranks.first else {}
        )

    def _show(self) -> None:
        """Plots and the model card."""
        draw_run_plots(self.folder)
        write_finetuned_card(self.folder)

    @property
    def fresh(self) -> bool:
        """Whether a seed decides what training starts from, too."""
        return not isinstance(self.settings.init, Pretrained)

    @property
    def decisive(self) -> dict[str, Any]:
        """All settings that decided what the model is."""
        return to_mapping(self.settings)

    def kept(self, seed: int) -> Path:
        """Where what is made for the training with a seed is kept, before it learns."""
        return self.folder / (START_MODEL if seed == self.settings.train.seed else f"{START_MODEL}-{seed}")

    def _start(self, seed: int) -> Loaded:
        """The model to start from; one that was made for this run is kept in it."""
        init, counts, longest = self.settings.init, self.survey.counts, self.settings.max_length
        make = partial(initial_model, init, self.source, counts, seed, longest, self.reporter.message)
        if model_name(init):
            return make()
        self._keep(self.kept(seed), make)
        base = load(self.kept(seed))
        base.source = INIT_NAMES[init.kind]
        return base

    def _keep(self, folder: Path, make: Callable[[], Loaded]) -> None:
        """Every rank makes it, as others would not wait for as long as that may take; the first one saves it."""
        if not folder.exists():
            made = make()
            if self.ranks.first:
                save(made, folder)
        self.ranks.wait()

    def _one(self, base: Loaded | None, seed: int, folder: Path) -> dict[str, Any] | None:
        """Train and measure with one seed, from a base or one of its own; None: a stop was asked for."""
        if (folder / SEED).exists():
            self._keep_weights(folder)
            return read_json(folder / SEED)
        base = base or self._start(seed)
        settings = replace(self.settings, train=replace(self.settings.train, seed=seed))
        task, loaded = build_task(settings, self.source, self.survey, base, self.plan.labels)
        for split in self.measured:
            task.check(self.source.examples(split))
        objective, samples, learned = self._learning(task, loaded, seed)
        said = reading_notes(settings, self.source, self.survey, task, learned)
        for note in said:
            self.reporter.message(note)
        folder.mkdir(exist_ok=True)
        self._before(task, loaded, folder)
        begins = self.ranks.size == 1 and not (folder / STATE).exists()
        if begins and (told := training_time_note(loaded, objective, samples, learned.tokens, settings.train)):
            self.reporter.message(told)
        trainer = Trainer(loaded, objective, samples, settings.train, self.ranks)
        fitted = fit(
            trainer,
            folder,
            settings.fit,
            evaluate=partial(self._share, task, loaded, trainer.precision) if "dev" in self.measured else None,
            score=partial(eval_result, task),
            save_last=partial(self._save_last, settings, task, loaded, folder),
            reporter=self.reporter,
        )
        if fitted.stop_reason == "interrupted":
            return None
        with trainer.whole():
            found = self._finish(settings, task, loaded, trainer, fitted, learned, said, folder)
        self._keep_weights(folder)
        self.ranks.wait()
        return found

    def _finish(
        self, settings: FinetuneSettings, task: Task, loaded: Loaded, trainer: Trainer, fitted: FitResult,
        learned: EncodedSplit, said: list[str], folder: Path,
    ) -> dict[str, Any]:  # fmt: skip
        """Save what was trained, which no failure in measuring may lose, and measure it."""
        seed, loaded = settings.train.seed, task.answering(loaded)
        self._save(loaded, folder)
        if settings.task.tunes_thresholds(self.survey):
            loaded.thresholds |= tune_thresholds(task, loaded, self.source.examples("dev"))
            self._save(loaded, folder)
        splits = {split: self._measured(task, loaded, split, folder) for split in self.measured}
        entry = checkpoint_entry(
            fitted.best_step, fitted.best, trainer.step, fitted.last, settings.fit.load_best_at_end
        )
        unclear = small_dev_note(entry, task.metric, splits.get("dev", {}).get("intervals", {}).get(task.metric))
        if unclear:
            self.reporter.message(unclear)
        found = {
            "seed": seed,
            "metric": task.metric,
            "best_step": fitted.best_step or trainer.step,
            "steps": trainer.step,
            "seconds": round(trainer.seconds, 1),
            "splits": splits,
            "checkpoints": entry,
            "label_scaling": loaded.label_scaling,
            "notes": [*said, *filter(None, [unclear])],
        }
        if self.ranks.first:
            found |= self._baseline(task, loaded, trainer, learned, folder)
            write_file(folder / SEED, found)
        return found

    def _before(self, task: Task, loaded: Loaded, folder: Path) -> None:
        """Score a model before it is trained, where it may do the task already; once for a run that resumes."""
        zero_shot = SPECS[self.settings.task.kind].zero_shot
        if not zero_shot or not self.settings.eval_baseline or (folder / BEFORE).exists():
            return
        self.reporter.message("the score before training")
        found = baseline_before_training({split: self._measured(task, loaded, split) for split in self.measured})
        if self.ranks.first:
            write_file(folder / BEFORE, found)

    def _baseline(
        self, task: Task, loaded: Loaded, trainer: Trainer, learned: EncodedSplit, folder: Path
    ) -> dict[str, dict[str, Any]]:
        """The baseline scores: before training, or of a bag of words; {} where there is none."""
        if not self.settings.eval_baseline or not self.measured:
            return {}
        if (folder / BEFORE).exists():
            return {"baseline": read_json(folder / BEFORE)}
        if not has_word_baseline(task):
            return {}
        self.reporter.message("fitting a bag of words")
        words = score_words(
            task,
            loaded,
            self.source,
            self.survey,
            self.measured,
            seed=self.settings.train.seed,
            seconds=seconds_allowed(trainer, learned.tokens),
            folder=folder,
        )
        return {"baseline": words}

    def _save(self, loaded: Loaded, folder: Path, name: str = RUN_MODEL) -> None:
        if self.ranks.first:
            save(loaded, folder / name, overwrite=True)

    def _save_last(self, settings: FinetuneSettings, task: Task, loaded: Loaded, folder: Path) -> None:
        """Save the last weights, with thresholds of their own, beside the best ones, which become the model."""
        loaded = copy(task.answering(loaded))
        if settings.task.tunes_thresholds(self.survey):
            loaded.thresholds = loaded.thresholds | tune_thresholds(task, loaded, self.source.examples("dev"))
        self._save(loaded, folder, f"{CHECKPOINTS}/{LAST}")

    def _keep_weights(self, folder: Path) -> None:
        """Remove the training state of a seed that is measured, unless it is to stay."""
        if self.ranks.first and not self.settings.fit.keep_checkpoints:
            remove_training_state(folder)

    def _learning(self, task: Task, loaded: Loaded, seed: int) -> tuple[Objective, Sequence[Sample], EncodedSplit]:
        """What is learned, from which samples, and what reading them cost."""
        learned = task.read(self.source.examples("train"))
        return task, learned.samples, learned

    def _share(self, task: Task, loaded: Loaded, how: torch.dtype) -> EvalMetrics:
        """What this rank finds on its share of dev."""
        return measure_split(task, task.answering(loaded), self.source.examples("dev"), precision=how, ranks=self.ranks)

    def _measured(self, task: Task, loaded: Loaded, split: str, folder: Path | None = None) -> dict[str, Any]:
        """An evaluation of a split; each rank makes the whole of it, so that none waits, and the first writes."""
        self.reporter.message(f"measuring {split}")
        path = folder / f"predictions-{split}.jsonl" if folder and self.ranks.first else None
        how = precision(self.settings.eval_precision, next(loaded.parameters()).device)
        task, loaded = task.on_split(loaded, lambda: self.survey, split)
        measured = measure_split(task, loaded, self.source.examples(split), precision=how, predictions=path)
        return {"numbers": task.told(measured), "intervals": measured.intervals()}

    def _together(self, base: str, done: list[tuple[Path, dict[str, Any]]]) -> None:
        """Results over all seeds, with the model of the best of them on dev (of the first, where there is no dev)."""
        folder, best = done[0]
        metric = best["metric"]
        if "dev" in self.measured:
            folder, best = max(done, key=lambda each: float(each[1]["splits"]["dev"]["numbers"][metric]))
        if folder != self.folder:
            for name in (JOURNAL, *(f"predictions-{split}.jsonl" for split in self.measured)):
                with whole(self.folder / name) as part, (folder / name).open("rb") as file:
                    put(part, iter(partial(file.read, 1 << 20), b""))
            save(load(folder / RUN_MODEL), self.folder / RUN_MODEL, overwrite=True)
        loaded, about = load(self.folder / RUN_MODEL), environment()
        results = {
            "task": self.settings.task.kind,
            "metric": metric,
            "labels": list(self.source.labels),
            "base": base,
            "seed": best["seed"],
            "seeds": [seed_entry(found) for _, found in done],
            "across_seeds": {split: across_seeds([found for _, found in done], split) for split in self.measured},
            "splits": best["splits"],
            "checkpoints": best["checkpoints"],
            "data": read_json(self.folder / DATA),
            "model": {"parameters": loaded.count(), "bytes": folder_bytes(self.folder / RUN_MODEL)},
            **measure_latency(loaded),
            "memory": peak_memory(),
            "machine": about["machine"],
            "versions": about["versions"],
            "settings": self.decisive,
            "notes": [*self.plan.notes, *best["notes"]],
        }
        if best["label_scaling"]:
            results["label_scaling"] = best["label_scaling"]
        if "baseline" in best:
            results["baseline"] = best["baseline"]
        write_file(self.folder / "results.csv", journal_csv(self.folder / JOURNAL, baseline_csv_rows(results)))
        write_file(self.folder / RESULTS, results)
