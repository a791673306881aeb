"""Flash attention over packed rows as one operator, so that torch.compile keeps a whole block in one graph.

torch.compile cannot trace the choice of a kernel, whose plan depends on the lengths of the sequences. Here the bounds
of the sequences are a tensor, so that batches of all lengths share a compilation. The operator runs on CUDA; its shapes
are known on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.nn.autograd import AutogradContext
from heedful.nn.cuda_attention import cannot_use_flash, run_flash
from heedful.nn.kernels import device_bounds
from heedful.nn.layout import AttentionArgs, Layout

SETTINGS = "float scale, bool causal, SymInt window, float dropout"  # window -1: no window
FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor longest, {SETTINGS}) -> (Tensor, Tensor, Tensor)"
BACKWARD = (
    "(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sums, Tensor random_state, Tensor bounds, "
    f"Tensor longest, {SETTINGS}) -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorBounds:
    """The sequences of a batch as tensors, so that compiled code is not specialised to their lengths."""

    rows: Int[Tensor, " bounds"]  # bounds of the rows of each sequence, from 0, int32, on the device of the rows
    longest: Int[Tensor, ""]  # number of rows of the longest sequence, on the CPU


def operator_bounds(layout: Layout, x: Float[Tensor, "rows width"], head_width: int) -> OperatorBounds | None:
    """Return the bounds for `attend_by_operator`, or None if it cannot compute self-attention without a bias.

    Args:
        x: The hidden states; under autocast, queries, keys and values have its dtype instead of that of x.
    """
    if not len(x) or layout.queries != layout.keys:
        return None
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    q = x.new_empty(1, 1, head_width, dtype=dtype).expand(len(x), -1, -1).requires_grad_()
    if cannot_use_flash(q, q, q, AttentionArgs(layout=layout, scale=1.0)):
        return None
    longest = max(stop - start for start, stop in layout.queries)
    return OperatorBounds(rows=device_bounds(layout, x.device)[0], longest=torch.tensor(longest))


def attend_by_operator(
    q: Float[Tensor, "rows heads width"],
    k: Float[Tensor, "rows heads width"],
    v: Float[Tensor, "rows heads width"],
    bounds: OperatorBounds,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    dropout: float,
) -> Float[Tensor, "rows heads width"]:
    """Compute self-attention as `heedful.nn.attend.attend` does, without a bias."""
    settings = (scale, causal, -1 if window is None else window, dropout)
    out: Tensor = torch.ops.heedful.flash_attention(q, k, v, bounds.rows, bounds.longest, *settings)[0]
    return out


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: Tensor,
    scale: float,
    causal: bool,
    window: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return result, log-sum-exp of the scores [heads, rows], and random state of dropout."""
    rows = int(longest)
    out, log_sums, random_state, *_ = run_flash(q, k, v, bounds, bounds, rows, rows, scale, causal, window, dropout)
    if not dropout:
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return out, log_sums, random_state


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors like the results of `_forward`."""
    log_sums = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.empty_like(q), log_sums, q.new_empty(2, dtype=torch.uint64)


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    random_state: Tensor,
    bounds: Tensor,
    longest: Tensor,
    scale: float,
    causal: bool,
    window: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    rows, unused = int(longest), torch.empty(0, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        gradient,
        q,
        k,
        v,
        out,
        log_sums,
        bounds,
        bounds,
        rows,
        rows,
        dropout,
        causal and window < 0,
        random_state,
        unused,
        scale=scale,
        window_size_left=window,
        window_size_right=0 if causal else window,
    )
    return dq, dk, dv


def _backward_shapes(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors like the results of `_backward`."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


FLASH_OPERATOR = torch.library.custom_op(
    "heedful::flash_attention", _forward, mutates_args=(), device_types="cuda", schema=FORWARD
)
FLASH_BACKWARD_OPERATOR = torch.library.custom_op(
    "heedful::flash_attention_backward", _backward, mutates_args=(), device_types="cuda", schema=BACKWARD
)
FLASH_OPERATOR.register_fake(_forward_shapes)
FLASH_BACKWARD_OPERATOR.register_fake(_backward_shapes)


def _save(ctx: AutogradContext, inputs: Sequence[Any], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what the gradient needs; PyTorch gives the arguments by these names."""
    q, k, v, bounds, longest, *settings = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, longest)
    ctx.settings = settings


def _gradient(ctx: AutogradContext, gradient: Tensor, *rest: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument of the operator."""
    gradients = torch.ops.heedful.flash_attention_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return (*gradients, None, None, *(None for _ in ctx.settings))


FLASH_OPERATOR.register_autograd(_gradient, setup_context=_save)
