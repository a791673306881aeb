"""The command `heedful check`: report the contents of a dataset and its problems."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.options import AsJson
from heedful.cli.output import escape, note, percent, print_json, print_table, print_text, text_cell
from heedful.cli.settings_command import context_assignments
from heedful.command_line import command_line
from heedful.errors import HeedfulError, did_you_mean

if TYPE_CHECKING:
    from heedful.runs.label_errors import LabelErrors

MAX_SHOWN = 10  # maximum label errors in the printed table; the file lists all of them


def check(
    context: typer.Context,
    data: Annotated[
        list[Path],
        typer.Argument(
            metavar="DATA", help="A file, a folder with a file for each split, or train=FILE dev=FILE test=FILE."
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(help='Task, such as classify, or "plain" for texts without labels; by default inferred.'),
    ] = None,
    max_words: Annotated[int, typer.Option(help="Report texts longer than this many words.")] = 384,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with status 1 if a problem is found; label errors do not count.")
    ] = False,
    label_errors: Annotated[
        bool, typer.Option("--label-errors", help="Find likely wrong labels, and write them to a CSV file to correct.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --label-errors: the new CSV file (label-errors.csv).")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="With --label-errors: the sentence embedding model, or model to fine-tune (heedful-mini-en)."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="linear|finetune",
            help="With --label-errors: fit a linear model over frozen sentence vectors (default), or fine-tune the "
            "model, in each of five folds.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With --label-errors: cpu, cuda or cuda:1; by default a GPU where there is one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report the contents and problems of labelled data.

    Problems come first, marked with "!": leaks between splits, doubtful label columns, bad rows, labels without
    examples, contradictory labels, repeats, empty and long texts, unusual characters. The last line counts them.

    With --label-errors, labels of a classification task are compared with predictions of a model that was trained on
    the other examples. Correct the column "label" of the file, and give it to finetune as --data.corrections.
    """
    from dataclasses import asdict

    from heedful.data import DataOptions, DataSettings, Skip, TextExample, dataset_for_task, read
    from heedful.data import check as check_data
    from heedful.data.labelled.corrections import check_review_path
    from heedful.data.labelled.split_files import parse_data_arguments
    from heedful.runs.overrides import override
    from heedful.tasks.specs import SPECS

    example_types = {name: spec.example for name, spec in SPECS.items()} | {"plain": TextExample}
    if task is not None and task not in example_types:
        known = list(example_types)
        raise HeedfulError(f"--task is {task!r}{did_you_mean(task, known)}: use one of {', '.join(known)}")
    if method not in (None, "linear", "finetune"):
        raise HeedfulError(f"--method is {method!r}: use linear or finetune")
    for option, value in {"--output": out, "--model": model, "--method": method, "--device": device}.items():
        if value is not None and not label_errors:
            raise HeedfulError(f"{option} needs --label-errors: add it, or leave {option} out")
    path = out or Path("label-errors.csv")
    if label_errors:
        check_review_path(path)
    assignments = context_assignments(context)
    settings = override(DataOptions(data=DataSettings(dev_fraction=0.0)), assignments).data
    files = parse_data_arguments(data)
    if task:
        dataset = dataset_for_task(example_types[task], files, settings, Skip())
    else:
        dataset = read(files, None, settings, on_bad_row=Skip())  # the task is inferred
    report = check_data(dataset, limit=max_words)
    result = asdict(report) | {"verdict": report.verdict()}
    if not as_json:
        print_text("\n".join(map(escape, report.lines())), mark="!")
    if label_errors:
        from heedful.bundled import BUNDLED_ENCODER
        from heedful.runs.label_errors import label_errors_of

        likely_errors = label_errors_of(
            dataset,
            model=model or BUNDLED_ENCODER,
            method="finetune" if method == "finetune" else "linear",
            device=device,
            log=note,
        )
        likely_errors.to_csv(path)
        result |= {"label_errors": [error.to_dict() for error in likely_errors.errors]}
        if not as_json:
            _print_label_errors(likely_errors, path, _finetune_command(data, assignments, path))
    if as_json:
        print_json(result)
    if strict and report.problems:
        raise SystemExit(1)


def _print_label_errors(label_errors: LabelErrors, path: Path, next_command: str) -> None:
    """Print the number of label errors, the first `MAX_SHOWN` of them, and the command that trains without them."""
    count = len(label_errors.errors)
    share = count / max(label_errors.examples, 1)
    print(f"\n{count:,} of {label_errors.examples:,} labels ({percent(share).strip()}) are likely wrong")
    if not label_errors.errors:
        note(f"{path} was written with a header only")
        return
    rows = [
        [
            escape(error.label),
            escape(error.suggested_label),
            percent(error.probability),
            escape(f"{Path(error.file).name}:{error.line}"),
            text_cell(error.text, error.text_pair),
        ]
        for error in label_errors.errors[:MAX_SHOWN]
    ]
    print_table(rows, head=["label", "suggested", "probability", "place", "text"], right=[2], indent=2)
    note(f'\nCorrect the column "label" of {path}; an empty cell leaves the example out. Next:\n  {next_command}')


def _finetune_command(data: list[Path], assignments: list[str], corrections: Path) -> str:
    """Return the command that trains on the data with corrected labels.

    Args:
        data: Arguments of the command that name the data.
        assignments: Data settings of the command, as "NAME=VALUE".
        corrections: The file with corrected labels.
    """
    from heedful.data import DataOptions
    from heedful.runs.overrides import find_setting

    options: dict[str, str] = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        options[f"--{find_setting(DataOptions, name)}"] = value
    options["--data.corrections"] = str(corrections)
    return command_line("heedful finetune classify", list(map(str, data)), list(options.items()))
