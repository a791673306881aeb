"""Attention kernels over packed rows: sequences are arranged in padded blocks, which dense matrix products compute.

A block is a padded batch of R lines, each with Sq slots for query rows and Sk slots for key rows; slots without a row
are padding. Several short sequences share a line, and the pairs between them are masked. A plan has the indices that
gather packed rows into the slots of blocks, and results from slots to packed rows.

Letters in shapes: R lines, H heads, Sq query slots, Sk key slots, D head dimension.
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
from heedful.packed import send

Line = list[int]  # numbers of the sequences that share a line, in order
KernelFunction = Callable[[Tensor, Tensor, Tensor, AttentionArgs], Tensor]  # q, k, v, arguments -> result
ReasonFunction = Callable[[Tensor, Tensor, Tensor, AttentionArgs], str]  # q, k, v, arguments -> reason, "" for none


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """An implementation of attention, and which calls it can compute."""

    name: str
    run: KernelFunction
    cannot: ReasonFunction = lambda q, k, v, args: ""  # returns why the kernel cannot compute a call
    slow: ReasonFunction = lambda q, k, v, args: ""  # returns why another kernel is preferred for a call
    shares_heads: bool = False  # whether k and v may have fewer heads than q; otherwise their heads are repeated
    has_disentangled_bias: bool = False  # whether it takes a DisentangledBias; otherwise it gets a DenseBias


# -- plans ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelBlock:
    """R lines of sequences whose attention is computed together."""

    lines: list[Line]
    shape: tuple[int, int, int]  # R, Sq, Sk
    mask: Float[Tensor, "lines 1 queries keys"] | None  # 0 or -inf, added to the logits; None: no pair is masked
    distances: Int[Tensor, "lines queries keys"] | None  # key position minus query position; None: no relative bias


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """The arrangement of a layout's rows in blocks; an index is None if slots are the rows in their order."""

    blocks: list[KernelBlock]
    queries: RowIndex | None  # gathers query rows into slots
    keys: RowIndex | None  # gathers key rows into slots
    result: RowIndex | None  # gathers slots into query rows


def share_lines(layout: Layout, widths: tuple[int, ...] = (64, 128), budget: int = 1 << 16) -> Iterable[list[Line]]:
    """Arrange the sequences of a layout in blocks; yields the lines of each block.

    A sequence with as many query rows as key rows shares a line of the smallest width in `widths` that has room for it.
    Any other sequence has a line of its own, in a block of sequences with about its n and m, rounded up to multiples of
    16.

    Args:
        layout: Query rows and key rows of each sequence.
        widths: Widths of shared lines in slots, ascending.
        budget: Largest number of logits of a block, for each head; a block of one line may have more.
    """
    sizes = layout.sizes()
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (n, m) in enumerate(sizes):
        width = next((width for width in widths if n == m <= width), 0)
        groups[(width, width) if width else (-(-n // 16) * 16, -(-m // 16) * 16)].append(number)
    for (n, m), numbers in sorted(groups.items()):
        if n == m and n in widths:
            lines = best_fit(numbers, [n for n, _ in sizes], n)
        else:
            lines = [[number] for number in numbers]
        count = max(1, budget // max(1, n * m))
        yield from (lines[start : start + count] for start in range(0, len(lines), count))


def best_fit(numbers: list[int], lengths: list[int], width: int) -> list[Line]:
    """Pack sequences into lines by best-fit decreasing: the longest first, each into the fullest line with room for it.

    Args:
        numbers: Numbers of the sequences to pack.
        lengths: Length in rows of every sequence, by its number.
        width: Slots of a line.

    >>> best_fit([0, 1, 2, 3], [3, 5, 2, 4], 8)
    [[1, 0], [3, 2]]
    """
    lines: list[Line] = []
    lines_by_room: list[list[int]] = [[] for _ in range(width + 1)]  # numbers of the lines with that many free slots
    for number in sorted(numbers, key=lambda number: -lengths[number]):
        length = lengths[number]
        room = next((free for free in range(length, width + 1) if lines_by_room[free]), None)
        if room is None:
            lines.append([])
            room, line = width, len(lines) - 1
        else:
            line = lines_by_room[room].pop()
        lines[line].append(number)
        lines_by_room[room - length].append(line)
    return lines


def make_plan(args: AttentionArgs, arrange: Callable[[Layout], Iterable[list[Line]]], q: Tensor, k: Tensor) -> Plan:
    """Make the plan of a layout: gather indices and masks.

    Args:
        args: The arguments of attention, with the layout.
        arrange: Yields the lines of each block, as `share_lines` does.
        q: Queries; their count, device and dtype matter.
        k: Keys; their count matters.
    """
    blocks, q_rows, k_rows, sees_key = [], [], [], []
    key_counts = np.array([m for _, m in args.layout.sizes()])
    multiple = CUDA_WIDTH_MULTIPLE if q.device.type == "cuda" else 1
    # in self-attention, slots and indices are computed once for queries and keys
    same_rows = args.layout.queries == args.layout.keys and len(q) == len(k)
    for lines in arrange(args.layout):
        queries = _make_placement(args.layout.queries, lines, multiple)
        keys = queries if same_rows else _make_placement(args.layout.keys, lines, multiple)
        blocks.append(_make_block(args, lines, queries, keys, q))
        q_rows.append(queries.rows.ravel())
        k_rows.append(keys.rows.ravel())
        sees_key.append(_sees_key(args, queries, key_counts).ravel())
    row_of_slot = np.concatenate([*q_rows, np.empty(0, np.int64)])
    result_slot = np.full(len(q), len(row_of_slot))  # a query that sees no key takes the zeros after the last slot
    has_result = (row_of_slot >= 0) & np.concatenate([*sees_key, np.empty(0, bool)])
    result_slot[row_of_slot[has_result]] = np.flatnonzero(has_result)
    query_index = key_index = pack_index(row_of_slot, len(q), q.device)
    if not same_rows:
        key_index = pack_index(np.concatenate([*k_rows, np.empty(0, np.int64)]), len(k), q.device)
    return Plan(
        blocks=blocks,
        queries=query_index,
        keys=key_index,
        result=unpack_index(result_slot, row_of_slot, has_result, q.device),
    )


CUDA_WIDTH_MULTIPLE = 8  # slots of a line on CUDA; the kernels there copy masks of other widths in each layer


class _Placement(NamedTuple):
    """The rows in the slots of a block, either its query rows or its key rows."""

    rows: Int[np.ndarray, "lines slots"]  # row in each slot, -1 for padding
    sequence: Int[np.ndarray, "lines slots"]  # number of the row's sequence, -1 for padding
    position: Int[np.ndarray, "lines slots"]  # position in the sequence, counted from its end: -1 is the last row


def _make_placement(spans: tuple[Span, ...], lines: list[Line], multiple: int = 1) -> _Placement:
    """Assign slots to the rows of each line's sequences, one sequence after the other.

    Args:
        spans: Start and stop of the rows of every sequence.
        lines: Lines of the block.
        multiple: Slots of a line are rounded up to a multiple of this number.
    """
    width = max(sum(spans[number][1] - spans[number][0] for number in line) for line in lines)
    width = -(-width // multiple) * multiple
    placement = _Placement(*(np.full((len(lines), width), padding) for padding in (-1, -1, 0)))
    for r, line in enumerate(lines):
        offset = 0
        for number in line:
            start, stop = spans[number]
            slots = slice(offset, offset + stop - start)
            placement.rows[r, slots] = np.arange(start, stop)
            placement.sequence[r, slots] = number
            placement.position[r, slots] = np.arange(start - stop, 0)
            offset = slots.stop
    return placement


def _sees_key(
    args: AttentionArgs, queries: _Placement, key_counts: Int[np.ndarray, " sequences"]
) -> Bool[np.ndarray, "lines queries"]:
    """Return which slots hold a query that attends to at least one key, by causal mask and window."""
    position = queries.position
    first = -key_counts[queries.sequence] if len(key_counts) else np.zeros_like(position)
    last = np.where(queries.sequence < 0, first - 1, -1)
    if args.window is not None:
        first, last = np.maximum(first, position - args.window), np.minimum(last, position + args.window)
    if args.causal:
        last = np.minimum(last, position)
    sees_key: Bool[np.ndarray, "lines queries"] = first <= last
    return sees_key


def _make_block(
    args: AttentionArgs, lines: list[Line], queries: _Placement, keys: _Placement, q: Tensor
) -> KernelBlock:
    """Make a block; its mask is computed on the device, from the sequence and the position of each slot."""
    max_width = max(queries.rows.shape[1], keys.rows.shape[1])
    hides_pairs = (args.causal and queries.rows.shape[1] > 1) or (
        args.window is not None and args.window < max_width - 1
    )
    first_sequence = queries.sequence[:, :1]
    # whether each line is one sequence without padding
    is_full = bool(first_sequence.size and (first_sequence >= 0).all()) and all(
        (placement.sequence == first_sequence).all() for placement in (queries, keys)
    )
    q_sequence, q_position = k_sequence, k_position = _send_placement(queries, q.device)
    if keys is not queries:
        k_sequence, k_position = _send_placement(keys, q.device)
    distances = k_position[:, None, :] - q_position[:, :, None]
    mask = None
    if hides_pairs or not is_full:
        visible = (q_sequence[:, :, None] == k_sequence[:, None, :]) & (q_sequence >= 0)[:, :, None]
        visible &= allowed_pairs(distances, args)
        # a slot without visible keys sees all keys, so that its softmax is not NaN; its result is never read
        hidden = ~(visible | ~visible.any(-1, keepdim=True))[:, None]
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
    return KernelBlock(
        lines=lines,
        shape=(len(lines), queries.rows.shape[1], keys.rows.shape[1]),
        mask=mask,
        distances=distances if isinstance(args.bias, RelativeBias) else None,
    )


def _send_placement(placement: _Placement, device: torch.device) -> Int[Tensor, "2 lines slots"]:
    """Copy the sequence and the position of each slot to a device, without waiting for the copy to end."""
    return torch.from_numpy(np.stack([placement.sequence, placement.position])).to(device, non_blocking=True)


# -- running a plan ---------------------------------------------------------------------------------------


def run_plan(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, plan: Plan, core: Core) -> Tensor:
    """Compute attention by a plan: gather rows into slots, run the core on each block, and gather the results.

    Args:
        q: Queries, [query rows, H, D].
        k: Keys, [key rows, H, D].
        v: Values, [key rows, H, D of values].
        args: The arguments for which the plan was made.
        plan: The plan.
        core: Attention in one block: `bmm` or `fused`.
    """
    q_sizes = [lines * queries for lines, queries, _ in (block.shape for block in plan.blocks)]
    k_sizes = [lines * keys for lines, _, keys in (block.shape for block in plan.blocks)]
    q_parts = pack_rows(q, plan.queries).split(q_sizes)
    k_parts, v_parts = (pack_rows(rows, plan.keys).split(k_sizes) for rows in (k, v))
    tables = _block_tables(args, plan, q_sizes)
    results = []
    for block, q_part, k_part, v_part, table in zip(plan.blocks, q_parts, k_parts, v_parts, tables, strict=True):
        lines = block.shape[0]
        if block.shape[1] == 0:
            continue
        if block.shape[2] == 0:
            results.append(q.new_zeros(len(q_part), *v.shape[1:]))
            continue
        q_block, k_block, v_block = (  # [R, H, Sq or Sk, D]
            part.unflatten(0, (lines, -1)).transpose(1, 2) for part in (q_part, k_part, v_part)
        )
        if isinstance(args.bias, DenseBias):
            bias, sees_key = _expand_dense(args.bias, args.layout, block, q.dtype)
            result = core(q_block, k_block, v_block, bias, args, block).where(sees_key, 0.0)
        else:
            cached_bias = _cached_bias(args, block, table, q.dtype)
            result = core(q_block, k_block, v_block, cached_bias, args, block)
        results.append(result.transpose(1, 2).flatten(0, 1))
    return unpack_rows(results, plan.result) if results else q.new_zeros(len(q), *v.shape[1:])


def _block_tables(args: AttentionArgs, plan: Plan, sizes: list[int]) -> Iterable[Tensor | None]:
    """Return the table of relative biases for each block; a table with query rows is gathered like the queries.

    Args:
        sizes: Number of query slots of each block.
    """
    if not isinstance(args.bias, RelativeBias):
        return [None] * len(sizes)
    if args.bias.table.ndim == 2:
        return [args.bias.table] * len(sizes)
    tables: Iterable[Tensor] = pack_rows(args.bias.table, plan.queries).split(sizes)
    return tables


def _cached_bias(args: AttentionArgs, block: KernelBlock, table: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of a block's bias and mask, which is cached if all layers add the same bias."""
    if not isinstance(args.bias, RelativeBias) or args.bias.blocks is None:
        return _expand_bias(args, block, table, dtype)
    if block not in args.bias.blocks:
        expanded = _expand_bias(args, block, table, dtype)
        assert expanded is not None
        args.bias.blocks[block] = expanded
    return args.bias.blocks[block]


def _expand_bias(args: AttentionArgs, block: KernelBlock, table: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of a block's bias and mask, [R or 1, H or 1, Sq, Sk]; None if it has neither."""
    if not isinstance(args.bias, RelativeBias):
        return block.mask
    assert block.distances is not None and table is not None
    reach = args.bias.reach
    if table.ndim == 2 and args.layout.queries == args.layout.keys:
        bias = _spread_table(table, *block.shape[1:])
    elif table.ndim == 2:
        bias = table[:, block.distances.clamp(-reach, reach) + reach].transpose(0, 1)
    else:
        column = block.distances.clamp(-reach, reach) + reach
        by_row = table.unflatten(0, block.shape[:2]).transpose(1, 2)  # [R, H, Sq, distances]
        bias = by_row.gather(-1, column[:, None].expand(-1, by_row.shape[1], -1, -1))
    bias = bias.to(dtype)
    return bias if block.mask is None else bias + block.mask


def _spread_table(
    table: Float[Tensor, "heads distances"], queries: int, keys: int
) -> Float[Tensor, "1 heads queries keys"]:
    """Return the entry of each pair of slots i and j for the distance j - i, which it has in self-attention.

    The gradient sums along diagonals; the gradient of an index for each pair would sort all pairs on a GPU.
    """
    reach = table.shape[1] // 2
    distances = torch.arange(1 - queries, keys, device=table.device).clamp(-reach, reach)
    by_distance = table[:, distances + reach]
    return by_distance.unfold(1, keys, 1).flip(1)[None]  # the last query has the first window


def _expand_dense(
    bias: DenseBias, layout: Layout, block: KernelBlock, dtype: torch.dtype
) -> tuple[Float[Tensor, "lines heads queries keys"], Bool[Tensor, "lines heads queries 1"]]:
    """Return the sum of a dense bias and the mask, and which queries see a key.

    For a query without visible keys the sum is 0, because the softmax of a row of -inf is NaN.
    """
    sizes = layout.sizes()
    lines = []
    for line in block.lines:
        line_bias = bias.blocks[line[0]].new_zeros(bias.blocks[line[0]].shape[0], *block.shape[1:])
        i = j = 0
        for number in line:
            n, m = sizes[number]
            line_bias[:, i : i + n, j : j + m] = bias.blocks[number]
            i, j = i + n, j + m
        lines.append(line_bias)
    expanded = torch.stack(lines).to(dtype)
    if block.mask is not None:
        expanded = expanded + block.mask
    sees_key = (expanded > -torch.inf).any(-1, keepdim=True)
    return expanded.where(sees_key, 0.0), sees_key


# -- cores: attention in one block ----------------------------------------------------------------------------

# q [R, H, Sq, D], k and v [R, H, Sk, D], sum of bias and mask, arguments, block -> result [R, H, Sq, D]
Core = Callable[[Tensor, Tensor, Tensor, Tensor | None, AttentionArgs, KernelBlock], Tensor]


def bmm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, args: AttentionArgs, block: KernelBlock) -> Tensor:
    """Compute softmax(scale q k + bias) v by two batched matrix products (Vaswani et al. 2017, section 3.2.1).

    The weights are in memory, so they can be dropped, and values of distances can be added (Shaw et al. 2018, equation
    3). In bfloat16 on a CPU it is faster than `fused`.
    """
    logits = torch.matmul(q * args.scale, k.transpose(-1, -2))
    if bias is not None:
        logits = logits + bias
    weights = logits.softmax(-1)
    if args.dropout:
        weights = dropout(weights, args.dropout)
    result = torch.matmul(weights, v)
    return result if not isinstance(args.bias, RelativeBias) else result + _relative_values(weights, args.bias, block)


def _relative_values(weights: Tensor, bias: RelativeBias, block: KernelBlock) -> Tensor | float:
    """Return the sum of each weight times the value of its distance, [R, H, Sq, D]; 0 if the bias has no values.

    Weights of keys at the same distance are summed first, so that no tensor [Sq, Sk, D] is made.
    """
    if bias.values is None:
        return 0.0
    assert block.distances is not None
    column = (block.distances.clamp(-bias.reach, bias.reach) + bias.reach)[:, None].expand_as(weights)
    weight_sums = weights.new_zeros(*weights.shape[:-1], len(bias.values)).scatter_add(-1, column, weights)
    return torch.matmul(weight_sums, bias.values)


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, args: AttentionArgs, block: KernelBlock) -> Tensor:
    """Compute softmax(scale q k + bias) v by PyTorch's scaled_dot_product_attention.

    The kernel table never uses it on a CPU with dropout.
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=args.dropout, scale=args.scale)


# -- the kernel table ---------------------------------------------------------------------------------------


def _run_by_plan(core: Core) -> KernelFunction:
    """Return a kernel that runs a core on the blocks of `share_lines`; the plan is cached with the layout."""

    def run(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        def make() -> Plan:
            return make_plan(args, share_lines, q, k)

        key = (args.causal, args.window, q.dtype, q.device, isinstance(args.bias, RelativeBias))
        return run_plan(q, k, v, args, args.layout.cached(key, make), core)

    return run


def _dense_cache(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute attention without a gather, from keys that are in lines of one length, as in a KV cache.

    All sequences have the same number of queries. A single sequence is one line, with or without a cache.
    """
    layout = args.layout
    lines, max_keys = len(layout.keys), max(m for _, m in layout.sizes())
    stride = layout.stride or max_keys
    key = ("lines", args.causal, args.window, q.dtype, q.device)
    block = layout.cached(key, lambda: _make_cache_block(args, q))
    q_block, k_block, v_block = (  # [R, H, n or stride, D]
        rows.unflatten(0, (lines, -1)).transpose(1, 2) for rows in (q, k[: lines * stride], v[: lines * stride])
    )
    bias = _cached_bias(args, block, args.bias.table if isinstance(args.bias, RelativeBias) else None, q.dtype)
    is_short = layout.stride is None and max_keys <= MAX_SHORT_TEXT and not _cannot_use_fused(q, k, v, args)
    fuse_on_cuda = q.device.type == "cuda" and not adds_values(args)
    core = fused if fuse_on_cuda or is_short or _why_bmm_is_slow(q, k, v, args) else bmm
    result = core(q_block, k_block[:, :, :max_keys], v_block[:, :, :max_keys], bias, args, block)
    return result.transpose(1, 2).flatten(0, 1)


def _make_cache_block(args: AttentionArgs, q: Tensor) -> KernelBlock:
    """Make the block of `_dense_cache`: a line for each sequence, with its n queries, and as many keys as any has."""
    sizes = args.layout.sizes()
    n, max_keys = sizes[0][0], max(m for _, m in sizes)
    lengths = args.layout.key_lengths(q.device)[:, None, None]
    slots = torch.arange(max_keys, device=q.device)
    distances = slots - (lengths - n + torch.arange(n, device=q.device)[:, None])
    hides_pairs = (args.causal and n > 1) or (args.window is not None and args.window < max(n, max_keys) - 1)
    mask = None
    if hides_pairs or args.layout.key_counts is not None or any(m != max_keys for _, m in sizes):
        hidden = ~(allowed_pairs(distances, args) & (slots < lengths))[:, None]
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
    return KernelBlock(
        lines=[[number] for number in range(len(sizes))],
        shape=(len(sizes), n, max_keys),
        mask=mask,
        distances=distances,
    )


def _cannot_use_dense_cache(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why the kernel "dense_cache" cannot compute a call, or an empty string."""
    layout = args.layout
    stride = len(k) if layout.stride is None and len(layout.keys) == 1 else layout.stride
    if stride is None or [start for start, _ in layout.keys] != [line * stride for line in range(len(layout.keys))]:
        return "the keys do not lie in lines of one length"
    if len({n for n, _ in layout.sizes()}) > 1:
        return "sequences have different numbers of queries"
    has_mask = args.causal or args.window is not None
    if min(m - n if has_mask else m - 1 for n, m in layout.sizes()) < 0:
        return "some queries see no key"
    if args.bias is not None and not (isinstance(args.bias, RelativeBias) and args.bias.table.ndim == 2):
        return "it has no bias for each query row"
    return ""


def _why_dense_cache_is_slow(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why another kernel than "dense_cache" is preferred for a call, or an empty string."""
    if q.device.type == "cuda" and args.layout.stride is None and args.bias is None:
        return "on CUDA a kernel for several sequences computes one sequence too, without a mask"
    return ""


def _varlen(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute flash attention over packed rows, with PyTorch's public function `varlen_attn`.

    The kernel "flash" is tried first; it cannot be used if PyTorch's private operator has other arguments. Like ours,
    the causal mask and the window of `varlen_attn` put the last query at the position of the last key.
    """
    from torch.nn.attention.varlen import varlen_attn

    layout, reach = args.layout, -1 if args.window is None else args.window
    q_bounds, k_bounds = device_bounds(layout, q.device)
    max_lengths = [max((stop - start for start, stop in spans), default=0) for spans in (layout.queries, layout.keys)]
    window = (reach, 0 if args.causal else reach)
    result = varlen_attn(q, k, v, q_bounds, k_bounds, *max_lengths, scale=args.scale, window_size=window)
    assert isinstance(result, Tensor)
    return result


def device_bounds(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sequence boundaries (cu_seqlens) of query rows and of key rows, int32 [sequences + 1] each.

    They are cached with the layout, whose key spans must follow each other without a gap.
    """
    if layout.row_bounds is not None:
        return layout.row_bounds, layout.row_bounds

    def send_bounds(spans: tuple[Span, ...]) -> Int[Tensor, " sequences_and_one"]:
        return send([0, *(stop for _, stop in spans)], device, torch.int32)

    return layout.cached(("bounds", device), lambda: (send_bounds(layout.queries), send_bounds(layout.keys)))


def cannot_use_flash_attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why PyTorch's flash attention cannot compute a call, or an empty string."""
    if q.device.type != "cuda":
        return "it runs on CUDA only"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {q.dtype}"
    if args.bias is not None:
        return "it has no bias"
    width = q.shape[-1]
    if width % 8 or width > 256:
        return f"its heads are up to 256 wide, in steps of 8, not {width}"
    capability = torch.cuda.get_device_capability(q.device) if torch.cuda.is_available() else (8, 0)
    if capability < (8, 0):
        return "it needs compute capability 8.0"
    if width > 192 and q.requires_grad and capability in SMALL_GPUS:
        return f"it has no gradient of heads wider than 192 on this GPU, and these are {width} wide"
    return cannot_differ(k, v) or keys_have_gaps(k, args)


SMALL_GPUS = ((8, 6), (8, 9), (12, 0), (12, 1))  # compute capabilities with too little shared memory for some gradients


def cannot_use_varlen(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why the kernel "varlen" cannot compute a call, or an empty string."""
    return cannot_use_flash_attention(q, k, v, args) or ("it has no dropout" if args.dropout else "")


def keys_have_gaps(k: Tensor, args: AttentionArgs) -> str:
    """Return why sequence boundaries alone do not describe the key rows, or an empty string.

    Key rows that belong to no sequence would get no gradient from PyTorch's flash attention.
    """
    stops = [0, *(stop for _, stop in args.layout.keys)]
    if [start for start, _ in args.layout.keys] != stops[:-1] or stops[-1] != len(k):
        return "its key rows must follow each other without a gap, and all belong to a sequence"
    return ""


def _cannot_use_fused(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why the kernel "fused" cannot compute a call, or an empty string."""
    return adds_values(args) or ("it has no dropout" if args.dropout else "")


def adds_values(args: AttentionArgs) -> str:
    """Return why a fused kernel cannot compute a call whose bias adds to the values, or an empty string."""
    has_values = isinstance(args.bias, RelativeBias) and args.bias.values is not None
    return "it cannot add a value for each distance" if has_values else ""


MAX_SHORT_TEXT = 128  # tokens of a single text, up to which `fused` is the fastest core: it has the fewest operations
MAX_BMM_KEYS = 1024  # keys of a sequence, up to which its H x n x m logits and weights may be in memory


def _why_bmm_is_slow(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why another kernel than "bmm" is preferred for a call, or an empty string."""
    if _cannot_use_fused(q, k, v, args):
        return ""
    if q.dtype in (torch.float32, torch.float64) and args.preferred != "bmm":
        return "in float32 and float64 the fused kernel is faster"
    max_keys = max((m for _, m in args.layout.sizes()), default=0)
    if max_keys > MAX_BMM_KEYS:
        return f"it stores all weights of a sequence, and one has {max_keys} keys"
    return ""


# kernels in the order in which they are tried; on a CPU it follows benchmarks/results/attention-2026-11-21.md
KERNELS: tuple[Kernel, ...] = (
    Kernel(name="dense_cache", run=_dense_cache, cannot=_cannot_use_dense_cache, slow=_why_dense_cache_is_slow),
    Kernel(name="varlen", run=_varlen, cannot=cannot_use_varlen),
    Kernel(
        name="native",
        run=attention,
        cannot=cannot_attend,
        slow=slow_to_attend,
        shares_heads=True,
        has_disentangled_bias=True,
    ),
    Kernel(name="bmm", run=_run_by_plan(bmm), slow=_why_bmm_is_slow),
    Kernel(name="fused", run=_run_by_plan(fused), cannot=_cannot_use_fused),
)
