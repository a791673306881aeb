"""An encoder or a decoder with its head as a graph of ONNX operators, on rows padded to [batch, sequence, width].

It follows model/stack.py and model/heads.py part by part and takes their tensors. Padding may be at either end of a
sequence: positions are counted among the tokens that the mask shows.
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
from heedful.infer.export.onnx_graph import BOOL, FLOAT, INT64, Graph, Output, activate, add_linear, mlp, norm
from heedful.model import config as c
from heedful.model import heads as h
from heedful.model.embedding import EmbeddingLayer
from heedful.model.stack import Attention, Block, Stack, Transformer
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
HIDDEN = -3e4  # added to the scores of hidden keys: exp of it is 0, and float16 holds it, should the graph become that
LEAST = float(np.finfo(np.float32).min)
WRITING = (c.NextToken, c.NextTokenAndChoice, c.PermutedTokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchInputs:
    """The batch that comes in, as values of the graph."""

    tokens: str  # [batch, sequence]
    seen: str  # the same shape: which of them are there
    types: str | None  # None: all are of type 0
    most: int  # places that tables of waves have


def build_graph(loaded: ModelBundle, most: int) -> Graph:
    """From input_ids, attention_mask and, where the model tells types apart, token_type_ids to what the head says.

    Tables of waves have `most` places. What has no such graph is refused.
    """
    _check(loaded)
    g = Graph({id(parameter): name for name, parameter in loaded.named_tensors().items()})
    choice = isinstance(loaded.config.head, c.Choice)
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * (loaded.config.model.embedding.types > 1)
    g.inputs = dict.fromkeys(names, (BATCH, CHOICES, SEQUENCE) if choice else (BATCH, SEQUENCE))
    inputs = [_lines(g, name) for name in names] if choice else names
    seen = g.op("Cast", inputs[1], to=BOOL)
    feed = BatchInputs(tokens=inputs[0], seen=seen, types=inputs[2] if inputs[2:] else None, most=most)
    only = loaded.model.encoder or loaded.model.decoder
    assert only is not None
    rows = stack(g, only, embedding(g, loaded.model.embedding, feed), feed)
    g.outputs = head(g, loaded, rows, feed)
    return g


def _check(loaded: ModelBundle) -> None:
    model, kind = loaded.config.model, loaded.config.head
    entries = FAMILIES[loaded.config.family].heads.values()
    wrong, without = "", [entry.kind for entry in entries if entry.encoder_only]
    if type(loaded.model) is not Transformer:
        wrong = "is not a Transformer alone"
    elif model.encoder is not None and model.decoder is not None:
        wrong = "has a decoder beside its encoder"
        if without:
            wrong += f" (without it, if the folder holds the head: load it with head= one of {', '.join(without)})"
    elif isinstance((model.encoder or model.decoder).relation, c.TransformerXl):  # type: ignore[union-attr]
        wrong = "is made for two streams of rows"
    elif isinstance(kind, WRITING):
        wrong = f'has a "{kind.kind}" head'
    if wrong:
        raise HeedfulError(
            f"{loaded.source} ({loaded.config.family}) {wrong}: what can be exported is one stack of blocks, alone or "
            "with a head: classes, tokens, span, choice, embedding, pooled, next, masked, pretraining or replaced"
        )


def _lines(g: Graph, name: str) -> str:
    """The candidates of all questions one below another."""
    length = g.op("Gather", g.op("Shape", name), [2])
    return g.op("Reshape", name, g.op("Concat", [-1], length, axis=0))


# -- places ---------------------------------------------------------------------------------------------------


def positions(g: Graph, feed: BatchInputs) -> str:
    """From 0 in each sequence, [batch, sequence]."""
    count = g.op("CumSum", g.op("Cast", feed.seen, to=INT64), 1)
    return g.op("Max", g.op("Sub", count, 1), 0)


def gaps(g: Graph, feed: BatchInputs) -> str:
    """Key place minus query place, [sequence, sequence]."""
    place = g.op("Range", 0, g.op("Gather", g.op("Shape", feed.tokens), 1), 1)
    return g.op("Sub", g.op("Unsqueeze", place, [0]), g.op("Unsqueeze", place, [1]))


def distances(g: Graph, feed: BatchInputs, reach: int) -> str:
    """Return the relative positions as rows of a table over -reach to reach."""
    return g.op("Add", g.op("Clip", gaps(g, feed), -reach, reach), reach)


def embedding(g: Graph, part: EmbeddingLayer, feed: BatchInputs) -> str:
    """Tokens, positions and types, joined, normalised, projected."""
    config = part.config
    x = g.op("Gather", g.weight(part.tokens.weight), feed.tokens)
    if config.scale != 1.0:
        x = g.op("Mul", x, config.scale)
    place = ""
    match config.positions:
        case c.Learned(offset=offset):
            place = g.op("Gather", g.weight(part.positions.weight), g.op("Add", positions(g, feed), offset))
        case c.Sinusoidal(layout=layout, base=base, offset=offset, width=width):
            steps = torch.arange(offset, offset + feed.most)
            waves = sinusoid(steps, width or config.width, layout, base).float().numpy()
            place = g.op("Gather", waves, positions(g, feed))
    if config.positions is not None:
        joined = config.positions.join == "concatenate"
        x = g.op("Concat", x, place, axis=-1) if joined else g.op("Add", x, place)
    if config.types:
        x = g.op("Add", x, g.op("Gather", g.weight(part.types.weight), 0 if feed.types is None else feed.types))
    x = norm(g, part.norm, x)
    return add_linear(g, part.project, x) if isinstance(part.project, nn.Linear) else x


# -- the stack ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionInputs:
    """How places enter the layers with one window."""

    bias: str  # added to the scores, [batch, heads or 1, sequence or 1, sequence]
    waves: tuple[str, ...]  # sines and cosines that turn q and k, [batch, 1, sequence, head width / 2]
    distances: str  # rows of a table of vectors
    vectors: torch.Tensor | None = None  # of the distances, which each layer projects by its own matrices


def stack(g: Graph, part: Stack, x: str, feed: BatchInputs) -> str:
    """All blocks, as often as they are used, and the final norm."""
    config = part.config
    sights: dict[int | None, PositionInputs] = {}
    for layer in range(config.layers):
        number = layer * len(part.blocks) // config.layers
        window = config.window_of(layer)
        if window not in sights:
            sights[window] = _sight(g, part, window, feed)
        block = part.blocks[number]
        assert isinstance(block, Block)
        relation = part.relations[number] if isinstance(config.relation, c.Shaw) else None
        assert isinstance(relation, ShawPosition | None)
        x = _block(g, block, x, sights[window], relation, config)
    return norm(g, part.norm, x)


def _sight(g: Graph, part: Stack, window: int | None, feed: BatchInputs) -> PositionInputs:
    waves: tuple[str, ...] = ()
    match part.config.relation:
        case c.Rotary():
            rotary = part.relations[0 if window is None else len(part.relations) - 1]
            assert isinstance(rotary, RotaryPosition)
            if rotary.by_length is not None:
                raise HeedfulError(
                    "rotations that depend on a text's length (dynamic NTK, LongRoPE) cannot be exported"
                )
            angles = torch.arange(feed.most)[:, None] * rotary.frequencies()
            table = (torch.cat([angles.sin(), angles.cos()], -1) * rotary.magnitude).float().numpy()
            waves = g.split(g.op("Unsqueeze", g.op("Gather", table, positions(g, feed)), [1]), 2)
        case c.Disentangled():
            relation = part.relations[0]
            assert isinstance(relation, DisentangledPosition)
            vectors = relation.norm(relation.table.weight)
            steps = torch.arange(feed.most - 1, -feed.most, -1)  # query minus key, for key minus query in order
            rows = relation.rows(steps).numpy()
            number = g.op("Gather", rows, distances(g, feed, feed.most - 1))
            return PositionInputs(bias=_bias(g, part, window, feed), waves=(), distances=number, vectors=vectors)
        case c.Shaw(reach=reach):
            return PositionInputs(bias=_bias(g, part, window, feed), waves=(), distances=distances(g, feed, reach))
    return PositionInputs(bias=_bias(g, part, window, feed), waves=waves, distances="")


def _bias(g: Graph, part: Stack, window: int | None, feed: BatchInputs) -> str:
    config = part.config
    seen = g.op("Unsqueeze", feed.seen, [1, 2])
    if config.causal:
        seen = g.op("And", seen, g.op("LessOrEqual", gaps(g, feed), 0))
    if window is not None:
        seen = g.op("And", seen, g.op("LessOrEqual", g.op("Abs", gaps(g, feed)), window))
    bias = g.op("Where", seen, 0.0, HIDDEN)
    if isinstance(config.relation, c.Buckets):
        relation, reach = part.relations[0], config.relation.reach
        assert isinstance(relation, BucketedPosition)
        chosen = distance_buckets(torch.arange(-reach, reach + 1), relation.count, reach, relation.causal)
        table = relation.table(chosen).detach().numpy()
        bias = g.op("Add", bias, g.op("Transpose", g.op("Gather", table, distances(g, feed, reach)), perm=(2, 0, 1)))
    return bias


def _block(
    g: Graph, part: Block, x: str, sight: PositionInputs, vectors: ShawPosition | None, config: c.StackConfig
) -> str:
    layers: tuple[tuple[nn.Module, Callable[[str], str]], ...] = (
        (part.attention_norm, lambda y: add_attention(g, part.attention, y, sight, vectors, config)),
        (part.mlp_norm, lambda y: mlp(g, part.mlp, y, config.activation)),
    )
    for normed, layer in layers:
        summed = g.op("Add", x, layer(norm(g, normed, x) if part.norm_first else x))
        x = summed if part.norm_first else norm(g, normed, summed)
    return x


def _disentangled(g: Graph, part: Attention, sight: PositionInputs, q: str, k: str, scores: str) -> str:
    """q K(p) + k Q(p) for the vectors p of distances; q is scaled already."""
    assert sight.vectors is not None
    position_q, position_k, _ = (x.detach() for x in split_qkv(part.qkv(sight.vectors), part.heads))
    number = g.op("Expand", sight.distances, g.op("Shape", scores))
    to_position = g.op("Einsum", q, position_k.numpy(), equation="bhid,ghd->bhig")
    from_position = g.op("Einsum", g.op("Mul", k, part.scale), position_q.numpy(), equation="bhjd,ghd->bhjg")
    of_query = g.op("GatherElements", to_position, number, axis=-1)
    swapped = g.op("Transpose", number, perm=(0, 1, 3, 2))
    of_key = g.op("GatherElements", from_position, swapped, axis=-1)
    return g.op("Add", of_query, g.op("Transpose", of_key, perm=(0, 1, 3, 2)))


def add_attention(
    g: Graph, part: Attention, x: str, sight: PositionInputs, vectors: ShawPosition | None, config: c.StackConfig
) -> str:
    """softmax(scale q k + bias) v of all heads, and the projection."""
    heads, width = config.heads, config.head_width
    parts = (
        g.op("Reshape", projected, [0, 0, size // width, width])
        for projected, size in zip(g.split(add_linear(g, part.qkv, x), *part.sizes), part.sizes, strict=True)
    )
    q, k, v = (g.op("Transpose", part, perm=(0, 2, 1, 3)) for part in parts)
    q, k = norm(g, part.q_norm, q), norm(g, part.k_norm, k)
    if part.kv_heads < heads:
        shared = np.arange(heads) // (heads // part.kv_heads)  # the key head of each query head
        k, v = g.op("Gather", k, shared, axis=1), g.op("Gather", v, shared, axis=1)
    if sight.waves:
        q, k = _turned(g, q, *sight.waves), _turned(g, k, *sight.waves)
    if part.scale != 1.0:
        q = g.op("Mul", q, part.scale)
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=(0, 1, 3, 2)))
    if sight.vectors is not None:
        scores = g.op("Add", scores, _disentangled(g, part, sight, q, k, scores))
    if vectors is not None:
        far = g.op("Gather", g.weight(vectors.keys.weight), sight.distances)
        scores = g.op("Add", scores, g.op("Einsum", q, far, equation="bhid,ijd->bhij"))
    weights = g.op("Softmax", g.op("Add", scores, sight.bias), axis=-1)
    mixed = g.op("MatMul", weights, v)
    if vectors is not None and vectors.has_values:
        far = g.op("Gather", g.weight(vectors.values.weight), sight.distances)
        mixed = g.op("Add", mixed, g.op("Einsum", weights, far, equation="bhij,ijd->bhid"))
    rows = g.op("Reshape", g.op("Transpose", mixed, perm=(0, 2, 1, 3)), [0, 0, heads * width])
    return add_linear(g, part.out, rows)


def _turned(g: Graph, x: str, sin: str, cos: str) -> str:
    first, second = g.split(x, 2)
    left = g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin))
    right = g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin))
    return g.op("Concat", left, right, axis=-1)


# -- heads ----------------------------------------------------------------------------------------------------


def head(g: Graph, loaded: ModelBundle, x: str, feed: BatchInputs) -> dict[str, Output]:
    """Names of the outputs, as in transformers."""
    config, width = loaded.config.head, loaded.config.model.width
    part: Any = loaded.head
    rows = {"last_hidden_state": Output(x, (BATCH, SEQUENCE, width))}
    match config:
        case None:
            return rows
        case c.Pooled():
            return rows | {"pooler_output": Output(_summary(g, part, c.Summary(), x, feed), (BATCH, width))}
        case c.SentenceEmbedding():
            vectors = _vectors(g, part, x, feed)
            return rows | {"sentence_embedding": Output(vectors, (BATCH, config.width(loaded.config.model)))}
        case c.MaskedTokens():
            return {"logits": _masked(g, part, config, x)}
        case c.NextSentenceScores():
            return {"logits": _next(g, part, x, feed)}
        case c.Pretraining():
            tokens, follows = _masked(g, part.masked, config, x), _next(g, part.next, x, feed)
            return {"prediction_logits": tokens, "seq_relationship_logits": follows}
        case c.Classes():
            scores = add_linear(g, part.out, _summary(g, part, config, x, feed))
            return {"logits": Output(scores, (BATCH, len(config.labels)))}
        case c.Choice():
            scores = add_linear(g, part.out, _summary(g, part, config, x, feed))
            shape = g.op("Gather", g.op("Shape", "input_ids"), [0, 1])
            return {"logits": Output(g.op("Reshape", scores, shape), (BATCH, CHOICES))}
        case c.TokenClasses() | c.SpanScores() | c.ReplacedTokens():
            return _rowwise(g, config, add_linear(g, part.out, _transform(g, part.first, config, x)))
    raise AssertionError(f"no operators for {config}")


def _rowwise(g: Graph, config: c.TokenClasses | c.SpanScores | c.ReplacedTokens, scores: str) -> dict[str, Output]:
    if isinstance(config, c.TokenClasses):
        return {"logits": Output(scores, (BATCH, SEQUENCE, len(config.labels)))}
    parts = {"logits": scores}
    if isinstance(config, c.SpanScores):
        parts = dict(zip(("start_logits", "end_logits"), g.split(scores, 2), strict=True))
    return {name: Output(g.op("Squeeze", logits, [-1]), (BATCH, SEQUENCE)) for name, logits in parts.items()}


def _transform(g: Graph, part: h.Transform, config: c.Summary | c.Rowwise, x: str) -> str:
    if not isinstance(part.dense, nn.Linear):
        return x
    x = add_linear(g, part.dense, x)
    return norm(g, part.norm, activate(g, config.activation, x) if config.activation else x)


def _summary(g: Graph, part: Any, config: c.Summary, x: str, feed: BatchInputs) -> str:
    if config.pools_last:
        return add_pooling(g, _transform(g, part.first, config, x), feed, config.pooling)
    return _transform(g, part.first, config, add_pooling(g, x, feed, config.pooling))


def _masked(g: Graph, part: h.MaskedTokensHead, config: c.MaskedTokens | c.Pretraining, x: str) -> Output:
    if isinstance(part.dense, nn.Linear):
        x = norm(g, part.norm, activate(g, config.activation, add_linear(g, part.dense, x)))
    return Output(add_linear(g, part.decoder, x), (BATCH, SEQUENCE, part.decoder.out_features))


def _next(g: Graph, part: h.NextSentenceHead, x: str, feed: BatchInputs) -> Output:
    return Output(add_linear(g, part.out, _summary(g, part, c.Summary(), x, feed)), (BATCH, 2))


def _vectors(g: Graph, part: h.SentenceEmbeddingHead, x: str, feed: BatchInputs) -> str:
    config = part.config
    vectors = g.op("Concat", *(add_pooling(g, x, feed, how) for how in config.pooling), axis=-1)
    for linear, layer in zip(part.dense, config.dense, strict=True):
        vectors = add_linear(g, cast(nn.Linear, linear), vectors)
        vectors = activate(g, layer.activation, vectors) if layer.activation else vectors
    if config.normalise:
        vectors = g.op("Div", vectors, g.op("Max", g.op("ReduceL2", vectors, axes=(-1,), keepdims=1), 1e-12))
    return vectors if config.dimensions is None else g.op("Slice", vectors, [0], [config.dimensions], [1])


def add_pooling(g: Graph, x: str, feed: BatchInputs, how: c.Pooling) -> str:
    """One vector for each sequence."""
    mask = g.op("Cast", feed.seen, to=FLOAT)
    if how in ("first", "last"):
        place = g.op("ArgMax", mask, axis=1, keepdims=1, select_last_index=int(how == "last"))
        return g.op("GatherND", x, place, batch_dims=1)
    if how == "max":
        return g.op("ReduceMax", g.op("Where", g.op("Unsqueeze", feed.seen, [2]), x, LEAST), axes=(1,), keepdims=0)
    sums = g.op("ReduceSum", g.op("Mul", x, g.op("Unsqueeze", mask, [2])), [1], keepdims=0)
    count = g.op("ReduceSum", mask, [1], keepdims=1)
    return g.op("Div", sums, g.op("Sqrt", count) if how == "mean_sqrt_length" else count)
