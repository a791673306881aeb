"""The graph of an encoder or a decoder with its head, on padded rows [batch, sequence, width].

The functions follow the modules of model/stack.py and model/heads.py, and use their tensors. Functions `add_...` add
operators to a graph, and return the name of the output value. Padding may be at either end of a sequence: positions are
counted over unmasked tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.infer.export.onnx_graph import (
    BOOL,
    FLOAT,
    INT64,
    Graph,
    Output,
    add_activation,
    add_linear,
    add_mlp,
    add_norm_layer,
)
from heedful.model import config as c
from heedful.model import heads as h
from heedful.model.attention import Attention
from heedful.model.embedding import EmbeddingLayer
from heedful.model.stack import Block, Stack, Transformer
from heedful.nn.cpu_attention import split_qkv
from heedful.nn.positions import (
    BucketedPosition,
    DisentangledPosition,
    RotaryPosition,
    ShawPosition,
    distance_buckets,
    sinusoid,
)

BATCH, CHOICES, SEQUENCE = "batch_size", "num_choices", "sequence_length"
MASKED_SCORE = -3e4  # added to the scores of masked keys; its exp is 0, and float16 can represent it
MIN_FLOAT = float(np.finfo(np.float32).min)
GENERATIVE_HEADS = (c.NextToken, c.NextTokenAndChoice, c.PermutedTokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchInputs:
    """The names of the values in the graph that represent a padded batch."""

    tokens: str  # token ids, [batch, sequence]
    mask: str  # whether each position holds a token, [batch, sequence]
    types: str | None  # token type ids, [batch, sequence], or None if all are 0
    max_positions: int  # length of the graph's tables of positions


def build_graph(bundle: ModelBundle, max_positions: int) -> Graph:
    """Build the graph of a model.

    The graph's inputs are input_ids, attention_mask and, if the model has token types, token_type_ids. Its outputs are
    those of the head, see `add_head`.

    Args:
        bundle: The model.
        max_positions: Length of tables of positions, which limits the tokens of a text. If 0, there are no tables.

    Raises:
        HeedfulError: If the model cannot be exported.
    """
    _check_exportable(bundle)
    g = Graph({id(parameter): name for name, parameter in bundle.named_tensors().items()})
    has_choices = isinstance(bundle.config.head, c.Choice)
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * (bundle.config.model.embedding.types > 1)
    g.inputs = dict.fromkeys(names, (BATCH, CHOICES, SEQUENCE) if has_choices else (BATCH, SEQUENCE))
    inputs = [_flatten_choices(g, name) for name in names] if has_choices else names
    batch = BatchInputs(
        tokens=inputs[0],
        mask=g.op("Cast", inputs[1], to=BOOL),
        types=inputs[2] if inputs[2:] else None,
        max_positions=max_positions,
    )
    stack = bundle.model.encoder or bundle.model.decoder
    assert stack is not None
    rows = add_stack(g, stack, add_embedding(g, bundle.model.embedding, batch), batch)
    g.outputs = add_head(g, bundle, rows, batch)
    return g


def _check_exportable(bundle: ModelBundle) -> None:
    """Raise a HeedfulError unless a model is a single stack of blocks with a head that can be exported."""
    model, head = bundle.config.model, bundle.config.head
    entries = FAMILIES[bundle.config.family].heads.values()
    reason = ""
    if type(bundle.model) is not Transformer:
        reason = "is not a plain Transformer"
    elif model.encoder is not None and model.decoder is not None:
        reason = "has a decoder beside its encoder"
        if encoder_heads := [entry.kind for entry in entries if entry.encoder_only]:
            reason += (
                f" (without it, if the folder holds the head: load it with head= one of {', '.join(encoder_heads)})"
            )
    elif isinstance((model.encoder or model.decoder).relation, c.TransformerXl):  # type: ignore[union-attr]
        reason = "has two-stream attention"
    elif isinstance(head, GENERATIVE_HEADS):
        reason = f'has a "{head.kind}" head'
    if reason:
        raise HeedfulError(
            f"{bundle.source} ({bundle.config.family}) {reason}: Heedful exports one stack of blocks, alone or "
            "with a head: sequence_classification, token_classification, question_answering, multiple_choice, "
            "embedding, pooler, next_sentence, masked_lm, pretraining, replaced_token_detection"
        )


def _flatten_choices(g: Graph, name: str) -> str:
    """Add a reshape of an input from [batch, choices, sequence] to [batch * choices, sequence]."""
    length = g.op("Gather", g.op("Shape", name), [2])
    return g.op("Reshape", name, g.op("Concat", [-1], length, axis=0))


# -- positions ------------------------------------------------------------------------------------------------


def add_position_ids(g: Graph, batch: BatchInputs) -> str:
    """Add the positions of tokens, counted from 0 over the unmasked tokens of each sequence, [batch, sequence]."""
    count = g.op("CumSum", g.op("Cast", batch.mask, to=INT64), 1)
    return g.op("Max", g.op("Sub", count, 1), 0)


def add_relative_positions(g: Graph, batch: BatchInputs) -> str:
    """Add the position of each key minus that of each query, [sequence, sequence]."""
    position = g.op("Range", 0, g.op("Gather", g.op("Shape", batch.tokens), 1), 1)
    return g.op("Sub", g.op("Unsqueeze", position, [0]), g.op("Unsqueeze", position, [1]))


def add_distance_indices(g: Graph, batch: BatchInputs, reach: int) -> str:
    """Add relative positions as indices into a table with rows for -reach to reach, [sequence, sequence]."""
    return g.op("Add", g.op("Clip", add_relative_positions(g, batch), -reach, reach), reach)


def add_embedding(g: Graph, layer: EmbeddingLayer, batch: BatchInputs) -> str:
    """Add the sum of token, position and type embeddings with norm and projection, [batch, sequence, width]."""
    config = layer.config
    x = g.op("Gather", g.weight(layer.tokens.weight), batch.tokens)
    if config.scale != 1.0:
        x = g.op("Mul", x, config.scale)
    position = ""
    match config.positions:
        case c.Learned(offset=offset):
            table = g.weight(layer.positions.weight)
            position = g.op("Gather", table, g.op("Add", add_position_ids(g, batch), offset))
        case c.Sinusoidal(layout=layout, base=base, offset=offset, width=width):
            steps = torch.arange(offset, offset + batch.max_positions)
            sinusoids = sinusoid(steps, width or config.width, layout, base).float().numpy()
            position = g.op("Gather", sinusoids, add_position_ids(g, batch))
    if config.positions is not None:
        concatenates = config.positions.join == "concatenate"
        x = g.op("Concat", x, position, axis=-1) if concatenates else g.op("Add", x, position)
    if config.types:
        x = g.op("Add", x, g.op("Gather", g.weight(layer.types.weight), 0 if batch.types is None else batch.types))
    x = add_norm_layer(g, layer.norm, x)
    return add_linear(g, layer.project, x) if isinstance(layer.project, nn.Linear) else x


# -- the stack ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionInputs:
    """The values that depend on positions, shared by all layers with the same window."""

    bias: str  # bias of the attention scores, [batch, heads or 1, sequence or 1, sequence]
    # (sines, cosines) for q and k, each [batch, 1, sequence, head width / 2], or () without rotation
    rotations: tuple[str, ...]
    distance_indices: str  # row of each distance in a table, [sequence, sequence], or "" without a table
    distance_vectors: torch.Tensor | None = None  # table for disentangled attention, which each layer projects


def add_stack(g: Graph, stack: Stack, x: str, batch: BatchInputs) -> str:
    """Add all layers and the final norm; a block that several layers share is added for each of them."""
    config = stack.config
    positions_by_window: dict[int | None, PositionInputs] = {}
    for layer in range(config.layers):
        number = layer * len(stack.blocks) // config.layers
        window = config.window_of(layer)
        if window not in positions_by_window:
            positions_by_window[window] = _position_inputs(g, stack, window, batch)
        block = stack.blocks[number]
        assert isinstance(block, Block)
        shaw = stack.relations[number] if isinstance(config.relation, c.Shaw) else None
        assert isinstance(shaw, ShawPosition | None)
        x = _add_block(g, block, x, positions_by_window[window], shaw, config)
    return add_norm_layer(g, stack.norm, x)


def _position_inputs(g: Graph, stack: Stack, window: int | None, batch: BatchInputs) -> PositionInputs:
    """Add the values that depend on positions, for the layers with this window.

    Raises:
        HeedfulError: If rotations depend on the length of the text.
    """
    rotations: tuple[str, ...] = ()
    match stack.config.relation:
        case c.Rotary():
            rotary = stack.relations[0 if window is None else len(stack.relations) - 1]
            assert isinstance(rotary, RotaryPosition)
            if rotary.by_length is not None:
                raise HeedfulError(
                    "rotations that depend on a text's length (dynamic NTK, LongRoPE) cannot be exported"
                )
            angles = torch.arange(batch.max_positions)[:, None] * rotary.frequencies()
            table = (torch.cat([angles.sin(), angles.cos()], -1) * rotary.magnitude).float().numpy()
            rotations = g.split(g.op("Unsqueeze", g.op("Gather", table, add_position_ids(g, batch)), [1]), 2)
        case c.Disentangled():
            relation = stack.relations[0]
            assert isinstance(relation, DisentangledPosition)
            # key minus query from its smallest value; the relation counts query minus key
            query_minus_key = torch.arange(batch.max_positions - 1, -batch.max_positions, -1)
            table_rows = relation.rows(query_minus_key).numpy()
            distances = add_distance_indices(g, batch, batch.max_positions - 1)
            return PositionInputs(
                distance_indices=g.op("Gather", table_rows, distances),
                bias=_add_bias(g, stack, window, batch),
                rotations=(),
                distance_vectors=relation.norm(relation.table.weight),
            )
        case c.Shaw(reach=reach):
            bias = _add_bias(g, stack, window, batch)
            return PositionInputs(bias=bias, rotations=(), distance_indices=add_distance_indices(g, batch, reach))
    return PositionInputs(bias=_add_bias(g, stack, window, batch), rotations=rotations, distance_indices="")


def _add_bias(g: Graph, stack: Stack, window: int | None, batch: BatchInputs) -> str:
    """Add the bias of the attention scores: MASKED_SCORE for masked keys, plus the bias of distance buckets."""
    config = stack.config
    visible = g.op("Unsqueeze", batch.mask, [1, 2])
    if config.causal:
        visible = g.op("And", visible, g.op("LessOrEqual", add_relative_positions(g, batch), 0))
    if window is not None:
        distance = g.op("Abs", add_relative_positions(g, batch))
        visible = g.op("And", visible, g.op("LessOrEqual", distance, window))
    bias = g.op("Where", visible, 0.0, MASKED_SCORE)
    if isinstance(config.relation, c.Buckets):
        relation, reach = stack.relations[0], config.relation.reach
        assert isinstance(relation, BucketedPosition)
        buckets = distance_buckets(torch.arange(-reach, reach + 1), relation.count, reach, relation.causal)
        table = relation.table(buckets).detach().numpy()
        by_distance = g.op("Gather", table, add_distance_indices(g, batch, reach))
        bias = g.op("Add", bias, g.op("Transpose", by_distance, perm=(2, 0, 1)))
    return bias


def _add_block(
    g: Graph, block: Block, x: str, positions: PositionInputs, shaw: ShawPosition | None, config: c.StackConfig
) -> str:
    """Add a block: attention and MLP, each with a residual connection and with its norm before or after it."""
    layers: tuple[tuple[nn.Module, Callable[[str], str]], ...] = (
        (block.attention_norm, lambda y: add_attention(g, block.attention, y, positions, shaw, config)),
        (block.mlp_norm, lambda y: add_mlp(g, block.mlp, y, config.activation)),
    )
    for norm, add_layer in layers:
        residual = g.op("Add", x, add_layer(add_norm_layer(g, norm, x) if block.norm_first else x))
        x = residual if block.norm_first else add_norm_layer(g, norm, residual)
    return x


def _add_disentangled_scores(
    g: Graph, attention: Attention, positions: PositionInputs, q: str, k: str, scores: str
) -> str:
    """Add q K(p) + k Q(p) for the vectors p of distances (He et al. 2021); q is already scaled.

    Of `scores`, [batch, heads, sequence, sequence], only the shape is used.
    """
    assert positions.distance_vectors is not None
    projected = split_qkv(attention.qkv(positions.distance_vectors), attention.heads)
    position_q, position_k, _ = (x.detach() for x in projected)
    indices = g.op("Expand", positions.distance_indices, g.op("Shape", scores))
    content_to_position = g.op("Einsum", q, position_k.numpy(), equation="bhid,ghd->bhig")
    scaled_k = g.op("Mul", k, attention.scale)
    position_to_content = g.op("Einsum", scaled_k, position_q.numpy(), equation="bhjd,ghd->bhjg")
    by_query = g.op("GatherElements", content_to_position, indices, axis=-1)
    swapped_indices = g.op("Transpose", indices, perm=(0, 1, 3, 2))
    by_key = g.op("GatherElements", position_to_content, swapped_indices, axis=-1)
    return g.op("Add", by_query, g.op("Transpose", by_key, perm=(0, 1, 3, 2)))


def add_attention(
    g: Graph, attention: Attention, x: str, positions: PositionInputs, shaw: ShawPosition | None, config: c.StackConfig
) -> str:
    """Add softmax(scale q k + bias) v of all heads, and the output projection."""
    heads, width = config.heads, config.head_width
    qkv = zip(g.split(add_linear(g, attention.qkv, x), *attention.sizes), attention.sizes, strict=True)
    parts = (g.op("Reshape", projected, [0, 0, size // width, width]) for projected, size in qkv)
    q, k, v = (g.op("Transpose", part, perm=(0, 2, 1, 3)) for part in parts)
    q, k = add_norm_layer(g, attention.q_norm, q), add_norm_layer(g, attention.k_norm, k)
    if attention.kv_heads < heads:
        key_head = np.arange(heads) // (heads // attention.kv_heads)  # key head of each query head
        k, v = g.op("Gather", k, key_head, axis=1), g.op("Gather", v, key_head, axis=1)
    if positions.rotations:
        q, k = _rotate(g, q, *positions.rotations), _rotate(g, k, *positions.rotations)
    if attention.scale != 1.0:
        q = g.op("Mul", q, attention.scale)
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=(0, 1, 3, 2)))
    if positions.distance_vectors is not None:
        scores = g.op("Add", scores, _add_disentangled_scores(g, attention, positions, q, k, scores))
    if shaw is not None:
        distance_keys = g.op("Gather", g.weight(shaw.keys.weight), positions.distance_indices)
        scores = g.op("Add", scores, g.op("Einsum", q, distance_keys, equation="bhid,ijd->bhij"))
    weights = g.op("Softmax", g.op("Add", scores, positions.bias), axis=-1)
    mixed = g.op("MatMul", weights, v)
    if shaw is not None and shaw.has_values:
        distance_values = g.op("Gather", g.weight(shaw.values.weight), positions.distance_indices)
        mixed = g.op("Add", mixed, g.op("Einsum", weights, distance_values, equation="bhij,ijd->bhid"))
    rows = g.op("Reshape", g.op("Transpose", mixed, perm=(0, 2, 1, 3)), [0, 0, heads * width])
    return add_linear(g, attention.out, rows)


def _rotate(g: Graph, x: str, sin: str, cos: str) -> str:
    """Add the rotation of x, [batch, heads, sequence, head width]; a pair has a coordinate in each half of x."""
    first, second = g.split(x, 2)
    left = g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin))
    right = g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin))
    return g.op("Concat", left, right, axis=-1)


# -- heads ----------------------------------------------------------------------------------------------------


def add_head(g: Graph, bundle: ModelBundle, x: str, batch: BatchInputs) -> dict[str, Output]:
    """Add the head of a model on its last hidden states; return the outputs by their names in transformers."""
    config, width = bundle.config.head, bundle.config.model.width
    head: Any = bundle.head
    hidden_states = {"last_hidden_state": Output(x, (BATCH, SEQUENCE, width))}
    match config:
        case None:
            return hidden_states
        case c.Pooled():
            pooled = _add_summary(g, head, c.Summary(), x, batch)
            return hidden_states | {"pooler_output": Output(pooled, (BATCH, width))}
        case c.SentenceEmbedding():
            vectors = _add_sentence_vectors(g, head, x, batch)
            return hidden_states | {"sentence_embedding": Output(vectors, (BATCH, config.width(bundle.config.model)))}
        case c.MaskedTokens():
            return {"logits": _add_masked_tokens(g, head, config, x)}
        case c.NextSentenceScores():
            return {"logits": _add_next_sentence(g, head, x, batch)}
        case c.Pretraining():
            tokens = _add_masked_tokens(g, head.masked, config, x)
            return {
                "prediction_logits": tokens,
                "seq_relationship_logits": _add_next_sentence(g, head.next, x, batch),
            }
        case c.Classes():
            scores = add_linear(g, head.out, _add_summary(g, head, config, x, batch))
            return {"logits": Output(scores, (BATCH, len(config.labels)))}
        case c.Choice():
            scores = add_linear(g, head.out, _add_summary(g, head, config, x, batch))
            shape = g.op("Gather", g.op("Shape", "input_ids"), [0, 1])
            return {"logits": Output(g.op("Reshape", scores, shape), (BATCH, CHOICES))}
        case c.TokenClasses() | c.SpanScores() | c.ReplacedTokens():
            scores = add_linear(g, head.out, _add_transform(g, head.first, config, x))
            return _rowwise_outputs(g, config, scores)
    raise AssertionError(f"no operators for {config}")


def _rowwise_outputs(
    g: Graph, config: c.TokenClasses | c.SpanScores | c.ReplacedTokens, scores: str
) -> dict[str, Output]:
    """Return the outputs of a head that scores each token, from its logits [batch, sequence, classes]."""
    if isinstance(config, c.TokenClasses):
        return {"logits": Output(scores, (BATCH, SEQUENCE, len(config.labels)))}
    logits_by_name = {"logits": scores}
    if isinstance(config, c.SpanScores):
        logits_by_name = dict(zip(("start_logits", "end_logits"), g.split(scores, 2), strict=True))
    return {name: Output(g.op("Squeeze", logits, [-1]), (BATCH, SEQUENCE)) for name, logits in logits_by_name.items()}


def _add_transform(g: Graph, transform: h.Transform, config: c.Summary | c.Rowwise, x: str) -> str:
    """Add the hidden layer of a head: linear, activation and norm; return x if the head has no hidden layer."""
    if not isinstance(transform.dense, nn.Linear):
        return x
    x = add_linear(g, transform.dense, x)
    return add_norm_layer(g, transform.norm, add_activation(g, config.activation, x) if config.activation else x)


def _add_summary(g: Graph, head: Any, config: c.Summary, x: str, batch: BatchInputs) -> str:
    """Add the pooled vector of each sequence, [batch, width]: pooling and hidden layer, in the order of the head."""
    if config.pools_last:
        return add_pooling(g, _add_transform(g, head.first, config, x), batch, config.pooling)
    return _add_transform(g, head.first, config, add_pooling(g, x, batch, config.pooling))


def _add_masked_tokens(g: Graph, head: h.MaskedTokensHead, config: c.MaskedTokens | c.Pretraining, x: str) -> Output:
    """Add the logits of a masked language model, [batch, sequence, vocabulary]."""
    if isinstance(head.dense, nn.Linear):
        x = add_norm_layer(g, head.norm, add_activation(g, config.activation, add_linear(g, head.dense, x)))
    return Output(add_linear(g, head.decoder, x), (BATCH, SEQUENCE, head.decoder.out_features))


def _add_next_sentence(g: Graph, head: h.NextSentenceHead, x: str, batch: BatchInputs) -> Output:
    """Add the logits of next-sentence prediction, [batch, 2]."""
    return Output(add_linear(g, head.out, _add_summary(g, head, c.Summary(), x, batch)), (BATCH, 2))


def _add_sentence_vectors(g: Graph, head: h.SentenceEmbeddingHead, x: str, batch: BatchInputs) -> str:
    """Add sentence embeddings, [batch, dimensions]: pooling, linear layers, normalisation and truncation."""
    config = head.config
    vectors = g.op("Concat", *(add_pooling(g, x, batch, pooling) for pooling in config.pooling), axis=-1)
    for linear, layer in zip(head.dense, config.dense, strict=True):
        vectors = add_linear(g, cast(nn.Linear, linear), vectors)
        vectors = add_activation(g, layer.activation, vectors) if layer.activation else vectors
    if config.normalise:
        vectors = g.op("Div", vectors, g.op("Max", g.op("ReduceL2", vectors, axes=(-1,), keepdims=1), 1e-12))
    return vectors if config.dimensions is None else g.op("Slice", vectors, [0], [config.dimensions], [1])


def add_pooling(g: Graph, x: str, batch: BatchInputs, pooling: c.Pooling) -> str:
    """Add the pooling of the unmasked tokens of each sequence, [batch, width]."""
    mask = g.op("Cast", batch.mask, to=FLOAT)
    if pooling in ("first", "last"):
        position = g.op("ArgMax", mask, axis=1, keepdims=1, select_last_index=int(pooling == "last"))
        return g.op("GatherND", x, position, batch_dims=1)
    if pooling == "max":
        visible = g.op("Where", g.op("Unsqueeze", batch.mask, [2]), x, MIN_FLOAT)
        return g.op("ReduceMax", visible, axes=(1,), keepdims=0)
    sums = g.op("ReduceSum", g.op("Mul", x, g.op("Unsqueeze", mask, [2])), [1], keepdims=0)
    count = g.op("ReduceSum", mask, [1], keepdims=1)
    return g.op("Div", sums, g.op("Sqrt", count) if pooling == "mean_sqrt_length" else count)
