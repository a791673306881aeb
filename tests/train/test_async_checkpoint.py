"""An asynchronous checkpoint holds the values at the time of the call, and its errors are raised."""

from __future__ import annotations

import threading
from collections.abc import Mapping
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


class Slow(CheckpointManager):
    """A store that waits to be told before it writes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go = threading.Event()

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Path:
        assert self.go.wait(60)
        return super().save(step, tensors, values)


def test_an_async_checkpoint_holds_the_values_of_its_step(tmp_path: Path) -> None:
    made, store = make_trainer(), Slow(tmp_path / "state")
    saver = AsyncCheckpointer(store, made, background=True)
    made.train_step()
    expected = copy_state(made)
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
    assert tensors_equal(saved.tensors, expected[0])


def test_a_run_that_saves_behind_is_the_same(tmp_path: Path) -> None:
    found = []
    for behind in (False, True):
        folder = tmp_path / str(behind)
        fit(make_trainer(max_steps=4), folder, make_settings({}, {"async_checkpoint": behind})[1])
        saved = CheckpointManager(folder / "state").load()
        assert saved is not None and saved.step == 4
        found.append((saved.tensors, (folder / "journal.jsonl").read_bytes()))
    assert tensors_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_an_error_comes_with_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state").touch()
    saver = AsyncCheckpointer(CheckpointManager(tmp_path / "run" / "state"), make_trainer(), background=True)
    saver.save(1, {}, {})
    with pytest.raises(HeedfulError, match="step 1 could not be saved: File exists"):
        saver.save(2, {}, {})
    saver.wait()
