"""The C++ kernels as functions of tensors, with their gradients, and whether they can be used.

The layers of `nn`, `model` and `infer` call these functions. Results with and without the kernels differ by rounding
only. The kernels compute in float32 and, if the processor multiplies bfloat16, in bfloat16 with float32 sums.

A "packed" weight is reordered into panels of columns for the kernels, a tensor of 32-bit words.
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
    """Return the kernels if they can compute with these tensors, otherwise None.

    The tensors must be on the CPU, in float32 or bfloat16, and their last dimension must fill whole vector registers.
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
        weight: W.
        transpose: Whether `linear` computes x W' (W is [out, in], as in nn.Linear) instead of x W.
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
    """Return the weight [out, width] that `pack_weight` packed with `transpose=True`."""
    library = kernels()
    assert library is not None
    values_per_word = 4 // dtype.itemsize  # weights of one row in a word of 32 bits
    words, panel_columns = -(-width // values_per_word), library.packed_words(1, 1, 1)
    panels = packed.view(dtype).view(-1, words, panel_columns, values_per_word)
    return panels.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:out, :width].contiguous()


def packed_columns(
    packed: Int[Tensor, " words"], width: int, values_per_word: int, start: int, stop: int
) -> Int[Tensor, " some_words"] | None:
    """Return the words of a packed weight that hold the columns `start` to `stop`, without a copy.

    Args:
        packed: A packed weight.
        width: Number of weights in a column.
        values_per_word: Number of weights of one column in a word of 32 bits.
        start: First column.
        stop: Column after the last one.

    Returns:
        The words, or None unless `start` and `stop` are boundaries of panels.
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
    """Compute x B + bias, or GELU(x B + bias), for a matrix B that `pack_weight` packed.

    Args:
        x: Inputs, in the dtype of the packed B.
        packed_weight: B.
        columns: Number of columns of B.
        bias: The bias, in float32. If None, 0.
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
        """Pack an int8 weight; returns None if the kernels cannot use it.

        Args:
            weight: The int8 values, [out, in].
            scales: Scale of each output: the weight is `weight * scales[:, None]`.
            bias: Bias of the layer, in float32. If None, 0.
            gelu: Whether the layer applies GELU.
        """
        library = kernels()
        columns, width = weight.shape
        if library is None or not library.has_int8 or weight.device.type != "cpu" or columns % 16 or width % 16:
            return None
        panels = empty(library.packed_words(columns, width, 4), dtype=torch.int32)
        library.pack8(address(weight.contiguous()), columns, width, address(panels), torch.get_num_threads())
        return cls(panels=panels, scales=scales.contiguous(), sums=weight.float().sum(1), bias=bias, gelu=gelu)

    def linear(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows columns"]:
        """Compute W x + b, or GELU(W x + b), in the dtype of x.

        Each row of x is quantized to 256 levels from its minimum to its maximum.
        """
        library = kernels()
        threads = torch.get_num_threads()
        rows, width = x.shape
        assert library is not None
        x = x if x.stride(1) == 1 else x.contiguous()
        quantized = empty(rows, width, dtype=torch.uint8)
        scales = empty(rows, 2)  # step and minimum of each row: x is about quantized * step + minimum
        dtype, columns = DTYPE_CODES[x.dtype], len(self.scales)
        library.round_rows(address(x), x.stride(0), rows, width, dtype, address(quantized), address(scales), threads)
        y = empty(rows, columns, dtype=x.dtype)
        weight = (address(self.panels), width, columns, address(self.scales), address(self.sums), address(self.bias))
        library.linear8(address(quantized), address(scales), rows, *weight, self.gelu, dtype, address(y), threads)
        return y


# -- linear layers in training ----------------------------------------------------------------------------


class TrainedLinear(nn.Linear):
    """An nn.Linear that uses our kernels for training with bfloat16 autocast on a CPU.

    No bfloat16 copy of the weight is saved for the backward pass, and the weight's gradient is computed in float32.
    """

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows out"]:
        if not _uses_kernels(x, self.weight):
            return super().forward(x)
        y: Tensor = _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y


def _uses_kernels(x: Tensor, weight: Tensor) -> bool:
    """Return whether a linear layer with this input and weight uses our kernels."""
    if x.ndim != 2 or len(x) == 0 or weight.dtype != torch.float32 or not torch.is_autocast_enabled("cpu"):
        return False
    if torch.get_autocast_dtype("cpu") != torch.bfloat16 or len(weight) % 16 or usable_kernels(x, weight) is None:
        return False
    return trains_in_bfloat16()


def trains_in_bfloat16() -> bool:
    """Return whether linear layers train in bfloat16 with our kernels on this processor.

    The rule is fixed, not measured on this machine, so that equal seeds give equal bits. With AMX, oneDNN's products
    are faster: our kernel for the gradient of weights does not use tile registers.
    """
    library = kernels()
    return library is not None and library.has_bfloat16 and not torch.cpu.get_capabilities().get("amx_bf16")


class _Linear(torch.autograd.Function):
    """W x + b in bfloat16; the gradients of W and b are float32."""

    @staticmethod
    def forward(context: AutogradContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        half = x.to(torch.bfloat16)
        if half.stride(1) != 1 or half.stride(0) % 2:
            half = half.contiguous()
        context.save_for_backward(half, weight)
        context.x_dtype, context.has_bias = x.dtype, bias is not None
        return linear(half, pack_weight(weight, transpose=True, bfloat16=True), len(weight), bias)

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
    """Return dW = dy' x and db = the sum of the rows of dy, in float32; db is None without a bias."""
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
    """Compute GELU, x Phi(x) (Hendrycks and Gimpel 2016), by our kernel in bfloat16 and by PyTorch otherwise.

    The kernel approximates it with an error of 1e-7, far below the resolution of bfloat16.
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
    """Compute norm(x + dropout(y)) for a layer norm with a weight; returns None if the kernels cannot compute it.

    Args:
        x: The residual.
        y: Output of the sublayer.
        norm: The norm.
        p: Probability of dropping an element of y.
    """
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
    """Compute norm(x + dropout(y)) by our kernel.

    Args:
        x: The residual.
        y: Output of the sublayer.
        gain: Weight of the layer norm.
        bias: Bias of the layer norm.
        eps: Added to the variance.
        p: Probability of dropping an element of y.
        seed: Seed of the dropout.
        sums: Output tensor for x + dropout(y), [rows, width], for the backward pass. None without one.
        moments: Output tensor for mean and 1 / standard deviation of each row, [rows, 2], for the backward pass.
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
    logits: Float[Tensor, "targets classes"], targets: Int[Tensor, " targets"]
) -> tuple[Float[Tensor, " targets"], Float[Tensor, "targets classes"]] | None:
    """Compute the cross-entropy -log softmax(logits)[target] of each row, and its gradient softmax(logits) - one_hot.

    Returns:
        The losses in float32 and the gradients in the dtype of the logits, or None if the kernels cannot compute them.
    """
    library = kernels()
    if library is None or logits.device.type != "cpu" or logits.dtype not in DTYPE_CODES or not logits.is_contiguous():
        return None
    if logits.dtype == torch.bfloat16 and not library.has_bfloat16:
        return None
    gradients = torch.empty_like(logits)
    losses = empty(len(logits))
    targets = targets.to(torch.int64).contiguous()
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
        return None  # so that the caller uses PyTorch's operators, which raise an error that names the wrong target
    dtype, threads = DTYPE_CODES[logits.dtype], torch.get_num_threads()
    outputs = (address(gradients), address(losses))
    library.cross_entropy(address(logits), *logits.shape, address(targets), dtype, *outputs, threads)
    return losses, gradients


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first element, an argument of the C++ functions; the null pointer 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
