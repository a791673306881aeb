"""Attention: the reference, softmax(scale q k + bias) v for one sequence after another, and the choice of a kernel.

Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import HeedfulError, did_you_mean
from heedful.nn.cuda_attention import CUDA
from heedful.nn.dropout import dropout
from heedful.nn.kernels import KERNELS as PLANNED
from heedful.nn.kernels import Kernel
from heedful.nn.layout import AttentionArgs, Bias, DenseBias, Layout, RelativeBias, allowed_pairs, relative_distances

KERNELS: tuple[Kernel, ...] = (PLANNED[0], *CUDA, *PLANNED[1:])  # in the order in which they are tried


def attend(
    q: Float[Tensor, "queries heads width"],
    k: Float[Tensor, "keys heads width"],
    v: Float[Tensor, "keys heads value_width"],
    layout: Layout,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    bias: Bias | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Float[Tensor, "queries heads value_width"]:
    """softmax(scale q k + bias) v in each sequence of the layout; a query that may see no key gets zeros.

    Causal masks and windows align the last query with the last key; windows include both ends. Dropout draws from
    torch's global generator. "auto" takes the first kernel that can; a named kernel that cannot is an error, as are
    shapes that do not go together.
    """
    call = AttentionArgs(layout=layout, scale=scale, causal=causal, window=window, bias=bias, dropout=dropout)
    return attend_with(q, k, v, call, backend=backend)


def attend_with(
    q: Float[Tensor, "queries heads width"],
    k: Float[Tensor, "keys heads width"],
    v: Float[Tensor, "keys heads value_width"],
    call: AttentionArgs,
    *,
    backend: str = "auto",
) -> Float[Tensor, "queries heads value_width"]:
    """The same, with everything but q, k and v in one."""
    _check(q, k, v, call.layout)
    if len(q) == 0 or len(k) == 0:
        return q.new_zeros(len(q), *v.shape[1:])
    return choose_kernel(q, k, v, call, backend).run(q, k, v, call)


def _check(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> None:
    """Numbers on the host alone; kernels read and write where a layout says."""
    if not q.ndim == k.ndim == v.ndim == 3 or k.shape[1:] != q.shape[1:] or v.shape[:2] != k.shape[:2]:
        raise HeedfulError(
            f"q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}; expected [queries, heads, width], [keys, "
            "heads, width] and [keys, heads, value width]: repeat the heads of k and v where several of q share them"
        )
    if layout.rows != len(q) or layout.min_key_rows > len(k):
        raise HeedfulError(
            f"the layout is of {layout.rows} query rows and of key rows up to {layout.min_key_rows}, and there are "
            f"{len(q)} and {len(k)}: give the bounds of these rows"
        )


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, backend: str = "auto") -> Kernel:
    """The kernel that attend takes for this call."""
    if backend == "auto":
        return next(each for each in _ranked(call) if not (each.cannot(q, k, v, call) or each.slow(q, k, v, call)))
    named = {kernel.name: kernel for kernel in (*KERNELS, REFERENCE)}
    if backend not in named:
        raise HeedfulError(
            f'there is no attention kernel "{backend}"{did_you_mean(backend, list(named))}; '
            f"known: auto, {', '.join(named)}"
        )
    if reason := named[backend].cannot(q, k, v, call):
        raise HeedfulError(f'the attention kernel "{backend}" cannot take this call: {reason}; use backend="auto"')
    return named[backend]


def explain(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> str:
    """One line for each kernel: taken, or why not."""
    lines, taken = [], False
    for kernel in _ranked(call):
        reason = kernel.cannot(q, k, v, call) or kernel.slow(q, k, v, call)
        verdict = f"no: {reason}" if reason else "could, but one above is preferred" if taken else "taken"
        taken = taken or not reason
        lines.append(f"{kernel.name:14} {verdict}")
    return "\n".join(lines)


def _ranked(call: AttentionArgs) -> list[Kernel]:
    return sorted((*KERNELS, REFERENCE), key=lambda kernel: kernel.name not in ("lined", call.preferred))


def _reference(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
    rows = []
    for number, (first, last) in enumerate(call.layout.keys):
        kept = attention_weights(q, k, call, number)
        if call.dropout:
            kept = dropout(kept, call.dropout)
        mixed = torch.einsum("hij,jhd->ihd", kept, v[first:last])
        if isinstance(call.bias, RelativeBias) and call.bias.values is not None:
            gap = relative_distances(kept.shape[1], kept.shape[2], q.device).clamp(-call.bias.reach, call.bias.reach)
            mixed = mixed + torch.einsum("hij,ijd->ihd", kept, call.bias.values[gap + call.bias.reach])
        rows.append(mixed)
    return torch.cat(rows) if rows else q.new_zeros(len(q), *v.shape[1:])


def attention_weights(
    q: Float[Tensor, "queries heads width"], k: Float[Tensor, "keys heads width"], call: AttentionArgs, number: int
) -> Float[Tensor, "heads n m"]:
    """softmax(scale q k + bias) of sequence `number`, before dropout; a query that may see no key has zeros."""
    scores, sees = attention_scores(q, k, call, number)
    return scores.softmax(-1).where(sees.any(-1, keepdim=True), 0.0)


def attention_scores(
    q: Float[Tensor, "queries heads width"],
    k: Float[Tensor, "keys heads width"],
    call: AttentionArgs,
    number: int,
    *,
    rows: Int[Tensor, " chosen"] | None = None,
    heads: Int[Tensor, " chosen_heads"] | None = None,
) -> tuple[Float[Tensor, "some_heads n m"], Bool[Tensor, "some_heads n m"]]:
    """scale q k + bias of sequence `number` and which pairs count, for all of its rows and heads or for these.

    Pairs that do not count are -inf, but in rows where none counts: so softmax and its gradient stay finite.
    """
    (start, stop), (first, last) = call.layout.queries[number], call.layout.keys[number]
    every = slice(None)
    some = every if rows is None else rows.to(q.device)
    which = every if heads is None else heads.to(q.device)
    gap = relative_distances(stop - start, last - first, q.device)[some]
    one, other = q[start:stop][some][:, which], k[first:last][:, which]
    sees = allowed_pairs(gap, call).expand(one.shape[1], -1, -1)
    scores = call.scale * torch.einsum("ihd,jhd->hij", one, other)
    match call.bias:
        case RelativeBias(table=table) as bias:
            place = gap.clamp(-bias.reach, bias.reach) + bias.reach
            if table.ndim == 2:
                scores = scores + table[which][:, place]
            else:
                each = table[start:stop][some][:, which].transpose(0, 1)  # H n distances
                scores = scores + each.gather(-1, place.expand(len(each), -1, -1))
        case DenseBias(blocks=blocks):
            block = blocks[number][which][:, some]
            forbidden = block == float("-inf")
            sees = sees & ~forbidden
            scores = scores + block.masked_fill(forbidden, 0.0)
    return scores.masked_fill(~sees & sees.any(-1, keepdim=True), float("-inf")), sees


REFERENCE = Kernel(name="reference", run=_reference)
