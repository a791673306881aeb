"""The verb distil: knowledge distillation of a large model (the teacher) into a small one (the student)."""

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
        str, typer.Option(help="Search for the fastest student with at most this latency for one text, such as 5ms.")
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
            help="With --cascade: points of accuracy that it may lose to the teacher on held-out rows (0.5).",
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

    quality = parse_share(min_quality) if min_quality else None
    latency = parse_milliseconds(max_latency) if max_latency else None
    if (min_quality or max_latency) and student:
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
    check_overrides(overrides)  # check settings before torch is imported
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
        connect_ranks() as group,
        Progress(quiet=as_json or not group.is_main) as progress,
        replacing_run(folder, group, overwrite),
    ):
        reporter = with_trackers(progress, track)
        if min_quality or max_latency:
            from heedful.runs.distil.search import search

            result = search(
                teacher,
                files,
                folder,
                max_latency=latency,
                min_quality=quality,
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
    """Print the students that a search has tried, and the comparison of student, teacher and baseline."""
    from heedful.runs.card.verdict import verdict_table
    from heedful.runs.distil.search import CHOSEN_ON_TEST

    if search := results.get("search"):
        print_text(
            f"Students tried, fastest first; share of the teacher's {escape(search['metric'])} on {search['split']}"
        )
        lines = []
        for student in sorted(search["tried"], key=lambda student: student["p50"]):
            ratio = student.get("quality_ratio")
            status = "taken" if student["name"] == search["taken"] else "" if "quality" in student else "not trained"
            lines.append(
                [
                    escape(student["name"]),
                    f"{student['parameters']:,}",
                    f"{student['p50']:.2f}",
                    "" if ratio is None else f"{100 * ratio:.1f} %",
                    status,
                ]
            )
        print_table(lines, head=["", "parameters", "ms", "share", ""], right={1, 2, 3}, indent=2)
        if search["split"] != "dev":
            print_text(f"\n{escape(search['taken'])} was {CHOSEN_ON_TEST}.")
        print()
    head, lines = verdict_table(results["verdict"])
    models = list(zip(head, *lines, strict=True))  # a column for each model, which is narrower than a row
    print_table([list(map(escape, row)) for row in models[1:]], head=models[0])
    print_text(f"\n{escape(results['verdict']['sentence'])}")
    if report := results.get("cascade"):
        from heedful.runs.card.cascade import cascade_table

        head, lines = cascade_table(report)
        print_text(f"\nThe cascade, on {escape(report['reported_on'])} ({report['reported_rows']:,} rows)")
        stages = list(zip(head, *lines, strict=True))
        print_table([list(map(escape, row)) for row in stages[1:]], head=[escape(name) for name in stages[0]])
        print_text(f"\n{escape(report['sentence'])}")
