"""One compiled block for all layers: what stands between attentions becomes a few kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from heedful.model.stack import Attention, Block, CrossAttention


@contextmanager
def compiled(*models: nn.Module, **options: Any) -> Iterator[int]:
    """Inside, the blocks of the models are compiled by PyTorch, each kind once; says how many blocks there are.

    Weights are inputs of what is compiled, so that all layers share it. Attention is left out: it plans on the host,
    and its kernels are compiled already. Rows of one shape in each step (`objectives.rows.Steady`) need one
    compilation. Names, weights and what is saved stay as they are. `options` are those of torch.compile.
    """
    import torch._dynamo as dynamo  # it takes a second

    parts = [part for model in models for part in model.modules()]
    blocks = [part for part in parts if isinstance(part, Block)]
    attentions = [part for part in parts if isinstance(part, Attention | CrossAttention)]
    try:
        for attention in attentions:
            attention.__dict__["forward"] = dynamo.disable(attention.forward, reason="attention plans on the host")
        for block in blocks:
            block.compile(**options)
        yield len(blocks)
    finally:
        for attention in attentions:
            attention.__dict__.pop("forward", None)
        for block in blocks:
            block._compiled_call_impl = None
