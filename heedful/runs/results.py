"""Results of a run: `RunResult`, which the commands return, and readers of results.json and predictions."""

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

RESULTS = "results.json"
JOURNAL = "journal.jsonl"
BEFORE = "before.json"  # scores before training, which a resumed run does not compute again
JsonObject: TypeAlias = dict[str, Any]  # JSON object as `json` returns it


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Result of a run of `finetune`, `pretrain`, `distil` or `tune`."""

    output_dir: Path  # the run folder, which `Engine` and `load` accept
    status: Literal["completed", "interrupted"]  # interrupted: a signal stopped the run; the same call resumes it
    results: JsonObject  # contents of results.json; {}: the run was interrupted

    @property
    def metric(self) -> str:
        """The name of the metric that ranks models, or "" if the run was interrupted."""
        return str(self.results.get("metric", ""))

    @property
    def scores(self) -> dict[str, float]:
        """The value of the metric by evaluated split."""
        return {
            split: float(scored["numbers"][self.metric]) for split, scored in self.results.get("splits", {}).items()
        }

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
    """Return (split, metrics) for plots and tables, test before dev, or None if no split was evaluated."""
    splits = results["splits"]
    names = [name for name in ("test", "dev", *splits) if name in splits]
    return (names[0], splits[names[0]]["numbers"]) if names else None


def read_predictions(folder: Path, split: str) -> Iterator[JsonObject]:
    """Return the lines of predictions-SPLIT.jsonl, the worst mistakes first. A missing file has no lines."""
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
    """Return the entry of one seed in results.json: steps, seconds, and the metric on each split."""
    scores = {split: scored["numbers"][results["metric"]] for split, scored in results["splits"].items()}
    return {name: results[name] for name in ("seed", "best_step", "steps", "seconds")} | {"splits": scores}


def across_seeds(seeds: Sequence[JsonObject], split: str) -> JsonObject:
    """Return the mean and standard deviation of the metric on a split, over the results of all seeds."""
    return summarize_seeds([results["splits"][split]["numbers"][results["metric"]] for results in seeds])


def summarize_seeds(scores: Sequence[float]) -> JsonObject:
    """Return the mean and the sample standard deviation of the scores of seeds. For a single score the latter is None.

    >>> summarize_seeds([0.75])
    {'mean': 0.75, 'std': None, 'seeds': 1}
    """
    deviation = statistics.stdev(scores) if len(scores) > 1 else None
    return {"mean": statistics.fmean(scores), "std": deviation, "seeds": len(scores)}


def folder_bytes(folder: Path) -> int:
    """Return the size in bytes of the files in a folder, without subfolders."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
