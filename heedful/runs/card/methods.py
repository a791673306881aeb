"""The training methods that a run compared on held-out examples, for the model card and report.html."""

from __future__ import annotations

from heedful.runs.results import JsonObject
from heedful.tasks.metrics import format_metric

HEADING = "Methods on held-out examples"


def method_table(results: JsonObject) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table: method, metric, 95 % interval, seconds.

    Header and rows are empty if no methods were compared.

    Args:
        results: Contents of results.json.
    """
    comparison = results.get("method_comparison")
    if comparison is None:
        return [], []
    rows = []
    for method, result in comparison["methods"].items():
        metric = result["metric"]
        interval = result["intervals"].get(metric)
        interval_text = ""
        if interval:
            interval_text = f"{format_metric(metric, interval['low'])} to {format_metric(metric, interval['high'])}"
        rows.append([method, format_metric(metric, result["metric_value"]), interval_text, f"{result['seconds']:.1f}"])
    return ["method", f"{results['metric']} on {comparison['measured_on']}", "95 % interval", "seconds"], rows


def unmeasured_note(results: JsonObject) -> str:
    """Return sentences for a run without scores of a split: whether its method was measured instead."""
    if not method_table(results)[1]:
        return "Nothing was measured: the data had neither dev nor test."
    measured_on = results["method_comparison"]["measured_on"]
    return (
        "The model itself was not measured: the data had neither dev nor test. Its method was measured by "
        f"cross-validation ({measured_on}): see {HEADING}."
    )
