"""The kernels in C++ as functions of tensors, with their gradients; each has a check of whether it can be taken.

What a caller sees is the same with them and without them, but for rounding. They compute in float32 and, where the
processor multiplies it, in bfloat16, whose sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from heedful.csrc import Kernels, kernels

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


def usable_kernels(*tensors: Tensor) -> Kernels | None:
    """The kernels, where they can take tensors like these: on the CPU, of a kind that they know, whole vectors wide."""
    if torch.compiler.is_compiling():
        return None
    for each in tensors:
        if each.device.type != "cpu" or each.dtype not in DTYPE_CODES:
            return None
    found = kernels()
    if found is None:
        return None
    for each in tensors:
        if each.shape[-1] % found.lanes or (each.dtype == torch.bfloat16 and not found.has_bfloat16):
            return None
    return found


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory to write into: on the CPU and of that kind, whatever the caller's defaults are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def draw_seed() -> int:
    """A seed from torch's global generator."""
    return int(empty(dtype=torch.int64).random_())


def pack_weight(weight: Float[Tensor, "rows columns"], *, turned: bool, half: bool) -> Int[Tensor, " words"]:
    """The right side of x W' (turned) or of y W, as `linear` reads it."""
    found = kernels()
    assert found is not None
    weight, (rows, columns) = weight.contiguous(), weight.shape
    count = found.packed_words(*((rows, columns) if turned else (columns, rows)), 2 if half else 1)
    made = empty(count, dtype=torch.int32)
    wide = weight.dtype == torch.float32
    found.pack(address(weight), wide, rows, columns, turned, half, address(made), torch.get_num_threads())
    return made


def linear(
    x: Float[Tensor, "rows width"],
    right: Int[Tensor, " words"],
    columns: int,
    bias: Float[Tensor, " columns"] | None = None,
    *,
    gelu: bool = False,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "rows columns"]:
    """[gelu](x B + bias), B as `packed` laid it out; the bias is float32, the result in x's kind unless given."""
    found = kernels()
    assert found is not None
    x = x if x.stride(1) == 1 and x.stride(0) % 2 == 0 else x.contiguous()
    y = empty(len(x), columns, dtype=dtype or x.dtype)
    half, wide = DTYPE_CODES[x.dtype], y.dtype == torch.float32
    found.linear(
        address(x),
        x.stride(0),
        len(x),
        address(right),
        x.shape[1],
        columns,
        address(bias),
        gelu,
        half,
        wide,
        address(y),
        torch.get_num_threads(),
    )
    return y


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Int8Weight:
    """A linear layer in whole numbers, as the kernels read it."""

    panels: Int[Tensor, " words"]
    scales: Float[Tensor, " columns"]
    sums: Float[Tensor, " columns"]  # of the whole numbers of each
    bias: Float[Tensor, " columns"] | None
    gelu: bool

    @classmethod
    def of(
        cls,
        weight: Int[Tensor, "columns width"],
        scales: Float[Tensor, " columns"],
        bias: Float[Tensor, " columns"] | None,
        *,
        gelu: bool,
    ) -> Int8Weight | None:
        """Of whole numbers and the scale of each of their rows; None where there are no kernels for it."""
        found = kernels()
        columns, width = weight.shape
        if found is None or not found.has_int8 or weight.device.type != "cpu" or columns % 16 or width % 16:
            return None
        panels = empty(found.packed_words(columns, width, 4), dtype=torch.int32)
        found.pack8(address(weight.contiguous()), columns, width, address(panels), torch.get_num_threads())
        return cls(panels=panels, scales=scales.contiguous(), sums=weight.float().sum(1), bias=bias, gelu=gelu)

    def linear(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows columns"]:
        """[gelu](W x + b), each row of x rounded to 256 steps from its least number to its largest; in x's kind."""
        found, threads, (rows, width) = kernels(), torch.get_num_threads(), x.shape
        assert found is not None
        x = x if x.stride(1) == 1 else x.contiguous()
        whole, scales = empty(rows, width, dtype=torch.uint8), empty(rows, 2)
        half, columns = DTYPE_CODES[x.dtype], len(self.scales)
        found.round_rows(address(x), x.stride(0), rows, width, half, address(whole), address(scales), threads)
        y = empty(rows, columns, dtype=x.dtype)
        weights = (address(self.panels), width, columns, address(self.scales), address(self.sums), address(self.bias))
        found.linear8(address(whole), address(scales), rows, *weights, self.gelu, half, address(y), threads)
        return y


# -- linear layers in training ----------------------------------------------------------------------------


class Linear(nn.Linear):
    """W x + b; in training in bfloat16 by our products, without copies of W and with float32 gradients of it."""

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows out"]:
        if not _trains(x, self.weight):
            return super().forward(x)
        y: Tensor = _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y


def _trains(x: Tensor, weight: Tensor) -> bool:
    if x.ndim != 2 or len(x) == 0 or weight.dtype != torch.float32 or not torch.is_autocast_enabled("cpu"):
        return False
    if torch.get_autocast_dtype("cpu") != torch.bfloat16 or len(weight) % 16 or usable_kernels(x, weight) is None:
        return False
    return trains_in_bfloat16()


def trains_in_bfloat16() -> bool:
    """Whether linear layers are trained by our products here; a rule and no measurement: a seed gives the same bits.

    oneDNN's products are several times as fast on AMX, which ours do not use.
    """
    found = kernels()
    return found is not None and found.has_bfloat16 and not torch.cpu.get_capabilities().get("amx_bf16")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given = x.to(torch.bfloat16)
        if given.stride(1) != 1 or given.stride(0) % 2:
            given = given.contiguous()
        context.save_for_backward(given, weight)
        context.wide, context.has_bias = x.dtype, bias is not None
        return linear(given, pack_weight(weight, turned=True, half=True), len(weight), bias)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = context.saved_tensors
        dy = gradients[0].contiguous()
        dx = dw = db = None
        if context.needs_input_grad[0]:
            dx = linear(dy, pack_weight(weight, turned=False, half=True), weight.shape[1], dtype=context.wide)
        if context.needs_input_grad[1] or context.needs_input_grad[2]:
            dw, db = _of_weight(dy, x, bias=context.has_bias)
        return dx, dw, db if context.has_bias else None


def _of_weight(dy: Tensor, x: Tensor, *, bias: bool) -> tuple[Tensor, Tensor | None]:
    found = kernels()
    assert found is not None
    rows, out, width = len(x), dy.shape[1], x.shape[1]
    space = empty(found.packed_words(width, rows, 2), dtype=torch.int32)
    dw, db = empty(out, width), empty(out) if bias else None
    found.weight_gradient(
        address(dy),
        out,
        address(x),
        x.stride(0),
        width,
        rows,
        1,
        address(space),
        address(dw),
        address(db),
        torch.get_num_threads(),
    )
    return dw, db


# -- row by row ---------------------------------------------------------------------------------------------


def gelu(x: Tensor) -> Tensor:
    """x Phi(x) (Hendrycks and Gimpel 2016); ours in bfloat16, which is far coarser than its error of 1e-7."""
    if x.dtype != torch.bfloat16 or usable_kernels(x) is None:
        return nn.functional.gelu(x)
    if not needs_grad(x):
        return _gelu(x.contiguous())
    y: Tensor = _Gelu.apply(x.contiguous())  # type: ignore[no-untyped-call]
    return y


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a gradient is wanted of any."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _gelu(x: Tensor) -> Tensor:
    found, y = kernels(), torch.empty_like(x)
    assert found is not None
    found.gelu(address(x), x.numel(), 1, address(y), torch.get_num_threads())
    return y


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return _gelu(x)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        found, dy, dx = kernels(), gradients[0].contiguous(), torch.empty_like(x)
        assert found is not None
        found.gelu_gradient(address(x), address(dy), x.numel(), 1, address(dx), torch.get_num_threads())
        return dx


def add_norm(
    x: Float[Tensor, "rows width"], y: Float[Tensor, "rows width"], norm: nn.Module, p: float
) -> Float[Tensor, "rows width"] | None:
    """norm(x + dropout(y)) of a layer norm with a gain; None where the kernels cannot take it."""
    if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.weight.dtype not in DTYPE_CODES or len(x) == 0:
        return None
    if x.ndim != 2 or p >= 1 or usable_kernels(x, y, norm.weight) is None:
        return None
    gain, bias = norm.weight.float(), None if norm.bias is None else norm.bias.float()
    given = x.contiguous(), y.contiguous(), gain, bias, norm.eps, p, draw_seed() if p else 0
    if not needs_grad(x, y, gain, bias):
        return _add_norm(*given, None, None)
    made: Tensor = _AddNorm.apply(*given)  # type: ignore[no-untyped-call]
    return made


def _add_norm(
    x: Tensor,
    y: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    p: float,
    seed: int,
    kept: Tensor | None,
    moments: Tensor | None,
) -> Tensor:
    found, z = kernels(), torch.empty_like(x)
    assert found is not None
    rows = (address(x), DTYPE_CODES[x.dtype], address(y), DTYPE_CODES[y.dtype], address(z), DTYPE_CODES[z.dtype])
    found.add_norm(
        *x.shape,
        eps,
        address(gain),
        address(bias),
        p,
        seed,
        *rows,
        address(kept),
        address(moments),
        torch.get_num_threads(),
    )
    return z


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, y: Tensor, gain: Tensor, bias: Tensor | None, eps: float, p: float, seed: int
    ) -> Tensor:
        kept, moments = empty(*x.shape), empty(len(x), 2)
        context.save_for_backward(kept, moments, gain)
        context.more = eps, p, seed, x.dtype, y.dtype, bias is not None
        return _add_norm(x, y, gain, bias, eps, p, seed, kept, moments)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept, moments, gain = context.saved_tensors
        eps, p, seed, x_dtype, y_dtype, has_bias = context.more
        found, (rows, width) = kernels(), kept.shape
        assert found is not None
        dz, dx = gradients[0].float().contiguous(), empty(rows, width)
        dy, gains = empty(rows, width, dtype=y_dtype), empty(2, width)
        parts = empty(-(-rows // 32), 2, width)
        found.add_norm_gradient(
            rows,
            width,
            eps,
            address(gain),
            p,
            seed,
            address(kept),
            address(moments),
            address(dz),
            address(dx),
            address(dy),
            DTYPE_CODES[y_dtype],
            address(gains),
            address(parts),
            torch.get_num_threads(),
        )
        return dx.to(x_dtype), dy, gains[0], gains[1] if has_bias else None, None, None, None


def cross_entropy(
    scores: Float[Tensor, "targets classes"], targets: Int[Tensor, " targets"]
) -> tuple[Float[Tensor, " targets"], Float[Tensor, "targets classes"]] | None:
    """-log softmax(scores)[target] and its gradient, in the scores' kind; None where the kernels cannot."""
    found = kernels()
    if found is None or scores.device.type != "cpu" or scores.dtype not in DTYPE_CODES or not scores.is_contiguous():
        return None
    if scores.dtype == torch.bfloat16 and not found.has_bfloat16:
        return None
    gradients, losses = torch.empty_like(scores), empty(len(scores))
    places = targets.to(torch.int64).contiguous()
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < scores.shape[1]:
        return None  # PyTorch's own says what is wrong
    half, threads = DTYPE_CODES[scores.dtype], torch.get_num_threads()
    found.cross_entropy(
        address(scores), *scores.shape, address(places), half, address(gradients), address(losses), threads
    )
    return losses, gradients


def address(tensor: Tensor | None) -> int:
    """Where it lies; 0 where there is none."""
    return 0 if tensor is None else tensor.data_ptr()
