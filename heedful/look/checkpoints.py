"""A run's model as it was at one of the checkpoints that are still there."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from heedful.checkpoint import Loaded, load
from heedful.checkpoint.attach import rescaled
from heedful.errors import HeedfulError

MODEL = "model/"  # begins the names of the model's weights; others are the optimiser's


def is_checkpoint(folder: Path) -> bool:
    """Whether it is one of a run: run/state/step-00000400."""
    return folder.parent.name == "state" and folder.name.startswith("step-") and (folder / "manifest.json").is_file()


def at_step(folder: Path) -> Loaded:
    """The run's model with the weights of that step; what training left as it was is the run's own."""
    file = folder / "tensors.safetensors"
    if not file.is_file():
        raise HeedfulError(f"{folder} has no {file.name}: weights that were saved in parts cannot be looked at")
    loaded = load(folder.parent.parent)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise HeedfulError(f"{file} cannot be read: {error}") from None
    mine = loaded.named()
    weights = {name: tensors[MODEL + name] for name in mine if MODEL + name in tensors}  # others are the objective's
    wrong = [name for name, weight in weights.items() if weight.shape != mine[name].shape]
    if wrong or not weights:
        what = f"{wrong[0]} has another shape" if wrong else "it has none of its weights"
        raise HeedfulError(f"{file} does not belong to {folder.parent.parent}: {what}")
    with torch.no_grad():
        for name, weight in weights.items():
            mine[name].copy_(weight)
    loaded.source = str(folder)
    return rescaled(loaded, loaded.scores.get("deviation", 1.0), loaded.scores.get("mean", 0.0))  # as it answers
