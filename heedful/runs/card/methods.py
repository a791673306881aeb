"""The table of the methods of a run on held-out examples."""

from __future__ import annotations

from heedful.runs.results import JsonObject
from heedful.tasks.metrics import format_metric

HEADING = "Methods on held-out examples"


def method_table(results: JsonObject) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table: method, metric with its 95 % interval, seconds; no rows without any.

    Args:
        results: Of a run.
    """
    comparison = results.get("method_comparison")
    if comparison is None:
        return [], []
    rows = []
    for method, result in comparison["methods"].items():
        metric = result["metric"]
        interval = result["intervals"].get(metric)
        ends = " to ".join(format_metric(metric, interval[end]) for end in ("low", "high")) if interval else ""
        rows.append([method, format_metric(metric, result["metric_value"]), ends, f"{result['seconds']:.1f}"])
    return ["method", f"{results['metric']} on {comparison['measured_on']}", "95 % interval", "seconds"], rows
