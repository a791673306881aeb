"""The command `heedful bench`: measure speed, memory and quality of the precisions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.options import AsJson, Device, HeadKind
from heedful.cli.output import note, print_json, print_table
from heedful.errors import HeedfulError

if TYPE_CHECKING:
    from heedful.runs.bench import Bench


def bench(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, a model folder, or NAME[@REVISION] on the hub.")],
    data: Annotated[Path | None, typer.Option(help="Labelled data of the task, to measure quality too.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the data; by default test, dev, or all of it.")] = None,
    head_kind: HeadKind = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure speed, memory and quality of precisions.

    Compares float32, bfloat16 and int8 on this machine: tokens per second, latency of one text, memory, and how much
    scores change. A precision that is no faster or changes too much is refused, with the figures.
    """
    if split is not None and data is None:
        raise HeedfulError("--split needs --data: give both, or leave it out")
    from dataclasses import asdict

    from heedful.runs.bench import bench as measure

    report = measure(run, data=data, split=split, head=head_kind, device=device, log=note)
    if as_json:
        return print_json(asdict(report))
    evaluated_on = None  # name of the evaluated data, if there are any
    if data is not None:
        evaluated_on = data.name if data.is_file() else report.split
    _print_measurements(report, evaluated_on)
    print()
    _print_verdicts(report)
    note(
        "tokens/s: throughput for texts of 64 tokens; sample: for the sample texts, by which auto decides. ms: latency "
        "of one text, p50 / p99. All of these exclude tokenization. "
        "MB: resident memory of a process that predicts. change: of scores, as a share of their standard deviation. –: "
        "too slow to be measured on more than a few texts."
    )


def _print_measurements(report: Bench, evaluated_on: str | None) -> None:
    """Print a table with a row for each quantity and a column for each precision.

    Args:
        report: The measurements.
        evaluated_on: Name of the file or split that was evaluated. If None, no quality was measured.
    """
    from heedful.tasks.metrics import format_metric

    lengths = list(report.results[0].latency)  # tokens of the texts whose latency was measured
    columns = []  # one for each precision
    for result in report.results:
        trial = result.trial
        latencies = [result.latency.get(length) for length in lengths]
        column = [trial.precision, f"{result.throughput:,}", f"{trial.speed:,.0f}"]
        column += ["–" if times is None else f"{times['p50']:.1f} / {times['p99']:.1f}" for times in latencies]
        column += [f"{result.resident_bytes / 1e6:,.0f}", f"{trial.scores:.4f}"]
        if report.metric is not None:
            column.append("–" if trial.metric_value is None else format_metric(report.metric, trial.metric_value))
        columns.append(column)
    row_names = ["", "tokens/s", "tokens/s, sample", *(f"ms, {length} tokens" for length in lengths), "MB", "change"]
    if evaluated_on is not None:
        row_names.append(f"{report.metric} ({evaluated_on})")
    head, *rows = [list(row) for row in zip(row_names, *columns, strict=True)]
    print_table(rows, head=head, right=set(range(1, len(head))))


def _print_verdicts(report: Bench) -> None:
    """Print for each precision whether "auto" means it, or why not."""
    rows = []
    for result in report.results:
        precision, refusal = result.trial.precision, result.trial.refused
        rows.append([precision, "chosen by auto" if precision == report.auto_precision else refusal or "slower"])
    print_table(rows)
