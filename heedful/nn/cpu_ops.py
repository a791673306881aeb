"""The C++ kernels as functions of tensors, with their gradients, and checks of whether they can be used.

The layers of `nn`, `model` and `infer` call these functions. Results with and without the kernels differ by rounding
only. The kernels compute in float32 and, if the processor multiplies bfloat16, in bfloat16 with float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from heedful.csrc import Kernels, kernels
from heedful.nn.autograd import AutogradContext

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}  # dtype -> its code in arguments of the C++ functions


def usable_kernels(*tensors: Tensor) -> Kernels | None:
    """Return the kernels if they can compute with these tensors, or None.

    The tensors must be on the CPU, in float32 or bfloat16, with a last dimension of whole vector registers.
    """
    if torch.compiler.is_compiling():
        return None
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.dtype not in DTYPE_CODES:
            return None
    library = kernels()
    if library is None:
        return None
    for tensor in tensors:
        if tensor.shape[-1] % library.lanes or (tensor.dtype == torch.bfloat16 and not library.has_bfloat16):
            return None
    return library


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate an uninitialised CPU tensor, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def random_seed() -> int:
    """Sample a seed from torch's global random generator."""
    return int(empty(dtype=torch.int64).random_())


def pack_weight(weight: Float[Tensor, "rows columns"], *, transpose: bool, bfloat16: bool) -> Int[Tensor, " words"]:
    """Pack a weight W for `linear`.

    Args:
        transpose: Whether `linear` is to compute x W' instead of x W.
        bfloat16: Whether to pack W in bfloat16 instead of float32.
    """
    library = kernels()
    assert library is not None
    weight = weight.contiguous()
    rows, columns = weight.shape
    count = library.packed_words(*((rows, columns) if transpose else (columns, rows)), 2 if bfloat16 else 1)
    packed = empty(count, dtype=torch.int32)
    is_float32 = weight.dtype == torch.float32
    library.pack(
        address(weight), is_float32, rows, columns, transpose, bfloat16, address(packed), torch.get_num_threads()
    )
    return packed


def unpack_weight(packed: Int[Tensor, " words"], out: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, width] that `pack_weight` packed with `transpose`."""
    library = kernels()
    assert library is not None
    values_per_word = 4 // dtype.itemsize  # how many weights of one row share a word of 32 bits
    words, panel_columns = -(-width // values_per_word), library.packed_words(1, 1, 1)
    panels = packed.view(dtype).view(-1, words, panel_columns, values_per_word)
    return panels.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:out, :width].contiguous()


def packed_columns(
    packed: Int[Tensor, " words"], width: int, values_per_word: int, start: int, stop: int
) -> Int[Tensor, " some_words"] | None:
    """Return the part of a packed weight for the columns `start` to `stop`, without a copy.

    Args:
        packed: A weight that is packed by columns, in panels of them.
        width: How many weights a column has.
        values_per_word: How many weights of one column share a word of 32 bits.

    Returns:
        The part, or None if it is not made of whole panels.
    """
    library = kernels()
    assert library is not None
    panel_columns = library.packed_words(1, 1, 1)
    if start % panel_columns or stop % panel_columns:
        return None
    words = [library.packed_words(columns, width, values_per_word) for columns in (start, stop)]
    return packed[words[0] : words[1]]


def linear(
    x: Float[Tensor, "rows width"],
    packed_weight: Int[Tensor, " words"],
    columns: int,
    bias: Float[Tensor, " columns"] | None = None,
    *,
    gelu: bool = False,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "rows columns"]:
    """Compute x B + bias, or GELU(x B + bias), where `pack_weight` packed B.

    Args:
        columns: How many columns B has.
        bias: The bias, in float32.
        gelu: Whether to apply GELU.
        dtype: Dtype of the result. If None, the dtype of x.
    """
    library = kernels()
    assert library is not None
    x = x if x.stride(1) == 1 and x.stride(0) % 2 == 0 else x.contiguous()
    y = empty(len(x), columns, dtype=dtype or x.dtype)
    library.linear(
        address(x),
        x.stride(0),
        len(x),
        address(packed_weight),
        x.shape[1],
        columns,
        address(bias),
        gelu,
        DTYPE_CODES[x.dtype],
        y.dtype == torch.float32,
        address(y),
        torch.get_num_threads(),
    )
    return y


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Int8Weight:
    """The weight of an int8 linear layer, packed for the kernels; a column is an output of the layer."""

    panels: Int[Tensor, " words"]  # packed int8 values
    scales: Float[Tensor, " columns"]  # weight = int8 value * scale
    sums: Float[Tensor, " columns"]  # sum of each column's int8 values
    bias: Float[Tensor, " columns"] | None
    gelu: bool  # whether the layer applies GELU

    @classmethod
    def of(
        cls,
        weight: Int[Tensor, "columns width"],
        scales: Float[Tensor, " columns"],
        bias: Float[Tensor, " columns"] | None,
        *,
        gelu: bool,
    ) -> Int8Weight | None:
        """Pack an int8 weight and the scale of each of its rows, or return None if the kernels cannot use it."""
        library = kernels()
        columns, width = weight.shape
        if library is None or not library.has_int8 or weight.device.type != "cpu" or columns % 16 or width % 16:
            return None
        panels = empty(library.packed_words(columns, width, 4), dtype=torch.int32)
        library.pack8(address(weight.contiguous()), columns, width, address(panels), torch.get_num_threads())
        return cls(panels=panels, scales=scales.contiguous(), sums=weight.float().sum(1), bias=bias, gelu=gelu)

    def linear(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows columns"]:
        """Compute W x + b, or GELU(W x + b), in x's dtype.

        Each row of x is rounded to 256 steps from its minimum to its maximum.
        """
        library = kernels()
        threads = torch.get_num_threads()
        rows, width = x.shape
        assert library is not None
        x = x if x.stride(1) == 1 else x.contiguous()
        rounded = empty(rows, width, dtype=torch.uint8)
        scales = empty(rows, 2)
        dtype, columns = DTYPE_CODES[x.dtype], len(self.scales)
        library.round_rows(address(x), x.stride(0), rows, width, dtype, address(rounded), address(scales), threads)
        y = empty(rows, columns, dtype=x.dtype)
        weight = (address(self.panels), width, columns, address(self.scales), address(self.sums), address(self.bias))
        library.linear8(address(rounded), address(scales), rows, *weight, self.gelu, dtype, address(y), threads)
        return y


# -- linear layers in training ----------------------------------------------------------------------------


class TrainedLinear(nn.Linear):
    """A linear layer whose training in bfloat16 on a CPU uses our kernels.

    The kernels save no copy of W for the backward pass, and compute its gradient in float32.
    """

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows out"]:
        if not _uses_kernels(x, self.weight):
            return super().forward(x)
        y: Tensor = _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y


def _uses_kernels(x: Tensor, weight: Tensor) -> bool:
    """Return whether a linear layer of these tensors uses our kernels in training."""
    if x.ndim != 2 or len(x) == 0 or weight.dtype != torch.float32 or not torch.is_autocast_enabled("cpu"):
        return False
    if torch.get_autocast_dtype("cpu") != torch.bfloat16 or len(weight) % 16 or usable_kernels(x, weight) is None:
        return False
    return trains_in_bfloat16()


def trains_in_bfloat16() -> bool:
    """Return whether linear layers train in bfloat16 with our kernels on this processor.

    The rule is fixed and not a measurement, so that equal seeds return equal bits. With AMX, oneDNN's products are
    faster: our kernel for the gradient of weights does not use tile registers.
    """
    library = kernels()
    return library is not None and library.has_bfloat16 and not torch.cpu.get_capabilities().get("amx_bf16")


class _Linear(torch.autograd.Function):
    """W x + b in bfloat16, with the weight's gradient in float32."""

    @staticmethod
    def forward(context: AutogradContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rounded = x.to(torch.bfloat16)
        if rounded.stride(1) != 1 or rounded.stride(0) % 2:
            rounded = rounded.contiguous()
        context.save_for_backward(rounded, weight)
        context.x_dtype, context.has_bias = x.dtype, bias is not None
        return linear(rounded, pack_weight(weight, transpose=True, bfloat16=True), len(weight), bias)

    @staticmethod
    @once_differentiable
    def backward(context: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = context.saved_tensors
        dy = gradients[0].contiguous()
        dx = dw = db = None
        if context.needs_input_grad[0]:
            dx = linear(dy, pack_weight(weight, transpose=False, bfloat16=True), weight.shape[1], dtype=context.x_dtype)
        if context.needs_input_grad[1] or context.needs_input_grad[2]:
            dw, db = _weight_gradient(dy, x, bias=context.has_bias)
        return dx, dw, db if context.has_bias else None


def _weight_gradient(dy: Tensor, x: Tensor, *, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of weight and bias in float32. The second one is None if the layer has no bias."""
    library = kernels()
    assert library is not None
    rows, out, width = len(x), dy.shape[1], x.shape[1]
    scratch = empty(library.packed_words(width, rows, 2), dtype=torch.int32)
    dw = empty(out, width)
    db = empty(out) if bias else None
    sizes = (address(dy), out, address(x), x.stride(0), width, rows, 1)
    library.weight_gradient(*sizes, address(scratch), address(dw), address(db), torch.get_num_threads())
    return dw, db


# -- operations on each row ---------------------------------------------------------------------------------


def gelu(x: Tensor) -> Tensor:
    """Compute x Phi(x) (Hendrycks and Gimpel 2016), by our kernel in bfloat16 and by PyTorch otherwise.

    The kernel's error of 1e-7 is far below the resolution of bfloat16.
    """
    if x.dtype != torch.bfloat16 or usable_kernels(x) is None:
        return nn.functional.gelu(x)
    if not needs_grad(x):
        return _gelu(x.contiguous())
    y: Tensor = _Gelu.apply(x.contiguous())  # type: ignore[no-untyped-call]
    return y


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _gelu(x: Tensor) -> Tensor:
    """Compute GELU by our kernel."""
    library = kernels()
    y = torch.empty_like(x)
    assert library is not None
    library.gelu(address(x), x.numel(), 1, address(y), torch.get_num_threads())
    return y


class _Gelu(torch.autograd.Function):
    """GELU by our kernels, with its gradient."""

    @staticmethod
    def forward(context: AutogradContext, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return _gelu(x)

    @staticmethod
    @once_differentiable
    def backward(context: AutogradContext, *gradients: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        library = kernels()
        dy = gradients[0].contiguous()
        dx = torch.empty_like(x)
        assert library is not None
        library.gelu_gradient(address(x), address(dy), x.numel(), 1, address(dx), torch.get_num_threads())
        return dx


def add_norm(
    x: Float[Tensor, "rows width"], y: Float[Tensor, "rows width"], norm: nn.Module, p: float
) -> Float[Tensor, "rows width"] | None:
    """Compute norm(x + dropout(y)) for a layer norm with a gain, or return None if the kernels cannot compute it."""
    if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.weight.dtype not in DTYPE_CODES or len(x) == 0:
        return None
    if x.ndim != 2 or p >= 1 or usable_kernels(x, y, norm.weight) is None:
        return None
    gain = norm.weight.float()
    bias = None if norm.bias is None else norm.bias.float()
    arguments = x.contiguous(), y.contiguous(), gain, bias, norm.eps, p, random_seed() if p else 0
    if not needs_grad(x, y, gain, bias):
        return _add_norm(*arguments, None, None)
    z: Tensor = _AddNorm.apply(*arguments)  # type: ignore[no-untyped-call]
    return z


def _add_norm(
    x: Tensor,
    y: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    p: float,
    seed: int,
    sums: Tensor | None,
    moments: Tensor | None,
) -> Tensor:
    """Compute norm(x + dropout(y)).

    Args:
        sums: If not None, receives x + dropout(y), [rows, width], for the backward pass.
        moments: If not None, receives two statistics of each row, [rows, 2], for the backward pass.
    """
    library = kernels()
    z = torch.empty_like(x)
    threads = torch.get_num_threads()
    assert library is not None
    rows = [argument for tensor in (x, y, z) for argument in (address(tensor), DTYPE_CODES[tensor.dtype])]
    norm = (eps, address(gain), address(bias), p, seed)
    library.add_norm(*x.shape, *norm, *rows, address(sums), address(moments), threads)
    return z


class _AddNorm(torch.autograd.Function):
    """norm(x + dropout(y)) by our kernels, with its gradient."""

    @staticmethod
    def forward(
        context: AutogradContext,
        x: Tensor,
        y: Tensor,
        gain: Tensor,
        bias: Tensor | None,
        eps: float,
        p: float,
        seed: int,
    ) -> Tensor:
        sums, moments = empty(*x.shape), empty(len(x), 2)
        context.save_for_backward(sums, moments, gain)
        context.settings = eps, p, seed, x.dtype, y.dtype, bias is not None
        return _add_norm(x, y, gain, bias, eps, p, seed, sums, moments)

    @staticmethod
    @once_differentiable
    def backward(context: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sums, moments, gain = context.saved_tensors
        eps, p, seed, x_dtype, y_dtype, has_bias = context.settings
        library = kernels()
        rows, width = sums.shape
        assert library is not None
        dz, dx = gradients[0].float().contiguous(), empty(rows, width)
        dy = empty(rows, width, dtype=y_dtype)
        gains = empty(2, width)
        scratch = empty(-(-rows // 32), 2, width)
        library.add_norm_gradient(
            rows,
            width,
            eps,
            address(gain),
            p,
            seed,
            address(sums),
            address(moments),
            address(dz),
            address(dx),
            address(dy),
            DTYPE_CODES[y_dtype],
            address(gains),
            address(scratch),
            torch.get_num_threads(),
        )
        return dx.to(x_dtype), dy, gains[0], gains[1] if has_bias else None, None, None, None


def cross_entropy(
    scores: Float[Tensor, "targets classes"], targets: Int[Tensor, " targets"]
) -> tuple[Float[Tensor, " targets"], Float[Tensor, "targets classes"]] | None:
    """Compute -log softmax(scores)[target] in float32, and its gradient in the dtype of the scores.

    Returns None if the kernels cannot compute it.
    """
    library = kernels()
    if library is None or scores.device.type != "cpu" or scores.dtype not in DTYPE_CODES or not scores.is_contiguous():
        return None
    if scores.dtype == torch.bfloat16 and not library.has_bfloat16:
        return None
    gradients = torch.empty_like(scores)
    losses = empty(len(scores))
    targets = targets.to(torch.int64).contiguous()
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < scores.shape[1]:
        return None  # so that the caller uses PyTorch's operators, which raise an error that names the wrong target
    dtype, threads = DTYPE_CODES[scores.dtype], torch.get_num_threads()
    outputs = (address(gradients), address(losses))
    library.cross_entropy(address(scores), *scores.shape, address(targets), dtype, *outputs, threads)
    return losses, gradients


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
