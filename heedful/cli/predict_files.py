"""`heedful predict --file`: settings, progress and summary of batch prediction."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from heedful.cli.output import escape, format_duration, note, note_data_settings, print_json, print_table
from heedful.errors import SettingError, did_you_mean

if TYPE_CHECKING:
    from heedful.infer.batch import BatchProgress, BatchSummary
    from heedful.infer.batch.writers import Format
    from heedful.infer.engine import Engine

LINE_INTERVAL = 30.0  # seconds between lines, if there is no live line
FORMATS = ("parquet", "jsonl", "csv", "conll")


def predict_files(
    run: str,
    engine: Engine,
    files: list[Path],
    out: Path | None,
    *,
    rows: int,
    file_format: str,
    without_inputs: bool,
    assignments: list[str],
    top_k: int,
    as_json: bool,
) -> None:
    """Predict on files, write the predictions, and print a summary.

    Files are read with the data settings of the run, unless `assignments` change them.

    Args:
        run: Name or path of the model, from the command line.
        engine: The model.
        files: Files and folders to read.
        out: Folder or file to write. If None, a folder that is named after the first file.
        rows: Rows per file in the folder.
        file_format: Value of --format.
        without_inputs: Whether to write predictions without the inputs.
        assignments: Data settings, as "NAME=VALUE".
        top_k: Number of candidates that each prediction lists.
        as_json: Whether to print the summary as JSON.

    Raises:
        SystemExit: With code 130, if the command is interrupted.
    """
    from heedful.data import DataOptions
    from heedful.data.labelled.data_file import stem_and_suffix
    from heedful.infer.batch import BatchSettings
    from heedful.infer.batch import predict_files as run_prediction
    from heedful.infer.batch.single_file import parts_folder
    from heedful.runs.data_settings import input_settings_for
    from heedful.runs.overrides import override

    batch_settings = BatchSettings(rows=rows, format=_output_format(file_format, out), inputs=not without_inputs)
    folder = out or Path(f"{stem_and_suffix(files[0].absolute())[0]}-answers")
    is_main = os.environ.get("RANK", "0") == "0"
    overrides = override(DataOptions(), assignments).data
    run_settings = input_settings_for(run, engine.input_kind, files, overrides, exclude=folder)
    if is_main and not as_json:
        note_data_settings(run_settings)
    settings = override(DataOptions(data=run_settings), assignments).data
    with PredictProgress(quiet=as_json or not is_main) as progress:
        try:
            summary = run_prediction(
                engine, files, folder, batch_settings, data=settings, top_k=top_k, on_progress=progress
            )
        except KeyboardInterrupt:
            parts = parts_folder(folder, batch_settings.format)
            note(f"stopped: finished rows are in {escape(str(parts))}. The same command resumes it.")
            raise SystemExit(130) from None
    if not is_main:
        return
    if as_json:
        return print_json(asdict(summary) | {"folder": str(summary.folder)})
    for sentence in summary.stated:
        note(escape(sentence))
    if summary.errors:
        mark = 'their words have the tag "_"' if batch_settings.format == "conll" else 'see the column "error"'
        note(escape(f"{summary.errors:,} rows failed; {mark}: {summary.first_error}"))
    speed = f", {summary.new_rows / summary.seconds:,.0f} rows/s" if summary.new_rows else " (all existed already)"
    print_table(
        [
            ["rows", f"{summary.rows:,}"],
            ["answered", f"{summary.answered:,}"],
            ["errors", f"{summary.errors:,}"],
            ["by this process", f"{summary.new_rows:,} in {format_duration(summary.seconds)}{speed}"],
            ["written", f"{quote(str(summary.folder))}: {_part_count(summary)}{summary.size / 2**20:,.1f} MiB"],
        ]
    )


def _part_count(summary: BatchSummary) -> str:
    """Return the number of files in the output folder as text, or "" if the output is one file."""
    return f"{summary.parts:,} parts, " if summary.folder.is_dir() else ""


def _output_format(file_format: str, out: Path | None) -> Format:
    """Return the format of --format, or that of the output file's suffix if --format was not given.

    Raises:
        SettingError: If the format is unknown.
    """
    suffix = out.suffix.lower().removeprefix(".") if out is not None and not out.is_dir() else ""
    if file_format == FORMATS[0] and suffix in FORMATS:
        file_format = suffix
    match file_format:
        case "parquet" | "jsonl" | "csv" | "conll":
            return file_format
    known = ", ".join(FORMATS)
    raise SettingError(
        f'--format is "{file_format}"{did_you_mean(file_format, FORMATS)}: use one of {known}', source="--format"
    )


class PredictProgress:
    """Reports rows, rows/s and time left on stderr: a live line on a terminal, or else a line every 30 seconds.

    Args:
        quiet: Whether to print nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._last_line = time.monotonic()
        self._width = 0  # length of the live line, in characters

    def __enter__(self) -> PredictProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)

    def __call__(self, progress: BatchProgress) -> None:
        """Report after a chunk of rows."""
        if self._quiet or not (self._live or time.monotonic() - self._last_line >= LINE_INTERVAL):
            return
        self._last_line = time.monotonic()
        text = progress_line(progress)
        if self._live:
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            note(text)


def progress_line(progress: BatchProgress) -> str:
    """Return the progress of a prediction as one line."""
    if progress.waiting:
        return f"waiting for {progress.waiting:,} parts of other processes"
    errors = f", {progress.errors:,} failed" if progress.errors else ""
    time_left = "" if progress.left is None else f", about {format_duration(progress.left)} left"
    share = f"{100 * progress.share:.0f} % of the input"
    return f"{progress.rows:,} rows{errors}, {progress.speed:,.0f} rows/s, {share}{time_left}"
