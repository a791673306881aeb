"""Files in, files out: every row is answered, in parts that are there whole or not at all, in bounded memory."""

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

from heedful.atomic_io import as_bytes
from heedful.data.bad_rows import shown
from heedful.data.inputs.input_files import InputFile, InputRow, file_stamp, open_inputs, without_split_settings
from heedful.data.inputs.tables import CONLL_COLUMNS
from heedful.data.labelled.class_folders import list_text_files
from heedful.data.labelled.data_file import DataSettings
from heedful.errors import HeedfulError
from heedful.infer.batch.per_input import answer_encoded_each, tokenize_each
from heedful.infer.batch.shared_output import SharedOutput, Tally, open_output
from heedful.infer.batch.single_file import join_parts, parts_folder
from heedful.infer.batch.text_writers import csv_header, write_conll, write_csv
from heedful.infer.batch.writers import AnswerRow, Format, answer_schema, write_jsonl, write_parquet
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.encoded_input import EncodedInput
from heedful.infer.engine import Engine
from heedful.infer.tuning.execution_plan import activation_dtype
from heedful.settings import to_mapping
from heedful.tasks.answering import Answer

VERSION = 1
CHUNK_ROWS = 1024  # rows that go through the model together
WIDE_CHUNK_ROWS = 128  # the same where the scores of a row are as many as the vocabulary
CHUNK_CHARACTERS = 200_000  # of such rows: their tokens take some hundred times that
CHUNKS_AHEAD = 2  # chunks that wait for the model with their tokens
WIDE_HEADS = ("masked_lm", "pretraining", "language_model")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """How answers are written."""

    rows: int = 10_000  # of the input, in each part
    format: Format = "parquet"
    inputs: bool = True  # write the columns of the input beside the answers

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise HeedfulError(f"rows is {self.rows}: give how many rows a part has, from 1")
        if self.format == "conll" and not self.inputs:
            raise HeedfulError(
                "format is conll, which is the lines of the input with their tags: leave inputs as it is"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchProgress:
    """How far this process is."""

    rows: int = 0  # that it answered, bad ones too
    errors: int = 0
    parts: int = 0  # that it finished
    share: float = 0.0  # of the input that is read
    speed: float = 0.0  # rows a second
    left: float | None = None  # seconds
    waiting: int = 0  # parts that other processes still make


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSummary:
    """All answers of all processes, and what this one did."""

    folder: Path
    parts: int
    rows: int
    answered: int
    errors: int
    first_error: str  # with its file and row; "" without errors
    size: int  # bytes
    new_rows: int  # rows that this call answered; the others were there, or other processes made them
    seconds: float
    stated: tuple[str, ...]  # what was found out about the files


class _Chunk(NamedTuple):
    """Rows of one part on their way."""

    part: int
    rows: list[tuple[InputFile, InputRow]]
    asked: list[EncodedInput]  # of the rows without an error
    errors: list[str | None]
    last: bool
    share: float


DEFAULT, DATA = BatchSettings(), DataSettings()


def predict_files(
    model: BundleEngine | str | Path,
    files: Sequence[str | Path] | str | Path,
    output: str | Path,
    settings: BatchSettings = DEFAULT,
    *,
    data: DataSettings = DATA,
    top_k: int = 5,
    on_progress: Callable[[BatchProgress], None] | None = None,
) -> BatchSummary:
    """Answer every row of files, and of folders with files, into parts in the folder `output`, or into one file.

    One file is made where the suffix of `output` is that of the format: .csv, .jsonl or .conll.

    Rows that cannot be read or answered get an `error`. The same call resumes one that was stopped or killed, and
    several at once, on machines that share the folder, divide the parts between them; each ends when all are finished.
    """
    start = time.monotonic()
    engine = model if isinstance(model, BundleEngine) else Engine(model)
    if top_k < 1:
        raise HeedfulError(f"top_k is {top_k}: give how many candidates to list, from 1")
    folder = parts_folder(Path(output), settings.format)
    several = open_inputs([files] if isinstance(files, str | Path) else files, engine.input_kind, data, exclude=folder)
    if settings.format == "conll":
        _need_conll(several)
    plan = _plan(engine, several, settings, data, top_k)
    stated = tuple(dict.fromkeys(text for inputs in several for text in (*inputs.notes, *inputs.echo)))
    try:
        with open_output(folder, plan, settings.format) as filled:
            run = _Run(engine, several, settings, top_k, filled, on_progress)
            record = filled.done() or run.all()
        if folder != Path(output):
            join_parts(folder, Path(output), settings.format, run.header)
    except OSError as error:
        raise HeedfulError(
            f"{output}: answers could not be written: {error.strerror or error}. Mend that and give the same command: "
            f"finished parts stay, and it resumes"
        ) from error
    tallies = record["each"]
    left_out = sorted({name for tally in tallies for name in tally["left_out"]})
    if left_out:
        stated += (
            f"keys that are missing from the first row of their file are left out: {', '.join(map(shown, left_out))}",
        )
    if empty := sum(tally.get("empty", 0) for tally in tallies):
        stated += (f"{empty:,} rows have an empty text, which is answered like any other",)
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
        stated=stated,
    )


def _need_conll(several: Sequence[InputFile]) -> None:
    for inputs in several:
        if inputs.table is not None and inputs.table.names != CONLL_COLUMNS:
            raise HeedfulError(
                f"{inputs.path}: is no CoNLL file, to whose lines a column is added: give another format"
            )


# ---------------------------------------------------------------------------------------------------- plan


def _plan(
    engine: BundleEngine, several: Sequence[InputFile], settings: BatchSettings, data: DataSettings, top_k: int
) -> dict[str, object]:
    """All that decides what the parts hold."""
    return {
        "version": VERSION,
        "precision": _precision(engine),
        "model": fingerprint(engine),
        "settings": to_mapping(settings) | {"top_k": top_k},
        "data": to_mapping(without_split_settings(data)),
        "columns": {inputs.name: list(inputs.roles) for inputs in several},
        "order": [inputs.name for inputs in several],
        "files": {inputs.name: {"bytes": inputs.size, "sha256": _digest(inputs.path)} for inputs in several},
    }


def _precision(engine: BundleEngine) -> str:
    if engine.plan is not None:
        return engine.plan.precision
    return str(next(engine.loaded.parameters()).dtype).removeprefix("torch.")


def fingerprint(engine: BundleEngine) -> str:
    """ "sha256:..." over all that decides answers: weights, configuration, tokenizer, thresholds, stages."""
    loaded = engine.loaded
    digest = hashlib.sha256()
    for stage, threshold in engine.stages[:-1]:
        digest.update(f"{fingerprint(stage)} from {threshold!r} ".encode())
    usual = None if engine.plan is None else activation_dtype(engine.plan.precision)  # some ways hold norms in float32
    for name, held in sorted(loaded.named_tensors().items()):
        tensor = held if usual is None or not isinstance(held, nn.Parameter) else held.to(usual)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(as_bytes(tensor))
    config, thresholds = loaded.config, sorted(loaded.thresholds.items())
    writing = engine.writing if engine.kind == "language_model" else None
    about = (
        config.family,
        config.model,
        config.head,
        thresholds,
        loaded.text_suffix,
        engine.limit,
        engine.max_length,
        writing,
        engine.min_confidence,
        engine.prediction_set and (engine.prediction_set, loaded.calibration),
        engine.candidates,
    )
    digest.update(f"{about!r} {engine.tokenizer.fingerprint}".encode(errors="backslashreplace"))
    return f"sha256:{digest.hexdigest()}"


def _digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and hashes of the texts in a folder."""
    if path.is_dir():
        names = (f"{text_path.relative_to(path)} {_digest(text_path)}\n" for text_path in list_text_files(path))
        return hashlib.sha256("".join(names).encode(errors="surrogateescape")).hexdigest()
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise HeedfulError(f"{path}: cannot be read: {error.strerror}") from None


# ---------------------------------------------------------------------------------------------------- running


class _Run:
    """Rows read and made into tokens in one thread, answered and written in another."""

    def __init__(
        self,
        engine: BundleEngine,
        several: Sequence[InputFile],
        settings: BatchSettings,
        top_k: int,
        filled: SharedOutput,
        on_progress: Callable[[BatchProgress], None] | None,
    ) -> None:
        self.rows = self.errors = self.parts = 0
        self._answered: dict[str, Answer | str] = {}  # to the inputs of this part
        self._engine, self._several, self._settings, self._top_k = engine, several, settings, top_k
        self._filled, self._told = filled, on_progress
        self._total = 0  # rows of the input, when it was read to its end
        self._begun: tuple[float, float] | None = None  # when the first chunk was taken up, and the share before it
        fixed = settings.format in ("parquet", "csv")  # formats with the same columns in every row
        self._schema = answer_schema(engine, several, inputs=settings.inputs) if fixed else None
        self._chunk = WIDE_CHUNK_ROWS if engine.kind in WIDE_HEADS else CHUNK_ROWS

    def all(self) -> Tally:
        """Until every part is there."""
        while True:
            self._pass()
            count = -(-self._total // self._settings.rows)
            left = [number for number in range(count) if self._filled.finished(number) is None]
            if left:
                self._tell(1.0, waiting=len(left))
                if self._filled.wait(left):
                    continue
            if changed := [str(inputs.path) for inputs in self._several if file_stamp(inputs.path) != inputs.stamp]:
                raise HeedfulError(f"{', '.join(changed)}: changed while it was read: answer it again in a new folder")
            return self._filled.finish(count, {"version": VERSION})

    def _pass(self) -> None:
        """Once through the input: every part that nobody else has is made."""
        waiting: queue.Queue[_Chunk | BaseException | None] = queue.Queue(CHUNKS_AHEAD)
        stop = threading.Event()
        reader = threading.Thread(target=self._fill, args=(waiting, stop), name="heedful-reader", daemon=True)
        reader.start()
        try:
            chunks = _until_none(waiting)
            for first in chunks:
                self._part(first, chunks)
        finally:
            stop.set()
            reader.join()

    def _part(self, first: _Chunk, others: Iterator[_Chunk]) -> None:
        """Answer and write one part."""
        self._answered.clear()  # a part is the same, whichever parts this process has answered before
        tally: Tally = {"rows": 0, "answered": 0, "errors": 0, "first_error": "", "left_out": [], "empty": 0}
        rows = self._said(first, others, tally)
        self._filled.write(first.part, self._written(rows), lambda: tally)
        self._filled.release(first.part)
        self.parts += 1

    def _written(self, rows: Iterator[list[AnswerRow]]) -> Iterator[bytes]:
        if self._schema is None:
            if self._settings.format == "conll":
                return write_conll(rows)
            return write_jsonl(rows, inputs=self._settings.inputs)
        return (
            write_parquet(rows, self._schema) if self._settings.format == "parquet" else write_csv(rows, self._schema)
        )

    @property
    def header(self) -> bytes:
        """The bytes with which every part begins."""
        return csv_header(self._schema) if self._settings.format == "csv" and self._schema is not None else b""

    def _said(self, chunk: _Chunk, others: Iterator[_Chunk], tally: Tally) -> Iterator[list[AnswerRow]]:
        while True:
            self._begun = self._begun or (time.monotonic(), chunk.share)
            answers = iter(self._answers(chunk.asked))
            tally["empty"] += sum(_is_empty(encoded.engine_input) for encoded in chunk.asked)
            answered = []
            for (inputs, row), error in zip(chunk.rows, chunk.errors, strict=True):
                answer = error or next(answers)
                cells = None if row.cells is None else inputs.named(row.cells)
                place = inputs.place(row), row.number, row.line, cells
                answered.append(
                    AnswerRow(*place, None, answer) if isinstance(answer, str) else AnswerRow(*place, answer, None)
                )
                _count(tally, answered[-1], inputs, self._schema is not None and self._settings.inputs)
            self.rows += len(answered)
            self.errors += sum(answer_row.error is not None for answer_row in answered)
            yield answered
            self._tell(chunk.share)
            if chunk.last:
                return
            chunk = next(others)

    def _answers(self, asked: Sequence[EncodedInput]) -> list[Answer | str]:
        """Answer inputs, or take the answer to an equal input of this part."""
        keys = [repr(encoded.engine_input) for encoded in asked]
        new = {key: encoded for key, encoded in zip(keys, asked, strict=True) if key not in self._answered}
        answers = answer_encoded_each(self._engine, list(new.values()), top_k=self._top_k)
        self._answered.update(zip(new, answers, strict=True))
        return [self._answered[key] for key in keys]

    def _tell(self, share: float, waiting: int = 0) -> None:
        if self._told is None:
            return
        speed, left = 0.0, None
        if self._begun is not None:
            seconds = max(time.monotonic() - self._begun[0], 1e-9)
            speed = self.rows / seconds
            if share > self._begun[1]:
                left = seconds * (1 - share) / (share - self._begun[1])
        self._told(
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

    # -- in the other thread

    def _fill(self, waiting: queue.Queue[_Chunk | BaseException | None], stop: threading.Event) -> None:
        last: _Chunk | BaseException | None = None
        try:
            for chunk in self._chunks():
                if not _give(waiting, chunk, stop):
                    return
        except BaseException as error:  # the other thread raises it
            last = error
        _give(waiting, last, stop)

    def _chunks(self) -> Iterator[_Chunk]:
        """The rows of all parts that can be claimed, with their tokens."""
        size = self._settings.rows
        rows: list[tuple[InputFile, InputRow]] = []
        parsed: list[tuple[object, str | None]] = []
        characters, number, mine = 0, 0, False

        def chunk(part: int, last: bool) -> _Chunk:
            nonlocal characters
            asked, errors = tokenize_each(self._engine, parsed)
            new_chunk = _Chunk(part, rows.copy(), asked, errors, last, self._share(rows[-1][0]))
            rows.clear()
            parsed.clear()
            characters = 0
            return new_chunk

        for inputs, row in self._numbered():
            part, place = divmod(number, size)
            if place == 0:
                if mine:
                    yield chunk(part - 1, True)
                mine = self._filled.claim(part)
            number += 1
            if not mine:
                continue
            if len(rows) >= self._chunk or characters >= CHUNK_CHARACTERS:
                yield chunk(part, False)
            rows.append((inputs, row))
            parsed.append(inputs.engine_input(row))
            characters += _size(parsed[-1][0])
        if mine:
            yield chunk((number - 1) // size, True)
        self._total = number

    def _numbered(self) -> Iterator[tuple[InputFile, InputRow]]:
        for inputs in self._several:
            for row in inputs.rows():
                yield inputs, row

    def _share(self, at: InputFile) -> float:
        place = self._several.index(at)
        whole = sum(inputs.size for inputs in self._several)
        return min(1.0, (sum(inputs.size for inputs in self._several[:place]) + at.share * at.size) / max(whole, 1))


def _until_none(waiting: queue.Queue[_Chunk | BaseException | None]) -> Iterator[_Chunk]:
    while (chunk := waiting.get()) is not None:
        if isinstance(chunk, BaseException):
            raise chunk
        yield chunk


def _give(
    waiting: queue.Queue[_Chunk | BaseException | None], value: _Chunk | BaseException | None, stop: threading.Event
) -> bool:
    """Whether it was taken before all was stopped."""
    while not stop.is_set():
        try:
            waiting.put(value, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def _count(tally: Tally, row: AnswerRow, inputs: InputFile, fixed: bool) -> None:
    tally["rows"] += 1
    tally["answered" if row.error is None else "errors"] += 1
    if row.error is not None and not tally["first_error"]:
        tally["first_error"] = f"{row.file}:{row.line}: {row.error}"[:500]
    if fixed and row.cells is not None and len(tally["left_out"]) < 20:
        more = [name for name in row.cells if name not in inputs.known and name not in tally["left_out"]]
        tally["left_out"] += more[:20]


def _is_empty(engine_input: object) -> bool:
    """Return whether an input has nothing but white space in one of its texts."""
    match engine_input:
        case str():
            return not engine_input.strip()
        case tuple():
            return any(map(_is_empty, engine_input))
    return False


def _size(engine_input: object) -> int:
    """Characters of an input."""
    match engine_input:
        case str():
            return len(engine_input)
        case dict():
            return sum(map(_size, engine_input.values()))
        case list() | tuple():
            return sum(map(_size, engine_input)) + len(engine_input)
    return 0
