"""Build a corpus of token shards from text of any size: in several processes, in bounded memory, resumable."""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heedful.atomic_io import remove_stale
from heedful.data.bad_rows import BadRowPolicy, Quarantine, Raise, RowErrors, remove_quarantine, shown
from heedful.data.corpus.dedup import Deduplicator, lsh_bands
from heedful.data.corpus.documents import CorpusSettings, DocumentReader, list_files
from heedful.data.corpus.shards import (
    ARRAYS,
    MANIFEST,
    PARTS,
    VERSION,
    Corpus,
    DedupKeys,
    ShardSpec,
    ShardWriter,
    finish,
    part_path,
    read_corpus_json,
    read_part,
    shard_name,
    write_corpus_json,
)
from heedful.data.corpus.workers import Worker, available_cores, start_workers
from heedful.data.formats.text_files import COMPRESSED
from heedful.errors import DataError
from heedful.settings import to_mapping
from heedful.tokenizer import Tokenizer

__all__ = ["Corpus", "CorpusProgress", "CorpusSettings", "build_corpus", "contains_corpus"]

PLAN, TOKENIZER = "plan.json", "tokenizer"
SMALL_INPUT_BYTES = 8_000_000  # bytes of text below which no worker is started
ProgressCallback = Callable[["CorpusProgress"], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusProgress:
    """Progress of a build; counts are of finished shards."""

    documents: int = 0
    characters: int = 0
    tokens: int = 0
    duplicates: int = 0  # skipped documents, exact and near duplicates
    short: int = 0  # skipped documents, including empty ones
    seconds: float = 0.0
    share: float = 0.0  # of the input that is read, in bytes (0-1)


DEFAULT = CorpusSettings()
STOP = Raise()


def build_corpus(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    output_dir: Path,
    settings: CorpusSettings = DEFAULT,
    *,
    processes: int | None = None,
    on_progress: ProgressCallback | None = None,
    on_bad_row: BadRowPolicy = STOP,
    exclude: Path | None = None,
) -> Corpus:
    """Build a corpus from files and the files in folders, in their order.

    An interrupted build resumes when it is called again in the same way; a finished one is opened. The result does not
    depend on `processes`.

    Args:
        files: files and folders of text, tables or Parquet.
        tokenizer: tokenizer of the corpus.
        output_dir: folder of the corpus, new, empty or with the same corpus.
        settings: how text is split into documents, and which are kept.
        processes: number of workers; None: one per core, and none for small input.
        on_progress: called with the progress.
        on_bad_row: policy for rows that cannot be used.
        exclude: folder whose files are not read, as those of `output_dir`.

    Raises:
        DataError: If files cannot be read, no document is left, or the folder has something else.
    """
    if processes is not None and processes < 1:
        raise DataError(f"processes is {processes}, expected a number from 1")
    start = time.monotonic()
    listed, notes = list_files(files, exclude or output_dir)
    with _locked(output_dir):
        plan = _planned(listed, tokenizer, output_dir, settings, on_bad_row)
        if plan is None:
            return Corpus.open(output_dir)
        source = DocumentReader([path for path, _ in listed], settings, RowErrors(on_bad_row), notes)
        size = sum(path.stat().st_size * (4 if path.suffix in COMPRESSED else 1) for path, _ in listed)
        count = 1 if size < SMALL_INPUT_BYTES else processes or available_cores()
        run = _Run(output_dir, tokenizer, settings, source, on_progress, start)
        with run:
            run.in_this_process() if count == 1 else run.with_workers(count)
        if not run.progress.documents:
            raise DataError(
                f"{', '.join(path.name for path, _ in listed[:5])}: no document is left: {run.explain_empty()}"
            )
        names, bad = {str(path): name for path, name in listed}, Counter[str]()
        for file, rows in source.row_errors.bad.items():  # by the names in the plan
            bad[names.get(file, file)] += rows
        rest = {"stated": source.notes, "cut": source.num_split, "bad_rows": dict(bad)}
        finish(output_dir, run.parts, plan | rest | {"seconds": time.monotonic() - start})
        _tidy(output_dir)
    return Corpus.open(output_dir)


def contains_corpus(folder: Path) -> bool:
    """Whether a folder contains a corpus, finished or not (a manifest.json alone may be something else)."""
    arrays = (f"{name}.bin" for name in ARRAYS)
    begun = (folder / PLAN).is_file() and (folder / PARTS).is_dir()
    return begun or any((folder / name).is_file() for name in (shard_name(0), *arrays))


# ---------------------------------------------------------------------------------------------------- plan


def _planned(
    listed: list[tuple[Path, str]], tokenizer: Tokenizer, out: Path, settings: CorpusSettings, on_bad_row: BadRowPolicy
) -> dict[str, object] | None:
    """Write the plan of a new build, or check that of an interrupted one; None if the corpus is finished.

    Raises:
        DataError: If the folder has the corpus of another plan, with the differences.
    """
    plan: dict[str, object] = {
        "version": VERSION,
        "fingerprint": tokenizer.fingerprint,
        "vocabulary": tokenizer.size,
        "dtype": "<u2" if tokenizer.size <= 1 << 16 else "<u4",
        "settings": to_mapping(settings),
        "files": [{"name": name, "bytes": path.stat().st_size, "sha256": _digest(path)} for path, name in listed],
    }
    finished, going = (out / MANIFEST).is_file(), (out / PLAN).is_file()
    if finished or going:
        old = read_corpus_json(out / (MANIFEST if finished else PLAN))
        if differing := list(_differing(old, plan)):
            raise DataError(
                f"{out}: holds {'a corpus' if finished else 'an unfinished corpus'} that is another one: "
                f"{'; '.join(differing)}. Give another folder, or remove this one"
            )
        remove_stale(out)
        if finished:
            _tidy(out)
            return None
    else:
        if others := [path.name for path in out.iterdir() if not path.name.startswith(".")]:
            raise DataError(f"{out}: holds {shown(sorted(others)[0])} and no corpus: give a new or an empty folder")
        write_corpus_json(out / PLAN, plan)  # before anything else, so that every interrupted build can resume
    if isinstance(on_bad_row, Quarantine):
        remove_quarantine(on_bad_row.file)  # all rows are read again
    (out / PARTS).mkdir(exist_ok=True)
    remove_stale(out / PARTS)
    tokenizer.save(out / TOKENIZER)
    return plan


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if old.get("version") != new["version"]:
        yield f"its version is {old.get('version')}, not {new['version']}"
    if old.get("fingerprint") != new["fingerprint"]:
        yield "its tokenizer gives other ids"
    for name, value in new["settings"].items():
        if (was := (old.get("settings") or {}).get(name)) != value:
            yield f"its setting {name} is {shown(was)}, not {shown(value)}"
    before, now = old.get("files") or [], new["files"]
    if [file.get("name") for file in before] != [file["name"] for file in now]:
        yield f"its files are {shown([file.get('name') for file in before])}, not {shown([f['name'] for f in now])}"
    else:
        yield from (f"{shown(b['name'])} has other bytes now" for a, b in zip(before, now, strict=True) if a != b)


def _tidy(out: Path) -> None:
    """Remove the files of an unfinished corpus."""
    for path in sorted((out / PARTS).glob("*")):
        path.unlink()
    with suppress(FileNotFoundError):
        (out / PARTS).rmdir()
    (out / PLAN).unlink(missing_ok=True)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock a folder for one build; the lock ends with the process."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{out}: another process builds a corpus there") from None
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------------- running


class _Run:
    """A build: turns chunks of documents into shards, in this process or in workers."""

    def __init__(
        self,
        output_dir: Path,
        tokenizer: Tokenizer,
        settings: CorpusSettings,
        source: DocumentReader,
        on_progress: ProgressCallback | None,
        start: float,
    ) -> None:
        self.progress = CorpusProgress()
        self.parts = 0
        self._out, self._tokenizer, self._source, self._on_progress, self._start = (
            output_dir,
            tokenizer,
            source,
            on_progress,
            start,
        )
        self._left: Counter[str] = Counter()
        self._deduplicator: Deduplicator | None = None
        near = settings.dedup == "near"
        if settings.dedup != "none":
            self._deduplicator = Deduplicator(
                near=near, similarity=settings.jaccard_threshold, file=output_dir / PARTS / "signatures"
            )
        self._spec = ShardSpec(
            folder=output_dir.absolute(),
            dtype="<u2" if tokenizer.size <= 1 << 16 else "<u4",
            min_chars=settings.min_document_chars,
            is_deduplicated=self._deduplicator is not None,
            num_bands=lsh_bands(settings.jaccard_threshold)[0] if near else 0,
            unknown_id=tokenizer.special.unknown,
        )
        self._last = 0.0
        self._waiting: dict[
            int, tuple[Worker | None, DedupKeys | None]
        ] = {}  # workers with their keys, by the number of the chunk
        self._next_chunk = 0  # next chunk to deduplicate

    def __enter__(self) -> None:
        self._report_progress(Counter())

    def __exit__(self, *_: object) -> None:
        if self._deduplicator is not None:
            self._deduplicator.close()

    def explain_empty(self) -> str:
        """Why no document is left, for a message."""
        return (
            f"{self._left['short']:,} are too short, {self._left['empty']:,} have no text, {self._bad():,} are bad rows"
        )

    def _bad(self) -> int:
        return sum(self._source.row_errors.bad.values())

    def in_this_process(self) -> None:
        """Build in this process."""
        writer = ShardWriter(self._spec, self._tokenise)
        for chunk in self._source.chunks():
            if chunk is None:
                self._report_progress(Counter())
                continue
            number, self.parts = self.parts, self.parts + 1
            if self._is_done(number):
                self._count_finished(number)
                continue
            keys = writer.clean(chunk)
            verdicts = (
                self._deduplicator.check(keys.hashes, keys.signatures) if self._deduplicator is not None else None
            )
            self._report_progress(writer.write(number, verdicts))

    def _tokenise(self, texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        ids = self._tokenizer.ids(texts)
        return np.concatenate(ids), np.array([len(text_ids) for text_ids in ids], np.int64)

    def with_workers(self, processes: int) -> None:
        """Read here, tokenise in workers; at most one chunk waits."""
        with start_workers(processes, self._spec, self._out / TOKENIZER / "tokenizer.json") as workers:
            for chunk in self._source.chunks():
                if chunk is None:
                    self._receive_answers(workers, 0)
                    self._report_progress(Counter())
                    continue
                number, self.parts = self.parts, self.parts + 1
                if self._is_done(number):
                    if self._deduplicator is None:
                        self._count_finished(number)
                    else:
                        self._waiting[number] = (None, None)
                        self._deduplicate_waiting()
                    continue
                while all(worker.busy for worker in workers):
                    self._receive_answers(workers, None)
                next(worker for worker in workers if not worker.busy).send((number, chunk), number)
            while any(worker.busy for worker in workers):
                self._receive_answers(workers, None)

    def _receive_answers(self, workers: Sequence[Worker], patience: float | None) -> None:
        """Receive answers of workers; `patience` None: wait for one, 0: do not wait."""
        busy = {worker.answers: worker for worker in workers if worker.busy}
        for answers in select.select(list(busy), [], [], patience)[0]:
            worker = busy[answers]
            match worker.receive():
                case DedupKeys() as keys:
                    self._waiting[worker.number] = (worker, keys)
                    self._deduplicate_waiting()
                case dict() as tally:
                    worker.busy = False
                    self._report_progress(tally)

    def _deduplicate_waiting(self) -> None:
        """Deduplicate the waiting chunks, in order."""
        assert self._deduplicator is not None
        while self._next_chunk in self._waiting:
            worker, keys = self._waiting.pop(self._next_chunk)
            if worker is None or keys is None:
                self._count_finished(self._next_chunk)
            else:
                worker.send(self._deduplicator.check(keys.hashes, keys.signatures), self._next_chunk)
            self._next_chunk += 1

    def _is_done(self, number: int) -> bool:
        return part_path(self._out, number).is_file() and (self._out / shard_name(number)).is_file()

    def _count_finished(self, number: int) -> None:
        """Count a shard that an earlier build wrote."""
        part, counts = read_part(self._out, number)
        if self._deduplicator is not None:
            self._deduplicator.check(part["offered"], part["signatures"])
        self._report_progress(counts)

    def _report_progress(self, tally: Mapping[str, int]) -> None:
        self._left.update({name: tally.get(name, 0) for name in ("short", "empty")})
        was, now = self.progress, time.monotonic()
        self.progress = CorpusProgress(
            documents=was.documents + tally.get("documents", 0),
            characters=was.characters + tally.get("characters", 0),
            tokens=was.tokens + tally.get("tokens", 0),
            duplicates=was.duplicates + tally.get("exact", 0) + tally.get("near", 0),
            short=was.short + tally.get("short", 0) + tally.get("empty", 0),
            seconds=now - self._start,
            share=self._source.fraction_read,
        )
        if self._on_progress is not None and (tally or now - self._last > 0.1):
            self._last = now
            self._on_progress(self.progress)
