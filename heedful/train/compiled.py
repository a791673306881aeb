"""Transformer blocks compiled by torch.compile: the operations outside of attention become a few kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from heedful.model.stack import Attention, Block, CrossAttention


class CompiledBlocks:
    """Context manager in which the blocks of models run compiled, with one compilation for each kind of block.

    Weights are inputs of the compiled code, so all layers share it. Attention is not compiled: it plans on the host,
    and its kernels are compiled already. Each number of packed rows needs a compilation of its own; batches of
    `objectives.packing.FixedShape` have one. Names, weights and saved files do not change.
    """

    def __init__(self, *models: nn.Module, **options: Any) -> None:
        """Prepare the blocks of the models; `options` are passed to torch.compile."""
        import torch._dynamo as dynamo  # the import takes a second

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
        """Restore the forward passes that are not compiled."""
        for attention, _ in self._attentions:
            attention.__dict__.pop("forward", None)
        for block in self.blocks:
            block._compiled_call_impl = None
