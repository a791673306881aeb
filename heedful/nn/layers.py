"""Norms, activations, means and the MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.nn.cpu_ops import Linear, gelu
from heedful.nn.dropout import dropout

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": gelu,  # x Phi(x), by erf (Hendrycks and Gimpel 2016)
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # their approximation; differs by up to 4.74e-4
    "silu": F.silu,
    "tanh": F.tanh,
}


def make_norm(kind: Literal["layer", "rms"], width: int, eps: float, bias: bool) -> nn.Module:
    """(x - mean) / sqrt(var + eps) * gain + bias (Ba et al. 2016), or x / sqrt(mean x^2 + eps) * gain
    (Zhang and Sennrich 2019)."""
    return nn.RMSNorm(width, eps=eps) if kind == "rms" else nn.LayerNorm(width, eps=eps, bias=bias)


class FullPrecisionLinear(nn.Linear):
    """W x + b in the precision of W, inside autocast too, which would round a number such as a year to eight bits."""

    def forward(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any out"]:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


def segment_means(
    rows: Float[Tensor, "rows width"], owners: Int[Tensor, " rows"], counts: Int[Tensor, " count"], power: float = 1.0
) -> Float[Tensor, "count width"]:
    """The sum of each owner's rows over count^power, added up in float32 at least; zeros where it has none."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    sums = rows.new_zeros(len(counts), rows.shape[1], dtype=wide).index_add_(0, owners, rows.to(wide))
    return (sums / counts.clamp(min=1).to(wide)[:, None] ** power).to(rows.dtype)


class Mlp(nn.Module):
    """down(activation(up x)), or down(activation(gate x) * up x) (Shazeer 2020), row by row."""

    def __init__(
        self, *, width: int, inner_width: int, activation: str, gated: bool, bias: bool, inner_dropout: float
    ) -> None:
        super().__init__()
        self.activation, self.gated, self.inner_dropout = ACTIVATIONS[activation], gated, inner_dropout
        self.up = Linear(width, inner_width * (2 if gated else 1), bias=bias)  # gated: the gate's rows come first
        self.down = Linear(inner_width, width, bias=bias)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        inner: Tensor = self.up(x)
        if self.gated:
            gate, inner = inner.chunk(2, -1)
            inner = self.activation(gate) * inner
        else:
            inner = self.activation(inner)
        if self.inner_dropout:
            inner = dropout(inner, self.inner_dropout, self.training)
        down: Tensor = self.down(inner)
        return down
