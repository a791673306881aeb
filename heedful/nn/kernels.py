"""Fast attention over packed rows: sequences are arranged in blocks, and a block is a few dense matrix products.

A plan moves the rows of all sequences into blocks of R lines of Sq query places and Sk key places (several short
sequences share a line; the scores between them are forbidden), and says where each row's result is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from heedful.nn.cpu_attention import attention, cannot_attend, slow_to_attend
from heedful.nn.dropout import dropout
from heedful.nn.layout import AttentionArgs, DenseBias, Layout, RelativeBias, Span, allowed_pairs, cannot_differ
from heedful.nn.packing import RowIndex, pack_index, pack_rows, unpack_index, unpack_rows

Line = list[int]  # the numbers of the sequences that share a line, in order
Run = Callable[[Tensor, Tensor, Tensor, AttentionArgs], Tensor]
Verdict = Callable[[Tensor, Tensor, Tensor, AttentionArgs], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One way to compute attention; `cannot` and `slow` give a reason why not to take it for a call, or nothing."""

    name: str
    run: Run
    cannot: Verdict = lambda q, k, v, call: ""
    slow: Verdict = lambda q, k, v, call: ""  # it could, but another is faster


# -- plans ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """R lines of sequences that are attended to at once."""

    lines: list[Line]
    shape: tuple[int, int, int]  # R, Sq, Sk
    mask: Float[Tensor, "lines 1 queries keys"] | None  # 0 or -inf, added to the scores; None: all pairs count
    distances: Int[Tensor, "lines queries keys"] | None  # key place minus query place, where a bias needs it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """How the rows of a layout are arranged; moves and result are None where places are rows."""

    blocks: list[Block]
    queries: RowIndex | None
    keys: RowIndex | None
    result: (
        RowIndex | None
    )  # at which place each query row's result lies (after the last: zeros), and whose each place is


def share_lines(layout: Layout, widths: tuple[int, ...] = (64, 128), budget: int = 1 << 16) -> Iterable[list[Line]]:
    """Several short sequences to a line of the first width that holds them; the others beside those of their size.

    A block has at most `budget` scores a head, unless one line has more.
    """
    sizes = layout.sizes()
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (n, m) in enumerate(sizes):
        width = next((width for width in widths if n == m <= width), 0)
        groups[(width, width) if width else (-(-n // 16) * 16, -(-m // 16) * 16)].append(number)
    for (n, m), numbers in sorted(groups.items()):
        lines = best_fit(numbers, [n for n, _ in sizes], n) if n == m and n in widths else [[each] for each in numbers]
        count = max(1, budget // max(1, n * m))
        yield from (lines[start : start + count] for start in range(0, len(lines), count))


def best_fit(numbers: list[int], lengths: list[int], width: int) -> list[Line]:
    """Best-fit-decreasing bin packing: each sequence goes to the fullest line that still has room for it."""
    lines: list[Line] = []
    with_room: list[list[int]] = [[] for _ in range(width + 1)]
    for number in sorted(numbers, key=lambda each: -lengths[each]):
        length = lengths[number]
        room = next((free for free in range(length, width + 1) if with_room[free]), None)
        if room is None:
            lines.append([])
            room, line = width, len(lines) - 1
        else:
            line = with_room[room].pop()
        lines[line].append(number)
        with_room[room - length].append(line)
    return lines


def make_plan(call: AttentionArgs, arrange: Callable[[Layout], Iterable[list[Line]]], q: Tensor, k: Tensor) -> Plan:
    """Turn an arrangement of sequences into places, masks and moves."""
    blocks, q_rows, k_rows, seen = [], [], [], []
    for lines in arrange(call.layout):
        of, to = _place(call.layout.queries, lines), _place(call.layout.keys, lines)
        sees = _sees(call, lines, of, to)
        blocks.append(_block(call, lines, of, to, sees, q))
        q_rows.append(of.rows.ravel())
        k_rows.append(to.rows.ravel())
        seen.append(sees.any(-1).ravel())
    places = np.concatenate([*q_rows, np.empty(0, np.int64)])
    result = np.full(len(q), len(places))  # a query without a key: the zeros after the last place
    real = (places >= 0) & np.concatenate([*seen, np.empty(0, bool)])
    result[places[real]] = np.flatnonzero(real)
    return Plan(
        blocks=blocks,
        queries=pack_index(places, len(q), q.device),
        keys=pack_index(np.concatenate([*k_rows, np.empty(0, np.int64)]), len(k), q.device),
        result=unpack_index(result, places, real, q.device),
    )


class _Placed(NamedTuple):
    rows: Int[np.ndarray, "lines places"]  # which row lies at a place, -1 for none
    owner: Int[np.ndarray, "lines places"]  # whose it is
    step: Int[np.ndarray, "lines places"]  # where in its sequence, counted from the end


def _place(spans: tuple[Span, ...], lines: list[Line]) -> _Placed:
    width = max(sum(spans[number][1] - spans[number][0] for number in line) for line in lines)
    placed = _Placed(*(np.full((len(lines), width), nothing) for nothing in (-1, -1, 0)))
    for r, line in enumerate(lines):
        at = 0
        for number in line:
            start, stop = spans[number]
            there = slice(at, at + stop - start)
            placed.rows[r, there] = np.arange(start, stop)
            placed.owner[r, there] = number
            placed.step[r, there] = np.arange(start - stop, 0)
            at = there.stop
    return placed


def _sees(call: AttentionArgs, lines: list[Line], of: _Placed, to: _Placed) -> Bool[np.ndarray, "lines queries keys"]:
    sees: Bool[np.ndarray, "lines queries keys"] = of.owner[:, :, None] == to.owner[:, None, :]
    sees &= (of.owner >= 0)[:, :, None]
    if call.causal or call.window is not None:
        sees &= allowed_pairs(torch.from_numpy(to.step[:, None, :] - of.step[:, :, None]), call).numpy()
    if isinstance(call.bias, DenseBias):
        for r, line in enumerate(lines):
            for number in line:
                pairs = np.ix_(of.owner[r] == number, to.owner[r] == number)
                sees[r][pairs] &= (call.bias.blocks[number] > -torch.inf).any(0).cpu().numpy()
    return sees


def _block(
    call: AttentionArgs,
    lines: list[Line],
    of: _Placed,
    to: _Placed,
    sees: Bool[np.ndarray, "lines queries keys"],
    q: Tensor,
) -> Block:
    # a place that sees no key may see all: its result is never read, and nothing becomes NaN
    hidden = torch.from_numpy(~(sees | ~sees.any(-1, keepdims=True)))[:, None]
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf) if hidden.any() else None
    gap = torch.from_numpy(to.step[:, None, :] - of.step[:, :, None]) if isinstance(call.bias, RelativeBias) else None
    return Block(
        lines=lines,
        shape=(len(lines), of.rows.shape[1], to.rows.shape[1]),
        mask=None if mask is None else mask.to(q.device),
        distances=None if gap is None else gap.to(q.device),
    )


# -- running a plan ---------------------------------------------------------------------------------------


def run_plan(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, plan: Plan, core: Core) -> Tensor:
    """Move rows to their places, run the core block by block, and fetch each row's result."""
    q_sizes = [lines * queries for lines, queries, _ in (block.shape for block in plan.blocks)]
    k_sizes = [lines * keys for lines, _, keys in (block.shape for block in plan.blocks)]
    q_parts = pack_rows(q, plan.queries).split(q_sizes)
    k_parts, v_parts = (pack_rows(each, plan.keys).split(k_sizes) for each in (k, v))
    tables = _tables(call, plan, q_sizes)
    results = []
    for block, q_part, k_part, v_part, table in zip(plan.blocks, q_parts, k_parts, v_parts, tables, strict=True):
        lines = block.shape[0]
        if block.shape[1] == 0:
            continue
        if block.shape[2] == 0:
            results.append(q.new_zeros(len(q_part), *v.shape[1:]))
            continue
        heads = [part.unflatten(0, (lines, -1)).transpose(1, 2) for part in (q_part, k_part, v_part)]
        bias = _kept(call, block, table, q.dtype)
        results.append(core(heads[0], heads[1], heads[2], bias, call, block).transpose(1, 2).flatten(0, 1))
    return unpack_rows(results, plan.result) if results else q.new_zeros(len(q), *v.shape[1:])


def _tables(call: AttentionArgs, plan: Plan, sizes: list[int]) -> Iterable[Tensor | None]:
    """A distance table for each block; where every query row has its own, they move as the rows do."""
    if not isinstance(call.bias, RelativeBias):
        return [None] * len(sizes)
    if call.bias.table.ndim == 2:
        return [call.bias.table] * len(sizes)
    tables: Iterable[Tensor] = pack_rows(call.bias.table, plan.queries).split(sizes)
    return tables


def _kept(call: AttentionArgs, block: Block, table: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The same as `_bias`, once for all layers that add the same."""
    if not isinstance(call.bias, RelativeBias) or call.bias.blocks is None:
        return _bias(call, block, table, dtype)
    if block not in call.bias.blocks:
        made = _bias(call, block, table, dtype)
        assert made is not None
        call.bias.blocks[block] = made
    return call.bias.blocks[block]


def _bias(call: AttentionArgs, block: Block, table: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the block's scores, [R or 1, H or 1, Sq, Sk]."""
    match call.bias:
        case None:
            return block.mask
        case DenseBias():
            added = _dense(call.bias, call.layout, block)
        case RelativeBias(reach=reach):
            assert block.distances is not None and table is not None
            place = block.distances.clamp(-reach, reach) + reach
            if table.ndim == 2:
                added = table[:, place].transpose(0, 1)
            else:
                each = table.unflatten(0, block.shape[:2]).transpose(1, 2)  # R H Sq distances
                added = each.gather(-1, place[:, None].expand(-1, each.shape[1], -1, -1))
    added = added.to(dtype)
    return added if block.mask is None else added + block.mask


def _dense(bias: DenseBias, layout: Layout, block: Block) -> Tensor:
    sizes = layout.sizes()
    lines = []
    for line in block.lines:
        diagonal = bias.blocks[line[0]].new_zeros(bias.blocks[line[0]].shape[0], *block.shape[1:])
        i = j = 0
        for number in line:
            n, m = sizes[number]
            each = bias.blocks[number]  # rows of -inf alone are masked elsewhere
            diagonal[:, i : i + n, j : j + m] = each.where((each > -torch.inf).any(-1, keepdim=True), 0.0)
            i, j = i + n, j + m
        lines.append(diagonal)
    return torch.stack(lines)


# -- cores: one block ---------------------------------------------------------------------------------------

Core = Callable[[Tensor, Tensor, Tensor, Tensor | None, AttentionArgs, Block], Tensor]


def bmm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: AttentionArgs, block: Block) -> Tensor:
    """Two batched products around a softmax, where weights can be dropped; in bfloat16 the faster core on a CPU."""
    scores = torch.matmul(q * call.scale, k.transpose(-1, -2))
    if bias is not None:
        scores = scores + bias
    weights = scores.softmax(-1)
    if call.dropout:
        weights = dropout(weights, call.dropout)
    mixed = torch.matmul(weights, v)
    return mixed if not isinstance(call.bias, RelativeBias) else mixed + _values(weights, call.bias, block)


def _values(weights: Tensor, bias: RelativeBias, block: Block) -> Tensor | float:
    """What comes from the distances alone: the weights of each distance summed, times its value, [R, H, Sq, D]."""
    if bias.values is None:
        return 0.0
    assert block.distances is not None
    place = (block.distances.clamp(-bias.reach, bias.reach) + bias.reach)[:, None].expand_as(weights)
    summed = weights.new_zeros(*weights.shape[:-1], len(bias.values)).scatter_add(-1, place, weights)
    return torch.matmul(summed, bias.values)


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: AttentionArgs, block: Block) -> Tensor:
    """PyTorch's fused attention; on a CPU it has no dropout."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=call.scale)


# -- the table ----------------------------------------------------------------------------------------------


def _planned(core: Core) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
        def make() -> Plan:
            return make_plan(call, share_lines, q, k)

        if isinstance(call.bias, DenseBias):  # what it forbids is part of the plan
            return run_plan(q, k, v, call, make(), core)
        key = (call.causal, call.window, q.dtype, q.device, call.bias is None)
        return run_plan(q, k, v, call, call.layout.cached(key, make), core)

    return run


def _lined(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
    """Keys that already lie in lines, one for each sequence, are looked at where they are; one sequence is a line."""
    layout = call.layout
    lines, longest = len(layout.keys), max(m for _, m in layout.sizes())
    stride = layout.stride or longest
    block = layout.cached(("lines", call.causal, call.window, q.dtype, q.device), lambda: _line_block(call, q))
    seen = (q, k[: lines * stride], v[: lines * stride])
    heads = [each.unflatten(0, (lines, -1)).transpose(1, 2) for each in seen]
    bias = _kept(call, block, call.bias.table if isinstance(call.bias, RelativeBias) else None, q.dtype)
    short = layout.stride is None and longest <= SHORT and not _not_fused(q, k, v, call)
    core = fused if short or _products_are_slow(q, k, v, call) else bmm
    mixed = core(heads[0], heads[1][:, :, :longest], heads[2][:, :, :longest], bias, call, block)
    return mixed.transpose(1, 2).flatten(0, 1)


def _line_block(call: AttentionArgs, q: Tensor) -> Block:
    sizes = call.layout.sizes()
    n, longest = sizes[0][0], max(m for _, m in sizes)
    lengths = torch.tensor([m for _, m in sizes])[:, None, None]
    gap = torch.arange(longest) - (lengths - n + torch.arange(n)[:, None])
    hidden = ~(allowed_pairs(gap, call) & (torch.arange(longest) < lengths))[:, None]
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf) if hidden.any() else None
    return Block(
        lines=[[number] for number in range(len(sizes))],
        shape=(len(sizes), n, longest),
        mask=None if mask is None else mask.to(q.device),
        distances=gap.to(q.device),
    )


def _not_lined(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    layout = call.layout
    stride = len(k) if layout.stride is None and len(layout.keys) == 1 else layout.stride
    if stride is None or [start for start, _ in layout.keys] != [line * stride for line in range(len(layout.keys))]:
        return "the keys do not lie in lines of one length"
    if len({n for n, _ in layout.sizes()}) > 1:
        return "sequences have different numbers of queries"
    aligned = call.causal or call.window is not None
    if min(m - n if aligned else m - 1 for n, m in layout.sizes()) < 0:
        return "some queries see no key"
    if isinstance(call.bias, DenseBias) or (isinstance(call.bias, RelativeBias) and call.bias.table.ndim > 2):
        return "it has no bias for each query row"
    return ""


def _varlen(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
    """PyTorch's flash attention over packed rows; its causal mask and window are aligned at the end, as ours."""
    from torch.nn.attention.varlen import varlen_attn

    def bounds(spans: tuple[Span, ...]) -> Tensor:
        return torch.tensor([0, *(stop for _, stop in spans)], dtype=torch.int32, device=q.device)

    layout, reach = call.layout, -1 if call.window is None else call.window
    of, to = layout.cached(("varlen", q.device), lambda: (bounds(layout.queries), bounds(layout.keys)))
    longest = [max((stop - start for start, stop in spans), default=0) for spans in (layout.queries, layout.keys)]
    window = (reach, 0 if call.causal else reach)
    mixed = varlen_attn(q, k, v, of, to, *longest, scale=call.scale, window_size=window)
    assert isinstance(mixed, Tensor)
    return mixed


def _not_varlen(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    if q.device.type != "cuda":
        return "it runs on CUDA only"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {q.dtype}"
    if call.bias is not None or call.dropout:
        return "it has no bias and no dropout"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"its heads are up to 256 wide, in steps of 8, not {q.shape[-1]}"
    return cannot_differ(k, v) or keys_have_gaps(k, call)


def keys_have_gaps(k: Tensor, call: AttentionArgs) -> str:
    """Why rows of keys cannot be given by bounds alone, or nothing: those of no sequence would get no gradient."""
    stops = [0, *(stop for _, stop in call.layout.keys)]
    if [start for start, _ in call.layout.keys] != stops[:-1] or stops[-1] != len(k):
        return "its key rows must follow each other without a gap, and all belong to a sequence"
    return ""


def _not_fused(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    if isinstance(call.bias, RelativeBias) and call.bias.values is not None:
        return "it cannot add a value for each distance"
    return "it has no dropout" if call.dropout else ""


SHORT = 128  # tokens of a text alone up to which what counts is how few operations there are
LONG = 1024  # keys of a sequence above which its scores, heads x n x m, are not written out to save memory


def _products_are_slow(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    if _not_fused(q, k, v, call):
        return ""
    if q.dtype in (torch.float32, torch.float64) and call.preferred != "products":
        return "in float32 and float64 the fused kernel is faster"
    longest = max((m for _, m in call.layout.sizes()), default=0)
    return f"it writes out all scores of a sequence, and one has {longest} keys" if longest > LONG else ""


# the order on a CPU is that of benchmarks/results/attention-2026-11-21.md
KERNELS: tuple[Kernel, ...] = (
    Kernel(name="lined", run=_lined, cannot=_not_lined),
    Kernel(name="varlen", run=_varlen, cannot=_not_varlen),
    Kernel(name="native", run=attention, cannot=cannot_attend, slow=slow_to_attend),
    Kernel(name="products", run=_planned(bmm), slow=_products_are_slow),
    Kernel(name="fused", run=_planned(fused), cannot=_not_fused),
)
