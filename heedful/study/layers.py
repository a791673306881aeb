"""Layers that only studies use: batch norm, convolution over sequences, and self-attention without a fused kernel."""

from __future__ import annotations

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class BatchNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * gain + bias, with statistics over all tokens of a batch (Ioffe and Szegedy 2015).

    Training uses the statistics of the batch, and eval mode uses running statistics.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        normalized: Tensor = self.norm(x)
        return normalized


def replace_layer_norms(module: nn.Module) -> nn.Module:
    """Replace every layer norm in a module by a batch norm, in place, and return the module."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.LayerNorm):
            setattr(module, name, BatchNorm(child.normalized_shape[0]))
        else:
            replace_layer_norms(child)
    return module


class Convolution(nn.Module):
    """W [x_{i-r}; ...; x_{i+r}] + b for each token i of a sequence, with the kernel size 2 r + 1.

    The input is packed: several sequences end to end. Sequence j has the rows from bounds[j] to bounds[j + 1].
    """

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(width, width, kernel, padding=kernel // 2)

    def forward(self, x: Float[Tensor, "rows width"], bounds: tuple[int, ...]) -> Float[Tensor, "rows width"]:
        return torch.cat([self.inner(x[start:stop].T[None])[0].T for start, stop in pairwise(bounds)])


def unfused_self_attention(x: Float[Tensor, "n width"]) -> Float[Tensor, "n width"]:
    """Return softmax(x x^T / sqrt(d)) x, computed with all n x n weights in memory."""
    return F.softmax(x @ x.T * x.shape[1] ** -0.5, dim=-1) @ x
