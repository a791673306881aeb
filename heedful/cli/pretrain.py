"""The command `heedful pretrain`: pre-train a model on raw text."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from heedful.cli.launch import Nproc, launch
from heedful.cli.options import (
    AsJson,
    KeepCheckpoints,
    OnBadRow,
    OutputDir,
    OverwriteRun,
    Recipe,
    Track,
    check_on_bad_row,
    checkpoint_flags,
    note_aliases,
    replacing_run,
    with_trackers,
)
from heedful.cli.output import escape, note, print_json, print_table, print_text
from heedful.cli.settings_command import context_assignments
from heedful.errors import HeedfulError


def pretrain(
    context: typer.Context,
    data: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DATA | RECIPE", help="Files and folders of text, a corpus, or a recipe that names them."
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="Objective: mlm, mlm+nsp, mlm+sop, plm, span_corruption, clm or rtd; with --teacher, terms joined by "
            "+: mlm, hidden_states, sentence_embedding, pair_similarity."
        ),
    ] = "",
    teacher: Annotated[
        str, typer.Option(help="A trained encoder whose outputs are targets: a folder, or NAME[@REVISION] on the hub.")
    ] = "",
    size: Annotated[str, typer.Option(help="Size of a new model: tiny, mini, small, medium, base or large.")] = "",
    model: Annotated[
        str, typer.Option(help="Continue pre-training of this model: a folder, or NAME[@REVISION] on the hub.")
    ] = "",
    tokenizer: Annotated[str, typer.Option(help="Folder of a tokenizer; by default one is trained on the text.")] = "",
    out: OutputDir = None,
    recipe: Recipe = None,
    on_bad_row: OnBadRow = "raise",
    keep_checkpoints: KeepCheckpoints = False,
    track: Track = None,
    overwrite: OverwriteRun = False,
    nproc: Nproc = 0,
    as_json: AsJson = False,
) -> None:
    """Pre-train a model on raw text.

    Writes a run folder with the model, its learning curves and a model card. Ctrl-C saves a checkpoint; the same
    command resumes.
    """
    from heedful.runs.pretrain.settings import pretrain_overrides, resolve_pretrain
    from heedful.train.memory import disable_malloc_trim

    files = list(data or [])
    if len(files) == 1 and files[0].suffix == ".toml":
        if recipe is not None:
            raise HeedfulError(f"two recipes were given, {files[0]} and {recipe}: give one")
        recipe, files = files[0], []
    overrides = pretrain_overrides(
        files,
        objective=objective,
        size=size,
        model=model,
        tokenizer=tokenizer,
        teacher=teacher,
        recipe=recipe,
        assignments=context_assignments(context),
        flags=checkpoint_flags(keep_checkpoints),
    )
    settings = resolve_pretrain(overrides=overrides)
    if not settings.data:
        raise HeedfulError("no text was given: heedful pretrain FILES, or a recipe with data = [...]")
    if nproc:
        return launch(nproc, context.obj)
    note_aliases(overrides)
    folder = out or Path(f"pretrain-{Path(settings.data[0]).absolute().name.partition('.')[0]}")
    disable_malloc_trim()

    from heedful.cli.progress import Progress
    from heedful.runs.card.baseline import baseline_lines
    from heedful.runs.pretrain.run import pretrain_with
    from heedful.train.ranks import connect_ranks

    with (
        connect_ranks(settings.train.device) as group,
        Progress(quiet=as_json or not group.is_main) as progress,
        replacing_run(folder, group, overwrite),
    ):
        bad_rows = check_on_bad_row(on_bad_row)
        reporter = with_trackers(progress, track)
        result = pretrain_with(settings, folder, on_bad_row=bad_rows, reporter=reporter, ranks=group)
    if result.status == "interrupted":
        if group.is_main:
            note(f"stopped; all progress is saved in {folder}. The same command resumes it.")
        raise SystemExit(130)
    if not group.is_main:
        return
    if as_json:
        return print_json({"folder": str(folder)} | result.results)
    metrics: dict[str, float] = result.results["splits"]["validation"]["numbers"]
    print(f"validation, {metrics['count']:,.0f} targets")
    rows = [[escape(name), f"{value:.4f}"] for name, value in metrics.items() if name != "count"]
    print_table(rows, right={1}, indent=2)
    for line in baseline_lines(result.results):
        print_text(escape(line))
    print_text(f"\nThe run is in {folder}: model, plots, report.html, model card.\nNext:")
    print(f"  heedful finetune classify YOUR-DATA.csv --model {quote(str(folder))}")
    print(f"  heedful pretrain MORE-TEXT --model {quote(str(folder))}")
