"""Scaled dot-product attention over packed rows: the choice of a kernel, and the reference implementation.

The reference computes softmax(scale q k + bias) v for one sequence after another (Vaswani et al. 2017, "Attention Is
All You Need", section 3.2.1). Tests compare every kernel with it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import HeedfulError, SettingError, did_you_mean
from heedful.nn.cuda_attention import CUDA, RECORDED
from heedful.nn.dropout import dropout
from heedful.nn.kernels import KERNELS as DEFAULT_KERNELS
from heedful.nn.kernels import Kernel
from heedful.nn.layout import (
    AttentionArgs,
    Bias,
    DenseBias,
    DisentangledBias,
    Layout,
    RelativeBias,
    allowed_pairs,
    relative_distances,
    with_dense_bias,
)

DENSE_CACHE = DEFAULT_KERNELS[0]
KERNELS: tuple[Kernel, ...] = (DENSE_CACHE, *CUDA, *DEFAULT_KERNELS[1:])  # in the order in which they are tried


def attend(
    q: Float[Tensor, "queries heads width"],
    k: Float[Tensor, "keys kv_heads width"],
    v: Float[Tensor, "keys kv_heads value_width"],
    layout: Layout,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    bias: Bias | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Float[Tensor, "queries heads value_width"]:
    """Compute softmax(scale q k + bias) v in each sequence of the layout (Vaswani et al. 2017, section 3.2.1).

    The last query of a sequence is at the position of its last key; causal mask, window and relative bias compare
    positions. A query that attends to no key has the result 0. If k and v have fewer heads than q, groups of query
    heads share one of their heads (grouped-query attention; Ainslie et al. 2023, arXiv:2305.13245, section 2.2).

    Args:
        q: Queries of all sequences, concatenated.
        k: Keys of all sequences.
        v: Values of all sequences.
        layout: Query rows and key rows of each sequence.
        scale: Factor of q k.
        causal: Whether a query attends only to keys at its own position and before it.
        window: Positions on each side that a query attends to, besides its own. If None, all.
        bias: Added to scale q k.
        dropout: Probability of dropping a weight after the softmax, by torch's global random generator.
        backend: Name of a kernel. "auto" selects the first one that can compute the call and is not slow.

    Raises:
        HeedfulError: If the shapes do not fit each other, or the named kernel cannot compute the call.
    """
    args = AttentionArgs(layout=layout, scale=scale, causal=causal, window=window, bias=bias, dropout=dropout)
    return attend_with(q, k, v, args, backend=backend)


def attend_with(
    q: Float[Tensor, "queries heads width"],
    k: Float[Tensor, "keys kv_heads width"],
    v: Float[Tensor, "keys kv_heads value_width"],
    args: AttentionArgs,
    *,
    backend: str = "auto",
) -> Float[Tensor, "queries heads value_width"]:
    """Compute attention as `attend` does, with its arguments in one object."""
    _check_shapes(q, k, v, args.layout)
    if len(q) == 0 or len(k) == 0:
        return q.new_zeros(*q.shape[:2], v.shape[2])
    kernel = _kernel_of_layers(q, k, v, args, backend)
    if not kernel.shares_heads:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    return kernel.run(q, k, v, args if kernel.has_disentangled_bias else with_dense_bias(q, k, args))


def repeat_heads(x: Float[Tensor, "keys kv_heads width"], heads: int) -> Float[Tensor, "keys heads width"]:
    """Repeat the heads of keys or values, so that there is one for each query head; returns x if it has `heads`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> None:
    """Raise HeedfulError unless shapes and layout fit: kernels read and write memory at the rows of the layout."""
    shapes_fit = q.ndim == k.ndim == v.ndim == 3 and k.shape[2] == q.shape[2] and v.shape[:2] == k.shape[:2]
    if not shapes_fit or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise HeedfulError(
            f"q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}; expected [queries, heads, width], [keys, "
            "kv heads, width] and [keys, kv heads, value width], where kv heads divides heads"
        )
    if layout.rows != len(q) or layout.min_key_rows > len(k):
        raise HeedfulError(
            f"the layout has {layout.rows} query rows and key rows up to {layout.min_key_rows}, but q has {len(q)} "
            f"rows and k {len(k)}: make the layout from the sequence boundaries of q and k"
        )


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, backend: str = "auto") -> Kernel:
    """Return the kernel that `attend` runs for this call.

    Raises:
        SettingError: If `backend` names no kernel, or one that cannot compute the call.
    """
    if backend == "auto" and args.layout.row_bounds is not None:
        return RECORDED
    if backend == "auto" and args.layout.key_counts is not None:
        return DENSE_CACHE
    if backend == "auto":
        return next(
            kernel for kernel in _ranked(args) if not (kernel.cannot(q, k, v, args) or kernel.slow(q, k, v, args))
        )
    by_name = {kernel.name: kernel for kernel in (*KERNELS, REFERENCE)}
    if backend not in by_name:
        raise SettingError(
            f'"{backend}" is no attention kernel{did_you_mean(backend, list(by_name))}; '
            f"known: auto, {', '.join(by_name)}"
        )
    if reason := by_name[backend].cannot(q, k, v, args):
        raise SettingError(f'the attention kernel "{backend}" cannot take this call: {reason}; use backend="auto"')
    return by_name[backend]


def _kernel_of_layers(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, backend: str) -> Kernel:
    """Return what `choose_kernel` chooses, once for all layers of a batch that call it alike.

    With many sequences a choice takes longer than the launch of a kernel.
    """
    match args.bias:
        case DisentangledBias():  # whether a kernel computes it depends on its numbers, too
            return choose_kernel(q, k, v, args, backend)
        case RelativeBias(table=table, values=values):
            bias: object = table.ndim, values is None
        case _:
            bias = type(args.bias)
    tensors = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in (q, k, v))
    call = (args.scale < 0, args.causal, args.window, bias, args.dropout, args.preferred)
    key = ("kernel", backend, tensors, q.requires_grad, call)
    return args.layout.cached(key, lambda: choose_kernel(q, k, v, args, backend))


def explain(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> str:
    """Return one line for each kernel: its name, and "taken" or the reason against it."""
    lines, has_choice = [], False
    for kernel in _ranked(args):
        if reason := kernel.cannot(q, k, v, args) or kernel.slow(q, k, v, args):
            verdict = f"no: {reason}"
        elif has_choice:
            verdict = "could, but one above is preferred"
        else:
            verdict, has_choice = "taken", True
        lines.append(f"{kernel.name:14} {verdict}")
    return "\n".join(lines)


def _ranked(args: AttentionArgs) -> list[Kernel]:
    """Return all kernels in the order in which they are tried: the dense cache and the preferred one first."""
    return sorted((*KERNELS, REFERENCE), key=lambda kernel: kernel.name not in ("dense_cache", args.preferred))


def _reference(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
    """Compute attention for one sequence after another, with the weights of all pairs in memory."""
    outputs = []
    for number, (first, last) in enumerate(args.layout.keys):
        weights = attention_weights(q, k, args, number)
        if args.dropout:
            weights = dropout(weights, args.dropout)
        output = torch.einsum("hij,jhd->ihd", weights, v[first:last])
        if isinstance(args.bias, RelativeBias) and args.bias.values is not None:
            reach = args.bias.reach
            distances = relative_distances(weights.shape[1], weights.shape[2], q.device).clamp(-reach, reach)
            output = output + torch.einsum("hij,ijd->ihd", weights, args.bias.values[distances + reach])
        outputs.append(output)
    return torch.cat(outputs) if outputs else q.new_zeros(len(q), *v.shape[1:])


def attention_weights(
    q: Float[Tensor, "queries heads width"], k: Float[Tensor, "keys heads width"], args: AttentionArgs, number: int
) -> Float[Tensor, "heads n m"]:
    """Return softmax(scale q k + bias) of sequence `number`, before dropout; zeros for a query without visible keys."""
    logits, visible = attention_logits(q, k, args, number)
    return logits.softmax(-1).where(visible.any(-1, keepdim=True), 0.0)


def attention_logits(
    q: Float[Tensor, "queries heads width"],
    k: Float[Tensor, "keys heads width"],
    args: AttentionArgs,
    number: int,
    *,
    rows: Int[Tensor, " chosen"] | None = None,
    heads: Int[Tensor, " chosen_heads"] | None = None,
) -> tuple[Float[Tensor, "some_heads n m"], Bool[Tensor, "some_heads n m"]]:
    """Return the logits scale q k + bias of sequence `number`, and which pairs of a query and a key are visible.

    Logits of masked pairs are -inf, except for a query whose keys are all masked: the softmax of a row of -inf, and its
    gradient, would be NaN.

    Args:
        rows: Query rows of the sequence to compute, counted from its first row. If None, all.
        heads: Heads to compute. If None, all.
    """
    (start, stop), (first, last) = args.layout.queries[number], args.layout.keys[number]
    row_index = slice(None) if rows is None else rows.to(q.device)
    head_index = slice(None) if heads is None else heads.to(q.device)
    distances = relative_distances(stop - start, last - first, q.device)[row_index]
    queries, keys = q[start:stop][row_index][:, head_index], k[first:last][:, head_index]
    visible = allowed_pairs(distances, args).expand(queries.shape[1], -1, -1)
    logits = args.scale * torch.einsum("ihd,jhd->hij", queries, keys)
    match with_dense_bias(q, k, args).bias:
        case RelativeBias(table=table) as bias:
            column = distances.clamp(-bias.reach, bias.reach) + bias.reach
            if table.ndim == 2:
                logits = logits + table[head_index][:, column]
            else:
                by_row = table[start:stop][row_index][:, head_index].transpose(0, 1)  # [H, n, distances]
                logits = logits + by_row.gather(-1, column.expand(len(by_row), -1, -1))
        case DenseBias(blocks=blocks):
            block = blocks[number][head_index][:, row_index]
            forbidden = block == float("-inf")
            visible = visible & ~forbidden
            logits = logits + block.masked_fill(forbidden, 0.0)
    return logits.masked_fill(~visible & visible.any(-1, keepdim=True), float("-inf")), visible


REFERENCE = Kernel(name="reference", run=_reference)
