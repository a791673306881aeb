"""Attention over packed rows by the C++ kernels of csrc/attention.cpp, with its gradient and dropout of the weights.

It is the kernel "native" of the table in `heedful.nn.kernels`; `cannot_attend` and `slow_to_attend` return the reasons
against it. `split_qkv` splits the output of a joint projection into q, k and v, so that their gradients need no copy.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from heedful.csrc import Kernels, kernels, unavailable_reason
from heedful.nn.autograd import AutogradContext
from heedful.nn.cpu_ops import DTYPE_CODES, address, empty, random_seed
from heedful.nn.layout import AttentionArgs, DisentangledBias, Layout, cannot_differ

TILE_WIDTH = 32  # bfloat16 values in one row of an AMX tile register


def attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute softmax(scale q k + bias) v of each sequence (Vaswani et al. 2017, section 3.2.1).

    The only bias that the kernels compute is a `DisentangledBias`, without gradients and dropout.

    Args:
        q: Queries, [query rows, H, D], in float32 or bfloat16.
        k: Keys, [key rows, H of keys, D].
        v: Values, [key rows, H of keys, D].
        args: Layout, scale, causal mask, window, bias and dropout; dropout is seeded by torch's global generator.
    """
    q, k, v = _contiguous_heads(q), _contiguous_heads(k), _contiguous_heads(v)
    if isinstance(args.bias, DisentangledBias):
        return _disentangled_attention(q, k, v, args, args.bias)
    seed = random_seed() if args.dropout else 0
    result: Tensor = _Attention.apply(q, k, v, args, span_table(args.layout), seed)  # type: ignore[no-untyped-call]
    return result


def cannot_attend(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why the kernels cannot compute a call, or an empty string."""
    if q.device.type != "cpu":
        return "it runs on the CPU only"
    if q.dtype not in DTYPE_CODES or not q.dtype == k.dtype == v.dtype:
        return f"it computes in float32 and bfloat16, not in {q.dtype}"
    if args.bias is not None and not isinstance(args.bias, DisentangledBias):
        return "it takes a DisentangledBias only"
    if args.scale < 0:
        return "it finds the largest logit before it scales: scale must be 0 or more"
    if args.dropout >= 1:
        return "a dropout probability of 1 drops all weights"
    if args.layout.cached(("overlapping keys",), lambda: _keys_overlap(args.layout)):
        return "several sequences have the same keys, whose gradients it would not sum"
    library = kernels()
    if library is None:
        return f"there are no kernels: {unavailable_reason()}"
    if q.dtype == torch.bfloat16 and not library.has_bfloat16:
        return "this processor does not multiply bfloat16"
    if q.shape[-1] % library.lanes:
        return f"its head widths are multiples of {library.lanes}, not {q.shape[-1]}"
    if isinstance(args.bias, DisentangledBias) and (reason := _cannot_disentangle(q, k, v, args, args.bias, library)):
        return reason
    return cannot_differ(k, v)


def slow_to_attend(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why another kernel is preferred, or an empty string.

    The rule is fixed, not measured on this machine, so that equal seeds give equal bits.
    """
    if args.preferred == "native":
        return ""
    if q.dtype != torch.bfloat16 or not torch.cpu.get_capabilities().get("amx_bf16"):
        return ""
    if args.bias is not None:
        return ""
    library = kernels()
    if library is not None and not library.has_tiles:
        return "PyTorch's products use AMX here, and its own do not: the compiler or the operating system lacks AMX"
    if q.shape[-1] % TILE_WIDTH:
        return f"PyTorch's products use AMX here, and its own only where head widths are multiples of {TILE_WIDTH}"
    return ""


class _PositionIndexes(NamedTuple):
    """The indexes of a `DisentangledBias` in the form that the kernel reads, or why it cannot read them."""

    source: Int[Tensor, " distances"]  # the original indexes; a reference, because their id is the key in the cache
    both_ways: Int[Tensor, "2 more_distances"]  # ascending and descending, int32, padded by repeating the end values
    embeddings: int  # smallest number of position embeddings that has all indexes
    problem: str  # why the kernel cannot read the indexes, or an empty string


def _position_indexes(indexes: Int[Tensor, " distances"], layout: Layout, margin: int) -> _PositionIndexes:
    """Check the indexes of a `DisentangledBias`, and convert them for the kernel; cached with the layout.

    The kernel does not check indexes itself: a wrong one would read memory outside of the embeddings.

    Args:
        indexes: Row of the embeddings for each distance from -reach to reach.
        layout: The layout of the call.
        margin: Number of distances by which the indexes are padded at both ends.
    """

    def make() -> _PositionIndexes:
        steps, max_length = indexes.diff(), max((n for n, _ in layout.sizes()), default=0)
        distance_count = 2 * max_length - 1  # in the longest sequence
        if len(indexes) % 2 == 0 or len(indexes) < distance_count:
            problem = f"{len(indexes)} distances have indexes, and a sequence of {max_length} rows has {distance_count}"
        elif indexes[0] < 0 or not ((steps == 0) | (steps == 1)).all():
            problem = "indexes of relative positions must start at 0 or more and ascend in steps of 0 or 1"
        else:
            max_distance = len(indexes) // 2
            distances = torch.arange(-max_distance - margin, max_distance + margin + 1, device="cpu")
            ascending = indexes[distances.clamp(-max_distance, max_distance) + max_distance].int()
            both_ways = torch.stack([ascending, ascending.flip(0)])
            return _PositionIndexes(indexes, both_ways, int(indexes[-1]) + 1, "")
        return _PositionIndexes(indexes, indexes.new_empty(2, 0), 0, problem)

    return layout.cached(("relative positions", id(indexes)), make)


def _cannot_disentangle(
    q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, bias: DisentangledBias, library: Kernels
) -> str:
    """Return why the kernel cannot compute disentangled attention, or an empty string."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, bias.position_q, bias.position_k)):
        return "it has no backward pass for disentangled attention"
    if args.causal or args.window is not None or args.dropout or args.layout.queries != args.layout.keys:
        return "in its disentangled attention each token attends to its whole sequence, without dropout"
    if k.shape[1] != q.shape[1]:
        return "in its disentangled attention, query heads share no key heads"
    indexes = _position_indexes(bias.indexes, args.layout, 2 * library.lanes)
    if indexes.problem:
        return indexes.problem
    shapes = [tuple(x.shape) for x in (bias.position_q, bias.position_k)]
    if shapes[0] != shapes[1] or shapes[0][1:] != q.shape[1:] or shapes[0][0] < indexes.embeddings:
        return (
            f"projected embeddings are {shapes[0]} and {shapes[1]}; expected at least {indexes.embeddings} of "
            f"{tuple(q.shape[1:])}"
        )
    return ""


def _disentangled_attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, bias: DisentangledBias) -> Tensor:
    """Compute softmax(scale (q k + q K(p) + k Q(p))) v (He et al. 2021, arXiv:2006.03654, section 3.1).

    p is the embedding of query position minus key position. Its products with q and k are computed only for the
    distances that occur in a sequence.
    """
    library = kernels()
    out = empty(*q.shape, dtype=q.dtype)
    spans = span_table(args.layout)
    assert library is not None
    position_q = bias.position_q.to(q.dtype).contiguous()
    position_k = bias.position_k.to(q.dtype).contiguous()
    indexes = _position_indexes(bias.indexes, args.layout, 2 * library.lanes).both_ways
    sizes = (len(spans), q.shape[1], q.shape[2], address(spans))
    rows = (address(q), q.stride(0), address(k), k.stride(0), address(v), v.stride(0))
    positions = (address(position_q), address(position_k), len(position_k), address(indexes), bias.reach)
    output = (address(out), out.stride(0), torch.get_num_threads())
    library.disentangled_attention(*sizes, *rows, args.scale, DTYPE_CODES[q.dtype], *positions, *output)
    return out


def span_table(layout: Layout) -> Int[Tensor, "sequences 4"]:
    """Return the query span and the key span of each sequence: start, stop, start, stop; cached with the layout."""

    def make() -> Tensor:
        spans = [[*queries, *keys] for queries, keys in zip(layout.queries, layout.keys, strict=True)]
        return torch.tensor(spans, dtype=torch.int64, device="cpu")

    return layout.cached(("spans",), make)


def _keys_overlap(layout: Layout) -> bool:
    """Return whether two sequences share key rows."""
    spans = sorted((first, last) for first, last in layout.keys if first < last)
    return any(last > next_first for (_, last), (next_first, _) in pairwise(spans))


def _contiguous_heads(x: Tensor) -> Tensor:
    """Return x with adjacent heads in each row and an even stride between rows; x is copied if necessary."""
    is_readable = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 2 == 0
    return x if is_readable else x.contiguous()


class _Attention(torch.autograd.Function):
    """Attention without a bias, softmax(scale q k) v.

    The backward pass recomputes the weights from the log-sum-exp of each query's logits (Dao et al. 2022,
    "FlashAttention", section 3.1).
    """

    @staticmethod
    def forward(
        context: AutogradContext, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, spans: Tensor, seed: int
    ) -> Tensor:
        library = kernels()
        out = empty(*q.shape, dtype=q.dtype)
        assert library is not None
        log_sums = empty(*q.shape[:2]) if any(context.needs_input_grad) else None
        outputs = (address(out), out.stride(0), address(log_sums))
        library.attention(*_common_arguments(q, k, v, args, spans, seed), *outputs, torch.get_num_threads())
        if log_sums is not None:
            context.save_for_backward(q, k, v, out, log_sums)
            context.call = args, spans, seed
        return out

    @staticmethod
    @once_differentiable
    def backward(context: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = context.saved_tensors
        args, spans, seed = context.call
        library = kernels()
        dout = gradients[0].contiguous()
        assert library is not None
        (_, heads, width), kv_heads = q.shape, k.shape[1]
        writes_all = len(q) == len(k) == sum(m for _, m in args.layout.sizes())
        allocate = torch.empty if writes_all else torch.zeros  # keys that belong to no sequence have gradient 0
        # gradients adjacent in memory, as `_SplitQkv` returns them without a copy
        dqkv = allocate((max(len(q), len(k)), heads + 2 * kv_heads, width), dtype=q.dtype, device="cpu")
        dq, dk, dv = dqkv.split((heads, kv_heads, kv_heads), 1)
        dq, dk, dv = dq[: len(q)], dk[: len(k)], dv[: len(k)]
        library.attention_gradient(
            *_common_arguments(q, k, v, args, spans, seed),
            address(out),
            out.stride(0),
            address(log_sums),
            address(dout),
            dout.stride(0),
            address(dq),
            address(dk),
            address(dv),
            dqkv.stride(0),
            torch.get_num_threads(),
        )
        return dq, dk, dv, None, None, None


def _common_arguments(
    q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, spans: Tensor, seed: int
) -> tuple[int | float, ...]:
    """Return the first arguments of the C++ functions `attention` and `attention_gradient`."""
    window = -1 if args.window is None else args.window
    rows = (address(q), q.stride(0), address(k), k.stride(0), address(v), v.stride(0))
    sizes = (len(spans), q.shape[1], k.shape[1], q.shape[2], address(spans))
    return (*sizes, *rows, args.scale, args.causal, window, args.dropout, seed, DTYPE_CODES[q.dtype])


class _SplitQkv(torch.autograd.Function):
    """Split rows into views q, k and v; the backward pass copies nothing if their gradients are adjacent in memory."""

    @staticmethod
    def forward(context: AutogradContext, rows: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        return _split(rows, heads, kv_heads)

    @staticmethod
    def backward(context: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        dq = gradients[0]
        rows, _, width = dq.shape
        head_counts = [gradient.shape[1] for gradient in gradients]
        row_width, head_bytes = sum(head_counts) * width, width * dq.element_size()
        adjacent = all(
            gradient.stride() == (row_width, width, 1)
            and gradient.data_ptr() == dq.data_ptr() + heads_before * head_bytes
            for gradient, heads_before in zip(gradients, accumulate(head_counts, initial=0), strict=False)
        )
        if adjacent:
            return dq.as_strided((rows, row_width), (row_width, 1)), None, None
        return torch.cat(gradients, 1).flatten(1), None, None


def split_qkv(
    rows: Float[Tensor, "rows all_three"], heads: int, kv_heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows of adjacent q, k and v into three tensors [rows, heads, head dimension], without a copy.

    Args:
        rows: Output of the joint projection: the heads of q, then those of k, then those of v.
        heads: Number of heads of q.
        kv_heads: Number of heads of k and of v. If None, `heads`.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if torch.compiler.is_compiling() or not (rows.requires_grad and torch.is_grad_enabled()):
        return _split(rows, heads, kv_heads)
    q, k, v = _SplitQkv.apply(rows, heads, kv_heads)  # type: ignore[no-untyped-call]
    return q, k, v


def _split(rows: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = rows.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), 1)
    return q, k, v
