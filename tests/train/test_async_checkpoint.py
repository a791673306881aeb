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
from tests.support.tiny_runs import everything, same, settings, trainer


class Slow(CheckpointManager):
    """A store that waits to be told before it writes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go = threading.Event()

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Path:
        assert self.go.wait(60)
        return super().save(step, tensors, values)


def test_an_async_checkpoint_holds_the_values_of_its_step(tmp_path: Path) -> None:
    made, store = trainer(), Slow(tmp_path / "state")
    saver = AsyncCheckpointer(store, made, background=True)
    made.train_step()
    expected = everything(made)
    saver.save(made.step, *made.state())
    made.train_step()
    with torch.no_grad():
        for tensor in made.state()[0].values():
            tensor.fill_(7)
    assert store.load() is None
    store.go.set()
    saver.wait()
    saved = store.load()
    assert saved is not None and saved.step == 1 == saved.values["step"]
    assert same(saved.tensors, expected[0])


class Stream:
    """A stream of a GPU, and the event at its end, which note who waits for them."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Stream:
        return Stream("copies", self.log)

    def wait(self, other: Stream) -> None:
        self.log.append(f"{other.name} waits for {self.name}")

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
    made, store = trainer(), Slow(tmp_path / "state")
    made.train_step()
    expected = everything(made)
    with monkeypatch.context() as patch:
        patch.setattr(made, "device", torch.device("cuda", 0))
        saver = AsyncCheckpointer(store, made, background=True)
        saver.save(made.step, *made.state())
    update = made._optimizer.step

    def updated(*arguments: Any, **more: Any) -> None:
        log.append("update")
        update(*arguments, **more)

    monkeypatch.setattr(made._optimizer, "step", updated)
    assert log[0] == "side waits for steps"
    made.train_step()
    store.go.set()
    saver.wait()
    assert log.index("steps waits for copies") < log.index("update") and "the thread waits for copies" in log
    saved = store.load()
    assert saved is not None and same(saved.tensors, expected[0])


def test_a_run_that_saves_behind_is_the_same(tmp_path: Path) -> None:
    found = []
    for behind in (False, True):
        folder = tmp_path / str(behind)
        fit(trainer(max_steps=4), folder, settings({}, {"async_checkpoint": behind})[1])
        saved = CheckpointManager(folder / "state").load()
        assert saved is not None and saved.step == 4
        found.append((saved.tensors, (folder / "journal.jsonl").read_bytes()))
    assert same(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_an_error_comes_with_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state").touch()
    saver = AsyncCheckpointer(CheckpointManager(tmp_path / "run" / "state"), trainer(), background=True)
    saver.save(1, {}, {})
    with pytest.raises(HeedfulError, match="step 1 could not be saved: File exists"):
        saver.save(2, {}, {})
    saver.wait()
