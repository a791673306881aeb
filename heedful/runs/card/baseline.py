"""The baseline of a run in tables and sentences: a linear model over a bag of words, or the model before training."""

from __future__ import annotations

from collections.abc import Mapping

from heedful.runs.card.markdown import format_number
from heedful.runs.results import JsonObject, as_float, headline_split
from heedful.tasks.metrics import format_difference, metric_bounds

ADVICE = "train longer, label more rows, or start from another encoder with --model"


def baseline_before_training(splits: Mapping[str, JsonObject]) -> JsonObject:
    """Return the model's scores before training, as the entry "baseline" of results.json.

    Args:
        splits: Entries by split, with "numbers" of the model before training and optional "intervals".
    """
    scores = {}
    for split, entry in splits.items():
        numbers = {
            name: value for name, value in entry["numbers"].items() if name == "count" or isinstance(value, float)
        }
        scores[split] = {"numbers": numbers, "intervals": entry.get("intervals", {})}
    return {"name": "before training", "splits": scores}


def baseline_lines(results: JsonObject) -> list[str]:
    """Return a line for each split with the metric of the run and of its baseline, or [] without a baseline."""
    baseline = results.get("baseline")
    metric = results["metric"]
    if baseline is None:
        return []
    if "why" in baseline:
        return [f"{baseline['name']} could not be fitted: {baseline['why']}"]
    lines: list[str] = []
    for split, entry in baseline["splits"].items():
        model_numbers, baseline_numbers = results["splits"][split]["numbers"], entry["numbers"]
        scores = f"{_format_score(metric, model_numbers)}; {baseline['name']} {_format_score(metric, baseline_numbers)}"
        details = _cost_in_parentheses(baseline, baseline_numbers["count"], model_numbers.get("count"))
        lines.append(f"{split} {metric} {scores}{details}")
    return lines


def _format_score(metric: str, numbers: JsonObject) -> str:
    """Format a metric in percent if it is a share, else as a number."""
    value = as_float(numbers[metric])
    return f"{100 * value:.1f} %" if metric_bounds(metric) == (0.0, 1.0) else format_number(value)


def _cost_in_parentheses(baseline: JsonObject, scored_rows: int, all_rows: int | None) -> str:
    """Return the seconds and the row counts of a bag of words in parentheses, or "" for the model before training."""
    if "seconds" not in baseline:
        return ""
    parts = [f"in {baseline['seconds']:.1f} s" if baseline["seconds"] >= 0.05 else "in less than 0.1 s"]
    if baseline["rows"] < baseline["of"]:
        parts.append(f"fitted on {baseline['rows']:,} of {baseline['of']:,} rows")
    if all_rows is not None and scored_rows < all_rows:
        parts.append(f"scored on {scored_rows:,} of {all_rows:,} rows")
    return f" ({', '.join(parts)})"


def baseline_warning(results: JsonObject) -> str:
    """Return a warning if the run is not better than a bag of words, or "" if it is better or has no such baseline.

    The run is better if the 95 % interval of the difference is above 0. The interval comes from bootstrap replicates of
    the same examples of test, or of dev if there is no test split.
    """
    baseline = results.get("baseline")
    headline = headline_split(results)
    if baseline is None or headline is None:
        return ""
    split, _ = headline
    difference = baseline["splits"].get(split, {}).get("difference")
    if difference is None:
        return ""
    low = as_float(difference["low"])
    high = as_float(difference["high"])
    if low > 0:
        return ""
    name = baseline["name"]
    if low == high == 0:
        return f"On {split} the model and {name} score the same: the split is too small or too easy to compare them"
    comparison = "is worse than" if high < 0 else "is not measurably better than"
    interval = format_difference(results["metric"], low, high)
    reason = f"{results['metric']} differs by {interval}, a {100 * difference['level']:g} % interval"
    return f"On {split} the model {comparison} {name} ({reason}): {ADVICE}"


def baseline_csv_rows(results: JsonObject) -> list[JsonObject]:
    """Return the row of the baseline for results.csv, with the columns of an evaluation, or [] without a baseline."""
    baseline = results.get("baseline")
    if baseline is None or not baseline["splits"]:
        return []
    numbers = {
        f"{split}_{name}": value
        for split, entry in baseline["splits"].items()
        for name, value in entry["numbers"].items()
    }
    return [{"baseline": baseline["name"], **numbers}]
