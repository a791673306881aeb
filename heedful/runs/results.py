"""What a run found, as its folder holds it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from heedful.errors import HeedfulError
from heedful.train.journal import read_journal

RESULTS, JOURNAL = "results.json", "journal.jsonl"
BEFORE = "before.json"  # the scores before training, kept for a run that resumes
JsonObject: TypeAlias = dict[str, Any]  # as `json` reads it


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run of `finetune`, `pretrain` or `distil` ended."""

    output_dir: Path  # the run folder; Engine and load take it
    status: Literal["completed", "interrupted"]  # interrupted by a signal: the same call resumes it
    results: JsonObject  # the contents of results.json; {} if the run was interrupted

    @property
    def metric(self) -> str:
        """Name of the metric that ranks models; "" if the run was interrupted."""
        return str(self.results.get("metric", ""))

    @property
    def scores(self) -> dict[str, float]:
        """The metric on each split that was evaluated."""
        return {split: float(found["numbers"][self.metric]) for split, found in self.results.get("splits", {}).items()}

    def to_dict(self) -> JsonObject:
        """Return plain data that JSON can hold."""
        return {"output_dir": str(self.output_dir), "status": self.status, "results": self.results}


def read_results(folder: Path) -> JsonObject:
    """results.json; it has at least "task", "metric", and "splits" with "numbers" each."""
    path = folder / RESULTS
    try:
        found: JsonObject = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise HeedfulError(f"{folder} has no {RESULTS}: no run has come to its end there") from None
    except (OSError, ValueError, RecursionError) as error:
        raise HeedfulError(f"{path} cannot be read: {error}") from None
    match found:
        case {"task": str(), "metric": str(), "splits": dict(splits)}:
            if all(isinstance(split, dict) and "numbers" in split for split in splits.values()):
                return found
    raise HeedfulError(f'{path} lacks "task", "metric" or "splits" that have "numbers": no run of Heedful wrote it')


def headline_split(results: JsonObject) -> tuple[str, JsonObject] | None:
    """The split that plots and tables speak of, test before dev, and its numbers; None: nothing was measured."""
    splits = results["splits"]
    names = [name for name in ("test", "dev", *splits) if name in splits]
    return (names[0], splits[names[0]]["numbers"]) if names else None


def read_predictions(folder: Path, split: str) -> Iterator[JsonObject]:
    """The lines of predictions-SPLIT.jsonl, the worst mistakes first; none where there is no such file."""
    path = folder / f"predictions-{split}.jsonl"
    return read_journal(path) if path.is_file() else iter(())


def as_float(value: Any) -> float:
    """A number as JSON holds it, also "NaN" and "Infinity"; NaN for what is no number.

    >>> as_float("-Infinity"), as_float(None)
    (-inf, nan)
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def seed_entry(found: JsonObject) -> JsonObject:
    """The entry of one seed in results.json: steps, seconds, and the metric of each split."""
    scores = {split: each["numbers"][found["metric"]] for split, each in found["splits"].items()}
    shown = {name: found[name] for name in ("seed", "best_step", "steps", "seconds")}
    return shown | {"splits": scores}


def across_seeds(found: list[JsonObject], split: str) -> JsonObject:
    """Mean and standard deviation of the metric over seeds."""
    return summarize_seeds([each["splits"][split]["numbers"][each["metric"]] for each in found])


def summarize_seeds(scores: Sequence[float]) -> JsonObject:
    """Mean and standard deviation of one score per seed; None for the deviation of a single one.

    >>> summarize_seeds([0.75])
    {'mean': 0.75, 'std': None, 'seeds': 1}
    """
    deviation = statistics.stdev(scores) if len(scores) > 1 else None
    return {"mean": statistics.fmean(scores), "std": deviation, "seeds": len(scores)}


def folder_bytes(folder: Path) -> int:
    """The size of the files in a folder, without those in folders below it."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
