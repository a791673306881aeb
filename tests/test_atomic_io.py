"""Saving a checkpoint is atomic: a power cut, a kill or a full disk loses at most the checkpoint that is being saved.

All changes to the disk go through six functions of heedful/atomic_io.py. The tests record them, let them fail, or kill
the process at one of them. A commit saves one checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heedful import atomic_io
from heedful.errors import HeedfulError
from heedful.train.checkpoint import CheckpointManager
from tests.support.simulated_disk import OPERATIONS, Disk, write_disk

REFUSABLE = tuple(name for name in OPERATIONS if name != "_remove")  # errors of _remove are ignored


def make_state(number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and values of a checkpoint, which depend on a number."""
    generator = torch.Generator().manual_seed(number)
    return {"a": torch.randn(3, 5, generator=generator), "b": torch.tensor(number)}, {"number": number}


def commit(store: CheckpointManager, step: int, number: int | None = None) -> None:
    """Save a checkpoint of a step; `number` decides its contents, and is the step by default."""
    tensors, values = make_state(step if number is None else number)
    store.save(step, tensors, values)


def check_newest(folder: Path) -> int | None:
    """Load the newest checkpoint, check its contents, and return its number; None if there is no checkpoint.

    The file `latest`, where it exists, must name a complete checkpoint.
    """
    if (folder / "latest").exists():
        assert (folder / (folder / "latest").read_text().strip() / "manifest.json").exists()
    saved = CheckpointManager(folder).load()
    if saved is None:
        return None
    tensors, values = make_state(saved.values["number"])
    assert saved.values == values
    assert saved.tensors.keys() == tensors.keys()
    assert all(torch.equal(saved.tensors[name], tensors[name]) for name in tensors)
    return int(values["number"])


def temporary_files(folder: Path) -> list[str]:
    """Return the names of files that an interrupted commit has left."""
    return [path.name for path in folder.rglob("*.part")]


def call_before(patch: pytest.MonkeyPatch, names: tuple[str, ...], before: Callable[..., None]) -> None:
    """Patch these operations so that each calls `before` with its name and its arguments first."""
    for name in names:
        original = getattr(atomic_io, name)

        def operation(*arguments: Any, name: str = name, original: Any = original) -> Any:
            before(name, *arguments)
            return original(*arguments)

        patch.setattr(atomic_io, name, operation)


def run_in_child(work: Callable[[], None]) -> int:
    """Run a function in a forked process; return 0, 3 for a HeedfulError, or minus the signal that killed it."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        except HeedfulError:
            code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- the power is cut -------------------------------------------------------------------------------------------------


PLANS = {  # number of checkpoints that are kept, and the commits: (step, number)
    "keep 1": (1, [(1, 1), (2, 2), (3, 3)]),
    "keep 2": (2, [(1, 1), (2, 2), (3, 3), (4, 4)]),
    "a step again": (1, [(1, 1), (1, 2), (2, 3), (2, 3)]),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("count", [60, pytest.param(None, marks=pytest.mark.slow)])
def test_a_returned_commit_survives_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, count: int | None
) -> None:
    keep, commits = PLANS[plan]
    disk, returned = Disk(tmp_path), 0
    # the files after a power cut at any moment, with the number of the last commit that had returned before it
    after_cuts: dict[frozenset[Any], tuple[dict[str, bytes | None], int]] = {}

    def cut() -> None:
        for files in disk.states_after_a_power_cut():
            after_cuts[frozenset(files.items())] = files, returned

    with monkeypatch.context() as patch:
        disk.watch(patch, cut)
        store = CheckpointManager(tmp_path / "run" / "state", keep_last=keep)
        for step, number in commits:
            commit(store, step, number)
            returned = number
            cut()
    assert len(after_cuts) > 500

    monkeypatch.setattr(atomic_io, "_fsync", lambda handle: None)  # to save time
    states = list(after_cuts.values())
    for files, expected in states if count is None else random.Random(0).sample(states, count):
        write_disk(tmp_path / "cut", files)
        folder = tmp_path / "cut" / "run" / "state"
        assert (check_newest(folder) or 0) >= expected, files
        commit(CheckpointManager(folder, keep_last=keep), 9)  # the next commit succeeds
        assert check_newest(folder) == 9
        assert not temporary_files(folder)
        shutil.rmtree(tmp_path / "cut")


# -- the disk is full -------------------------------------------------------------------------------------------------


def fail_operation(patch: pytest.MonkeyPatch, index: int, code: int) -> None:
    """Let the operation with this index fail with an error code; a write fails after its first half."""
    counter = itertools.count()

    def refuse(name: str, *arguments: Any) -> None:
        if next(counter) == index:
            if name == "_write":
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise OSError(code, os.strerror(code))

    call_before(patch, REFUSABLE, refuse)


def record_operations(work: Callable[[], None], names: tuple[str, ...]) -> list[str]:
    """Run a function, and return the names of those operations that it calls."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        call_before(patch, names, lambda name, *arguments: calls.append(name))
        work()
    return calls


def test_a_full_disk_at_any_operation(tmp_path: Path) -> None:
    folder = tmp_path / "counted"
    store = CheckpointManager(folder)
    commit(store, 1)
    commit(store, 2)
    count = len(record_operations(lambda: commit(store, 3), REFUSABLE))
    assert count > 20
    codes = itertools.cycle([errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS])
    for index, code in zip(range(count), codes, strict=False):
        folder = tmp_path / str(index)
        store = CheckpointManager(folder)
        commit(store, 1)
        commit(store, 2)
        with pytest.MonkeyPatch.context() as patch:
            fail_operation(patch, index, code)
            with pytest.raises(
                HeedfulError, match=rf"{index}: step 3 could not be saved: {os.strerror(code)}; earlier"
            ):
                commit(store, 3)
        assert check_newest(folder) in (2, 3)
        assert (folder / "step-00000002").is_dir()
        assert not temporary_files(folder)
        commit(store, 3)
        assert check_newest(folder) == 3
        assert sorted(os.listdir(folder)) == ["latest", "step-00000002", "step-00000003"]


def test_a_full_disk_at_the_first_commit(tmp_path: Path) -> None:
    count = len(record_operations(lambda: commit(CheckpointManager(tmp_path / "counted" / "state"), 1), REFUSABLE))
    for index in range(count):
        store = CheckpointManager(tmp_path / str(index) / "state")
        with pytest.MonkeyPatch.context() as patch:
            fail_operation(patch, index, errno.ENOSPC)
            with pytest.raises(HeedfulError, match="step 1 could not be saved: No space left on device"):
                commit(store, 1)
        assert check_newest(store.folder) in (None, 1)
        assert not temporary_files(tmp_path / str(index))
        commit(store, 1)
        assert check_newest(store.folder) == 1


def test_an_interrupt_at_any_operation(tmp_path: Path) -> None:
    store = CheckpointManager(tmp_path)
    commit(store, 1)
    for index in itertools.count():
        with pytest.MonkeyPatch.context() as patch:
            counter = itertools.count()

            def interrupt(name: str, *arguments: Any, index: int = index, counter: Iterator[int] = counter) -> None:
                if next(counter) == index:
                    raise KeyboardInterrupt

            call_before(patch, REFUSABLE, interrupt)
            try:
                commit(store, index + 2)
                break
            except KeyboardInterrupt:
                pass
        assert check_newest(tmp_path) in (index + 1, index + 2)
        assert not temporary_files(tmp_path)
        commit(store, index + 2)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    store = CheckpointManager(tmp_path)
    commit(store, 1)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        commit(store, 2)
        try:
            store.save(3, {"a": torch.zeros(10_000)}, {})
        except HeedfulError as error:
            (tmp_path / "message").write_text(str(error))
            raise

    assert run_in_child(work) == 3
    assert "step 3 could not be saved: File too large; earlier checkpoints are" in (tmp_path / "message").read_text()
    assert check_newest(tmp_path) == 2
    assert not temporary_files(tmp_path)


@pytest.mark.slow
def test_a_small_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("a disk of 20 MB cannot be mounted here")
    try:
        store = CheckpointManager(disk / "state")
        with pytest.raises(HeedfulError, match=r"expected 24,000,000: 3 checkpoints of 8,000,000, since 2 are kept"):
            store.check_space(8_000_000)
        store.check_space(6_000_000)
        for step in (1, 2):
            store.save(step, {"a": torch.full((1_000_000,), step, dtype=torch.float64)}, {})
        for _ in range(3):
            with pytest.raises(HeedfulError, match="step 3 could not be saved: No space left on device"):
                store.save(3, {"a": torch.zeros(1_000_000, dtype=torch.float64)}, {})
            assert not temporary_files(disk)
            saved = store.load()
            assert saved is not None and saved.step == 2 and bool((saved.tensors["a"] == 2).all())
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(HeedfulError, match="step 3 could not be saved: Read-only file system"):
            commit(store, 3)
        saved = store.load()
        assert saved is not None and saved.step == 2
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# -- the process is killed --------------------------------------------------------------------------------------------


def killed_during_save(folder: Path, index: int, step: int, half: bool) -> bool:
    """Commit in a process that is killed at the operation with this index; return False if it ended before.

    With `half`, half of that operation is done: of a write the first half, of a removed folder one file.
    """

    def work() -> None:
        counter = itertools.count()

        def die(name: str, *arguments: Any) -> None:
            if next(counter) == index:
                if half and name == "_write":
                    os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                if half and name == "_remove" and arguments[0].is_dir():
                    next(arguments[0].iterdir(), arguments[0] / "none").unlink(missing_ok=True)
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.MonkeyPatch.context() as patch:
            call_before(patch, OPERATIONS, die)
            commit(CheckpointManager(folder), step)

    code = run_in_child(work)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_killed_at_any_file_operation(tmp_path: Path) -> None:
    store = CheckpointManager(tmp_path)
    commit(store, 1)
    commit(store, 2)
    step = 3
    for half in (False, True):
        for index in itertools.count():
            if not killed_during_save(tmp_path, index, step, half):
                assert index > 20
                step += 1
                break
            assert check_newest(tmp_path) in (step - 1, step)
            assert all(is_valid(path) for path in tmp_path.glob("step-*"))
            commit(store, step)  # the resumed run saves the same step
            assert check_newest(tmp_path) == step
            assert not temporary_files(tmp_path)
            assert len(list(tmp_path.glob("step-*"))) == 2
            step += 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recovery_survives_being_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_io, "_fsync", lambda handle: None)  # a killed process loses nothing that it wrote
    for first, second in itertools.product(range(32), repeat=2):
        folder = tmp_path / f"{first}-{second}"
        store = CheckpointManager(folder)
        commit(store, 1)
        commit(store, 2)
        killed_during_save(folder, first, 3, half=True)
        last = check_newest(folder)
        assert last in (2, 3)
        killed_during_save(folder, second, last + 1, half=True)
        assert check_newest(folder) in (last, last + 1)
        commit(store, last + 1)
        assert check_newest(folder) == last + 1
        assert not temporary_files(folder)
        shutil.rmtree(folder)


def test_files_of_running_processes_are_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mine = {f".step-00000001.{pid}.part" for pid in (os.getpid(), 2**22 + 1)} | {f".latest.{2**22 + 1}.part"}
        foreign = {f".step-00000001.{process.pid}.part", ".step-00000001.x.part", ".part", ".1.part", "a.1.part"}
        foreign |= {".step-00000001.99999999999999999999.part", "step-00000001"}
        for name in mine | foreign:
            (tmp_path / name).mkdir()
            (tmp_path / name / "tensors.safetensors").touch()
        atomic_io.remove_stale(tmp_path)
        assert set(os.listdir(tmp_path)) == foreign
        process.communicate(b"\n")
    atomic_io.remove_stale(tmp_path)
    assert len(os.listdir(tmp_path)) == len(foreign) - 1


def test_only_leftovers_of_the_same_name_are_removed(tmp_path: Path) -> None:
    names = {f".{name}.{2**22 + 1}.part" for name in ("a.b", "a.b.old", "axb", "c", "a.b.c")}
    for name in names:
        (tmp_path / name).touch()
    atomic_io.remove_stale(tmp_path, "a.b")
    assert set(os.listdir(tmp_path)) == {name for name in names if not name.startswith((".a.b.old", ".a.b.4"))}


# -- checkpoints that other processes read meanwhile ------------------------------------------------------------------


def is_valid(folder: Path) -> bool:
    """Return whether a checkpoint has all of its files with the right checksums, without using the tested code."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        files = {name: (folder / name).read_bytes() for name in ("tensors.safetensors", "values.json")}
    except (OSError, ValueError):
        return False
    described = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return bool(manifest["files"] == described and manifest["step"] == int(folder.name.split("-")[1]))


@pytest.mark.parametrize("keep", [1, 2])
def test_a_valid_checkpoint_exists_before_every_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    store = CheckpointManager(tmp_path, keep_last=keep)
    commit(store, 1)
    if keep == 2:
        commit(store, 2)
    counts = []

    def count_checkpoints(*arguments: Any) -> None:
        counts.append(sum(is_valid(path) for path in tmp_path.glob("step-*")))

    call_before(monkeypatch, OPERATIONS, count_checkpoints)
    for step, number in [(3, 3), (4, 4), (5, 5), (5, 6)]:
        commit(store, step, number)
        count_checkpoints()
        assert min(counts) == counts[0] == counts[-1] == keep
        assert max(counts) == keep + 1


def test_a_concurrent_reader_always_finds_a_valid_checkpoint(tmp_path: Path) -> None:
    store = CheckpointManager(tmp_path)
    commit(store, 1)
    done = threading.Event()
    valid_paths, invalid_paths = list[Path](), list[Path]()

    def newest_path() -> Path:
        return max(tmp_path.glob("step-*"))

    def read_checkpoints() -> None:
        while not done.is_set():
            path = newest_path()
            while not is_valid(path):
                if (newer := newest_path()) == path:
                    invalid_paths.append(path)
                    return
                path = newer  # the path was removed while it was read, since a newer checkpoint replaced it
            valid_paths.append(path)
            time.sleep(0.001)

    reader = threading.Thread(target=read_checkpoints)
    reader.start()
    try:
        for step in range(2, 3000):
            commit(store, step)
            if invalid_paths or (step > 31 and len(valid_paths) > 30):
                break
    finally:
        done.set()
        reader.join()
    assert not invalid_paths
    assert len(valid_paths) > 30


# -- writing files and folders ----------------------------------------------------------------------------------------


def test_a_partial_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[: random.randint(1, 7)]))
    commit(CheckpointManager(tmp_path), 1)
    monkeypatch.undo()
    assert check_newest(tmp_path) == 1


def test_a_new_file_never_replaces_an_existing_one(tmp_path: Path) -> None:
    atomic_io.write_synced(tmp_path / "a", [b"1", memoryview(b"23"), torch.tensor([4], dtype=torch.uint8)])
    assert (tmp_path / "a").read_bytes() == b"123\x04"
    with pytest.raises(FileExistsError):
        atomic_io.write_synced(tmp_path / "a", [b"4"])


def test_a_checksum_is_the_size_and_the_hash() -> None:
    expected = {"bytes": 8, "sha256": hashlib.sha256(b"\0\0\x80?\0\0\0@").hexdigest()}
    assert atomic_io.checksum([torch.tensor([1.0, 2.0])]) == expected
    assert atomic_io.checksum([b"\0\0\x80", b"", b"?\0\0\0@"]) == expected
    assert atomic_io.checksum([torch.tensor([[1.0, 7.0], [2.0, 7.0]])[:, 0]]) == expected


@pytest.mark.slow
def test_no_second_copy_of_the_tensors_is_made(tmp_path: Path) -> None:
    code = """if True:
        import resource, sys, torch
        from pathlib import Path
        from heedful.train.checkpoint import CheckpointManager

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        tensors = {str(n): torch.full((5_000_000,), float(n)) for n in range(10)}
        start = peak()
        store = CheckpointManager(Path(sys.argv[1]))
        store.save(1, tensors, {})
        saved = peak()
        tensors.clear()
        loaded = store.load()
        print(saved - start, peak() - saved, loaded.tensors["9"][-1].item())
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    saving, loading, last = map(float, done.stdout.split())
    assert saving < 25, "more MB than one of the ten tensors, which has 20"
    assert loading < 25
    assert last == 9


def test_a_folder_that_another_process_makes_meanwhile_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = atomic_io._mkdir

    def make_twice(path: Path) -> None:
        make(path)  # by the other process
        make(path)

    monkeypatch.setattr(atomic_io, "_mkdir", make_twice)
    atomic_io.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        atomic_io.make_folder(tmp_path / "file")
