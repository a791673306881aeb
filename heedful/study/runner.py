"""Running a study and writing its results: `run_study`, which `heedful study` calls.

The modules of studies use the other classes and functions: `StudyConfig` has their parameters, `Recorder` collects and
saves the values of each arm and seed, `compare_arms` draws conclusions, and `StudyResult` is what they return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar

from heedful._version import __version__
from heedful.atomic_io import check_writable, make_folder
from heedful.errors import HeedfulError, RunError, did_you_mean
from heedful.runs.plots import style
from heedful.runs.run_folder import environment, read_run_json, write_file
from heedful.runs.statistics import Unit, compare_seeds, mean_and_std, seed_count
from heedful.study import REAL_MODULES, STUDIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Scale = Literal["quick", "usual", "full"]
RUNS = "runs"  # subfolder of the output folder for runs of `heedful finetune`


def no_log(text: str) -> None:
    """Ignore a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig:
    """Seeds, size and data of a study, and where it saves results while it runs."""

    seeds: tuple[int, ...] = (1, 2, 3)
    scale: Scale = "usual"  # "quick" takes seconds, to test the code; "full" uses real data
    data: Path | None = None  # folder of real data, for the scale "full"
    log: Callable[[str], None] = no_log  # receives messages about progress
    runs_dir: Path | None = None  # folder of training runs that can be resumed; set by `run_study`
    partial_results: Path | None = None  # file of the results so far, to resume the study; set by `run_study`

    def by_scale(self, usual: T, quick: T, full: T | None = None) -> T:
        """Return the value for the scale of the study. If `full` is None, `usual` is the value for "full" too."""
        match self.scale:
            case "quick":
                return quick
            case "full" if full is not None:
                return full
        return usual

    @property
    def real_data(self) -> Path | None:
        """Folder of real data, or None for toy data."""
        return self.data if self.scale == "full" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """The values of one metric for all arms and seeds."""

    name: str
    values: Mapping[str, tuple[float, ...]]  # values of each arm, in the order of the seeds
    unit: Unit = "share"
    chance: float | None = None  # expected value of a random guess, if it is known
    resolution: float = 0.0  # smallest possible difference of two values


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult:
    """The result of a study."""

    measures: tuple[Measure, ...]
    verdicts: tuple[str, ...]  # conclusions, one sentence each
    figure: Figure
    about: str  # description of task, data and training budget
    facts: Mapping[str, object] = field(default_factory=dict)  # further values to save, by name
    extra_figures: Mapping[str, Figure] = field(default_factory=dict)  # by name
    columns: tuple[str, ...] = ()  # column titles of a table that replaces the usual one; (): the usual table
    rows: tuple[tuple[str, ...], ...] = ()  # rows of the table that replaces the usual one

    @property
    def arms(self) -> tuple[str, ...]:
        """The names of all arms, in the order of the measures."""
        return tuple(dict.fromkeys(arm for measure in self.measures for arm in measure.values))

    def table(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Return the column titles and the rows of the result's table.

        The usual table has a row for each arm and a column for each measure. A cell is the mean ± standard deviation
        over seeds, or "–" if the arm does not have the measure. The study may replace this table.
        """
        if self.columns:
            return self.columns, self.rows
        rows = []
        for arm in self.arms:
            cells = (
                mean_and_std(measure.values[arm], measure.unit) if arm in measure.values else "–"
                for measure in self.measures
            )
            rows.append((arm, *cells))
        return ("", *(measure.name for measure in self.measures)), tuple(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletedStudy:
    """The result of a study, and its files."""

    name: str  # name of the study
    result: StudyResult
    seconds: float  # duration of the study
    files: tuple[Path, ...]  # files that were written
    write_error: str = ""  # why some files could not be written; "" if all were written


# -- recording -------------------------------------------------------------------------------------------------------


class _Record(TypedDict):
    """Results of one arm with one seed, as they are saved."""

    numbers: dict[str, float]  # value of each measure
    lines: dict[str, list[float]]  # values of each learning curve, by name of the curve


class Recorder:
    """Collects the values of each arm and seed, and saves them so that an interrupted study can be resumed.

    Args:
        config: How the study is run.
        not_shares: Names of the measures that are logged as plain numbers. All others are logged in percent.
    """

    def __init__(self, config: StudyConfig, not_shares: Collection[str] = ()) -> None:
        self.config = config
        self.not_shares = not_shares
        self._start = time.monotonic()
        self._results = _PartialResults(config)
        if self._results.records:
            config.log(f"resuming: results so far {len(self._results.records)}")

    def missing_arms(self, arms: Iterable[str], seed: int) -> list[str]:
        """Return the arms without results for this seed."""
        return [arm for arm in arms if (arm, seed) not in self._results.records]

    def record(
        self, arm: str, seed: int, values: Mapping[str, float], curves: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Record the values of one arm with one seed, save them, and log them.

        Args:
            arm: Name of the arm.
            seed: The seed.
            values: Value of each measure.
            curves: Learning curves by name, if there are any.
        """
        lines = {name: list(curve) for name, curve in (curves or {}).items()}
        self._results.records[arm, seed] = {"numbers": dict(values), "lines": lines}
        self._results.save()
        formatted = []
        for name, value in values.items():
            formatted.append(f"{name} {value:.3g}" if name in self.not_shares else f"{name} {mean_and_std([value])}")
        self.config.log(f"{time.monotonic() - self._start:5.0f} s  seed {seed}, {arm}: {', '.join(formatted)}")

    def measure(
        self, name: str, *, unit: Unit = "share", chance: float | None = None, tests: int | None = None
    ) -> Measure:
        """Return the recorded values of one measure.

        Args:
            name: Name of the measure.
            unit: Unit of the values.
            chance: Expected value of a random guess, if it is known.
            tests: Number of test examples whose share is the value, if it is known.
        """
        values = {arm: tuple(record["numbers"][name] for record in records) for arm, records in self._by_arm().items()}
        return Measure(name=name, values=values, unit=unit, chance=chance, resolution=1 / tests if tests else 0.0)

    def mean_curves(self, name: str) -> dict[str, list[float]]:
        """Return the learning curve `name` of each arm, averaged over seeds: the mean value at each step."""
        return {
            arm: [fmean(values) for values in zip(*(record["lines"][name] for record in records), strict=True)]
            for arm, records in self._by_arm().items()
        }

    def _by_arm(self) -> dict[str, list[_Record]]:
        """Return the records of each arm, in the order of the seeds."""
        arms = dict.fromkeys(arm for arm, _ in self._results.records)
        return {arm: [self._results.records[arm, seed] for seed in self.config.seeds] for arm in arms}


class _PartialResults:
    """The results so far, also saved in a file, which `run_study` removes when the study is complete.

    A file that another version of Heedful, another scale or other data wrote is ignored.
    """

    def __init__(self, config: StudyConfig) -> None:
        self.path = config.partial_results
        self.records: dict[tuple[str, int], _Record] = {}  # by arm and seed
        self._facts = {
            "scale": config.scale,
            "data": str(config.real_data and config.real_data.absolute()),
            "version": __version__,
        }
        self._log = config.log
        if self.path is not None and self.path.is_file():
            saved = read_run_json(self.path)
            if saved["facts"] == self._facts:
                for row in saved["found"]:
                    self.records[row["arm"], row["seed"]] = {"numbers": row["numbers"], "lines": row["lines"]}

    def save(self) -> None:
        """Write the file. If that fails, log once that the study cannot be resumed."""
        if self.path is None:
            return
        rows = [{"arm": arm, "seed": seed, **record} for (arm, seed), record in self.records.items()]
        try:
            write_file(self.path, {"facts": self._facts, "found": rows})
        except OSError as error:
            reason = error.strerror or error
            self._log(f"{self.path} cannot be written: {reason}; the study cannot be resumed if it is stopped")
            self.path = None


def compare_arms(
    measures: Sequence[Measure], pairs: Sequence[tuple[str, str]], other_comparisons: int = 0
) -> tuple[str, ...]:
    """Compare pairs of arms on each measure, and return a sentence for each comparison.

    The level of the confidence intervals is corrected for the number of comparisons (see `compare_seeds`).

    Args:
        measures: The measures.
        pairs: Pairs of arms to compare.
        other_comparisons: Number of comparisons that the study makes besides these.
    """
    num_comparisons = len(measures) * len(pairs) + other_comparisons
    return tuple(
        compare_seeds(
            first,
            second,
            (measure.values[first], measure.values[second]),
            on=measure.name,
            unit=measure.unit,
            comparisons=num_comparisons,
            resolution=measure.resolution,
        )
        for measure in measures
        for first, second in pairs
    )


# -- running ---------------------------------------------------------------------------------------------------------


def run_study(name: str, config: StudyConfig, output_dir: Path) -> CompletedStudy:
    """Run a study, and write NAME.json, NAME.md, NAME.png and NAME.svg. Existing files are replaced.

    If a file cannot be written at the end, nothing is raised: the returned result has a `write_error`.

    Args:
        name: Name of the study.
        config: How the study is run.
        output_dir: Folder of the files.

    Raises:
        HeedfulError: If the study does not exist, seeds repeat, or the folder cannot be written.
        KeyboardInterrupt: If the study is interrupted. The same call resumes it.
    """
    if name not in STUDIES:
        known = ", ".join(STUDIES)
        raise HeedfulError(f'"{name}" is not a study{did_you_mean(name, list(STUDIES))}: use one of {known}')
    if not config.seeds or len(set(config.seeds)) < len(config.seeds):
        raise HeedfulError(f"seeds are {config.seeds}; expected one or more, each once")
    try:
        make_folder(output_dir)
        check_writable(output_dir)
    except OSError as error:
        raise RunError(f"{output_dir} cannot be written: {error.strerror}: give another folder with --output") from None
    module = REAL_MODULES.get(name, name) if config.real_data else name
    run: Callable[[StudyConfig], StudyResult] = import_module(f"heedful.study.{module}").run
    start = time.monotonic()
    partial_results = output_dir / f"{name}-so-far.json"
    try:
        result = run(replace(config, runs_dir=output_dir / RUNS, partial_results=partial_results))
    except KeyboardInterrupt:
        advice = "the same command resumes it" if partial_results.exists() else "nothing is saved yet"
        config.log(f"stopped; {advice}.")
        raise
    seconds = time.monotonic() - start
    files, write_error = _write_files(name, config, result, seconds, output_dir)
    if not write_error:
        partial_results.unlink(missing_ok=True)
    return CompletedStudy(name=name, result=result, seconds=seconds, files=files, write_error=write_error)


def _write_files(
    name: str, config: StudyConfig, result: StudyResult, seconds: float, output_dir: Path
) -> tuple[tuple[Path, ...], str]:
    """Write the result as JSON, as Markdown and as plots.

    Returns:
        The files that were written, and the reason why others could not be written, or "".
    """
    machine_facts = environment()
    content_by_suffix = {
        "json": _to_json(name, config, result, seconds, machine_facts),
        "md": markdown(name, config, result, seconds, machine_facts),
    }
    figures = {name: result.figure} | {f"{name}-{extra}": figure for extra, figure in result.extra_figures.items()}
    files: list[Path] = []
    try:
        for suffix, content in content_by_suffix.items():
            write_file(output_dir / f"{name}.{suffix}", content)
            files.append(output_dir / f"{name}.{suffix}")
        for figure_name, figure in figures.items():
            png = style.save_plot(output_dir / f"{figure_name}.png", figure)
            files += (png, png.with_suffix(".svg"))
    except OSError as error:
        return tuple(files), f"not all files could be written to {output_dir}: {error.strerror or error}"
    return tuple(files), ""


def _to_json(
    name: str, config: StudyConfig, result: StudyResult, seconds: float, facts: Mapping[str, object]
) -> dict[str, object]:
    """Return the result as data for JSON. The arguments are those of `markdown`."""
    head, rows = result.table()
    return {
        "study": name,
        "question": STUDIES[name],
        "about": result.about,
        "scale": config.scale,
        "seeds": list(config.seeds),
        "measures": {
            measure.name: {
                "unit": measure.unit,
                "chance": measure.chance,
                "of": {arm: list(values) for arm, values in measure.values.items()},
            }
            for measure in result.measures
        },
        "table": [list(head), *map(list, rows)],
        "verdicts": list(result.verdicts),
        "facts": dict(result.facts),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        **facts,
    }


def markdown(name: str, config: StudyConfig, result: StudyResult, seconds: float, facts: Mapping[str, object]) -> str:
    """Return the result as a Markdown page.

    Args:
        name: Name of the study.
        config: How the study was run.
        result: The result.
        seconds: Duration of the study.
        facts: Facts about the machine, as `environment` returns them.
    """
    head, rows = result.table()
    lines = [f"# {name}", "", STUDIES[name], "", result.about, ""]
    lines += [_table_row(head), _table_row(["---", *("---:" for _ in head[1:])]), *map(_table_row, rows), ""]
    lines += [f"* {sentence}" for sentence in result.verdicts]
    setup = f"{time.strftime('%Y-%m-%d')}, {facts['machine']}, {facts['threads']} threads, "
    setup += f"{seed_count(len(config.seeds))}, {seconds:.0f} s, scale {config.scale}."
    lines += ["", setup, ""]
    figure_names = [name, *(f"{name}-{extra}" for extra in result.extra_figures)]
    lines += [f"![{figure_name}]({figure_name}.png)" for figure_name in figure_names]
    return "\n".join([*lines, ""])


def _table_row(cells: Sequence[str]) -> str:
    """Return a row of a table in Markdown."""
    return "| " + " | ".join(cells) + " |"
