"""Attention kernels on CUDA: flash attention with dropout, biases block by block, and one compiled kernel with biases.

Calls without bias and dropout are computed by `varlen` of `heedful.nn.kernels`. Plans, masks and arguments are tested
on a CPU; tests/gpu compares the kernels with the reference on a GPU.
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
    device_bounds,
    flash_cannot,
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

HALVES = (torch.float16, torch.bfloat16)
WIDTHS = (64, 128, 256, 512)  # slots in shared lines of a block
BUDGET = 1 << 22  # scores in a block, for each head; large, so that there are few launches
TILE = 128  # query rows, and key rows, of a tile of the compiled kernel
FAR = 1 << 30  # rows; a window this wide hides nothing
REQUIRED_ARGUMENTS: tuple[str, ...] = (  # arguments that we pass to the private flash attention operator
    *("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask", "scale"),
    *("window_size_left", "window_size_right"),
)


def _not_cuda(q: Tensor) -> str:
    return "" if q.device.type == "cuda" else "it runs on CUDA only"


# -- packed rows, with dropout ------------------------------------------------------------------------------------


def _flash(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute flash attention by the operator that `varlen_attn` calls, which has dropout."""
    layout, window = args.layout, -1 if args.window is None else args.window
    bounds = device_bounds(layout, q.device)
    longest = [max((stop - start for start, stop in spans), default=0) for spans in (layout.queries, layout.keys)]
    return run_flash(q, k, v, *bounds, *longest, args.scale, args.causal, window, args.dropout)[0]


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
    """Return result, log-sum-exp of the scores and random state of flash attention, and what its debugging needs.

    Its masks are aligned at the last query and the last key, as ours.

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
    """Return why the operator, which is private, cannot be called in this PyTorch, or an empty string."""
    try:
        schema = torch.ops.aten._flash_attention_forward.default._schema
        known = {argument.name for argument in schema.arguments}
    except AttributeError:
        known = set()
    missing = [name for name in REQUIRED_ARGUMENTS if name not in known]
    return f"PyTorch {torch.__version__} has another operator for it, without {', '.join(missing)}" if missing else ""


def not_flash(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return why flash attention cannot compute a call, or an empty string."""
    return flash_cannot(q, k, v, args) or _missing_arguments()


def _needs_no_dropout(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    return "" if args.dropout else "without dropout varlen calls the same operator by its public name"


# -- blocks -------------------------------------------------------------------------------------------------------


def _grouped(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute fused attention block by block, with bias, mask and dropout."""

    def make() -> Plan:
        return make_plan(args, partial(share_lines, widths=WIDTHS, budget=BUDGET), q, k)

    key = ("grouped", args.causal, args.window, q.dtype, q.device, isinstance(args.bias, RelativeBias))
    return run_plan(q, k, v, args, args.layout.cached(key, make), fused)


def _not_grouped(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    return _not_cuda(q) or adds_values(args)


def _grouped_is_slow(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    return "" if not_flash(q, k, v, args) else "packed rows without a bias need no blocks"


# -- bounds on the device ---------------------------------------------------------------------------------------


def _recorded(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute self-attention between bounds that only the device knows, without any copy between host and device.

    A CUDA graph of this call can be replayed with other bounds in the same tensor.
    """
    if not not_flash(q, k, v, args):
        return _flash(q, k, v, args)
    key = ("recorded", args.causal, args.window, q.dtype, isinstance(args.bias, RelativeBias))
    plan = args.layout.cached(key, lambda: _recorded_plan(args, q))
    return run_plan(q, k, v, args, plan, bmm if adds_values(args) else fused)


def _recorded_plan(args: AttentionArgs, q: Tensor) -> Plan:
    """Make a plan of one line with all rows, whose mask separates the sequences."""
    count, bounds = len(q), args.layout.row_bounds
    assert bounds is not None
    rows, distances = torch.arange(count, device=q.device), relative_distances(count, count, q.device)
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


def _not_recorded(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    return "" if args.layout.row_bounds is not None else "the bounds of the sequences are known on the host"


RECORDED = Kernel(name="recorded", run=_recorded, cannot=_not_recorded)


# -- one compiled kernel ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tiles:
    """The tiles of scores that the compiled kernel computes, and the position of every row."""

    mask: BlockMask
    query_positions: Int[Tensor, " queries"]  # counted from the end of each sequence: -1 is its last row
    key_positions: Int[Tensor, " keys"]  # counted in the same way


def _flex(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute PyTorch's compiled flex_attention over all rows at once; tiles between sequences are skipped.

    PyTorch compiles it again for each number of rows, so it is fast only if all batches have the same number.
    """
    key = ("flex", args.causal, args.window, q.device, len(k))
    tiles = args.layout.cached(key, lambda: make_tiles(args, q, k))
    heads = [rows.transpose(0, 1)[None] for rows in (q, k, v)]
    score_mod = None if args.bias is None else _score_mod(args.bias, tiles)
    result = _compiled_flex_attention()(*heads, score_mod=score_mod, block_mask=tiles.mask, scale=args.scale)
    return result[0].transpose(0, 1)


def _score_mod(bias: Bias, tiles: Tiles) -> Callable[..., Tensor]:
    """Return the function that adds the bias to a score of batch b, head h, query row i and key row j."""
    assert isinstance(bias, RelativeBias)
    table, reach, queries, keys = bias.table, bias.reach, tiles.query_positions, tiles.key_positions
    if table.ndim == 2:
        return lambda score, b, h, i, j: score + table[h, (keys[j] - queries[i]).clamp(-reach, reach) + reach]
    return lambda score, b, h, i, j: score + table[i, h, (keys[j] - queries[i]).clamp(-reach, reach) + reach]


def make_tiles(args: AttentionArgs, q: Tensor, k: Tensor) -> Tiles:
    """Make the block mask from bounds alone, without a tensor of all scores."""
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
    """Return the function that decides whether a pair is visible, by the rule of `layout.allowed_pairs`.

    It is a lambda because PyTorch traces it.
    """
    reach = FAR if args.window is None else args.window
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
    """Return which tiles hold at least one query and one key of the same sequence."""
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


def _not_flex(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    if reason := _not_cuda(q) or adds_values(args):
        return reason
    if q.dtype not in (*HALVES, torch.float32):
        return f"it computes in float16, bfloat16 and float32, not in {q.dtype}"
    if args.dropout:
        return "it has no dropout"
    if not (args.bias is None or isinstance(args.bias, RelativeBias)):
        return "it has no bias that is given in full"
    if q.shape[-1] < 16 or q.shape[-1] & (q.shape[-1] - 1):
        return f"its heads are 16, 32, 64, 128 or 256 wide, not {q.shape[-1]}"
    return cannot_differ(k, v)


def _flex_is_slow(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    if args.preferred == "flex":
        return ""
    return "it is compiled for each number of rows: name it where that never changes"


CUDA: tuple[Kernel, ...] = (
    Kernel(name="flash", run=_flash, cannot=not_flash, slow=_needs_no_dropout),
    Kernel(name="grouped", run=_grouped, cannot=_not_grouped, slow=_grouped_is_slow),
    Kernel(name="flex", run=_flex, cannot=_not_flex, slow=_flex_is_slow),
)
