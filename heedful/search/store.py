"""The files of an index: parts that never change, and `index.json`, which names the parts of the last complete state.

A part is a folder with a segment of documents or with a word index. A change writes new parts beside the old ones,
replaces `index.json` in one step, and then removes the old parts. If the process is killed, `index.json` names a
complete state: that before the change, or that after it. The next change removes parts that `index.json` does not name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from heedful.atomic_io import atomic_path, make_folder, remove, remove_stale, write_synced
from heedful.errors import HeedfulError
from heedful.search.vectors import VectorFormat
from heedful.settings import from_mapping, to_mapping
from heedful.train.run_lock import lock_run
from heedful.untrusted_files import read_json

STATE = "index.json"
LOCK = "index.lock"
MAX_BYTES = 256 << 20  # maximum bytes of index.json
VERSION = 1  # version of the file format


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSettings:
    """The settings of an index, which do not change."""

    model: str  # path or name of the sentence embedding model
    fingerprint: str  # fingerprint of the model, which must not change
    width: int  # dimension of the embeddings
    vectors: VectorFormat  # format in which embeddings are stored
    language: str  # language for stemming and stop words, or "none"
    passage_tokens: int  # maximum tokens of a passage


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentFacts:
    """Name and size of a segment: a folder with some of the documents, their passages and vectors."""

    name: str  # name of the folder
    documents: int  # number of documents
    passages: int  # number of passages


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexState:
    """A complete state of an index. The index of a document counts from 0 over all segments, deleted ones included."""

    version: int = VERSION
    generation: int = 0  # number of changes so far
    settings: IndexSettings
    segments: tuple[SegmentFacts, ...] = ()
    words: str = ""  # folder of the word index; "" before the first documents
    deleted: tuple[int, ...] = ()  # indices of deleted documents, ascending

    @property
    def documents(self) -> int:
        """The number of documents, deleted ones included."""
        return sum(segment.documents for segment in self.segments)


def is_index(folder: str | Path) -> bool:
    """Return whether a folder holds an index."""
    return (Path(folder) / STATE).is_file()


def read_state(folder: Path) -> IndexState:
    """Return the last complete state.

    Raises:
        HeedfulError: If the folder holds no index, or one of another version.
    """
    try:
        table = read_json(folder, STATE, max_bytes=MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise HeedfulError(
            f"{folder} holds no index: it has no {STATE}; make one with heedful index DOCUMENTS --output {folder}"
        ) from None
    version = table.get("version") if isinstance(table, dict) else None
    if version != VERSION:
        raise HeedfulError(f"{folder / STATE} has version {version}, expected {VERSION}: build the index again")
    return from_mapping(IndexState, table, source=str(folder / STATE))


def commit_state(folder: Path, state: IndexState) -> None:
    """Replace `index.json` in one step, and remove the parts that only the previous state named."""
    with atomic_path(folder / STATE) as part:
        write_synced(part, [json.dumps(to_mapping(state), indent=1).encode()])
    remove_unnamed(folder, state)


def remove_unnamed(folder: Path, state: IndexState) -> None:
    """Remove parts that the state does not name: those of earlier states and of interrupted changes."""
    remove_stale(folder)
    named = {state.words, *(segment.name for segment in state.segments)}
    for path in folder.iterdir():
        if path.name.startswith(("segment-", "words-")) and path.name not in named:
            remove(path)
        elif path.name.startswith(".") and path.name.endswith(".part") and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # left by a process that died, since this one holds the lock


@contextmanager
def locked_for_writing(folder: Path) -> Iterator[None]:
    """Hold the lock of an index within a `with` block. One process at a time can hold it.

    Raises:
        HeedfulError: If another process holds it, or the folder cannot be written.
    """
    try:
        make_folder(folder)
    except OSError as error:
        raise HeedfulError(f"{folder} cannot be written: {error.strerror}") from None
    with lock_run(folder, name=LOCK, holder="process"):
        try:
            remove_stale(folder)
            yield
        except OSError as error:
            raise HeedfulError(
                f"{folder} could not be changed: {error.strerror or error}; its last complete state is as it was"
            ) from error
