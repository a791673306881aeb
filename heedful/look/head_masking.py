"""Head gates: the output of each attention head is multiplied by a gate before the heads are joined.

A gate of 0 masks the head; the gradient of a loss with respect to a gate measures the importance of its head (Michel et
al. 2019, sections 2.2 and 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.model.stack import Block, LayerContext, Transformer

Gates = Mapping[str, Float[Tensor, "layers heads"]]  # by part: encoder, decoder, cross
ForwardPreHook = Callable[[nn.Module, tuple[object, ...]], tuple[Tensor] | None]


@contextmanager
def gated_heads(model: Transformer, gates: Gates) -> Iterator[None]:
    """Context in which each head's output is multiplied by its gate."""
    with ExitStack() as stack:
        stack.enter_context(unfused(model))
        for part, side in (("encoder", model.encoder), ("decoder", model.decoder)):
            if side is None:
                continue
            for block in side.blocks:
                assert isinstance(block, Block)
                layer: list[int] = [0]  # the layer that the block is run as; one block may be several layers
                stack.enter_context(_pre_hook(block, _layer_hook(layer)))
                if part in gates:
                    stack.enter_context(_pre_hook(block.attention.out, _gate_hook(gates[part], layer)))
                if "cross" in gates and hasattr(block, "cross") and part == "decoder":
                    stack.enter_context(_pre_hook(block.cross.out, _gate_hook(gates["cross"], layer)))
        yield


@contextmanager
def unfused(model: Transformer) -> Iterator[None]:
    """Context in which blocks call their modules one by one, so that their hooks run, instead of a fused kernel."""
    before = model.execution
    model.execution = replace(before, fused_block=None)
    try:
        yield
    finally:
        model.execution = before


def layer_context(inputs: tuple[object, ...]) -> LayerContext:
    """Return the context of the layer among the inputs of a block."""
    return next(value for value in inputs if isinstance(value, LayerContext))


@contextmanager
def _pre_hook(module: nn.Module, hook: ForwardPreHook) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _layer_hook(layer: list[int]) -> ForwardPreHook:
    """Return a hook of a block that stores the number of its layer."""

    def store(module: nn.Module, inputs: tuple[object, ...]) -> None:
        layer[0] = layer_context(inputs).layer

    return store


def _gate_hook(gates: Tensor, layer: list[int]) -> ForwardPreHook:
    """Return a hook of an output projection that multiplies each head's part of its input."""

    def scale(module: nn.Module, inputs: tuple[object, ...]) -> tuple[Tensor]:
        (heads,) = inputs
        assert isinstance(heads, Tensor)
        gate = gates[layer[0]].to(heads)
        return ((heads.unflatten(-1, (len(gate), -1)) * gate[:, None]).flatten(-2),)

    return scale


def open_gates(model: Transformer) -> dict[str, Tensor]:
    """Return gates of 1 for all heads, which change nothing."""
    gates = {}
    for part, side in (("encoder", model.encoder), ("decoder", model.decoder)):
        if side is not None:
            gates[part] = torch.ones(side.config.layers, side.config.heads)
            if side.config.cross:
                gates["cross"] = torch.ones(side.config.layers, side.config.heads)
    return gates
