"""`Run`: the steps that fine-tuning, pre-training and distillation share.

These are locking the run folder, beginning or resuming the run, training, and writing results, plots and the model
card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from heedful.checkpoint import RUN_MODEL, ModelBundle, load, save
from heedful.csrc import unused_note
from heedful.runs.card.baseline import baseline_csv_rows
from heedful.runs.overrides import replace_setting, setting_at
from heedful.runs.pin_models import pin_models
from heedful.runs.plots.figures import draw_run_plots
from heedful.runs.report import write_report
from heedful.runs.results import JOURNAL, RESULTS, RunResult, folder_bytes, read_results
from heedful.runs.run_folder import (
    BAD_ROWS,
    check_run_folder,
    environment,
    journal_csv,
    resolve_auto,
    translate_io_errors,
    write_file,
)
from heedful.runs.timing import measure_latency, peak_memory
from heedful.train.fit import Reporter
from heedful.train.ranks import Ranks
from heedful.train.run_lock import lock_run
from heedful.train.settings import TrainSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CARD = "README.md"  # file in the model's folder
Settings = TypeVar("Settings", bound="DataclassInstance")


class Training(Protocol):
    """The part of a run that differs between fine-tuning, pre-training and distillation. `Run.execute` calls it."""

    def notes(self) -> Iterable[str]:
        """Return sentences to report before training. Empty sentences are not reported."""

    def train(self) -> bool:
        """Train on all ranks, and write the results on the first rank.

        Returns:
            Whether training has finished. It is False if a signal interrupted it.
        """

    def finish(self) -> None:
        """Write plots and the model card if they are missing.

        Only the first rank calls this: after training, and whenever the command of a finished run is repeated.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run: its folder, the reporter of its progress, and the processes (ranks) that train together."""

    folder: Path
    reporter: Reporter
    ranks: Ranks

    @classmethod
    def open(cls, output_dir: str | Path, reporter: Reporter | None, ranks: Ranks) -> Run:
        """Return the run in a folder, new or begun before. Only the first rank reports progress.

        Raises:
            HeedfulError: If the folder has files that are not of a run.
        """
        folder = Path(output_dir)
        check_run_folder(folder)
        silent = Reporter()
        return cls(folder=folder, reporter=reporter if reporter and ranks.is_main else silent, ranks=ranks)

    def resolve(self, settings: Settings, train_path: str = "train") -> Settings:
        """Return settings without "auto" as device or precision, and with commits for models on the hub.

        All ranks must call this.

        Args:
            settings: Settings of the run.
            train_path: Path of the `TrainSettings` in `settings`.
        """
        train = setting_at(settings, train_path)
        assert isinstance(train, TrainSettings)
        train = resolve_auto(train, self.folder, self.ranks, self.reporter.message)
        return replace_setting(pin_models(settings, self.folder), train_path, train)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder within a `with` block. I/O errors become HeedfulErrors that say how to resume."""
        with lock_run(self.folder) if self.ranks.is_main else nullcontext(), translate_io_errors(self.folder):
            yield

    def begin(self, init_folder: Callable[[], None]) -> None:
        """Begin or resume the run: call `init_folder` on the first rank, while the other ranks wait.

        Args:
            init_folder: Writes the settings of a new run, or checks that the run in the folder has the same settings.
        """
        if self.ranks.is_main:
            init_folder()
        self.ranks.barrier()

    def execute(self, training: Training) -> RunResult:
        """Train unless the folder has results already, and return the result.

        Callers must call `begin` before, and hold `locked`.
        """
        if (self.folder / RESULTS).exists():
            self.reporter.message(f"{self.folder} is finished already")
        else:
            for note in filter(None, (*training.notes(), unused_note())):
                self.reporter.message(note)
            if not training.train():
                return RunResult(output_dir=self.folder, status="interrupted", results={})
        if self.ranks.is_main:
            training.finish()
        self.ranks.barrier()
        return self.result()

    def result(self, **more: object) -> RunResult:
        """Return the result of a finished run, with `more` entries in its results.

        On ranks other than the first, the results are {}.
        """
        results = read_results(self.folder) | more if self.ranks.is_main else {}
        return RunResult(output_dir=self.folder, status="completed", results=results)

    # -- steps of a training --------------------------------------------------------------------------------------

    def report_bad_rows(self) -> None:
        """Report where the rows are that could not be read and were skipped, if there are any."""
        if (self.folder / BAD_ROWS).exists():
            self.reporter.message(f"bad rows are set aside in {self.folder / BAD_ROWS}")

    def saved_once(self, name: str, make: Callable[[], ModelBundle]) -> ModelBundle:
        """Load the model in a folder of the run. If the folder is missing, create the model and save it there first.

        All ranks create the model, since they could time out if they waited for one of them. Only the first rank saves
        it.

        Args:
            name: Name of the folder in the run folder.
            make: Function that creates the model.
        """
        if not (self.folder / name).exists():
            model = make()
            if self.ranks.is_main:
                save(model, self.folder / name)
        self.ranks.barrier()
        return load(self.folder / name)

    def write_results(
        self, learned: Mapping[str, object], model: ModelBundle, settings: Mapping[str, object], **more: object
    ) -> None:
        """Write results.json and results.csv.

        Args:
            learned: Entries about data, training and scores.
            model: The saved model, whose size and speed are measured.
            settings: All settings of the run.
            more: Further entries, such as the baseline. Entries that are None are left out.
        """
        machine_facts = environment()
        results = {
            **learned,
            "model": {"parameters": model.count(), "bytes": folder_bytes(self.folder / RUN_MODEL)},
            **measure_latency(model),
            "memory": peak_memory(),
            "machine": machine_facts["machine"],
            "versions": machine_facts["versions"],
            "settings": settings,
            **{name: value for name, value in more.items() if value is not None},
        }
        write_file(self.folder / "results.csv", journal_csv(self.folder / JOURNAL, baseline_csv_rows(results)))
        write_file(self.folder / RESULTS, results)

    def illustrate(self, write_card: Callable[[Path], Path]) -> None:
        """Write plots, the report and the model card, unless the model has a card already."""
        if not (self.folder / RUN_MODEL / CARD).exists():
            draw_run_plots(self.folder)
            write_report(self.folder)
            write_card(self.folder)
