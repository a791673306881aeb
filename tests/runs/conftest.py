"""What several tests of runs begin with."""

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
    """No plots of verdicts, one thread."""
    for module in (distil_verdict, distil_search):
        monkeypatch.setattr(module, "save_plot", lambda path, figure: path)
        monkeypatch.setattr(module, "plot_verdict", lambda *arguments: None)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier, not trained."""
    return make_model_dir(tmp_path_factory.mktemp("teacher"), "single")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with its labels, in three splits."""
    return write_splits("single", tmp_path_factory.mktemp("data"))
