"""The journal: records survive a kill, and a resumed run continues where its checkpoint was made."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heedful import atomic_io
from heedful.errors import HeedfulError
from heedful.train import journal
from heedful.train.journal import Journal, read_journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A path in a folder that does not exist."""
    return tmp_path / "a" / "run" / "journal.jsonl"


def test_records_are_read_back(path: Path) -> None:
    records = [{"step": 1, "loss": 0.1 + 0.2}, {"dev": {"für ☃": [True, None, {"a": "b\n"}]}}, {}]
    journal_file = Journal(path)
    for record in records:
        journal_file.write(record)
        assert journal_file.num_bytes == path.stat().st_size  # nothing is buffered
    assert list(read_journal(path)) == records
    assert path.read_bytes().count(b"\n") == 3 and "für ☃" in path.read_text(encoding="utf-8")
    journal_file.close()
    reopened = Journal(path)
    assert reopened.num_bytes == path.stat().st_size
    reopened.write({"step": 2})
    reopened.close()
    assert list(read_journal(path)) == [*records, {"step": 2}]


def test_numbers_that_are_not_finite_are_strings(path: Path) -> None:
    journal_file = Journal(path)
    journal_file.write({"loss": math.nan, "rest": [math.inf, (-math.inf, np.float64("nan"))], "right": {"a": 1e300}})
    journal_file.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    record = json.loads(path.read_bytes(), parse_constant=refuse)
    assert record == {"loss": "NaN", "rest": ["Infinity", ["-Infinity", "NaN"]], "right": {"a": 1e300}}
    assert math.isnan(float(record["loss"])) and float(record["rest"][1][0]) == -math.inf


def test_half_a_surrogate_pair_is_restored(path: Path) -> None:
    journal_file = Journal(path)
    journal_file.write({"\ud800": "a\udfff\U0001f600"})
    journal_file.close()
    assert list(read_journal(path)) == [{"\ud800": "a\udfff\U0001f600"}]


def test_rewind_removes_later_records(path: Path) -> None:
    journal_file = Journal(path)
    sizes = []
    for step in range(5):
        sizes.append(journal_file.num_bytes)
        journal_file.write({"step": step})
    journal_file.close()
    for size in (sizes[3], sizes[1], 0):
        journal_file = Journal(path)
        journal_file.rewind(size)
        assert journal_file.num_bytes == path.stat().st_size == size
        journal_file.write({"resumed": True})
        journal_file.close()
        assert list(read_journal(path)) == [*({"step": step} for step in range(sizes.index(size))), {"resumed": True}]


def test_a_journal_shorter_than_its_checkpoint_is_an_error(path: Path) -> None:
    journal_file = Journal(path)
    journal_file.write({"step": 1})
    with pytest.raises(HeedfulError, match=r"journal.jsonl has 12 bytes, but 1,300"):
        journal_file.rewind(1300)
    assert list(read_journal(path)) == [{"step": 1}]
    journal_file.close()


@pytest.mark.parametrize("incomplete", [b'{"st', b'{"step": 2}', b"\0\0\0"])
def test_an_incomplete_last_line_is_ignored(path: Path, incomplete: bytes) -> None:
    journal_file = Journal(path)
    journal_file.write({"step": 1})
    size = journal_file.num_bytes
    journal_file.close()
    with path.open("ab") as file:
        file.write(incomplete)
    assert list(read_journal(path)) == [{"step": 1}]
    journal_file = Journal(path)
    journal_file.rewind(size)
    journal_file.close()
    assert path.stat().st_size == size


def test_a_line_that_is_not_json_is_an_error(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"step": 1}\n{"step": \n')
    lines = read_journal(path)
    assert next(lines) == {"step": 1}
    with pytest.raises(HeedfulError, match=r"journal\.jsonl:2: "):
        next(lines)


def test_sync_writes_the_journal_to_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    original = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        original(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    journal_file = Journal(path)
    assert synced == [path.parents[2].name, "a", "run"]  # entries of the new folders and of the file
    journal_file.write({"step": 1})
    journal_file.sync()
    assert synced[3:] == ["journal.jsonl"]
    journal_file.close()


def fail_with(number: int) -> Any:
    """Return a function that raises the OSError with this number."""

    def call(*arguments: Any, **keywords: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_a_journal_that_cannot_be_written_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(atomic_io, "_mkdir", fail_with(30))
        with pytest.raises(HeedfulError, match=r"a/run/journal.jsonl .*Read-only file system"):
            Journal(path)
    path.parent.parent.touch()
    with pytest.raises(HeedfulError, match=r"journal.jsonl cannot be written: File exists"):
        Journal(path)
    path.parent.parent.unlink()
    journal_file = Journal(path)
    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", fail_with(5))
        with pytest.raises(HeedfulError, match="cannot be written: Input/output error"):
            journal_file.sync()
    journal_file.close()


def test_a_full_disk_is_an_error(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    journal_file = Journal(path)
    with pytest.raises(HeedfulError, match="cannot be written: No space left on device"):
        journal_file.write({"step": 1})
    journal_file.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(HeedfulError, match="cannot be written: Permission denied"):
            Journal(tmp_path / "journal.jsonl")
    finally:
        tmp_path.chmod(0o755)
