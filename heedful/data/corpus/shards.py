"""The format of a corpus, token shards with indices: written one chunk of documents at a time, read by memory map."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from heedful import atomic_io
from heedful.data.corpus.dedup import KEEP, minhash_signatures
from heedful.data.corpus.sentence_split import clean_text, split_sentences
from heedful.errors import DataError

VERSION = 1
MANIFEST, PARTS = "manifest.json", "parts"
BATCH = 400_000  # characters that are tokenised at a time: encodings take about a hundred times that
MOST_OPEN = 100  # shards that are mapped at a time, each with a file handle
SKETCH = 1 << 16  # smallest hashes of segments, to estimate the number of distinct segments
Tokens = NDArray[np.uint16] | NDArray[np.uint32]
ARRAYS = {"documents": "<i8", "segments": "<i8", "paragraphs": "|b1", "hashes": "<u8"}
Ids = Callable[
    [list[str]], tuple[NDArray[np.int32], NDArray[np.int64]]
]  # texts to (ids of all texts, number of ids of each)


class Corpus:
    """A finished corpus: documents as tokens in the order of the input, read on demand."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Use `open`, which checks the files."""
        self.folder = folder
        self.about = about
        self.fingerprint: str = about["fingerprint"]  # fingerprint of its tokenizer
        self.vocabulary: int = about["vocabulary"]
        self.count: int = about["counts"]["tokens"]
        self.documents: NDArray[np.int64] = self._map("documents")  # [documents + 1] index of each first segment
        self.segments: NDArray[np.int64] = self._map("segments")  # [segments + 1] offset of each first token
        self.paragraphs: NDArray[np.bool_] = self._map("paragraphs")  # [segments] whether a paragraph begins there
        self.hashes: NDArray[np.uint64] = self._map("hashes")  # [documents] of the clean texts
        self._starts = np.cumsum([0, *(shard["tokens"] for shard in about["shards"])])
        self._open: dict[int, Tokens] = {}  # shards that are mapped, by number

    def _map(self, name: str) -> NDArray[Any]:
        return mapped(self.folder / f"{name}.bin", ARRAYS[name])

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Open a finished corpus.

        Raises:
            DataError: If it is unfinished, or a file is missing or has a wrong size (contents are not checked).
        """
        if not (folder / MANIFEST).is_file():
            unfinished = (folder / PARTS).is_dir()
            what = "is not finished: build it again with the same files and settings, and it resumes"
            raise DataError(f"{folder}: {what if unfinished else f'is no corpus: it has no {MANIFEST}'}")
        about = read_corpus_json(folder / MANIFEST)
        if about.get("version") != VERSION:
            raise DataError(f"{folder}: is a corpus of version {about.get('version')}, expected {VERSION}")
        try:
            counts, width = about["counts"], np.dtype(about["dtype"]).itemsize
            _ = about["fingerprint"], about["vocabulary"], counts["tokens"]
            lengths = {"documents": counts["documents"] + 1, "segments": counts["segments"] + 1}
            lengths |= {"paragraphs": counts["segments"], "hashes": counts["documents"]}
            sizes = {f"{name}.bin": lengths[name] * np.dtype(kind).itemsize for name, kind in ARRAYS.items()}
            sizes |= {shard["file"]: shard["tokens"] * width for shard in about["shards"]}
        except (LookupError, TypeError) as error:
            raise DataError(f"{folder / MANIFEST}: is damaged: {error}; build the corpus again") from None
        for name, size in sizes.items():
            size_on_disk = (folder / name).stat().st_size if (folder / name).is_file() else None
            if size_on_disk != size:
                has = "is missing" if size_on_disk is None else f"has {size_on_disk:,} bytes, expected {size:,}"
                raise DataError(f"{folder / name}: {has}: the corpus is damaged, build it again in a new folder")
        return cls(folder, about)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.hashes)

    def __repr__(self) -> str:
        """Folder, number of documents and number of tokens."""
        return f"Corpus({str(self.folder)!r}, documents={len(self)}, tokens={self.count})"

    def __reduce__(self) -> tuple[object, ...]:
        return Corpus.open, (self.folder,)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest without times: hashes of files, settings, tokenizer, counts."""
        reproducible = {name: value for name, value in self.about.items() if name != "seconds"}
        return sha256(json.dumps(reproducible, sort_keys=True).encode()).hexdigest()

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """Copy the tokens [start, stop) of the whole stream, across shards."""
        if not 0 <= start <= stop <= self.count:
            raise DataError(f"tokens {start} to {stop} were asked for, but the corpus has 0 to {self.count}")
        tokens = np.empty(stop - start, np.int32)
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = start
        while at < stop:
            first, last = int(self._starts[number]), int(self._starts[number + 1])
            until = min(stop, last)
            if until > at:
                tokens[at - start : until - start] = self._shard(number)[at - first : until - first]
                at = until
            number += 1
        return tokens

    def _shard(self, number: int) -> Tokens:
        if number not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open)))
            shard = self.about["shards"][number]
            self._open[number] = mapped(self.folder / shard["file"], self.about["dtype"])
        return self._open[number]


def mapped(path: Path, kind: str) -> NDArray[Any]:
    """Map a file of numbers, read-only."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, kind)
    return np.memmap(path, kind, mode="r").view(np.ndarray)


# ---------------------------------------------------------------------------------------------------- a chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """How chunks become shards, the same for every chunk."""

    folder: Path
    dtype: str
    shortest: int
    judged: bool  # whether a Deduplicator decides which documents are kept
    bands: int  # LSH bands; 0: no near deduplication
    unknown: int | None  # id of the unknown token


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupKeys:
    """Keys of a chunk's documents, for the Deduplicator."""

    hashes: NDArray[np.uint64]
    signatures: NDArray[np.uint32]  # [documents, 128], or [0, 128] without near deduplication


class ShardWriter:
    """Writes the shard of a chunk: `clean` prepares its documents, `write` tokenises and writes those that are kept.

    A chunk is a list of (text, whether each line is a sentence).
    """

    def __init__(self, job: ShardSpec, ids: Ids, check: Callable[[], None] = lambda: None) -> None:
        self.job, self._ids, self._check = job, ids, check
        self._texts: list[tuple[str, bool]] = []
        self._tally: Counter[str] = Counter()
        self._offer: DedupKeys

    def begin(self, chunk: list[tuple[str, bool]]) -> DedupKeys:
        """Clean the documents; skip empty and short ones."""
        self._tally, self._texts = Counter(read=len(chunk)), []
        chunk.reverse()
        while chunk:  # frees each raw text before the next one is cleaned
            text, lines = chunk.pop()
            text = clean_text(text, lines=lines)
            if not text or len(text) < self.job.shortest:
                self._tally["short" if text else "empty"] += 1
            else:
                self._texts.append((text, lines))
            self._check()
        hashes = np.array([hash_document(text) for text, _ in self._texts], np.uint64)
        self._offer = DedupKeys(
            hashes=hashes, signatures=minhash_signatures(text for text, _ in self._texts if self.job.bands)
        )
        return self._offer

    def end(self, number: int, verdict: NDArray[np.uint8] | None) -> dict[str, int]:
        """Tokenise the kept documents (verdict None: all), write shard `number`, and return its counts."""
        tokens, lengths, begins, sketch, owners = self._tokenised(verdict)
        filled = np.flatnonzero(lengths)
        paragraph = np.cumsum(begins)[filled]
        counts = np.bincount(owners[filled], minlength=len(self._texts))
        documents = np.flatnonzero(counts)  # indices of documents
        tally = self._tally
        tally["tokens"], tally["segments"], tally["documents"] = int(lengths.sum()), len(filled), len(documents)
        tally["unknown"] = sum(int((ids == self.job.unknown).sum()) for ids in tokens if self.job.unknown is not None)
        if verdict is not None:
            tally["exact"], tally["near"] = int((verdict == 1).sum()), int((verdict == 2).sum())
        tally["empty"] += len(self._texts) - len(documents) - tally["exact"] - tally["near"]
        tally["characters"] = sum(len(self._texts[index][0]) for index in documents)
        with whole(self.job.folder / shard_name(number)) as file:
            for ids in tokens:
                file.write(ids.data)
        with whole(part_path(self.job.folder, number)) as file:
            np.savez(
                file,
                lengths=lengths[filled].astype(np.int32),
                begins=np.diff(paragraph, prepend=0) > 0,
                counts=counts[documents].astype(np.int64),
                hashes=self._offer.hashes[documents],
                sketch=sketch,
                offered=self._offer.hashes if self.job.judged else self._offer.hashes[:0],
                signatures=self._offer.signatures,
                tally=np.frombuffer(json.dumps(tally).encode(), np.uint8),
            )
        self._texts = []
        return dict(tally)

    def _tokenised(
        self, verdict: NDArray[np.uint8] | None
    ) -> tuple[list[Tokens], NDArray[np.int64], NDArray[np.bool_], NDArray[np.uint64], NDArray[np.int64]]:
        """Return ids in pieces; length, paragraph flag and document of each segment; the sketch of segment hashes."""
        tokens, lengths = [np.zeros(0, self.job.dtype)], [np.zeros(0, np.int64)]
        begins, owners, waiting, size = [], [], [], 0
        sketch = np.zeros(0, np.uint64)
        hashes: list[int] = []
        for number, (text, lines) in enumerate(self._texts):
            if verdict is None or verdict[number] == KEEP:
                sentences, begin = split_sentences(text, lines=lines)
                waiting += sentences
                begins += begin
                owners.append((number, len(sentences)))
                size += len(text)
            if (size > BATCH or number == len(self._texts) - 1) and waiting:
                for batch in batch_by_characters(waiting):
                    ids, count = self._ids(batch)
                    tokens.append(ids.astype(self.job.dtype))
                    lengths.append(count)
                    self._check()
                hashes += (hash_document(segment.lstrip()) for segment in waiting)
                sketch = merge_sketches(sketch, np.array(hashes, np.uint64))
                hashes, waiting, size = [], [], 0
        owned = np.repeat(*np.array(owners or [(0, 0)], np.int64).T)
        return tokens, np.concatenate(lengths), np.array(begins, bool), sketch, owned


def batch_by_characters(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of about 400,000 characters."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def hash_document(text: str) -> int:
    """64-bit hash of a text, the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def merge_sketches(*hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Merge sketches: the 65,536 smallest distinct hashes, sorted."""
    return np.unique(np.concatenate(hashes))[:SKETCH]


def estimate_distinct(sketch: NDArray[np.uint64]) -> float:
    """Estimate the number of distinct hashes: exact to 65,535, then within about 0.4 % (Bar-Yossef et al. 2002)."""
    return float(len(sketch)) if len(sketch) < SKETCH else (SKETCH - 1) / ((float(sketch[-1]) + 1) / 2**64)


# ---------------------------------------------------------------------------------------------------- all parts


def shard_name(number: int) -> str:
    """File name of a shard's tokens."""
    return f"tokens-{number:05}.bin"


def part_path(folder: Path, number: int) -> Path:
    """File with the other arrays of a shard, until the corpus is finished; written after the tokens."""
    return folder / PARTS / f"{number:05}.npz"


def read_part(folder: Path, number: int) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
    """Read the arrays of a finished shard, and its counts."""
    with np.load(part_path(folder, number), allow_pickle=False) as part:
        return {name: part[name] for name in part.files if name != "tally"}, json.loads(part["tally"].tobytes())


def finish(folder: Path, parts: int, about: Mapping[str, object]) -> None:
    """Merge the parts and write the manifest; can be repeated if interrupted."""
    tally: Counter[str] = Counter()
    shards, sketch = [], np.zeros(0, np.uint64)
    paths = [folder / f"{name}.bin" for name in ARRAYS]
    with ExitStack() as stack:
        documents, offsets, paragraphs, hashes = (stack.enter_context(whole(path)) for path in paths)
        documents.write(np.zeros(1, "<i8").data)
        offsets.write(np.zeros(1, "<i8").data)
        for number in range(parts):
            part, counts = read_part(folder, number)
            documents.write((tally["segments"] + np.cumsum(part["counts"])).astype("<i8").data)
            offsets.write((tally["tokens"] + np.cumsum(part["lengths"], dtype=np.int64)).astype("<i8").data)
            paragraphs.write(part["begins"].data)
            hashes.write(part["hashes"].astype("<u8").data)
            shards.append({"file": shard_name(number), "tokens": counts["tokens"]})
            sketch = merge_sketches(sketch, part["sketch"])
            tally.update(counts)
    count = tally["documents"]
    repeated = {
        "documents": 1 - len(np.unique(mapped(paths[3], "<u8"))) / max(count, 1),
        "segments": max(0.0, 1 - estimate_distinct(sketch) / max(tally["segments"], 1)),
    }
    counts = {name: tally[name] for name in ("documents", "segments", "tokens", "characters", "unknown")}
    left_out = {name: tally[name] for name in ("exact", "near", "short", "empty")}
    totals = {"counts": counts, "left_out": left_out, "repeated": repeated, "shards": shards}
    write_corpus_json(folder / MANIFEST, dict(about) | totals)


# ---------------------------------------------------------------------------------------------------- files


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears complete and synced, or not at all."""
    try:
        with atomic_io.atomic_path(path) as part, part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}; what is done is kept, try again") from None


def read_corpus_json(path: Path) -> dict[str, Any]:
    """Read the object in one of the corpus's JSON files."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: is damaged: it holds no object")
    return value


def write_corpus_json(path: Path, value: Mapping[str, object]) -> None:
    """Write an object as a JSON file."""
    with whole(path) as file:
        file.write(
            (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")
        )
