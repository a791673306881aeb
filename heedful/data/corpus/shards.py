"""A corpus of token shards: written a chunk of documents at a time, read through memory maps."""

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
from heedful.errors import HeedfulError

VERSION = 1
MANIFEST, PARTS = "manifest.json", "parts"
BATCH = 400_000  # characters that are tokenised at once: their encodings take some hundred times that
MOST_OPEN = 100  # shards that are mapped at a time
SKETCH = 1 << 16  # the least hashes of segments that are kept, from which different ones are counted
ARRAYS = {"documents": "<i8", "segments": "<i8", "paragraphs": "|b1", "hashes": "<u8"}
Ids = Callable[[list[str]], tuple[NDArray[np.int32], NDArray[np.int64]]]  # tokens of all texts, and how many of each


class Corpus:
    """Documents as tokens, in the order of the input; nothing is read before it is asked for."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """For `open`, which checks."""
        self.folder = folder
        self.about = about
        self.fingerprint: str = about["fingerprint"]  # of the tokenizer that made it
        self.vocabulary: int = about["vocabulary"]
        self.count: int = about["counts"]["tokens"]
        self.documents: NDArray[np.int64] = self._map("documents")  # [documents + 1] number of the first segment
        self.segments: NDArray[np.int64] = self._map("segments")  # [segments + 1] offset of the first token
        self.paragraphs: NDArray[np.bool_] = self._map("paragraphs")  # [segments] whether a paragraph begins there
        self.hashes: NDArray[np.uint64] = self._map("hashes")  # [documents] of the normalised texts
        self._starts = np.cumsum([0, *(shard["tokens"] for shard in about["shards"])])
        self._open: dict[int, NDArray[Any]] = {}  # shards that are mapped; each costs a file handle

    def _map(self, name: str) -> NDArray[Any]:
        return mapped(self.folder / f"{name}.bin", ARRAYS[name])

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """A finished corpus; a HeedfulError says what is missing or damaged (sizes are checked, not contents)."""
        if not (folder / MANIFEST).is_file():
            unfinished = (folder / PARTS).is_dir()
            what = "is not finished: build it again with the same files and settings, and it resumes"
            raise HeedfulError(f"{folder}: {what if unfinished else f'is no corpus: it has no {MANIFEST}'}")
        about = read_json(folder / MANIFEST)
        if about.get("version") != VERSION:
            raise HeedfulError(f"{folder}: is a corpus of version {about.get('version')}, expected {VERSION}")
        try:
            counts, width = about["counts"], np.dtype(about["dtype"]).itemsize
            _ = about["fingerprint"], about["vocabulary"], counts["tokens"]
            lengths = {"documents": counts["documents"] + 1, "segments": counts["segments"] + 1}
            lengths |= {"paragraphs": counts["segments"], "hashes": counts["documents"]}
            sizes = {f"{name}.bin": lengths[name] * np.dtype(kind).itemsize for name, kind in ARRAYS.items()}
            sizes |= {shard["file"]: shard["tokens"] * width for shard in about["shards"]}
        except (LookupError, TypeError) as error:
            raise HeedfulError(f"{folder / MANIFEST}: is damaged: {error}; build the corpus again") from None
        for name, size in sizes.items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != size:
                has = "is missing" if found is None else f"has {found:,} bytes, expected {size:,}"
                raise HeedfulError(f"{folder / name}: {has}: the corpus is damaged, build it again in a new folder")
        return cls(folder, about)

    def __len__(self) -> int:
        """How many documents."""
        return len(self.hashes)

    def __repr__(self) -> str:
        """Where it is and how much it holds."""
        return f"Corpus({str(self.folder)!r}, documents={len(self)}, tokens={self.count})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus.open, (self.folder,)

    @property
    def digest(self) -> str:
        """SHA-256 over what its manifest says but for times: files with their hashes, settings, tokenizer, counts."""
        said = {name: value for name, value in self.about.items() if name != "seconds"}
        return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """The tokens from start up to stop of the whole stream, across shards: a copy."""
        if not 0 <= start <= stop <= self.count:
            raise HeedfulError(f"tokens {start} to {stop} were asked for, but the corpus has 0 to {self.count}")
        found = np.empty(stop - start, np.int32)
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = start
        while at < stop:
            first, last = int(self._starts[number]), int(self._starts[number + 1])
            until = min(stop, last)
            if until > at:
                found[at - start : until - start] = self._shard(number)[at - first : until - first]
                at = until
            number += 1
        return found

    def _shard(self, number: int) -> NDArray[Any]:
        if number not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open)))
            shard = self.about["shards"][number]
            self._open[number] = mapped(self.folder / shard["file"], self.about["dtype"])
        return self._open[number]


def mapped(path: Path, kind: str) -> NDArray[Any]:
    """The numbers of a file, read only."""
    if path.stat().st_size == 0:  # which cannot be mapped
        return np.zeros(0, kind)
    return np.memmap(path, kind, mode="r").view(np.ndarray)


# ---------------------------------------------------------------------------------------------------- a chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """What is done to every chunk."""

    folder: Path
    dtype: str
    shortest: int
    judged: bool  # whether someone decides which documents stay
    bands: int  # of signatures; 0: none
    unknown: int | None  # the token that stands for what the tokenizer does not know


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupKeys:
    """The documents of a chunk by what tells them apart."""

    hashes: NDArray[np.uint64]
    signatures: NDArray[np.uint32]  # [documents, 128], or [0, 128] where near duplicates are kept


class ShardWriter:
    """Chunks of documents to parts of a corpus: `begin` cleans and offers them, `end` tokenises and writes those kept.

    A chunk is texts, each with whether it is lines.
    """

    def __init__(self, job: ShardSpec, ids: Ids, check: Callable[[], None] = lambda: None) -> None:
        self.job, self._ids, self._check = job, ids, check
        self._texts: list[tuple[str, bool]] = []
        self._tally: Counter[str] = Counter()
        self._offer: DedupKeys

    def begin(self, chunk: list[tuple[str, bool]]) -> DedupKeys:
        """Clean the documents; those without text and the short ones are left out."""
        self._tally, self._texts = Counter(read=len(chunk)), []
        chunk.reverse()
        while chunk:  # so that the raw text goes as the clean one comes
            text, lines = chunk.pop()
            text = clean_text(text, lines=lines)
            if not text or len(text) < self.job.shortest:
                self._tally["short" if text else "empty"] += 1
            else:
                self._texts.append((text, lines))
            self._check()
        hashes = np.array([hash_text(text) for text, _ in self._texts], np.uint64)
        self._offer = DedupKeys(
            hashes=hashes, signatures=minhash_signatures(text for text, _ in self._texts if self.job.bands)
        )
        return self._offer

    def end(self, number: int, verdict: NDArray[np.uint8] | None) -> dict[str, int]:
        """Tokenise what is kept (None: everything) and write part `number`; what was counted."""
        tokens, lengths, begins, sketch, owners = self._tokenised(verdict)
        filled = np.flatnonzero(lengths)
        paragraph = np.cumsum(begins)[filled]
        counts = np.bincount(owners[filled], minlength=len(self._texts))
        kept = np.flatnonzero(counts)  # documents
        tally = self._tally
        tally["tokens"], tally["segments"], tally["documents"] = int(lengths.sum()), len(filled), len(kept)
        tally["unknown"] = sum(int((each == self.job.unknown).sum()) for each in tokens if self.job.unknown is not None)
        if verdict is not None:
            tally["exact"], tally["near"] = int((verdict == 1).sum()), int((verdict == 2).sum())
        tally["empty"] += len(self._texts) - len(kept) - tally["exact"] - tally["near"]
        tally["characters"] = sum(len(self._texts[index][0]) for index in kept)
        with whole(self.job.folder / shard_name(number)) as file:
            for each in tokens:
                file.write(each.data)
        with whole(part_path(self.job.folder, number)) as file:
            np.savez(
                file,
                lengths=lengths[filled].astype(np.int32),
                begins=np.diff(paragraph, prepend=0) > 0,
                counts=counts[kept].astype(np.int64),
                hashes=self._offer.hashes[kept],
                sketch=sketch,
                offered=self._offer.hashes if self.job.judged else self._offer.hashes[:0],
                signatures=self._offer.signatures,
                tally=np.frombuffer(json.dumps(tally).encode(), np.uint8),
            )
        self._texts = []
        return dict(tally)

    def _tokenised(self, verdict: NDArray[np.uint8] | None) -> Any:
        """Tokens in pieces; of each segment its length, whether it begins a paragraph, and its document; the sketch."""
        tokens, lengths = [np.zeros(0, self.job.dtype)], [np.zeros(0, np.int64)]
        begins, owners, waiting, size = [], [], [], 0
        sketch = np.zeros(0, np.uint64)
        hashes: list[int] = []
        for number, (text, lines) in enumerate(self._texts):
            if verdict is None or verdict[number] == KEEP:
                found, begin = split_sentences(text, lines=lines)
                waiting += found
                begins += begin
                owners.append((number, len(found)))
                size += len(text)
            if (size > BATCH or number == len(self._texts) - 1) and waiting:
                for batch in batch_by_characters(waiting):
                    made, count = self._ids(batch)
                    tokens.append(made.astype(self.job.dtype))
                    lengths.append(count)
                    self._check()
                hashes += (hash_text(each.lstrip()) for each in waiting)
                sketch = merge_sketches(sketch, np.array(hashes, np.uint64))
                hashes, waiting, size = [], [], 0
        owned = np.repeat(*np.array(owners or [(0, 0)], np.int64).T)
        return tokens, np.concatenate(lengths), np.array(begins, bool), sketch, owned


def batch_by_characters(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in lists of some 400,000 characters."""
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


def hash_text(text: str) -> int:
    """64 bits of a text, the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def merge_sketches(*hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The 65,536 least of different hashes, sorted: from the last of them one estimates how many there are."""
    return np.unique(np.concatenate(hashes))[:SKETCH]


def estimate_distinct(sketch: NDArray[np.uint64]) -> float:
    """How many different hashes there were: exact up to 65,535, then within about 0.4 % (Bar-Yossef et al. 2002)."""
    return float(len(sketch)) if len(sketch) < SKETCH else (SKETCH - 1) / ((float(sketch[-1]) + 1) / 2**64)


# ---------------------------------------------------------------------------------------------------- all parts


def shard_name(number: int) -> str:
    """How the file of a part's tokens is called."""
    return f"tokens-{number:05}.bin"


def part_path(folder: Path, number: int) -> Path:
    """Where the rest of a part is kept until all are there; it is written last."""
    return folder / PARTS / f"{number:05}.npz"


def read_part(folder: Path, number: int) -> Mapping[str, Any]:
    """A part that is there; its tally is plain data."""
    with np.load(part_path(folder, number), allow_pickle=False) as part:
        found = {name: part[name] for name in part.files if name != "tally"}
        return found | {"tally": json.loads(part["tally"].tobytes())}


def finish(folder: Path, parts: int, about: Mapping[str, Any]) -> None:
    """Put the parts together, and say what the corpus is; whoever is killed here does it again."""
    tally: Counter[str] = Counter()
    shards, sketch = [], np.zeros(0, np.uint64)
    paths = [folder / f"{name}.bin" for name in ARRAYS]
    with ExitStack() as stack:
        documents, offsets, paragraphs, hashes = (stack.enter_context(whole(path)) for path in paths)
        documents.write(np.zeros(1, "<i8").data)
        offsets.write(np.zeros(1, "<i8").data)
        for number in range(parts):
            part = read_part(folder, number)
            documents.write((tally["segments"] + np.cumsum(part["counts"])).astype("<i8").data)
            offsets.write((tally["tokens"] + np.cumsum(part["lengths"], dtype=np.int64)).astype("<i8").data)
            paragraphs.write(part["begins"].data)
            hashes.write(part["hashes"].astype("<u8").data)
            shards.append({"file": shard_name(number), "tokens": part["tally"]["tokens"]})
            sketch = merge_sketches(sketch, part["sketch"])
            tally.update(part["tally"])
    count = tally["documents"]
    repeated = {
        "documents": 1 - len(np.unique(mapped(paths[3], "<u8"))) / max(count, 1),
        "segments": max(0.0, 1 - estimate_distinct(sketch) / max(tally["segments"], 1)),
    }
    counts = {name: tally[name] for name in ("documents", "segments", "tokens", "characters", "unknown")}
    left_out = {name: tally[name] for name in ("exact", "near", "short", "empty")}
    said = {"counts": counts, "left_out": left_out, "repeated": repeated, "shards": shards}
    write_json(folder / MANIFEST, dict(about) | said)


# ---------------------------------------------------------------------------------------------------- files


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file that is there whole and for good, or not at all."""
    try:
        with atomic_io.atomic_path(path) as part, part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise HeedfulError(f"{path}: cannot be written: {error.strerror}; what is done is kept, try again") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of ours."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise HeedfulError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise HeedfulError(f"{path}: is damaged: it holds no object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """An object as a JSON file."""
    with whole(path) as file:
        file.write(
            (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")
        )
