"""A folder that processes fill with numbered parts, on one machine or on several that share it.

A part is claimed by a lock on the byte of its number in one file. The kernel, or the server of a shared folder, drops
the locks of a process that dies, however it dies; so no claim is left behind by a dead process. Whether a result is
right never hangs on a lock: a part has the same content whoever makes it, and appears whole or not at all. Where locks
do not reach across machines, work is done twice at worst.
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

PLAN, CLAIMS, PARTS, SUCCESS = "_plan.json", "_claims", "_parts", "_SUCCESS"  # other programs pass over names with _
PLAN_BYTE = 1 << 40  # the byte that is locked while the plan is looked at
STALE_SECONDS = 600.0  # seconds without a change after which what was begun counts as left behind
POLL = 0.5  # seconds between looks at parts that others make
Tally = dict[str, Any]


class SharedOutput:
    """The folder, opened by one process; `opened` makes it."""

    def __init__(self, out: Path, suffix: str, handle: int) -> None:
        """For `opened`."""
        self.out = out
        self._suffix, self._handle = suffix, handle
        self._owner = f"x{uuid4().hex}"  # machines that share a folder may have equal process numbers

    def path(self, number: int) -> Path:
        """Where a part is; names sort as the input does."""
        return self.out / f"part-{number:08d}.{self._suffix}"

    def finished(self, number: int) -> Tally | None:
        """Return the record of a finished part; None if it is missing or its size has changed."""
        try:
            tally: Tally = json.loads((self.out / PARTS / f"{number:08d}.json").read_bytes())
            return tally if self.path(number).stat().st_size == tally["bytes"] else None
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return None

    def claim(self, number: int) -> bool:
        """Whether the part is this process's to make."""
        if self.finished(number) is not None or not _lock(self._handle, number):
            return False
        if self.finished(number) is None:
            return True
        self.release(number)
        return False

    def release(self, number: int) -> None:
        """Give a part up, finished or not."""
        fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, number)

    def write(self, number: int, chunks: Iterable[bytes], tally: Callable[[], Mapping[str, object]]) -> Tally:
        """Make a part that was claimed; `tally` is asked when all of it is written."""
        self._sweep(f".{self.path(number).name}.*.part", STALE_SECONDS)
        known: Tally = {}
        try:
            with atomic_path(self.path(number), owner=self._owner) as temporary:
                known |= {**write_synced(temporary, chunks), **tally()}
                _put(self.out / PARTS / f"{number:08d}.json", known, self._owner)  # first: what is there is known
        except FileNotFoundError:
            if self.finished(number) is None:  # else another process made it too, where locks do not reach
                raise
        return known

    def wait(self, numbers: Iterable[int]) -> bool:
        """Until one of these parts can be claimed (True), or all are finished."""
        left = list(numbers)
        while left := [number for number in left if self.finished(number) is None]:
            for number in left:
                if self.claim(number):
                    self.release(number)
                    return True
            time.sleep(POLL)
        return False

    def done(self) -> Tally | None:
        """Return the record that is written when all parts are finished."""
        try:
            record: Tally = json.loads((self.out / SUCCESS).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return record if all(self.finished(number) for number in range(record["parts"])) else None

    def finish(self, count: int, more: Mapping[str, object]) -> Tally:
        """Say that all parts are there; the sums are over them."""
        tallies = [tally for number in range(count) if (tally := self.finished(number)) is not None]
        assert len(tallies) == count
        sums = {name: sum(tally[name] for tally in tallies) for name in ("rows", "answered", "errors", "bytes")}
        _put(self.out / SUCCESS, {"parts": count, **sums, **more, "each": tallies}, self._owner)
        self._sweep(".part-*.part")
        return {"parts": count, **sums, "each": tallies}

    def _sweep(self, pattern: str, seconds: float = 0.0) -> None:
        """Remove what processes that died left of parts that are finished, or claimed and not written to for so long.

        Where locks do not reach, another machine may be writing it.
        """
        for path in self.out.glob(pattern):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime >= seconds:
                    path.unlink()


@contextmanager
def open_output(out: Path, plan: Mapping[str, object], suffix: str) -> Iterator[SharedOutput]:
    """The folder for this plan: new, begun by the same one, or an error that says what differs."""
    try:
        existing = out.iterdir() if out.is_dir() and not (out / PLAN).is_file() else iter(())
        if names := sorted(path.name for path in existing if not path.name.startswith((".", CLAIMS, PARTS))):
            raise HeedfulError(f"{out}: holds {shown(names[0])} and no answers: give a new folder, or an empty one")
        make_folder(out)
        handle = os.open(out / CLAIMS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise HeedfulError(f"{out}: cannot be written: {error.strerror}") from None
    try:
        filled = SharedOutput(out, suffix, handle)
        _lock(handle, PLAN_BYTE, wait=True)
        try:
            _agree(filled, json.loads(json.dumps(plan)))
        finally:
            filled.release(PLAN_BYTE)
        yield filled
    finally:
        os.close(handle)


def _agree(filled: SharedOutput, plan: Mapping[str, object]) -> None:
    path = filled.out / PLAN
    if not path.is_file():
        make_folder(filled.out / PARTS)
        _put(path, plan, filled._owner)
        return
    try:
        old = json.loads(path.read_bytes())
    except ValueError:
        raise HeedfulError(f"{path}: is damaged: remove the folder, or give another one") from None
    if differing := list(_differing(old, plan)):
        more = f"; and {len(differing) - 4} more" if differing[4:] else ""
        raise HeedfulError(
            f"{filled.out}: holds answers of another run: {'; '.join(differing[:4])}{more}. Give another folder, or "
            "the same as then to resume"
        )


def _differing(old: object, new: object, name: str = "") -> Iterator[str]:
    """Which values differ, and how."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*new, *old]):
            yield from _differing(old.get(key), new.get(key), f"{name} {key}".strip())
    elif old != new:
        yield f"{name} was {shown(old)} and is {shown(new)} now"


def _put(path: Path, value: Mapping[str, object], owner: str) -> None:
    with atomic_path(path, owner=owner) as temporary:
        write_synced(
            temporary,
            [
                json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")
                + b"\n"
            ],
        )


def _lock(handle: int, byte: int, *, wait: bool = False) -> bool:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise HeedfulError(
            f"parts cannot be claimed: {error.strerror}: the file system of the folder has no locks, give a folder on "
            "another one"
        ) from None
    return True
