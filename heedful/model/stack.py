"""One packed Transformer for every family (Vaswani et al. 2017; Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heedful.errors import HeedfulError
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, Sinusoidal, StackConfig
from heedful.nn.attend import attend
from heedful.nn.dropout import dropout
from heedful.nn.layers import Mlp, make_norm
from heedful.nn.layout import Layout
from heedful.nn.positions import sinusoid
from heedful.packed import Packed


class Embedding(nn.Module):
    """dropout(norm(scale token + position + type)), then a projection where the widths differ."""

    def __init__(self, config: EmbeddingConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width, padding_idx=config.padding)
        joined = config.width
        if config.positions is not None and config.positions.join == "concatenate":
            joined += config.positions.width or 0
        if isinstance(config.positions, Learned):
            place = config.positions
            self.positions = nn.Embedding(place.count, place.width or config.width, padding_idx=place.padding)
        if config.types:
            self.types = nn.Embedding(config.types, joined)
        self.norm = make_norm(config.norm, joined, config.norm_eps, config.norm_bias) if config.norm else nn.Identity()
        self.project = nn.Linear(joined, width) if joined != width else nn.Identity()

    def forward(self, batch: Packed) -> Float[Tensor, "rows width"]:
        self._check(batch)
        config = self.config
        x: Tensor = self.tokens(batch.tokens)
        if config.scale != 1.0:
            x = x * config.scale
        place: Tensor | None = None
        match config.positions:
            case Learned(offset=offset):
                place = self.positions(batch.positions + offset)
            case Sinusoidal(layout=layout, base=base, offset=offset, width=width):
                longest = max(batch.lengths, default=0)
                steps = torch.arange(offset, offset + longest, device=x.device)
                place = sinusoid(steps, width or config.width, layout, base).to(x)[batch.positions]
        if place is not None and config.positions is not None:
            x = torch.cat([x, place], -1) if config.positions.join == "concatenate" else x + place
        if config.types:
            x = x + self.types(batch.types)
        x = dropout(self.norm(x), config.dropout, self.training)
        projected: Tensor = self.project(x)
        return projected

    def _check(self, batch: Packed) -> None:
        place = self.config.positions
        if isinstance(place, Learned) and max(batch.lengths, default=0) > place.count - place.offset:
            longest = max(range(len(batch)), key=batch.lengths.__getitem__)
            raise HeedfulError(
                f"sequence {longest} has {batch.lengths[longest]} tokens, but the model has positions for "
                f"{place.count - place.offset}: cut it into windows or truncate it"
            )
        if batch.tokens.device.type == "cpu" and len(batch.tokens):  # elsewhere looking would stall the queue
            for what, ids, count in (
                ("token", batch.tokens, self.config.vocabulary),
                ("type", batch.types, self.config.types),
            ):
                low, high = (int(edge) for edge in ids.aminmax())
                if count and not 0 <= low <= high < count:
                    bad = low if low < 0 else high
                    raise HeedfulError(
                        f"{what} id {bad} was given, but this model knows 0 to {count - 1}: "
                        "was the batch made with another tokenizer?"
                    )


class Attention(nn.Module):
    """Multi-head attention of the rows of each sequence to each other (Vaswani et al. 2017, section 3.2.2)."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.heads, self.causal, self.dropout = config.heads, config.causal, config.attention_dropout
        self.scale = _scale(config)
        self.qkv = nn.Linear(config.width, 3 * inner, bias=config.attention_bias)
        self.out = nn.Linear(inner, config.width, bias=config.attention_bias)

    def forward(self, x: Float[Tensor, "rows width"], layout: Layout, window: int | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(q, k, v, layout, scale=self.scale, causal=self.causal, window=window, dropout=dropout)
        out: Tensor = self.out(mixed.flatten(1))
        return out


class CrossAttention(nn.Module):
    """Multi-head attention of the rows of each sequence to the encoder's rows of the same sequence."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.scale = _scale(config)
        self.q = nn.Linear(config.width, inner, bias=config.attention_bias)
        self.kv = nn.Linear(config.width, 2 * inner, bias=config.attention_bias)
        self.out = nn.Linear(inner, config.width, bias=config.attention_bias)

    def forward(self, x: Float[Tensor, "rows width"], memory: Float[Tensor, "keys width"], layout: Layout) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = self.kv(memory).unflatten(-1, (2, self.heads, -1)).unbind(1)
        dropout = self.dropout if self.training else 0.0
        out: Tensor = self.out(attend(q, k, v, layout, scale=self.scale, dropout=dropout).flatten(1))
        return out


def _scale(config: StackConfig) -> float:
    return 1 / sqrt(config.head_width) if config.score_scale is None else config.score_scale


class Block(nn.Module):
    """Attention, attention to the encoder where there is one, and the MLP, each with a residual and a norm."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_at == "pre"
        self.dropout = config.dropout
        out = config.attention_out_dropout
        self.attention_out_dropout = config.dropout if out is None else out
        self.attention, self.attention_norm = Attention(config), _norm(config)
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

    def forward(
        self,
        x: Float[Tensor, "rows width"],
        layout: Layout,
        window: int | None,
        memory: Float[Tensor, "keys width"] | None,
        to_memory: Layout | None,
    ) -> Float[Tensor, "rows width"]:
        out = self.attention_out_dropout
        x = self._residual(x, self.attention_norm, lambda y: self.attention(y, layout, window), out)
        if memory is not None:
            x = self._residual(x, self.cross_norm, lambda y: self.cross(y, memory, to_memory), out)
        return self._residual(x, self.mlp_norm, self.mlp, self.dropout)

    def _residual(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor], rate: float) -> Tensor:
        y = dropout(layer(norm(x) if self.norm_first else x), rate, self.training)
        summed: Tensor = x + y if self.norm_first else norm(x + y)
        return summed


def _norm(config: StackConfig) -> nn.Module:
    return make_norm(config.norm, config.width, config.norm_eps, config.norm_bias)


class Stack(nn.Module):
    """The blocks, and the final norm where there is one."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False  # run blocks again for their gradient instead of keeping what they computed
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config) if config.final_norm else nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "rows width"],
        layout: Layout,
        memory: Float[Tensor, "keys width"] | None = None,
        to_memory: Layout | None = None,
    ) -> Float[Tensor, "rows width"]:
        every = self.config.global_every
        for number, block in enumerate(self.blocks):
            window = None if every and number % every == 0 else self.config.window
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, layout, window, memory, to_memory, use_reentrant=False)
            else:
                x = block(x, layout, window, memory, to_memory)
        normed: Tensor = self.norm(x)
        return normed


class Transformer(nn.Module):
    """Embedding and encoder, decoder, or both."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        first = _check(config)
        self.config = config
        self.embedding = Embedding(config.embedding, first.width)
        self.encoder = Stack(config.encoder) if config.encoder else None
        self.decoder = Stack(config.decoder) if config.decoder else None
        if config.decoder_embedding and config.decoder:
            self.decoder_embedding = Embedding(config.decoder_embedding, config.decoder.width)

    @property
    def output_embedding(self) -> Embedding:
        """The embedding that a tied head scores against."""
        return self.decoder_embedding if self.config.decoder_embedding else self.embedding

    def forward(self, source: Packed, target: Packed | None = None) -> Float[Tensor, "rows width"]:
        """The last hidden states, sequences end to end: the encoder's, or the decoder's where there is one.

        A model with both takes the decoder's tokens as `target`, one sequence for each of the source.
        """
        if (target is None) == (self.encoder is not None and self.decoder is not None):
            need = "needs a target" if target is None else "takes no target"
            raise HeedfulError(f"this model {need}: only models with an encoder and a decoder take two batches")
        if target is not None and len(target) != len(source):
            raise HeedfulError(f"{len(source)} source and {len(target)} target sequences: give one target for each")
        rows = (source if target is None else target).bounds[-1]
        if self._prepares_shapes():
            source, target = source.filled(), None if target is None else target.filled()
        return self._run(source, target)[:rows]

    def _prepares_shapes(self) -> bool:
        """Whether each new number of rows costs time and memory that is kept: oneDNN's bfloat16 products on a CPU.

        Forward and backward keep about 5 MB for each, and the first of each takes a fifth longer.
        """
        weight = self.embedding.tokens.weight
        return weight.device.type == "cpu" and (weight.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu"))

    def _run(self, source: Packed, target: Packed | None) -> Float[Tensor, "rows width"]:
        layout = Layout.of(source.bounds)
        x: Tensor = self.embedding(source)
        if self.encoder is not None:
            x = self.encoder(x, layout)
        if target is None:
            if self.decoder is not None:
                x = self.decoder(x, layout)
            return x
        assert self.decoder is not None
        y: Tensor = self.output_embedding(target)
        y = self.decoder(y, Layout.of(target.bounds), x, Layout.of(target.bounds, source.bounds))
        return y


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
