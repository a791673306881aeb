"""What all studies share: a plan goes in; arms with a number for each seed, sentences and a picture come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from heedful import __version__
from heedful.atomic_io import put_folder, writable
from heedful.errors import HeedfulError, did_you_mean
from heedful.runs.plots import style
from heedful.runs.run_folder import environment, read_json, write_file
from heedful.runs.statistics import Unit, compare_seeds, mean_and_std, seed_count
from heedful.study import STUDIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Scale = Literal["quick", "usual", "full"]
RUNS = "runs"  # in the folder of a study


def no_log(text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig:
    """How much is to be done, and on what."""

    seeds: tuple[int, ...] = (1, 2, 3)
    scale: Scale = "usual"
    data: Path | None = None  # real data, where the scale is "full"
    log: Callable[[str], None] = no_log
    runs_dir: Path | None = None  # where runs of hours are kept, so that they go on; `study` gives it
    partial_results: Path | None = None  # where numbers are kept until it is over; `study` gives it

    def by_scale(self, usual: T, quick: T, full: T | None = None) -> T:
        """One of them, by the scale; a full one is as the usual one unless given."""
        match self.scale:
            case "quick":
                return quick
            case "full" if full is not None:
                return full
        return usual

    @property
    def real_data(self) -> Path | None:
        """Where real data are, where they are asked for."""
        return self.data if self.scale == "full" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One number of each arm and seed."""

    name: str
    values: Mapping[str, tuple[float, ...]]  # by arm
    unit: Unit = "share"
    chance: float | None = None  # what a guess gets
    grain: float = 0.0  # the least that it can change by


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult:
    """What a study found."""

    measures: tuple[Measure, ...]
    verdicts: tuple[str, ...]
    figure: Figure
    about: str  # of the task and the budget, for whoever reads the table
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else is kept
    extra_figures: Mapping[str, Figure] = field(default_factory=dict)  # more pictures, by what they show
    columns: tuple[str, ...] = ()  # a table of its own, where arms and measures are not one
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def arms(self) -> tuple[str, ...]:
        """In their order."""
        return tuple(dict.fromkeys(arm for measure in self.measures for arm in measure.values))

    def table(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Head and rows: an arm in each row, mean ± standard deviation over seeds in each column."""
        if self.columns:
            return self.columns, self.rows
        rows = []
        for arm in self.arms:
            cells = (mean_and_std(each.values[arm], each.unit) if arm in each.values else "–" for each in self.measures)
            rows.append((arm, *cells))
        return ("", *(each.name for each in self.measures)), tuple(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletedStudy:
    """An outcome, and where it lies."""

    name: str
    result: StudyResult
    seconds: float
    files: tuple[Path, ...]
    write_error: str = ""  # why some of them could not be written


class Recorder:
    """Numbers as they come in: of arms, by measure, one for each seed; kept on the disk until the study is over."""

    def __init__(self, plan: StudyConfig) -> None:
        self.plan = plan
        self._began = time.monotonic()
        self._found = _Found(plan)
        if self._found.rows:
            plan.log(f"resuming: results so far {len(self._found.rows)}")

    def missing_arms(self, arms: Iterable[str], seed: int) -> list[str]:
        """Those of which nothing is known yet with this seed."""
        return [arm for arm in arms if (arm, seed) not in self._found.rows]

    def record(
        self, arm: str, seed: int, numbers: Mapping[str, float], lines: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """One seed of one arm, with its curves; the numbers are said too."""
        self._found.rows[arm, seed] = {"numbers": dict(numbers), "lines": dict(lines or {})}
        self._found.keep()
        shown = ", ".join(f"{name} {value:.3f}" for name, value in numbers.items())
        self.plan.log(f"{time.monotonic() - self._began:5.0f} s  seed {seed}, {arm}: {shown}")

    def measure(
        self, name: str, *, unit: Unit = "share", chance: float | None = None, tests: int | None = None
    ) -> Measure:
        """All of one name; a share is of so many tests."""
        of = {arm: tuple(row["numbers"][name] for row in rows) for arm, rows in self._by_arm().items()}
        return Measure(name=name, values=of, unit=unit, chance=chance, grain=1 / tests if tests else 0.0)

    def mean_curves(self, name: str) -> dict[str, list[float]]:
        """Of each arm, the mean over seeds."""
        return {
            arm: [fmean(each) for each in zip(*(row["lines"][name] for row in rows), strict=True)]
            for arm, rows in self._by_arm().items()
        }

    def _by_arm(self) -> dict[str, list[dict[str, Any]]]:
        """In the order of the plan's seeds."""
        arms = dict.fromkeys(arm for arm, _ in self._found.rows)
        return {arm: [self._found.rows[arm, seed] for seed in self.plan.seeds] for arm in arms}


class _Found:
    """What a study has found so far, by arm and seed, in a file that is gone when it is over."""

    def __init__(self, plan: StudyConfig) -> None:
        self.path, self.rows = plan.partial_results, dict[tuple[str, int], dict[str, Any]]()
        self._facts = {
            "scale": plan.scale,
            "data": str(plan.real_data and plan.real_data.absolute()),
            "version": __version__,
        }
        self._log = plan.log
        if self.path is not None and self.path.is_file():
            kept = read_json(self.path)
            if kept["facts"] == self._facts:
                self.rows = {(each["arm"], each["seed"]): each for each in kept["found"]}

    def keep(self) -> None:
        """A disk that takes nothing costs no more than beginning again."""
        if self.path is None:
            return
        found = [{"arm": arm, "seed": seed} | row for (arm, seed), row in self.rows.items()]
        try:
            write_file(self.path, {"facts": self._facts, "found": found})
        except OSError as error:
            self._log(f"{self.path} cannot be written: {error.strerror or error}: stopped, this study begins again")
            self.path = None


def compare_arms(
    measures: Sequence[Measure], pairs: Sequence[tuple[str, str]], other_comparisons: int = 0
) -> tuple[str, ...]:
    """A verdict for each pair of arms on each measure; with so many `beside` they are one family of comparisons."""
    count = len(measures) * len(pairs) + other_comparisons
    return tuple(
        compare_seeds(
            ours,
            theirs,
            (each.values[ours], each.values[theirs]),
            on=each.name,
            unit=each.unit,
            comparisons=count,
            resolution=each.grain,
        )
        for each in measures
        for ours, theirs in pairs
    )


# -- running ---------------------------------------------------------------------------------------------------------


def run_study(name: str, plan: StudyConfig, output_dir: Path) -> CompletedStudy:
    """Do one study; the folder gets NAME.json, NAME.md and NAME.png, which replace those of an earlier time.

    What was found is returned even where a file of it could not be written: `lost` then says why.
    """
    if name not in STUDIES:
        known = ", ".join(STUDIES)
        raise HeedfulError(f'there is no study "{name}"{did_you_mean(name, list(STUDIES))}: use one of {known}')
    if not plan.seeds or len(set(plan.seeds)) < len(plan.seeds):
        raise HeedfulError(f"seeds are {plan.seeds}; expected one or more, each once")
    try:
        put_folder(output_dir)
        writable(output_dir)
    except OSError as error:
        raise HeedfulError(
            f"{output_dir} cannot be written: {error.strerror}: give another folder with --output"
        ) from None
    run: Callable[[StudyConfig], StudyResult] = import_module(f"heedful.study.{name}").run
    began = time.monotonic()
    kept = output_dir / f"{name}-so-far.json"
    try:
        outcome = run(replace(plan, place=output_dir / RUNS, kept=kept))
    except KeyboardInterrupt:
        plan.log(f"stopped; {'the same command resumes it' if kept.exists() else 'nothing is kept yet'}.")
        raise
    seconds = time.monotonic() - began
    about = environment()
    texts = {"json": _plain(name, plan, outcome, seconds, about), "md": markdown(name, plan, outcome, seconds, about)}
    pictures = {name: outcome.figure} | {f"{name}-{what}": each for what, each in outcome.extra_figures.items()}
    files: list[Path] = []
    try:
        for kind, text in texts.items():
            write_file(output_dir / f"{name}.{kind}", text)
            files.append(output_dir / f"{name}.{kind}")
        files += (style.save_png(output_dir / f"{each}.png", figure) for each, figure in pictures.items())
    except OSError as error:
        lost = f"{output_dir} did not take all files: {error.strerror or error}"
        return CompletedStudy(name=name, result=outcome, seconds=seconds, files=tuple(files), write_error=lost)
    kept.unlink(missing_ok=True)
    return CompletedStudy(name=name, result=outcome, seconds=seconds, files=tuple(files))


def _plain(
    name: str, plan: StudyConfig, outcome: StudyResult, seconds: float, about: Mapping[str, Any]
) -> dict[str, Any]:
    head, rows = outcome.table()
    return {
        "study": name,
        "question": STUDIES[name],
        "about": outcome.about,
        "scale": plan.scale,
        "seeds": list(plan.seeds),
        "measures": {
            each.name: {"unit": each.unit, "chance": each.chance, "of": {k: list(v) for k, v in each.values.items()}}
            for each in outcome.measures
        },
        "table": [list(head), *map(list, rows)],
        "verdicts": list(outcome.verdicts),
        "facts": dict(outcome.facts),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        **about,
    }


def markdown(name: str, plan: StudyConfig, outcome: StudyResult, seconds: float, about: Mapping[str, Any]) -> str:
    """The outcome as a page."""
    head, rows = outcome.table()
    lines = [f"# {name}", "", STUDIES[name], "", outcome.about, ""]
    lines += [_row(head), _row(["---", *("---:" for _ in head[1:])]), *map(_row, rows), ""]
    lines += [f"* {each}" for each in outcome.verdicts]
    lines += ["", f"{time.strftime('%Y-%m-%d')}, {about['machine']}, {about['threads']} threads, "]
    lines[-1] += f"{seed_count(len(plan.seeds))}, {seconds:.0f} s, scale {plan.scale}."
    pictures = [name, *(f"{name}-{what}" for what in outcome.extra_figures)]
    return "\n".join([*lines, "", *(f"![{each}]({each}.png)" for each in pictures), ""])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
