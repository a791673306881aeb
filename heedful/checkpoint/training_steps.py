"""The weights that a run had at one of its checkpoints, in RUN/state/step-00000400."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from heedful.checkpoint.bundle import ModelBundle
from heedful.checkpoint.new_head import rescaled
from heedful.errors import HeedfulError

MODEL = "model/"  # begins the names of the model's weights; others are the optimizer's


def is_training_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of a run."""
    return folder.parent.name == "state" and folder.name.startswith("step-") and (folder / "manifest.json").is_file()


def with_checkpoint_weights(loaded: ModelBundle, folder: Path) -> ModelBundle:
    """The run's model with the weights of a checkpoint; weights that training did not change are the run's own."""
    file = folder / "tensors.safetensors"
    if not file.is_file():
        raise HeedfulError(f"{folder} has no {file.name}: weights that were saved in parts cannot be loaded")
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise HeedfulError(f"{file} cannot be read: {error}") from None
    mine = loaded.named_tensors()
    weights = {name: tensors[MODEL + name] for name in mine if MODEL + name in tensors}  # others are the objective's
    wrong = [name for name, weight in weights.items() if weight.shape != mine[name].shape]
    if wrong or not weights:
        what = f"{wrong[0]} has another shape" if wrong else "it has none of its weights"
        raise HeedfulError(f"{file} does not belong to {folder.parent.parent}: {what}")
    with torch.no_grad():
        for name, weight in weights.items():
            mine[name].copy_(weight)
    loaded.source = str(folder)
    return rescaled(
        loaded, loaded.label_scaling.get("std", 1.0), loaded.label_scaling.get("mean", 0.0)
    )  # as it answers
