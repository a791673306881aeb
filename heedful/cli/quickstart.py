"""The command `heedful quickstart`: fine-tune, evaluate and try a small classifier on sample data."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from shutil import which
from typing import Annotated

import typer

from heedful.cli.options import AsJson
from heedful.cli.output import escape, note, percent, print_json, print_table, print_text
from heedful.cli.results import show_results


def quickstart(
    out: Annotated[Path, typer.Option("--output", "-o", help="The run folder.")] = Path("heedful-quickstart"),
    as_json: AsJson = False,
) -> None:
    """Fine-tune, evaluate and try a small classifier.

    Fine-tunes a small classifier on 600 messages to a lending library, evaluates it, and predicts on new messages.
    """
    from heedful.cli.progress import Progress
    from heedful.runs.finetune.quickstart import quickstart as run
    from heedful.train.memory import disable_malloc_trim

    disable_malloc_trim()
    with Progress(quiet=as_json) as progress:
        result = run(out, progress)
    folder = quote(str(out))
    if result is None:
        note(f"stopped: start again with heedful quickstart --output {folder}")
        raise SystemExit(130)
    if as_json:
        return print_json({"folder": str(out), "answers": list(result.answers)} | result.results)
    show_results(result.results)
    if result.mistakes:
        print("\nThe worst mistakes on test")
        rows = [[escape(row[name]) for name in ("input", "label", "prediction")] for row in result.mistakes]
        print_table(rows, head=["message", "label", "prediction"], indent=2)
    print("\nPredictions for new messages")
    rows = [
        [escape(answer["text"]), escape(answer["label"]), percent(answer["probability"])] for answer in result.answers
    ]
    print_table(rows, right={2}, indent=2)
    example_texts = [row["input"] for row in result.mistakes] or [result.answers[0]["text"]]
    print_text(
        f"\nThe run is in {out}: the model, report.html, plots, predictions (the worst first), a model card in "
        f"model/README.md.\n\nNext:\n{_activation()}"
        f"  heedful look {folder} {quote(escape(min(example_texts, key=len)))}\n"
        f'  heedful predict {folder} "When do you open tomorrow?"\n'
        "  heedful check YOUR-DATA.csv\n"
        "  heedful finetune classify YOUR-DATA.csv --model A-MODEL-FOLDER\n"
        f"\nTo serve it over HTTP, after pip install 'heedful[serve]':\n  heedful serve {folder}\n"
        "\nOr in Python:\n"
        "  import heedful\n"
        f'  print(heedful.Engine({str(out)!r})(["When do you open?"]))'
    )


def _activation() -> str:
    """Return a line that activates the virtual environment, or "" if the shell finds `heedful` without it."""
    script = Path(sys.prefix, "bin", "activate")
    if which("heedful") or not script.is_file():
        return ""
    cwd = Path.cwd()
    return f"  . {quote(str(script.relative_to(cwd) if script.is_relative_to(cwd) else script))}\n"
