"""Fixtures that several tests of runs share: a teacher, labelled data, and runs without plots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from heedful.runs.distil import search as distil_search
from heedful.runs.distil import verdict as distil_verdict
from tests.support.generated_data import write_splits
from tests.support.model_folders import make_model_dir


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the plots of verdicts, and compute with one thread."""
    for module in (distil_verdict, distil_search):
        monkeypatch.setattr(module, "save_plot", lambda path, figure: path)
        monkeypatch.setattr(module, "plot_verdict", lambda *arguments: None)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny classifier with random weights."""
    return make_model_dir(tmp_path_factory.mktemp("teacher"), "single")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts that have the teacher's labels: train, dev and test."""
    return write_splits("single", tmp_path_factory.mktemp("data"))
