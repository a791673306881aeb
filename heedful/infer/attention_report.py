"""A report on the attention kernel that computes a typical batch, and why it was chosen."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from heedful.checkpoint import ModelBundle
from heedful.infer.tuning.execution_plan import ExecutionPlan, example_bias
from heedful.nn.attend import explain
from heedful.nn.layout import AttentionArgs, Layout

TEXT_TOKENS = 64  # tokens of each text in the typical batch


def attention_report(
    bundle: ModelBundle, plan: ExecutionPlan | None, limit: int | None, token_budget: int
) -> Iterator[str]:
    """Yield the report for a batch of texts of TEXT_TOKENS tokens; nothing for a model without self-attention.

    Args:
        bundle: The model.
        plan: Its execution plan. If None, the model is used as it was loaded.
        limit: Maximum tokens of a text. If None, there is no limit.
        token_budget: Maximum tokens of a batch.
    """
    stack = bundle.config.model.encoder or bundle.config.model.decoder
    if stack is None:
        return
    length = min(TEXT_TOKENS, limit or TEXT_TOKENS, token_budget)
    count = token_budget // length
    parameter = next(bundle.parameters())
    q = torch.zeros(count * length, stack.heads, stack.head_width, dtype=parameter.dtype, device=parameter.device)
    args = AttentionArgs(
        layout=Layout.of(range(0, count * length + 1, length)),
        scale=stack.head_width**-0.5,
        preferred=plan.attention if plan else "",
        causal=stack.causal,
        window=stack.window,
        bias=example_bias(stack, len(q), length, q.dtype, q.device),
    )
    device_and_dtype = f"{parameter.device.type}, {str(parameter.dtype).removeprefix('torch.')}"
    with torch.inference_mode():
        k = q[:, : stack.kv_heads]
        yield f"attention of {count} texts of {length} tokens on {device_and_dtype}:\n{explain(q, k, k, args)}"
