"""A fixture that makes tiny models of transformers, with which the tests of this folder compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_models import save_tiny

Saved = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function from family, architecture and dtype to transformers' model, in eval mode, and its folder.

    Each model is made once: a test changes neither its weights nor its folder.
    """
    models: dict[tuple[str, str, torch.dtype], tuple[Any, Path]] = {}

    def model(family: str, architecture: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Path]:
        key = family, architecture, dtype
        if key not in models:
            folder = tmp_path_factory.mktemp(architecture)
            models[key] = save_tiny(folder, *key), folder
        reference, folder = models[key]
        reference.zero_grad()
        return reference.eval(), folder

    return model
