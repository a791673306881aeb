"""Heads masked or weighed: what a head adds is multiplied by its gate before the heads are joined.

Michel et al. 2019, sections 2.2 and 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.model.stack import Block, Placed, Transformer

Gates = Mapping[str, Float[Tensor, "layers heads"]]  # by part: encoder, decoder, cross


@contextmanager
def gated_heads(model: Transformer, gates: Gates) -> Iterator[None]:
    """While it lasts, each head's result counts by its gate: 1 as usual, 0 not at all."""
    with ExitStack() as stack:
        for part, side in (("encoder", model.encoder), ("decoder", model.decoder)):
            if side is None:
                continue
            for block in side.blocks:
                assert isinstance(block, Block)
                layer: list[int] = [0]
                stack.enter_context(unfused(block))
                stack.enter_context(_hooked(block, _noting(layer)))
                if part in gates:
                    stack.enter_context(_hooked(block.attention.out, _scaling(gates[part], layer)))
                if "cross" in gates and hasattr(block, "cross") and part == "decoder":
                    stack.enter_context(_hooked(block.cross.out, _scaling(gates["cross"], layer)))
        yield


@contextmanager
def unfused(block: Block) -> Iterator[None]:
    """While it lasts, the block calls its modules, so that hooks on them are heard: a kernel may do all in one call."""
    before, block.at_once = block.at_once, None
    try:
        yield
    finally:
        block.at_once = before


@contextmanager
def _hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _noting(layer: list[int]) -> Any:
    """Which layer a block is at, since one block may be several layers."""

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        placed = next(each for each in given if isinstance(each, Placed))
        layer[0] = placed.layer

    return note


def _scaling(gates: Tensor, layer: list[int]) -> Any:
    def scale(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        (joined,) = given
        each = gates[layer[0]].to(joined)
        return ((joined.unflatten(-1, (len(each), -1)) * each[:, None]).flatten(-2),)

    return scale


def open_gates(model: Transformer) -> dict[str, Tensor]:
    """Gates that change nothing."""
    found = {}
    for part, side in (("encoder", model.encoder), ("decoder", model.decoder)):
        if side is not None:
            found[part] = torch.ones(side.config.layers, side.config.heads)
            if side.config.cross:
                found["cross"] = torch.ones(side.config.layers, side.config.heads)
    return found
