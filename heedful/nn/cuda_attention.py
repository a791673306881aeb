"""Attention kernels on CUDA: flash attention over packed rows, fused attention in blocks, and flex_attention.

Every kernel computes softmax(scale q k + bias) v of each sequence (Vaswani et al. 2017, section 3.2.1) from q [query
rows, H, D], k and v [key rows, H, D]. Plans, masks and arguments are tested on a CPU; tests/gpu compares the kernels
with the reference on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heedful.nn.kernels import (
    Kernel,
    KernelBlock,
    Plan,
    adds_values,
    bmm,
    cannot_use_flash_attention,
    cannot_use_varlen,
    device_bounds,
    fused,
    make_plan,
    run_plan,
    share_lines,
)
from heedful.nn.layout import (
    AttentionArgs,
    Bias,
    Layout,
    RelativeBias,
    Span,
    allowed_pairs,
    cannot_differ,
    relative_distances,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

HALF_DTYPES = (torch.float16, torch.bfloat16)
LINE_WIDTHS = (64, 128, 256, 512)  # slots of a line that sequences share
BLOCK_BUDGET = 1 << 22  # logits of a block, for each head; large, so that there are few kernel launches
TILE = 128  # query rows, and key rows, of a tile of flex_attention
UNLIMITED_WINDOW = 1 << 30  # rows; more than any sequence has
REQUIRED_ARGUMENTS: tuple[str, ...] = (  # arguments that we pass to the private flash attention operator
    *("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask", "scale"),
    *("window_size_left", "window_size_right"),
)


def _unless_on_cuda(q: Tensor) -> str:
    """Return the reason against a kernel on CUDA if q is on another device, or an empty string."""
    return "" if q.device.type == "cuda" else "it runs on CUDA only"


# -- packed rows --------------------------------------------------------------------------------------------------


def _flash(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute flash attention over packed rows, with PyTorch's private operator.

    PyTorch's public function `varlen_attn` calls the same operator, but without dropout, and through a Python autograd
    function of its own.
    """
    layout, window = args.layout, -1 if args.window is None else args.window
    q_bounds, k_bounds = device_bounds(layout, q.device)
    longest_q, longest_k = (
        max((stop - start for start, stop in spans), default=0) for spans in (layout.queries, layout.keys)
    )
    return run_flash(q, k, v, q_bounds, k_bounds, longest_q, longest_k, args.scale, args.causal, window, args.dropout)[
        0
    ]


def run_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
    window: int,
    dropout: float,
) -> tuple[Tensor, ...]:
    """Return the outputs of flash attention: result, log-sum-exp of the logits, random state, and debugging data.

    Like ours, its causal mask and window put the last query at the position of the last key.

    Args:
        q_bounds: Bounds of the query rows, from 0, int32.
        k_bounds: Bounds of the key rows, from 0, int32.
        longest_q: Largest number of query rows of a sequence.
        longest_k: Largest number of key rows of a sequence.
        window: As in `AttentionArgs`; -1: no window.
    """
    return _operator()(
        q,
        k,
        v,
        q_bounds,
        k_bounds,
        longest_q,
        longest_k,
        dropout,
        causal and window < 0,
        False,
        scale=scale,
        window_size_left=window,
        window_size_right=0 if causal else window,
    )


def _operator() -> Callable[..., tuple[Tensor, ...]]:
    """Return PyTorch's private flash attention operator."""
    operator: Callable[..., tuple[Tensor, ...]] = torch.ops.aten._flash_attention_forward
    return operator


@cache
def _missing_arguments() -> str:
    """Return why the private operator cannot be called in this version of PyTorch, or an empty string."""
    try:
        schema = torch.ops.aten._flash_attention_forward.default._schema
        known_arguments = {argument.name for argument in schema.arguments}
    except AttributeError:
        known_arguments = set()
    missing = [name for name in REQUIRED_ARGUMENTS if name not in known_arguments]
    return f"PyTorch {torch.__version__} has another operator for it, without {', '.join(missing)}" if missing else ""


def cannot_use_flash(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why the kernel "flash" cannot compute a call, or an empty string."""
    return cannot_use_flash_attention(q, k, v, args) or _missing_arguments()


# -- blocks -------------------------------------------------------------------------------------------------------


def _grouped(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute attention in padded blocks by scaled_dot_product_attention, with bias, mask and dropout."""

    def make() -> Plan:
        return make_plan(args, partial(share_lines, widths=LINE_WIDTHS, budget=BLOCK_BUDGET), q, k)

    key = ("grouped", args.causal, args.window, q.dtype, q.device, isinstance(args.bias, RelativeBias))
    return run_plan(q, k, v, args, args.layout.cached(key, make), fused)


def _cannot_use_grouped(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why the kernel "grouped" cannot compute a call, or an empty string."""
    return _unless_on_cuda(q) or adds_values(args)


def _why_grouped_is_slow(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why another kernel than "grouped" is preferred for a call, or an empty string."""
    if cannot_use_flash(q, k, v, args) and cannot_use_varlen(q, k, v, args):
        return ""
    return "flash attention over packed rows computes this call without padding"


# -- CUDA graphs: sequence boundaries on the device -------------------------------------------------------------


def _recorded(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute self-attention with sequence boundaries in `layout.row_bounds`, without a copy between host and device.

    A CUDA graph of this call can be replayed after other boundaries have been written to the same tensor.
    """
    if not cannot_use_flash(q, k, v, args):
        return _flash(q, k, v, args)
    key = ("recorded", args.causal, args.window, q.dtype, isinstance(args.bias, RelativeBias))
    plan = args.layout.cached(key, lambda: _recorded_plan(args, q))
    return run_plan(q, k, v, args, plan, bmm if adds_values(args) else fused)


def _recorded_plan(args: AttentionArgs, q: Tensor) -> Plan:
    """Make the plan of one block that is one line of all rows; its mask separates the sequences."""
    count, bounds = len(q), args.layout.row_bounds
    assert bounds is not None
    rows = torch.arange(count, device=q.device)
    distances = relative_distances(count, count, q.device)
    sequence = (rows[:, None] >= bounds[1:-1]).sum(-1)
    hidden = ~((sequence[:, None] == sequence) & allowed_pairs(distances, args))  # each row sees itself
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
    block = KernelBlock(
        lines=[[0]],
        shape=(1, count, count),
        mask=mask[None, None],
        distances=distances[None] if isinstance(args.bias, RelativeBias) else None,
    )
    return Plan(blocks=[block], queries=None, keys=None, result=None)


def _cannot_use_recorded(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why the kernel "recorded" cannot compute a call, or an empty string."""
    return "" if args.layout.row_bounds is not None else "the boundaries of the sequences are known on the host"


RECORDED = Kernel(name="recorded", run=_recorded, cannot=_cannot_use_recorded)


# -- flex_attention -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tiles:
    """The tiles (TILE query rows by TILE key rows) that flex_attention computes, and the position of every row."""

    mask: BlockMask
    query_positions: Int[Tensor, " queries"]  # position in the sequence, counted from its end: -1 is the last row
    key_positions: Int[Tensor, " keys"]  # position in the sequence, counted from its end


def _flex(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute attention by PyTorch's compiled flex_attention, which skips tiles without a pair of one sequence.

    PyTorch compiles it again for each number of rows, so it is fast only if all batches have the same number.
    """
    key = ("flex", args.causal, args.window, q.device, len(k))
    tiles = args.layout.cached(key, lambda: make_tiles(args, q, k))
    qkv = [rows.transpose(0, 1)[None] for rows in (q, k, v)]  # [1, H, rows, D] each
    score_mod = None if args.bias is None else _score_mod(args.bias, tiles)
    result = _compiled_flex_attention()(*qkv, score_mod=score_mod, block_mask=tiles.mask, scale=args.scale)
    return result[0].transpose(0, 1)


def _score_mod(bias: Bias, tiles: Tiles) -> Callable[..., Tensor]:
    """Return flex_attention's `score_mod`: it adds the bias to the logit of head h, query row i and key row j."""
    assert isinstance(bias, RelativeBias)
    table, reach, queries, keys = bias.table, bias.reach, tiles.query_positions, tiles.key_positions
    if table.ndim == 2:
        return lambda score, b, h, i, j: score + table[h, (keys[j] - queries[i]).clamp(-reach, reach) + reach]
    return lambda score, b, h, i, j: score + table[i, h, (keys[j] - queries[i]).clamp(-reach, reach) + reach]


def make_tiles(args: AttentionArgs, q: Tensor, k: Tensor) -> Tiles:
    """Make the block mask of flex_attention from the layout, without a tensor of all pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    layout = args.layout
    (query_sequences, query_positions), (key_sequences, key_positions) = (
        (torch.from_numpy(column).to(q.device) for column in _sequences_and_positions(spans, count))
        for spans, count in ((layout.queries, len(q)), (layout.keys, len(k)))
    )
    needed = _needed_tiles(layout, len(q), len(k))
    counts = torch.from_numpy(needed.sum(1).astype(np.int32))
    order = torch.from_numpy(np.argsort(~needed, axis=1, kind="stable").astype(np.int32))  # needed key tiles first
    mask = BlockMask.from_kv_blocks(
        counts[None, None].to(q.device),
        order[None, None].to(q.device),
        BLOCK_SIZE=TILE,
        mask_mod=_mask_mod(args, query_sequences, key_sequences, query_positions, key_positions),
        seq_lengths=(len(q), len(k)),
    )
    return Tiles(mask=mask, query_positions=query_positions, key_positions=key_positions)


def _mask_mod(
    args: AttentionArgs, query_sequences: Tensor, key_sequences: Tensor, query_positions: Tensor, key_positions: Tensor
) -> Callable[..., Tensor]:
    """Return flex_attention's `mask_mod`: whether query row i attends to key row j, as in `layout.allowed_pairs`.

    It is a lambda because PyTorch traces it.
    """
    reach = UNLIMITED_WINDOW if args.window is None else args.window
    ahead = 0 if args.causal else reach
    return lambda b, h, i, j: (
        (query_sequences[i] == key_sequences[j])
        & (query_sequences[i] >= 0)
        & (key_positions[j] - query_positions[i] <= ahead)
        & (query_positions[i] - key_positions[j] <= reach)
    )


def _sequences_and_positions(
    spans: tuple[Span, ...], count: int
) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
    """Return the sequence of each row (-1: none), and the row's position in it, counted from its end."""
    sequences, positions = np.full(count, -1), np.zeros(count, dtype=np.int64)
    for number, (start, stop) in enumerate(spans):
        sequences[start:stop] = number
        positions[start:stop] = np.arange(start - stop, 0)
    return sequences, positions


def _needed_tiles(layout: Layout, queries: int, keys: int) -> Bool[np.ndarray, "query_tiles key_tiles"]:
    """Return which tiles have at least one query and one key of the same sequence."""
    needed = np.zeros((-(-queries // TILE), -(-keys // TILE)), dtype=np.bool_)
    for (start, stop), (first, last) in zip(layout.queries, layout.keys, strict=True):
        if start < stop and first < last:
            needed[start // TILE : -(-stop // TILE), first // TILE : -(-last // TILE)] = True
    return needed


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    """Return PyTorch's flex_attention, compiled on first use."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _cannot_use_flex(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why the kernel "flex" cannot compute a call, or an empty string."""
    if reason := _unless_on_cuda(q) or adds_values(args):
        return reason
    if q.dtype not in (*HALF_DTYPES, torch.float32):
        return f"it computes in float16, bfloat16 and float32, not in {q.dtype}"
    if args.dropout:
        return "it has no dropout"
    if not (args.bias is None or isinstance(args.bias, RelativeBias)):
        return "it takes a RelativeBias only"
    if q.shape[-1] < 16 or q.shape[-1] & (q.shape[-1] - 1):
        return f"its heads are 16, 32, 64, 128 or 256 wide, not {q.shape[-1]}"
    return cannot_differ(k, v)


def _why_flex_is_slow(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why another kernel than "flex" is preferred for a call, or an empty string."""
    if args.preferred == "flex":
        return ""
    return "it is compiled for each number of rows: select it by name if all batches have the same number"


CUDA: tuple[Kernel, ...] = (
    Kernel(name="flash", run=_flash, cannot=cannot_use_flash),
    Kernel(name="grouped", run=_grouped, cannot=_cannot_use_grouped, slow=_why_grouped_is_slow),
    Kernel(name="flex", run=_flex, cannot=_cannot_use_flex, slow=_why_flex_is_slow),
)
