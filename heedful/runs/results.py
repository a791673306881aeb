"""Results of a run: `RunResult`, which `finetune`, `pretrain`, `distil` and `tune` return, and readers of its files."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsFloat, TypeAlias

from heedful.errors import RunError
from heedful.train.journal import read_journal

RESULTS = "results.json"  # scores and settings of a finished run
JOURNAL = "journal.jsonl"  # a line for each update and each evaluation during training
BEFORE = "before.json"  # scores before training, which a resumed run reads instead of computing them again
JsonObject: TypeAlias = dict[str, Any]  # JSON object as `json` returns it


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Result of a run of `finetune`, `pretrain`, `distil` or `tune`."""

    output_dir: Path  # the run folder, which `Engine` and `load` accept
    status: Literal["completed", "interrupted"]  # interrupted: a signal stopped the run; the same call resumes it
    results: JsonObject  # content of results.json; {} if the run was interrupted

    @property
    def metric(self) -> str:
        """The name of the main metric, by which checkpoints are ranked, or "" if the run was interrupted."""
        return str(self.results.get("metric", ""))

    @property
    def scores(self) -> dict[str, float]:
        """The value of the main metric on each evaluated split, by name of the split."""
        return {split: float(entry["numbers"][self.metric]) for split, entry in self.results.get("splits", {}).items()}

    def to_dict(self) -> JsonObject:
        """Convert to plain data for JSON."""
        return {"output_dir": str(self.output_dir), "status": self.status, "results": self.results}


def read_results(folder: Path) -> JsonObject:
    """Read results.json. It has at least "task", "metric" and "splits", and each split has "numbers".

    Raises:
        RunError: If the file is missing, cannot be read, or lacks one of these keys.
    """
    path = folder / RESULTS
    try:
        results: JsonObject = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError(f"{folder} has no {RESULTS}: no run has finished there") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    match results:
        case {"task": str(), "metric": str(), "splits": dict(splits)}:
            if all(isinstance(split, dict) and "numbers" in split for split in splits.values()):
                return results
    raise RunError(f'{path} lacks "task", "metric" or "splits" that have "numbers": no run of Heedful wrote it')


def headline_split(results: JsonObject) -> tuple[str, JsonObject] | None:
    """Return the name and the metrics of the split that plots and tables show, or None if no split was evaluated.

    It is test if that was evaluated, else dev, else the first split.
    """
    splits = results["splits"]
    names = [name for name in ("test", "dev", *splits) if name in splits]
    return (names[0], splits[names[0]]["numbers"]) if names else None


def coverage_numbers(results: JsonObject) -> tuple[str, JsonObject] | None:
    """Return the metrics with the table of accuracy over coverage that is shown, after the name of their examples.

    These are the metrics of the headline split. If no split was evaluated, they are those of the run's method on the
    held-out examples by which methods were compared. None is returned if there are no such metrics or no such table.
    """
    headline, comparison = headline_split(results), results.get("method_comparison")
    if headline is None and comparison:
        method = comparison["methods"].get(results["settings"]["method"])
        headline = (comparison["measured_on"], method["numbers"]) if method else None
    return headline if headline and headline[1].get("coverage") else None


def read_predictions(folder: Path, split: str) -> Iterator[JsonObject]:
    """Return an iterator over predictions-SPLIT.jsonl, one object per example, the worst mistakes first.

    If the file is missing, the iterator is empty.
    """
    path = folder / f"predictions-{split}.jsonl"
    return read_journal(path) if path.is_file() else iter(())


def as_float(value: object) -> float:
    """Convert a JSON value to a float, including "NaN" and "Infinity". Anything that is not a number becomes NaN.

    >>> as_float("-Infinity"), as_float(None)
    (-inf, nan)
    """
    try:
        return float(value) if isinstance(value, str | SupportsFloat) else math.nan
    except (TypeError, ValueError):
        return math.nan


def seed_entry(results: JsonObject) -> JsonObject:
    """Return a summary of one seed's results: its seed, steps and seconds, and the main metric on each split.

    results.json of a run with several seeds has such an entry for each of them.
    """
    scores = {split: entry["numbers"][results["metric"]] for split, entry in results["splits"].items()}
    return {name: results[name] for name in ("seed", "best_step", "steps", "seconds")} | {"splits": scores}


def across_seeds(seeds: Sequence[JsonObject], split: str) -> JsonObject:
    """Return the mean and standard deviation of the main metric on a split, over the results of several seeds."""
    return summarize_seeds([results["splits"][split]["numbers"][results["metric"]] for results in seeds])


def summarize_seeds(scores: Sequence[float]) -> JsonObject:
    """Return mean, sample standard deviation and number of the scores of several seeds.

    The standard deviation of a single score is None.

    >>> summarize_seeds([0.75])
    {'mean': 0.75, 'std': None, 'seeds': 1}
    """
    deviation = statistics.stdev(scores) if len(scores) > 1 else None
    return {"mean": statistics.fmean(scores), "std": deviation, "seeds": len(scores)}


def folder_bytes(folder: Path) -> int:
    """Return the size in bytes of the files in a folder, without subfolders."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
