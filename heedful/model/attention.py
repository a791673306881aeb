"""Self-attention and cross-attention layers of a Transformer, and the context of a forward pass that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.model.config import StackConfig
from heedful.model.kv_cache import KVCache
from heedful.model.token_pruning import TokenPruning
from heedful.model.trace import Part, Trace
from heedful.nn.attend import attend_with, repeat_heads
from heedful.nn.compiled_attention import OperatorBounds, attend_by_operator
from heedful.nn.cpu_attention import split_qkv
from heedful.nn.cpu_ops import TrainedLinear
from heedful.nn.inference_linear import linear_columns
from heedful.nn.layers import HeadNorm
from heedful.nn.layout import AttentionArgs, Layout
from heedful.nn.positions import RelativePosition


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExecutionOptions:
    """Options for the speed and the memory of a Transformer.

    They change results by rounding only, except for `token_pruning` and `frozen_layers`.
    """

    encoder_kernel: str = ""  # attention kernel of the encoder to try first (default: the kernel table's order)
    # function of (block, input rows, context, layer context) that computes an encoder block in one call to the C++
    # kernels; it returns None if it cannot (default: blocks call their layers one by one)
    fused_block: Callable[[Any, Tensor, AttentionContext, LayerContext], Tensor | None] | None = None
    gradient_checkpointing: bool = False  # recompute blocks in the backward pass instead of storing activations
    pad_to_bucket: bool | None = None  # round the number of rows up (default: where a new number of rows costs time)
    compiled: bool = False  # blocks run compiled, with self-attention in their graph where an operator computes it
    frozen_layers: int = 0  # lower layers without training and dropout; from 1, the embeddings are frozen too
    token_pruning: TokenPruning | None = None  # which tokens the upper layers compute (default: all)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionContext:
    """The arguments of attention that all layers of a stack share in one forward pass."""

    layout: Layout  # layout of self-attention
    execution: ExecutionOptions
    memory: Float[Tensor, "keys width"] | None = None  # the encoder's hidden states, for cross-attention
    memory_layout: Layout | None = None  # layout of cross-attention
    cache: KVCache | None = None  # KV cache, in decoding
    trace: Trace | None = None  # records attention and hidden states
    sequences: int = 0  # number of sequences to trace: all of the batch but a padding sequence
    bounds: OperatorBounds | None = None  # set if self-attention is an operator in the graph of a compiled block


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerContext:
    """The arguments of attention in one layer."""

    part: Part
    layer: int  # index of the layer in its stack
    window: int | None  # tokens on each side that a token attends to; None: all
    relation: RelativePosition
    prepared: Any  # result of relation.prepare for the batch
    output_rows: Int[Tensor, " outputs"] | None = None  # indices of the rows that the block returns (default: all)


class Attention(nn.Module):
    """Multi-head self-attention in each sequence (Vaswani et al. 2017, section 3.2.2).

    It is W_out concat_h(softmax(scale q_h k_h + bias) v_h), where q, k and v are one projection of the input.
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.causal = config.causal
        self.dropout = config.attention_dropout
        self.kv_heads = config.kv_heads or config.heads
        self.head_width = config.head_width
        self.scale = _scale(config)
        self.sizes = config.qkv_sizes
        self.qkv = TrainedLinear(config.width, sum(self.sizes), bias=config.attention_bias)
        self.q_norm, self.k_norm = (
            HeadNorm(config.head_width, config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.out = TrainedLinear(self.sizes[0], config.width, bias=config.attention_bias)

    def forward(self, x: Float[Tensor, "rows width"], context: AttentionContext, layer: LayerContext) -> Tensor:
        q, k, v = self.project(x)
        bias = layer.relation.bias(q, k, layer.prepared, self.scale, self.project)
        q, k = layer.relation.rotate(q, k, layer.prepared)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast a rotation returns float32, which fast kernels cannot take
        if context.cache is not None:
            k, v = context.cache.update(layer.layer, k, v, context.layout)
        args = AttentionArgs(
            layout=context.layout,
            scale=self.scale,
            causal=self.causal,
            window=layer.window,
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
            preferred=context.execution.encoder_kernel if layer.part == "encoder" else "",
        )
        if context.trace is not None:
            all_heads = (repeat_heads(k, self.heads), repeat_heads(v, self.heads))
            context.trace.record_attention(layer.part, layer.layer, context.sequences, q, *all_heads, args)
        out: Tensor = self.out(select_rows(attend_with(q, k, v, args).flatten(1), layer.output_rows))
        return out

    def forward_in_graph(
        self, x: Float[Tensor, "rows width"], bounds: OperatorBounds, layer: LayerContext
    ) -> Float[Tensor, "some width"]:
        """Compute `forward` without a bias in operations that torch.compile traces."""
        q, k, v = self.project(x)
        q, k = layer.relation.rotate(q, k, layer.prepared)
        rows = attend_by_operator(
            q.to(v.dtype),
            repeat_heads(k.to(v.dtype), self.heads),
            repeat_heads(v, self.heads),
            bounds,
            scale=self.scale,
            causal=self.causal,
            window=layer.window,
            dropout=self.dropout if self.training else 0.0,
        )
        out: Tensor = self.out(select_rows(rows.flatten(1), layer.output_rows))
        return out

    def project(self, x: Float[Tensor, "rows width"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [rows, heads, head dimension] each; k and v may have fewer heads than q."""
        q, k, v = split_qkv(self.qkv(x), self.heads, self.kv_heads)
        return self.q_norm(q), self.k_norm(k), v

    def project_queries(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows heads head_width"]:
        """Return the queries. Keys and values are not computed, unless the linear layer cannot compute a part."""
        q: Tensor = self.q_norm(linear_columns(self.qkv, x, 0, self.sizes[0]).unflatten(-1, (self.heads, -1)))
        return q

    def project_keys(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows kv_heads head_width"]:
        """Return the keys. Queries and values are not computed, unless the linear layer cannot compute a part."""
        start, stop = self.sizes[0], sum(self.sizes[:2])
        k: Tensor = self.k_norm(linear_columns(self.qkv, x, start, stop).unflatten(-1, (self.kv_heads, -1)))
        return k


class CrossAttention(nn.Module):
    """Multi-head attention from the decoder's hidden states to the encoder's (Vaswani et al. 2017, section 3.2.3).

    Queries are a projection of the decoder's hidden states; keys and values are one of the encoder's, which all
    decoding steps share.
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.scale = _scale(config)
        self.q = TrainedLinear(config.width, inner, bias=config.attention_bias)
        self.kv = TrainedLinear(config.width, 2 * inner, bias=config.attention_bias)
        self.out = TrainedLinear(inner, config.width, bias=config.attention_bias)

    def forward(self, x: Float[Tensor, "rows width"], context: AttentionContext, layer: int) -> Tensor:
        assert context.memory_layout is not None and context.memory is not None
        q = self.q(x).unflatten(-1, (self.heads, -1))
        if context.cache is None:
            k, v = self._project(context.memory)
        else:
            k, v = context.cache.update_cross(layer, self._project)
        args = AttentionArgs(
            layout=context.memory_layout, scale=self.scale, dropout=self.dropout if self.training else 0.0
        )
        if context.trace is not None:
            context.trace.record_attention("cross", layer, context.sequences, q, k, v, args)
        out: Tensor = self.out(attend_with(q, k, v, args).flatten(1))
        return out

    def _project(self, memory: Float[Tensor, "keys width"]) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the encoder's hidden states, [keys, heads, head dimension] each."""
        k, v = self.kv(memory).unflatten(-1, (2, self.heads, -1)).unbind(1)
        return k, v


def select_rows(
    x: Float[Tensor, "rows width"], output_rows: Int[Tensor, " outputs"] | None
) -> Float[Tensor, "some width"]:
    """Return the rows with these indices, or all if `output_rows` is None."""
    return x if output_rows is None else x.index_select(0, output_rows)


def _scale(config: StackConfig) -> float:
    """Return the factor of q k: 1 / sqrt(head dimension), unless the configuration has another one."""
    return 1 / sqrt(config.head_width) if config.score_scale is None else config.score_scale
