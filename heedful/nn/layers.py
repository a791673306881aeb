"""Norms, activations, segment means and the MLP (feed-forward network)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.nn.cpu_ops import TrainedLinear, gelu
from heedful.nn.dropout import dropout

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": gelu,  # x Phi(x), by erf (Hendrycks and Gimpel 2016)
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # the paper's approximation by tanh, off by up to 4.74e-4
    "silu": F.silu,
    "tanh": F.tanh,
}


def make_norm(kind: Literal["layer", "rms"], width: int, eps: float, bias: bool) -> nn.Module:
    """Make a layer norm or an RMS norm.

    Layer norm: (x - mean) / sqrt(var + eps) * gain + bias (Ba et al. 2016). RMS norm: x / sqrt(mean x^2 + eps) * gain
    (Zhang and Sennrich 2019), which has no bias, whatever `bias` is.
    """
    return nn.RMSNorm(width, eps=eps) if kind == "rms" else nn.LayerNorm(width, eps=eps, bias=bias)


class HeadNorm(nn.RMSNorm):
    """An RMS norm of each head's query or key (QK norm), computed in the dtype of its weight, even under autocast.

    Dehghani et al. 2023, arXiv:2302.05442, normalise queries and keys by a layer norm instead.
    """

    def forward(self, x: Float[Tensor, "rows heads width"]) -> Float[Tensor, "rows heads width"]:
        return super().forward(x.to(self.weight.dtype))


class FullPrecisionLinear(nn.Linear):
    """A linear layer that ignores autocast, for regression: with 8 significant bits, bfloat16 rounds 2026 to 2024."""

    def forward(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any out"]:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


def segment_means(
    rows: Float[Tensor, "rows width"], segments: Int[Tensor, " rows"], counts: Int[Tensor, " count"], power: float = 1.0
) -> Float[Tensor, "count width"]:
    """Return the sum of each segment's rows divided by count^power, added in float32 at least; 0 for an empty segment.

    Args:
        rows: Rows of all segments, in any order.
        segments: Index of the segment that each row belongs to.
        counts: Number of rows of each segment.
        power: 1 for the mean, 0 for the sum, 0.5 for the sum divided by the square root of the count.
    """
    sum_dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = rows.new_zeros(len(counts), rows.shape[1], dtype=sum_dtype).index_add_(0, segments, rows.to(sum_dtype))
    return (sums / counts.clamp(min=1).to(sum_dtype)[:, None] ** power).to(rows.dtype)


class Mlp(nn.Module):
    """The position-wise feed-forward network: down(activation(up x)) (Vaswani et al. 2017, section 3.3).

    With `gated`, it is down(activation(gate x) * up x) (GLU variants, Shazeer 2020).
    """

    def __init__(
        self,
        *,
        width: int,
        inner_width: int,
        activation: str,
        gated: bool,
        bias: bool,
        inner_dropout: float,
        up_bias: bool | None = None,
    ) -> None:
        """Make the layers.

        Args:
            width: Width of the input and the output.
            inner_width: Width between the layers.
            activation: A key of ACTIVATIONS.
            gated: Whether a gate multiplies the inner values.
            bias: Whether the layers have a bias.
            inner_dropout: Dropout probability of the inner values.
            up_bias: Whether `up` and the gate have a bias. If None, as `bias`.
        """
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gated = gated
        self.inner_dropout = inner_dropout
        up_bias = bias if up_bias is None else up_bias
        self.up = TrainedLinear(width, inner_width * (2 if gated else 1), bias=up_bias)  # outputs: gate, then up
        self.down = TrainedLinear(inner_width, width, bias=bias)

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
