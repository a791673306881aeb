"""The verb predict over files: what is asked of it, how far it is, and what came out."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from heedful.cli.output import escape, format_duration, note, note_data_settings, print_table, write_json
from heedful.errors import HeedfulError, did_you_mean

if TYPE_CHECKING:
    from heedful.infer.batch import Progress, Summary
    from heedful.infer.batch.writers import Format
    from heedful.infer.engine import Engine

EVERY = 30.0  # seconds between plain lines
FORMATS = ("parquet", "jsonl", "csv", "conll")


def predict_files(
    run: str,
    engine: Engine,
    files: list[Path],
    out: Path | None,
    *,
    rows: int,
    form: str,
    without_inputs: bool,
    assignments: list[str],
    top_k: int,
    as_json: bool,
) -> None:
    """Answer files into a folder; they are read as the run read its data."""
    from heedful.data import DataOptions
    from heedful.data.inputs.input_files import as_asked
    from heedful.data.labelled.data_file import bare_name
    from heedful.infer.batch import BatchSettings
    from heedful.infer.batch import predict_files as answer
    from heedful.infer.batch.single_file import parts_folder
    from heedful.runs.data_settings import run_settings_and_files
    from heedful.runs.overrides import override
    from heedful.runs.run_folder import label_layout

    settings = BatchSettings(rows=rows, format=_format(form, out), inputs=not without_inputs)
    folder = out or Path(f"{bare_name(files[0].absolute())[0]}-answers")
    first = os.environ.get("RANK", "0") == "0"
    chosen = override(DataOptions(), assignments).data
    trained, names = run_settings_and_files(run)
    trained = replace(trained, format=trained.format or label_layout(run))
    usual = as_asked(trained, engine.kind, files, chosen, exclude=folder, names=names)
    if first and not as_json:
        note_data_settings(usual)
    data = override(DataOptions(data=usual), assignments).data
    with PredictProgress(quiet=as_json or not first) as told:
        try:
            done = answer(engine, files, folder, settings, data=data, top_k=top_k, on_progress=told)
        except KeyboardInterrupt:
            parts = parts_folder(folder, settings.format)
            note(f"stopped: what is finished is in {escape(str(parts))}. The same command resumes it.")
            raise SystemExit(130) from None
    if not first:
        return
    if as_json:
        return write_json(asdict(done) | {"folder": str(done.folder)})
    for sentence in done.stated:
        note(escape(sentence))
    if done.errors:
        note(escape(f'{done.errors:,} rows have no answer; the column "error" says why: {done.first_error}'))
    speed = f", {done.made / done.seconds:,.0f} a second" if done.made else " (all were there)"
    print_table(
        [
            ["rows", f"{done.rows:,}"],
            ["answered", f"{done.answered:,}"],
            ["errors", f"{done.errors:,}"],
            ["made here", f"{done.made:,} in {format_duration(done.seconds)}{speed}"],
            ["written", f"{quote(str(done.folder))}: {_parts(done)}{done.size / 2**20:,.1f} MiB"],
        ]
    )


def _parts(done: Summary) -> str:
    return f"{done.parts:,} parts, " if done.folder.is_dir() else ""


def _format(given: str, out: Path | None) -> Format:
    """The format that is given, or that a file to write is called by."""
    suffix = out.suffix.lower().removeprefix(".") if out is not None and not out.is_dir() else ""
    if given == FORMATS[0] and suffix in FORMATS:
        given = suffix
    match given:
        case "parquet" | "jsonl" | "csv" | "conll":
            return given
    raise HeedfulError(f'--format is "{given}"{did_you_mean(given, FORMATS)}: use one of {", ".join(FORMATS)}')


class PredictProgress:
    """Rows, rows a second and time left on stderr: a live line on a terminal, a plain one now and then elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._live = quiet, sys.stderr.isatty() and not quiet
        self._said = time.monotonic()
        self._wide = 0

    def __enter__(self) -> PredictProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._wide:
            print("\r" + " " * self._wide + "\r", end="", file=sys.stderr, flush=True)

    def __call__(self, progress: Progress) -> None:
        """After each chunk of rows."""
        if self._quiet or not (self._live or time.monotonic() - self._said >= EVERY):
            return
        self._said = time.monotonic()
        text = progress_line(progress)
        if self._live:
            print("\r" + text.ljust(self._wide), end="", file=sys.stderr, flush=True)
            self._wide = len(text)
        else:
            note(text)


def progress_line(progress: Progress) -> str:
    """How far it is, in one line."""
    if progress.waiting:
        return f"waiting for {progress.waiting:,} parts that other processes make"
    errors = f", {progress.errors:,} without an answer" if progress.errors else ""
    left = "" if progress.left is None else f", about {format_duration(progress.left)} left"
    return f"{progress.rows:,} rows{errors}, {progress.speed:,.0f} rows/s, {progress.share:.0%} of the input{left}"
