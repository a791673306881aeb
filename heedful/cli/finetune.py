"""The command `heedful finetune`: fine-tune a model on labelled data."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.launch import Nproc, launch
from heedful.cli.options import (
    AsJson,
    DataFiles,
    KeepCheckpoints,
    OnBadRow,
    OutputDir,
    OverwriteRun,
    Recipe,
    Track,
    check_on_bad_row,
    checkpoint_flags,
    first_file,
    note_aliases,
    replacing_run,
    with_trackers,
)
from heedful.cli.output import note, print_json, print_table, print_text
from heedful.cli.results import show_results
from heedful.cli.settings_command import context_assignments
from heedful.errors import HeedfulError
from heedful.tasks.specs import specs_named, task_names

if TYPE_CHECKING:
    from heedful.runs.results import JsonObject

TASKS_HELP = ", ".join(  # names of the tasks, some with an explanation
    f"{name} ({specs_named(name)[0].help})" if specs_named(name)[0].help else name for name in task_names()
)

TaskName = Annotated[str, typer.Argument(metavar="TASK", help=f"{TASKS_HELP}.")]
LabelledData = Annotated[
    list[Path], typer.Argument(metavar="DATA", help="A file, a folder with splits, or train=FILE dev=FILE test=FILE.")
]
InitialModel = Annotated[
    str,
    typer.Option(
        help="Pretrained model: a folder, or NAME[@REVISION] on the hub; by default the small English encoder that "
        "ships with Heedful."
    ),
]


def finetune(
    context: typer.Context,
    task: TaskName,
    data: LabelledData,
    model: InitialModel = "",
    out: OutputDir = None,
    recipe: Recipe = None,
    on_bad_row: OnBadRow = "raise",
    keep_checkpoints: KeepCheckpoints = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report steps, time, memory and disk; train nothing.")
    ] = False,
    track: Track = None,
    overwrite: OverwriteRun = False,
    nproc: Nproc = 0,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model on labelled data.

    Writes a run folder: a model that transformers loads too, metrics with confidence intervals, plots, predictions with
    the worst mistakes first, and a model card. Ctrl-C saves a checkpoint; the same command resumes.
    """
    from heedful.data.labelled.split_files import parse_data_arguments
    from heedful.runs.finetune.settings import check_task, finetune_overrides, preview_settings

    overrides = finetune_overrides(
        model=model, recipe=recipe, assignments=context_assignments(context), flags=checkpoint_flags(keep_checkpoints)
    )
    alias = task  # the name of another library for the task, or the task itself
    task = check_task(alias)
    settings = preview_settings(task, overrides)  # check settings before torch is imported
    if nproc and dry_run:
        raise HeedfulError("--nproc would change nothing: a dry run uses one process; leave one of them out")
    if overwrite and dry_run:
        raise HeedfulError("--overwrite would change nothing: a dry run writes no run; leave one of them out")
    if nproc:
        return launch(nproc, context.obj)
    note_aliases(overrides, {alias: f"the task {task}"} if alias != task else {})
    files: DataFiles = parse_data_arguments(data)
    folder = out or Path(f"{task}-{first_file(files).absolute().stem}")
    bad_rows = check_on_bad_row(on_bad_row)
    from heedful.train.memory import disable_malloc_trim

    disable_malloc_trim()
    if dry_run:
        from heedful.runs.finetune.dry_run import dry_run as estimate

        estimates = estimate(task, files, folder, overrides=overrides, on_bad_row=bad_rows)
        return print_json(estimates.to_dict()) if as_json else print_table(estimates.table_rows())

    from heedful.cli.progress import Progress
    from heedful.runs.finetune.run import finetune as run
    from heedful.train.ranks import connect_ranks

    with (
        connect_ranks(settings.train.device) as group,
        Progress(quiet=as_json or not group.is_main) as progress,
        replacing_run(folder, group, overwrite),
    ):
        reporter = with_trackers(progress, track)
        result = run(task, files, folder, overrides=overrides, on_bad_row=bad_rows, reporter=reporter, ranks=group)
    if result.status == "interrupted":
        if group.is_main:
            note(f"stopped; all progress is saved in {folder}. The same command resumes it.")
        raise SystemExit(130)
    if not group.is_main:
        return
    if as_json:
        return print_json({"folder": str(folder)} | result.results)
    _show_run(task, folder, result.results)


def _show_run(task: str, folder: Path, results: JsonObject) -> None:
    """Print the results of a finished run, the contents of its folder, and commands to use it.

    Args:
        task: Name of the task.
        folder: The run folder.
        results: Content of results.json.
    """
    from heedful.runs.card.finetuned import learned_pairs

    show_results(results)
    if not results["splits"] and not results.get("method_comparison", {}).get("methods"):
        print_text("nothing was evaluated: the data has neither a dev nor a test split")
    optional_files = {
        "plots": "plots/*.png",
        "predictions (the worst first)": "predictions-*.jsonl",
        "report.html": "report.html",
    }
    contents = ["model", *(name for name, pattern in optional_files.items() if any(folder.glob(pattern))), "model card"]
    print_text(f"\nThe run is in {folder}: {', '.join(contents)}.\nNext:")
    arguments = specs_named(task)[0].predict_arguments
    if learned_pairs(folder, results):
        arguments += ' --pair "Its pair."'
    print(f"  heedful predict {quote(str(folder))} {arguments}")
    print(f"  heedful evaluate {quote(str(folder))} --data YOUR-DATA")
    print(f"  heedful look {quote(str(folder))} {arguments}")
