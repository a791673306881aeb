"""Deterministic algorithms: the environment variable that they need, and what the context changes."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import torch

from heedful.errors import HeedfulError
from heedful.train import determinism
from heedful.train.determinism import WORKSPACE, deterministic_algorithms, prepare_determinism
from tests.support.tiny_runs import make_trainer, records


@pytest.fixture(autouse=True)
def _unset_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, "")  # registers the variable, so that changes are undone
    monkeypatch.delenv(WORKSPACE)


def test_the_variable_is_set_before_a_gpu_is_used() -> None:
    prepare_determinism()
    assert os.environ[WORKSPACE] == ":4096:8"
    prepare_determinism()


def test_a_variable_that_is_deterministic_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "_gpu_was_used", lambda: True)
    monkeypatch.setenv(WORKSPACE, ":16:8")
    prepare_determinism()
    assert os.environ[WORKSPACE] == ":16:8"


def test_a_gpu_that_was_used_before_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: 1024 * index)
    with pytest.raises(HeedfulError, match=r"CUBLAS_WORKSPACE_CONFIG=:4096:8, which is not set, and this process has"):
        prepare_determinism()
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: 0)
    prepare_determinism()


def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(HeedfulError, match=r'which is ":0:0": set it before Python starts'):
        prepare_determinism()


def test_the_context_restores_the_settings() -> None:
    with suppress(KeyError), deterministic_algorithms():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_on_a_cpu_nothing_changes() -> None:
    training = make_trainer(deterministic=True, device="cpu")
    with training.algorithms():
        assert not torch.are_deterministic_algorithms_enabled()
    assert records(list(training)) == records(list(make_trainer())) and WORKSPACE not in os.environ
