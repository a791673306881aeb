"""One packed Transformer for every family (Vaswani et al. 2017; Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heedful.errors import HeedfulError
from heedful.model.config import (
    Buckets,
    ModelConfig,
    Rotary,
    Shaw,
    StackConfig,
    TransformerXl,
)
from heedful.model.embedding import Embedding
from heedful.model.kv_cache import KVCache
from heedful.model.trace import ALL_ITEMS, Part, Trace, TraceItem
from heedful.nn.attend import attend_with
from heedful.nn.cpu_attention import split_qkv
from heedful.nn.cpu_ops import Linear, add_norm, trains_in_bfloat16
from heedful.nn.dropout import dropout
from heedful.nn.layers import Mlp, make_norm
from heedful.nn.layout import AttentionArgs, Layout
from heedful.nn.positions import (
    BucketedPosition,
    RelativePosition,
    RotaryPosition,
    ShawPosition,
    TransformerXlPosition,
)
from heedful.packed import Packed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionContext:
    """What the rows that go through a stack may see: each other, and the encoder's rows where there are any."""

    layout: Layout
    memory: Float[Tensor, "keys width"] | None = None
    memory_layout: Layout | None = None
    cache: KVCache | None = None  # rows that came earlier
    trace: Trace | None = None
    sequences: int = 0  # of the batch, without one that only fills it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerContext:
    """How places enter one layer: the window, the relation, and what it prepared for the batch."""

    part: Part
    layer: int
    window: int | None
    relation: RelativePosition
    prepared: Any
    output_rows: Int[Tensor, " output_rows"] | None = None  # the rows that go on after the attention; None: all


class Attention(nn.Module):
    """Multi-head attention of the rows of each sequence to each other (Vaswani et al. 2017, section 3.2.2)."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.heads, self.causal, self.dropout = config.heads, config.causal, config.attention_dropout
        self.head_width = config.head_width
        self.scale = _scale(config)
        self.kernel = ""  # the one that was measured to be the fastest on this machine, in inference
        self.qkv = Linear(config.width, 3 * inner, bias=config.attention_bias)
        self.out = Linear(inner, config.width, bias=config.attention_bias)

    def forward(self, x: Float[Tensor, "rows width"], sight: AttentionContext, placed: LayerContext) -> Tensor:
        q, k, v = split_qkv(self.qkv(x), self.heads)
        bias = placed.relation.bias(q, placed.prepared, self.scale)
        q, k = placed.relation.rotate(q, k, placed.prepared)
        if sight.cache is not None:
            k, v = sight.cache.update(placed.layer, k, v, sight.layout)
        call = AttentionArgs(
            layout=sight.layout,
            scale=self.scale,
            causal=self.causal,
            window=placed.window,
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
            preferred=self.kernel,
        )
        if sight.trace is not None:
            sight.trace.record_attention(placed.part, placed.layer, sight.sequences, q, k, v, call)
        out: Tensor = self.out(select_rows(attend_with(q, k, v, call).flatten(1), placed.output_rows))
        return out


class CrossAttention(nn.Module):
    """Multi-head attention of the rows of each sequence to the encoder's rows of the same sequence."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.scale = _scale(config)
        self.q = Linear(config.width, inner, bias=config.attention_bias)
        self.kv = Linear(config.width, 2 * inner, bias=config.attention_bias)
        self.out = Linear(inner, config.width, bias=config.attention_bias)

    def forward(self, x: Float[Tensor, "rows width"], sight: AttentionContext, layer: int) -> Tensor:
        assert sight.memory_layout is not None and sight.memory is not None
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = self._project(sight.memory) if sight.cache is None else sight.cache.update_cross(layer, self._project)
        call = AttentionArgs(
            layout=sight.memory_layout, scale=self.scale, dropout=self.dropout if self.training else 0.0
        )
        if sight.trace is not None:
            sight.trace.record_attention("cross", layer, sight.sequences, q, k, v, call)
        out: Tensor = self.out(attend_with(q, k, v, call).flatten(1))
        return out

    def _project(self, memory: Float[Tensor, "keys width"]) -> tuple[Tensor, Tensor]:
        k, v = self.kv(memory).unflatten(-1, (2, self.heads, -1)).unbind(1)
        return k, v


def select_rows(x: Float[Tensor, "rows width"], wanted: Int[Tensor, " wanted"] | None) -> Float[Tensor, "some width"]:
    """The wanted rows; None: all."""
    return x if wanted is None else x.index_select(0, wanted)


def _scale(config: StackConfig) -> float:
    return 1 / sqrt(config.head_width) if config.score_scale is None else config.score_scale


class Block(nn.Module):
    """Attention, attention to the encoder where there is one, and the MLP, each with a residual and a norm."""

    def __init__(self, config: StackConfig, *, first: bool = False) -> None:
        super().__init__()
        self.norm_first = config.norm_at == "pre"
        self.dropout = config.dropout
        out = config.attention_out_dropout
        self.attention_out_dropout = config.dropout if out is None else out
        self.attention = Attention(config)
        self.attention_norm = nn.Identity() if first and not config.first_norm else _norm(config)
        if config.cross:
            self.cross, self.cross_norm = CrossAttention(config), _norm(config)
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(
            width=config.width,
            inner_width=config.inner_width,
            activation=config.activation,
            gated=config.gated,
            bias=config.mlp_bias,
            inner_dropout=config.inner_dropout,
        )
        # in inference: the block's rows in one call, or None where it cannot
        self.at_once: Callable[[Block, Tensor, AttentionContext, LayerContext], Tensor | None] | None = None

    def forward(
        self,
        x: Float[Tensor, "rows width"],
        sight: AttentionContext,
        placed: LayerContext,
    ) -> Float[Tensor, "some width"]:
        if self.at_once is not None and (done := self.at_once(self, x, sight, placed)) is not None:
            return select_rows(done, placed.output_rows)
        out = self.attention_out_dropout
        x = self._residual(x, self.attention_norm, lambda y: self.attention(y, sight, placed), out, placed.output_rows)
        if sight.memory is not None:
            x = self._residual(x, self.cross_norm, lambda y: self.cross(y, sight, placed.layer), out)
        return self._residual(x, self.mlp_norm, self.mlp, self.dropout)

    def _residual(
        self,
        x: Tensor,
        norm: nn.Module,
        layer: Callable[[Tensor], Tensor],
        rate: float,
        wanted: Tensor | None = None,
    ) -> Tensor:
        if self.norm_first:
            return select_rows(x, wanted) + dropout(layer(norm(x)), rate, self.training)
        x, y = select_rows(x, wanted), layer(x)
        at_once = add_norm(x, y, norm, rate if self.training else 0.0)
        summed: Tensor = norm(x + dropout(y, rate, self.training)) if at_once is None else at_once
        return summed


def _norm(config: StackConfig) -> nn.Module:
    return make_norm(config.norm, config.width, config.norm_eps, config.norm_bias)


def _relations(config: StackConfig) -> list[RelativePosition]:
    """One for all layers, two (of layers without and with a window), or one for each block."""
    match config.relation:
        case Rotary(base=base, local_base=local):
            return [RotaryPosition(base), RotaryPosition(base if local is None else local)]
        case Buckets(count=count, reach=reach):
            return [BucketedPosition(count=count, reach=reach, heads=config.heads, causal=config.causal)]
        case Shaw(reach=reach, values=values):
            made: Callable[[], RelativePosition] = partial(
                ShawPosition, reach=reach, width=config.head_width, values=values
            )
        case TransformerXl(reach=reach):
            sizes = {"width": config.width, "heads": config.heads, "head_width": config.head_width}
            made = partial(TransformerXlPosition, **sizes, reach=reach, dropout=config.dropout)
        case None:
            return [RelativePosition()]
    return [made() for _ in range(config.blocks or config.layers)]


class Stack(nn.Module):
    """The blocks, and the final norm where there is one."""

    def __init__(self, config: StackConfig, part: Part = "encoder") -> None:
        super().__init__()
        self.config, self.part = config, part
        self.recompute = False  # run blocks again for their gradient instead of keeping what they computed
        self.blocks = nn.ModuleList(
            Block(config, first=number == 0) for number in range(config.blocks or config.layers)
        )
        self.relations = nn.ModuleList(_relations(config))
        self.norm = _norm(config) if config.final_norm else nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "rows width"],
        batch: Packed,
        memory: Float[Tensor, "keys width"] | None = None,
        to_memory: Layout | None = None,
        cache: KVCache | None = None,
        trace: Trace | None = None,
        sequences: int = 0,
        wanted: Int[Tensor, " wanted"] | None = None,
    ) -> Float[Tensor, "some width"]:
        again = self.recompute and torch.is_grad_enabled()
        layout = Layout.within(batch) if cache is None else cache.layout(batch)
        sight = AttentionContext(
            layout=layout, memory=memory, memory_layout=to_memory, cache=cache, trace=trace, sequences=sequences
        )
        relations = [each for each in self.relations if isinstance(each, RelativePosition)]
        prepared = [relation.prepare(batch, x, keep=not again) for relation in relations]
        early = wanted is not None and memory is None and trace is None  # others are not computed to the end
        for layer in range(self.config.layers):
            number = layer * len(self.blocks) // self.config.layers
            every = self.config.global_every
            window = None if every and layer % every == 0 else self.config.window
            match self.config.relation:
                case Rotary():
                    which = 0 if window is None else 1
                case Shaw() | TransformerXl():
                    which = number
                case _:
                    which = 0
            placed = LayerContext(
                part=self.part,
                layer=layer,
                window=window,
                relation=relations[which],
                prepared=prepared[which],
                output_rows=wanted if early and layer == self.config.layers - 1 else None,
            )
            if trace is not None:
                trace.record_states(self.part, layer, sequences, x, layout.queries)
            if again:
                x = checkpoint(self.blocks[number], x, sight, placed, use_reentrant=False)
            else:
                x = self.blocks[number](x, sight, placed)
        x = dropout(self.norm(x), self.config.final_dropout, self.training)
        if trace is not None:
            trace.record_states(self.part, self.config.layers, sequences, x, layout.queries)
        return x if early else select_rows(x, wanted)


class Transformer(nn.Module):
    """Embedding and encoder, decoder, or both."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        first = _check(config)
        self.config = config
        # whether each new number of rows costs time, so that only few occur; None: as its dtype has it
        self.fills: bool | None = None
        self.embedding = Embedding(config.embedding, first.width)
        self.encoder = Stack(config.encoder) if config.encoder else None
        self.decoder = Stack(config.decoder, "decoder") if config.decoder else None
        if config.decoder_embedding and config.decoder:
            self.decoder_embedding = Embedding(config.decoder_embedding, config.decoder.width)

    @property
    def output_embedding(self) -> Embedding:
        """The embedding that a tied head scores against."""
        return self.decoder_embedding if self.config.decoder_embedding else self.embedding

    def forward(
        self,
        source: Packed,
        target: Packed | None = None,
        *,
        trace: Trace | None = None,
        wanted: Int[Tensor, " wanted"] | None = None,
    ) -> Float[Tensor, "some width"]:
        """The last hidden states, sequences end to end: the encoder's, or the decoder's where there is one.

        A model with both takes the decoder's tokens as `target`, one sequence for each of the source. `wanted` are the
        numbers of the rows that are asked for, in their order: the last block computes no others after its attention.
        """
        if (target is None) == (self.encoder is not None and self.decoder is not None):
            need = "needs a target" if target is None else "takes no target"
            raise HeedfulError(f"this model {need}: only models with an encoder and a decoder take two batches")
        if target is not None and len(target) != len(source):
            raise HeedfulError(f"{len(source)} source and {len(target)} target sequences: give one target for each")
        rows = (source if target is None else target).bounds[-1]
        count = len(source)
        if self._prepares_shapes():
            source, target = source.pad_to_bucket(), None if target is None else target.pad_to_bucket()
        if trace is not None:
            trace.check(self._layers(), self.traceable)
        made = self._run(source, target, trace, count, wanted)
        return made[:rows] if wanted is None else made

    def init_cache(self, source: Packed | int) -> KVCache:
        """Where decoding begins: the encoder's rows of these sequences, or room for so many without an encoder."""
        if self.decoder is None:
            raise HeedfulError("this model has no decoder: it cannot write")
        if self.encoder is None:
            return KVCache(source if isinstance(source, int) else len(source))
        if isinstance(source, int):
            raise HeedfulError("this model has an encoder: give the batch that it is to read")
        return KVCache(len(source), self.encoder(self.embedding(source), source), source.bounds)

    def decode_step(self, batch: Packed, cache: KVCache, *, trace: Trace | None = None) -> Float[Tensor, "rows width"]:
        """The decoder's rows of tokens that follow what the cache holds; they are remembered too."""
        assert self.decoder is not None
        if trace is not None:
            trace.check(self._layers(), self.traceable)
        placed, to_memory = cache.continue_positions(batch), cache.memory_layout(batch)
        x: Tensor = self.output_embedding(placed)
        x = self.decoder(x, placed, cache.memory, to_memory, cache, trace, len(batch))
        cache.advance(batch.lengths)
        return x

    @property
    def traceable(self) -> tuple[TraceItem, ...]:
        """What a trace can take of it."""
        return ALL_ITEMS

    def _layers(self) -> int:
        """Of the stack that has more."""
        return max((stack.config.layers for stack in (self.encoder, self.decoder) if stack is not None), default=0)

    def _prepares_shapes(self) -> bool:
        """Whether each new number of rows costs time and memory that is kept: oneDNN's bfloat16 products on a CPU.

        Forward and backward keep about 5 MB for each, and the first of each takes a fifth longer. Ours keep nothing.
        """
        weight = self.embedding.tokens.weight
        if weight.device.type != "cpu":
            return False
        if self.fills is not None:
            return self.fills
        return weight.dtype == torch.bfloat16 or (torch.is_autocast_enabled("cpu") and not trains_in_bfloat16())

    def _run(
        self, source: Packed, target: Packed | None, trace: Trace | None, count: int, wanted: Tensor | None
    ) -> Float[Tensor, "some width"]:
        x: Tensor = self.embedding(source)
        asked: dict[str, Any] = {"trace": trace, "sequences": count}
        if self.encoder is not None:
            x = self.encoder(x, source, wanted=wanted if self.decoder is None else None, **asked)
        if self.decoder is None:
            return x if self.encoder is not None else select_rows(x, wanted)
        if target is None:
            x = self.decoder(x, source, wanted=wanted, **asked)
            return x
        to_memory = Layout.of(target.bounds, source.bounds)
        x = self.decoder(self.output_embedding(target), target, x, to_memory, wanted=wanted, **asked)
        return x


def _check(config: ModelConfig) -> StackConfig:
    """The stack that comes first; a config whose parts do not fit together is refused."""
    encoder, decoder = config.encoder, config.decoder
    wrong = ""
    if encoder and decoder:
        if not decoder.cross:
            wrong = "a decoder beside an encoder attends to it: set cross = true"
        elif encoder.width != decoder.width:
            wrong = (
                f"the encoder is {encoder.width} wide and the decoder {decoder.width}: "
                "attention between them needs one width"
            )
    elif config.decoder_embedding:
        wrong = "decoder_embedding is for models with an encoder and a decoder"
    if (encoder and encoder.cross) or (decoder and decoder.cross and not encoder):
        wrong = "cross = true is for a decoder beside an encoder, but there is nothing to attend to"
    first = encoder or decoder
    if first is None:
        wrong = "a model has an encoder, a decoder, or both, but this config has neither"
    if first is None or wrong:
        raise HeedfulError(wrong)
    return first
