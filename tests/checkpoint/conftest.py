"""A model folder that several tests of this folder read, and a copy of it that a test may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.model_copies import ONE_LAYER
from tests.support.tiny_models import save_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a masked language model of one layer, which tests must not change."""
    path = tmp_path_factory.mktemp("files") / "model"
    save_tiny(path, "bert", "BertForMaskedLM", **ONE_LAYER)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of `folder`, which a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "model"))
