"""The packed Transformer that every family is built from (Vaswani et al. 2017; Devlin et al. 2019).

Hidden states are tensors [rows, width]: a row is a token, and the sequences of a batch are concatenated, as in
`Packed`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heedful.errors import DataError, ModelError
from heedful.model.attention import (
    Attention,
    AttentionContext,
    CrossAttention,
    ExecutionOptions,
    LayerContext,
    select_rows,
)
from heedful.model.config import (
    Disentangled,
    ModelConfig,
    Rotary,
    Shaw,
    StackConfig,
    TransformerXl,
)
from heedful.model.embedding import EmbeddingLayer
from heedful.model.kv_cache import KVCache
from heedful.model.relations import make_relations
from heedful.model.token_pruning import TokenPruning, first_and_mean, prune_tokens, received_attention, rows_after
from heedful.model.trace import ALL_ITEMS, Part, Trace, TraceItem
from heedful.nn.attend import repeat_heads
from heedful.nn.compiled_attention import operator_bounds
from heedful.nn.cpu_ops import add_norm, trains_in_bfloat16
from heedful.nn.dropout import dropout
from heedful.nn.layers import Mlp, make_norm
from heedful.nn.layout import Layout
from heedful.nn.positions import ProjectedDistances, RelativePosition
from heedful.packed import Packed


class Block(nn.Module):
    """A Transformer block: self-attention, cross-attention if there is an encoder, and an MLP.

    Each of these sublayers has a residual connection and a norm: x + sublayer(norm(x)) with pre-norm, norm(x +
    sublayer(x)) with post-norm.
    """

    def __init__(self, config: StackConfig, *, first: bool = False) -> None:
        """Make the layers.

        Args:
            config: Configuration of the stack.
            first: Whether this is the first block of the stack, which has no first norm if `first_norm` is False.
        """
        super().__init__()
        self.norm_first = config.norm_at == "pre"
        self.dropout = config.dropout
        out_dropout = config.attention_out_dropout
        self.attention_out_dropout = config.dropout if out_dropout is None else out_dropout
        self.attention = Attention(config)
        self.attention_norm = nn.Identity() if first and not config.first_norm else _norm(config)
        if config.cross:
            self.cross = CrossAttention(config)
            self.cross_norm = _norm(config)
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(
            width=config.width,
            inner_width=config.inner_width,
            activation=config.activation,
            gated=config.gated,
            bias=config.mlp_bias,
            up_bias=config.up_bias,
            inner_dropout=config.inner_dropout,
        )

    def forward(
        self, x: Float[Tensor, "rows width"], context: AttentionContext, layer: LayerContext
    ) -> Float[Tensor, "some width"]:
        fused = context.execution.fused_block
        if fused is not None and (rows := fused(self, x, context, layer)) is not None:
            return select_rows(rows, layer.output_rows)
        y = self._norm_before(x, self.attention_norm)
        if context.bounds is None:
            y = self.attention(y, context, layer)
        else:
            y = self.attention.forward_in_graph(y, context.bounds, layer)
        x = self._add(select_rows(x, layer.output_rows), y, self.attention_norm, self.attention_out_dropout)
        if context.memory is not None:
            y = self.cross(self._norm_before(x, self.cross_norm), context, layer.layer)
            x = self._add(x, y, self.cross_norm, self.attention_out_dropout)
        return self._add(x, self.mlp(self._norm_before(x, self.mlp_norm)), self.mlp_norm, self.dropout)

    def _norm_before(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return the input of a sublayer: norm(x) with pre-norm, x with post-norm."""
        normed: Tensor = norm(x) if self.norm_first else x
        return normed

    def _add(self, x: Tensor, y: Tensor, norm: nn.Module, p: float) -> Tensor:
        """Return x + dropout(y) with pre-norm, norm(x + dropout(y)) with post-norm."""
        if self.norm_first:
            return x + dropout(y, p, self.training)
        fused = add_norm(x, y, norm, p if self.training else 0.0)
        summed: Tensor = norm(x + dropout(y, p, self.training)) if fused is None else fused
        return summed


def _norm(config: StackConfig) -> nn.Module:
    """Make a norm as the configuration has it."""
    return make_norm(config.norm, config.width, config.norm_eps, config.norm_bias)


class Stack(nn.Module):
    """The blocks of an encoder or a decoder, and the final norm if there is one."""

    def __init__(self, config: StackConfig, part: Part = "encoder") -> None:
        super().__init__()
        self.config, self.part = config, part
        self.blocks = nn.ModuleList(Block(config, first=index == 0) for index in range(config.blocks or config.layers))
        self.relations = nn.ModuleList(make_relations(config))
        self.norm = _norm(config) if config.final_norm else nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "rows width"],
        batch: Packed,
        execution: ExecutionOptions,
        *,
        memory: Float[Tensor, "keys width"] | None = None,
        memory_layout: Layout | None = None,
        cache: KVCache | None = None,
        trace: Trace | None = None,
        sequences: int = 0,
        output_rows: Int[Tensor, " outputs"] | None = None,
        first_layer: int = 0,
        end_layer: int | None = None,
        pruning: TokenPruning | None = None,
    ) -> Float[Tensor, "some width"]:
        """Return the hidden states after the last block and the final norm.

        Args:
            x: Input of layer `first_layer`.
            batch: The batch, for positions, types and sequence boundaries.
            execution: How the stack is computed.
            memory: The encoder's hidden states, for cross-attention.
            memory_layout: Layout of cross-attention.
            cache: KV cache, in decoding.
            trace: Records attention and hidden states.
            sequences: Number of sequences to trace: all of the batch but a padding sequence.
            output_rows: Indices of the rows to return, in this order. If None, all rows.
            first_layer: First layer to compute.
            end_layer: Layer before which to stop; its input is returned, without the final norm. If None, all layers
                are computed.
            pruning: Which tokens the layers from `pruning.layer` on compute; `output_rows` must be among them.
        """
        checkpointed = execution.gradient_checkpointing and torch.is_grad_enabled()
        layout = Layout.within(batch) if cache is None else cache.layout(batch)
        bounds = None
        if execution.compiled and cache is None and trace is None and isinstance(self.config.relation, Rotary | None):
            bounds = operator_bounds(layout, x, self.config.head_width)
        context = AttentionContext(
            layout=layout,
            execution=execution,
            memory=memory,
            memory_layout=memory_layout,
            cache=cache,
            trace=trace,
            sequences=sequences,
            bounds=bounds,
        )
        relations = [relation for relation in self.relations if isinstance(relation, RelativePosition)]
        if isinstance(relations[-1], ProjectedDistances):
            # for inference, a ProjectedDistances for each block was appended; they replace the trained relation
            relations = relations[1:]
        prepared = [relation.prepare(batch, x, cache_bias=not checkpointed) for relation in relations]
        # the last block selects the output rows after its attention, so that its MLP computes only these
        last_block_selects = (
            output_rows is not None and memory is None and trace is None and first_layer < self.config.layers
        )
        for layer in range(first_layer, self.config.layers if end_layer is None else end_layer):
            block = layer * len(self.blocks) // self.config.layers  # index of the block; adjacent layers may share one
            relation = self._relation_of(layer, block, len(relations))
            if pruning is not None and layer == pruning.layer:
                assert output_rows is not None
                rows, batch = self._prune(pruning, x, batch, block)
                x, output_rows = x.index_select(0, rows), rows_after(rows, output_rows)
                context = replace(context, layout=Layout.within(batch), bounds=None)
            layer_context = LayerContext(
                part=self.part,
                layer=layer,
                window=self.config.window_of(layer),
                relation=relations[relation],
                prepared=prepared[relation],
                output_rows=output_rows if last_block_selects and layer == self.config.layers - 1 else None,
            )
            if trace is not None:
                trace.record_states(self.part, layer, sequences, x, layout.queries)
            if checkpointed:
                x = checkpoint(self.blocks[block], x, context, layer_context, use_reentrant=False)
            else:
                x = self.blocks[block](x, context, layer_context)
        if end_layer is not None:
            return x
        x = dropout(self.norm(x), self.config.final_dropout, self.training)
        if trace is not None:
            trace.record_states(self.part, self.config.layers, sequences, x, layout.queries)
        return x if last_block_selects else select_rows(x, output_rows)

    @torch.no_grad()
    def _prune(
        self, pruning: TokenPruning, x: Float[Tensor, "rows width"], batch: Packed, block: int
    ) -> tuple[Int[Tensor, " some"], Packed]:
        """Choose the rows of a block's input that remain, by the attention that they would receive in the block.

        Args:
            pruning: How many rows remain.
            x: Input of the block.
            batch: The batch of these rows.
            block: Index of the first block that computes only the remaining rows.

        Returns:
            The indices of the remaining rows, and the batch of these rows.
        """
        pruned_block = self.blocks[block]
        assert isinstance(pruned_block, Block)
        attention, x = pruned_block.attention, pruned_block._norm_before(x, pruned_block.attention_norm)
        q = attention.project_queries(first_and_mean(x, batch).flatten(0, 1)).unflatten(0, (len(batch), 2))
        k = repeat_heads(attention.project_keys(x), attention.heads)
        return prune_tokens(pruning, received_attention(q * attention.scale, k, batch), batch)

    def _relation_of(self, layer: int, block: int, count: int) -> int:
        """Return which of `count` relative position modules a layer uses; `make_relations` defines their order."""
        match self.config.relation:
            case Rotary():
                return 0 if self.config.window_of(layer) is None else count - 1
            case Shaw() | TransformerXl() | Disentangled() if count > 1:
                return block
        return 0


class Transformer(nn.Module):
    """A Transformer: an embedding, and an encoder, a decoder, or both.

    Assign other `ExecutionOptions` to `execution` to change how it is computed.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        first = _first_stack(config)
        self.config = config
        self.execution = ExecutionOptions()
        self.embedding = EmbeddingLayer(config.embedding, first.width)
        self.encoder = Stack(config.encoder) if config.encoder else None
        self.decoder = Stack(config.decoder, "decoder") if config.decoder else None
        if config.decoder_embedding and config.decoder:
            self.decoder_embedding = EmbeddingLayer(config.decoder_embedding, config.decoder.width)
            if config.shared_tokens:
                self.decoder_embedding.tokens = self.embedding.tokens

    @property
    def output_embedding(self) -> EmbeddingLayer:
        """The embedding whose token vectors a tied head uses as weights: the decoder's own, or the shared one."""
        return self.decoder_embedding if self.config.decoder_embedding else self.embedding

    def forward(
        self,
        source: Packed,
        target: Packed | None = None,
        *,
        trace: Trace | None = None,
        output_rows: Int[Tensor, " outputs"] | None = None,
    ) -> Float[Tensor, "some width"]:
        """Return the last hidden states, [rows, width]: the decoder's if the model has one, otherwise the encoder's.

        Args:
            source: Inputs of the encoder, or of the decoder of a model without encoder.
            target: Decoder inputs, one sequence for each source sequence, for models with encoder and decoder.
            trace: Records attention and hidden states.
            output_rows: Indices of the rows to return, in this order. If None, all rows.

        Raises:
            ModelError: If the target is missing, or if there is one, but the model has only one stack; if tokens are
                pruned, and hidden states of other tokens than the first ones are needed.
            DataError: If the numbers of source and target sequences differ.
        """
        self._check_batches(source, target)
        pruning = self.execution.token_pruning
        if pruning is not None and (output_rows is None or trace is not None):
            raise ModelError(
                "this model prunes tokens, so that it has no last hidden states of all of them: set "
                "execution.token_pruning to None, or load the run from which it was made"
            )
        if trace is not None:
            trace.check(self._layers(), self.traceable)
        num_rows, sequences = (source if target is None else target).bounds[-1], len(source)  # without padding
        if self._pads_to_bucket():
            source = source.pad_to_bucket()
            target = None if target is None else target.pad_to_bucket()
        first_layer = self.execution.frozen_layers if self.training else 0
        x: Tensor = self.frozen_states(source, trace=trace) if first_layer else self.embedding(source)
        if self.encoder is None and self.decoder is None:
            x = select_rows(x, output_rows)
        first_stack_arguments = {"trace": trace, "sequences": sequences, "first_layer": first_layer}
        if self.encoder is not None:
            encoder_rows = output_rows if self.decoder is None else None
            x = self.encoder(
                x, source, self.execution, **first_stack_arguments, output_rows=encoder_rows, pruning=pruning
            )
        if self.decoder is not None and target is None:
            x = self.decoder(x, source, self.execution, **first_stack_arguments, output_rows=output_rows)
        elif self.decoder is not None and target is not None:
            x = self.decoder(
                self.output_embedding(target),
                target,
                self.execution,
                memory=x,
                memory_layout=Layout.of(target.bounds, source.bounds),
                trace=trace,
                sequences=sequences,
                output_rows=output_rows,
            )
        return x[:num_rows] if output_rows is None else x

    @torch.no_grad()
    def frozen_states(self, source: Packed, *, trace: Trace | None = None) -> Float[Tensor, "rows width"]:
        """Return the outputs of the frozen layers of a model with one stack, from `source.states` if they are stored.

        Frozen layers have no dropout, even in training, so their outputs can be computed once and stored.
        """
        stack = self.encoder or self.decoder
        assert stack is not None
        if source.states is not None and trace is None:
            return source.states
        states: Tensor = stack(
            self.embedding(source),
            source,
            self.execution,
            trace=trace,
            sequences=len(source),
            end_layer=self.execution.frozen_layers,
        )
        return states

    def frozen_modules(self) -> list[nn.Module]:
        """Return the embedding, the frozen layers and their relative positions; an empty list if no layer is frozen."""
        stack, count = self.encoder or self.decoder, self.execution.frozen_layers
        if not count or stack is None:
            return []
        layers_share_relations = len(stack.relations) < len(stack.blocks)
        relations = stack.relations if layers_share_relations else stack.relations[:count]
        return [self.embedding, *stack.blocks[:count], *relations]

    def train(self, mode: bool = True) -> Self:
        """Set training or eval mode; frozen modules stay in eval mode."""
        super().train(mode)
        for module in self.frozen_modules():
            module.eval()
        return self

    def _check_batches(self, source: Packed, target: Packed | None) -> None:
        """Raise ModelError if the target is missing or not needed, DataError if it does not fit the source."""
        if (target is None) == (self.encoder is not None and self.decoder is not None):
            need = "needs a target" if target is None else "takes no target"
            raise ModelError(f"this model {need}: only models with an encoder and a decoder take two batches")
        if target is not None and len(target) != len(source):
            raise DataError(f"{len(source)} source and {len(target)} target sequences: give one target for each")

    def init_cache(self, source: Packed | int) -> KVCache:
        """Return the KV cache for the first decoding step; it has the encoder's hidden states, but no keys and values.

        Args:
            source: Inputs of the encoder; for a model without encoder, the prompts or their number.
        """
        if self.decoder is None:
            raise ModelError("this model has no decoder: it cannot generate text")
        if self.encoder is None:
            return KVCache(source if isinstance(source, int) else len(source))
        if isinstance(source, int):
            raise ModelError("this model has an encoder: give the batch that it is to read")
        memory = self.encoder(self.embedding(source), source, self.execution)
        return KVCache(len(source), memory, source.bounds)

    def decode_step(self, batch: Packed, cache: KVCache, *, trace: Trace | None = None) -> Float[Tensor, "rows width"]:
        """Compute the hidden states of tokens that continue the cached ones; their keys and values are cached."""
        assert self.decoder is not None
        if trace is not None:
            trace.check(self._layers(), self.traceable)
        continued = cache.continue_positions(batch)
        x: Tensor = self.decoder(
            self.output_embedding(continued),
            continued,
            self.execution,
            memory=cache.memory,
            memory_layout=cache.memory_layout(batch),
            cache=cache,
            trace=trace,
            sequences=len(batch),
        )
        cache.advance(batch.lengths)
        return x

    @property
    def traceable(self) -> tuple[TraceItem, ...]:
        """The values that a Trace can record from this model."""
        return ALL_ITEMS

    def _layers(self) -> int:
        """Return the number of layers of the deepest stack."""
        return max((stack.config.layers for stack in (self.encoder, self.decoder) if stack is not None), default=0)

    def _pads_to_bucket(self) -> bool:
        """Return whether to round the number of rows up.

        The default is yes for oneDNN's bfloat16 products on a CPU: for each new number of rows, oneDNN allocates about
        5 MB, and the first pass takes a fifth longer. Our own kernels have no such cost.
        """
        weight = self.embedding.tokens.weight
        if self.execution.pad_to_bucket is not None:
            return self.execution.pad_to_bucket
        if weight.device.type != "cpu":
            return False
        return weight.dtype == torch.bfloat16 or (torch.is_autocast_enabled("cpu") and not trains_in_bfloat16())


def _first_stack(config: ModelConfig) -> StackConfig:
    """Return the encoder, or the decoder of a model without encoder; raises ModelError for an inconsistent config."""
    encoder, decoder = config.encoder, config.decoder
    problem = ""
    if encoder and decoder:
        if not decoder.cross:
            problem = "a decoder beside an encoder attends to it: set cross = true"
        elif encoder.width != decoder.width:
            problem = (
                f"the encoder is {encoder.width} wide and the decoder {decoder.width}: "
                "attention between them needs one width"
            )
    elif config.decoder_embedding:
        problem = "decoder_embedding is for models with an encoder and a decoder"
    if config.shared_tokens:
        first_tokens, second_tokens = config.embedding, config.decoder_embedding
        if second_tokens is None or (first_tokens.vocabulary, first_tokens.width) != (
            second_tokens.vocabulary,
            second_tokens.width,
        ):
            problem = "shared_tokens = true needs a decoder_embedding with the vocabulary and the width of embedding"
    if (encoder and encoder.cross) or (decoder and decoder.cross and not encoder):
        problem = "cross = true is for a decoder beside an encoder, but there is nothing to attend to"
    first = encoder or decoder
    if first is None:
        problem = "a model has an encoder, a decoder, or both, but this config has neither"
    if first is None or problem:
        raise ModelError(problem)
    return first
