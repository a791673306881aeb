"""Head gates: factors of the outputs of attention heads, applied before the heads are joined.

A gate of 0 masks its head. The gradient of a loss with respect to a gate measures the importance of the head (Michel et
al. 2019, sections 2.2 and 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.model.attention import LayerContext
from heedful.model.stack import Block, Transformer

Gates = Mapping[str, Float[Tensor, "layers heads"]]  # by part: encoder, decoder, cross
ForwardPreHook = Callable[[nn.Module, tuple[object, ...]], tuple[Tensor] | None]


@contextmanager
def gated_heads(model: Transformer, gates: Gates) -> Iterator[None]:
    """Context in which each head's output is multiplied by its gate; heads of parts without gates are unchanged."""
    with ExitStack() as contexts:
        contexts.enter_context(unfused(model))
        for part, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
            if stack is None:
                continue
            for block in stack.blocks:
                assert isinstance(block, Block)
                layer: list[int] = [0]  # index of the layer that is computed: several layers may share a block
                contexts.enter_context(_pre_hook(block, _layer_hook(layer)))
                if part in gates:
                    contexts.enter_context(_pre_hook(block.attention.out, _gate_hook(gates[part], layer)))
                if "cross" in gates and hasattr(block, "cross") and part == "decoder":
                    contexts.enter_context(_pre_hook(block.cross.out, _gate_hook(gates["cross"], layer)))
        yield


@contextmanager
def unfused(model: Transformer) -> Iterator[None]:
    """Context in which blocks call their modules one by one instead of a fused kernel, so that hooks of modules run."""
    execution = model.execution
    model.execution = replace(execution, fused_block=None)
    try:
        yield
    finally:
        model.execution = execution


def layer_context(inputs: tuple[object, ...]) -> LayerContext:
    """Return the `LayerContext` among the inputs of a block."""
    return next(value for value in inputs if isinstance(value, LayerContext))


@contextmanager
def _pre_hook(module: nn.Module, hook: ForwardPreHook) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _layer_hook(layer: list[int]) -> ForwardPreHook:
    """Return a hook of a block that stores the index of the layer in `layer[0]`."""

    def store(module: nn.Module, inputs: tuple[object, ...]) -> None:
        layer[0] = layer_context(inputs).layer

    return store


def _gate_hook(gates: Tensor, layer: list[int]) -> ForwardPreHook:
    """Return a hook of an output projection that multiplies each head's part of the input by its gate.

    Args:
        gates: Gates of all layers, [layers, heads].
        layer: A list whose one element is the index of the layer that is computed.
    """

    def scale(module: nn.Module, inputs: tuple[object, ...]) -> tuple[Tensor]:
        (joined,) = inputs
        assert isinstance(joined, Tensor)
        layer_gates = gates[layer[0]].to(joined)
        return ((joined.unflatten(-1, (len(layer_gates), -1)) * layer_gates[:, None]).flatten(-2),)

    return scale


def open_gates(model: Transformer) -> dict[str, Tensor]:
    """Return gates of 1 for all heads, which change nothing."""
    gates = {}
    for part, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack is not None:
            gates[part] = torch.ones(stack.config.layers, stack.config.heads)
            if stack.config.cross:
                gates["cross"] = torch.ones(stack.config.layers, stack.config.heads)
    return gates
