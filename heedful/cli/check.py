"""The verb check: report what labelled data contains, and its problems."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.options import AsJson, Device
from heedful.cli.output import escape, note, percent, print_json, print_table, print_text, text_cell
from heedful.cli.settings_command import context_assignments
from heedful.errors import HeedfulError, did_you_mean

if TYPE_CHECKING:
    from heedful.data import Dataset, Example
    from heedful.runs.label_errors import LabelErrors

LABEL_ERRORS_SHOWN = 10


def check(
    context: typer.Context,
    data: Annotated[
        list[Path],
        typer.Argument(metavar="DATA", help="A file, a folder with splits, or train=FILE dev=FILE test=FILE."),
    ],
    task: Annotated[str | None, typer.Option(help="Task of the data; by default inferred from its columns.")] = None,
    limit: Annotated[int, typer.Option(help="Number of words from which a text counts as too long.")] = 384,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 if a problem is found.")] = False,
    label_errors: Annotated[
        bool, typer.Option("--label-errors", help="Find likely wrong labels, and write them to a CSV file to correct.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --label-errors: the CSV file (label-errors.csv).")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --label-errors: the sentence embedding model (heedful-mini-en).")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Report what is in labelled data, and its problems.

    Problems come first, marked with "!": leaks between splits, doubtful label columns, bad rows, labels without
    examples, contradictory labels, repeats, empty and long texts, unusual characters. The last line counts them.

    With --label-errors, labels of a classification task are compared with predictions of a model that was trained on
    the other examples. Correct the column "label" of the file, and give it to finetune as --data.corrections.
    """
    from dataclasses import asdict

    from heedful.data import DataOptions, DataSettings, Skip, TextExample, dataset_for_task, read
    from heedful.data import check as check_data
    from heedful.data.labelled.split_files import parse_data_arguments
    from heedful.runs.overrides import override
    from heedful.tasks.specs import SPECS

    example_types = {name: spec.example for name, spec in SPECS.items()} | {"plain": TextExample}
    if task is not None and task not in example_types:
        known = list(example_types)
        raise HeedfulError(f"--task is {task!r}{did_you_mean(task, known)}: use one of {', '.join(known)}")
    if not label_errors and (option := next((n for n, v in (("--output", out), ("--model", model)) if v), "")):
        raise HeedfulError(f"{option} is for --label-errors: give that too, or leave {option} out")
    settings = override(DataOptions(data=DataSettings(dev_fraction=0.0)), context_assignments(context)).data
    files, policy = parse_data_arguments(data), Skip()
    if task:
        dataset = dataset_for_task(example_types[task], files, settings, policy)
    else:
        dataset = read(files, None, settings, on_bad_row=policy)
    report = check_data(dataset, limit=limit)
    facts = asdict(report) | {"verdict": report.verdict()}
    if not as_json:
        print_text("\n".join(map(escape, report.lines())), mark="!")
    if label_errors:
        path = out or Path("label-errors.csv")
        likely = _find(dataset, path, model, device)
        facts |= {"label_errors": [error.to_dict() for error in likely.errors]}
        if not as_json:
            _show(likely, path, data)
    if as_json:
        print_json(facts)
    if strict and report.problems:
        raise SystemExit(1)


def _find(dataset: Dataset[Example], path: Path, model: str | None, device: str) -> LabelErrors:
    """Find label errors and write them to a new file."""
    if path.exists():
        raise HeedfulError(f"{path} exists already and may hold your corrections: give another file with --output")
    from heedful.bundled import BUNDLED_ENCODER
    from heedful.runs.label_errors import label_errors_of

    likely = label_errors_of(dataset, model=model or BUNDLED_ENCODER, device=device)
    likely.to_csv(path)
    return likely


def _show(likely: LabelErrors, path: Path, data: list[Path]) -> None:
    """Print the first label errors, and the command that uses the corrected file."""
    share = len(likely.errors) / max(likely.examples, 1)
    print(f"\n{len(likely.errors):,} of {likely.examples:,} labels ({percent(share).strip()}) are likely wrong")
    if not likely.errors:
        return
    rows = [
        [escape(error.label), escape(error.suggested_label), percent(error.probability),
         escape(f"{Path(error.file).name}:{error.line}"), text_cell(error.text, error.text_pair)]
        for error in likely.errors[:LABEL_ERRORS_SHOWN]
    ]  # fmt: skip
    print_table(rows, head=["label", "suggested", "probability", "place", "text"], right=[2], indent=2)
    files = " ".join(quote(str(file)) for file in data)
    note(
        f'\nCorrect the column "label" of {path}; an empty cell leaves the example out. Next:\n'
        f"  heedful finetune classify {files} --data.corrections {quote(str(path))}"
    )
