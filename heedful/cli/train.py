"""The verbs that train and measure: quickstart, finetune, evaluate, recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from shlex import quote
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from heedful.cli.commands import context_assignments
from heedful.cli.launch import Nproc, launch
from heedful.cli.output import escape, note, note_data_settings, print_table, write_json
from heedful.errors import HeedfulError, did_you_mean
from heedful.infer.precision import PrecisionOrAuto
from heedful.tasks.specs import specs_named, task_names

if TYPE_CHECKING:
    from heedful.runs.overrides import Overrides
    from heedful.train.fit import Reporter
    from heedful.train.ranks import Ranks

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for machines.")]
OverwriteRun = Annotated[
    bool, typer.Option("--overwrite", help="Replace the run in the folder, which is kept until the new one is done.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Device = Annotated[str, typer.Option("--device", help="cpu, or cuda for a GPU.")]
OutputDir = Annotated[
    Path | None, typer.Option("--output", "-o", help="The run folder; an interrupted run in it is resumed.")
]
Recipe = Annotated[
    Path | None,
    typer.Option(help="Settings as a .toml or .json file: of heedful init TASK, or of heedful recipe cp NAME."),
]
OnBadRow = Annotated[str, typer.Option("--on-bad-row", help='"raise", or "skip": set aside in a file and counted.')]
Checkpoint = Annotated[
    str | None, typer.Option(help="Which weights of a finished RUN: best, last, or a step; else those of its model.")
]
KeepCheckpoints = Annotated[
    bool, typer.Option("--keep-checkpoints", help="Keep all checkpoints, with the optimizer, when the run is finished.")
]


def _check_track(names: list[str] | None) -> list[str] | None:
    from heedful.runs.trackers import check_trackers

    return names and list(check_trackers(names))


Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        help="Report to csv, tensorboard, wandb, mlflow or trackio; give it again for several.",
        callback=_check_track,
    ),
]
TASKS_HELP = ", ".join(
    f"{name} ({specs_named(name)[0].help})" if specs_named(name)[0].help else name for name in task_names()
)
PRECISIONS: tuple[PrecisionOrAuto, ...] = get_args(PrecisionOrAuto)
PLAIN = ("loss", "mse", "best_exact_threshold", "best_f1_threshold", "pearson", "spearman", "matthews")  # no shares
DETAILS = ("weighted", "macro_p", "macro_r", "micro_p", "micro_r")  # beginnings of numbers that are left to --json


def quickstart(
    out: Annotated[Path, typer.Option("--output", "-o", help="Where the run goes.")] = Path("heedful-quickstart"),
    as_json: AsJson = False,
) -> None:
    """Fine-tune, measure and try a small classifier.

    Fine-tunes a small classifier on 600 messages to a lending library, measures it, and answers a few more.
    """
    from heedful.cli.progress import Progress
    from heedful.runs.finetune.quickstart import quickstart as run
    from heedful.train.memory import disable_malloc_trim

    disable_malloc_trim()
    with Progress(quiet=as_json) as progress:
        done = run(out, progress)
    place = quote(str(out))
    if done is None:
        note(f"stopped: start again with heedful quickstart --output {place}")
        raise SystemExit(130)
    if as_json:
        return write_json({"folder": str(out), "answers": list(done.answers)} | done.results)
    show_results(done.results)
    if done.mistakes:
        print("\nThe worst mistakes on test")
        rows = [[escape(each["input"]), escape(each["label"]), escape(each["prediction"])] for each in done.mistakes]
        print_table(rows, head=["message", "is", "was taken for"], indent=2)
    print("\nNew messages")
    rows = [
        [escape(each["text"]), escape(each["label"]), f"{100 * each['probability']:.0f} %"] for each in done.answers
    ]
    print_table(rows, right={2}, indent=2)
    code = f"import heedful; print(heedful.Engine({str(out)!r})(['When do you open?']))"
    print(
        f"\nThe run is in {out}: the model, plots, predictions (the worst first), a model card in model/README.md.\n"
        f"\nNext:\n{_activation()}"
        f'  heedful predict {place} "When do you open tomorrow?"\n'
        "  heedful check YOUR-DATA.csv\n"
        "  heedful finetune classify YOUR-DATA.csv --model A-MODEL-FOLDER\n"
        f"\nTo serve it over HTTP, after pip install 'heedful[serve]':\n  heedful serve {place}\n"
        "\nOr from your own process:\n"
        f"  python -c {quote(code)}"
    )


def _activation() -> str:
    """The line by which a shell finds the command, where it does not yet."""
    script = Path(sys.prefix, "bin", "activate")
    if which("heedful") or not script.is_file():
        return ""
    here = Path.cwd()
    return f"  . {quote(str(script.relative_to(here) if script.is_relative_to(here) else script))}\n"


def finetune(
    context: typer.Context,
    task: Annotated[str, typer.Argument(metavar="TASK", help=f"{TASKS_HELP}.")],
    data: Annotated[
        list[Path],
        typer.Argument(metavar="DATA", help="A file, a folder with splits, or train=FILE dev=FILE test=FILE."),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="The pretrained model: a folder, or NAME[@REVISION] on the hub; else the small English one that ships."
        ),
    ] = "",
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

    Ends in a run folder: a model that transformers loads too, its scores with intervals, plots, predictions with the
    worst mistakes first, and a model card. Ctrl-C saves; the same command resumes.
    """
    from heedful.data.labelled.split_files import as_said
    from heedful.runs.finetune.settings import check_task, finetune_overrides, preview_settings

    overrides = finetune_overrides(
        model=model, recipe=recipe, assignments=context_assignments(context), flags=checkpoint_flags(keep_checkpoints)
    )
    named, task = task, check_task(task)
    preview_settings(task, overrides)  # refuses what is wrong before torch is imported
    if nproc and dry_run:
        raise HeedfulError("--nproc would change nothing: a dry run looks in one process; leave one of them out")
    if overwrite and dry_run:
        raise HeedfulError("--overwrite would change nothing: a dry run writes no run; leave one of them out")
    if nproc:
        return launch(nproc, context.obj)
    note_renamed(overrides, {named: f"the task {task}"} if named != task else {})
    given: Any = as_said(data)
    folder = out or Path(f"{task}-{_first(given).absolute().stem}")
    options: dict[str, Any] = {"overrides": overrides, "on_bad_row": check_on_bad_row(on_bad_row)}
    from heedful.train.memory import disable_malloc_trim

    disable_malloc_trim()
    if dry_run:
        from heedful.runs.finetune.dry_run import dry_run as estimate

        facts = estimate(task, given, folder, **options)
        return write_json(facts.plain()) if as_json else print_table(facts.rows())

    from heedful.cli.progress import Progress
    from heedful.runs.card.finetuned import learned_pairs
    from heedful.runs.finetune.run import finetune as run
    from heedful.train.ranks import connect_ranks

    with (
        connect_ranks() as group,
        Progress(quiet=as_json or not group.first) as progress,
        replacing_run(folder, group, overwrite),
    ):
        done = run(task, given, folder, reporter=with_trackers(progress, track), ranks=group, **options)
    if done.stop_reason == "interrupted":
        if group.first:
            note(f"stopped; everything is in {folder}. The same command resumes it.")
        raise SystemExit(130)
    if not group.first:
        return
    if as_json:
        return write_json({"folder": str(folder)} | done.results)
    show_results(done.results)
    place = quote(str(folder))
    if not done.results["splits"]:
        print("nothing was measured: there is neither dev nor test")
    kept = {"plots": "plots/*.png", "predictions (the worst first)": "predictions-*.jsonl"}
    held = ["model", *(name for name, files in kept.items() if any(folder.glob(files))), "model card"]
    print(f"\nThe run is in {folder}: {', '.join(held)}.\nNext:")
    pair = ' --pair "Its pair."' if learned_pairs(folder, done.results) else ""
    print(f"  heedful predict {place} {specs_named(task)[0].predict_arguments}{pair}")
    print(f"  heedful evaluate {place} --data YOUR-DATA")


def evaluate(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, a model folder, or NAME[@REVISION] on the hub.")],
    data: Annotated[list[Path], typer.Option(help="A file or a folder; for a suite the folder that holds its tasks.")],
    suite: Annotated[str | None, typer.Option(help="A suite of public tasks: glue.")] = None,
    checkpoint: Checkpoint = None,
    split: Annotated[str | None, typer.Option(help="Which split; test where there is one, else dev.")] = None,
    predictions: Annotated[Path | None, typer.Option(help="Write all answers there, the worst mistakes first.")] = None,
    overwrite: Overwrite = False,
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16, int8, or auto: as predict and serve answer in it.")
    ] = "float32",
    device: Device = "cpu",
    on_bad_row: OnBadRow = "raise",
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on labelled data.

    With the official definitions, in memory that does not grow with the data, whatever the batches. --json has the
    scores of each class too.
    """
    from heedful.data import DataOptions, SetAside, Stop
    from heedful.data.bad_rows import forget
    from heedful.data.labelled.split_files import as_said
    from heedful.runs.data_settings import data_settings_for
    from heedful.runs.overrides import override

    how = check_precision(precision)
    if overwrite and predictions is None:
        raise HeedfulError("--overwrite would change nothing: it is for a file of --predictions; leave it out")
    given: Any = as_said(data)
    usual, _ = data_settings_for(run, given, override(DataOptions(), context_assignments(context)).data)
    settings = override(DataOptions(data=usual), context_assignments(context)).data
    aside = Path(f"{_first(given).absolute().stem}-bad-rows.jsonl") if check_on_bad_row(on_bad_row) == "skip" else None
    if suite is not None:
        options = {"split": split, "predictions": predictions, "data": context_assignments(context), "bad-rows": aside}
        for name, asked in (options | {"checkpoint": checkpoint}).items():
            if asked:
                raise HeedfulError(f"--{name} is not for a suite, which says itself what is measured")
        return _suite(run, data, suite, how, device, as_json)

    from heedful.runs.evaluate import evaluate as measure

    if not as_json:
        note_data_settings(usual)
    if aside is not None:
        forget(aside)
    done = measure(
        run,
        given,
        checkpoint=checkpoint,
        split=split,
        settings=settings,
        on_bad_row=SetAside(file=aside) if aside else Stop(),
        predictions=predictions,
        overwrite=overwrite,
        precision=how,
        device=device,
    )
    if done.trained_on:
        names = ", ".join(Path(place).name for place in done.trained_on[:3])
        note(escape(f"{names}: this run was trained on it, so the numbers say what it remembers, not how good it is"))
    if as_json:
        about = {"bad_rows": done.bad_rows, "precision": done.precision}
        return write_json({"split": done.split, "numbers": done.numbers, "intervals": done.intervals} | about)
    if how == "auto":
        note(f"it answered in {done.precision}, as predict and serve do with auto")
    for sentence in done.stated:
        note(escape(sentence))
    for file, count in done.bad_rows.items():
        note(escape(f"bad rows of {file} that are left out: {count:,}; they are set aside in {aside}"))
    whole = done.split == "train" and split is None and len(data) == 1 and data[0].is_file()
    show_split(data[0].name if whole else done.split, done.numbers, done.intervals)


def note_renamed(overrides: Overrides, others: Mapping[str, str] | None = None) -> None:
    """Say how foreign names of settings, and others, are called here; once, on the first of several ranks."""
    if os.environ.get("RANK", "0") == "0":
        for name, here in {**(others or {}), **overrides.renamed}.items():
            note(f"{escape(name)} is {here} here")


def checkpoint_flags(checkpoints: bool) -> dict[str, dict[str, Any]]:
    """The setting of --keep-checkpoints where the flag is given."""
    return {"--keep-checkpoints": {"fit.keep_checkpoints": True}} if checkpoints else {}


def replacing_run(folder: Path, group: Ranks, overwrite: bool) -> AbstractContextManager[None]:
    """Keep the run that --overwrite replaces until the new one has finished; without --overwrite nothing happens."""
    from heedful.runs.overwrite import overwriting as replace_run

    return replace_run(folder, group, note) if overwrite else nullcontext()


def with_trackers(reporter: Reporter, track: list[str] | None) -> Reporter:
    """A reporter that also writes to the trackers of --track."""
    from heedful.runs.tracking import TrackingReporter

    return TrackingReporter(reporter, track) if track else reporter


def checkpoint_path(run: str, which: str | None) -> str:
    """The folder of a checkpoint of a run; the run itself where none is named."""
    from heedful.runs.checkpoints import find_checkpoint

    return run if which is None else str(find_checkpoint(run, which))


def _first(given: Any) -> Path:
    """The first of the files."""
    if isinstance(given, dict):
        given = next(iter(given.values()))
    return given if isinstance(given, Path) else given[0]


def _suite(
    run: str,
    data: list[Path],
    suite: str,
    how: PrecisionOrAuto,
    device: str,
    as_json: bool,
) -> None:
    from heedful.runs.evaluate import evaluate_glue as measure

    if suite != "glue":
        raise HeedfulError(f'--suite is "{suite}": there is glue')
    if len(data) > 1:
        raise HeedfulError("--data is given several times: for a suite give the one folder that holds its tasks")
    found = measure(run, data[0], precision=how, device=device)
    if as_json:
        return write_json(found)
    rows = [[name, f"{100 * each['score']:.2f}", _official(each), f"{each['count']:,}"] for name, each in found.items()]
    mean = sum(each["score"] for each in found.values()) / len(found)
    rows.append(["mean", f"{100 * mean:.2f}", f"of {len(found)} of 10 entries", ""])
    print_table(rows, head=["task", "score", "", "examples"], right={1, 3})


def recipe(
    action: Annotated[str, typer.Argument(help='"ls", or "cp" to copy one here.')] = "ls",
    name: Annotated[str | None, typer.Argument(help="Which one to copy.")] = None,
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Where to; else its own name, here.")] = None,
    as_json: AsJson = False,
) -> None:
    """List recipes and sample data, or copy one.

    Of finetune, pretrain and distil; sample data too.
    """
    from heedful.runs import recipes

    if action not in ("ls", "cp"):
        raise HeedfulError(f'"{action}" is not known{did_you_mean(action, ["ls", "cp"])}: use ls or cp')
    if action == "ls":
        found = [{"name": each.name, "about": each.about} for each in recipes.list_assets()]
        return write_json(found) if as_json else print_table([list(each.values()) for each in found])
    if name is None:
        raise HeedfulError("say which recipe: heedful recipe ls lists them")
    written, offer = recipes.copy_asset(name, out)
    if as_json:
        return write_json({"name": name, "written": str(written)})
    print(f"{written} is yours now: {offer.use.format(quote(str(written)))}")


def show_results(results: dict[str, Any]) -> None:
    """Print the metrics of each split, comparisons and the spread over seeds."""
    from heedful.runs.card.baseline import baseline_lines, baseline_warning

    for split, found in results["splits"].items():
        show_split(split, found["numbers"], found["intervals"])
    for line in baseline_lines(results):
        print(escape(line))
    if sentence := baseline_warning(results):
        note(escape(sentence))
    for split, each in results["across_seeds"].items():
        if each["std"] is not None:
            metric, count = results["metric"], each["seeds"]
            mean, deviation = (_shown(metric, each[name]) for name in ("mean", "std"))
            print(f"{split} {metric} over {count} seeds: {mean}, standard deviation {deviation}")


def show_split(split: str, numbers: dict[str, Any], intervals: dict[str, Any]) -> None:
    """The numbers of one split that are plain, with their intervals."""
    rows = []
    for name, value in numbers.items():
        if isinstance(value, float) and not name.startswith(DETAILS):
            within = intervals.get(name)
            each = " to ".join(_shown(name, within[end]) for end in ("low", "high")) if within else ""
            rows.append([name, _shown(name, value), each])
    print(f"{split}, {numbers['count']:,} examples")
    print_table(rows, head=["", "", "95 % interval"], right={1}, indent=2)
    for sentence in numbers.get("notes", []):
        note(f"  {escape(sentence)}")


def _shown(name: str, value: float) -> str:
    return f"{value:.4f}" if name in PLAIN else f"{100 * value:.2f} %"


def _official(each: dict[str, Any]) -> str:
    names = [name for name, value in each.items() if isinstance(value, float) and name != "score"]
    return ", ".join(f"{name} {100 * each[name]:.2f}" for name in names)


def check_on_bad_row(given: str) -> Literal["raise", "skip"]:
    match given:
        case "raise" | "skip":
            return given
    raise HeedfulError(f'--on-bad-row is "{given}"{did_you_mean(given, ["raise", "skip"])}: use raise or skip')


def check_precision(given: str) -> PrecisionOrAuto:
    for known in PRECISIONS:
        if given == known:
            return known
    raise HeedfulError(f"--precision is {given!r}{did_you_mean(given, PRECISIONS)}: use one of {', '.join(PRECISIONS)}")
