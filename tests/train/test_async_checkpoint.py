"""An asynchronous checkpoint holds the values at the time of the call, and its errors are raised."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.train.async_checkpoint import AsyncCheckpointer
from heedful.train.checkpoint import CheckpointManager
from heedful.train.fit import fit
from tests.support.tiny_runs import copy_state, make_settings, make_trainer, tensors_equal


class BlockedCheckpointManager(CheckpointManager):
    """A checkpoint manager that saves only when `may_save` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_save = threading.Event()

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Path:
        assert self.may_save.wait(60)
        return super().save(step, tensors, values)


def test_an_async_checkpoint_holds_the_values_of_its_step(tmp_path: Path) -> None:
    trainer, manager = make_trainer(), BlockedCheckpointManager(tmp_path / "state")
    checkpointer = AsyncCheckpointer(manager, trainer, background=True)
    trainer.train_step()
    expected = copy_state(trainer)
    checkpointer.save(trainer.step, *trainer.state())
    trainer.train_step()
    with torch.no_grad():
        for tensor in trainer.state()[0].values():
            tensor.fill_(7)
    assert manager.load() is None
    manager.may_save.set()
    checkpointer.wait()
    saved = manager.load()
    assert saved is not None and saved.step == 1 == saved.values["step"]
    assert tensors_equal(saved.tensors, expected[0])


class Stream:
    """A CUDA stream, or the event at its end, that logs what waits for it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, stream: Stream) -> None:
        self.log.append(f"{self.name} waits for {stream.name}")

    def record_event(self) -> Stream:
        return Stream("copies", self.log)

    def wait(self, stream: Stream) -> None:
        self.log.append(f"{stream.name} waits for {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"the thread waits for {self.name}")


def test_a_gpu_copies_on_a_stream_for_which_the_next_update_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    steps = Stream("steps", log)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    trainer, manager = make_trainer(), BlockedCheckpointManager(tmp_path / "state")
    trainer.train_step()
    expected = copy_state(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "device", torch.device("cuda", 0))
        checkpointer = AsyncCheckpointer(manager, trainer, background=True)
        checkpointer.save(trainer.step, *trainer.state())
    update = trainer._optimizer.step

    def logged_update(*arguments: Any, **keywords: Any) -> None:
        log.append("update")
        update(*arguments, **keywords)

    monkeypatch.setattr(trainer._optimizer, "step", logged_update)
    assert log[0] == "side waits for steps"
    trainer.train_step()
    manager.may_save.set()
    checkpointer.wait()
    assert log.index("steps waits for copies") < log.index("update") and "the thread waits for copies" in log
    saved = manager.load()
    assert saved is not None and tensors_equal(saved.tensors, expected[0])


def test_a_run_with_async_checkpoints_has_the_same_files(tmp_path: Path) -> None:
    outcomes = []
    for is_async in (False, True):
        folder = tmp_path / str(is_async)
        fit(make_trainer(max_steps=4), folder, make_settings({}, {"async_checkpoint": is_async})[1])
        saved = CheckpointManager(folder / "state").load()
        assert saved is not None and saved.step == 4
        outcomes.append((saved.tensors, (folder / "journal.jsonl").read_bytes()))
    assert tensors_equal(outcomes[0][0], outcomes[1][0]) and outcomes[0][1] == outcomes[1][1]


def test_an_error_of_a_save_is_raised_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state").touch()
    checkpointer = AsyncCheckpointer(CheckpointManager(tmp_path / "run" / "state"), make_trainer(), background=True)
    checkpointer.save(1, {}, {})
    with pytest.raises(HeedfulError, match="step 1 could not be saved: File exists"):
        checkpointer.save(2, {}, {})
    checkpointer.wait()
