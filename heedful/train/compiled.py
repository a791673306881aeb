"""Transformer blocks compiled by torch.compile: the operations outside of attention become a few kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from heedful.model.attention import Attention, AttentionContext, CrossAttention, LayerContext
from heedful.model.stack import Block, Transformer


class CompiledBlocks:
    """Context manager in which the blocks of models run compiled, with one compilation for each kind of block.

    Weights are inputs of the compiled code, so all layers share it, and so do batches with other numbers of rows and
    sequences. Self-attention without a bias is one operator in the graph of its block, where
    `heedful.nn.compiled_attention` has it: on GPUs, in half precision. Other attention plans on the host; its block is
    compiled in two parts around it. Names, weights and saved files do not change.
    """

    def __init__(self, *models: nn.Module, **options: Any) -> None:
        """Prepare the blocks of the models; `options` are passed to torch.compile."""
        import torch._dynamo as dynamo  # the import takes a second

        parts = [part for model in models for part in model.modules()]
        attentions = [part for part in parts if isinstance(part, Attention | CrossAttention)]
        self.blocks = [part for part in parts if isinstance(part, Block)]
        self._transformers = [part for part in parts if isinstance(part, Transformer)]
        self._attentions: list[tuple[nn.Module, Callable[..., Any]]] = [
            (part, dynamo.disable(part.forward, reason="it plans on the host")) for part in attentions
        ]
        self._compiled_calls: list[Callable[..., Tensor]] = []
        for block in self.blocks:
            block.compile(**options)
            assert block._compiled_call_impl is not None
            self._compiled_calls.append(partial(_call_block, block._compiled_call_impl))
        self._disable()

    def __enter__(self) -> CompiledBlocks:
        for transformer in self._transformers:
            transformer.execution = replace(transformer.execution, compiled=True)
        for attention, forward in self._attentions:
            attention.__dict__["forward"] = forward
        for block, call in zip(self.blocks, self._compiled_calls, strict=True):
            block._compiled_call_impl = call
        return self

    def __exit__(self, *exception: object) -> None:
        self._disable()

    def _disable(self) -> None:
        """Let blocks run as they were before."""
        for transformer in self._transformers:
            transformer.execution = replace(transformer.execution, compiled=False)
        for attention, _ in self._attentions:
            attention.__dict__.pop("forward", None)
        for block in self.blocks:
            block._compiled_call_impl = None


def _call_block(compiled: Callable[..., Tensor], x: Tensor, context: AttentionContext, layer: LayerContext) -> Tensor:
    """Call a compiled block whose first dimensions, the numbers of rows and sequences, differ from call to call."""
    from torch._dynamo import maybe_mark_dynamic

    tensors = [x, layer.output_rows]
    if context.bounds is not None:
        tensors += [context.bounds.rows, *(layer.prepared or ())]  # without a bias, `prepared` is rotations or None
    for tensor in tensors:
        if tensor is not None:
            maybe_mark_dynamic(tensor, 0)
    return compiled(x, context, layer)
