"""Cascades of tiny classifiers with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from heedful.checkpoint import ModelBundle, load, save
from heedful.checkpoint.bundle import EarlyStage
from heedful.infer.engine import Engine
from tests.support.model_folders import make

WORDS = ("ada", "lives", "in", "paris", "and", "the", "cat", "sat", "on", "a", "mat", "who", "wrote", "it", "first")
TEXTS = [" ".join(WORDS[start % 15 : start % 15 + 1 + start % 7]) + f" {start}" for start in range(60)]


def other_weights(folder: Path, seed: int) -> ModelBundle:
    """Return the model of a folder with other random weights."""
    bundle = load(folder)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in bundle.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    return bundle


def make_cascade(folder: Path, stages: int = 2, quantile: float = 0.4) -> Path:
    """Save a cascade in `folder`/cascade, and its stages alone in `folder`/alone-N; the last one is `make`'s.

    Each early stage is less confident than its threshold for about this quantile of TEXTS.
    """
    last = load(make(folder / f"alone-{stages}", "single"))
    early = []
    for number in range(1, stages):
        bundle = other_weights(folder / f"alone-{stages}", number)
        save(bundle, folder / f"alone-{number}")
        confidences = [answer["probability"] for answer in Engine(bundle)(TEXTS)]
        early.append(EarlyStage(bundle=bundle, threshold=float(np.quantile(confidences, quantile))))
    last.early_stages = tuple(early)
    save(last, folder / "cascade")
    return folder / "cascade"
