"""The command `heedful evaluate`: evaluate a model on labelled data, or on a suite of public tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.options import (
    AsJson,
    Checkpoint,
    DataFiles,
    Device,
    OnBadRow,
    Overwrite,
    Precision,
    check_on_bad_row,
    check_precision_option,
    first_file,
)
from heedful.cli.output import escape, note, note_data_settings, print_json, print_table
from heedful.cli.results import show_split
from heedful.cli.settings_command import context_assignments
from heedful.errors import HeedfulError
from heedful.infer.precision import PrecisionOrAuto

if TYPE_CHECKING:
    from heedful.runs.evaluate import Evaluated
    from heedful.runs.results import JsonObject


def evaluate(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run, a model folder, NAME[@REVISION] on the hub, an index, or a TREC run."
        ),
    ],
    data: Annotated[list[Path], typer.Option(help="A file or a folder; with --suite the folder that holds its tasks.")],
    suite: Annotated[str | None, typer.Option(help="A suite of public tasks: glue.")] = None,
    checkpoint: Checkpoint = None,
    split: Annotated[
        str | None, typer.Option(help="Split to evaluate on; by default test, or dev if there is no test split.")
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Write all predictions to this file, the worst mistakes first.")
    ] = None,
    overwrite: Overwrite = False,
    precision: Precision = None,
    device: Device = "auto",
    rerank: Annotated[
        str | None,
        typer.Option(help="With an index: also evaluate hybrid search reranked by this cross-encoder."),
    ] = None,
    on_bad_row: OnBadRow = "raise",
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on labelled data.

    A model of sentence embeddings is evaluated on retrieval if --data is a folder in BEIR's layout (corpus.jsonl,
    queries.jsonl, qrels/test.tsv); so is an index, and a TREC run also on a file of judgments.

    Metrics follow their official definitions and do not depend on the batch size; memory does not grow with the data.
    --json also has the metrics of each class.
    """
    from heedful.data import DataOptions, Quarantine, Raise
    from heedful.data.bad_rows import remove_quarantine
    from heedful.data.labelled.split_files import parse_data_arguments
    from heedful.data.retrieval.beir import beir_folder
    from heedful.data.retrieval.trec import ranking_file_of
    from heedful.runs.data_settings import data_settings_for
    from heedful.runs.overrides import override

    checked_precision = check_precision_option(precision)
    if overwrite and predictions is None:
        raise HeedfulError("--overwrite would change nothing: it is for the file of --predictions; leave it out")
    files: DataFiles = parse_data_arguments(data)
    assignments = context_assignments(context)
    if suite is None and (ranking_file_of(run) or beir_folder(files)):
        from heedful.runs.evaluate import evaluate as evaluate_retrieval

        unused_options = {"data": assignments, "on-bad-row": on_bad_row != "raise"}
        _refuse_options(unused_options, "has no effect on the evaluation of retrieval: leave it out")
        evaluated = evaluate_retrieval(
            run,
            files,
            checkpoint=checkpoint,
            split=split,
            predictions=predictions,
            overwrite=overwrite,
            precision=checked_precision,
            device=device,
            reranker=rerank,
        )
        return _show(evaluated, checked_precision, as_json)
    if rerank is not None:
        raise HeedfulError("--rerank needs an index and --data in BEIR's layout: give both, or leave it out")
    run_settings, _ = data_settings_for(run, files, override(DataOptions(), assignments).data)
    settings = override(DataOptions(data=run_settings), assignments).data
    bad_rows_file = None
    if check_on_bad_row(on_bad_row) == "skip":
        bad_rows_file = Path(f"{first_file(files).absolute().stem}-bad-rows.jsonl")
    if suite is not None:
        excluded_options = {
            "split": split,
            "predictions": predictions,
            "data": assignments,
            "on-bad-row": bad_rows_file,
            "checkpoint": checkpoint,
        }
        reason = "cannot be used with --suite, which decides what is evaluated: leave it out"
        _refuse_options(excluded_options, reason)
        return _evaluate_suite(run, data, suite, checked_precision, device, as_json)

    from heedful.runs.evaluate import evaluate as run_evaluation

    if not as_json:
        note_data_settings(run_settings)
    if bad_rows_file is not None:
        remove_quarantine(bad_rows_file)
    evaluated = run_evaluation(
        run,
        files,
        checkpoint=checkpoint,
        split=split,
        settings=settings,
        on_bad_row=Quarantine(file=bad_rows_file) if bad_rows_file else Raise(),
        predictions=predictions,
        overwrite=overwrite,
        precision=checked_precision,
        device=device,
    )
    if evaluated.trained_on:
        names = ", ".join(Path(path).name for path in evaluated.trained_on[:3])
        note(escape(f"{names}: this run was trained on it, so the metrics do not measure generalization"))
    is_one_file = evaluated.split == "train" and split is None and len(data) == 1 and data[0].is_file()
    title = data[0].name if is_one_file else None  # the split of a single file is "train", a misleading title
    _show(evaluated, checked_precision, as_json, title=title, bad_rows_file=bad_rows_file)


def _refuse_options(options: Mapping[str, object], reason: str) -> None:
    """Raise a HeedfulError if one of these options was given.

    Args:
        options: Value of each option by its name without "--". A false value is an option that was not given.
        reason: Why the option cannot be used: the end of the message, after its name.
    """
    for name, value in options.items():
        if value:
            raise HeedfulError(f"--{name} {reason}")


def _show(
    evaluated: Evaluated,
    precision: PrecisionOrAuto | None,
    as_json: bool,
    *,
    title: str | None = None,
    bad_rows_file: Path | None = None,
) -> None:
    """Print the metrics of a split.

    Args:
        evaluated: The metrics.
        precision: Value of --precision.
        as_json: Whether to print JSON.
        title: Title of the table. If None, the name of the split.
        bad_rows_file: File with the skipped rows, if there is one.
    """
    if as_json:
        return print_json(
            {
                "split": evaluated.split,
                "numbers": evaluated.numbers,
                "intervals": evaluated.intervals,
                "bad_rows": evaluated.bad_rows,
                "precision": evaluated.precision,
            }
        )
    if precision == "auto":
        note(f"precision {evaluated.precision}, as predict and serve choose it with auto")
    elif precision is None and evaluated.precision != "float32":
        note(f"precision {evaluated.precision}, as predict and serve use it on a GPU")
    for sentence in evaluated.stated:
        note(escape(sentence))
    for file, count in evaluated.bad_rows.items():
        note(escape(f"bad rows of {file} that were skipped: {count:,}; they are in {bad_rows_file}"))
    show_split(title or evaluated.split, evaluated.numbers, evaluated.intervals)


def _evaluate_suite(
    run: str, data: list[Path], suite: str, precision: PrecisionOrAuto | None, device: str, as_json: bool
) -> None:
    """Evaluate models on the tasks of a suite, and print their scores."""
    from heedful.runs.evaluate import evaluate_glue as run_suite

    if suite != "glue":
        raise HeedfulError(f'--suite is "{suite}": use glue')
    if len(data) > 1:
        raise HeedfulError(f"--data is given {len(data)} times: with --suite give the one folder that holds its tasks")
    scores = run_suite(run, data[0], precision=precision, device=device)
    if as_json:
        return print_json(scores)
    rows = [
        [name, f"{100 * task['score']:.2f}", _official_metrics(task), f"{task['count']:,}"]
        for name, task in scores.items()
    ]
    mean = sum(task["score"] for task in scores.values()) / len(scores)
    rows.append(["mean", f"{100 * mean:.2f}", f"of {len(scores)} of 10 entries", ""])
    print_table(rows, head=["task", "score", "", "examples"], right={1, 3})


def _official_metrics(task: JsonObject) -> str:
    """Return names and values of the official metrics of a task, in percent."""
    names = [name for name, value in task.items() if isinstance(value, float) and name != "score"]
    return ", ".join(f"{name} {100 * task[name]:.2f}" for name in names)
