"""Attention of packed rows by the kernels in C++, with its gradient and dropout of the weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from heedful.csrc import kernels, unavailable_reason
from heedful.nn.cpu_ops import DTYPE_CODES, address, draw_seed, empty, needs_grad
from heedful.nn.layout import AttentionArgs, Layout, cannot_differ


def attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
    """softmax(scale q k) v of each sequence, with dropout of the weights."""
    where = span_table(call.layout)
    q, k, v = (_in_lines(each) for each in (q, k, v))
    seed = draw_seed() if call.dropout else 0
    if not needs_grad(q, k, v):
        return _attention(q, k, v, call, where, seed, None)
    mixed: Tensor = _Attention.apply(q, k, v, call, where, seed)  # type: ignore[no-untyped-call]
    return mixed


def _attention(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, where: Tensor, seed: int, sums: Tensor | None
) -> Tensor:
    found, out = kernels(), empty(*q.shape, dtype=q.dtype)
    assert found is not None
    given = _given(q, k, v, call, where, seed)
    found.attention(*given, address(out), out.stride(0), address(sums), torch.get_num_threads())
    return out


def cannot_attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    """Why not, or nothing."""
    if q.device.type != "cpu":
        return "it runs on the CPU only"
    if q.dtype not in DTYPE_CODES or not q.dtype == k.dtype == v.dtype:
        return f"it computes in float32 and bfloat16, not in {q.dtype}"
    if call.bias is not None:
        return "it adds no bias"
    if call.scale < 0:
        return "its greatest score is that of the greatest product: scale is to be 0 or more"
    if call.dropout >= 1:
        return "with dropout of 1 nothing is left"
    if call.layout.cached(("shares",), lambda: _shares(call.layout)):
        return "several sequences have the same keys, whose gradients it would not sum"
    found = kernels()
    if found is None:
        return f"there are no kernels: {unavailable_reason()}"
    if q.dtype == torch.bfloat16 and not found.has_bfloat16:
        return "this processor does not multiply bfloat16"
    if q.shape[-1] % found.lanes:
        return f"its heads are whole multiples of {found.lanes} wide, not {q.shape[-1]}"
    return cannot_differ(k, v)


def slow_to_attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    """Why another kernel is preferred, or nothing; a rule and no measurement, so that a seed gives the same bits."""
    if call.preferred == "native":
        return ""
    if q.dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16"):
        return "PyTorch's products have AMX here, and its own have not"
    return ""


def span_table(layout: Layout) -> Int[Tensor, "sequences 4"]:
    """First query, last, first key and last of each sequence."""

    def make() -> Tensor:
        return torch.tensor(
            [[*a, *b] for a, b in zip(layout.queries, layout.keys, strict=True)], dtype=torch.int64, device="cpu"
        )

    found: Tensor = layout.cached(("spans",), make)
    return found


def _shares(layout: Layout) -> bool:
    seen = sorted((first, last) for first, last in layout.keys if first < last)
    return any(one[1] > other[0] for one, other in pairwise(seen))


def _in_lines(x: Tensor) -> Tensor:
    """Heads side by side in a row, rows a whole number of words apart."""
    fits = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 2 == 0
    return x if fits else x.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, where: Tensor, seed: int) -> Tensor:
        sums = empty(*q.shape[:2])
        out = _attention(q, k, v, call, where, seed, sums)
        context.save_for_backward(q, k, v, out, sums)
        context.more = call, where, seed
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = context.saved_tensors
        call, where, seed = context.more
        found, dout = kernels(), gradients[0].contiguous()
        assert found is not None
        rows, (_, heads, width) = max(len(q), len(k)), q.shape
        covered = len(q) == len(k) == sum(m for _, m in call.layout.sizes())
        made = torch.empty if covered else torch.zeros  # keys of no sequence get none
        every = made((rows, 3, heads, width), dtype=q.dtype, device="cpu")
        dq, dk, dv = every[: len(q), 0], every[: len(k), 1], every[: len(k), 2]
        found.attention_gradient(
            *_given(q, k, v, call, where, seed),
            address(out),
            out.stride(0),
            address(sums),
            address(dout),
            dout.stride(0),
            address(dq),
            address(dk),
            address(dv),
            3 * heads * width,
            torch.get_num_threads(),
        )
        return dq, dk, dv, None, None, None


def _given(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, where: Tensor, seed: int) -> tuple[Any, ...]:
    reach = -1 if call.window is None else call.window
    lines = (address(q), q.stride(0), address(k), k.stride(0), address(v), v.stride(0))
    size = (len(where), q.shape[1], q.shape[2], address(where))
    return (*size, *lines, call.scale, call.causal, reach, call.dropout, seed, DTYPE_CODES[q.dtype])


class _Parts(torch.autograd.Function):
    """Queries, keys and values of rows that hold all three; gradients that lie like these become one without a copy."""

    @staticmethod
    def forward(context: Any, rows: Tensor, heads: int) -> tuple[Tensor, ...]:
        q, k, v = rows.unflatten(-1, (3, heads, -1)).unbind(1)
        return q, k, v

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first = gradients[0]
        count, heads, width = first.shape
        apart = heads * width * first.element_size()
        lie = all(
            each.stride() == (3 * heads * width, width, 1) and each.data_ptr() == first.data_ptr() + number * apart
            for number, each in enumerate(gradients)
        )
        if lie:
            return first.as_strided((count, 3 * heads * width), (3 * heads * width, 1)), None
        return torch.stack(gradients, 1).flatten(1), None


def split_qkv(rows: Float[Tensor, "rows all_three"], heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, [rows, heads, width] each, of rows that have them side by side."""
    if not (rows.requires_grad and torch.is_grad_enabled()):
        q, k, v = rows.unflatten(-1, (3, heads, -1)).unbind(1)
    else:
        q, k, v = _Parts.apply(rows, heads)  # type: ignore[no-untyped-call]
    return q, k, v
