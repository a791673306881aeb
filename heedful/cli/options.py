"""Options that several commands share, and the checks of their values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

import typer

from heedful.cli.output import escape, note
from heedful.errors import HeedfulError, SettingError, did_you_mean
from heedful.infer.precision import PrecisionOrAuto

if TYPE_CHECKING:
    from heedful.runs.overrides import Overrides
    from heedful.train.fit import Reporter
    from heedful.train.ranks import Ranks

DataFiles: TypeAlias = Path | Sequence[Path] | Mapping[str, Sequence[Path]]  # one file, several, or several by split

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for machines.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
OverwriteRun = Annotated[
    bool, typer.Option("--overwrite", help="Replace the run in the folder; the old run is kept until the new one ends.")
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:1; auto: a GPU where there is one.")]
HeadKind = Annotated[
    str | None, typer.Option(help="Kind of head to load instead of the one in config.json, e.g. masked_lm.")
]
OutputDir = Annotated[
    Path | None, typer.Option("--output", "-o", help="The run folder; an interrupted run in it is resumed.")
]
Recipe = Annotated[
    Path | None,
    typer.Option(help="Settings as a .toml or .json file, from heedful init TASK or heedful recipe cp NAME."),
]
OnBadRow = Annotated[
    str, typer.Option("--on-bad-row", help='"raise", or "skip" to count bad rows and write them to a file.')
]
Checkpoint = Annotated[
    str | None,
    typer.Option(help="Weights of a finished RUN to use: best, last, or a step; by default those of its model."),
]
KeepCheckpoints = Annotated[
    bool, typer.Option("--keep-checkpoints", help="Keep all checkpoints, with the optimizer, when the run is finished.")
]


def check_track(names: list[str] | None) -> list[str] | None:
    """Check the names of --track, and return them.

    Raises:
        HeedfulError: If a tracker is unknown or not installed.
    """
    from heedful.runs.trackers import check_trackers

    return names and list(check_trackers(names))


Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        help="Report to csv, tensorboard, wandb, mlflow or trackio; repeat it for several.",
        callback=check_track,
    ),
]
PRECISIONS: tuple[PrecisionOrAuto, ...] = get_args(PrecisionOrAuto)
Precision = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, float16, int8, or auto: the fastest that hardly changes predictions; by default "
        "float32, on a GPU bfloat16."
    ),
]


def check_on_bad_row(value: str) -> Literal["raise", "skip"]:
    """Return the value of --on-bad-row, or raise a SettingError if it is unknown."""
    match value:
        case "raise" | "skip":
            return value
    raise SettingError(
        f'--on-bad-row is "{value}"{did_you_mean(value, ["raise", "skip"])}: use raise or skip', source="--on-bad-row"
    )


def check_precision_option(value: str | None) -> PrecisionOrAuto | None:
    """Return the value of --precision, or raise a SettingError if it is unknown; None means the default."""
    if value is None:
        return None
    for precision in PRECISIONS:
        if value == precision:
            return precision
    raise SettingError(
        f"--precision is {value!r}{did_you_mean(value, PRECISIONS)}: use one of {', '.join(PRECISIONS)}",
        source="--precision",
    )


def check_free(folder: Path, overwrite: bool) -> None:
    """Raise a HeedfulError if `folder` exists and is not empty, unless `overwrite` is set."""
    try:
        if overwrite or not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return
    except OSError as error:
        raise HeedfulError(f"{folder} cannot be written: {error.strerror}") from None
    raise HeedfulError(f"{folder} exists and is not empty: give another folder, or --overwrite to replace it")


def checkpoint_path(run: str, name: str | None) -> str:
    """Return the folder of a checkpoint of a run, or the run itself if `name` is None."""
    from heedful.runs.checkpoints import find_checkpoint

    return run if name is None else str(find_checkpoint(run, name))


def checkpoint_flags(keep: bool) -> dict[str, dict[str, bool]]:
    """Return the settings that --keep-checkpoints sets, by flag, or {} if it was not given."""
    return {"--keep-checkpoints": {"fit.keep_checkpoints": True}} if keep else {}


def replacing_run(folder: Path, group: Ranks, overwrite: bool) -> AbstractContextManager[None]:
    """Return a context for a new run. With --overwrite, the old run is removed when the new one has finished."""
    from heedful.runs.overwrite import overwriting

    return overwriting(folder, group, note) if overwrite else nullcontext()


def with_trackers(reporter: Reporter, track: list[str] | None) -> Reporter:
    """Return a reporter that also writes to the trackers of --track."""
    from heedful.runs.tracking_reporter import TrackingReporter

    return TrackingReporter(reporter, track) if track else reporter


def note_aliases(overrides: Overrides, others: Mapping[str, str] | None = None) -> None:
    """Print the canonical name of each alias that the user wrote, on the main process only.

    Args:
        overrides: Settings of the command.
        others: Canonical names of further aliases, such as those of tasks, by alias.
    """
    if os.environ.get("RANK", "0") == "0":
        for alias, name in {**(others or {}), **overrides.renamed}.items():
            note(f"{escape(alias)} is {name} here")


def first_file(data: DataFiles) -> Path:
    """Return the first data file. If there are several splits, it is the first one of the first split."""
    if isinstance(data, Mapping):
        data = next(iter(data.values()))
    return data if isinstance(data, Path) else data[0]
