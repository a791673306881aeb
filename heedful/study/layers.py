"""Layers that only studies need: a norm over the batch, a convolution over each sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class BatchNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * gain + bias, over all rows of the batch (Ioffe and Szegedy 2015).

    In training a row depends on the rows beside it; afterwards on running means. That is why the stack has none.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        normed: Tensor = self.norm(x)
        return normed


def replace_layer_norms(module: nn.Module) -> nn.Module:
    """The same module with every layer norm in it replaced by one over the batch."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.LayerNorm):
            setattr(module, name, BatchNorm(child.normalized_shape[0]))
        else:
            replace_layer_norms(child)
    return module


class Convolution(nn.Module):
    """A row becomes W [x_{i-r}; ...; x_{i+r}] + b of its kernel = 2 r + 1 neighbours, in each sequence alone."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(width, width, kernel, padding=kernel // 2)

    def forward(self, x: Float[Tensor, "rows width"], bounds: tuple[int, ...]) -> Float[Tensor, "rows width"]:
        return torch.cat([self.inner(x[a:b].T[None])[0].T for a, b in pairwise(bounds)])


def unfused_self_attention(x: Float[Tensor, "n width"]) -> Float[Tensor, "n width"]:
    """softmax(x x / sqrt(d)) x, written out, so that all n x n weights are there."""
    return F.softmax(x @ x.T * x.shape[1] ** -0.5, dim=-1) @ x
