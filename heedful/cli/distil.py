"""The command `heedful distil`: distil a large model (the teacher) into a small one (the student)."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.launch import Nproc, launch
from heedful.cli.options import (
    AsJson,
    DataFiles,
    OnBadRow,
    OutputDir,
    OverwriteRun,
    Recipe,
    Track,
    check_on_bad_row,
    note_aliases,
    replacing_run,
    with_trackers,
)
from heedful.cli.output import escape, note, print_json, print_table, print_text
from heedful.cli.settings_command import context_assignments
from heedful.errors import HeedfulError

if TYPE_CHECKING:
    from heedful.runs.results import JsonObject


def distil(
    context: typer.Context,
    teacher: Annotated[
        str, typer.Argument(metavar="TEACHER", help="A run, a model folder, or NAME[@REVISION] on the hub.")
    ],
    data: Annotated[
        list[Path], typer.Argument(metavar="DATA", help="Labelled data; for a masked language model, plain text.")
    ],
    student: Annotated[
        str,
        typer.Option(
            help="layers=3 (layers of the teacher), a size (tiny, mini, ...), a model folder, static (token vectors), "
            "bag, attention or bilstm."
        ),
    ] = "",
    loss: Annotated[str, typer.Option(help="Loss: logits, distilbert, minilm, minilmv2 or tinybert.")] = "",
    unlabelled: Annotated[
        list[Path] | None, typer.Option(help="A file of unlabelled texts; repeat it for several files.")
    ] = None,
    max_latency: Annotated[
        str,
        typer.Option(
            help="Search for the best student with at most this latency for one text, such as 5ms. With --min-quality, "
            "the fastest student within both limits."
        ),
    ] = "",
    min_quality: Annotated[
        str, typer.Option(help="Search for the fastest student with this share of the teacher's quality, such as 97%.")
    ] = "",
    cascade: Annotated[
        bool,
        typer.Option("--cascade", help="Also build a cascade: the student answers where it is sure, else the teacher."),
    ] = False,
    max_loss: Annotated[
        float | None,
        typer.Option(
            metavar="POINTS",
            help="Points of accuracy that a cascade may lose to the teacher on held-out rows (0.5). Implies --cascade.",
        ),
    ] = None,
    out: OutputDir = None,
    recipe: Recipe = None,
    on_bad_row: OnBadRow = "raise",
    track: Track = None,
    overwrite: OverwriteRun = False,
    nproc: Nproc = 0,
    as_json: AsJson = False,
) -> None:
    """Distil a large model into a small one.

    Trains the student with the teacher and without it, with three seeds each unless --seeds is given, and compares
    quality, throughput, latency and size. Ctrl-C saves a checkpoint; the same command resumes.
    """
    from heedful.data.labelled.split_files import parse_data_arguments
    from heedful.runs.distil.settings import check_overrides, distil_overrides, parse_milliseconds, parse_share

    quality_share = parse_share(min_quality) if min_quality else None
    milliseconds = parse_milliseconds(max_latency) if max_latency else None
    is_search = bool(min_quality or max_latency)
    if is_search and student:
        raise HeedfulError(
            "--student names a student, and --min-quality and --max-latency search for one: leave one of them out"
        )
    overrides = distil_overrides(
        teacher,
        student=student,
        loss=loss,
        unlabelled=unlabelled or (),
        cascade=cascade,
        max_loss=max_loss,
        recipe=recipe,
        assignments=context_assignments(context),
    )
    device = check_overrides(overrides).device  # check settings before torch is imported
    if nproc:
        return launch(nproc, context.obj)
    note_aliases(overrides)
    folder = out or Path(f"distil-{Path(teacher).absolute().name}")
    files: DataFiles = parse_data_arguments(data)
    bad_rows = check_on_bad_row(on_bad_row)

    from heedful.cli.progress import Progress
    from heedful.train.memory import disable_malloc_trim
    from heedful.train.ranks import connect_ranks

    disable_malloc_trim()
    with (
        connect_ranks(device) as group,
        Progress(quiet=as_json or not group.is_main) as progress,
        replacing_run(folder, group, overwrite),
    ):
        reporter = with_trackers(progress, track)
        if is_search:
            from heedful.runs.distil.search import search

            result = search(
                teacher,
                files,
                folder,
                max_latency=milliseconds,
                min_quality=quality_share,
                overrides=overrides,
                on_bad_row=bad_rows,
                reporter=reporter,
                ranks=group,
            )
        else:
            from heedful.runs.distil.run import distil as run

            result = run(
                teacher, files, folder, overrides=overrides, on_bad_row=bad_rows, reporter=reporter, ranks=group
            )
    if result.status == "interrupted":
        if group.is_main:
            note(f"stopped; all progress is saved in {folder}. The same command resumes it.")
        raise SystemExit(130)
    if not group.is_main:
        return
    if as_json:
        return print_json({"folder": str(result.output_dir)} | result.results)
    show_verdict(result.results)
    print_text(f"\nThe run is in {result.output_dir}: model, verdict, plots, report.html, model card.\nNext:")
    if "cascade" in result.results:
        print(f"  heedful predict {quote(str(result.output_dir / 'cascade'))} TEXT")
    print(f"  heedful bench {quote(str(result.output_dir))}")


def show_verdict(results: JsonObject) -> None:
    """Print the results of a distillation: the comparison of student, teacher and baseline.

    The students of a search and the cascade are printed too, if there are any.

    Args:
        results: Content of results.json.
    """
    from heedful.runs.card.verdict import verdict_table

    if search := results.get("search"):
        _show_search(search)
    head, rows = verdict_table(results["verdict"])
    columns = list(zip(head, *rows, strict=True))  # transposed, since a table with a column for each model is narrower
    print_table([list(map(escape, column)) for column in columns[1:]], head=columns[0])
    print_text(f"\n{escape(results['verdict']['sentence'])}")
    if cascade := results.get("cascade"):
        _show_cascade(cascade)


def _show_search(search: JsonObject) -> None:
    """Print the students that a search has tried."""
    from heedful.runs.distil.search import CHOSEN_ON_TEST

    print_text(f"Students tried, fastest first; share of the teacher's {escape(search['metric'])} on {search['split']}")
    rows = []
    for student in sorted(search["tried"], key=lambda student: student["p50"]):
        ratio = student.get("quality_ratio")
        status = "" if "quality" in student else "not trained"
        if student["name"] == search["taken"]:
            status = "chosen"
        rows.append(
            [
                escape(student["name"]),
                f"{student['parameters']:,}",
                f"{student['p50']:.2f}",
                "" if ratio is None else f"{100 * ratio:.1f} %",
                status,
            ]
        )
    print_table(rows, head=["", "parameters", "ms", "share", ""], right={1, 2, 3}, indent=2)
    if search["split"] != "dev":
        print_text(f"\n{escape(search['taken'])} was {CHOSEN_ON_TEST}.")
    print()


def _show_cascade(cascade: JsonObject) -> None:
    """Print quality and speed of a cascade and of its stages."""
    from heedful.runs.card.cascade import cascade_table

    head, rows = cascade_table(cascade)
    print_text(f"\nThe cascade, on {escape(cascade['reported_on'])} ({cascade['reported_rows']:,} rows)")
    columns = list(zip(head, *rows, strict=True))
    print_table([list(map(escape, column)) for column in columns[1:]], head=[escape(name) for name in columns[0]])
    print_text(f"\n{escape(cascade['sentence'])}")
