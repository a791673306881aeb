"""The verdict on a student as a table, and as a section of its model card."""

from __future__ import annotations

from pathlib import Path

from heedful.runs.card.markdown import escape_markdown, format_number, markdown_table
from heedful.runs.results import JsonObject
from heedful.runs.run_folder import read_json

VERDICT = "verdict.json"
NAMES = {"teacher": "teacher", "student": "student", "baseline": "the same student without the teacher"}


def verdict_table(found: JsonObject) -> tuple[list[str], list[list[str]]]:
    """The table: its head, and a row for each model."""
    head = ["", f"{found['metric']} on {found['split']}", "kept", "parameters", "served in", "tokens/s", "texts/s"]
    lines = []
    best = found["models"]["teacher"]["quality"]["mean"]
    for name, each in found["models"].items():
        quality, like = each["quality"], each if "p50" in each else found["models"]["student"]
        spread = "" if quality["std"] is None else f" ± {format_number(quality['std'])} ({quality['seeds']} seeds)"
        spread += "" if quality["precision"] == like["precision"] else f" in {quality['precision']}"
        kept = f"{100 * quality['mean'] / best:.1f} %" if best > 0 else ""
        times = [f"{like['tokens_per_second']:,.0f}", f"{like['texts_per_second']:,.0f}"]
        times += [f"{like['p50']:.2f} / {like['p99']:.2f}"]
        lines.append(
            [
                NAMES.get(name, name),
                format_number(quality["mean"]) + spread,
                kept,
                f"{like['parameters']:,}",
                like["precision"],
                *times,
            ]
        )
    return [*head, "ms, p50 / p99"], lines


def verdict_section(folder: Path) -> list[list[str]]:
    """What the model card says of it; nothing where there is no verdict."""
    if not (folder / VERDICT).is_file():
        return []
    found = read_json(folder / VERDICT)
    head, lines = verdict_table(found)
    return [
        ["## Beside its teacher"],
        markdown_table(list(map(escape_markdown, head)), [list(map(escape_markdown, line)) for line in lines]),
        [escape_markdown(found["sentence"], 1000)],
    ]
