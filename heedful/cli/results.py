"""Printing of a run's results: metrics by split with intervals, comparisons, means over seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful.cli.output import escape, note, print_table, print_text

if TYPE_CHECKING:
    from heedful.runs.results import JsonObject

JSON_ONLY_PREFIXES = ("weighted", "macro_p", "macro_r", "micro_p", "micro_r")  # metrics that only --json prints


def show_results(results: JsonObject) -> None:
    """Print metrics by split, comparisons of methods and with the baseline, and means over seeds.

    Args:
        results: Content of results.json.
    """
    from heedful.runs.card.baseline import baseline_lines, baseline_warning
    from heedful.runs.card.methods import method_table
    from heedful.tasks.metrics import format_metric

    for split, metrics in results["splits"].items():
        show_split(split, metrics["numbers"], metrics["intervals"])
    head, rows = method_table(results)
    if rows:
        print_table(rows, head=head, right={1, 3})
    for line in baseline_lines(results):
        print_text(escape(line))
    if sentence := baseline_warning(results):
        note(escape(sentence))
    for split, spread in results["across_seeds"].items():
        if spread["std"] is not None:
            metric, count = results["metric"], spread["seeds"]
            mean, deviation = (format_metric(metric, spread[name]) for name in ("mean", "std"))
            print_text(f"{split} {metric} over {count} seeds: {mean}, standard deviation {deviation}")


def show_split(split: str, numbers: JsonObject, intervals: JsonObject) -> None:
    """Print the scalar metrics of one split with their 95 % confidence intervals.

    Args:
        split: Title of the table.
        numbers: Metrics by name.
        intervals: Interval {"low", "high"} of each metric, by name.
    """
    from heedful.tasks.metrics import format_metric

    rows = []
    for name, value in numbers.items():
        if isinstance(value, float) and not name.startswith(JSON_ONLY_PREFIXES):
            interval = intervals.get(name)
            bounds = " to ".join(format_metric(name, interval[end]) for end in ("low", "high")) if interval else ""
            rows.append([name, format_metric(name, value), bounds])
    print(f"{split}, {numbers['count']:,} examples")
    print_table(rows, head=["", "", "95 % interval"], right={1}, indent=2)
    for sentence in numbers.get("notes", []):
        note(f"  {escape(sentence)}")
