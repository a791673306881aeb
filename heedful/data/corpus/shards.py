"""The files of a corpus: `Corpus` reads a finished one by memory map, `ShardWriter` writes one shard per chunk.

Shards contain token ids. Other arrays have the bounds of segments, paragraphs and documents.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heedful import atomic_io
from heedful.data.corpus.dedup import EXACT, KEEP, NEAR, minhash_signatures
from heedful.data.corpus.sentence_split import clean_text, split_sentences
from heedful.errors import DataError

VERSION = 1  # version of the format
MANIFEST = "manifest.json"
PARTS = "parts"  # folder of unfinished corpora
BATCH_CHARS = 400_000  # characters per call of the tokenizer, whose encodings take about 100 bytes per character
MAX_OPEN_SHARDS = 100  # maximum shards that are mapped at the same time, each with a file handle
SKETCH_HASHES = 1 << 16  # hashes in the sketch that estimates how many distinct segments there are
Tokens = NDArray[np.uint16] | NDArray[np.uint32]
ARRAYS = {  # dtype by file stem
    "documents": "<i8",
    "segments": "<i8",
    "paragraphs": "|b1",
    "hashes": "<u8",
}
# texts -> (token ids of all texts, length of each text in tokens)
Tokenise = Callable[[list[str]], tuple[NDArray[np.int32], NDArray[np.int64]]]


class Corpus:
    """A finished corpus: documents as token ids, in the order of the input, read on demand.

    A document is a sequence of segments: sentences, or lines.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Not for callers: use `open`, which checks the files."""
        self.folder = folder
        self.about = about  # the manifest
        self.fingerprint: str = about["fingerprint"]  # fingerprint of the tokenizer
        self.vocabulary: int = about["vocabulary"]  # vocabulary size
        self.count: int = about["counts"]["tokens"]  # tokens of the corpus
        self.documents: NDArray[np.int64] = self._map("documents")  # [documents + 1], index of the first segment
        self.segments: NDArray[np.int64] = self._map("segments")  # [segments + 1], offset of the first token
        self.paragraphs: NDArray[np.bool_] = self._map("paragraphs")  # [segments], whether a paragraph begins there
        self.hashes: NDArray[np.uint64] = self._map("hashes")  # [documents], hash of the clean text
        self._starts = np.cumsum([0, *(shard["tokens"] for shard in about["shards"])])  # first token of each shard
        self._open: dict[int, Tokens] = {}  # mapped shards by index

    def _map(self, name: str) -> NDArray[Any]:
        return map_array(self.folder / f"{name}.bin", ARRAYS[name])

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Open a finished corpus.

        Raises:
            DataError: If the corpus is unfinished, or if a file is missing or has a wrong size. Contents are not
                checked.
        """
        if not (folder / MANIFEST).is_file():
            if (folder / PARTS).is_dir():
                raise DataError(
                    f"{folder}: is not finished: build it again with the same files and settings, and it resumes"
                )
            raise DataError(f"{folder}: is no corpus: it has no {MANIFEST}")
        about = read_corpus_json(folder / MANIFEST)
        if about.get("version") != VERSION:
            raise DataError(f"{folder}: is a corpus of version {about.get('version')}, expected {VERSION}")
        try:
            counts = about["counts"]
            token_bytes = np.dtype(about["dtype"]).itemsize
            _ = about["fingerprint"], about["vocabulary"], counts["tokens"]  # raises if one is missing
            lengths = {
                "documents": counts["documents"] + 1,
                "segments": counts["segments"] + 1,
                "paragraphs": counts["segments"],
                "hashes": counts["documents"],
            }
            sizes = {f"{name}.bin": lengths[name] * np.dtype(dtype).itemsize for name, dtype in ARRAYS.items()}
            sizes |= {shard["file"]: shard["tokens"] * token_bytes for shard in about["shards"]}
        except (LookupError, TypeError) as error:
            raise DataError(f"{folder / MANIFEST}: is damaged: {error}; build the corpus again") from None
        for name, size in sizes.items():
            size_on_disk = (folder / name).stat().st_size if (folder / name).is_file() else None
            if size_on_disk != size:
                fault = "is missing" if size_on_disk is None else f"has {size_on_disk:,} bytes, expected {size:,}"
                raise DataError(f"{folder / name}: {fault}: the corpus is damaged, build it again in a new folder")
        return cls(folder, about)

    def __len__(self) -> int:
        """Return how many documents the corpus has."""
        return len(self.hashes)

    def __repr__(self) -> str:
        """Return a text with the folder and the counts of documents and tokens."""
        return f"Corpus({str(self.folder)!r}, documents={len(self)}, tokens={self.count})"

    def __reduce__(self) -> tuple[object, ...]:
        return Corpus.open, (self.folder,)

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest without times: hashes of files, settings, tokenizer and counts."""
        reproducible = {name: value for name, value in self.about.items() if name != "seconds"}
        return sha256(json.dumps(reproducible, sort_keys=True).encode()).hexdigest()

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return a copy of the token ids [start, stop) of the corpus, across shards."""
        if not 0 <= start <= stop <= self.count:
            raise DataError(f"tokens {start} to {stop} were asked for, but the corpus has 0 to {self.count}")
        tokens = np.empty(stop - start, np.int32)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        position = start
        while position < stop:
            shard_start, shard_stop = int(self._starts[shard]), int(self._starts[shard + 1])
            end = min(stop, shard_stop)
            if end > position:
                copied = self._shard(shard)[position - shard_start : end - shard_start]
                tokens[position - start : end - start] = copied
                position = end
            shard += 1
        return tokens

    def _shard(self, index: int) -> Tokens:
        """Return the mapped tokens of a shard. If too many shards are mapped, the one mapped first is closed."""
        if index not in self._open:
            if len(self._open) >= MAX_OPEN_SHARDS:
                self._open.pop(next(iter(self._open)))
            shard = self.about["shards"][index]
            self._open[index] = map_array(self.folder / shard["file"], self.about["dtype"])
        return self._open[index]


def map_array(path: Path, dtype: str) -> NDArray[Any]:
    """Map a file of numbers into memory, read-only."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


# ---------------------------------------------------------------------------------------------------- a chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """Settings of a corpus that determine how chunks of documents become shards."""

    folder: Path  # folder of the corpus
    dtype: str  # dtype of token ids
    min_chars: int  # minimum characters of a document
    is_deduplicated: bool  # whether a Deduplicator decides which documents are written
    num_bands: int  # LSH bands; 0: no near deduplication
    unknown_id: int | None  # id of the unknown token; None: the tokenizer has none


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupKeys:
    """Keys of a chunk's documents, for the Deduplicator."""

    hashes: NDArray[np.uint64]  # [documents]
    signatures: NDArray[np.uint32]  # [documents, 128], or [0, 128] without near deduplication


class _Segments(NamedTuple):
    """The segments of the documents of a chunk, without duplicates."""

    tokens: list[Tokens]  # token ids of all segments, in several arrays
    lengths: NDArray[np.int64]  # [segments], length in tokens
    begins: NDArray[np.bool_]  # [segments], whether a paragraph begins there
    documents: NDArray[np.int64]  # [segments], index of the document in the chunk
    sketch: NDArray[np.uint64]  # smallest hashes of the segments


class ShardWriter:
    """Writes the shard of a chunk: `clean` prepares the documents, `write` tokenises and writes them.

    A chunk is a list of (text, whether each line is a sentence).

    Args:
        spec: how chunks become shards.
        tokenise: returns the token ids of texts.
        check_parent: called often. It may end the process.
    """

    def __init__(self, spec: ShardSpec, tokenise: Tokenise, check_parent: Callable[[], None] = lambda: None) -> None:
        self.spec = spec
        self._tokenise = tokenise
        self._check_parent = check_parent
        self._documents: list[tuple[str, bool]] = []  # clean documents of the chunk
        self._counts: Counter[str] = Counter()
        self._keys: DedupKeys

    def clean(self, chunk: list[tuple[str, bool]]) -> DedupKeys:
        """Clean the documents of a chunk, drop empty and short ones, and return the keys of the rest.

        The list is emptied, so that the memory of each raw text is freed before the next one is cleaned.
        """
        self._counts = Counter(read=len(chunk))
        self._documents = []
        chunk.reverse()
        while chunk:
            text, lines = chunk.pop()
            text = clean_text(text, lines=lines)
            if not text or len(text) < self.spec.min_chars:
                self._counts["short" if text else "empty"] += 1
            else:
                self._documents.append((text, lines))
            self._check_parent()
        hashes = np.array([hash_document(text) for text, _ in self._documents], np.uint64)
        texts = (text for text, _ in self._documents) if self.spec.num_bands else ()
        self._keys = DedupKeys(hashes=hashes, signatures=minhash_signatures(texts))
        return self._keys

    def write(self, index: int, verdicts: NDArray[np.uint8] | None) -> dict[str, int]:
        """Tokenise the cleaned documents that the Deduplicator accepts, and write them as a shard.

        Args:
            index: index of the shard.
            verdicts: verdict of the Deduplicator on each document, [documents]. If None, all are accepted.

        Returns:
            Counts of documents, segments, tokens and characters, and of documents left out, by reason.
        """
        segments = self._tokenise_documents(verdicts)
        filled = np.flatnonzero(segments.lengths)  # segments with tokens
        paragraph_of = np.cumsum(segments.begins)[filled]  # index of each segment's paragraph
        num_segments = np.bincount(segments.documents[filled], minlength=len(self._documents))  # by document
        documents = np.flatnonzero(num_segments)  # indices of documents with tokens
        counts = self._counts
        counts["tokens"] = int(segments.lengths.sum())
        counts["segments"] = len(filled)
        counts["documents"] = len(documents)
        counts["unknown"] = 0
        if self.spec.unknown_id is not None:
            counts["unknown"] = sum(int((ids == self.spec.unknown_id).sum()) for ids in segments.tokens)
        if verdicts is not None:
            counts["exact"] = int((verdicts == EXACT).sum())
            counts["near"] = int((verdicts == NEAR).sum())
        counts["empty"] += len(self._documents) - len(documents) - counts["exact"] - counts["near"]
        counts["characters"] = sum(len(self._documents[document][0]) for document in documents)
        with atomic_file(self.spec.folder / shard_name(index)) as file:
            for ids in segments.tokens:
                file.write(ids.data)
        with atomic_file(part_path(self.spec.folder, index)) as file:
            np.savez(
                file,
                lengths=segments.lengths[filled].astype(np.int32),
                begins=np.diff(paragraph_of, prepend=0) > 0,
                counts=num_segments[documents].astype(np.int64),
                hashes=self._keys.hashes[documents],
                sketch=segments.sketch,
                offered=self._keys.hashes if self.spec.is_deduplicated else self._keys.hashes[:0],
                signatures=self._keys.signatures,
                tally=np.frombuffer(json.dumps(counts).encode(), np.uint8),
            )
        self._documents = []
        return dict(counts)

    def _tokenise_documents(self, verdicts: NDArray[np.uint8] | None) -> _Segments:
        """Split the accepted documents into segments and tokenise them, in batches of about BATCH_CHARS characters."""
        tokens = [np.zeros(0, self.spec.dtype)]
        lengths = [np.zeros(0, np.int64)]
        begins: list[bool] = []
        segment_counts: list[tuple[int, int]] = []  # (index of a document, how many segments it has)
        waiting: list[str] = []  # segments that are not tokenised yet
        waiting_chars = 0
        sketch = np.zeros(0, np.uint64)
        for index, (text, lines) in enumerate(self._documents):
            if verdicts is None or verdicts[index] == KEEP:
                sentences, begins_of_text = split_sentences(text, lines=lines)
                waiting += sentences
                begins += begins_of_text
                segment_counts.append((index, len(sentences)))
                waiting_chars += len(text)
            if (waiting_chars > BATCH_CHARS or index == len(self._documents) - 1) and waiting:
                for batch in batch_by_characters(waiting):
                    ids, lengths_of_batch = self._tokenise(batch)
                    tokens.append(ids.astype(self.spec.dtype))
                    lengths.append(lengths_of_batch)
                    self._check_parent()
                hashes = [hash_document(segment.lstrip()) for segment in waiting]
                sketch = merge_sketches(sketch, np.array(hashes, np.uint64))
                waiting, waiting_chars = [], 0
        documents = np.repeat(*np.array(segment_counts or [(0, 0)], np.int64).T)
        return _Segments(tokens, np.concatenate(lengths), np.array(begins, bool), documents, sketch)


def batch_by_characters(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of about BATCH_CHARS characters. Texts are not split."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def hash_document(text: str) -> int:
    """Hash a text to 64 bits, the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def merge_sketches(*hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the merged sketch: the SKETCH_HASHES smallest distinct hashes of all sketches, sorted."""
    return np.unique(np.concatenate(hashes))[:SKETCH_HASHES]


def estimate_distinct(sketch: NDArray[np.uint64]) -> float:
    """Estimate how many distinct hashes there are from the smallest ones (Bar-Yossef et al. 2002).

    The result is exact below SKETCH_HASHES. Above, its relative error is about 0.4 %.
    """
    if len(sketch) < SKETCH_HASHES:
        return float(len(sketch))
    return (SKETCH_HASHES - 1) / ((float(sketch[-1]) + 1) / 2**64)


# ---------------------------------------------------------------------------------------------------- all parts


def shard_name(index: int) -> str:
    """Return the name of the file with the tokens of a shard."""
    return f"tokens-{index:05}.bin"


def part_path(folder: Path, index: int) -> Path:
    """Return the file with the other arrays of a shard. It is written after the tokens; `finish` merges these files."""
    return folder / PARTS / f"{index:05}.npz"


def read_part(folder: Path, index: int) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
    """Read the arrays of a finished shard, and its counts."""
    with np.load(part_path(folder, index), allow_pickle=False) as part:
        return {name: part[name] for name in part.files if name != "tally"}, json.loads(part["tally"].tobytes())


def finish(folder: Path, num_parts: int, about: Mapping[str, object]) -> None:
    """Merge the parts of all shards and write the manifest. The call may be repeated after an interruption.

    Args:
        folder: folder of the corpus.
        num_parts: how many shards there are.
        about: values of the manifest that do not come from the parts.
    """
    totals: Counter[str] = Counter()
    shards, sketch = [], np.zeros(0, np.uint64)
    paths = [folder / f"{name}.bin" for name in ARRAYS]
    with ExitStack() as stack:
        documents, segments, paragraphs, hashes = (stack.enter_context(atomic_file(path)) for path in paths)
        documents.write(np.zeros(1, "<i8").data)
        segments.write(np.zeros(1, "<i8").data)
        for index in range(num_parts):
            part, counts = read_part(folder, index)
            documents.write((totals["segments"] + np.cumsum(part["counts"])).astype("<i8").data)
            segments.write((totals["tokens"] + np.cumsum(part["lengths"], dtype=np.int64)).astype("<i8").data)
            paragraphs.write(part["begins"].data)
            hashes.write(part["hashes"].astype("<u8").data)
            shards.append({"file": shard_name(index), "tokens": counts["tokens"]})
            sketch = merge_sketches(sketch, part["sketch"])
            totals.update(counts)
    num_distinct = len(np.unique(map_array(paths[3], "<u8")))
    summary = {
        "counts": {name: totals[name] for name in ("documents", "segments", "tokens", "characters", "unknown")},
        "left_out": {name: totals[name] for name in ("exact", "near", "short", "empty")},
        "repeated": {
            "documents": 1 - num_distinct / max(totals["documents"], 1),
            "segments": max(0.0, 1 - estimate_distinct(sketch) / max(totals["segments"], 1)),
        },
        "shards": shards,
    }
    write_corpus_json(folder / MANIFEST, dict(about) | summary)


# ---------------------------------------------------------------------------------------------------- files


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing. The file appears complete and synced, or not at all."""
    try:
        with atomic_io.atomic_path(path) as temporary, temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}; what is done is kept, try again") from None


def read_corpus_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a corpus; raise DataError if the file is damaged."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: is damaged: it holds no object")
    return value


def write_corpus_json(path: Path, value: Mapping[str, object]) -> None:
    """Write an object as a JSON file. The file appears complete or not at all."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))
