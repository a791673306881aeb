"""Attention on CUDA: packed rows with dropout, biases in blocks, and biases in one compiled kernel.

Without bias and dropout `varlen` of the kernel table is taken. What stands here was checked against the reference on a
CPU as far as that goes: plans, masks, arguments. tests/gpu checks the kernels themselves where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from heedful.nn.kernels import Block, Kernel, Plan, keys_have_gaps, make_plan, run_plan, share_lines
from heedful.nn.layout import AttentionArgs, Layout, RelativeBias, Span, cannot_differ

HALVES = (torch.float16, torch.bfloat16)
WIDTHS, BUDGET = (64, 128, 256, 512), 1 << 22  # of the lines of a block, and its scores a head: few, large launches
TILE = 128  # rows of a tile of the compiled kernel
FAR = 1 << 30  # places: no window
REQUIRED_ARGUMENTS: tuple[str, ...] = (  # what the private operator has to take
    *("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask", "scale"),
    *("window_size_left", "window_size_right"),
)


def _not_cuda(q: Tensor) -> str:
    return "" if q.device.type == "cuda" else "it runs on CUDA only"


# -- packed rows, with dropout ------------------------------------------------------------------------------------


def _flash(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
    """The operator below varlen_attn, which has no dropout: causal masks and windows aligned at the end, as ours."""
    layout, reach = call.layout, -1 if call.window is None else call.window
    of, to = layout.cached(("flash", q.device), lambda: (_bounds(layout.queries, q), _bounds(layout.keys, q)))
    longest = [max((stop - start for start, stop in spans), default=0) for spans in (layout.queries, layout.keys)]
    mixed: Tensor = _operator()(
        q,
        k,
        v,
        of,
        to,
        *longest,
        call.dropout,
        call.causal and call.window is None,
        False,
        scale=call.scale,
        window_size_left=reach,
        window_size_right=0 if call.causal else reach,
    )[0]
    return mixed


def _bounds(spans: tuple[Span, ...], q: Tensor) -> Int[Tensor, " sequences_and_one"]:
    return torch.tensor([0, *(stop for _, stop in spans)], dtype=torch.int32, device=q.device)


def _operator() -> Callable[..., Any]:
    found: Callable[..., Any] = torch.ops.aten._flash_attention_forward
    return found


@cache
def _missing_arguments() -> str:
    """Why the operator cannot be called here, or nothing: it is private, and may have another signature."""
    try:
        known = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}
    except AttributeError:
        known = set()
    missing = [name for name in REQUIRED_ARGUMENTS if name not in known]
    return f"PyTorch {torch.__version__} has another operator for it, without {', '.join(missing)}" if missing else ""


def _not_flash(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    if reason := _not_cuda(q) or _missing_arguments():
        return reason
    if torch.cuda.is_available() and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "it needs compute capability 8.0"
    if q.dtype not in HALVES:
        return f"it computes in float16 and bfloat16, not in {q.dtype}"
    if call.bias is not None:
        return "it has no bias"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"its heads are up to 256 wide, in steps of 8, not {q.shape[-1]}"
    return cannot_differ(k, v) or keys_have_gaps(k, call)


def _needs_no_dropout(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    return "" if call.dropout else "without dropout varlen calls the same operator by its public name"


# -- blocks -------------------------------------------------------------------------------------------------------


def _grouped(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
    """Sequences in lines of a block, each block one fused attention with its bias, mask and dropout."""

    def make() -> Plan:
        return make_plan(call, partial(share_lines, widths=WIDTHS, budget=BUDGET), q, k)

    if call.bias is None or isinstance(call.bias, RelativeBias):
        key = ("grouped", call.causal, call.window, q.dtype, q.device, call.bias is None)
        return run_plan(q, k, v, call, call.layout.cached(key, make), _fused)
    return run_plan(q, k, v, call, make(), _fused)  # what it forbids is part of the plan


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: AttentionArgs, block: Block) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=call.dropout, scale=call.scale)


def _not_grouped(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    return _not_cuda(q) or _adds_values(call)


def _adds_values(call: AttentionArgs) -> str:
    has = isinstance(call.bias, RelativeBias) and call.bias.values is not None
    return "it cannot add a value for each distance" if has else ""


def _grouped_is_slow(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    return "" if _not_flash(q, k, v, call) else "packed rows without a bias need no blocks"


# -- one compiled kernel ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tiles:
    """Which tiles of scores are computed, and where every row stands."""

    mask: Any  # torch's BlockMask
    query_positions: Int[Tensor, " queries"]  # places counted from the end of each sequence
    key_positions: Int[Tensor, " keys"]


def _flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
    """PyTorch's compiled attention over all rows at once; tiles between sequences are left out.

    It is compiled anew for each number of rows: batches have to have one shape.
    """
    key = ("flex", call.causal, call.window, q.device, len(k))
    tiles = call.layout.cached(key, lambda: make_tiles(call, q, k))
    heads = [each.transpose(0, 1)[None] for each in (q, k, v)]
    modify = None if call.bias is None else _modify(call.bias, tiles)
    mixed: Tensor = _compiled()(*heads, score_mod=modify, block_mask=tiles.mask, scale=call.scale)
    return mixed[0].transpose(0, 1)


def _modify(bias: Any, tiles: Tiles) -> Callable[..., Tensor]:
    assert isinstance(bias, RelativeBias)
    table, reach, of, to = bias.table, bias.reach, tiles.query_positions, tiles.key_positions
    if table.ndim == 2:
        return lambda score, b, h, i, j: score + table[h, (to[j] - of[i]).clamp(-reach, reach) + reach]
    return lambda score, b, h, i, j: score + table[i, h, (to[j] - of[i]).clamp(-reach, reach) + reach]


def make_tiles(call: AttentionArgs, q: Tensor, k: Tensor) -> Tiles:
    """From bounds alone: no tensor of all scores is made."""
    from torch.nn.attention.flex_attention import BlockMask

    layout = call.layout
    (owner_of, of), (owner_to, to) = (
        (torch.from_numpy(each).to(q.device) for each in _owners(spans, count))
        for spans, count in ((layout.queries, len(q)), (layout.keys, len(k)))
    )
    needed = _needed(layout, len(q), len(k))
    counts = torch.from_numpy(needed.sum(1).astype(np.int32))
    order = torch.from_numpy(np.argsort(~needed, axis=1, kind="stable").astype(np.int32))
    mask = BlockMask.from_kv_blocks(
        counts[None, None].to(q.device),
        order[None, None].to(q.device),
        BLOCK_SIZE=TILE,
        mask_mod=_sees(call, owner_of, owner_to, of, to),
        seq_lengths=(len(q), len(k)),
    )
    return Tiles(mask=mask, query_positions=of, key_positions=to)


def _sees(call: AttentionArgs, owner_of: Tensor, owner_to: Tensor, of: Tensor, to: Tensor) -> Callable[..., Tensor]:
    """Which pairs count, as `layout.allowed` has it; a lambda, because PyTorch traces it."""
    near = FAR if call.window is None else call.window
    ahead = 0 if call.causal else near
    return lambda b, h, i, j: (
        (owner_of[i] == owner_to[j]) & (owner_of[i] >= 0) & (to[j] - of[i] <= ahead) & (of[i] - to[j] <= near)
    )


def _owners(spans: tuple[Span, ...], count: int) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
    """Which sequence each row belongs to (-1: none), and its place, counted from the end."""
    owner, place = np.full(count, -1), np.zeros(count, dtype=np.int64)
    for number, (start, stop) in enumerate(spans):
        owner[start:stop] = number
        place[start:stop] = np.arange(start - stop, 0)
    return owner, place


def _needed(layout: Layout, queries: int, keys: int) -> Bool[np.ndarray, "query_tiles key_tiles"]:
    """The tiles in which some sequence has queries and keys."""
    needed = np.zeros((-(-queries // TILE), -(-keys // TILE)), dtype=np.bool_)
    for (start, stop), (first, last) in zip(layout.queries, layout.keys, strict=True):
        if start < stop and first < last:
            needed[start // TILE : -(-stop // TILE), first // TILE : -(-last // TILE)] = True
    return needed


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    made: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return made


def _not_flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    if reason := _not_cuda(q) or _adds_values(call):
        return reason
    if q.dtype not in (*HALVES, torch.float32):
        return f"it computes in float16, bfloat16 and float32, not in {q.dtype}"
    if call.dropout:
        return "it has no dropout"
    if not (call.bias is None or isinstance(call.bias, RelativeBias)):
        return "it has no bias that is given in full"
    if q.shape[-1] < 16 or q.shape[-1] & (q.shape[-1] - 1):
        return f"its heads are 16, 32, 64, 128 or 256 wide, not {q.shape[-1]}"
    return cannot_differ(k, v)


def _flex_is_slow(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    return (
        "" if call.preferred == "flex" else "it is compiled for each number of rows: name it where that never changes"
    )


CUDA: tuple[Kernel, ...] = (
    Kernel(name="flash", run=_flash, cannot=_not_flash, slow=_needs_no_dropout),
    Kernel(name="grouped", run=_grouped, cannot=_not_grouped, slow=_grouped_is_slow),
    Kernel(name="flex", run=_flex, cannot=_not_flex, slow=_flex_is_slow),
)
