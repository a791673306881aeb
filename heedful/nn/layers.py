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
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # the paper's approximation; differs by up to 4.74e-4
    "silu": F.silu,
    "tanh": F.tanh,
}


def make_norm(kind: Literal["layer", "rms"], width: int, eps: float, bias: bool) -> nn.Module:
    """Return a layer norm or an RMS norm.

    Layer norm: (x - mean) / sqrt(var + eps) * gain + bias (Ba et al. 2016). RMS norm: x / sqrt(mean x^2 + eps) * gain
    (Zhang and Sennrich 2019), without a bias.
    """
    return nn.RMSNorm(width, eps=eps) if kind == "rms" else nn.LayerNorm(width, eps=eps, bias=bias)


class HeadNorm(nn.RMSNorm):
    """An RMS norm of each head's query or key, in the dtype of its weight, also under autocast.

    Dehghani et al. 2023, arXiv:2302.05442, use a layer norm there.
    """

    def forward(self, x: Float[Tensor, "rows heads width"]) -> Float[Tensor, "rows heads width"]:
        return super().forward(x.to(self.weight.dtype))


class FullPrecisionLinear(nn.Linear):
    """A linear layer that ignores autocast, for regression: bfloat16 has 8 significant bits, too few for a year."""

    def forward(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any out"]:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


def segment_means(
    rows: Float[Tensor, "rows width"], segments: Int[Tensor, " rows"], counts: Int[Tensor, " count"], power: float = 1.0
) -> Float[Tensor, "count width"]:
    """Sum the rows of each segment and divide by count^power; the result of an empty segment is zeros.

    Args:
        segments: Index of the segment that each row belongs to.
        counts: How many rows each segment has.
        power: 1 for the mean, 0 for the sum, 0.5 for the sum divided by the root of the count.
    """
    sum_dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = rows.new_zeros(len(counts), rows.shape[1], dtype=sum_dtype).index_add_(0, segments, rows.to(sum_dtype))
    return (sums / counts.clamp(min=1).to(sum_dtype)[:, None] ** power).to(rows.dtype)


class Mlp(nn.Module):
    """The feed-forward network of each row: down(activation(up x)) (Vaswani et al. 2017, section 3.3).

    With `gated`, it is down(activation(gate x) * up x) (Shazeer 2020).
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
            up_bias: Whether `up` has a bias. If None, `bias` decides.
        """
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gated = gated
        self.inner_dropout = inner_dropout
        up_bias = bias if up_bias is None else up_bias
        self.up = TrainedLinear(width, inner_width * (2 if gated else 1), bias=up_bias)  # outputs: gate first, then up
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
