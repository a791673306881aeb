"""pretrain: from raw text to a run folder with a model that learned from it alone, and that transformers loads too."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from heedful.checkpoint import RUN_MODEL, Loaded, load, save
from heedful.csrc import unused
from heedful.data.bad_rows import LeaveOut, OnBadRow, SetAside, Sieve, Stop
from heedful.data.corpus.build import Progress, build, holds
from heedful.data.corpus.documents import Reading, expand
from heedful.data.corpus.sentence_split import normalise
from heedful.data.corpus.shards import Corpus
from heedful.data.sampler import mixed
from heedful.device import idle
from heedful.errors import HeedfulError
from heedful.objectives import Objective, Sample, SelfSupervised
from heedful.objectives.distillation.encoder import EncoderDistillation
from heedful.runs.card.baseline import BEFORE, baseline_before_training, baseline_csv_rows
from heedful.runs.card.pretrained import CORPUS_KEYS, corpus_notes, write_pretrained_card
from heedful.runs.checkpoints import CHECKPOINTS, LAST, checkpoint_entry, continued_run_note, remove_training_state
from heedful.runs.overrides import Overrides
from heedful.runs.pin_models import pin_models
from heedful.runs.plots.figures import draw_run_plots
from heedful.runs.pretrain.build import (
    GENERATOR,
    Components,
    build_model,
    build_objectives,
    build_samples,
    check_ignored_settings,
    check_model,
    check_tokenizer,
    generator_folder,
    model_to_save,
)
from heedful.runs.pretrain.checks import warn_of_stalling
from heedful.runs.pretrain.distillation_settings import DistillationSettings
from heedful.runs.pretrain.evaluate import combine_shares, measure_share
from heedful.runs.pretrain.probes import ProbeSet
from heedful.runs.pretrain.settings import PretrainSettings, RtdSettings, SpanCorruptionSettings, resolve_pretrain
from heedful.runs.pretrain.teacher import TeacherRun
from heedful.runs.results import JOURNAL, RESULTS, folder_bytes, read_results
from heedful.runs.run_folder import (
    BAD_ROWS,
    CORPUS,
    DATA,
    TOKENIZER,
    check_run_folder,
    environment,
    init_run_folder,
    journal_csv,
    read_json,
    resolve_precision,
    translate_io_errors,
    write_file,
)
from heedful.runs.timing import measure_latency, peak_memory
from heedful.settings import to_mapping
from heedful.tokenizer import Tokenizer, train
from heedful.train.checkpoint import lock_run
from heedful.train.fit import EvalResult, Reporter, fit
from heedful.train.ranks import SINGLE_PROCESS, Ranks
from heedful.train.trainer import Stage, Trainer

CARD = "README.md"
SAMPLE = 8  # what the number of a document is mixed with, to draw those that a tokenizer learns from
SENTINELS = 100  # of a tokenizer that is trained for spans; fewer where the vocabulary is small
TOLD = 10.0  # seconds between two reports of a corpus that is made


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretrained:
    """How a run ended."""

    folder: Path
    stop_reason: Literal["completed", "interrupted"]  # interrupted by a signal: the same command resumes it
    results: dict[str, Any]  # on the first rank of a run that is done; else none


def pretrain(
    data: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    *,
    objective: str = "",
    size: str = "",
    model: str | Path = "",
    tokenizer: str | Path = "",
    teacher: str | Path = "",
    recipe: str | Path | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, Any] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> Pretrained:
    """Pre-train a model on files and folders of text, or on one folder that holds a corpus (see data.corpus.build).

    `output_dir` is the run folder, an interrupted run in it is resumed. `model` is a folder, or NAME[@REVISION] on
    the hub, that goes on; without it a fresh model of that size is trained. `teacher` is a trained encoder, for an
    objective of terms such as "mlm+hidden_states+sentence_embedding". `overrides` are settings by path or short name.
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
    return run(settings, output_dir, on_bad_row=on_bad_row, reporter=reporter, ranks=ranks)


def run(
    settings: PretrainSettings,
    output_dir: str | Path,
    *,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> Pretrained:
    """The same of settings, which name the text too."""
    folder = Path(output_dir)
    if not settings.data:
        raise HeedfulError("no text was given: name files or folders of text, or put data into the recipe")
    check_ignored_settings(settings, from_corpus=len(settings.data) == 1 and holds(Path(settings.data[0])))
    check_run_folder(folder)
    reporter = reporter if reporter and ranks.first else Reporter()
    settings = replace(
        pin_models(settings, folder), train=resolve_precision(settings.train, folder, ranks, reporter.message)
    )
    with lock_run(folder) if ranks.first else nullcontext(), translate_io_errors(folder):
        return Run(settings, folder, reporter, ranks, on_bad_row).run()


class Run:
    """Settings carried out in a folder."""

    def __init__(
        self, settings: PretrainSettings, folder: Path, reporter: Reporter, ranks: Ranks, on_bad_row: OnBadRow
    ) -> None:
        self.settings, self.folder, self.reporter, self.ranks = settings, folder, reporter, ranks
        self.on_bad_row = on_bad_row

    def run(self) -> Pretrained:
        """To the end, or until a stop is asked for."""
        if self.ranks.first:
            init_run_folder(self.folder, self.settings)
        self.ranks.wait()
        if (self.folder / RESULTS).exists():
            self.reporter.message(f"{self.folder} is finished already")
        else:
            further = continued_run_note(self.settings.model.init_from, "pretrain")
            for line in filter(None, (further, unused(), idle(self.settings.train.device))):
                self.reporter.message(line)
            pieces = self._pieces()
            if not self._train(pieces):
                return Pretrained(folder=self.folder, stop_reason="interrupted", results={})
        if self.ranks.first and not self.settings.fit.keep_checkpoints:
            remove_training_state(self.folder)
        if self.ranks.first and not (self.folder / RUN_MODEL / CARD).exists():
            draw_run_plots(self.folder)
            write_pretrained_card(self.folder)
        self.ranks.wait()
        results = read_results(self.folder) if self.ranks.first else {}
        return Pretrained(folder=self.folder, stop_reason="completed", results=results)

    # -- text ---------------------------------------------------------------------------------------------------

    def _pieces(self) -> Components:
        """Tokenizer, corpus, and the model that starts; the first rank makes what others then read."""
        settings = self.settings
        started = load(settings.model.init_from) if settings.model.init_from else None
        teacher = load(settings.objective.teacher) if isinstance(settings.objective, DistillationSettings) else None
        check_model(settings, started, teacher)
        tokenizer = self._tokenizer(started)
        if started is not None and started.tokenizer is None:
            if tokenizer.size > (known := started.config.model.embedding.vocabulary):
                told = f"the tokenizer has {tokenizer.size} tokens, but {started.source} knows {known}"
                raise HeedfulError(f"{told}: it is another model's")
            started.tokenizer = tokenizer.limited(max(settings.lengths))
        check_tokenizer(settings, tokenizer)
        self.probes = [ProbeSet(probe, tokenizer) for probe in settings.probes]
        corpus = self._corpus(tokenizer)
        run = None
        if teacher is not None:
            assert isinstance(settings.objective, DistillationSettings)
            run = TeacherRun(
                settings=settings.objective, train=settings.train, loaded=teacher, tokenizer=tokenizer,
                folder=self.folder, ranks=self.ranks, on_message=self.reporter.message, shortest=min(settings.lengths),
                init_from=settings.model.init_from,
            )  # fmt: skip
        return Components(settings=settings, tokenizer=tokenizer, corpus=corpus, started=started, teacher=run)

    def _given(self) -> Corpus | None:
        """A corpus that was made before."""
        data = [Path(each) for each in self.settings.data]
        return Corpus.open(data[0]) if len(data) == 1 and holds(data[0]) else None

    def _tokenizer(self, started: Loaded | None) -> Tokenizer:
        kept, settings = self.folder / TOKENIZER, self.settings
        if settings.tokenizer.path:
            named = Tokenizer.load(settings.tokenizer.path)
            if started is not None and started.tokenizer and started.tokenizer.fingerprint != named.fingerprint:
                raise HeedfulError(
                    f"--tokenizer is {settings.tokenizer.path}, but {started.source} was trained with another "
                    "tokenizer, whose ids mean other tokens: leave --tokenizer out"
                )
            return named
        if started is not None:
            if started.tokenizer is None:
                raise HeedfulError(f"{started.source} has no tokenizer: give its folder with --tokenizer")
            return started.tokenizer
        if (given := self._given()) is not None and (given.folder / TOKENIZER).is_dir():
            return Tokenizer.load(given.folder / TOKENIZER)
        if self.ranks.first and not (kept / "tokenizer.json").exists():  # which is written last
            asked = replace(settings.tokenizer, max_length=max(settings.lengths))
            if isinstance(settings.objective, SpanCorruptionSettings) and not asked.num_sentinels:
                asked = replace(asked, num_sentinels=max(1, min(SENTINELS, asked.vocab_size // 20)))
            self.reporter.message(
                f"training a tokenizer on the text ({asked.algorithm}, up to {asked.vocab_size:,} tokens); "
                "--tokenizer takes one that is there"
            )
            files = [path for path, _ in expand([Path(each) for each in settings.data], self.folder)[0]]
            read = Reading(files, settings.corpus, Sieve(LeaveOut()), []).chunks()
            made = train(_sample((each for chunk in read for each in chunk or ()), asked.train_chars), asked)
            made.save(kept)
        self.ranks.wait()
        return Tokenizer.load(kept)

    def _corpus(self, tokenizer: Tokenizer) -> Corpus:
        if (given := self._given()) is not None:
            if given.fingerprint != tokenizer.fingerprint:
                raise HeedfulError(
                    f"{given.folder} was made with another tokenizer: give that one with --tokenizer, or the files "
                    "themselves"
                )
            if self.ranks.first:
                self._same(given)
            return given
        if self.ranks.first:
            rows = SetAside(file=self.folder / BAD_ROWS) if self.on_bad_row == "skip" else Stop()
            build(
                [Path(each) for each in self.settings.data],
                tokenizer,
                self.folder / CORPUS,
                self.settings.corpus,
                on_progress=self._told(),
                on_bad_row=rows,
                exclude=self.folder,
            )
        self.ranks.wait()
        return Corpus.open(self.folder / CORPUS)

    def _same(self, given: Corpus) -> None:
        """Whether it is the corpus with which the run began."""
        about = {"stated": list(given.about.get("stated", ())), "files": {given.folder.name: given.digest}}
        if not (self.folder / DATA).exists():
            write_file(self.folder / DATA, about)
        elif read_json(self.folder / DATA) != about:
            raise HeedfulError(
                f"{given.folder} holds another corpus than the one with which {self.folder} began: put that one back, "
                "or give another folder with --output"
            )

    def _told(self) -> Any:
        last = time.monotonic()

        def told(progress: Progress) -> None:
            nonlocal last
            if time.monotonic() - last >= TOLD:
                last = time.monotonic()
                speed = progress.characters / max(progress.seconds, 1e-9) / 1e6
                self.reporter.message(
                    f"reading text: {100 * progress.share:.0f} %, {progress.documents:,} documents, "
                    f"{progress.tokens:,} tokens, {speed:.1f} MB/s"
                )

        return told

    # -- training -----------------------------------------------------------------------------------------------

    def _train(self, pieces: Components) -> bool:
        """Whether it came to its end."""
        settings, counts = self.settings, pieces.corpus.about["counts"]
        for sentence in corpus_notes(pieces.corpus.about):
            self.reporter.message(sentence)
        if (self.folder / BAD_ROWS).exists():
            self.reporter.message(f"bad rows are set aside in {self.folder / BAD_ROWS}")
        samples, held = build_samples(pieces)
        loaded = build_model(pieces)
        objectives, samples, measured = self._learning(pieces, loaded, samples)
        self.reporter.message(
            f"{counts['documents']:,} documents of {counts['tokens']:,} tokens; a model of {loaded.count():,} "
            f"parameters; {len(samples[0]):,} rows of up to {settings.pack_length:,} tokens, "
            f"{settings.train.batch_size} in a step"
        )
        if self.ranks.first:
            warn_of_stalling(settings, pieces.corpus, samples[0])
        stages = [
            Stage(phase.start_fraction, rows, phase.batch_size, objective)
            for phase, rows, objective in zip(settings.phases, samples[1:], objectives[1:], strict=True)
        ]
        trainer = Trainer(loaded, objectives[0], samples[0], settings.train, self.ranks, later=stages)
        every = replace(settings.fit, eval_every_epochs=settings.eval_every_steps / trainer.order.steps)
        measure = partial(measure_share, trainer, measured, held, self.probes)
        self._before(trainer, measure, measured)
        fitted = fit(
            trainer,
            self.folder,
            every,
            evaluate=measure,
            score=partial(combine_shares, measured),
            save_last=partial(self._save_last, pieces, loaded),
            reporter=self.reporter,
        )
        if fitted.stop_reason == "interrupted":
            return False
        entry = checkpoint_entry(
            fitted.best_step, fitted.best, trainer.step, fitted.last, settings.fit.load_best_at_end
        )
        with trainer.whole():
            shares = self.ranks.gather(measure())
            if self.ranks.first:
                self._write(pieces, model_to_save(loaded, pieces), trainer, combine_shares(measured, shares), entry)
        self.ranks.wait()
        return True

    def _before(self, trainer: Trainer, measure: Callable[[], Any], objective: SelfSupervised) -> None:
        """Score a model that was given before it is trained further; once for a run that resumes. All ranks come here.

        Raises:
            HeedfulError: If a number is not finite.
        """
        given, path = self.settings.model.init_from, self.folder / BEFORE
        if not given or given != self.base or self.ranks.gather(path.exists())[0]:
            return
        self.reporter.message("the score before training")
        with trainer.whole():
            shares = self.ranks.gather(measure())
        numbers = combine_shares(objective, shares).numbers
        if not all(map(math.isfinite, numbers.values())):
            raise HeedfulError(
                f"{given} gives a validation loss of {numbers['loss']}: its weights are no start for training"
            )
        if self.ranks.first:
            write_file(path, baseline_before_training({"validation": {"numbers": numbers}}))

    def _save_last(self, pieces: Components, loaded: Loaded) -> None:
        """Save the last weights beside the best ones, which become the model."""
        if self.ranks.first:
            save(model_to_save(loaded, pieces), self.folder / CHECKPOINTS / LAST, overwrite=True)

    def _learning(
        self, pieces: Components, loaded: Loaded, samples: list[Sequence[Sample]]
    ) -> tuple[Sequence[Objective], list[Sequence[Sample]], SelfSupervised]:
        """The objective and the samples of each phase, and the objective that held-out samples are measured by."""
        objectives = build_objectives(pieces, loaded, samples)
        if isinstance(self.settings.objective, RtdSettings) and pieces.started is not None:
            place = generator_folder(self.settings)
            self.reporter.message(
                f"the generator in {place} is trained further, too"
                if place
                else f"{pieces.started.source} has no generator beside it, so that a new one begins to learn"
            )
        measured = objectives[0]
        if isinstance(measured, EncoderDistillation):  # vectors of held-out texts are not cached
            measured = replace(measured, vectors=None)
        return objectives, samples, measured

    @property
    def base(self) -> str:
        """What it began as; "": random weights."""
        return self.settings.model.init_from

    @property
    def decisive(self) -> dict[str, Any]:
        """All settings that decided what the model is."""
        return to_mapping(self.settings)

    def _write(
        self, pieces: Components, loaded: Loaded, trainer: Trainer, found: EvalResult, entry: dict[str, Any]
    ) -> None:
        save(loaded, self.folder / RUN_MODEL, overwrite=True)
        if isinstance(beside := trainer.objective.beside, Loaded):
            save(beside, self.folder / GENERATOR, overwrite=True)
        about = environment()
        results = {
            "task": "pretrain",
            "objective": self.settings.kind,
            "metric": next((name for name in found.numbers if name.endswith("_accuracy")), "loss"),
            "base": self.base,
            "steps": trainer.step,
            "checkpoints": entry,
            "epochs": trainer.epoch,
            "tokens": trainer.read,
            "seconds": round(trainer.seconds, 1),
            "splits": {"validation": {"numbers": found.numbers}},
            "corpus": {key: pieces.corpus.about[key] for key in CORPUS_KEYS if key in pieces.corpus.about},
            "model": {"parameters": loaded.count(), "bytes": folder_bytes(self.folder / RUN_MODEL)},
            **measure_latency(load(self.folder / RUN_MODEL)),
            "memory": peak_memory(),
            "machine": about["machine"],
            "versions": about["versions"],
            "settings": self.decisive,
        }
        if (self.folder / BEFORE).exists():
            results["baseline"] = read_json(self.folder / BEFORE)
        write_file(self.folder / "results.csv", journal_csv(self.folder / JOURNAL, baseline_csv_rows(results)))
        write_file(self.folder / RESULTS, results)


def _sample(documents: Iterable[tuple[str, bool]], most: int) -> list[str]:
    """Cleaned documents of up to so many characters from all over the text, which may be sorted; one at least.

    Those stay whose number draws a multiple of a power of two, which is doubled whenever they are too many: every
    document has the same chance, nobody has to know how many there are, and equal texts give an equal sample.
    """
    kept: list[tuple[int, str, bool]] = []
    size, every = 0, 1
    for number, (text, lines) in enumerate(documents):
        if (drawn := mixed(SAMPLE, number)) % every:
            continue
        kept.append((drawn, text, lines))
        size += len(text)
        while size > most and (fewer := [each for each in kept if each[0] % (2 * every) == 0]):
            kept, every, size = fewer, 2 * every, sum(len(text) for _, text, _ in fewer)
    return [text for _, raw, lines in kept if (text := normalise(raw, lines=lines))]
