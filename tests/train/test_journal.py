"""What is written is there, also after a cut; what came after a checkpoint is forgotten."""

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
    """In a folder that is not there yet."""
    return tmp_path / "a" / "run" / "journal.jsonl"


def test_a_line_for_each_record(path: Path) -> None:
    told = [{"step": 1, "loss": 0.1 + 0.2}, {"dev": {"für ☃": [True, None, {"a": "b\n"}]}}, {}]
    book = Journal(path)
    for record in told:
        book.write(record)
        assert book.num_bytes == path.stat().st_size  # nothing waits in the process
    assert list(read_journal(path)) == told
    assert path.read_bytes().count(b"\n") == 3 and "für ☃" in path.read_text(encoding="utf-8")
    book.close()
    again = Journal(path)
    assert again.num_bytes == path.stat().st_size
    again.write({"step": 2})
    again.close()
    assert list(read_journal(path)) == [*told, {"step": 2}]


def test_numbers_that_are_not_finite_are_texts(path: Path) -> None:
    book = Journal(path)
    book.write({"loss": math.nan, "rest": [math.inf, (-math.inf, np.float64("nan"))], "right": {"a": 1e300}})
    book.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(path.read_bytes(), parse_constant=refuse)
    assert found == {"loss": "NaN", "rest": ["Infinity", ["-Infinity", "NaN"]], "right": {"a": 1e300}}
    assert math.isnan(float(found["loss"])) and float(found["rest"][1][0]) == -math.inf


def test_half_a_surrogate_pair_comes_back(path: Path) -> None:
    book = Journal(path)
    book.write({"\ud800": "a\udfff\U0001f600"})
    book.close()
    assert list(read_journal(path)) == [{"\ud800": "a\udfff\U0001f600"}]


def test_rewound_it_goes_on_from_there(path: Path) -> None:
    book = Journal(path)
    sizes = []
    for step in range(5):
        sizes.append(book.num_bytes)
        book.write({"step": step})
    book.close()
    for size in (sizes[3], sizes[1], 0):
        book = Journal(path)
        book.rewind(size)
        assert book.num_bytes == path.stat().st_size == size
        book.write({"again": True})
        book.close()
        assert list(read_journal(path)) == [*({"step": step} for step in range(sizes.index(size))), {"again": True}]


def test_lines_that_are_lost_are_an_error(path: Path) -> None:
    book = Journal(path)
    book.write({"step": 1})
    with pytest.raises(HeedfulError, match=r"journal.jsonl has 12 bytes, but 1,300"):
        book.rewind(1300)
    assert list(read_journal(path)) == [{"step": 1}]
    book.close()


@pytest.mark.parametrize("torn", [b'{"st', b'{"step": 2}', b"\0\0\0"])
def test_a_torn_last_line_is_left_out(path: Path, torn: bytes) -> None:
    book = Journal(path)
    book.write({"step": 1})
    size = book.num_bytes
    book.close()
    with path.open("ab") as file:
        file.write(torn)
    assert list(read_journal(path)) == [{"step": 1}]
    book = Journal(path)
    book.rewind(size)
    book.close()
    assert path.stat().st_size == size


def test_a_line_that_is_none_is_named(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"step": 1}\n{"step": \n')
    found = read_journal(path)
    assert next(found) == {"step": 1}
    with pytest.raises(HeedfulError, match=r"journal\.jsonl:2: "):
        next(found)


def test_it_is_on_the_disk_before_a_checkpoint_counts_on_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    original = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        original(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    book = Journal(path)
    assert synced == [path.parents[2].name, "a", "run"]  # the names of the folders, and the file's own
    book.write({"step": 1})
    book.sync()
    assert synced[3:] == ["journal.jsonl"]
    book.close()


def refused(number: int) -> Any:
    def call(*given: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_a_journal_that_cannot_be_written_warns_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(atomic_io, "_mkdir", refused(30))
        with pytest.raises(HeedfulError, match=r"a/run/journal.jsonl .*Read-only file system"):
            Journal(path)
    path.parent.parent.touch()
    with pytest.raises(HeedfulError, match=r"journal.jsonl cannot be written: File exists"):
        Journal(path)
    path.parent.parent.unlink()
    book = Journal(path)
    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", refused(5))
        with pytest.raises(HeedfulError, match="cannot be written: Input/output error"):
            book.sync()
    book.close()


def test_a_full_disk_does_not_stop_the_journal(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    book = Journal(path)
    with pytest.raises(HeedfulError, match="cannot be written: No space left on device"):
        book.write({"step": 1})
    book.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(HeedfulError, match="cannot be written: Permission denied"):
            Journal(tmp_path / "journal.jsonl")
    finally:
        tmp_path.chmod(0o755)
