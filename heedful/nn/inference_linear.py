"""Linear layers for inference on a CPU: weights reordered for faster products, or quantized to int8.

`heedful.infer` replaces each nn.Linear of a model by the fastest of these layers, whose weights cannot be trained. The
result of a row does not depend on other rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.csrc import unavailable_reason
from heedful.nn import cpu_ops
from heedful.nn.layers import ACTIVATIONS

FUSED = {"gelu": "none", "relu": "none"}  # activation that oneDNN's products can apply -> oneDNN's algorithm for it


class OneDnnLinear(nn.Module):
    """activation(W x + b) by oneDNN, with W reordered for its products; float32 and bfloat16."""

    def __init__(self, linear: nn.Linear, activation: str | None = None, rows: int = 1024) -> None:
        """Reorder the weight of a layer.

        Args:
            linear: The layer, with W and b.
            activation: A key of FUSED, or None for no activation.
            rows: Number of rows of x for which oneDNN optimises the order of W.
        """
        super().__init__()
        weight = linear.weight.detach()
        self.rows = rows
        self.weight = _operators()._reorder_linear_weight(weight, rows)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.out = len(weight)
        self.fused_activation = ("none", "") if activation is None else (activation, FUSED[activation])

    def parts(self) -> dict[str, Tensor]:
        """Return weight and bias as those of an nn.Linear."""
        return {"weight": self.weight.to_dense()} | ({} if self.bias is None else {"bias": self.bias})

    def __getstate__(self) -> dict[str, object]:
        """Return the state with a dense weight: a tensor in oneDNN's order cannot be copied or pickled."""
        return {**self.__dict__, "weight": self.weight.to_dense()}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight = _operators()._reorder_linear_weight(state["weight"], self.rows)

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows out"]:
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], self.out)
        name, algorithm = self.fused_activation
        y: Tensor = _operators()._linear_pointwise(x, self.weight, self.bias, name, [], algorithm)
        return y


class NativeLinear(nn.Module):
    """W x + b or GELU(W x + b) by the C++ kernels, with W packed for them; float32 and bfloat16."""

    def __init__(self, linear: nn.Linear, activation: str | None = None) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.out, self.width = weight.shape
        self.dtype = weight.dtype
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.gelu = activation == "gelu"
        self.panels = cpu_ops.pack_weight(weight.contiguous(), transpose=True, bfloat16=weight.dtype == torch.bfloat16)

    def parts(self) -> dict[str, Tensor]:
        """Return weight and bias as those of an nn.Linear, in its dtype."""
        bias = {} if self.bias is None else {"bias": self.bias.to(self.dtype)}
        return {"weight": cpu_ops.unpack_weight(self.panels, self.out, self.width, self.dtype)} | bias

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows out"]:
        rows = x.reshape(-1, self.width)
        y = cpu_ops.linear(rows.to(self.dtype), self.panels, self.out, self.bias, gelu=self.gelu).to(x.dtype)
        return y.view(*x.shape[:-1], self.out)

    def columns(self, x: Float[Tensor, "rows width"], start: int, stop: int) -> Float[Tensor, "rows some"] | None:
        """Compute the outputs `start` to `stop`; returns None unless these are whole panels of the packed weight."""
        panels = cpu_ops.packed_columns(self.panels, self.width, 4 // self.dtype.itemsize, start, stop)
        if panels is None:
            return None
        bias = None if self.bias is None else self.bias[start:stop]
        return cpu_ops.linear(x.to(self.dtype), panels, stop - start, bias, gelu=self.gelu).to(x.dtype)


def cannot_use_native(linear: nn.Linear) -> str:
    """Return why `NativeLinear` cannot replace a layer, or an empty string."""
    if cpu_ops.usable_kernels(linear.weight) is None or len(linear.weight) % 16:
        shape = tuple(linear.weight.shape)
        dtype = str(linear.weight.dtype).removeprefix("torch.")
        return unavailable_reason() or f"the C++ kernels take float32 or bfloat16 in whole vectors, not {dtype} {shape}"
    return ""


def _operators() -> Any:
    """Return PyTorch's namespace of oneDNN operators; oneDNN was called MKL-DNN."""
    return torch.ops.mkldnn


def cannot_use_onednn(dtype: torch.dtype) -> str:
    """Return why `OneDnnLinear` cannot be used on this machine, or an empty string.

    It calls private operators of PyTorch, which may be missing or changed, so a small product is computed and checked.
    """
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch is built without oneDNN"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes in float32 and bfloat16, not in {dtype}"
    try:
        with torch.inference_mode():
            with torch.random.fork_rng(devices=[]):  # instead of skip_init, which imports 30 MB
                linear = nn.Linear(24, 40, dtype=dtype)
            linear.weight.copy_(torch.linspace(-0.3, 0.4, 960).view(40, 24).sin())
            linear.bias.copy_(torch.linspace(-1, 1, 40))
            x = torch.linspace(-1, 1, 72, dtype=dtype).view(3, 24)
            error = (OneDnnLinear(linear, "gelu")(x) - ACTIVATIONS["gelu"](linear(x))).abs().max().item()
    except (AttributeError, RuntimeError, TypeError) as failure:
        return f"PyTorch {torch.__version__} computes no such products here: {str(failure).splitlines()[0][:100]}"
    return "" if error < (1e-5 if dtype == torch.float32 else 2e-2) else f"its products are off by {error:.1e}"


class Int8Linear(nn.Module):
    """activation(W x + b) in int8 by dynamic quantization: W is quantized once, x in each call.

    Each row of W is scaled to -127..127 and rounded (Dettmers et al. 2022, "LLM.int8()", section 2). With PyTorch's
    operators, so is each row of x. The C++ kernels quantize a row of x to 256 levels from its minimum to its maximum,
    which is finer for rows with few negative values, as after an activation.
    """

    def __init__(self, linear: nn.Linear, activation: str | None = None) -> None:
        super().__init__()
        weight, self.scale = quantize_rows(linear.weight.detach().float())
        self.weight, self.scale = weight.t(), self.scale.t()
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.activation = activation
        self.panels: cpu_ops.Int8Weight | None = None
        if (activation or "gelu") == "gelu":
            self.panels = cpu_ops.Int8Weight.of(weight, self.scale[0], self.bias, gelu=activation is not None)

    def parts(self) -> dict[str, Tensor]:
        """Return the int8 weight [out, in], the scale of each of its rows [out, 1], and the bias."""
        bias = {} if self.bias is None else {"bias": self.bias}
        return {"weight": self.weight.t(), "scale": self.scale.t(), **bias}

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows out"]:
        rows = x.reshape(-1, x.shape[-1])
        if self.panels is not None and len(rows):
            return self.panels.linear(rows).view(*x.shape[:-1], -1)
        quantized, scale = quantize_rows(rows)
        y = torch._int_mm(quantized, self.weight).float().mul_(self.scale)
        y = y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)
        y = y if self.activation is None else ACTIVATIONS[self.activation](y)
        return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])

    def columns(self, x: Float[Tensor, "rows width"], start: int, stop: int) -> Float[Tensor, "rows some"] | None:
        """Compute the outputs `start` to `stop`; returns None unless these are whole panels of the packed weight."""
        if (weight := self.panels) is None or not len(x):
            return None
        panels = cpu_ops.packed_columns(weight.panels, x.shape[1], 4, start, stop)
        if panels is None:
            return None
        scales, sums = weight.scales[start:stop], weight.sums[start:stop]
        bias = None if weight.bias is None else weight.bias[start:stop]
        return replace(weight, panels=panels, scales=scales, sums=sums, bias=bias).linear(x)


def linear_columns(
    linear: nn.Module, x: Float[Tensor, "rows width"], start: int, stop: int
) -> Float[Tensor, "rows some"]:
    """Return the outputs `start` to `stop` of a linear layer, for inference.

    The layer computes only these outputs if its weight can be sliced there; otherwise it computes all.
    """
    part: Tensor | None = None
    if isinstance(linear, nn.Linear):
        part = F.linear(x, linear.weight[start:stop], None if linear.bias is None else linear.bias[start:stop])
    elif isinstance(linear, NativeLinear | Int8Linear):
        part = linear.columns(x, start, stop)
    return linear(x)[:, start:stop] if part is None else part


def quantize_rows(rows: Float[Tensor, "rows width"]) -> tuple[Int[Tensor, "rows width"], Float[Tensor, "rows 1"]]:
    """Quantize each row to int8, symmetrically: returns int8 values and the scale of each row, max |x| / 127."""
    scale = rows.abs().amax(-1, keepdim=True).float().div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    return (rows / scale).round_().to(torch.int8), scale
