"""Cascades of tiny classifiers with random weights, which are saved to folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from heedful.checkpoint import ModelBundle, load, save
from heedful.checkpoint.bundle import EarlyStage
from heedful.infer.engine import Engine
from tests.support.model_folders import make_model_dir

WORDS = ("ada", "lives", "in", "paris", "and", "the", "cat", "sat", "on", "a", "mat", "who", "wrote", "it", "first")
TEXTS = [" ".join(WORDS[start % 15 : start % 15 + 1 + start % 7]) + f" {start}" for start in range(60)]


def randomised_copy(folder: Path, seed: int) -> ModelBundle:
    """Load the model of a folder, with random numbers added to its weights."""
    bundle = load(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in bundle.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return bundle


def make_cascade(folder: Path, stages: int = 2, quantile: float = 0.4) -> Path:
    """Save a cascade to `folder`/cascade, and each of its stages to `folder`/alone-N.

    The last stage is the model of `make_model_dir`. Each early stage is less confident than its threshold for about
    this quantile of TEXTS.
    """
    last = load(make_model_dir(folder / f"alone-{stages}", "single"))
    early = []
    for number in range(1, stages):
        bundle = randomised_copy(folder / f"alone-{stages}", number)
        save(bundle, folder / f"alone-{number}")
        confidences = [answer["probability"] for answer in Engine(bundle)(TEXTS)]
        early.append(EarlyStage(bundle=bundle, threshold=float(np.quantile(confidences, quantile))))
    last.early_stages = tuple(early)
    save(last, folder / "cascade")
    return folder / "cascade"
