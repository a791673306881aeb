"""Blocks compiled by torch.compile, shared by all layers: the operations between attentions become a few kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from heedful.model.stack import Attention, Block, CrossAttention


class CompiledBlocks:
    """Context manager in which the blocks of models run compiled, one compilation for each kind of block.

    Weights are inputs of the compiled code, so that all layers share it. Attention is left out: it plans on the host,
    and its kernels are compiled already. Packed rows of one shape (`objectives.packing.FixedShape`) need one
    compilation. Names, weights and what is saved do not change.
    """

    def __init__(self, *models: nn.Module, **options: Any) -> None:
        """`options` are those of torch.compile."""
        import torch._dynamo as dynamo  # it takes a second

        parts = [part for model in models for part in model.modules()]
        attentions = [part for part in parts if isinstance(part, Attention | CrossAttention)]
        self.blocks = [part for part in parts if isinstance(part, Block)]
        self._attentions: list[tuple[nn.Module, Callable[..., Any]]] = [
            (part, dynamo.disable(part.forward, reason="it plans on the host")) for part in attentions
        ]
        for block in self.blocks:
            block.compile(**options)
        self._compiled_calls = [block._compiled_call_impl for block in self.blocks]
        self._disable()

    def __enter__(self) -> CompiledBlocks:
        for attention, forward in self._attentions:
            attention.__dict__["forward"] = forward
        for block, call in zip(self.blocks, self._compiled_calls, strict=True):
            block._compiled_call_impl = call
        return self

    def __exit__(self, *exception: object) -> None:
        self._disable()

    def _disable(self) -> None:
        for attention, _ in self._attentions:
            attention.__dict__.pop("forward", None)
        for block in self.blocks:
            block._compiled_call_impl = None
