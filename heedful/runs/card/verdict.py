"""The verdict on a student as a table, and as a section of its model card."""

from __future__ import annotations

from pathlib import Path

from heedful.runs.card.markdown import escape_markdown, markdown_table
from heedful.runs.results import JsonObject
from heedful.runs.run_folder import read_run_json
from heedful.tasks.metrics import format_metric

VERDICT = "verdict.json"
NAMES = {"teacher": "teacher", "student": "student", "baseline": "student alone"}


def verdict_table(verdict: JsonObject) -> tuple[list[str], list[list[str]]]:
    """The head of a table, and a row for teacher, student and baseline."""
    metric = f"{verdict['metric']} on {verdict['split']}"
    further = list(verdict["models"]["teacher"]["quality"].get("metrics", ()))
    head = ["", metric, "kept", *further, "parameters", "served in", "tokens/s", "texts/s", "ms, p50 / p99"]
    rows = []
    teacher_mean = verdict["models"]["teacher"]["quality"]["mean"]
    for name, model in verdict["models"].items():
        quality, speed = model["quality"], model if "p50" in model else verdict["models"]["student"]
        deviation = "" if quality["std"] is None else format_metric(verdict["metric"], quality["std"])
        spread = f" ± {deviation} ({quality['seeds']} seeds)" if deviation else ""
        spread += "" if quality["precision"] == speed["precision"] else f" in {quality['precision']}"
        rows.append(
            [
                NAMES.get(name, name),
                format_metric(verdict["metric"], quality["mean"]) + spread,
                f"{100 * quality['mean'] / teacher_mean:.1f} %" if teacher_mean > 0 else "",
                *(format_metric(name, quality["metrics"][name]["mean"]) for name in further),
                f"{speed['parameters']:,}",
                speed["precision"],
                f"{speed['tokens_per_second']:,.0f}",
                f"{speed['texts_per_second']:,.0f}",
                f"{speed['p50']:.2f} / {speed['p99']:.2f}",
            ]
        )
    return head, rows


def verdict_section(folder: Path) -> list[list[str]]:
    """The section of the model card on the comparison with the teacher; [] if the run has no verdict."""
    if not (folder / VERDICT).is_file():
        return []
    verdict = read_run_json(folder / VERDICT)
    head, rows = verdict_table(verdict)
    return [
        ["## Beside its teacher"],
        markdown_table(list(map(escape_markdown, head)), [list(map(escape_markdown, row)) for row in rows]),
        [escape_markdown(verdict["sentence"], 1000)],
    ]
