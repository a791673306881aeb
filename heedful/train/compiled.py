"""One compiled block for all layers: what stands between attentions becomes a few kernels."""

from __future__ import annotations

from typing import Any

from torch import nn

from heedful.model.stack import Attention, Block, CrossAttention


class CompiledBlocks:
    """Blocks of models, compiled by PyTorch, each kind once; `with` it they run so, and outside as they are.

    Weights are inputs of what is compiled, so that all layers share it. Attention is left out: it plans on the host,
    and its kernels are compiled already. Rows of one shape in each step (`objectives.rows.Steady`) need one
    compilation. Names, weights and what is saved stay as they are. `options` are those of torch.compile.
    """

    def __init__(self, *models: nn.Module, **options: Any) -> None:
        import torch._dynamo as dynamo  # it takes a second

        parts = [part for model in models for part in model.modules()]
        attentions = [part for part in parts if isinstance(part, Attention | CrossAttention)]
        self.blocks = [part for part in parts if isinstance(part, Block)]
        self._apart = [(part, dynamo.disable(part.forward, reason="it plans on the host")) for part in attentions]
        for block in self.blocks:
            block.compile(**options)
        self._calls = [block._compiled_call_impl for block in self.blocks]
        self._off()

    def __enter__(self) -> CompiledBlocks:
        for attention, forward in self._apart:
            attention.__dict__["forward"] = forward
        for block, call in zip(self.blocks, self._calls, strict=True):
            block._compiled_call_impl = call
        return self

    def __exit__(self, *raised: object) -> None:
        self._off()

    def _off(self) -> None:
        for attention, _ in self._apart:
            attention.__dict__.pop("forward", None)
        for block in self.blocks:
            block._compiled_call_impl = None
