"""Compares the results of a library with PyTorch's operators on small examples, before it is used.

One thread computes them: on a busy machine starting another takes longer than all of them.
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
SPANS = ((0, 8, 0, 8), (8, ROWS, 8, ROWS))
SINGLE, HALF = 1e-4, 3e-2  # tolerated error, relative to the largest number

Case = tuple[str, Tensor, Tensor, float]  # name, ours, PyTorch's, tolerated error


def find_error(library: Kernels) -> str:
    """Return the first wrong result and its error, or an empty string."""
    # callers may have another default device, autocast or grad mode
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad():
        return next(filter(None, map(_describe_error, _cases(library))), "")


def _describe_error(case: Case) -> str:
    name, ours, expected, tolerance = case
    error = float((ours.float() - expected.float()).abs().max() / expected.abs().max())
    return "" if error < tolerance else f"{name} is off by {error:.1e}"


def _cases(library: Kernels) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16) if library.has_bfloat16 else (torch.float32,):
        for cases in (_linears, _rows, _scores, _attentions, _disentangled_attention):
            for name, ours, expected in cases(library, _Sampler(dtype)):
                tolerance = SINGLE if dtype == torch.float32 else HALF
                yield f"{name} in {str(dtype).removeprefix('torch.')}", ours, expected, tolerance
        yield _block(library, _Sampler(dtype))
    yield from _steps(library, _Sampler(torch.float32))
    yield from _int8(library, _Sampler(torch.float32))
    yield from _search(library, _Sampler(torch.float32))


class _Sampler:
    """Samples numbers of one dtype, the same ones each time."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(1), dtype

    def __call__(self, *shape: int) -> Tensor:
        return self.single(*shape).to(self.dtype)

    def single(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32)


def _half(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate an output filled with NaN, so that unwritten numbers are found."""
    return torch.full(shape, torch.nan, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


# -- linear layers ----------------------------------------------------------------------------------------------


def _linears(library: Kernels, sample: _Sampler) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, dy, weight, bias = (
        sample(ROWS, WIDTH),
        sample(ROWS, 2 * WIDTH),
        sample(2 * WIDTH, WIDTH),
        sample.single(2 * WIDTH),
    )
    wide = x.float(), dy.float(), weight.float()
    yield "linear", _linear(library, x, weight, bias), _affine(wide[0], wide[2], bias)
    yield "linear backwards", _linear(library, dy, weight, None, turned=False), _times(wide[1], wide[2].T)
    dw, db = _weight_gradient(library, dy, x)
    yield "weight_gradient", dw, _times(wide[1].T, wide[0].T)
    yield "weight_gradient of the bias", db, wide[1].sum(0)


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x W' by operators that start no threads at this size."""
    return torch.stack([(row * weight).sum(-1) for row in x])


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _times(x, weight) + bias


def _packed(library: Kernels, weight: Tensor, *, turned: bool = True) -> Tensor:
    (rows, columns), half = weight.shape, _half(weight)
    sides = (rows, columns) if turned else (columns, rows)
    right = _empty(library.packed_words(*sides, 1 + half), dtype=torch.int32)
    library.pack(weight.data_ptr(), not half, rows, columns, turned, half, right.data_ptr(), 1)
    return right


def _linear(library: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, *, turned: bool = True) -> Tensor:
    (count, depth), half, columns = x.shape, _half(x), weight.shape[0 if turned else 1]
    right, y = _packed(library, weight, turned=turned), _empty(count, columns, dtype=x.dtype)
    arguments = (x.data_ptr(), depth, count, right.data_ptr(), depth, columns, _at(bias), False, half, not half)
    library.linear(*arguments, y.data_ptr(), 1)
    return y


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _weight_gradient(library: Kernels, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    (count, columns), width, half = dy.shape, x.shape[1], _half(x)
    space = _empty(library.packed_words(width, count, 1 + half), dtype=torch.int32)
    dw, db = _empty(columns, width), _empty(columns)
    sides = (dy.data_ptr(), columns, x.data_ptr(), width, width, count, half)
    library.weight_gradient(*sides, space.data_ptr(), dw.data_ptr(), db.data_ptr(), 1)
    return dw, db


def _int8(library: Kernels, sample: _Sampler) -> Iterator[Case]:
    x, columns = sample(ROWS, WIDTH), 32
    whole, scales = _empty(ROWS, WIDTH, dtype=torch.uint8), _empty(ROWS, 2)
    library.round_rows(x.data_ptr(), WIDTH, ROWS, WIDTH, 0, whole.data_ptr(), scales.data_ptr(), 1)
    yield "round_rows", whole * scales[:, :1] + scales[:, 1:], x, 1e-2
    if not library.has_int8:
        return
    weight = (40 * sample(columns, WIDTH)).clamp(-127, 127).to(torch.int8)
    of_weight, sums, bias = sample(columns).abs() / 100, weight.float().sum(1), sample(columns)
    panels, y = _empty(library.packed_words(columns, WIDTH, 4), dtype=torch.int32), _empty(ROWS, columns)
    library.pack8(weight.data_ptr(), columns, WIDTH, panels.data_ptr(), 1)
    right = (panels.data_ptr(), WIDTH, columns, of_weight.data_ptr(), sums.data_ptr(), bias.data_ptr())
    library.linear8(whole.data_ptr(), scales.data_ptr(), ROWS, *right, False, 0, y.data_ptr(), 1)
    arguments = whole * scales[:, :1] + scales[:, 1:]
    yield "linear8", y, _affine(arguments, weight * of_weight[:, None], bias), SINGLE


def _search(library: Kernels, sample: _Sampler) -> Iterator[Case]:
    rows, queries = (40 * sample(ROWS, WIDTH + 5)).to(torch.int8), (4000 * sample(2, WIDTH + 5)).to(torch.int16)
    of_rows, of_queries, scores = sample(ROWS), sample(2), _empty(2, ROWS)
    sides = (rows.data_ptr(), of_rows.data_ptr(), *rows.shape, queries.data_ptr(), of_queries.data_ptr(), 2)
    library.scores8(*sides, scores.data_ptr(), 1)
    expected = _times(queries.double(), rows.double()) * of_rows * of_queries[:, None]
    yield "scores8", scores, expected, SINGLE
    bits, matches = sample(ROWS, 3).view(torch.int32).repeat(1, 2), _empty(2, ROWS)
    library.matches(bits.data_ptr(), ROWS, 3, bits.data_ptr(), 2, matches.data_ptr(), 1)
    different = (bits[:2, None] ^ bits)[..., None] >> torch.arange(32) & 1
    yield "matches", matches, -different.sum((2, 3)).float(), SINGLE


# -- row by row -------------------------------------------------------------------------------------------------


def _rows(library: Kernels, sample: _Sampler) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, dy = sample(ROWS, WIDTH), sample(ROWS, WIDTH)
    yield "gelu", _gelu(library, x), F.gelu(x.float())
    dx = _empty(*x.shape, dtype=x.dtype)
    library.gelu_gradient(x.data_ptr(), dy.data_ptr(), x.numel(), _half(x), dx.data_ptr(), 1)
    yield "gelu_gradient", dx, torch.ops.aten.gelu_backward(dy.float(), x.float())
    y, gain, bias, dz = (
        1 + sample(ROWS, WIDTH).abs(),
        sample.single(WIDTH),
        sample.single(WIDTH),
        sample.single(ROWS, WIDTH),
    )
    for p in (0.0, 0.25):
        yield from _norms(library, x, y, gain, bias, dz, p)


def _gelu(library: Kernels, x: Tensor) -> Tensor:
    y = _empty(*x.shape, dtype=x.dtype)
    library.gelu(x.data_ptr(), x.numel(), _half(x), y.data_ptr(), 1)
    return y


def _norms(
    library: Kernels, x: Tensor, y: Tensor, gain: Tensor, bias: Tensor, dz: Tensor, p: float
) -> Iterator[tuple[str, Tensor, Tensor]]:
    half, z, kept, moments = _half(x), _empty(*x.shape, dtype=x.dtype), _empty(*x.shape), _empty(len(x), 2)
    rows = [part for each in (x, y, z) for part in (each.data_ptr(), half)]
    more = (kept.data_ptr(), moments.data_ptr(), 1)
    library.add_norm(*x.shape, EPS, gain.data_ptr(), bias.data_ptr(), p, 5, *rows, *more)
    stays = ((kept - x.float()) / y.float() > 0.5).float()
    yield from _share(stays, p)
    factors = stays / (1 - p)
    s = x.float() + factors * y.float()
    normed, scale = _normed(s)
    yield "add_norm", z, normed * gain + bias
    dx, dy, gains, parts = (
        _empty(*x.shape),
        _empty(*x.shape, dtype=x.dtype),
        _empty(2, WIDTH),
        _empty(-(-ROWS // 32), 2, WIDTH),
    )
    arguments = [each.data_ptr() for each in (kept, moments, dz, dx, dy)]
    library.add_norm_gradient(
        *x.shape, EPS, gain.data_ptr(), p, 5, *arguments, half, gains.data_ptr(), parts.data_ptr(), 1
    )
    slope = dz * gain
    level, along = slope.mean(-1, keepdim=True), (slope * normed).mean(-1, keepdim=True)
    ds = (slope - level - normed * along) * scale
    yield "add_norm_gradient", dx, ds
    yield "add_norm_gradient of what is added", dy, ds * factors
    yield "add_norm_gradient of the gain", gains, torch.stack([(dz * normed).sum(0), dz.sum(0)])


def _normed(s: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of mean 0 and variance 1, and the factors that they were multiplied by."""
    around = s - s.mean(-1, keepdim=True)
    scale = (around.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return around * scale, scale


def _share(stays: Tensor, p: float) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Check that about a fraction p of a few hundred numbers is dropped."""
    yield "dropout", 1 + (4 * (1 - stays.mean())).round(), torch.full((), 1 + 4 * p)


def _scores(library: Kernels, sample: _Sampler) -> Iterator[tuple[str, Tensor, Tensor]]:
    scores = 3 * sample(ROWS, 37)
    targets, gradients, losses = torch.arange(ROWS), _empty(*scores.shape, dtype=scores.dtype), _empty(ROWS)
    arguments = (scores.data_ptr(), *scores.shape, targets.data_ptr(), _half(scores))
    library.cross_entropy(*arguments, gradients.data_ptr(), losses.data_ptr(), 1)
    logs = scores.float().log_softmax(-1)
    yield "cross_entropy", losses, -logs[targets, targets]
    yield "cross_entropy's gradient", gradients, logs.exp() - torch.eye(*scores.shape, dtype=torch.float32)


# -- attention --------------------------------------------------------------------------------------------------


def _attentions(library: Kernels, sample: _Sampler) -> Iterator[tuple[str, Tensor, Tensor]]:
    width = WIDTH // HEADS
    dout, place = sample(ROWS, HEADS, width), torch.arange(ROWS)
    spans, gap = torch.tensor(SPANS), place - place[:, None]
    together = (place < SPANS[0][1]) == (place < SPANS[0][1])[:, None]
    for causal, window, p, kv_heads in ((False, -1, 0.0, HEADS), (True, 5, 0.25, 1)):
        sizes = (HEADS, kv_heads, kv_heads)
        q, k, v = sample(ROWS, sum(sizes), width).split(sizes, 1)
        eye = torch.eye(ROWS, width, dtype=q.dtype)[:, None].expand(-1, kv_heads, -1).contiguous()
        one, other, third, slope = q.float()[:, None], k.float()[None], v.float()[None], dout.float()[:, None]
        sees = (together & ((gap <= 0) & (gap >= -window) if causal else True))[..., None]  # queries, keys, heads
        how = (causal, window, p, 7, _half(q))
        # with unit vectors as values, the result is the weights
        kept = _attention(library, q, k, eye, spans, how)[0][..., :ROWS].transpose(1, 2) > 0
        yield from _share(kept[sees.expand_as(kept)].float(), p)
        factors = kept.float() / (1 - p)
        weights = (0.2 * (one * other).sum(-1)).masked_fill(~sees, -torch.inf).softmax(1)
        dropped = weights * factors
        out, sums, arguments = _attention(library, q, k, v, spans, how)
        yield "attention", out, (dropped[..., None] * third).sum(1)
        made = _empty(ROWS, sum(sizes), width, dtype=q.dtype).split(sizes, 1)
        to = [each.data_ptr() for each in made]
        library.attention_gradient(
            *arguments, out.data_ptr(), WIDTH, sums.data_ptr(), dout.data_ptr(), WIDTH, *to, made[0].stride(0), 1
        )
        slopes = factors * (slope * third).sum(-1)
        slopes = 0.2 * (weights * (slopes - (weights * slopes).sum(1, keepdim=True)))[..., None]
        gradients = ((slopes * other).sum(1), (slopes * one).sum(0), (dropped[..., None] * slope).sum(0))
        for name, ours, expected, heads in zip("qkv", made, gradients, sizes, strict=True):
            yield f"attention_gradient of {name}", ours, expected.unflatten(1, (heads, -1)).sum(2)


def _attention(
    library: Kernels, q: Tensor, k: Tensor, v: Tensor, spans: Tensor, how: tuple[Any, ...]
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Return the result, the logarithms of sums, and the arguments that the gradient begins with."""
    out, sums = _empty(*q.shape, dtype=q.dtype), _empty(*q.shape[:2])
    lines = [part for each in (q, k, v) for part in (each.data_ptr(), each.stride(0))]
    arguments = (len(spans), HEADS, k.shape[1], q.shape[2], spans.data_ptr(), *lines, 0.2, *how)
    library.attention(*arguments, out.data_ptr(), out.stride(0), sums.data_ptr(), 1)
    return out, sums, arguments


def _disentangled_attention(library: Kernels, sample: _Sampler) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Compare attention with terms of relative positions; far ones share an embedding."""
    width, margin, reach, near = WIDTH // HEADS, 2 * library.lanes, ROWS - 1, 5
    q, k, v = sample(ROWS, 3 * HEADS, width).split(HEADS, 1)
    vectors = sample(2, 2 * near + 1, HEADS, width)
    distances = torch.arange(-reach - margin, reach + margin + 1)
    numbers = distances.clamp(-near, near) + near
    both_ways, out = torch.stack([numbers, numbers.flip(0)]).int(), _empty(*q.shape, dtype=q.dtype)
    spans = torch.tensor(SPANS)
    lines = [part for rows in (q, k, v) for part in (rows.data_ptr(), rows.stride(0))]
    library.disentangled_attention(
        len(SPANS),
        HEADS,
        width,
        spans.data_ptr(),
        *lines,
        0.2,
        _half(q),
        vectors[0].data_ptr(),
        vectors[1].data_ptr(),
        vectors.shape[1],
        both_ways.data_ptr(),
        reach,
        out.data_ptr(),
        out.stride(0),
        1,
    )
    position_q, position_k = vectors.float()
    expected = []
    for a, b, *_ in SPANS:
        queries, keys, place = q[a:b].float(), k[a:b].float(), torch.arange(b - a)
        number = (place[:, None] - place).clamp(-near, near) + near
        scores = (queries[:, None] * (keys + position_k[number])).sum(-1) + (keys * position_q[number]).sum(-1)
        weights = (0.2 * scores).softmax(1)
        expected.append((weights[..., None] * v[None, a:b].float()).sum(1))
    yield "disentangled_attention", out, torch.cat(expected)


def _block(library: Kernels, sample: _Sampler) -> Case:
    """Compare a complete block, without int8."""
    x, spans = sample(ROWS, WIDTH), torch.tensor(SPANS)
    sides = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
    weights = [sample(columns, depth) / depth**0.5 for depth, columns in sides]
    biases, gains = [sample.single(columns) for _, columns in sides], sample.single(2, 2, WIDTH)
    panels = [_packed(library, each) for each in weights]
    parts = [
        struct.pack("7q", right.data_ptr(), bias.data_ptr(), 0, 0, *side, number == 2)
        for number, (right, bias, side) in enumerate(zip(panels, biases, sides, strict=True))
    ]
    parts += [struct.pack("2qd", *(each.data_ptr() for each in pair), EPS) for pair in gains]
    described = torch.frombuffer(bytearray(b"".join(parts) + struct.pack("2qd", HEADS, 0, 0.2)), dtype=torch.uint8)
    z, place = _empty(*x.shape, dtype=x.dtype), described.data_ptr()
    space = _empty(library.block_space(place, ROWS, _half(x)), dtype=torch.uint8)
    arguments = (place, _half(x), x.data_ptr(), ROWS, len(spans), spans.data_ptr(), -1)
    library.block(*arguments, z.data_ptr(), space.data_ptr(), 1)
    qkv, out, up, down = (
        partial(_affine, weight=weight.float(), bias=bias) for weight, bias in zip(weights, biases, strict=True)
    )
    q, k, v = qkv(x.float()).unflatten(-1, (3, HEADS, -1)).unbind(1)
    mixed = [
        ((0.2 * q[a:b, None] * k[None, a:b]).sum(-1).softmax(1)[..., None] * v[None, a:b]).sum(1) for a, b, *_ in SPANS
    ]
    y = _normed(x.float() + out(torch.cat(mixed).flatten(1)))[0] * gains[0, 0] + gains[0, 1]
    expected = _normed(y + down(F.gelu(up(y))))[0] * gains[1, 0] + gains[1, 1]
    return f"block in {str(x.dtype).removeprefix('torch.')}", z, expected, 2 * (HALF if _half(x) else SINGLE)


# -- the optimizer ----------------------------------------------------------------------------------------------

# decay, learning rate and root of the bias correction of each step
STEPS = ((0.999, 0.01, 30.0), (0.998, 0.02, 22.0), (1.0, 0.03, 18.0))
BETAS, LEAST = (0.9, 0.999), 1e-8


def _steps(library: Kernels, sample: _Sampler) -> Iterator[Case]:
    steps = torch.tensor(STEPS, dtype=torch.float32)
    several = [[sample(count), sample(count), sample(count).square(), sample(count)] for count in (1003, 5)]
    updated = [_updated([x.double() for x in tensors[:3]], tensors[3].double() / 2, STEPS[0]) for tensors in several]
    parameters = [tensors[0].clone() for tensors in several]
    addresses = [[*(x.data_ptr() for x in tensors), len(tensors[0]), row] for row, tensors in enumerate(several)]
    table = torch.tensor(addresses)
    library.adamw(len(addresses), table.data_ptr(), steps.data_ptr(), 0.5, *BETAS, LEAST, 1)
    for ours, expected, before in zip(several, updated, parameters, strict=True):
        yield from _compared("adamw", ours, expected, before)
    width = 21  # whole vectors, and a part of one
    p, m, v = sample(6, width), sample(6, width), sample(6, width).square()
    rows, gradient, moved = torch.tensor([1, 3, 5]), sample(3, width), torch.tensor([0, 1, 2] * 2, dtype=torch.int32)
    dense, before = torch.zeros(6, width, dtype=torch.float64), p.clone()
    dense[rows] = gradient.double() / 2
    expected = [x.double() for x in (p, m, v)]
    for number, step in enumerate(STEPS):
        after = _updated(expected, dense if number == 2 else torch.zeros_like(dense), step)
        pending = (moved <= number)[:, None]
        expected = [new.where(pending, old) for new, old in zip(after, expected, strict=True)]
    places = (p.data_ptr(), m.data_ptr(), v.data_ptr(), moved.data_ptr(), width)
    for chosen, count, g in ((rows.data_ptr(), len(rows), gradient.data_ptr()), (0, len(p), 0)):
        arguments = (*places, chosen, count, steps.data_ptr(), len(STEPS), g, 0.5, *BETAS, LEAST)
        library.adamw_rows(*arguments, 1)
    yield from _compared("adamw_rows", [p, m, v], expected, before)


def _updated(old: list[Tensor], g: Tensor, step: tuple[float, float, float]) -> list[Tensor]:
    (p, m, v), (decay, rate, root) = old, step
    m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
    return [p * decay - m / (v.sqrt() * root + LEAST) * rate, m, v]


def _compared(name: str, ours: list[Tensor], expected: list[Tensor], before: Tensor) -> Iterator[Case]:
    """Compare the update and both moments."""
    yield name, ours[0] - before, expected[0] - before, 1e-3  # rounding of the updated number dominates
    for number in (1, 2):
        yield f"{name}' moments", ours[number], expected[number], SINGLE
