"""Freezing of embeddings and lower layers, which training does not change (Howard and Ruder 2018; Lee et al. 2019)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from heedful.errors import SettingError
from heedful.model.config import ModelConfig
from heedful.model.stack import Transformer
from heedful.model.token_pruning import TokenPruning

if TYPE_CHECKING:
    from heedful.checkpoint import ModelBundle

PATH = "train.freeze_layers"


def freezing_note(count: int) -> str:
    """Return a sentence that names the frozen layers, for the log."""
    layers = "lowest layer" if count == 1 else f"{count} lowest layers"
    return f"the embeddings and the {layers} are frozen, without dropout"


def check_freezing(config: object, count: int, reinit_layers: int = 0, pruning: TokenPruning | None = None) -> None:
    """Raise SettingError if the embeddings and the lower `count` layers of a model cannot be frozen.

    Args:
        config: Model config, or None if training starts from random weights.
        count: Number of layers to freeze.
        reinit_layers: Number of upper layers that start from random weights.
        pruning: Token pruning of the model.
    """
    problem = ""
    stack = config.encoder or config.decoder if isinstance(config, ModelConfig) else None
    if config is None:
        problem = "training starts from random weights, which should not stay as they are: leave it out"
    elif stack is None or not isinstance(config, ModelConfig):
        problem = "the model is no Transformer: leave it out"
    elif config.encoder and config.decoder:
        problem = "the model has an encoder and a decoder; layers are frozen in models with one of them: leave it out"
    elif stack.blocks is not None and stack.blocks < stack.layers:
        problem = f"the {stack.layers} layers of the model share the weights of {stack.blocks}: leave it out"
    elif count + reinit_layers > stack.layers:
        detail = f", and init.reinit_layers gives random weights to {reinit_layers} of them" if reinit_layers else ""
        limit = stack.layers - reinit_layers
        remedy = f"give {limit} or fewer" if limit > 0 else "leave it out"
        problem = f"the model has {stack.layers} layers{detail}: {remedy}"
    elif pruning is not None and count > pruning.layer:
        part = f"after layer {pruning.layer}, the model computes a part of the tokens"
        problem = f"{part}: give {pruning.layer} or fewer"
    if problem:
        raise SettingError(f"{PATH} is {count}, but {problem}", path=PATH)


def freeze_layers(loaded: ModelBundle, count: int) -> None:
    """Freeze the embeddings and the lower `count` layers: no gradients, and no dropout in training.

    Shared relative-position parameters are frozen too, although unfrozen layers use them.

    Raises:
        SettingError: If the model cannot be frozen this way.
    """
    check_freezing(loaded.config.model, count, pruning=loaded.token_pruning)
    assert isinstance(loaded.model, Transformer)
    loaded.model.execution = replace(loaded.model.execution, frozen_layers=count)
    for module in loaded.model.frozen_modules():
        module.requires_grad_(False)
