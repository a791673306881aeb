"""Whether a library computes what it should, here and now: a moment of small examples against PyTorch's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from heedful.native.library import Kernels

WIDTH, ROWS, HEADS = 64, 21, 2


def wrong(found: Kernels) -> str:
    """What is off, and by how much; nothing where all is as it should be."""
    # the first to ask may be in the middle of anything
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad():
        return _wrong(found)


def _wrong(found: Kernels) -> str:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    for dtype in (torch.float32, torch.bfloat16) if found.half else (torch.float32,):
        most = 1e-4 if dtype == torch.float32 else 3e-2
        x, weight, bias = normal(ROWS, WIDTH).to(dtype), normal(2 * WIDTH, WIDTH).to(dtype), normal(2 * WIDTH)
        q, k, v = normal(ROWS, 3, HEADS, WIDTH // HEADS).to(dtype).unbind(1)
        for name, mine, theirs in (
            ("linear", _linear(found, x, weight, bias), F.linear(x.float(), weight.float(), bias)),
            ("gelu", _gelu(found, x), F.gelu(x.float())),
            ("add_norm", _add_norm(found, x), F.layer_norm(2 * x.float(), (WIDTH,))),
            ("attention", _attention(found, q, k, v), _softmax(q.float(), k.float(), v.float())),
        ):
            off = float((mine.float() - theirs).abs().max() / theirs.abs().max())
            if not off < most:
                return f"{name} in {str(dtype).removeprefix('torch.')} is off by {off:.1e}"
    return ""


def _half(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def _linear(found: Kernels, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows, columns = weight.shape
    half, y = _half(x), torch.empty(len(x), rows, dtype=x.dtype)
    right = torch.empty(found.packed_words(rows, columns, 1 + half), dtype=torch.int32)
    found.pack(weight.data_ptr(), not half, rows, columns, True, half, right.data_ptr(), 1)
    given = (x.data_ptr(), columns, len(x), right.data_ptr(), columns, rows, bias.data_ptr(), False, half, not half)
    found.linear(*given, y.data_ptr(), 1)
    return y


def _gelu(found: Kernels, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    found.gelu(x.data_ptr(), x.numel(), _half(x), y.data_ptr(), 1)
    return y


def _add_norm(found: Kernels, x: Tensor) -> Tensor:
    z, ones = torch.empty_like(x), torch.ones(WIDTH, dtype=torch.float32)
    rows = [part for each in (x, x, z) for part in (each.data_ptr(), _half(x))]
    found.add_norm(*x.shape, 1e-5, ones.data_ptr(), 0, 0.0, 0, *rows, 0, 0, 1)
    return z


def _attention(found: Kernels, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, spans = torch.empty(q.shape, dtype=q.dtype), torch.tensor([0, ROWS, 0, ROWS])
    lines = [part for each in (q, k, v) for part in (each.data_ptr(), each.stride(0))]
    size = (1, HEADS, q.shape[2], spans.data_ptr())
    found.attention(*size, *lines, 0.2, False, -1, 0.0, 0, _half(q), out.data_ptr(), out.stride(0), 0, 1)
    return out


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("hij,jhd->ihd", torch.einsum("ihd,jhd->hij", 0.2 * q, k).softmax(-1), v)
