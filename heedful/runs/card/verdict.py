"""The verdict on a distilled student (verdict.json) as a table, and as a section of the student's model card."""

from __future__ import annotations

from pathlib import Path

from heedful.runs.card.markdown import escape_markdown, markdown_table
from heedful.runs.results import JsonObject
from heedful.runs.run_folder import read_run_json
from heedful.tasks.metrics import format_metric

VERDICT = "verdict.json"
NAMES = {"teacher": "teacher", "student": "student", "baseline": "student without teacher"}  # shown names, by role


def verdict_table(verdict: JsonObject) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table, with one row each for teacher, student and baseline.

    Args:
        verdict: Contents of verdict.json.
    """
    metric = verdict["metric"]
    further_metrics = list(verdict["models"]["teacher"]["quality"].get("metrics", ()))
    header = ["", f"{metric} on {verdict['split']}", "share of the teacher's quality", *further_metrics]
    header += ["parameters", "served in", "tokens/s", "texts/s", "ms, p50 / p99"]
    rows = []
    teacher_mean = verdict["models"]["teacher"]["quality"]["mean"]
    for role, model in verdict["models"].items():
        quality = model["quality"]
        speed = model if "p50" in model else verdict["models"]["student"]  # the baseline is as fast as the student
        mean = format_metric(metric, quality["mean"])
        if quality["std"] is not None:
            mean += f" ± {format_metric(metric, quality['std'])} ({quality['seeds']} seeds)"
        if quality["precision"] != speed["precision"]:
            mean += f" in {quality['precision']}"
        rows.append(
            [
                NAMES.get(role, role),
                mean,
                f"{100 * quality['mean'] / teacher_mean:.1f} %" if teacher_mean > 0 else "",
                *(format_metric(name, quality["metrics"][name]["mean"]) for name in further_metrics),
                f"{speed['parameters']:,}",
                speed["precision"],
                f"{speed['tokens_per_second']:,.0f}",
                f"{speed['texts_per_second']:,.0f}",
                f"{speed['p50']:.2f} / {speed['p99']:.2f}",
            ]
        )
    return header, rows


def verdict_section(folder: Path) -> list[list[str]]:
    """Return the section of the model card on the comparison with the teacher, or [] if the run has no verdict."""
    if not (folder / VERDICT).is_file():
        return []
    verdict = read_run_json(folder / VERDICT)
    header, rows = verdict_table(verdict)
    return [
        ["## Compared with its teacher"],
        markdown_table(list(map(escape_markdown, header)), [list(map(escape_markdown, row)) for row in rows]),
        [escape_markdown(verdict["sentence"], 1000)],
    ]
