"""Baselines of a run's scores, in sentences: a bag of words, or the model before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heedful.runs.card.markdown import format_number
from heedful.runs.results import as_float, headline_split

NEXT = "train longer, label more rows, or start from another encoder with --model"


def baseline_before_training(splits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the model's scores before training, in the form of a baseline."""
    kept = {
        split: {
            "numbers": {
                name: value for name, value in each["numbers"].items() if name == "count" or isinstance(value, float)
            },
            "intervals": each.get("intervals", {}),
        }
        for split, each in splits.items()
    }
    return {"name": "before training", "splits": kept}


def baseline_lines(results: Mapping[str, Any]) -> list[str]:
    """Return a line for each split: the run's metric, and that of its baseline; none where there is none."""
    found, metric = results.get("baseline"), results["metric"]
    if found is None:
        return []
    if "why" in found:
        return [f"{found['name']} could not be fitted: {found['why']}"]
    lines: list[str] = []
    for split, each in found["splits"].items():
        own = results["splits"][split]["numbers"]
        line = (
            f"{split} {metric} {format_number(own[metric])}; {found['name']} {format_number(each['numbers'][metric])}"
        )
        lines.append(line + _cost(found, each["numbers"]["count"], own.get("count")))
    return lines


def _cost(found: Mapping[str, Any], scored: int, count: int | None) -> str:
    """Seconds and rows of a bag of words, in parentheses."""
    if "seconds" not in found:
        return ""
    parts = [f"in {found['seconds']:.1f} s" if found["seconds"] >= 0.05 else "in less than 0.1 s"]
    if found["rows"] < found["of"]:
        parts.append(f"fitted on {found['rows']:,} of {found['of']:,} rows")
    if count is not None and scored < count:
        parts.append(f"scored on {scored:,} of {count:,} rows")
    return f" ({', '.join(parts)})"


def baseline_warning(results: Mapping[str, Any]) -> str:
    """Say that the run is not better than a bag of words, and what to do; "" where it is, or nothing was compared.

    Better is a 95 % interval of the difference, from bootstrap replicates of the same examples, that lies above 0. The
    split is test, or dev where there is no test.
    """
    found, shown = results.get("baseline"), headline_split(dict(results))
    if found is None or shown is None or "difference" not in found["splits"].get(shown[0], {}):
        return ""
    difference = found["splits"][shown[0]]["difference"]
    low, high = (as_float(difference[end]) for end in ("low", "high"))
    if low > 0:
        return ""
    if low == high == 0:
        both = f"the model and {found['name']} score the same"
        return f"On {shown[0]} {both}: the split is too small or too easy to compare them"
    how = "is worse than" if high < 0 else "is not measurably better than"
    within = f"{results['metric']} differs by {low:+.3f} to {high:+.3f}, a {100 * difference['level']:g} % interval"
    return f"On {shown[0]} the model {how} {found['name']} ({within}): {NEXT}"


def baseline_csv_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the row of the baseline in results.csv, whose columns are those of evaluations."""
    found = results.get("baseline")
    if found is None or not found["splits"]:
        return []
    numbers = {
        f"{split}_{name}": value for split, each in found["splits"].items() for name, value in each["numbers"].items()
    }
    return [{"baseline": found["name"], **numbers}]
