"""Checkpoints are restored bit for bit, damage is detected and described, and one run at a time uses a folder."""

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


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def load(manager: CheckpointManager) -> Checkpoint:
    """Load the newest checkpoint, which must exist."""
    saved = manager.load()
    assert saved is not None
    return saved


def save_steps(manager: CheckpointManager, *steps: int) -> None:
    """Save checkpoints of these steps, whose tensors depend on the step."""
    for step in steps:
        manager.save(step, {"weight": torch.arange(40.0) + step, "step": torch.tensor(step)}, {"step": step})


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    """A manager with checkpoints of steps 10 and 20."""
    manager = CheckpointManager(tmp_path / "state")
    save_steps(manager, 10, 20)
    return manager


def load_with_warning(manager: CheckpointManager, match: str) -> Checkpoint:
    """Load step 10 instead of the damaged step 20, with a warning that matches; returns the checkpoint."""
    with pytest.warns(HeedfulWarning, match=match) as warned:
        saved = load(manager)
    assert len(warned) == 1
    assert str(warned[0].message).startswith(f"{manager.folder}: step-")
    assert str(warned[0].message).endswith("; step 10 is used instead")
    assert saved.step == 10 == saved.values["step"]
    assert torch.equal(saved.tensors["weight"], torch.arange(40.0) + 10)
    return saved


# -- restored tensors and values -------------------------------------------------------------------------------------


def test_tensors_are_restored_bit_for_bit(tmp_path: Path) -> None:
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
        "all of it": shared,
        "transposed": shared.T,
        "a row of it": shared[2],
        "every other": shared[::2, 1::2],
        "expanded": torch.tensor([1.0]).expand(3, 5),
        "parameter": torch.nn.Parameter(torch.randn(2, 3)),
        "a name, é\n\ud800": torch.ones(1),
    }
    manager = CheckpointManager(tmp_path)
    folder = manager.save(7, tensors, {})
    saved = load(manager)
    assert (saved.step, saved.folder, saved.values) == (7, folder, {})
    assert saved.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        restored = saved.tensors[name]
        assert (restored.dtype, restored.shape, restored.requires_grad) == (tensor.dtype, tensor.shape, False)
        assert raw_bytes(restored) == raw_bytes(tensor), name
        assert restored.is_contiguous()
    saved.tensors["all of it"].zero_()
    assert raw_bytes(saved.tensors["a row of it"]) == raw_bytes(shared[2])


def test_safetensors_reads_the_file(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.ones(3, 5).to(dtype) for dtype in DTYPES} | {"": torch.zeros(()), "é": torch.ones(0)}
    read = load_file(CheckpointManager(tmp_path).save(1, tensors, {}) / "tensors.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_the_order_of_tensors_does_not_change_the_files(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2), "a": torch.tensor(1, dtype=torch.int8), "c": torch.ones(3, dtype=torch.float64)}
    first = CheckpointManager(tmp_path / "1").save(1, tensors, {})
    second = CheckpointManager(tmp_path / "2").save(1, dict(reversed(tensors.items())), {})
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in FILES)


def test_a_checkpoint_may_have_no_tensors_and_no_values(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(0, {}, {})
    assert load(manager)[2:] == ({}, {})


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("a", torch.ones(2).to_sparse(), "torch.sparse_coo"),
        ("a", torch.ones(2, dtype=torch.complex64), "torch.complex64"),
        ("a", torch.ones(2, device="meta"), "on meta"),
        ("__metadata__", torch.ones(2), "not named __metadata__"),
    ],
)
def test_a_tensor_that_cannot_be_saved_is_refused(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    with pytest.raises(RunError, match=rf"'{name}' .*{message}"):
        CheckpointManager(tmp_path / "state").save(1, {name: tensor}, {})
    assert not (tmp_path / "state").exists()


def test_values_are_restored_exactly(tmp_path: Path) -> None:
    values = {
        "floats": [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, 1.0, math.inf, -math.inf, math.nan, math.pi],
        "ints": [0, -1, 2**63 + 5, 10**300],
        "texts": ["", "é ☃ \U0001f600", "a\nb\0", "\ud800", '"'],
        "rest": {"": None, "yes": True, "no": [False, [], {}, [[{"a": [1]}]]]},
    }
    manager = CheckpointManager(tmp_path)
    manager.save(1, {}, values)
    assert repr(load(manager).values) == repr(values)


@pytest.mark.parametrize(
    ("value", "message"),
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
def test_values_that_json_does_not_restore_are_refused(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        CheckpointManager(tmp_path / "state").save(1, {}, {"a": {"b": [1, value]}})
    assert not (tmp_path / "state").exists()


# -- choice of the checkpoint, removal of old ones -------------------------------------------------------------------


def test_the_newest_checkpoint_is_loaded_and_the_oldest_are_removed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "state", keep_last=3)
    assert manager.load() is None
    for step in (5, 10, 15, 99_999_999, 123_456_789):
        save_steps(manager, step)
        assert load(manager).step == step
        assert (tmp_path / "state" / "latest").read_text() == f"step-{step:08d}\n"
    assert sorted(os.listdir(tmp_path / "state")) == ["latest", "step-00000015", "step-123456789", "step-99999999"]


def test_file_times_do_not_matter(manager: CheckpointManager) -> None:
    os.utime(manager.folder / "step-00000020", (0, 0))
    os.utime(manager.folder / "step-00000010", (2**32, 2**32))
    assert load(manager).step == 20
    save_steps(manager, 30)
    assert sorted(os.listdir(manager.folder)) == ["latest", "step-00000020", "step-00000030"]


@pytest.mark.parametrize("content", ["step-00000010\n", "step-00000099", "../../etc", "\0\xff", ""])
def test_the_content_of_latest_does_not_decide(manager: CheckpointManager, content: str) -> None:
    (manager.folder / "latest").write_text(content, encoding="latin-1")
    assert load(manager).step == 20
    (manager.folder / "latest").unlink()
    assert load(manager).step == 20


def test_folders_with_other_names_are_not_checkpoints(manager: CheckpointManager) -> None:
    for name in (
        "step-30",
        "step-000000030",
        "step-00000030-1",
        "step-00000030-02",
        "step-00000030.old",
        "step-٠٠٠٠٠٠٣٠",
    ):
        (manager.folder / name).mkdir()
    assert load(manager).step == 20
    save_steps(manager, 40)
    assert (manager.folder / "step-30").is_dir()


def test_an_equal_checkpoint_of_the_step_is_not_written_again(manager: CheckpointManager) -> None:
    before = (manager.folder / "step-00000020" / "manifest.json").stat()
    save_steps(manager, 20)
    assert (manager.folder / "step-00000020" / "manifest.json").stat() == before
    assert sorted(os.listdir(manager.folder)) == ["latest", "step-00000010", "step-00000020"]


def test_a_different_checkpoint_of_the_step_is_replaced(manager: CheckpointManager) -> None:
    for attempt in (2, 3):
        assert manager.save(20, {"weight": torch.ones(1)}, {"attempt": attempt}).name == f"step-00000020-{attempt}"
        assert load(manager).values == {"attempt": attempt}
        assert (manager.folder / "latest").read_text() == f"step-00000020-{attempt}\n"
        assert sorted(os.listdir(manager.folder)) == ["latest", "step-00000010", f"step-00000020-{attempt}"]
    save_steps(manager, 30)
    assert sorted(os.listdir(manager.folder)) == ["latest", "step-00000020-3", "step-00000030"]


def test_a_damaged_checkpoint_of_the_step_is_replaced(manager: CheckpointManager) -> None:
    (manager.folder / "step-00000020" / "values.json").write_text("{}")
    save_steps(manager, 20)
    assert load(manager).step == 20
    assert sorted(os.listdir(manager.folder)) == ["latest", "step-00000010", "step-00000020-2"]


def test_damaged_checkpoints_are_removed_when_training_has_passed_their_step(manager: CheckpointManager) -> None:
    (manager.folder / "step-00000030").mkdir()
    (manager.folder / "step-00000020" / "manifest.json").unlink()
    with pytest.warns(HeedfulWarning, match="is missing; step 10 is used") as warned:
        load(manager)
    assert len(warned) == 2
    save_steps(manager, 15)
    assert sorted(os.listdir(manager.folder))[1:] == [
        "step-00000010",
        "step-00000015",
        "step-00000020",
        "step-00000030",
    ]
    save_steps(manager, 25)
    assert sorted(os.listdir(manager.folder))[1:] == ["step-00000015", "step-00000025", "step-00000030"]
    save_steps(manager, 35)
    assert sorted(os.listdir(manager.folder))[1:] == ["step-00000025", "step-00000035"]
    assert load(manager).step == 35


def test_a_step_before_a_valid_checkpoint_is_refused(manager: CheckpointManager) -> None:
    with pytest.raises(RunError, match=r"step 15 .* step-00000020"):
        save_steps(CheckpointManager(manager.folder), 15)
    (manager.folder / "step-00000020" / "values.json").unlink()
    save_steps(CheckpointManager(manager.folder), 15)


def test_keep_last_must_be_at_least_1(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match="keep_last is 0"):
        CheckpointManager(tmp_path, keep_last=0)


# -- damage -----------------------------------------------------------------------------------------------------------


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_detected(manager: CheckpointManager, name: str, count: int) -> None:
    path = manager.folder / "step-00000020" / name
    bits = path.stat().st_size * 8
    for bit in random.Random(0).sample(range(bits), min(count, bits)):
        flip_bit(path, bit)
        load_with_warning(manager, f"step-00000020 is damaged: .*{'' if name == FILES[2] else name}")
        flip_bit(path, bit)
    assert load(manager).step == 20


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_detected(manager: CheckpointManager, name: str, count: int) -> None:
    path = manager.folder / "step-00000020" / name
    content = path.read_bytes()
    for size in random.Random(0).sample(range(len(content)), min(count, len(content))):
        path.write_bytes(content[:size])
        load_with_warning(manager, rf"bytes of {name} .*{size}.*{len(content)}" if name != FILES[2] else name)
        path.write_bytes(content[:size] + bytes(len(content) - size))
        if content[size:].strip(b"\0"):
            load_with_warning(manager, f"sha256 of {name}" if name != FILES[2] else name)
    path.write_bytes(content + b"\0")
    load_with_warning(manager, name)


def edit_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a function that changes the manifest; `change` edits it or returns a new one."""

    def damage(folder: Path) -> None:
        text = (folder / "manifest.json").read_text()
        changed = change(manifest := json.loads(text))
        text = json.dumps(manifest if changed is None else changed, indent=1) + "\n"
        (folder / "manifest.json").write_text(text)

    return damage


def write_file(name: str, data: bytes) -> Callable[[Path], None]:
    """Return a function that writes a file of the checkpoint."""

    def damage(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return damage


def replace_by_folder(name: str) -> Callable[[Path], None]:
    """Return a function that replaces a file of the checkpoint by a folder."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def replace_values_by_pipe(folder: Path) -> None:
    (folder / "values.json").unlink()
    os.mkfifo(folder / "values.json")


def copy_step_10(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step-00000010"), folder)


def replace_by_broken_link(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("nowhere")


def change_whitespace(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {  # name -> message, function that damages a checkpoint
    **{f"no {name}": (f"{name} is missing", lambda folder, name=name: (folder / name).unlink()) for name in FILES},
    **{f"a folder {name}": (f"{name} is missing", replace_by_folder(name)) for name in FILES},
    "empty": ("manifest.json is missing", lambda folder: [path.unlink() for path in folder.iterdir()]),
    "a file": ("manifest.json is missing", lambda folder: [shutil.rmtree(folder), folder.write_bytes(b"")]),
    "a link to nothing": ("manifest.json is missing", replace_by_broken_link),
    "a pipe": ("values.json is missing", replace_values_by_pipe),
    "step 10 as 20": ("manifest.json is of step 10", copy_step_10),
    "an empty manifest": ("not as it was", write_file("manifest.json", b"")),
    "zeros": ("not as it was", write_file("manifest.json", bytes(300))),
    "garbage": ("not as it was", write_file("manifest.json", bytes(range(256)))),
    "deep": ("not as it was", write_file("manifest.json", b'{"a":' * 9_000)),
    "very deep": ("not as it was", write_file("manifest.json", b"[" * 10_000_000)),
    "a list": ("not as it was", edit_manifest(lambda manifest: [])),
    "a number": ("not as it was", edit_manifest(lambda manifest: 1)),
    "no files": ("not as it was", edit_manifest(lambda manifest: manifest.update(files={}))),
    "files in a list": ("not as it was", edit_manifest(lambda manifest: manifest.update(files=[]))),
    "nothing of a file": ("not as it was", edit_manifest(lambda manifest: manifest["files"].update({FILES[0]: {}}))),
    "more": ("not as it was", edit_manifest(lambda manifest: manifest.update(more=1))),
    "more files": ("not as it was", edit_manifest(lambda manifest: manifest["files"].update(more={}))),
    "1.0": ("not as it was", edit_manifest(lambda manifest: manifest.update(format=1.0))),
    "true": ("not as it was", edit_manifest(lambda manifest: manifest.update(format=True))),
    "other spaces": ("not as it was", change_whitespace),
    "another step": ("manifest.json is of step 21", edit_manifest(lambda manifest: manifest.update(step=21))),
    "a step of text": ("manifest.json is of step '20'", edit_manifest(lambda manifest: manifest.update(step="20"))),
    "of the future": ("it has the format 2; this version", edit_manifest(lambda manifest: manifest.update(format=2))),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_detected(manager: CheckpointManager, case: str) -> None:
    message, damage = DAMAGE[case]
    damage(manager.folder / "step-00000020")
    load_with_warning(manager, f"step-00000020 is damaged: .*{message}")
    save_steps(manager, 20)
    assert load(manager).step == 20


def test_a_newer_empty_checkpoint_folder_is_passed_over(manager: CheckpointManager) -> None:
    (manager.folder / "step-00000010").rename(manager.folder / "step-00000009")
    shutil.rmtree(manager.folder / "step-00000009")
    (manager.folder / "step-00000030").mkdir()
    with pytest.warns(HeedfulWarning, match="step-00000030 is damaged: manifest.json is missing; step 20 is used"):
        assert load(manager).step == 20


def test_no_valid_checkpoint_is_an_error(manager: CheckpointManager) -> None:
    (manager.folder / "step-00000020" / "values.json").unlink()
    flip_bit(manager.folder / "step-00000010" / "tensors.safetensors", 77)
    with pytest.raises(RunError) as caught:
        manager.load()
    assert str(caught.value).startswith(
        f"{manager.folder} has no valid checkpoint: step-00000020 is damaged: values.json is missing; step-00000010 is "
        "damaged: the sha256 of tensors.safetensors is "
    )


def test_missing_checkpoints_are_an_error(manager: CheckpointManager) -> None:
    for path in manager.folder.glob("step-*"):
        shutil.rmtree(path)
    with pytest.raises(RunError, match="latest names one"):
        manager.load()


# -- disk space and unusual folders ----------------------------------------------------------------------------------


def test_check_space_needs_room_for_one_more_checkpoint(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(5000, 2000, 3000))
    manager.check_space(3000)  # two checkpoints exist and stay
    with pytest.raises(HeedfulError, match=r"3,000 .* 3,001"):
        manager.check_space(3001)
    new_manager = CheckpointManager(manager.folder / "a" / "b")
    new_manager.check_space(1000)
    assert not (manager.folder / "a").exists()
    with pytest.raises(RunError, match="3,003: 3 checkpoints of 1,001"):
        new_manager.check_space(1001)


def test_check_space_removes_temporary_files_of_dead_processes(manager: CheckpointManager) -> None:
    (manager.folder / f".step-00000030.{2**22 + 1}.part").mkdir()
    manager.check_space(1)
    assert sorted(os.listdir(manager.folder)) == ["latest", "step-00000010", "step-00000020"]


@pytest.mark.parametrize("name", ["with spaces and 'quotes\"", "Übung ☃ 文", "100% {x} [a] *", "a\nb", "ü" * 120])
def test_unusual_folder_names(tmp_path: Path, name: str) -> None:
    manager = CheckpointManager(tmp_path / name / name)
    with lock_run(tmp_path / name):
        save_steps(manager, 1, 2, 3)
        assert load(manager).step == 3


def test_a_folder_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    manager = CheckpointManager(tmp_path / "link")
    save_steps(manager, 1, 2, 3)
    assert load(CheckpointManager(tmp_path / "real")).step == 3
    (tmp_path / "real").rename(tmp_path / "away")
    with pytest.raises(RunError, match="link cannot be read: No such file"):
        manager.load()
    with pytest.raises(RunError, match="step 4 could not be saved: File exists"):
        save_steps(manager, 4)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(RunError, match="link cannot be read: Too many levels"):
        manager.load()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    manager = CheckpointManager(tmp_path / "state")
    with pytest.raises(RunError, match="state cannot be read: Not a directory"):
        manager.load()
    with pytest.raises(RunError, match="step 1 could not be saved: File exists"):
        save_steps(manager, 1)
    with pytest.raises(RunError, match="state cannot hold a run: File exists"), lock_run(tmp_path / "state"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(manager: CheckpointManager) -> None:
    manager.folder.chmod(0o555)
    try:
        with pytest.raises(RunError, match="step 30 could not be saved: Permission denied"):
            save_steps(manager, 30)
        assert load(manager).step == 20
    finally:
        manager.folder.chmod(0o755)


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    manager = CheckpointManager(Path("state"))
    save_steps(manager, 1)
    monkeypatch.chdir("/")
    save_steps(manager, 2)
    assert load(manager).folder == tmp_path / "state" / "step-00000002"


# -- locks -------------------------------------------------------------------------------------------------------------


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    for _ in range(2000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path.name} was not created")


def start_lock_holder(folder: Path, ready: Path, inside: Callable[[], None] = lambda: None) -> int:
    """Start a process that holds the lock of a folder until it is killed; returns its id.

    Args:
        folder: The folder.
        ready: File that is created when the process holds the lock.
        inside: Called in the process, with the lock.
    """
    if (pid := os.fork()) == 0:
        try:
            with lock_run(folder):
                inside()
                ready.touch()
                time.sleep(60)
        finally:
            os._exit(1)
    wait_for(ready)
    return pid


def kill(pid: int) -> None:
    """Kill a child process and wait for its end."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pid = start_lock_holder(run, tmp_path / "ready")
    try:
        message = rf"another run, pid {pid}, host \S+, holds .*run: wait for it, stop it"
        with pytest.raises(RunError, match=message), lock_run(run):
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

    kill(start_lock_holder(run, tmp_path / "ready", work))
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

    def raise_unsupported(handle: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_lock.fcntl, "flock", raise_unsupported)
    message = "cannot be locked: Function not implemented; a second run"
    with pytest.warns(HeedfulWarning, match=message), lock_run(tmp_path):
        pass
