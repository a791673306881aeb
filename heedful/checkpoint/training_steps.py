"""Weights of a training checkpoint of a run, such as RUN/state/step-00000400, for `load`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from heedful.checkpoint.bundle import ModelBundle
from heedful.checkpoint.new_head import rescaled
from heedful.errors import ModelError

MODEL = "model/"  # prefix of the model's weights; other names are the optimizer's


def is_training_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a training checkpoint of a run."""
    return folder.parent.name == "state" and folder.name.startswith("step-") and (folder / "manifest.json").is_file()


def with_checkpoint_weights(bundle: ModelBundle, folder: Path) -> ModelBundle:
    """Return the run's model with the weights of a checkpoint; weights that the checkpoint lacks are unchanged.

    Args:
        bundle: The run's model, whose weights are replaced.
        folder: Folder of the checkpoint.

    Raises:
        ModelError: If the checkpoint was saved in shards, cannot be read, or belongs to another model.
    """
    file = folder / "tensors.safetensors"
    if not file.is_file():
        raise ModelError(f"{folder} has no {file.name}: weights that were saved in shards cannot be loaded")
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    parameters = bundle.named_tensors()
    weights = {name: tensors[MODEL + name] for name in parameters if MODEL + name in tensors}
    wrong = [name for name, weight in weights.items() if weight.shape != parameters[name].shape]
    if wrong or not weights:
        problem = f"{wrong[0]} has another shape" if wrong else "it has none of its weights"
        raise ModelError(f"{file} does not belong to {folder.parent.parent}: {problem}")
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    bundle.source, bundle.training_vectors = str(folder), None  # the vectors are those of the final weights
    scaling = bundle.label_scaling  # weights of a checkpoint predict scaled labels
    return rescaled(bundle, scaling.get("std", 1.0), scaling.get("mean", 0.0))
