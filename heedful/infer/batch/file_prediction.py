"""Batch prediction: every row of the input files is answered, in bounded memory, and written into numbered parts."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import nn

from heedful.atomic_io import as_bytes, remove
from heedful.data.bad_rows import shown
from heedful.data.inputs.input_files import InputFile, InputRow, file_stamp, open_inputs, without_split_settings
from heedful.data.inputs.tables import CONLL_COLUMNS
from heedful.data.labelled.class_folders import list_text_files
from heedful.data.labelled.data_file import DataSettings
from heedful.errors import HeedfulError
from heedful.infer.batch.per_input import answer_encoded_each, tokenize_each
from heedful.infer.batch.shared_output import SharedOutput, Tally, open_output
from heedful.infer.batch.single_file import check_output_is_new, join_parts, parts_folder
from heedful.infer.batch.text_writers import LostLines, csv_header, write_conll, write_csv
from heedful.infer.batch.writers import AnswerRow, Format, answer_schema, write_jsonl, write_parquet
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.encoded_input import EncodedInput
from heedful.infer.engine import Engine
from heedful.settings import to_mapping
from heedful.tasks.answering import Answer

VERSION = 1  # version of the format of the folder
CHUNK_ROWS = 1024  # rows that are tokenized and answered together
WIDE_CHUNK_ROWS = 128  # CHUNK_ROWS for WIDE_HEADS
WIDE_HEADS = ("masked_lm", "pretraining", "language_model")  # heads with logits over the vocabulary
CHUNK_CHARACTERS = 200_000  # characters after which a chunk ends; tokens take some hundred times their memory
CHUNKS_AHEAD = 2  # tokenized chunks that wait for the model


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """Settings of the files with answers."""

    rows: int = 10_000  # input rows in each part
    format: Format = "parquet"
    inputs: bool = True  # whether to write the input columns beside the answers

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise HeedfulError(f"rows is {self.rows}: give how many rows a part has, from 1")
        if self.format == "conll" and not self.inputs:
            raise HeedfulError(
                "format is conll, which writes the lines of the input with their tags: do not set inputs to false"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchProgress:
    """Progress of this process in a batch prediction."""

    rows: int = 0  # rows processed so far, including those with errors
    errors: int = 0  # rows with an error
    parts: int = 0  # parts written by this process
    share: float = 0.0  # share of the input that was read, from 0 to 1
    speed: float = 0.0  # rows per second
    left: float | None = None  # estimated remaining seconds, or None if not known yet
    waiting: int = 0  # parts that other processes are still writing


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSummary:
    """Counts over all processes, and over this call of `predict_files`."""

    folder: Path  # the folder of the parts, or the single file
    parts: int
    rows: int
    answered: int  # rows with an answer
    errors: int  # rows with an error
    first_error: str  # first error, with file and line, or "" without errors
    size: int  # bytes of all parts
    new_rows: int  # rows processed by this call, not by other processes or earlier calls
    seconds: float  # duration of this call
    stated: tuple[str, ...]  # notes on the files, such as how columns were recognized


class _RowChunk(NamedTuple):
    """Tokenized rows of one part."""

    part: int  # number of the part
    rows: list[tuple[InputFile, InputRow]]
    encoded_inputs: list[EncodedInput]  # inputs of the rows without an error
    errors: list[str | None]  # error of each row, or None
    is_last: bool  # whether it is the last chunk of the part
    share: float  # share of the input that was read, from 0 to 1


DEFAULT_SETTINGS, DEFAULT_DATA = BatchSettings(), DataSettings()


def predict_files(
    model: BundleEngine | str | Path,
    files: Sequence[str | Path] | str | Path,
    output: str | Path,
    settings: BatchSettings = DEFAULT_SETTINGS,
    *,
    data: DataSettings = DEFAULT_DATA,
    top_k: int = 5,
    on_progress: Callable[[BatchProgress], None] | None = None,
) -> BatchSummary:
    """Answer every row of the files, and write the answers into parts in a folder, or into one file.

    A row that cannot be read or answered gets an `error`. A call that was stopped is resumed by the same call. Several
    calls at once, also on machines that share the folder, divide the parts between them. Each call returns when all
    parts are finished.

    Args:
        model: An engine, or a model as for `Engine`.
        files: Files, and folders of files.
        output: A folder, or a new file with the suffix of the format: .csv, .jsonl or .conll.
        settings: Format and size of the parts.
        data: Settings for reading the files.
        top_k: Number of candidates that are listed for each mask.
        on_progress: Called after each chunk of rows.

    Raises:
        HeedfulError: If the files cannot be used, the folder holds other answers, or it cannot be written.
    """
    start = time.monotonic()
    engine = model if isinstance(model, BundleEngine) else Engine(model)
    if top_k < 1:
        raise HeedfulError(f"top_k is {top_k}: give how many candidates to list, from 1")
    folder = parts_folder(Path(output), settings.format)
    is_single_file = folder != Path(output)
    paths = [files] if isinstance(files, str | Path) else files
    input_files = open_inputs(paths, engine.input_kind, data, exclude=folder)
    if settings.format == "conll":
        _require_conll(input_files)
    plan = _plan(engine, input_files, settings, data, top_k)
    file_notes = _file_notes(input_files)
    try:
        with open_output(folder, plan, settings.format, shared=not is_single_file) as shared_output:
            if is_single_file:  # check again: another process may have finished it before this one got the lock
                check_output_is_new(Path(output))
            run = _Run(engine, input_files, settings, top_k, shared_output, on_progress)
            record = shared_output.done() or run.all_parts()
            if is_single_file:
                join_parts(folder, Path(output), settings.format, run.header)
        if is_single_file:
            remove(folder)
    except OSError as error:
        raise HeedfulError(
            f"{output}: answers could not be written: {error.strerror or error}. Correct that and give the same "
            "command again: it resumes after the finished parts"
        ) from error
    tallies = record["each"]
    lost_lines = record.get("lost_lines", "")  # a record of an earlier version lacks it
    return BatchSummary(
        folder=Path(output),
        parts=record["parts"],
        rows=record["rows"],
        answered=record["answered"],
        errors=record["errors"],
        first_error=next((tally["first_error"] for tally in tallies if tally["first_error"]), ""),
        size=record["bytes"],
        new_rows=run.rows,
        seconds=time.monotonic() - start,
        stated=(*file_notes, *_row_notes(tallies), *([lost_lines] if lost_lines else [])),
    )


def _require_conll(input_files: Sequence[InputFile]) -> None:
    """Raise a HeedfulError for an input file that is not in CoNLL format."""
    for input_file in input_files:
        if input_file.table is not None and input_file.table.names != CONLL_COLUMNS:
            raise HeedfulError(
                f"{input_file.path}: is no CoNLL file; the format conll adds tags to such files: give another format"
            )


def _file_notes(input_files: Sequence[InputFile]) -> list[str]:
    """Return the notes on how the files were read, without duplicates."""
    texts = (text for input_file in input_files for text in (*input_file.notes, *input_file.first_cells))
    return list(dict.fromkeys(texts))


def _row_notes(tallies: Sequence[Tally]) -> list[str]:
    """Return notes on rows with unknown keys or empty texts."""
    notes = []
    if left_out := sorted({name for tally in tallies for name in tally["left_out"]}):
        notes.append(
            f"keys that are missing from the first row of their file are left out: {', '.join(map(shown, left_out))}"
        )
    if empty := sum(tally.get("empty", 0) for tally in tallies):
        notes.append(f"{empty:,} rows have an empty text, which is answered like any other")
    return notes


# ---------------------------------------------------------------------------------------------------- plan


def _plan(
    engine: BundleEngine, input_files: Sequence[InputFile], settings: BatchSettings, data: DataSettings, top_k: int
) -> dict[str, object]:
    """Return all facts that determine the content of the parts, as plain data."""
    return {
        "version": VERSION,
        "precision": engine.precision,
        "model": fingerprint(engine),
        "settings": to_mapping(settings) | {"top_k": top_k},
        "data": to_mapping(without_split_settings(data)),
        "columns": {file.name: list(file.roles) for file in input_files},
        "order": [file.name for file in input_files],
        "files": {file.name: {"bytes": file.size, "sha256": _sha256(file.path)} for file in input_files},
    }


def fingerprint(engine: BundleEngine) -> str:
    """Return "sha256:..." of all facts that determine the answers of an engine.

    These are weights, configuration, tokenizer, thresholds, options, token pruning, and the stages of a cascade.
    """
    bundle = engine.loaded
    digest = hashlib.sha256()
    if bundle.token_pruning is not None:
        digest.update(repr(bundle.token_pruning).encode())
    for stage, threshold in engine.stages[:-1]:
        digest.update(f"{fingerprint(stage)} from {threshold!r} ".encode())
    # tensors are hashed in the dtype of the embedding: a plan may keep norms in float32, depending on the machine
    dtype = next(bundle.parameters()).dtype
    for name, stored in sorted(bundle.named_tensors().items()):
        tensor = stored.to(dtype) if isinstance(stored, nn.Parameter) else stored
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(as_bytes(tensor))
    config, thresholds = bundle.config, sorted(bundle.thresholds.items())
    writing = engine.writing if engine.kind == "language_model" else None
    facts = (
        config.family,
        config.model,
        config.head,
        thresholds,
        bundle.text_suffix,
        engine.limit,
        engine.max_length,
        writing,
        engine.min_confidence,
        engine.prediction_set and (engine.prediction_set, bundle.calibration),
        engine.candidates,
    )
    digest.update(f"{facts!r} {engine.tokenizer.fingerprint}".encode(errors="backslashreplace"))
    return f"sha256:{digest.hexdigest()}"


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file; for a folder, of the names and hashes of its text files."""
    if path.is_dir():
        lines = (f"{text_path.relative_to(path)} {_sha256(text_path)}\n" for text_path in list_text_files(path))
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise HeedfulError(f"{path}: cannot be read: {error.strerror}") from None


# ---------------------------------------------------------------------------------------------------- running


class _Run:
    """One call of `predict_files`: a reader thread tokenizes rows, and the calling thread answers and writes them."""

    def __init__(
        self,
        engine: BundleEngine,
        input_files: Sequence[InputFile],
        settings: BatchSettings,
        top_k: int,
        shared_output: SharedOutput,
        on_progress: Callable[[BatchProgress], None] | None,
    ) -> None:
        self.rows = self.errors = self.parts = 0  # counts of this process, see `BatchProgress`
        self._engine, self._input_files, self._settings, self._top_k = engine, input_files, settings, top_k
        self._shared_output, self._on_progress = shared_output, on_progress
        # answers and errors in the current part, by repr() of the input
        self._part_answers: dict[str, Answer | str] = {}
        self._input_rows = 0  # rows of all files; 0 until they were read to the end
        self._lost_lines = LostLines()
        self._start: tuple[float, float] | None = None  # (time.monotonic(), share read) at the first chunk
        has_fixed_columns = settings.format in ("parquet", "csv")
        self._schema = answer_schema(engine, input_files, inputs=settings.inputs) if has_fixed_columns else None
        self._max_chunk_rows = WIDE_CHUNK_ROWS if engine.kind in WIDE_HEADS else CHUNK_ROWS

    def all_parts(self) -> Tally:
        """Write parts, or wait for other processes, until all parts are finished; return the record of all parts."""
        while True:
            self._write_unclaimed_parts()
            count = -(-self._input_rows // self._settings.rows)
            unfinished = [number for number in range(count) if self._shared_output.finished(number) is None]
            if unfinished:
                self._report_progress(1.0, waiting=len(unfinished))
                if self._shared_output.wait(unfinished):
                    continue
            if changed := [str(file.path) for file in self._input_files if file_stamp(file.path) != file.stamp]:
                raise HeedfulError(f"{', '.join(changed)}: changed while it was read: answer it again in a new folder")
            return self._shared_output.finish(count, {"version": VERSION, "lost_lines": self._lost_lines.note})

    def _write_unclaimed_parts(self) -> None:
        """Read the input once, and write every part that no other process has claimed or finished."""
        chunk_queue: queue.Queue[_RowChunk | BaseException | None] = queue.Queue(CHUNKS_AHEAD)
        stop = threading.Event()
        reader = threading.Thread(target=self._fill_queue, args=(chunk_queue, stop), name="heedful-reader", daemon=True)
        reader.start()
        try:
            chunks = _queued_chunks(chunk_queue)
            for first_chunk in chunks:
                self._write_part(first_chunk, chunks)
        finally:
            stop.set()
            reader.join()

    def _write_part(self, first_chunk: _RowChunk, further_chunks: Iterator[_RowChunk]) -> None:
        """Answer and write the part that begins with `first_chunk`."""
        self._part_answers.clear()  # a part must have the same content whatever parts this process wrote before
        tally: Tally = {"rows": 0, "answered": 0, "errors": 0, "first_error": "", "left_out": [], "empty": 0}
        rows = self._answered_rows(first_chunk, further_chunks, tally)
        self._shared_output.write(first_chunk.part, self._part_bytes(rows), lambda: tally)
        self._shared_output.release(first_chunk.part)
        self.parts += 1

    def _part_bytes(self, rows: Iterator[list[AnswerRow]]) -> Iterator[bytes]:
        """Yield the bytes of a part in the format of the settings."""
        if self._settings.format == "conll":
            return write_conll(rows)
        if self._schema is None:
            return write_jsonl(rows, inputs=self._settings.inputs)
        return (
            write_parquet(rows, self._schema) if self._settings.format == "parquet" else write_csv(rows, self._schema)
        )

    @property
    def header(self) -> bytes:
        """The bytes with which every part begins."""
        return csv_header(self._schema) if self._settings.format == "csv" and self._schema is not None else b""

    def _answered_rows(
        self, chunk: _RowChunk, further_chunks: Iterator[_RowChunk], tally: Tally
    ) -> Iterator[list[AnswerRow]]:
        """Yield the rows of a part with their answers, one chunk at a time, and count them in `tally`."""
        has_fixed_inputs = self._schema is not None and self._settings.inputs
        while True:
            self._start = self._start or (time.monotonic(), chunk.share)
            answers = iter(self._answers(chunk.encoded_inputs))
            tally["empty"] += sum(_is_empty(encoded_input.engine_input) for encoded_input in chunk.encoded_inputs)
            answer_rows = []
            for (input_file, row), error in zip(chunk.rows, chunk.errors, strict=True):
                outcome = error or next(answers)
                answer, message = (None, outcome) if isinstance(outcome, str) else (outcome, None)
                answer_row = AnswerRow(
                    file=input_file.file_name(row),
                    row=row.number,
                    line=row.line,
                    cells=None if row.cells is None else input_file.cells_by_name(row.cells),
                    answer=answer,
                    error=message,
                )
                answer_rows.append(answer_row)
                _count_row(tally, answer_row, input_file, has_fixed_inputs)
            self.rows += len(answer_rows)
            self.errors += sum(answer_row.error is not None for answer_row in answer_rows)
            yield answer_rows
            self._report_progress(chunk.share)
            if chunk.is_last:
                return
            chunk = next(further_chunks)

    def _answers(self, encoded_inputs: Sequence[EncodedInput]) -> list[Answer | str]:
        """Return the answer or the error of each input; equal inputs of a part are answered only once."""
        keys = [repr(encoded_input.engine_input) for encoded_input in encoded_inputs]
        new_inputs = {
            key: encoded_input
            for key, encoded_input in zip(keys, encoded_inputs, strict=True)
            if key not in self._part_answers
        }
        answers = answer_encoded_each(self._engine, list(new_inputs.values()), top_k=self._top_k)
        self._part_answers.update(zip(new_inputs, answers, strict=True))
        return [self._part_answers[key] for key in keys]

    def _report_progress(self, share: float, waiting: int = 0) -> None:
        """Call `on_progress` with the counts, the speed and the estimated remaining time."""
        if self._on_progress is None:
            return
        speed, left = 0.0, None
        if self._start is not None:
            start_time, start_share = self._start
            seconds = max(time.monotonic() - start_time, 1e-9)
            speed = self.rows / seconds
            if share > start_share:
                left = seconds * (1 - share) / (share - start_share)
        self._on_progress(
            BatchProgress(
                rows=self.rows,
                errors=self.errors,
                parts=self.parts,
                share=share,
                speed=speed,
                left=left,
                waiting=waiting,
            )
        )

    # -- the reader thread

    def _fill_queue(self, chunk_queue: queue.Queue[_RowChunk | BaseException | None], stop: threading.Event) -> None:
        """Put chunks into the queue, and at the end None, or the exception that stopped reading."""
        end: BaseException | None = None
        try:
            for chunk in self._chunks():
                if not _put(chunk_queue, chunk, stop):
                    return
        except BaseException as error:  # the caller's thread raises it
            end = error
        _put(chunk_queue, end, stop)

    def _chunks(self) -> Iterator[_RowChunk]:
        """Yield the tokenized rows of all parts that this process can claim."""
        part_rows = self._settings.rows
        rows: list[tuple[InputFile, InputRow]] = []
        inputs: list[tuple[object, str | None]] = []  # (input, None) or (None, error) of each row
        characters, number, is_claimed = 0, 0, False

        def take_chunk(part: int, is_last: bool) -> _RowChunk:
            nonlocal characters
            encoded_inputs, errors = tokenize_each(self._engine, inputs)
            chunk = _RowChunk(
                part=part,
                rows=rows.copy(),
                encoded_inputs=encoded_inputs,
                errors=errors,
                is_last=is_last,
                share=self._share_read(rows[-1][0]),
            )
            rows.clear()
            inputs.clear()
            characters = 0
            return chunk

        for input_file, row in self._all_rows():
            part, row_in_part = divmod(number, part_rows)
            if row_in_part == 0:
                if is_claimed:
                    yield take_chunk(part - 1, True)
                is_claimed = self._shared_output.claim(part)
            number += 1
            if not is_claimed:
                continue
            if len(rows) >= self._max_chunk_rows or characters >= CHUNK_CHARACTERS:
                yield take_chunk(part, False)
            rows.append((input_file, row))
            inputs.append(input_file.engine_input(row))
            characters += _count_characters(inputs[-1][0])
        if is_claimed:
            yield take_chunk((number - 1) // part_rows, True)
        self._input_rows = number

    def _all_rows(self) -> Iterator[tuple[InputFile, InputRow]]:
        """Yield the rows of all files, and for the format conll find the lines that the output lacks."""
        self._lost_lines = LostLines()  # all files are read again if another process did not finish a part
        for input_file in self._input_files:
            rows = self._lost_lines.rows(input_file) if self._settings.format == "conll" else input_file.rows()
            for row in rows:
                yield input_file, row

    def _share_read(self, current: InputFile) -> float:
        """Return the share of all input bytes that was read, from 0 to 1; `current` is the file being read."""
        finished_files = self._input_files[: self._input_files.index(current)]
        bytes_read = sum(file.size for file in finished_files) + current.fraction_read * current.size
        return min(1.0, bytes_read / max(sum(file.size for file in self._input_files), 1))


def _queued_chunks(chunk_queue: queue.Queue[_RowChunk | BaseException | None]) -> Iterator[_RowChunk]:
    """Yield the chunks of a queue until it returns None; raise an exception that it returns."""
    while (chunk := chunk_queue.get()) is not None:
        if isinstance(chunk, BaseException):
            raise chunk
        yield chunk


def _put(
    chunk_queue: queue.Queue[_RowChunk | BaseException | None],
    value: _RowChunk | BaseException | None,
    stop: threading.Event,
) -> bool:
    """Put a value into a queue, waiting while it is full; return False if `stop` is set before there is room."""
    while not stop.is_set():
        try:
            chunk_queue.put(value, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def _count_row(tally: Tally, row: AnswerRow, input_file: InputFile, has_fixed_inputs: bool) -> None:
    """Count a row in the tally; if the input columns are fixed, also note keys of the row that have no column."""
    tally["rows"] += 1
    tally["answered" if row.error is None else "errors"] += 1
    if row.error is not None and not tally["first_error"]:
        tally["first_error"] = f"{row.file}:{row.line}: {row.error}"[:500]
    if has_fixed_inputs and row.cells is not None and len(tally["left_out"]) < 20:
        unknown_keys = [
            name for name in row.cells if name not in input_file.column_name_set and name not in tally["left_out"]
        ]
        tally["left_out"] += unknown_keys[:20]


def _is_empty(engine_input: object) -> bool:
    """Return whether one of an input's texts is empty or white space."""
    match engine_input:
        case str():
            return not engine_input.strip()
        case tuple():
            return any(map(_is_empty, engine_input))
    return False


def _count_characters(engine_input: object) -> int:
    """Return the number of characters in the texts of an input, plus one for each item of a list."""
    match engine_input:
        case str():
            return len(engine_input)
        case dict():
            return sum(map(_count_characters, engine_input.values()))
        case list() | tuple():
            return sum(map(_count_characters, engine_input)) + len(engine_input)
    return 0
