"""The verb check: report what labelled data contains, and its problems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.options import AsJson
from heedful.cli.output import escape, print_json, print_text
from heedful.cli.settings_command import context_assignments
from heedful.errors import HeedfulError, did_you_mean


def check(
    context: typer.Context,
    data: Annotated[
        list[Path],
        typer.Argument(metavar="DATA", help="A file, a folder with splits, or train=FILE dev=FILE test=FILE."),
    ],
    task: Annotated[str | None, typer.Option(help="Task of the data; by default inferred from its columns.")] = None,
    limit: Annotated[int, typer.Option(help="Number of words from which a text counts as too long.")] = 384,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 if a problem is found.")] = False,
    as_json: AsJson = False,
) -> None:
    """Report what is in labelled data, and its problems.

    Problems come first, marked with "!": leaks between splits, doubtful label columns, bad rows, labels without
    examples, contradictory labels, repeats, empty and long texts, unusual characters. The last line counts them.
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
    settings = override(DataOptions(data=DataSettings(dev_fraction=0.0)), context_assignments(context)).data
    files, policy = parse_data_arguments(data), Skip()
    if task:
        dataset = dataset_for_task(example_types[task], files, settings, policy)
    else:
        dataset = read(files, None, settings, on_bad_row=policy)
    report = check_data(dataset, limit=limit)
    if as_json:
        print_json(asdict(report) | {"verdict": report.verdict()})
    else:
        print_text("\n".join(map(escape, report.lines())), mark="!")
    if strict and report.problems:
        raise SystemExit(1)
