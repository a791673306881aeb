"""A cascade of student and teacher as a table, as a sentence, and as a section of the model card."""

from __future__ import annotations

from pathlib import Path

from heedful.runs.card.markdown import escape_markdown, markdown_table
from heedful.runs.results import JsonObject
from heedful.runs.run_folder import read_run_json
from heedful.tasks.metrics import format_difference, format_metric

CASCADE = "cascade.json"


def cascade_table(report: JsonObject) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table. It has a row for each stage, and a last row for the cascade.

    Args:
        report: Contents of cascade.json.
    """
    metric = report["metric"]
    header = ["", "answers", "from probability", f"{metric} alone", "95 % interval", "served in", "texts/s"]
    rows = []
    for entry in (*report["stages"], report["cascade"] | {"name": "cascade", "precision": ""}):
        share = entry.get("share")
        interval = entry["interval"]
        rows.append(
            [
                entry["name"],
                "" if share is None else f"{100 * share:.1f} %",
                _format_threshold(entry.get("threshold")),
                format_metric(metric, entry["accuracy"]),
                f"{format_metric(metric, interval['low'])} to {format_metric(metric, interval['high'])}",
                entry["precision"],
                f"{entry['texts_per_second']:,.0f}",
            ]
        )
    return header, rows


def _format_threshold(threshold: float | None) -> str:
    """Format the minimum probability with which a stage answers, or return "" if it answers all texts."""
    if not threshold:
        return ""
    return "never" if threshold > 1 else f"{threshold:.4f}"


def cascade_sentence(report: JsonObject) -> str:
    """Return a summary of cascade.json in two sentences."""
    metric, delta = report["metric"], report["delta_vs_teacher"]
    cascade, stages = report["cascade"], report["stages"]
    teacher = stages[-1]
    shares = [f"the {stage['name']} answers {100 * stage['share']:.1f} %" for stage in stages]
    speed_ratio = cascade["texts_per_second"] / teacher["texts_per_second"]
    return (
        f"In the cascade {', '.join(shares)} of the texts: {format_metric(metric, cascade['accuracy'])} {metric} on "
        f"{report['reported_on']} beside the teacher's {format_metric(metric, teacher['accuracy'])} "
        f"({format_difference(metric, delta['difference'])}, 95 % interval "
        f"{format_difference(metric, delta['low'], delta['high'])}), with {speed_ratio:.1f} times as many texts a "
        "second. "
        f"Thresholds were fitted on {report['fitted_on']} ({report['fitted_rows']:,} rows) for a loss of at most "
        f"{report['max_loss']:g} points: {loss_verdict(delta, report['max_loss'] / 100)}."
    )


def loss_verdict(delta: JsonObject, max_loss: float) -> str:
    """Return a clause that says whether the reported rows confirm a loss of accuracy of at most `max_loss` (0-1)."""
    if delta["low"] >= -max_loss:
        return "the reported rows confirm it"
    if delta["high"] < -max_loss:
        return "more is lost on the reported rows; give more held-out rows, or allow less"
    return "too few rows are reported to confirm it"


def cascade_section(folder: Path) -> list[list[str]]:
    """Return the section of the model card on the cascade, or [] if the run has no cascade."""
    if not (folder / CASCADE).is_file():
        return []
    report = read_run_json(folder / CASCADE)
    header, rows = cascade_table(report)
    return [
        ["## The cascade"],
        markdown_table(list(map(escape_markdown, header)), [list(map(escape_markdown, row)) for row in rows]),
        [escape_markdown(report["sentence"], 1000)],
    ]
