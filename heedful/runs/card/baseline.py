"""Sentences about the baseline of a run: a bag of words, or the model before training."""

from __future__ import annotations

from collections.abc import Mapping

from heedful.runs.card.markdown import format_number
from heedful.runs.results import JsonObject, as_float, headline_split
from heedful.tasks.metrics import format_difference, metric_bounds

NEXT = "train longer, label more rows, or start from another encoder with --model"


def baseline_before_training(splits: Mapping[str, JsonObject]) -> JsonObject:
    """Return the model's scores before training, in the form of a baseline."""
    scores = {
        split: {
            "numbers": {
                name: value for name, value in entry["numbers"].items() if name == "count" or isinstance(value, float)
            },
            "intervals": entry.get("intervals", {}),
        }
        for split, entry in splits.items()
    }
    return {"name": "before training", "splits": scores}


def baseline_lines(results: JsonObject) -> list[str]:
    """A line for each split with the metric of the run and of its baseline; [] if it has no baseline."""
    baseline, metric = results.get("baseline"), results["metric"]
    if baseline is None:
        return []
    if "why" in baseline:
        return [f"{baseline['name']} could not be fitted: {baseline['why']}"]
    lines: list[str] = []
    for split, scored in baseline["splits"].items():
        own, reference = results["splits"][split]["numbers"], scored["numbers"]
        line = f"{split} {metric} {_shown(metric, own)}; {baseline['name']} {_shown(metric, reference)}"
        lines.append(line + _cost(baseline, reference["count"], own.get("count")))
    return lines


def _shown(metric: str, numbers: JsonObject) -> str:
    value = as_float(numbers[metric])
    return f"{100 * value:.1f} %" if metric_bounds(metric) == (0.0, 1.0) else format_number(value)


def _cost(baseline: JsonObject, scored: int, count: int | None) -> str:
    """Seconds and rows of a bag of words, in parentheses; "" for another baseline."""
    if "seconds" not in baseline:
        return ""
    parts = [f"in {baseline['seconds']:.1f} s" if baseline["seconds"] >= 0.05 else "in less than 0.1 s"]
    if baseline["rows"] < baseline["of"]:
        parts.append(f"fitted on {baseline['rows']:,} of {baseline['of']:,} rows")
    if count is not None and scored < count:
        parts.append(f"scored on {scored:,} of {count:,} rows")
    return f" ({', '.join(parts)})"


def baseline_warning(results: JsonObject) -> str:
    """Say that the run is not better than a bag of words, and what to do; "" if it is, or has no such baseline.

    It is better if the 95 % interval of the difference, from bootstrap replicates of the same examples, lies above 0.
    The split is test, or dev without test.
    """
    baseline, headline = results.get("baseline"), headline_split(results)
    if baseline is None or headline is None or "difference" not in baseline["splits"].get(headline[0], {}):
        return ""
    difference = baseline["splits"][headline[0]]["difference"]
    low, high = (as_float(difference[end]) for end in ("low", "high"))
    if low > 0:
        return ""
    if low == high == 0:
        both = f"the model and {baseline['name']} score the same"
        return f"On {headline[0]} {both}: the split is too small or too easy to compare them"
    how = "is worse than" if high < 0 else "is not measurably better than"
    interval = format_difference(results["metric"], low, high)
    within = f"{results['metric']} differs by {interval}, a {100 * difference['level']:g} % interval"
    return f"On {headline[0]} the model {how} {baseline['name']} ({within}): {NEXT}"


def baseline_csv_rows(results: JsonObject) -> list[JsonObject]:
    """The row of the baseline in results.csv, with the columns of an evaluation."""
    baseline = results.get("baseline")
    if baseline is None or not baseline["splits"]:
        return []
    numbers = {
        f"{split}_{name}": value
        for split, scored in baseline["splits"].items()
        for name, value in scored["numbers"].items()
    }
    return [{"baseline": baseline["name"], **numbers}]
