"""Comparison of a library's results with PyTorch's operators on small examples, before the library is used.

`library.py` calls `find_error` when it compiles or loads a library. One thread computes all examples: on a busy
machine, starting another thread would take longer than the examples.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heedful.csrc.abi import Kernels

WIDTH, ROWS, HEADS, EPS = 64, 21, 2, 1e-5
SPANS = ((0, 8, 0, 8), (8, ROWS, 8, ROWS))  # start and stop of the query rows, then of the key rows, of each sequence
SCALE = 0.2  # factor of q k in attention
FLOAT32_TOLERANCE, BFLOAT16_TOLERANCE = 1e-4, 3e-2  # allowed errors, relative to the largest element

Result = tuple[str, Tensor, Tensor]  # name, the library's result, PyTorch's result
Case = tuple[str, Tensor, Tensor, float]  # a Result, and the allowed error


def find_error(library: Kernels) -> str:
    """Return the name of the first wrong result and its error, or an empty string if all results are right."""
    # the caller's default device, autocast and grad mode must not matter
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad():
        return next(filter(None, map(_describe_error, _cases(library))), "")


def _describe_error(case: Case) -> str:
    """Return the name of a result and its error, or an empty string if it is within the tolerance."""
    name, result, expected, tolerance = case
    error = float((result.float() - expected.float()).abs().max() / expected.abs().max())
    return "" if error < tolerance else f"{name} is off by {error:.1e}"


def _cases(library: Kernels) -> Iterator[Case]:
    """Yield all comparisons, in every dtype that the library supports."""
    for dtype in (torch.float32, torch.bfloat16) if library.has_bfloat16 else (torch.float32,):
        for compare in (_linears, _rows, _cross_entropy, _attentions, _disentangled_attention):
            for name, result, expected in compare(library, _Sampler(dtype)):
                tolerance = FLOAT32_TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
                yield f"{name} in {str(dtype).removeprefix('torch.')}", result, expected, tolerance
        yield _block(library, _Sampler(dtype))
    yield from _optimizer_steps(library, _Sampler(torch.float32))
    yield from _int8(library, _Sampler(torch.float32))
    yield from _search(library, _Sampler(torch.float32))


class _Sampler:
    """Samples random tensors in one dtype, with a fixed seed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.dtype = dtype

    def __call__(self, *shape: int) -> Tensor:
        return self.float32(*shape).to(self.dtype)

    def float32(self, *shape: int) -> Tensor:
        """Sample a tensor in float32."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float32)


def _is_bfloat16(x: Tensor) -> int:
    """Return the library's code for a tensor's dtype: 0 for float32, 1 for bfloat16."""
    return int(x.dtype == torch.bfloat16)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate an output filled with NaN (integers: 0), so that unwritten elements are detected."""
    return torch.full(shape, torch.nan, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


# -- linear layers ----------------------------------------------------------------------------------------------


def _linears(library: Kernels, sample: _Sampler) -> Iterator[Result]:
    """Compare a linear layer and its gradients."""
    x, dy, weight, bias = (
        sample(ROWS, WIDTH),
        sample(ROWS, 2 * WIDTH),
        sample(2 * WIDTH, WIDTH),
        sample.float32(2 * WIDTH),
    )
    yield "linear", _linear(library, x, weight, bias), _affine(x.float(), weight.float(), bias)
    dx = _linear(library, dy, weight, None, transpose=False)
    yield "linear backwards", dx, _multiply(dy.float(), weight.float().T)
    dw, db = _weight_gradient(library, dy, x)
    yield "weight_gradient", dw, _multiply(dy.float().T, x.float().T)
    yield "weight_gradient of the bias", db, dy.float().sum(0)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x W' by operators that start no threads at this size."""
    return torch.stack([(row * weight).sum(-1) for row in x])


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute x W' + b."""
    return _multiply(x, weight) + bias


def _pack(library: Kernels, weight: Tensor, *, transpose: bool = True) -> Tensor:
    """Pack a weight W for x W' (`transpose`) or x W, in its own dtype."""
    (rows, columns), dtype = weight.shape, _is_bfloat16(weight)
    shape = (rows, columns) if transpose else (columns, rows)
    packed = _empty(library.packed_words(*shape, 1 + dtype), dtype=torch.int32)
    library.pack(weight.data_ptr(), not dtype, rows, columns, transpose, dtype, packed.data_ptr(), 1)
    return packed


def _linear(library: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, *, transpose: bool = True) -> Tensor:
    """Compute x W' + b (`transpose`) or x W + b by the library."""
    (count, width), dtype, columns = x.shape, _is_bfloat16(x), weight.shape[0 if transpose else 1]
    packed = _pack(library, weight, transpose=transpose)
    y = _empty(count, columns, dtype=x.dtype)
    inputs = (x.data_ptr(), width, count, packed.data_ptr(), width, columns, 0 if bias is None else bias.data_ptr())
    library.linear(*inputs, False, dtype, not dtype, y.data_ptr(), 1)
    return y


def _weight_gradient(library: Kernels, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of weight and bias by the library."""
    (count, columns), width, dtype = dy.shape, x.shape[1], _is_bfloat16(x)
    scratch = _empty(library.packed_words(width, count, 1 + dtype), dtype=torch.int32)
    dw, db = _empty(columns, width), _empty(columns)
    inputs = (dy.data_ptr(), columns, x.data_ptr(), width, width, count, dtype)
    library.weight_gradient(*inputs, scratch.data_ptr(), dw.data_ptr(), db.data_ptr(), 1)
    return dw, db


def _int8(library: Kernels, sample: _Sampler) -> Iterator[Case]:
    """Compare the quantization of rows to 8 bits and an int8 linear layer."""
    x = sample(ROWS, WIDTH)
    columns = 32
    quantized = _empty(ROWS, WIDTH, dtype=torch.uint8)
    scales = _empty(ROWS, 2)
    library.round_rows(x.data_ptr(), WIDTH, ROWS, WIDTH, 0, quantized.data_ptr(), scales.data_ptr(), 1)
    restored = quantized * scales[:, :1] + scales[:, 1:]
    yield "round_rows", restored, x, 1e-2
    if not library.has_int8:
        return
    weight = (40 * sample(columns, WIDTH)).clamp(-127, 127).to(torch.int8)
    weight_scales = sample(columns).abs() / 100
    sums = weight.float().sum(1)
    bias = sample(columns)
    panels = _empty(library.packed_words(columns, WIDTH, 4), dtype=torch.int32)
    y = _empty(ROWS, columns)
    library.pack8(weight.data_ptr(), columns, WIDTH, panels.data_ptr(), 1)
    layer = (panels.data_ptr(), WIDTH, columns, weight_scales.data_ptr(), sums.data_ptr(), bias.data_ptr())
    library.linear8(quantized.data_ptr(), scales.data_ptr(), ROWS, *layer, False, 0, y.data_ptr(), 1)
    yield "linear8", y, _affine(restored, weight * weight_scales[:, None], bias), FLOAT32_TOLERANCE


def _search(library: Kernels, sample: _Sampler) -> Iterator[Case]:
    """Compare the search index's scores: dot products of int8 vectors, negative Hamming distances of binary ones."""
    rows = (40 * sample(ROWS, WIDTH + 5)).to(torch.int8)
    queries = (4000 * sample(2, WIDTH + 5)).to(torch.int16)
    row_scales = sample(ROWS)
    query_scales = sample(2)
    scores = _empty(2, ROWS)
    inputs = (rows.data_ptr(), row_scales.data_ptr(), *rows.shape, queries.data_ptr(), query_scales.data_ptr(), 2)
    library.scores8(*inputs, scores.data_ptr(), 1)
    expected = _multiply(queries.double(), rows.double()) * row_scales * query_scales[:, None]
    yield "scores8", scores, expected, FLOAT32_TOLERANCE
    bits = sample(ROWS, 3).view(torch.int32).repeat(1, 2)
    matches = _empty(2, ROWS)
    library.matches(bits.data_ptr(), ROWS, 3, bits.data_ptr(), 2, matches.data_ptr(), 1)
    different = (bits[:2, None] ^ bits)[..., None] >> torch.arange(32) & 1
    yield "matches", matches, -different.sum((2, 3)).float(), FLOAT32_TOLERANCE


# -- operations on each row -------------------------------------------------------------------------------------


def _rows(library: Kernels, sample: _Sampler) -> Iterator[Result]:
    """Compare GELU and norm(x + dropout(y)), with their gradients."""
    x, dy = sample(ROWS, WIDTH), sample(ROWS, WIDTH)
    yield "gelu", _gelu(library, x), F.gelu(x.float())
    dx = _empty(*x.shape, dtype=x.dtype)
    library.gelu_gradient(x.data_ptr(), dy.data_ptr(), x.numel(), _is_bfloat16(x), dx.data_ptr(), 1)
    yield "gelu_gradient", dx, torch.ops.aten.gelu_backward(dy.float(), x.float())
    y, gain, bias, dz = (
        1 + sample(ROWS, WIDTH).abs(),
        sample.float32(WIDTH),
        sample.float32(WIDTH),
        sample.float32(ROWS, WIDTH),
    )
    for p in (0.0, 0.25):
        yield from _norms(library, x, y, gain, bias, dz, p)


def _gelu(library: Kernels, x: Tensor) -> Tensor:
    """Compute GELU by the library."""
    y = _empty(*x.shape, dtype=x.dtype)
    library.gelu(x.data_ptr(), x.numel(), _is_bfloat16(x), y.data_ptr(), 1)
    return y


def _norms(
    library: Kernels, x: Tensor, y: Tensor, gain: Tensor, bias: Tensor, dz: Tensor, p: float
) -> Iterator[Result]:
    """Compare norm(x + dropout(y)) and its gradients."""
    dtype = _is_bfloat16(x)
    z = _empty(*x.shape, dtype=x.dtype)
    sums = _empty(*x.shape)
    moments = _empty(len(x), 2)
    rows = [argument for tensor in (x, y, z) for argument in (tensor.data_ptr(), dtype)]
    outputs = (sums.data_ptr(), moments.data_ptr(), 1)
    library.add_norm(*x.shape, EPS, gain.data_ptr(), bias.data_ptr(), p, 5, *rows, *outputs)
    is_kept = ((sums - x.float()) / y.float() > 0.5).float()
    yield from _dropout_rate(is_kept, p)
    factors = is_kept / (1 - p)
    expected_sums = x.float() + factors * y.float()
    normed, scale = _normalise(expected_sums)
    yield "add_norm", z, normed * gain + bias
    dx, dy, gains, scratch = (
        _empty(*x.shape),
        _empty(*x.shape, dtype=x.dtype),
        _empty(2, WIDTH),
        _empty(-(-ROWS // 32), 2, WIDTH),
    )
    addresses = [tensor.data_ptr() for tensor in (sums, moments, dz, dx, dy)]
    library.add_norm_gradient(
        *x.shape, EPS, gain.data_ptr(), p, 5, *addresses, dtype, gains.data_ptr(), scratch.data_ptr(), 1
    )
    d_normed = dz * gain
    mean = d_normed.mean(-1, keepdim=True)
    projection = (d_normed * normed).mean(-1, keepdim=True)
    d_sums = (d_normed - mean - normed * projection) * scale
    yield "add_norm_gradient", dx, d_sums
    yield "add_norm_gradient of the sublayer", dy, d_sums * factors
    yield "add_norm_gradient of the gain", gains, torch.stack([(dz * normed).sum(0), dz.sum(0)])


def _normalise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows normalised to mean 0 and variance 1, and 1 / sqrt(variance + EPS) of each row."""
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return centred * scale, scale


def _dropout_rate(is_kept: Tensor, p: float) -> Iterator[Result]:
    """Compare the share of dropped elements, rounded to quarters, with the probability p."""
    yield "dropout", 1 + (4 * (1 - is_kept.mean())).round(), torch.full((), 1 + 4 * p)


def _cross_entropy(library: Kernels, sample: _Sampler) -> Iterator[Result]:
    """Compare cross-entropy and its gradient."""
    logits = 3 * sample(ROWS, 37)
    targets = torch.arange(ROWS)
    gradients = _empty(*logits.shape, dtype=logits.dtype)
    losses = _empty(ROWS)
    inputs = (logits.data_ptr(), *logits.shape, targets.data_ptr(), _is_bfloat16(logits))
    library.cross_entropy(*inputs, gradients.data_ptr(), losses.data_ptr(), 1)
    log_p = logits.float().log_softmax(-1)
    yield "cross_entropy", losses, -log_p[targets, targets]
    yield "cross_entropy's gradient", gradients, log_p.exp() - torch.eye(*logits.shape, dtype=torch.float32)


# -- attention --------------------------------------------------------------------------------------------------


def _attentions(library: Kernels, sample: _Sampler) -> Iterator[Result]:
    """Compare attention and its gradients: once without, once with causal mask, window, dropout and shared kv heads."""
    width = WIDTH // HEADS
    dout = sample(ROWS, HEADS, width)
    position = torch.arange(ROWS)
    spans = torch.tensor(SPANS)
    distance = position - position[:, None]
    is_first = position < SPANS[0][1]
    same_sequence = is_first == is_first[:, None]
    for causal, window, p, kv_heads in ((False, -1, 0.0, HEADS), (True, 5, 0.25, 1)):
        sizes = (HEADS, kv_heads, kv_heads)
        q, k, v = sample(ROWS, sum(sizes), width).split(sizes, 1)
        allowed = (distance <= 0) & (distance >= -window) if causal else True
        visible = (same_sequence & allowed)[..., None]  # queries, keys, heads
        options = (causal, window, p, 7, _is_bfloat16(q))
        # with unit vectors as values, the result of attention is its weights, from which the dropout mask is read
        unit_vectors = torch.eye(ROWS, width, dtype=q.dtype)[:, None].expand(-1, kv_heads, -1).contiguous()
        is_kept = _attention(library, q, k, unit_vectors, spans, options)[0][..., :ROWS].transpose(1, 2) > 0
        yield from _dropout_rate(is_kept[visible.expand_as(is_kept)].float(), p)
        factors = is_kept.float() / (1 - p)
        queries, keys, values, d_out = q.float()[:, None], k.float()[None], v.float()[None], dout.float()[:, None]
        weights = (SCALE * (queries * keys).sum(-1)).masked_fill(~visible, -torch.inf).softmax(1)
        dropped = weights * factors
        out, log_sums, arguments = _attention(library, q, k, v, spans, options)
        yield "attention", out, (dropped[..., None] * values).sum(1)
        gradients = _empty(ROWS, sum(sizes), width, dtype=q.dtype).split(sizes, 1)
        outputs = (*(gradient.data_ptr() for gradient in gradients), gradients[0].stride(0), 1)
        library.attention_gradient(
            *arguments, out.data_ptr(), WIDTH, log_sums.data_ptr(), dout.data_ptr(), WIDTH, *outputs
        )
        d_weights = factors * (d_out * values).sum(-1)
        d_logits = SCALE * (weights * (d_weights - (weights * d_weights).sum(1, keepdim=True)))[..., None]
        expected_gradients = (
            (d_logits * keys).sum(1),
            (d_logits * queries).sum(0),
            (dropped[..., None] * d_out).sum(0),
        )
        for name, result, expected, heads in zip("qkv", gradients, expected_gradients, sizes, strict=True):
            yield f"attention_gradient of {name}", result, expected.unflatten(1, (heads, -1)).sum(2)


def _attention(
    library: Kernels, q: Tensor, k: Tensor, v: Tensor, spans: Tensor, options: tuple[Any, ...]
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Compute attention by the library.

    Args:
        options: Whether there is a causal mask, window (-1: none), dropout probability, seed, and code of the dtype.

    Returns:
        The result, the log-sum-exp of each query's logits, and the first arguments of attention_gradient.
    """
    out, log_sums = _empty(*q.shape, dtype=q.dtype), _empty(*q.shape[:2])
    rows = [argument for tensor in (q, k, v) for argument in (tensor.data_ptr(), tensor.stride(0))]
    arguments = (len(spans), HEADS, k.shape[1], q.shape[2], spans.data_ptr(), *rows, SCALE, *options)
    library.attention(*arguments, out.data_ptr(), out.stride(0), log_sums.data_ptr(), 1)
    return out, log_sums, arguments


def _disentangled_attention(library: Kernels, sample: _Sampler) -> Iterator[Result]:
    """Compare disentangled attention, with one embedding for all distances above 5 and one for all below -5."""
    width, margin = WIDTH // HEADS, 2 * library.lanes
    max_distance, near = ROWS - 1, 5
    q, k, v = sample(ROWS, 3 * HEADS, width).split(HEADS, 1)
    vectors = sample(2, 2 * near + 1, HEADS, width)
    distances = torch.arange(-max_distance - margin, max_distance + margin + 1)
    indexes = distances.clamp(-near, near) + near
    both_ways = torch.stack([indexes, indexes.flip(0)]).int()
    out = _empty(*q.shape, dtype=q.dtype)
    spans = torch.tensor(SPANS)
    rows = [argument for tensor in (q, k, v) for argument in (tensor.data_ptr(), tensor.stride(0))]
    library.disentangled_attention(
        len(SPANS),
        HEADS,
        width,
        spans.data_ptr(),
        *rows,
        SCALE,
        _is_bfloat16(q),
        vectors[0].data_ptr(),
        vectors[1].data_ptr(),
        vectors.shape[1],
        both_ways.data_ptr(),
        max_distance,
        out.data_ptr(),
        out.stride(0),
        1,
    )
    position_q, position_k = vectors.float()
    expected = []
    for start, stop, *_ in SPANS:
        queries = q[start:stop].float()
        keys = k[start:stop].float()
        position = torch.arange(stop - start)
        index = (position[:, None] - position).clamp(-near, near) + near
        products = (queries[:, None] * (keys + position_k[index])).sum(-1) + (keys * position_q[index]).sum(-1)
        weights = (SCALE * products).softmax(1)
        expected.append((weights[..., None] * v[None, start:stop].float()).sum(1))
    yield "disentangled_attention", out, torch.cat(expected)


def _block(library: Kernels, sample: _Sampler) -> Case:
    """Compare a complete post-norm Transformer block, without int8."""
    x, spans = sample(ROWS, WIDTH), torch.tensor(SPANS)
    shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
    weights = [sample(columns, width) / width**0.5 for width, columns in shapes]
    biases, gains = [sample.float32(columns) for _, columns in shapes], sample.float32(2, 2, WIDTH)
    panels = [_pack(library, weight) for weight in weights]
    parts = [
        struct.pack("7q", packed.data_ptr(), bias.data_ptr(), 0, 0, *shape, index == 2)  # the third one applies GELU
        for index, (packed, bias, shape) in enumerate(zip(panels, biases, shapes, strict=True))
    ]
    parts += [struct.pack("2qd", gain.data_ptr(), bias.data_ptr(), EPS) for gain, bias in gains]
    descriptor = torch.frombuffer(bytearray(b"".join(parts) + struct.pack("2qd", HEADS, 0, SCALE)), dtype=torch.uint8)
    z = _empty(*x.shape, dtype=x.dtype)
    dtype = _is_bfloat16(x)
    scratch = _empty(library.block_space(descriptor.data_ptr(), ROWS, dtype), dtype=torch.uint8)
    arguments = (descriptor.data_ptr(), dtype, x.data_ptr(), ROWS, len(spans), spans.data_ptr(), -1)
    library.block(*arguments, z.data_ptr(), scratch.data_ptr(), 1)
    qkv, out, up, down = (
        partial(_affine, weight=weight.float(), bias=bias) for weight, bias in zip(weights, biases, strict=True)
    )
    q, k, v = qkv(x.float()).unflatten(-1, (3, HEADS, -1)).unbind(1)
    attended = []
    for start, stop, *_ in SPANS:
        attention = (SCALE * q[start:stop, None] * k[None, start:stop]).sum(-1).softmax(1)
        attended.append((attention[..., None] * v[None, start:stop]).sum(1))
    y = _normalise(x.float() + out(torch.cat(attended).flatten(1)))[0] * gains[0, 0] + gains[0, 1]
    expected = _normalise(y + down(F.gelu(up(y))))[0] * gains[1, 0] + gains[1, 1]
    tolerance = 2 * (BFLOAT16_TOLERANCE if dtype else FLOAT32_TOLERANCE)
    return f"block in {str(x.dtype).removeprefix('torch.')}", z, expected, tolerance


# -- the optimizer ----------------------------------------------------------------------------------------------

# factors of each step t: 1 - lr * weight decay, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t); the numbers are arbitrary
STEPS = ((0.999, 0.01, 30.0), (0.998, 0.02, 22.0), (1.0, 0.03, 18.0))
BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


def _optimizer_steps(library: Kernels, sample: _Sampler) -> Iterator[Case]:
    """Compare an AdamW step of dense tensors, and three steps of an embedding table whose rows are updated lazily."""
    steps = torch.tensor(STEPS, dtype=torch.float32)
    yield from _dense_step(library, sample, steps)
    width = 21  # whole vector registers, and a part of one
    p, m, v = sample(6, width), sample(6, width), sample(6, width).square()
    rows = torch.tensor([1, 3, 5])
    gradient = sample(3, width)
    applied = torch.tensor([0, 1, 2] * 2, dtype=torch.int32)
    dense_gradient = torch.zeros(6, width, dtype=torch.float64)
    old_p = p.clone()
    dense_gradient[rows] = gradient.double() / 2
    expected = [x.double() for x in (p, m, v)]
    for index, step in enumerate(STEPS):
        updated = _update(expected, dense_gradient if index == 2 else torch.zeros_like(dense_gradient), step)
        is_pending = (applied <= index)[:, None]
        expected = [new.where(is_pending, old) for new, old in zip(updated, expected, strict=True)]
    matrix = (p.data_ptr(), m.data_ptr(), v.data_ptr(), applied.data_ptr(), width)
    for row_address, count, gradient_address in ((rows.data_ptr(), len(rows), gradient.data_ptr()), (0, len(p), 0)):
        arguments = (*matrix, row_address, count, steps.data_ptr(), len(STEPS), gradient_address)
        library.adamw_rows(*arguments, 0.5, *BETAS, ADAM_EPS, 1)
    yield from _compare_update("adamw_rows", [p, m, v], expected, old_p)


def _dense_step(library: Kernels, sample: _Sampler, steps: Tensor) -> Iterator[Case]:
    """Compare one AdamW step of two parameters, each with its moments and its gradient."""
    groups = [[sample(count), sample(count), sample(count).square(), sample(count)] for count in (1003, 5)]
    updates = [_update([x.double() for x in tensors[:3]], tensors[3].double() / 2, STEPS[0]) for tensors in groups]
    old_parameters = [tensors[0].clone() for tensors in groups]
    # each parameter is one chunk of the kernel, so its index is the number of chunks before it
    entries = [[*(x.data_ptr() for x in tensors), len(tensors[0]), index] for index, tensors in enumerate(groups)]
    table = torch.tensor(entries)
    library.adamw(len(entries), table.data_ptr(), steps.data_ptr(), 0.5, *BETAS, ADAM_EPS, 1)
    for result, expected, old_p in zip(groups, updates, old_parameters, strict=True):
        yield from _compare_update("adamw", result, expected, old_p)


def _update(old: list[Tensor], g: Tensor, step: tuple[float, float, float]) -> list[Tensor]:
    """Return the parameter p, its first moment m and its second moment v after a step of AdamW.

    Args:
        old: p, m and v before the step.
        g: The gradient.
        step: An element of STEPS.
    """
    (p, m, v), (decay, lr, root) = old, step
    m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
    return [p * decay - m / (v.sqrt() * root + ADAM_EPS) * lr, m, v]


def _compare_update(name: str, result: list[Tensor], expected: list[Tensor], old_p: Tensor) -> Iterator[Case]:
    """Compare the change of a parameter, and its two moments."""
    yield name, result[0] - old_p, expected[0] - old_p, 1e-3  # most of the error is rounding of the updated parameter
    for index in (1, 2):
        yield f"moments of {name}", result[index], expected[index], FLOAT32_TOLERANCE
