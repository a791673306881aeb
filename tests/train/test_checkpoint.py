"""T5, T13, T17: what was saved comes back bit for bit, or what is wrong with it is said; and one run in a folder."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heedful.errors import HeedfulError, HeedfulWarning, RunError
from heedful.train import run_lock
from heedful.train.checkpoint import Checkpoint, CheckpointManager
from heedful.train.run_lock import LOCK, lock_run

FILES = ["tensors.safetensors", "values.json", "manifest.json"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8]


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def loaded(store: CheckpointManager) -> Checkpoint:
    saved = store.load()
    assert saved is not None
    return saved


def fill(store: CheckpointManager, *steps: int) -> None:
    for step in steps:
        store.save(step, {"weight": torch.arange(40.0) + step, "step": torch.tensor(step)}, {"step": step})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointManager:
    """With the steps 10 and 20."""
    made = CheckpointManager(tmp_path / "state")
    fill(made, 10, 20)
    return made


def older(store: CheckpointManager, match: str) -> Checkpoint:
    """What is loaded where step 20 is damaged."""
    with pytest.warns(HeedfulWarning, match=match) as warned:
        saved = loaded(store)
    assert len(warned) == 1
    assert str(warned[0].message).startswith(f"{store.folder}: step-")
    assert str(warned[0].message).endswith("; step 10 is used instead")
    assert saved.step == 10 == saved.values["step"]
    assert torch.equal(saved.tensors["weight"], torch.arange(40.0) + 10)
    return saved


# -- what was saved comes back -------------------------------------------------------------------------------------


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (24 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {str(dtype): (noise % 2 if dtype is torch.bool else noise).view(dtype) for dtype in DTYPES}
    shared = torch.randn(6, 4)
    tensors |= {
        "NaN": torch.tensor([0x7FC00001, 0x7F800001, -0x3FFFFF, -0x80000000], dtype=torch.int32).view(torch.float32),
        "bf16 NaN": torch.tensor([0x7F81, -0x7F, -0x8000], dtype=torch.int16).view(torch.bfloat16),
        "-0.0": torch.tensor(-0.0),
        "denormal": torch.tensor(5e-324, dtype=torch.float64),
        "count": torch.tensor(2**62 + 1),
        "true": torch.tensor(True),
        "empty": torch.empty(0),
        "empty, 3-d": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "whole": shared,
        "transposed": shared.T,
        "a row of it": shared[2],
        "every other": shared[::2, 1::2],
        "expanded": torch.tensor([1.0]).expand(3, 5),
        "parameter": torch.nn.Parameter(torch.randn(2, 3)),
        "a name, é\n\ud800": torch.ones(1),
    }
    store = CheckpointManager(tmp_path)
    folder = store.save(7, tensors, {})
    saved = loaded(store)
    assert (saved.step, saved.folder, saved.values) == (7, folder, {})
    assert saved.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = saved.tensors[name]
        assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, False)
        assert raw(back) == raw(tensor), name
        assert back.is_contiguous()
    saved.tensors["whole"].zero_()
    assert raw(saved.tensors["a row of it"]) == raw(shared[2])


def test_the_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.ones(3, 5).to(dtype) for dtype in DTYPES} | {"": torch.zeros(()), "é": torch.ones(0)}
    read = load_file(CheckpointManager(tmp_path).save(1, tensors, {}) / "tensors.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_the_order_of_the_tensors_changes_nothing(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2), "a": torch.tensor(1, dtype=torch.int8), "c": torch.ones(3, dtype=torch.float64)}
    one = CheckpointManager(tmp_path / "1").save(1, tensors, {})
    two = CheckpointManager(tmp_path / "2").save(1, dict(reversed(tensors.items())), {})
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in FILES)


def test_nothing_but_a_step_can_be_saved(tmp_path: Path) -> None:
    store = CheckpointManager(tmp_path)
    store.save(0, {}, {})
    assert loaded(store)[2:] == ({}, {})


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("a", torch.ones(2).to_sparse(), "torch.sparse_coo"),
        ("a", torch.ones(2, dtype=torch.complex64), "torch.complex64"),
        ("a", torch.ones(2, device="meta"), "on meta"),
        ("__metadata__", torch.ones(2), "not named __metadata__"),
    ],
)
def test_a_tensor_that_cannot_be_saved_is_refused(tmp_path: Path, name: str, tensor: Tensor, what: str) -> None:
    with pytest.raises(RunError, match=rf"'{name}' .*{what}"):
        CheckpointManager(tmp_path / "state").save(1, {name: tensor}, {})
    assert not (tmp_path / "state").exists()


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    values = {
        "floats": [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, 1.0, math.inf, -math.inf, math.nan, math.pi],
        "ints": [0, -1, 2**63 + 5, 10**300],
        "texts": ["", "é ☃ \U0001f600", "a\nb\0", "\ud800", '"'],
        "rest": {"": None, "yes": True, "no": [False, [], {}, [[{"a": [1]}]]]},
    }
    store = CheckpointManager(tmp_path)
    store.save(1, {}, values)
    assert repr(loaded(store).values) == repr(values)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ((1, 2), r"values\['a'\]\['b'\]\[1\] is \(1, 2\), a tuple"),
        ({1: 2}, r"is \{1: 2\}, a dict"),
        (np.float64(0.5), "a float64"),
        (torch.tensor(1), "is tensor.1., a Tensor"),
        ({1}, "a set"),
        (Path("a"), "a PosixPath"),
        (namedtuple("Pair", "a b")(1, 2), "a Pair"),
        (b"a", "a bytes"),
    ],
)
def test_values_that_would_come_back_otherwise_are_refused(tmp_path: Path, value: Any, where: str) -> None:
    with pytest.raises(RunError, match=where):
        CheckpointManager(tmp_path / "state").save(1, {}, {"a": {"b": [1, value]}})
    assert not (tmp_path / "state").exists()


# -- which one -----------------------------------------------------------------------------------------------------


def test_the_newest_is_found_and_the_oldest_go(tmp_path: Path) -> None:
    store = CheckpointManager(tmp_path / "state", keep_last=3)
    assert store.load() is None
    for step in (5, 10, 15, 99_999_999, 123_456_789):
        fill(store, step)
        assert loaded(store).step == step
        assert (tmp_path / "state" / "latest").read_text() == f"step-{step:08d}\n"
    assert sorted(os.listdir(tmp_path / "state")) == ["latest", "step-00000015", "step-123456789", "step-99999999"]


def test_no_clock_is_asked(store: CheckpointManager) -> None:
    os.utime(store.folder / "step-00000020", (0, 0))
    os.utime(store.folder / "step-00000010", (2**32, 2**32))
    assert loaded(store).step == 20
    fill(store, 30)
    assert sorted(os.listdir(store.folder)) == ["latest", "step-00000020", "step-00000030"]


@pytest.mark.parametrize("word", ["step-00000010\n", "step-00000099", "../../etc", "\0\xff", ""])
def test_the_word_of_latest_is_not_taken(store: CheckpointManager, word: str) -> None:
    (store.folder / "latest").write_text(word, encoding="latin-1")
    assert loaded(store).step == 20
    (store.folder / "latest").unlink()
    assert loaded(store).step == 20


def test_other_names_are_no_checkpoints(store: CheckpointManager) -> None:
    for name in (
        "step-30",
        "step-000000030",
        "step-00000030-1",
        "step-00000030-02",
        "step-00000030.old",
        "step-٠٠٠٠٠٠٣٠",
    ):
        (store.folder / name).mkdir()
    assert loaded(store).step == 20
    fill(store, 40)
    assert (store.folder / "step-30").is_dir()


def test_a_step_that_is_there_and_the_same_stays(store: CheckpointManager) -> None:
    before = (store.folder / "step-00000020" / "manifest.json").stat()
    fill(store, 20)
    assert (store.folder / "step-00000020" / "manifest.json").stat() == before
    assert sorted(os.listdir(store.folder)) == ["latest", "step-00000010", "step-00000020"]


def test_a_step_that_is_there_and_another_is_replaced(store: CheckpointManager) -> None:
    for turn in (2, 3):
        assert store.save(20, {"weight": torch.ones(1)}, {"turn": turn}).name == f"step-00000020-{turn}"
        assert loaded(store).values == {"turn": turn}
        assert (store.folder / "latest").read_text() == f"step-00000020-{turn}\n"
        assert sorted(os.listdir(store.folder)) == ["latest", "step-00000010", f"step-00000020-{turn}"]
    fill(store, 30)
    assert sorted(os.listdir(store.folder)) == ["latest", "step-00000020-3", "step-00000030"]


def test_a_step_that_is_there_and_damaged_is_replaced(store: CheckpointManager) -> None:
    (store.folder / "step-00000020" / "values.json").write_text("{}")
    fill(store, 20)
    assert loaded(store).step == 20
    assert sorted(os.listdir(store.folder)) == ["latest", "step-00000010", "step-00000020-2"]


def test_damaged_ones_do_not_count_and_go_when_they_are_overtaken(store: CheckpointManager) -> None:
    (store.folder / "step-00000030").mkdir()
    (store.folder / "step-00000020" / "manifest.json").unlink()
    with pytest.warns(HeedfulWarning, match="is missing; step 10 is used") as warned:
        loaded(store)
    assert len(warned) == 2
    fill(store, 15)
    assert sorted(os.listdir(store.folder))[1:] == ["step-00000010", "step-00000015", "step-00000020", "step-00000030"]
    fill(store, 25)
    assert sorted(os.listdir(store.folder))[1:] == ["step-00000015", "step-00000025", "step-00000030"]
    fill(store, 35)
    assert sorted(os.listdir(store.folder))[1:] == ["step-00000025", "step-00000035"]
    assert loaded(store).step == 35


def test_a_step_before_a_valid_one_is_refused(store: CheckpointManager) -> None:
    with pytest.raises(RunError, match=r"step 15 .* step-00000020"):
        fill(CheckpointManager(store.folder), 15)
    (store.folder / "step-00000020" / "values.json").unlink()
    fill(CheckpointManager(store.folder), 15)


def test_at_least_one_stays(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match="keep_last is 0"):
        CheckpointManager(tmp_path, keep_last=0)


# -- damage -----------------------------------------------------------------------------------------------------------


def flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_detected(store: CheckpointManager, name: str, count: int) -> None:
    path = store.folder / "step-00000020" / name
    bits = path.stat().st_size * 8
    for bit in random.Random(0).sample(range(bits), min(count, bits)):
        flipped(path, bit)
        older(store, f"step-00000020 is damaged: .*{'' if name == FILES[2] else name}")
        flipped(path, bit)
    assert loaded(store).step == 20


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_detected(store: CheckpointManager, name: str, count: int) -> None:
    path = store.folder / "step-00000020" / name
    whole = path.read_bytes()
    for size in random.Random(0).sample(range(len(whole)), min(count, len(whole))):
        path.write_bytes(whole[:size])
        older(store, rf"bytes of {name} .*{size}.*{len(whole)}" if name != FILES[2] else name)
        path.write_bytes(whole[:size] + bytes(len(whole) - size))
        if whole[size:].strip(b"\0"):
            older(store, f"sha256 of {name}" if name != FILES[2] else name)
    path.write_bytes(whole + b"\0")
    older(store, name)


def a_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        text = (folder / "manifest.json").read_text()
        changed = change(manifest := json.loads(text))
        text = json.dumps(manifest if changed is None else changed, indent=1) + "\n"
        (folder / "manifest.json").write_text(text)

    return work


def a_file(name: str, data: bytes) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return work


def a_folder_instead(name: str) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return work


def a_pipe(folder: Path) -> None:
    (folder / "values.json").unlink()
    os.mkfifo(folder / "values.json")


def the_files_of_step_10(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step-00000010"), folder)


def a_link_to_nothing(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("nowhere")


def other_spaces(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    **{f"no {name}": (f"{name} is missing", lambda folder, name=name: (folder / name).unlink()) for name in FILES},
    **{f"a folder {name}": (f"{name} is missing", a_folder_instead(name)) for name in FILES},
    "empty": ("manifest.json is missing", lambda folder: [each.unlink() for each in folder.iterdir()]),
    "a file": ("manifest.json is missing", lambda folder: [shutil.rmtree(folder), folder.write_bytes(b"")]),
    "a link to nothing": ("manifest.json is missing", a_link_to_nothing),
    "a pipe": ("values.json is missing", a_pipe),
    "step 10 as 20": ("manifest.json is of step 10", the_files_of_step_10),
    "an empty manifest": ("not as it was", a_file("manifest.json", b"")),
    "zeros": ("not as it was", a_file("manifest.json", bytes(300))),
    "garbage": ("not as it was", a_file("manifest.json", bytes(range(256)))),
    "deep": ("not as it was", a_file("manifest.json", b'{"a":' * 9_000)),
    "very deep": ("not as it was", a_file("manifest.json", b"[" * 10_000_000)),
    "a list": ("not as it was", a_manifest(lambda manifest: [])),
    "a number": ("not as it was", a_manifest(lambda manifest: 1)),
    "no files": ("not as it was", a_manifest(lambda manifest: manifest.update(files={}))),
    "files in a list": ("not as it was", a_manifest(lambda manifest: manifest.update(files=[]))),
    "nothing of a file": ("not as it was", a_manifest(lambda manifest: manifest["files"].update({FILES[0]: {}}))),
    "more": ("not as it was", a_manifest(lambda manifest: manifest.update(more=1))),
    "more files": ("not as it was", a_manifest(lambda manifest: manifest["files"].update(more={}))),
    "1.0": ("not as it was", a_manifest(lambda manifest: manifest.update(format=1.0))),
    "true": ("not as it was", a_manifest(lambda manifest: manifest.update(format=True))),
    "other spaces": ("not as it was", other_spaces),
    "another step": ("manifest.json is of step 21", a_manifest(lambda manifest: manifest.update(step=21))),
    "a step of text": ("manifest.json is of step '20'", a_manifest(lambda manifest: manifest.update(step="20"))),
    "of the future": ("it has the format 2; this version", a_manifest(lambda manifest: manifest.update(format=2))),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_detected(store: CheckpointManager, case: str) -> None:
    what, damage = DAMAGE[case]
    damage(store.folder / "step-00000020")
    older(store, f"step-00000020 is damaged: .*{what}")
    fill(store, 20)
    assert loaded(store).step == 20


def test_a_newer_empty_checkpoint_folder_is_passed_over(store: CheckpointManager) -> None:
    (store.folder / "step-00000010").rename(store.folder / "step-00000009")
    shutil.rmtree(store.folder / "step-00000009")
    (store.folder / "step-00000030").mkdir()
    with pytest.warns(HeedfulWarning, match="step-00000030 is damaged: manifest.json is missing; step 20 is used"):
        assert loaded(store).step == 20


def test_no_valid_checkpoint_is_an_error(store: CheckpointManager) -> None:
    (store.folder / "step-00000020" / "values.json").unlink()
    flipped(store.folder / "step-00000010" / "tensors.safetensors", 77)
    with pytest.raises(RunError) as caught:
        store.load()
    assert str(caught.value).startswith(
        f"{store.folder} has no valid checkpoint: step-00000020 is damaged: values.json is missing; step-00000010 is "
        "damaged: the sha256 of tensors.safetensors is "
    )


def test_missing_checkpoints_are_an_error(store: CheckpointManager) -> None:
    for path in store.folder.glob("step-*"):
        shutil.rmtree(path)
    with pytest.raises(RunError, match="latest names one"):
        store.load()


# -- where it cannot work ---------------------------------------------------------------------------------------------


def test_room_is_asked_for(store: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(5000, 2000, 3000))
    store.check_space(3000)  # two are there, and stay
    with pytest.raises(HeedfulError, match=r"3,000 .* 3,001"):
        store.check_space(3001)
    fresh = CheckpointManager(store.folder / "a" / "b")
    fresh.check_space(1000)
    assert not (store.folder / "a").exists()
    with pytest.raises(RunError, match="3,003: 3 checkpoints of 1,001"):
        fresh.check_space(1001)


def test_room_is_made_of_what_was_left(store: CheckpointManager) -> None:
    (store.folder / f".step-00000030.{2**22 + 1}.part").mkdir()
    store.check_space(1)
    assert sorted(os.listdir(store.folder)) == ["latest", "step-00000010", "step-00000020"]


@pytest.mark.parametrize("name", ["with spaces and 'quotes\"", "Übung ☃ 文", "100% {x} [a] *", "a\nb", "ü" * 120])
def test_odd_folder_names(tmp_path: Path, name: str) -> None:
    store = CheckpointManager(tmp_path / name / name)
    with lock_run(tmp_path / name):
        fill(store, 1, 2, 3)
        assert loaded(store).step == 3


def test_a_folder_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = CheckpointManager(tmp_path / "link")
    fill(store, 1, 2, 3)
    assert loaded(CheckpointManager(tmp_path / "real")).step == 3
    (tmp_path / "real").rename(tmp_path / "away")
    with pytest.raises(RunError, match="link cannot be read: No such file"):
        store.load()
    with pytest.raises(RunError, match="step 4 could not be saved: File exists"):
        fill(store, 4)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(RunError, match="link cannot be read: Too many levels"):
        store.load()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    store = CheckpointManager(tmp_path / "state")
    with pytest.raises(RunError, match="state cannot be read: Not a directory"):
        store.load()
    with pytest.raises(RunError, match="step 1 could not be saved: File exists"):
        fill(store, 1)
    with pytest.raises(RunError, match="state cannot hold a run: File exists"), lock_run(tmp_path / "state"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(store: CheckpointManager) -> None:
    store.folder.chmod(0o555)
    try:
        with pytest.raises(RunError, match="step 30 could not be saved: Permission denied"):
            fill(store, 30)
        assert loaded(store).step == 20
    finally:
        store.folder.chmod(0o755)


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = CheckpointManager(Path("state"))
    fill(store, 1)
    monkeypatch.chdir("/")
    fill(store, 2)
    assert loaded(store).folder == tmp_path / "state" / "step-00000002"


# -- one run in a folder ----------------------------------------------------------------------------------------------


def until(path: Path) -> None:
    for _ in range(2000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path.name} did not come")


def holding(folder: Path, ready: Path, inside: Callable[[], None] = lambda: None) -> int:
    """A process that holds a folder until it is killed."""
    if (pid := os.fork()) == 0:
        try:
            with lock_run(folder):
                inside()
                ready.touch()
                time.sleep(60)
        finally:
            os._exit(1)
    until(ready)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pid = holding(run, tmp_path / "ready")
    try:
        who = rf"another run, pid {pid}, host \S+, holds .*run: wait for it, stop it"
        with pytest.raises(RunError, match=who), lock_run(run):
            raise AssertionError
        with lock_run(tmp_path / "another"):
            pass
    finally:
        kill(pid)
    with lock_run(run), pytest.raises(RunError, match=rf"pid {os.getpid()}, "), lock_run(run):
        raise AssertionError
    with pytest.raises(KeyError), lock_run(run):
        raise KeyError
    with lock_run(run):
        assert (run / LOCK).read_text().startswith(f"pid {os.getpid()}, host ")
    assert not run_lock._handles


def test_a_worker_that_outlives_its_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def work() -> None:
        if (pid := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        (tmp_path / "worker").write_text(str(pid))

    kill(holding(run, tmp_path / "ready", work))
    worker = int((tmp_path / "worker").read_text())
    try:
        os.kill(worker, 0)
        with lock_run(run):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_worker_that_ends_does_not_release_the_lock(tmp_path: Path) -> None:
    with lock_run(tmp_path):
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        with pytest.raises(RunError, match="another run"), lock_run(tmp_path):
            raise AssertionError


def test_an_unreadable_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LOCK).write_bytes(b"\x1b[2J\xff" * 100)
    with lock_run(tmp_path):
        (tmp_path / LOCK).write_bytes(b"\x1b[2J\xff" * 100)
        with pytest.raises(RunError, match="another run, ") as caught, lock_run(tmp_path):
            raise AssertionError
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 3000

    def unsupported(handle: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_lock.fcntl, "flock", unsupported)
    what = "cannot be locked: Function not implemented; a second run"
    with pytest.warns(HeedfulWarning, match=what), lock_run(tmp_path):
        pass
