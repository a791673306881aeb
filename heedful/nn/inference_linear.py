"""Linear layers as inference computes them on a CPU: weights laid out once for its products, or rounded to 8 bits.

Both take the place of an nn.Linear whose weight no longer changes, and are the same function of each row alone.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.csrc import unavailable_reason
from heedful.nn import cpu_ops
from heedful.nn.layers import ACTIVATIONS

FUSED = {"gelu": "none", "relu": "none"}  # activations that oneDNN's products apply themselves, and their algorithm


class OneDnnLinear(nn.Module):
    """activation(W x + b) by oneDNN, W in the order that its products read it in; float32 and bfloat16."""

    def __init__(self, linear: nn.Linear, activation: str | None = None, rows: int = 1024) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.rows = rows  # about so many at a time are multiplied
        self.weight = _operators()._reorder_linear_weight(weight, rows)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.out = len(weight)
        self.fused_activation = ("none", "") if activation is None else (activation, FUSED[activation])

    def parts(self) -> dict[str, Tensor]:
        """Weight and bias, as they were."""
        return {"weight": self.weight.to_dense()} | ({} if self.bias is None else {"bias": self.bias})

    def __getstate__(self) -> dict[str, Any]:
        """What lies in oneDNN's order can be neither copied nor sent to a process: it goes as it was."""
        return {**self.__dict__, "weight": self.weight.to_dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight = _operators()._reorder_linear_weight(state["weight"], self.rows)

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows out"]:
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], self.out)
        name, algorithm = self.fused_activation
        laid: Tensor = _operators()._linear_pointwise(x, self.weight, self.bias, name, [], algorithm)
        return laid


class NativeLinear(nn.Module):
    """activation(W x + b) by the kernels in C++, W in the panels that they read; bfloat16."""

    def __init__(self, linear: nn.Linear, activation: str | None = None) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.out, self.width = weight.shape
        self.original_weight = weight  # as it was, for what else is to be done with it
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.gelu = activation == "gelu"
        self.panels = cpu_ops.pack_weight(weight.contiguous(), turned=True, half=True)

    def parts(self) -> dict[str, Tensor]:
        """Weight and bias, as they were."""
        return {"weight": self.original_weight} | (
            {} if self.bias is None else {"bias": self.bias.to(self.original_weight.dtype)}
        )

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows out"]:
        rows = x.reshape(-1, self.width)
        y = cpu_ops.linear(rows.to(torch.bfloat16), self.panels, self.out, self.bias, gelu=self.gelu).to(x.dtype)
        return y.view(*x.shape[:-1], self.out)


def cannot_use_native(linear: nn.Linear) -> str:
    """Why `Panels` cannot be taken for such a layer, or nothing."""
    if linear.weight.dtype != torch.bfloat16:
        return f"our products are of bfloat16, not of {linear.weight.dtype}"
    if cpu_ops.usable_kernels(linear.weight) is None or len(linear.weight) % 16:
        return unavailable_reason() or f"our products are of whole vectors, not of {tuple(linear.weight.shape)}"
    return ""


def _operators() -> Any:
    return torch.ops.mkldnn


def cannot_use_onednn(dtype: torch.dtype) -> str:
    """Why `Laid` cannot be taken here, or nothing: PyTorch's operators for it are private, and may be gone."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch is built without oneDNN"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes in float32 and bfloat16, not in {dtype}"
    try:
        with torch.inference_mode():
            with torch.random.fork_rng(devices=[]):  # skip_init, which draws nothing, imports 30 MB
                linear = nn.Linear(24, 40, dtype=dtype)
            linear.weight.copy_(torch.linspace(-0.3, 0.4, 960).view(40, 24).sin())
            linear.bias.copy_(torch.linspace(-1, 1, 40))
            x = torch.linspace(-1, 1, 72, dtype=dtype).view(3, 24)
            off = (OneDnnLinear(linear, "gelu")(x) - ACTIVATIONS["gelu"](linear(x))).abs().max().item()
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"PyTorch {torch.__version__} computes no such products here: {str(error).splitlines()[0][:100]}"
    return "" if off < (1e-5 if dtype == torch.float32 else 2e-2) else f"its products are off by {off:.1e}"


class Int8Linear(nn.Module):
    """activation(W x + b) in whole numbers: rows of W, and of x as they come, are scaled to -127..127 and rounded.

    Symmetric dynamic quantization, one scale for each row of both (Dettmers et al. 2022, "LLM.int8()", section 2), by
    PyTorch's operators. The kernels in C++ divide a row of x into 256 steps from its least number to its largest, which
    is finer where it is one-sided, as after an activation.
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
        """Weight in whole numbers, the scale of each of its rows, and bias."""
        more = {} if self.bias is None else {"bias": self.bias}
        return {"weight": self.weight.t(), "scale": self.scale.t(), **more}

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows out"]:
        given = x.reshape(-1, x.shape[-1])
        if self.panels is not None and len(given):
            return self.panels.linear(given).view(*x.shape[:-1], -1)
        rows, scale = quantize_rows(given)
        y = torch._int_mm(rows, self.weight).float().mul_(self.scale)
        y = y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)
        y = y if self.activation is None else ACTIVATIONS[self.activation](y)
        return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def quantize_rows(rows: Float[Tensor, "rows width"]) -> tuple[Int[Tensor, "rows width"], Float[Tensor, "rows 1"]]:
    """Whole numbers and the scale of each row, rows = numbers * scale nearly; a row of zeros stays one."""
    scale = rows.abs().amax(-1, keepdim=True).float().div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    return (rows / scale).round_().to(torch.int8), scale
