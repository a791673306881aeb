"""Whether a library computes what it should, here and now: a moment of small examples against PyTorch's operators.

One thread computes them: on a busy machine each start of another takes longer than all of them.
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
SINGLE, HALF = 1e-4, 3e-2  # of the largest number, so much may be off

Case = tuple[str, Tensor, Tensor, float]  # what it is, ours, PyTorch's, and by how much they may differ


def find_error(found: Kernels) -> str:
    """What is off, and by how much; nothing where all is as it should be."""
    # the first to ask may be in the middle of anything
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad():
        return next(filter(None, map(_off, _all(found))), "")


def _off(case: Case) -> str:
    name, mine, theirs, most = case
    off = float((mine.float() - theirs.float()).abs().max() / theirs.abs().max())
    return "" if off < most else f"{name} is off by {off:.1e}"


def _all(found: Kernels) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16) if found.has_bfloat16 else (torch.float32,):
        for cases in (_linears, _rows, _scores, _attentions):
            for name, mine, theirs in cases(found, _Draw(dtype)):
                most = SINGLE if dtype == torch.float32 else HALF
                yield f"{name} in {str(dtype).removeprefix('torch.')}", mine, theirs, most
    yield from _steps(found, _Draw(torch.float32))
    yield from _whole_numbers(found, _Draw(torch.float32))
    if found.has_bfloat16:
        yield _block(found, _Draw(torch.bfloat16))


class _Draw:
    """Draws numbers of one kind, the same each time."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(1), dtype

    def __call__(self, *shape: int) -> Tensor:
        return self.single(*shape).to(self.dtype)

    def single(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32)


def _half(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def _room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What was not written is no number, whatever lay there before."""
    return torch.full(shape, torch.nan, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


# -- linear layers ----------------------------------------------------------------------------------------------


def _linears(found: Kernels, draw: _Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, dy, weight, bias = draw(ROWS, WIDTH), draw(ROWS, 2 * WIDTH), draw(2 * WIDTH, WIDTH), draw.single(2 * WIDTH)
    wide = x.float(), dy.float(), weight.float()
    yield "linear", _linear(found, x, weight, bias), _affine(wide[0], wide[2], bias)
    yield "linear backwards", _linear(found, dy, weight, None, turned=False), _times(wide[1], wide[2].T)
    dw, db = _weight_gradient(found, dy, x)
    yield "weight_gradient", dw, _times(wide[1].T, wide[0].T)
    yield "weight_gradient of the bias", db, wide[1].sum(0)


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """x W', by operators that start no threads at such a size: on a busy machine each start takes time."""
    return torch.stack([(row * weight).sum(-1) for row in x])


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _times(x, weight) + bias


def _packed(found: Kernels, weight: Tensor, *, turned: bool = True) -> Tensor:
    (rows, columns), half = weight.shape, _half(weight)
    sides = (rows, columns) if turned else (columns, rows)
    right = _room(found.packed_words(*sides, 1 + half), dtype=torch.int32)
    found.pack(weight.data_ptr(), not half, rows, columns, turned, half, right.data_ptr(), 1)
    return right


def _linear(found: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, *, turned: bool = True) -> Tensor:
    (count, depth), half, columns = x.shape, _half(x), weight.shape[0 if turned else 1]
    right, y = _packed(found, weight, turned=turned), _room(count, columns, dtype=x.dtype)
    given = (x.data_ptr(), depth, count, right.data_ptr(), depth, columns, _at(bias), False, half, not half)
    found.linear(*given, y.data_ptr(), 1)
    return y


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _weight_gradient(found: Kernels, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    (count, columns), width, half = dy.shape, x.shape[1], _half(x)
    space = _room(found.packed_words(width, count, 1 + half), dtype=torch.int32)
    dw, db = _room(columns, width), _room(columns)
    sides = (dy.data_ptr(), columns, x.data_ptr(), width, width, count, half)
    found.weight_gradient(*sides, space.data_ptr(), dw.data_ptr(), db.data_ptr(), 1)
    return dw, db


def _whole_numbers(found: Kernels, draw: _Draw) -> Iterator[Case]:
    x, columns = draw(ROWS, WIDTH), 32
    whole, scales = _room(ROWS, WIDTH, dtype=torch.uint8), _room(ROWS, 2)
    found.round_rows(x.data_ptr(), WIDTH, ROWS, WIDTH, 0, whole.data_ptr(), scales.data_ptr(), 1)
    yield "round_rows", whole * scales[:, :1] + scales[:, 1:], x, 1e-2
    if not found.has_int8:
        return
    weight = (40 * draw(columns, WIDTH)).clamp(-127, 127).to(torch.int8)
    of_weight, sums, bias = draw(columns).abs() / 100, weight.float().sum(1), draw(columns)
    panels, y = _room(found.packed_words(columns, WIDTH, 4), dtype=torch.int32), _room(ROWS, columns)
    found.pack8(weight.data_ptr(), columns, WIDTH, panels.data_ptr(), 1)
    right = (panels.data_ptr(), WIDTH, columns, of_weight.data_ptr(), sums.data_ptr(), bias.data_ptr())
    found.linear8(whole.data_ptr(), scales.data_ptr(), ROWS, *right, False, 0, y.data_ptr(), 1)
    given = whole * scales[:, :1] + scales[:, 1:]
    yield "linear8", y, _affine(given, weight * of_weight[:, None], bias), SINGLE


# -- row by row -------------------------------------------------------------------------------------------------


def _rows(found: Kernels, draw: _Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, dy = draw(ROWS, WIDTH), draw(ROWS, WIDTH)
    yield "gelu", _gelu(found, x), F.gelu(x.float())
    dx = _room(*x.shape, dtype=x.dtype)
    found.gelu_gradient(x.data_ptr(), dy.data_ptr(), x.numel(), _half(x), dx.data_ptr(), 1)
    yield "gelu_gradient", dx, torch.ops.aten.gelu_backward(dy.float(), x.float())
    y, gain, bias, dz = 1 + draw(ROWS, WIDTH).abs(), draw.single(WIDTH), draw.single(WIDTH), draw.single(ROWS, WIDTH)
    for p in (0.0, 0.25):
        yield from _norms(found, x, y, gain, bias, dz, p)


def _gelu(found: Kernels, x: Tensor) -> Tensor:
    y = _room(*x.shape, dtype=x.dtype)
    found.gelu(x.data_ptr(), x.numel(), _half(x), y.data_ptr(), 1)
    return y


def _norms(
    found: Kernels, x: Tensor, y: Tensor, gain: Tensor, bias: Tensor, dz: Tensor, p: float
) -> Iterator[tuple[str, Tensor, Tensor]]:
    half, z, kept, moments = _half(x), _room(*x.shape, dtype=x.dtype), _room(*x.shape), _room(len(x), 2)
    rows = [part for each in (x, y, z) for part in (each.data_ptr(), half)]
    more = (kept.data_ptr(), moments.data_ptr(), 1)
    found.add_norm(*x.shape, EPS, gain.data_ptr(), bias.data_ptr(), p, 5, *rows, *more)
    stays = ((kept - x.float()) / y.float() > 0.5).float()
    yield from _share(stays, p)
    factors = stays / (1 - p)
    s = x.float() + factors * y.float()
    normed, scale = _normed(s)
    yield "add_norm", z, normed * gain + bias
    dx, dy, gains, parts = (
        _room(*x.shape),
        _room(*x.shape, dtype=x.dtype),
        _room(2, WIDTH),
        _room(-(-ROWS // 32), 2, WIDTH),
    )
    given = [each.data_ptr() for each in (kept, moments, dz, dx, dy)]
    found.add_norm_gradient(*x.shape, EPS, gain.data_ptr(), p, 5, *given, half, gains.data_ptr(), parts.data_ptr(), 1)
    slope = dz * gain
    level, along = slope.mean(-1, keepdim=True), (slope * normed).mean(-1, keepdim=True)
    ds = (slope - level - normed * along) * scale
    yield "add_norm_gradient", dx, ds
    yield "add_norm_gradient of what is added", dy, ds * factors
    yield "add_norm_gradient of the gain", gains, torch.stack([(dz * normed).sum(0), dz.sum(0)])


def _normed(s: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of mean 0 and variance 1, and what they were multiplied by."""
    around = s - s.mean(-1, keepdim=True)
    scale = (around.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return around * scale, scale


def _share(stays: Tensor, p: float) -> Iterator[tuple[str, Tensor, Tensor]]:
    """About a share p is dropped, of a few hundred."""
    yield "dropout", 1 + (4 * (1 - stays.mean())).round(), torch.full((), 1 + 4 * p)


def _scores(found: Kernels, draw: _Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    scores = 3 * draw(ROWS, 37)
    targets, gradients, losses = torch.arange(ROWS), _room(*scores.shape, dtype=scores.dtype), _room(ROWS)
    given = (scores.data_ptr(), *scores.shape, targets.data_ptr(), _half(scores))
    found.cross_entropy(*given, gradients.data_ptr(), losses.data_ptr(), 1)
    logs = scores.float().log_softmax(-1)
    yield "cross_entropy", losses, -logs[targets, targets]
    yield "cross_entropy's gradient", gradients, logs.exp() - torch.eye(*scores.shape, dtype=torch.float32)


# -- attention --------------------------------------------------------------------------------------------------


def _attentions(found: Kernels, draw: _Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    width = WIDTH // HEADS
    q, k, v = draw(ROWS, 3, HEADS, width).unbind(1)
    dout, place = draw(ROWS, HEADS, width), torch.arange(ROWS)
    eye = torch.eye(ROWS, width, dtype=q.dtype)[:, None].expand(-1, HEADS, -1).contiguous()
    spans, gap = torch.tensor(SPANS), place - place[:, None]
    together = (place < SPANS[0][1]) == (place < SPANS[0][1])[:, None]
    one, other, third, slope = q.float()[:, None], k.float()[None], v.float()[None], dout.float()[:, None]
    for causal, window, p in ((False, -1, 0.0), (True, 5, 0.25)):
        sees = (together & ((gap <= 0) & (gap >= -window) if causal else True))[..., None]  # queries, keys, heads
        how = (causal, window, p, 7, _half(q))
        # of values that are unit vectors, the result is the weights
        kept = _attention(found, q, k, eye, spans, how)[0][..., :ROWS].transpose(1, 2) > 0
        yield from _share(kept[sees.expand_as(kept)].float(), p)
        factors = kept.float() / (1 - p)
        weights = (0.2 * (one * other).sum(-1)).masked_fill(~sees, -torch.inf).softmax(1)
        dropped = weights * factors
        out, sums, given = _attention(found, q, k, v, spans, how)
        yield "attention", out, (dropped[..., None] * third).sum(1)
        made = _room(ROWS, 3, HEADS, width, dtype=q.dtype)
        to = [each.data_ptr() for each in made.unbind(1)]
        found.attention_gradient(
            *given, out.data_ptr(), WIDTH, sums.data_ptr(), dout.data_ptr(), WIDTH, *to, 3 * WIDTH, 1
        )
        slopes = factors * (slope * third).sum(-1)
        slopes = 0.2 * (weights * (slopes - (weights * slopes).sum(1, keepdim=True)))[..., None]
        theirs = ((slopes * other).sum(1), (slopes * one).sum(0), (dropped[..., None] * slope).sum(0))
        for name, mine, expected in zip("qkv", made.unbind(1), theirs, strict=True):
            yield f"attention_gradient of {name}", mine, expected


def _attention(
    found: Kernels, q: Tensor, k: Tensor, v: Tensor, spans: Tensor, how: tuple[Any, ...]
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """The result, the logarithms of sums, and what the gradient is to be given."""
    out, sums = _room(*q.shape, dtype=q.dtype), _room(*q.shape[:2])
    lines = [part for each in (q, k, v) for part in (each.data_ptr(), each.stride(0))]
    given = (len(spans), HEADS, q.shape[2], spans.data_ptr(), *lines, 0.2, *how)
    found.attention(*given, out.data_ptr(), out.stride(0), sums.data_ptr(), 1)
    return out, sums, given


def _block(found: Kernels, draw: _Draw) -> Case:
    """All of a block, without whole numbers."""
    x, spans = draw(ROWS, WIDTH), torch.tensor(SPANS)
    sides = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
    weights = [draw(columns, depth) / depth**0.5 for depth, columns in sides]
    biases, gains = [draw.single(columns) for _, columns in sides], draw.single(2, 2, WIDTH)
    panels = [_packed(found, each) for each in weights]
    parts = [
        struct.pack("7q", right.data_ptr(), bias.data_ptr(), 0, 0, *side, number == 2)
        for number, (right, bias, side) in enumerate(zip(panels, biases, sides, strict=True))
    ]
    parts += [struct.pack("2qd", *(each.data_ptr() for each in pair), EPS) for pair in gains]
    described = torch.frombuffer(bytearray(b"".join(parts) + struct.pack("2qd", HEADS, 0, 0.2)), dtype=torch.uint8)
    z, place = _room(*x.shape, dtype=x.dtype), described.data_ptr()
    space = _room(found.block_space(place, ROWS), dtype=torch.uint8)
    given = (place, x.data_ptr(), ROWS, len(spans), spans.data_ptr(), -1)
    found.block(*given, z.data_ptr(), space.data_ptr(), 1)
    qkv, out, up, down = (
        partial(_affine, weight=weight.float(), bias=bias) for weight, bias in zip(weights, biases, strict=True)
    )
    q, k, v = qkv(x.float()).unflatten(-1, (3, HEADS, -1)).unbind(1)
    mixed = [
        ((0.2 * q[a:b, None] * k[None, a:b]).sum(-1).softmax(1)[..., None] * v[None, a:b]).sum(1) for a, b, *_ in SPANS
    ]
    y = _normed(x.float() + out(torch.cat(mixed).flatten(1)))[0] * gains[0, 0] + gains[0, 1]
    return "block", z, _normed(y + down(F.gelu(up(y))))[0] * gains[1, 0] + gains[1, 1], 2 * HALF


# -- the optimizer ----------------------------------------------------------------------------------------------

STEPS = ((0.999, 0.01, 30.0), (0.998, 0.02, 22.0), (1.0, 0.03, 18.0))  # decay, rate and root of each
BETAS, LEAST = (0.9, 0.999), 1e-8


def _steps(found: Kernels, draw: _Draw) -> Iterator[Case]:
    steps = torch.tensor(STEPS, dtype=torch.float32)
    several = [[draw(count), draw(count), draw(count).square(), draw(count)] for count in (1003, 5)]
    expected = [_moved([each.double() for each in one[:3]], one[3].double() / 2, STEPS[0]) for one in several]
    begun = [each[0].clone() for each in several]
    lines = [[*(each.data_ptr() for each in one), len(one[0]), number] for number, one in enumerate(several)]
    lined = torch.tensor(lines)
    found.adamw(len(lines), lined.data_ptr(), steps.data_ptr(), 0.5, *BETAS, LEAST, 1)
    for mine, theirs, before in zip(several, expected, begun, strict=True):
        yield from _compared("adamw", mine, theirs, before)
    width = 21  # whole vectors, and a part of one
    p, m, v = draw(6, width), draw(6, width), draw(6, width).square()
    rows, gradient, moved = torch.tensor([1, 3, 5]), draw(3, width), torch.tensor([0, 1, 2] * 2, dtype=torch.int32)
    whole, begun_rows = torch.zeros(6, width, dtype=torch.float64), p.clone()
    whole[rows] = gradient.double() / 2
    table = [each.double() for each in (p, m, v)]
    for number, step in enumerate(STEPS):
        each = _moved(table, whole if number == 2 else torch.zeros_like(whole), step)
        late = (moved <= number)[:, None]
        table = [new.where(late, old) for new, old in zip(each, table, strict=True)]
    places = (p.data_ptr(), m.data_ptr(), v.data_ptr(), moved.data_ptr(), width)
    for chosen, count, g in ((rows.data_ptr(), len(rows), gradient.data_ptr()), (0, len(p), 0)):
        given = (*places, chosen, count, steps.data_ptr(), len(STEPS), g, 0.5, *BETAS, LEAST)
        found.adamw_rows(*given, 1)
    yield from _compared("adamw_rows", [p, m, v], table, begun_rows)


def _moved(begun: list[Tensor], g: Tensor, step: tuple[float, float, float]) -> list[Tensor]:
    (p, m, v), (decay, rate, root) = begun, step
    m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
    return [p * decay - m / (v.sqrt() * root + LEAST) * rate, m, v]


def _compared(name: str, mine: list[Tensor], theirs: list[Tensor], before: Tensor) -> Iterator[Case]:
    """What it moved by, and both moments."""
    yield name, mine[0] - before, theirs[0] - before, 1e-3  # little of it is left beside the number that moved
    for number in (1, 2):
        yield f"{name}' moments", mine[number], theirs[number], SINGLE
