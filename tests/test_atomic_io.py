"""A commit that is cut off, killed or refused at any file operation costs at most itself.

Every operation that has to last goes through six functions of atomic_io.py; here they are recorded, refused or made the
last thing that a process does.
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

REFUSABLE = ("_open", "_write", "_fsync", "_mkdir", "_rename")  # _remove does what it can
OPERATIONS = (*REFUSABLE, "_remove")


def state(number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what the commit of that number saves."""
    generator = torch.Generator().manual_seed(number)
    return {"a": torch.randn(3, 5, generator=generator), "b": torch.tensor(number)}, {"number": number}


def commit(store: CheckpointManager, step: int, number: int | None = None) -> None:
    tensors, values = state(step if number is None else number)
    store.save(step, tensors, values)


def newest(folder: Path) -> int | None:
    """The number of the commit that is found; every byte of it must be right, and nothing damaged be passed over."""
    if (folder / "latest").exists():
        assert (folder / (folder / "latest").read_text().strip() / "manifest.json").exists()
    saved = CheckpointManager(folder).load()
    if saved is None:
        return None
    tensors, values = state(saved.values["number"])
    assert saved.values == values
    assert saved.tensors.keys() == tensors.keys()
    assert all(torch.equal(saved.tensors[name], tensors[name]) for name in tensors)
    return int(values["number"])


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.part")]


def watched(patch: pytest.MonkeyPatch, names: tuple[str, ...], before: Callable[..., None]) -> None:
    """Have each of those operations announced before it happens."""
    for name in names:
        original = getattr(atomic_io, name)

        def operation(*arguments: Any, name: str = name, original: Any = original) -> Any:
            before(name, *arguments)
            return original(*arguments)

        patch.setattr(atomic_io, name, operation)


def in_child(work: Callable[[], None]) -> int:
    """How a forked process that does the work ends: 0, 3 for a HeedfulError, or minus the signal that killed it."""
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


class File:
    def __init__(self) -> None:
        self.now = self.with_duration = b""


class Folder:
    """The names in it now, those that last, and the edits between the two."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {}
        self.with_duration: dict[str, Any] = {}
        self.edits: list[tuple[str | None, str | None, Any]] = []  # from a name, to a name, a node

    def edit(self, source: str | None, target: str | None, node: Any) -> None:
        self.edits.append((source, target, node))
        self.now = edited(self.now, [self.edits[-1]])


def edited(names: dict[str, Any], edits: list[tuple[str | None, str | None, Any]]) -> dict[str, Any]:
    names = dict(names)
    for source, target, node in edits:
        if source is not None and names.get(source) is node:
            del names[source]
        if target is not None:
            names[target] = node
    return names


class Disk:
    """Files and folders of which only what was synced is sure to last: contents by file, names by folder.

    What was not synced may last in any part: of the names any subset of the edits, in no order; of a file nothing, the
    first half, zeros in its full length, or all.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Folder()
        self.handles: dict[int, Path] = {}

    def node(self, path: Path) -> Any:
        node: Any = self.top
        for part in path.relative_to(self.root).parts:
            node = node.now[part]
        return node

    def watch(self, patch: pytest.MonkeyPatch, after: Callable[[], None]) -> None:
        """Follow all operations, and call after each of their smallest steps."""
        self.after = after
        for name in OPERATIONS:
            original = getattr(atomic_io, name)

            def operation(*arguments: Any, name: str = name, original: Any = original) -> Any:
                result = original(*arguments)
                getattr(self, name)(*arguments, *([] if result is None else [result]))
                after()
                return result

            patch.setattr(atomic_io, name, operation)

    def _open(self, path: Path, flags: int, handle: int) -> None:
        self.handles[handle] = path
        if flags & os.O_CREAT:
            self.node(path.parent).edit(None, path.name, File())

    def _write(self, handle: int, data: memoryview) -> None:
        self.node(self.handles[handle]).now += bytes(data)

    def _fsync(self, handle: int) -> None:
        node = self.node(self.handles[handle])
        node.with_duration = node.now
        if isinstance(node, Folder):
            node.edits = []

    def _mkdir(self, path: Path) -> None:
        self.node(path.parent).edit(None, path.name, Folder())

    def _rename(self, path: Path, target: Path) -> None:
        assert path.parent == target.parent
        self.node(path.parent).edit(path.name, target.name, self.node(path))

    def _remove(self, path: Path) -> None:
        node = self.node(path)
        for name, inner in list(node.now.items()) if isinstance(node, Folder) else ():
            node.edit(name, None, inner)
            self.after()
        self.node(path.parent).edit(path.name, None, node)

    def cuts(self) -> Iterator[dict[str, bytes | None]]:
        """Yield what may be on the disk after a power cut now: the bytes of each file; None for a folder."""
        folders: list[Folder] = []
        todo: list[Any] = [self.top]
        while todo:
            if isinstance(node := todo.pop(), Folder) and node not in folders:
                folders.append(node)
                todo += [*node.with_duration.values(), *(node for _, _, node in node.edits)]
        for chosen in itertools.product(*(subsets(folder.edits) for folder in folders)):
            names = {id(node): edited(node.with_duration, edits) for node, edits in zip(folders, chosen, strict=True)}
            for content in (
                lambda file: file.with_duration,
                lambda file: file.now[: (len(file.with_duration) + len(file.now)) // 2],
                lambda file: file.with_duration + bytes(len(file.now) - len(file.with_duration)),
                lambda file: file.now,
            ):
                yield dict(listing(self.top, names, content, ""))


def subsets(edits: list[Any]) -> list[list[Any]]:
    return [list(itertools.compress(edits, keep)) for keep in itertools.product((0, 1), repeat=len(edits))]


def listing(folder: Folder, names: dict[int, Any], content: Any, at: str) -> Iterator[tuple[str, bytes | None]]:
    for name, node in names[id(folder)].items():
        if isinstance(node, Folder):
            yield at + name, None
            yield from listing(node, names, content, at + name + "/")
        else:
            yield at + name, content(node)


def lay(root: Path, files: dict[str, bytes | None]) -> None:
    """Make such a disk."""
    root.mkdir()
    for name, data in files.items():
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)


PLANS = {
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
    seen: dict[frozenset[Any], tuple[dict[str, bytes | None], int]] = {}

    def cut() -> None:
        for files in disk.cuts():
            seen[frozenset(files.items())] = files, returned

    with monkeypatch.context() as patch:
        disk.watch(patch, cut)
        store = CheckpointManager(tmp_path / "run" / "state", keep_last=keep)
        for step, number in commits:
            commit(store, step, number)
            returned = number
            cut()
    assert len(seen) > 500

    monkeypatch.setattr(atomic_io, "_fsync", lambda handle: None)  # here it only takes time
    states = list(seen.values())
    for files, expected in states if count is None else random.Random(0).sample(states, count):
        lay(tmp_path / "cut", files)
        folder = tmp_path / "cut" / "run" / "state"
        assert (newest(folder) or 0) >= expected, files
        commit(CheckpointManager(folder, keep_last=keep), 9)  # and the next commit works
        assert newest(folder) == 9
        assert not leftovers(folder)
        shutil.rmtree(tmp_path / "cut")


# -- the disk is full -------------------------------------------------------------------------------------------------


def refusing(patch: pytest.MonkeyPatch, at: int, code: int) -> None:
    """Let the operation of that number fail, a write after its first half."""
    numbers = itertools.count()

    def refuse(name: str, *arguments: Any) -> None:
        if next(numbers) == at:
            if name == "_write":
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise OSError(code, os.strerror(code))

    watched(patch, REFUSABLE, refuse)


def operations_of(work: Callable[[], None], names: tuple[str, ...]) -> list[str]:
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        watched(patch, names, lambda name, *arguments: done.append(name))
        work()
    return done


def test_a_full_disk_at_any_operation(tmp_path: Path) -> None:
    folder = tmp_path / "counted"
    store = CheckpointManager(folder)
    commit(store, 1)
    commit(store, 2)
    count = len(operations_of(lambda: commit(store, 3), REFUSABLE))
    assert count > 20
    codes = itertools.cycle([errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS])
    for at, code in zip(range(count), codes, strict=False):
        folder = tmp_path / str(at)
        store = CheckpointManager(folder)
        commit(store, 1)
        commit(store, 2)
        with pytest.MonkeyPatch.context() as patch:
            refusing(patch, at, code)
            with pytest.raises(HeedfulError, match=rf"{at}: step 3 could not be saved: {os.strerror(code)}; earlier"):
                commit(store, 3)
        assert newest(folder) in (2, 3)
        assert (folder / "step-00000002").is_dir()
        assert not leftovers(folder)
        commit(store, 3)
        assert newest(folder) == 3
        assert sorted(os.listdir(folder)) == ["latest", "step-00000002", "step-00000003"]


def test_a_full_disk_at_the_first_commit(tmp_path: Path) -> None:
    count = len(operations_of(lambda: commit(CheckpointManager(tmp_path / "counted" / "state"), 1), REFUSABLE))
    for at in range(count):
        store = CheckpointManager(tmp_path / str(at) / "state")
        with pytest.MonkeyPatch.context() as patch:
            refusing(patch, at, errno.ENOSPC)
            with pytest.raises(HeedfulError, match="step 1 could not be saved: No space left on device"):
                commit(store, 1)
        assert newest(store.folder) in (None, 1)
        assert not leftovers(tmp_path / str(at))
        commit(store, 1)
        assert newest(store.folder) == 1


def test_an_interrupt_at_any_operation(tmp_path: Path) -> None:
    store = CheckpointManager(tmp_path)
    commit(store, 1)
    for at in itertools.count():
        with pytest.MonkeyPatch.context() as patch:
            numbers = itertools.count()

            def interrupt(name: str, *arguments: Any, at: int = at, numbers: Iterator[int] = numbers) -> None:
                if next(numbers) == at:
                    raise KeyboardInterrupt

            watched(patch, REFUSABLE, interrupt)
            try:
                commit(store, at + 2)
                break
            except KeyboardInterrupt:
                pass
        assert newest(tmp_path) in (at + 1, at + 2)
        assert not leftovers(tmp_path)
        commit(store, at + 2)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    store = CheckpointManager(tmp_path)
    commit(store, 1)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        commit(store, 2)
        try:
            store.save(3, {"a": torch.zeros(10_000)}, {})
        except HeedfulError as error:
            (tmp_path / "said").write_text(str(error))
            raise

    assert in_child(work) == 3
    assert "step 3 could not be saved: File too large; earlier checkpoints are" in ((tmp_path / "said").read_text())
    assert newest(tmp_path) == 2
    assert not leftovers(tmp_path)


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
            assert not leftovers(disk)
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


def killed(folder: Path, at: int, step: int, half: bool) -> bool:
    """Whether a process that commits was killed at that operation; False if it was done before."""

    def work() -> None:
        numbers = itertools.count()

        def die(name: str, *arguments: Any) -> None:
            if next(numbers) == at:
                if half and name == "_write":
                    os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                if half and name == "_remove" and arguments[0].is_dir():
                    next(arguments[0].iterdir(), arguments[0] / "none").unlink(missing_ok=True)
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.MonkeyPatch.context() as patch:
            watched(patch, OPERATIONS, die)
            commit(CheckpointManager(folder), step)

    code = in_child(work)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_killed_at_any_file_operation(tmp_path: Path) -> None:
    store = CheckpointManager(tmp_path)
    commit(store, 1)
    commit(store, 2)
    step = 3
    for half in (False, True):
        for at in itertools.count():
            if not killed(tmp_path, at, step, half):
                assert at > 20
                step += 1
                break
            assert newest(tmp_path) in (step - 1, step)
            assert all(valid(path) for path in tmp_path.glob("step-*"))
            commit(store, step)  # the resumed run comes to the same step
            assert newest(tmp_path) == step
            assert not leftovers(tmp_path)
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
        killed(folder, first, 3, half=True)
        last = newest(folder)
        assert last in (2, 3)
        killed(folder, second, last + 1, half=True)
        assert newest(folder) in (last, last + 1)
        commit(store, last + 1)
        assert newest(folder) == last + 1
        assert not leftovers(folder)
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


# -- at any instant ---------------------------------------------------------------------------------------------------


def valid(folder: Path) -> bool:
    """Whether a checkpoint is whole; written without the code that it judges."""
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

    def look(*arguments: Any) -> None:
        counts.append(sum(valid(path) for path in tmp_path.glob("step-*")))

    watched(monkeypatch, OPERATIONS, look)
    for step, number in [(3, 3), (4, 4), (5, 5), (5, 6)]:
        commit(store, step, number)
        look()
        assert min(counts) == counts[0] == counts[-1] == keep
        assert max(counts) == keep + 1


def test_a_concurrent_reader_always_finds_a_valid_checkpoint(tmp_path: Path) -> None:
    store = CheckpointManager(tmp_path)
    commit(store, 1)
    done, bad, looks = threading.Event(), [], list[Path]()

    def last() -> Path:
        return max(tmp_path.glob("step-*"))

    def watch() -> None:
        while not done.is_set():
            seen = last()
            while not valid(seen):
                if (now := last()) == seen:  # otherwise it has gone in its turn
                    bad.append(seen)
                    return
                seen = now
            looks.append(seen)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for step in range(2, 3000):
            commit(store, step)
            if bad or (step > 31 and len(looks) > 30):
                break
    finally:
        done.set()
        watcher.join()
    assert not bad
    assert len(looks) > 30


# -- the rest ------------------------------------------------------------------------------------------------------


def test_a_partial_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[: random.randint(1, 7)]))
    commit(CheckpointManager(tmp_path), 1)
    monkeypatch.undo()
    assert newest(tmp_path) == 1


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
    assert saving < 25, "MB; the tensors have 200, each of them 20"
    assert loading < 25
    assert last == 9


def test_a_folder_that_another_process_made_meanwhile_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = atomic_io._mkdir

    def later(path: Path) -> None:
        make(path)  # the other one
        make(path)

    monkeypatch.setattr(atomic_io, "_mkdir", later)
    atomic_io.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        atomic_io.make_folder(tmp_path / "file")
