"""Checkpoints of a run: saved so that each is complete or missing, and loaded from the newest valid one.

A crash or a power cut is harmless at any moment. All files are written under a temporary name and synced, the manifest
last; then the folder gets its name; then `latest` names it; only then are older checkpoints removed.

Tensors are written by this module, because the safetensors library does not sync: one tensor at a time, hashed as it is
written. Nothing is mapped into memory. `checkpoint_format` defines the files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.atomic_io import Chunk, as_bytes, atomic_path, checksum, make_folder, remove, remove_stale, write_synced
from heedful.errors import HeedfulError, HeedfulWarning, RunError
from heedful.train.checkpoint_format import (
    DTYPES,
    LAYOUT,
    MANIFEST,
    TENSORS,
    VALUES,
    DamageError,
    check_manifest,
    manifest_json,
    open_file,
    safetensors_chunks,
    tensor_layouts,
    values_json,
)
from heedful.train.ranks import Ranks

LATEST = "latest"  # file that names the newest checkpoint, for people


class Checkpoint(NamedTuple):
    """A loaded checkpoint."""

    step: int
    folder: Path
    tensors: dict[str, Tensor]  # the saved tensors, bit for bit, on the CPU; each has its own memory
    values: dict[str, Any]  # plain JSON data


class _Entry(NamedTuple):
    """A folder with the name of a checkpoint, valid or not; entries are ordered from the oldest to the newest."""

    step: int
    attempt: int  # from 1; more than 1 if a different or damaged checkpoint of that step existed
    path: Path


class CheckpointManager:
    """The checkpoints of one run in one folder; only the process that holds the run's lock may save."""

    def __init__(self, folder: Path, *, keep_last: int = 2) -> None:
        if keep_last < 1:
            raise HeedfulError(f"keep_last is {keep_last}; expected a number of checkpoints from 1")
        self.folder = folder.absolute()
        self.keep_last = keep_last
        self._damaged: set[Path] = set()  # checkpoints that were read and are damaged

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, object]) -> Path:
        """Save a checkpoint; after the return, not even a power cut undoes it.

        If a valid and equal checkpoint of the step exists, it stays. Otherwise the new one is written beside the old
        one, which is removed afterwards.

        Raises:
            RunError: If a valid checkpoint of a later step exists, which `load` would return, or on I/O errors.
        """
        assert step >= 0
        files: dict[str, list[Chunk]] = {TENSORS: safetensors_chunks(tensors), VALUES: [values_json(values)]}
        with self._translate_os_errors(step):
            entries = self._entries_of(step)
            if not entries or not _is_equal(entries[-1], files):
                entries.append(self._new_entry(step, entries))
                with atomic_path(entries[-1].path, folder=True) as temporary:
                    digests = {name: write_synced(temporary / name, chunks) for name, chunks in files.items()}
                    write_synced(temporary / MANIFEST, [manifest_json(step, digests)])
            self._set_latest(entries[-1])
        return entries[-1].path

    def save_sharded(
        self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, object], ranks: Ranks
    ) -> None:
        """Save a checkpoint whose shards are on different ranks; all ranks call this, and rank 0 commits."""
        from heedful.train.checkpoint_sharded import write_shards

        text, entry = values_json(values), None
        with self._translate_os_errors(step), ExitStack() as stack:
            temporary = Path()
            if ranks.is_main:
                entry = self._new_entry(step, self._entries_of(step))
                temporary = stack.enter_context(atomic_path(entry.path, folder=True))
            temporary = Path(ranks.all_gather_object(str(temporary))[0])
            digests = write_shards(temporary, tensors, ranks)
            if entry is not None:
                digests[VALUES] = write_synced(temporary / VALUES, [text])
                write_synced(temporary / MANIFEST, [manifest_json(step, digests)])
        with self._translate_os_errors(step):
            if entry is not None:
                self._set_latest(entry)
        ranks.barrier()

    def load(self, like: Mapping[str, Tensor] | None = None) -> Checkpoint | None:
        """Load the newest valid checkpoint, that of the largest step; warns of newer checkpoints that are damaged.

        Args:
            like: Tensors of the state. For a sharded DTensor, only the shard of this rank is read. If None, all is.

        Returns:
            The checkpoint, or None if the run has none yet.

        Raises:
            RunError: If all checkpoints are damaged or lost.
        """
        damage: list[str] = []
        self._damaged.clear()
        try:
            entries = self._entries()
            expected = (self.folder / LATEST).exists()
        except OSError as error:
            raise RunError(f"{self.folder} cannot be read: {error.strerror or error}") from None
        for entry in reversed(entries):
            try:
                checkpoint = _load(entry, like or {})
            except DamageError as error:
                self._damaged.add(entry.path)
                damage.append(f"{entry.path.name} is damaged: {error}")
                continue
            for text in damage:
                message = f"{self.folder}: {text}; step {checkpoint.step} is used instead"
                warnings.warn(message, HeedfulWarning, stacklevel=2)
            return checkpoint
        if damage or expected:
            reason = "; ".join(damage[:5]) if damage else f"{LATEST} names one, but it is missing"
            raise RunError(
                f"{self.folder} has no valid checkpoint: {reason}. Restore one from a copy, or start again in another "
                "folder"
            )
        return None

    def check_space(self, bytes: int) -> None:
        """Raise a RunError unless there is disk space for `keep_last` checkpoints and one more.

        Args:
            bytes: Size of a checkpoint.
        """
        try:
            remove_stale(self.folder)
            copies = self.keep_last + 1 - min(len(self._entries()), self.keep_last)
            existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
            free = shutil.disk_usage(existing).free
        except OSError as error:
            raise RunError(f"{self.folder} cannot be used: {error.strerror or error}") from None
        if free < bytes * copies:
            raise RunError(
                f"{self.folder}: {free:,} bytes are free, expected {bytes * copies:,}: {copies} checkpoints of "
                f"{bytes:,}, since {self.keep_last} are kept while the next is written. Make room, or save elsewhere"
            )

    @contextmanager
    def _translate_os_errors(self, step: int) -> Iterator[None]:
        """Context in which I/O errors become RunErrors that name the step."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{self.folder}: step {step} could not be saved: {error.strerror or error}; earlier checkpoints are "
                "unchanged. Make room there, or let the run save elsewhere, and start it again"
            ) from None

    def _entries_of(self, step: int) -> list[_Entry]:
        """Prepare the folder and return the checkpoints of that step; raises a RunError if a valid later one exists."""
        make_folder(self.folder)
        remove_stale(self.folder)
        entries = self._entries()
        self._check_none_later(entries, step)
        return [entry for entry in entries if entry.step == step]

    def _new_entry(self, step: int, entries: list[_Entry]) -> _Entry:
        """Return the entry of a new checkpoint beside those of the same step."""
        attempt = entries[-1].attempt + 1 if entries else 1
        return _Entry(step, attempt, self.folder / _name(step, attempt))

    def _set_latest(self, entry: _Entry) -> None:
        """Name a checkpoint as the newest one, and remove old ones."""
        with atomic_path(self.folder / LATEST) as temporary:
            write_synced(temporary, [f"{entry.path.name}\n".encode()])
        self._rotate(entry)

    def _entries(self) -> list[_Entry]:
        """Return all folders with the name of a checkpoint, oldest first."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            if self.folder.is_symlink():
                raise  # the target of a broken link may have checkpoints
            return []
        matches = [re.fullmatch(r"step-([0-9]{8,18})(?:-([0-9]{1,9}))?", name) for name in names]
        entries = [_Entry(int(match[1]), int(match[2] or 1), self.folder / match[0]) for match in matches if match]
        return sorted(entry for entry in entries if entry.path.name == _name(entry.step, entry.attempt))

    def _check_none_later(self, entries: list[_Entry], step: int) -> None:
        """Raise a RunError if one of the entries is a valid checkpoint of a later step."""
        for entry in entries:
            if entry.step > step and entry.path not in self._damaged:
                try:
                    check_manifest(entry.path, entry.step)
                except DamageError:
                    self._damaged.add(entry.path)
                    continue
                raise RunError(
                    f"{self.folder}: step {step} cannot be saved, since {entry.path.name} exists and is valid: resume "
                    "from it, remove it, or give the run another folder"
                )

    def _rotate(self, newest: _Entry) -> None:
        """Remove all but the `keep_last` newest valid checkpoints up to `newest`.

        Checkpoints after it are damaged, and stay until training has passed their step.
        """
        entries = [entry for entry in self._entries() if entry <= newest]
        valid = {entry.step: entry for entry in entries if entry == newest or entry.path not in self._damaged}
        newest_valid = list(valid.values())[-self.keep_last :]
        for entry in entries:
            if entry not in newest_valid:
                remove(entry.path)


def _name(step: int, attempt: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}" + (f"-{attempt}" if attempt > 1 else "")


def _is_equal(entry: _Entry, files: Mapping[str, list[Chunk]]) -> bool:
    """Return whether a checkpoint is valid and has files with this content."""
    with suppress(DamageError):
        digests = {name: checksum(chunks) for name, chunks in files.items()}
        return check_manifest(entry.path, entry.step) == manifest_json(entry.step, digests)
    return False


def _load(entry: _Entry, like: Mapping[str, Tensor]) -> Checkpoint:
    """Load a checkpoint; raises a DamageError if it is not valid."""
    check_manifest(entry.path, entry.step)
    with open_file(entry.path / VALUES) as file:
        values = json.loads(file.read())
    if like or (entry.path / LAYOUT).exists():
        from heedful.train.checkpoint_sharded import read_shards

        return Checkpoint(entry.step, entry.path, read_shards(entry.path, tensor_layouts(entry.path), like), values)
    tensors = {}
    with open_file(entry.path / TENSORS) as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, item in header.items():
            tensors[name] = torch.empty(item["shape"], dtype=DTYPES[item["dtype"]])
            if file.readinto(as_bytes(tensors[name])) != tensors[name].nbytes:
                raise DamageError(f"{TENSORS} ended inside {name} while it was read")
    return Checkpoint(entry.step, entry.path, tensors, values)
