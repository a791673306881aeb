"""The verb that makes a small model of a large one: distil."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from heedful.cli.commands import context_assignments
from heedful.cli.launch import Nproc, launch
from heedful.cli.output import escape, note, print_table, write_json
from heedful.cli.train import (
    AsJson,
    OnBadRow,
    OutputDir,
    OverwriteRun,
    Recipe,
    Track,
    check_on_bad_row,
    note_renamed,
    replacing_run,
    with_trackers,
)
from heedful.errors import HeedfulError


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
            help="layers=3 (layers of the teacher), a size (tiny, mini, ...), a model folder, bag, attention or bilstm."
        ),
    ] = "",
    loss: Annotated[str, typer.Option(help="Loss: logits, distilbert, minilm, minilmv2 or tinybert.")] = "",
    unlabelled: Annotated[
        list[Path] | None, typer.Option(help="A file of texts without labels; repeat it for more files.")
    ] = None,
    max_latency: Annotated[
        str, typer.Option(help="Search for the fastest student that answers one text within this time, as 5ms.")
    ] = "",
    min_quality: Annotated[
        str, typer.Option(help="Search for the fastest student with this share of the teacher's quality, as 97%.")
    ] = "",
    out: OutputDir = None,
    recipe: Recipe = None,
    on_bad_row: OnBadRow = "raise",
    track: Track = None,
    overwrite: OverwriteRun = False,
    nproc: Nproc = 0,
    as_json: AsJson = False,
) -> None:
    """Distil a large model into a small one.

    Trains the student with the teacher and without it, with three seeds each unless --seeds is given. Ends in a
    verdict: quality kept, speed gained, size. Ctrl-C saves; the same command resumes.
    """
    from heedful.data.labelled.split_files import as_said
    from heedful.runs.distil.settings import check_overrides, distil_overrides, parse_milliseconds, parse_share

    least, most = (
        parse_share(min_quality) if min_quality else None,
        parse_milliseconds(max_latency) if max_latency else None,
    )
    if (min_quality or max_latency) and student:
        raise HeedfulError(
            "--student names one, and --min-quality and --max-latency search for one: leave one of them out"
        )
    overrides = distil_overrides(
        teacher,
        student=student,
        loss=loss,
        unlabelled=unlabelled or (),
        recipe=recipe,
        assignments=context_assignments(context),
    )
    check_overrides(overrides)  # refuses what is wrong before torch is imported
    if nproc:
        return launch(nproc, context.obj)
    note_renamed(overrides)
    folder = out or Path(f"distil-{Path(teacher).absolute().name}")
    given: Any = as_said(data)
    options: dict[str, Any] = {"overrides": overrides, "on_bad_row": check_on_bad_row(on_bad_row)}

    from heedful.cli.progress import Progress
    from heedful.train.memory import disable_malloc_trim
    from heedful.train.ranks import connect_ranks

    disable_malloc_trim()
    with (
        connect_ranks() as group,
        Progress(quiet=as_json or not group.first) as progress,
        replacing_run(folder, group, overwrite),
    ):
        reporter = with_trackers(progress, track)
        if min_quality or max_latency:
            from heedful.runs.distil.search import search

            done = search(
                teacher, given, folder, max_latency=most, min_quality=least, reporter=reporter, ranks=group, **options
            )
        else:
            from heedful.runs.distil.run import distil as run

            done = run(teacher, given, folder, reporter=reporter, ranks=group, **options)
    if done.stop_reason == "interrupted":
        if group.first:
            note(f"stopped; everything is in {folder}. The same command resumes it.")
        raise SystemExit(130)
    if not group.first:
        return
    if as_json:
        return write_json({"folder": str(done.folder)} | done.results)
    show(done.results)
    place = quote(str(done.folder))
    print(f"\nThe run is in {done.folder}: model, verdict, plots, model card.\nNext:")
    print(f"  heedful bench {place}")


def show(results: dict[str, Any]) -> None:
    """The frontier of a search, and the verdict."""
    from heedful.runs.distil.search import FLATTERED
    from heedful.runs.distil.verdict import verdict_table

    if found := results.get("search"):
        print(f"Students that were tried, the fastest first; kept of {escape(found['metric'])} on {found['split']}")
        lines = []
        for each in sorted(found["tried"], key=lambda each: each["p50"]):
            kept = f"{100 * each['quality_ratio']:.1f} %" if each.get("quality_ratio") is not None else ""
            taken = "taken" if each["name"] == found["taken"] else "" if "quality" in each else "not trained"
            lines.append([escape(each["name"]), f"{each['parameters']:,}", f"{each['p50']:.2f}", kept, taken])
        print_table(lines, head=["", "parameters", "ms", "kept", ""], right={1, 2, 3}, indent=2)
        if found["split"] != "dev":
            print(f"\n{escape(found['taken'])} was {FLATTERED}.")
        print()
    head, lines = verdict_table(results["verdict"])
    print_table([list(map(escape, line)) for line in lines], head=head, right=set(range(2, len(head))))
    print(f"\n{escape(results['verdict']['sentence'])}")
