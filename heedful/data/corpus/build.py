"""Building a corpus of token shards from text of any size: in several processes, in bounded memory, resumable.

`heedful corpus` and pre-training call `build_corpus`. Documents are read and deduplicated in the calling process, and
tokenised in workers. Each chunk of documents becomes one shard.
"""

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

PLAN = "plan.json"  # file with the input and the settings of an unfinished corpus
TOKENIZER = "tokenizer"  # folder of the tokenizer
SMALL_INPUT_BYTES = 8_000_000  # bytes of text below which no worker is started
ASSUMED_COMPRESSION_RATIO = 4  # bytes of text per byte of a compressed file, for the choice of the number of workers
ProgressCallback = Callable[["CorpusProgress"], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusProgress:
    """Progress of a build, with counts over the finished shards."""

    documents: int = 0
    characters: int = 0
    tokens: int = 0
    duplicates: int = 0  # documents left out as exact or near duplicates
    short: int = 0  # documents left out as short or empty
    seconds: float = 0.0
    share: float = 0.0  # fraction of the input bytes that was read (0-1)


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

    If the function is called again with the same arguments, an interrupted build resumes, and a finished corpus is
    opened. The result does not depend on `processes`.

    Args:
        files: files and folders of text or tables.
        tokenizer: tokenizer of the corpus.
        output_dir: folder of the corpus, which is new or empty, or has the same corpus.
        settings: how text is split into documents, and which documents are kept.
        processes: how many workers are started. If None, one for each core, and none for small input.
        on_progress: called with the progress.
        on_bad_row: policy for rows that cannot be used.
        exclude: folder whose files are not read. If None, `output_dir`.

    Raises:
        DataError: If files cannot be read, if no document is left, or if the folder has other files.
    """
    if processes is not None and processes < 1:
        raise DataError(f"processes is {processes}, expected a number from 1")
    start = time.monotonic()
    listed, notes = list_files(files, exclude or output_dir)
    with _lock_folder(output_dir):
        plan = _write_or_check_plan(listed, tokenizer, output_dir, settings, on_bad_row)
        if plan is None:
            return Corpus.open(output_dir)
        reader = DocumentReader([path for path, _ in listed], settings, RowErrors(on_bad_row), notes)
        text_bytes = sum(_estimate_text_bytes(path) for path, _ in listed)
        num_processes = 1 if text_bytes < SMALL_INPUT_BYTES else processes or available_cores()
        build = _Build(output_dir, tokenizer, settings, reader, on_progress, start)
        with build:
            if num_processes == 1:
                build.run_in_this_process()
            else:
                build.run_in_workers(num_processes)
        if not build.progress.documents:
            first_names = ", ".join(path.name for path, _ in listed[:5])
            raise DataError(f"{first_names}: no document is left: {build.explain_empty()}")
        name_in_plan = {str(path): name for path, name in listed}
        bad_rows = Counter[str]()  # counts by the name of the file in the plan
        for file, count in reader.row_errors.bad.items():
            bad_rows[name_in_plan.get(file, file)] += count
        facts = {
            "stated": reader.notes,
            "cut": reader.num_split,
            "bad_rows": dict(bad_rows),
            "seconds": time.monotonic() - start,
        }
        finish(output_dir, build.num_chunks, plan | facts)
        _remove_temporary_files(output_dir)
    return Corpus.open(output_dir)


def _estimate_text_bytes(path: Path) -> int:
    """Estimate the bytes of a file's text from the size of the file, which may be compressed."""
    ratio = ASSUMED_COMPRESSION_RATIO if path.suffix in COMPRESSED else 1
    return path.stat().st_size * ratio


def contains_corpus(folder: Path) -> bool:
    """Whether a folder contains a corpus, finished or not. A manifest.json alone may belong to another program."""
    arrays = (f"{name}.bin" for name in ARRAYS)
    is_begun = (folder / PLAN).is_file() and (folder / PARTS).is_dir()
    return is_begun or any((folder / name).is_file() for name in (shard_name(0), *arrays))


# ---------------------------------------------------------------------------------------------------- plan


def _write_or_check_plan(
    listed: list[tuple[Path, str]],
    tokenizer: Tokenizer,
    folder: Path,
    settings: CorpusSettings,
    on_bad_row: BadRowPolicy,
) -> dict[str, object] | None:
    """Write the plan of a new build, or check the plan of an interrupted one.

    Returns:
        The plan, or None if the corpus is finished.

    Raises:
        DataError: If the folder has the corpus of another plan. The message lists the differences.
    """
    plan: dict[str, object] = {
        "version": VERSION,
        "fingerprint": tokenizer.fingerprint,
        "vocabulary": tokenizer.size,
        "dtype": "<u2" if tokenizer.size <= 1 << 16 else "<u4",
        "settings": to_mapping(settings),
        "files": [{"name": name, "bytes": path.stat().st_size, "sha256": _hash_file(path)} for path, name in listed],
    }
    is_finished = (folder / MANIFEST).is_file()
    is_begun = (folder / PLAN).is_file()
    if is_finished or is_begun:
        old_plan = read_corpus_json(folder / (MANIFEST if is_finished else PLAN))
        if differences := list(_plan_differences(old_plan, plan)):
            raise DataError(
                f"{folder}: holds a different{'' if is_finished else ', unfinished'} corpus: "
                f"{'; '.join(differences)}. Give another folder, or remove this one"
            )
        remove_stale(folder)
        if is_finished:
            _remove_temporary_files(folder)
            return None
    else:
        if names := [path.name for path in folder.iterdir() if not path.name.startswith(".")]:
            raise DataError(f"{folder}: holds {shown(sorted(names)[0])} and no corpus: give a new or an empty folder")
        write_corpus_json(folder / PLAN, plan)  # before anything else, so that every interrupted build can resume
    if isinstance(on_bad_row, Quarantine):
        remove_quarantine(on_bad_row.file)  # a resumed build visits all rows again
    (folder / PARTS).mkdir(exist_ok=True)
    remove_stale(folder / PARTS)
    tokenizer.save(folder / TOKENIZER)
    return plan


def _hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _plan_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between two plans, as phrases."""
    if old.get("version") != new["version"]:
        yield f"its version is {old.get('version')}, not {new['version']}"
    if old.get("fingerprint") != new["fingerprint"]:
        yield "its tokenizer gives other ids"
    for name, value in new["settings"].items():
        if (old_value := (old.get("settings") or {}).get(name)) != value:
            yield f"its setting {name} is {shown(old_value)}, not {shown(value)}"
    old_files, new_files = old.get("files") or [], new["files"]
    old_names, new_names = [file.get("name") for file in old_files], [file["name"] for file in new_files]
    if old_names != new_names:
        yield f"its files are {shown(old_names)}, not {shown(new_names)}"
        return
    for old_file, new_file in zip(old_files, new_files, strict=True):
        if old_file != new_file:
            yield f"{shown(new_file['name'])} has other bytes now"


def _remove_temporary_files(folder: Path) -> None:
    """Remove the files that a finished corpus does not need."""
    for path in sorted((folder / PARTS).glob("*")):
        path.unlink()
    with suppress(FileNotFoundError):
        (folder / PARTS).rmdir()
    (folder / PLAN).unlink(missing_ok=True)


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Create a folder and lock it for one build. The lock ends with the process.

    Raises:
        DataError: If the folder cannot be written, or if another build has locked it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another process builds a corpus there") from None
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------------- running


class _Build:
    """Converts chunks of documents to shards, in this process or in workers."""

    def __init__(
        self,
        output_dir: Path,
        tokenizer: Tokenizer,
        settings: CorpusSettings,
        reader: DocumentReader,
        on_progress: ProgressCallback | None,
        start: float,
    ) -> None:
        self.progress = CorpusProgress()
        self.num_chunks = 0  # chunks read so far
        self._folder = output_dir
        self._tokenizer = tokenizer
        self._reader = reader
        self._on_progress = on_progress
        self._start = start  # time at which the build started
        self._num_left_out: Counter[str] = Counter()  # counts of short and empty documents
        self._deduplicator: Deduplicator | None = None
        has_near_dedup = settings.dedup == "near"
        if settings.dedup != "none":
            self._deduplicator = Deduplicator(
                near=has_near_dedup, similarity=settings.jaccard_threshold, file=output_dir / PARTS / "signatures"
            )
        self._spec = ShardSpec(
            folder=output_dir.absolute(),
            dtype="<u2" if tokenizer.size <= 1 << 16 else "<u4",
            min_chars=settings.min_document_chars,
            is_deduplicated=self._deduplicator is not None,
            num_bands=lsh_bands(settings.jaccard_threshold)[0] if has_near_dedup else 0,
            unknown_id=tokenizer.special.unknown,
        )
        self._last_report = 0.0  # time of the last call of on_progress
        # (worker, keys) of chunks that wait for deduplication, by chunk index; None for shards of an earlier build
        self._waiting_chunks: dict[int, tuple[Worker | None, DedupKeys | None]] = {}
        self._next_chunk = 0  # index of the next chunk to deduplicate

    def __enter__(self) -> None:
        self._report_progress({})

    def __exit__(self, *_: object) -> None:
        if self._deduplicator is not None:
            self._deduplicator.close()

    def explain_empty(self) -> str:
        """Return the reason why no document is left, as a phrase."""
        short, empty = self._num_left_out["short"], self._num_left_out["empty"]
        num_bad_rows = sum(self._reader.row_errors.bad.values())
        return f"{short:,} are too short, {empty:,} have no text, {num_bad_rows:,} are bad rows"

    def run_in_this_process(self) -> None:
        """Read, deduplicate and tokenise all chunks in this process."""
        writer = ShardWriter(self._spec, self._tokenise)
        for chunk in self._reader.chunks():
            if chunk is None:
                self._report_progress({})
                continue
            index = self._next_chunk_index()
            if self._is_finished(index):
                self._count_finished(index)
                continue
            keys = writer.clean(chunk)
            verdicts = None
            if self._deduplicator is not None:
                verdicts = self._deduplicator.check(keys.hashes, keys.signatures)
            self._report_progress(writer.write(index, verdicts))

    def _next_chunk_index(self) -> int:
        """Count a chunk that was read, and return its index."""
        self.num_chunks += 1
        return self.num_chunks - 1

    def _tokenise(self, texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the token ids of all texts, and the length of each text in tokens."""
        ids = self._tokenizer.ids(texts)
        return np.concatenate(ids), np.array([len(text_ids) for text_ids in ids], np.int64)

    def run_in_workers(self, processes: int) -> None:
        """Read and deduplicate in this process, and tokenise in workers. At most one chunk waits for a worker."""
        with start_workers(processes, self._spec, self._folder / TOKENIZER / "tokenizer.json") as workers:
            for chunk in self._reader.chunks():
                if chunk is None:
                    self._receive_answers(workers, 0)
                    self._report_progress({})
                    continue
                index = self._next_chunk_index()
                if self._is_finished(index):
                    if self._deduplicator is None:
                        self._count_finished(index)
                    else:
                        self._waiting_chunks[index] = (None, None)
                        self._deduplicate_waiting()
                    continue
                while all(worker.busy for worker in workers):
                    self._receive_answers(workers, None)
                idle_worker = next(worker for worker in workers if not worker.busy)
                idle_worker.send((index, chunk), index)
            while any(worker.busy for worker in workers):
                self._receive_answers(workers, None)

    def _receive_answers(self, workers: Sequence[Worker], timeout: float | None) -> None:
        """Receive the answers that workers have sent.

        Args:
            workers: the workers.
            timeout: maximum seconds to wait for an answer. If None, waits until there is one.
        """
        busy = {worker.answers: worker for worker in workers if worker.busy}
        for answers in select.select(list(busy), [], [], timeout)[0]:
            worker = busy[answers]
            match worker.receive():
                case DedupKeys() as keys:
                    self._waiting_chunks[worker.chunk_index] = (worker, keys)
                    self._deduplicate_waiting()
                case dict() as counts:
                    worker.busy = False
                    self._report_progress(counts)

    def _deduplicate_waiting(self) -> None:
        """Deduplicate waiting chunks in order, up to the first missing one. Send the verdicts to the workers."""
        assert self._deduplicator is not None
        while self._next_chunk in self._waiting_chunks:
            worker, keys = self._waiting_chunks.pop(self._next_chunk)
            if worker is None or keys is None:
                self._count_finished(self._next_chunk)
            else:
                worker.send(self._deduplicator.check(keys.hashes, keys.signatures), self._next_chunk)
            self._next_chunk += 1

    def _is_finished(self, index: int) -> bool:
        """Whether an earlier build wrote the shard of a chunk."""
        return part_path(self._folder, index).is_file() and (self._folder / shard_name(index)).is_file()

    def _count_finished(self, index: int) -> None:
        """Count a shard that an earlier build wrote, and add its documents to the deduplicator."""
        part, counts = read_part(self._folder, index)
        if self._deduplicator is not None:
            self._deduplicator.check(part["offered"], part["signatures"])
        self._report_progress(counts)

    def _report_progress(self, counts: Mapping[str, int]) -> None:
        """Add the counts of a finished shard to the progress, and report it.

        A call with empty counts only updates the time and the share that was read. Such calls report at most ten times
        a second.
        """
        self._num_left_out.update({name: counts.get(name, 0) for name in ("short", "empty")})
        last, now = self.progress, time.monotonic()
        self.progress = CorpusProgress(
            documents=last.documents + counts.get("documents", 0),
            characters=last.characters + counts.get("characters", 0),
            tokens=last.tokens + counts.get("tokens", 0),
            duplicates=last.duplicates + counts.get("exact", 0) + counts.get("near", 0),
            short=last.short + counts.get("short", 0) + counts.get("empty", 0),
            seconds=now - self._start,
            share=self._reader.fraction_read,
        )
        if self._on_progress is not None and (counts or now - self._last_report > 0.1):
            self._last_report = now
            self._on_progress(self.progress)
