"""A folder that several processes fill with numbered parts, on one machine or on machines that share the folder.

A process claims part n by locking byte n of a file. When a process dies, the kernel or the file server releases its
locks, so no claim outlives its process. The result does not depend on the locks: a part has the same content whichever
process writes it, and appears complete or not at all. If locks do not work across machines, some parts are written
twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from heedful.atomic_io import atomic_path, make_folder, write_synced
from heedful.data.bad_rows import shown
from heedful.errors import HeedfulError

# names in the folder; programs such as Spark ignore names that begin with _
PLAN, CLAIMS, PARTS, SUCCESS = "_plan.json", "_claims", "_parts", "_SUCCESS"
PLAN_BYTE = 1 << 40  # byte of the claims file to lock before the plan is read or written
SINGLE_BYTE = PLAN_BYTE + 1  # byte that a process locks if it shares the folder with no other process
STALE_SECONDS = 600.0  # seconds without a change after which a temporary file counts as abandoned
POLL_SECONDS = 0.5  # seconds between checks of parts that other processes write
Tally = dict[str, Any]  # record of a part, or of all parts: counts, size, first error


class SharedOutput:
    """An output folder that one process has opened; see `open_output`."""

    def __init__(self, out: Path, suffix: str, handle: int) -> None:
        """Store the folder, the suffix of the parts, and the file descriptor of the open claims file."""
        self.out = out
        self._suffix, self._handle = suffix, handle
        self._owner = f"x{uuid4().hex}"  # unlike a process id, unique across machines

    def path(self, number: int) -> Path:
        """Return the path of a part; the order of the names is the order of the parts."""
        return self.out / f"part-{number:08d}.{self._suffix}"

    def finished(self, number: int) -> Tally | None:
        """Return the record of a finished part; None if the part is missing or its size has changed."""
        try:
            tally: Tally = json.loads((self.out / PARTS / f"{number:08d}.json").read_bytes())
            return tally if self.path(number).stat().st_size == tally["bytes"] else None
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return None

    def claim(self, number: int) -> bool:
        """Claim a part for this process; return False if the part is finished or claimed by another process."""
        if self.finished(number) is not None or not _lock(self._handle, number):
            return False
        if self.finished(number) is None:
            return True
        self.release(number)
        return False

    def release(self, number: int) -> None:
        """Release this process's claim on a part, whether the part is finished or not."""
        fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, number)

    def write(self, number: int, chunks: Iterable[bytes], tally: Callable[[], Mapping[str, object]]) -> Tally:
        """Write a claimed part, and return its record.

        Args:
            number: Number of the part.
            chunks: Bytes of the part.
            tally: Returns the entries of the record besides size and checksum; called after the last chunk.
        """
        self._remove_stale(f".{self.path(number).name}.*.part", STALE_SECONDS)
        record: Tally = {}
        try:
            with atomic_path(self.path(number), owner=self._owner) as temporary:
                record |= {**write_synced(temporary, chunks), **tally()}
                # the record is written first, so that every part has one when it appears
                _write_json(self.out / PARTS / f"{number:08d}.json", record, self._owner)
        except FileNotFoundError:
            if self.finished(number) is None:  # else another process wrote the part and removed the temporary file
                raise
        return record

    def wait(self, numbers: Iterable[int]) -> bool:
        """Wait until one of these parts can be claimed (return True), or all of them are finished (return False)."""
        unfinished = list(numbers)
        while unfinished := [number for number in unfinished if self.finished(number) is None]:
            for number in unfinished:
                if self.claim(number):
                    self.release(number)
                    return True
            time.sleep(POLL_SECONDS)
        return False

    def done(self) -> Tally | None:
        """Return the record that `finish` wrote; None if the record or a part is missing, or a part has changed."""
        try:
            record: Tally = json.loads((self.out / SUCCESS).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return record if all(self.finished(number) for number in range(record["parts"])) else None

    def finish(self, count: int, more: Mapping[str, object]) -> Tally:
        """Mark the folder as complete by writing the record of all parts, and return the record.

        Args:
            count: Number of parts; all must be finished.
            more: Further entries of the record.
        """
        tallies = [tally for number in range(count) if (tally := self.finished(number)) is not None]
        assert len(tallies) == count
        sums = {name: sum(tally[name] for tally in tallies) for name in ("rows", "answered", "errors", "bytes")}
        record: Tally = {"parts": count, **sums, **more, "each": tallies}
        _write_json(self.out / SUCCESS, record, self._owner)
        self._remove_stale(".part-*.part")
        return record

    def _remove_stale(self, pattern: str, seconds: float = 0.0) -> None:
        """Remove temporary files of dead processes.

        Args:
            pattern: Pattern of their names.
            seconds: Remove only files that have not changed for this time; if locks do not work across machines,
                another machine may be writing the others.
        """
        for path in self.out.glob(pattern):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime >= seconds:
                    path.unlink()


@contextmanager
def open_output(out: Path, plan: Mapping[str, object], suffix: str, *, shared: bool = True) -> Iterator[SharedOutput]:
    """Open a new output folder, or one that was created with the same plan.

    Args:
        out: The folder.
        plan: All facts that determine the content of the parts, as plain data.
        suffix: Suffix of the parts.
        shared: Whether other processes may fill the folder at the same time.

    Raises:
        HeedfulError: If the folder holds other files, was created with another plan, or cannot be written; if it is not
            shared, and another process fills it.
    """
    try:
        existing = out.iterdir() if out.is_dir() and not (out / PLAN).is_file() else iter(())
        if names := sorted(path.name for path in existing if not path.name.startswith((".", CLAIMS, PARTS))):
            raise HeedfulError(f"{out}: holds {shown(names[0])} and no answers: give a new folder, or an empty one")
        make_folder(out)
        handle = os.open(out / CLAIMS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise HeedfulError(f"{out}: cannot be written: {error.strerror}") from None
    try:
        if not shared and not _lock(handle, SINGLE_BYTE):
            raise HeedfulError(
                f"{out}: another process is filling this folder, whose parts become one file: wait for it, or give a "
                "folder as the output, which several processes can share"
            )
        output = SharedOutput(out, suffix, handle)
        _lock(handle, PLAN_BYTE, wait=True)
        try:
            _check_plan(output, json.loads(json.dumps(plan)))
        finally:
            output.release(PLAN_BYTE)
        yield output
    finally:
        os.close(handle)


def _check_plan(output: SharedOutput, plan: Mapping[str, object]) -> None:
    """Write the plan to a new folder, or raise a HeedfulError if an existing folder has another plan."""
    path = output.out / PLAN
    if not path.is_file():
        make_folder(output.out / PARTS)
        _write_json(path, plan, output._owner)
        return
    try:
        old_plan = json.loads(path.read_bytes())
    except ValueError:
        raise HeedfulError(f"{path}: is damaged: remove the folder, or give another one") from None
    if differences := list(_differences(old_plan, plan)):
        more = f"; and {len(differences) - 4} more" if differences[4:] else ""
        raise HeedfulError(
            f"{output.out}: holds answers of another run: {'; '.join(differences[:4])}{more}. Give another folder, or "
            "give the same command again to resume that run"
        )


def _differences(old: object, new: object, name: str = "") -> Iterator[str]:
    """Yield a description of each value that differs between two plans, named by the keys that lead to it."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*new, *old]):
            yield from _differences(old.get(key), new.get(key), f"{name} {key}".strip())
    elif old != new:
        yield f"{name} was {shown(old)} and is {shown(new)} now"


def _write_json(path: Path, value: Mapping[str, object], owner: str) -> None:
    """Write JSON to a file, which appears complete or not at all."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_path(path, owner=owner) as temporary:
        write_synced(temporary, [text.encode(errors="backslashreplace")])


def _lock(handle: int, byte: int, *, wait: bool = False) -> bool:
    """Lock a byte of the claims file; if another process holds the lock, wait for it or return False."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise HeedfulError(
            f"parts cannot be claimed: {error.strerror}; the file system of the folder has no locks: give a folder on "
            "another file system"
        ) from None
    return True
