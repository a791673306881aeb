"""`serialize_model`: a model as bytes for forward.cpp, which computes it in the page: tensors and a list of ops.

An op is a list of 32-bit words: its code, sizes, and offsets of tensors. The order of the words must agree with
forward.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.model import config as c
from heedful.model.attention import Attention
from heedful.model.classic import BidirectionalRnn, ClassicModel
from heedful.model.classic_config import (
    BagPooling,
    ClassicConfig,
    HierarchicalPooling,
    PoolingConfig,
    UntrainedSelfAttention,
)
from heedful.model.embedding import EmbeddingLayer
from heedful.model.heads import Transform
from heedful.model.pooling import PooledClassesHead
from heedful.model.stack import Block, Stack, Transformer
from heedful.nn.inference_linear import quantize_rows
from heedful.nn.positions import BucketedPosition, RotaryPosition, distance_buckets, sinusoid

FORMATS = {"float32": 1, "float16": 2, "int8": 3}  # codes of matrix formats; 0 for no matrix
PAD = 16  # matrix rows are padded to a multiple of 16 values, and tensors start at a multiple of 16 bytes
UNLIMITED = 8192  # maximum tokens of a text, if the model has no limit
# codes of ops
END, EMBED, BLOCK, NORM, DENSE, SELECT, POOL, L2_NORMALIZE, RECURRENT, POOL_BY_QUERIES, SCORE_ROWS = range(11)
ACTIVATIONS = ("", "relu", "gelu", "gelu_tanh", "silu", "tanh")
POOLINGS = ("mean", "first", "max", "mean_sqrt_length", "last", "sum")
CELLS = ("lstm", "gru")


@dataclass(frozen=True, kw_only=True, slots=True)
class SerializedModel:
    """A model in the format of forward.cpp."""

    data: bytes  # the tensors, then the ops
    ops_offset: int  # offset of the ops in `data`, in bytes
    num_ops: int  # number of ops, without END
    num_encoder_ops: int  # number of ops of the encoder, which come before those of the head
    max_length: int  # maximum tokens of a text


class _Writer:
    """Serializes tensors and the list of ops."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.data = bytearray()  # tensors
        self.words = bytearray()  # ops
        self.num_ops = 0
        self.matrices: dict[int, tuple[Tensor, tuple[int, ...]]] = {}  # each matrix with its words, by id(matrix)

    def op(self, code: int) -> None:
        """Begin an op."""
        self.num_ops += code != END
        self.integers(code)

    def integers(self, *values: int) -> None:
        """Append int32 values to the op."""
        self.words += struct.pack(f"<{len(values)}i", *values)

    def number(self, value: float) -> None:
        """Append a float32 value to the op."""
        self.words += struct.pack("<f", value)

    def tensor(self, array: NDArray[Any] | Tensor | None) -> int:
        """Write a tensor to the data, and return its offset in bytes, or -1 if it is None."""
        if array is None:
            return -1
        array = array.detach().float().numpy() if isinstance(array, Tensor) else array
        self.data += bytes(-len(self.data) % PAD)
        offset = len(self.data)
        self.data += np.ascontiguousarray(array).tobytes()
        return offset

    def matrix(self, weight: Tensor | None) -> None:
        """Serialize a matrix in the precision of the page. A matrix that the model uses twice is written once."""
        if weight is None:
            return self.integers(0)
        if id(weight) not in self.matrices:
            self.matrices[id(weight)] = weight, self._write_matrix(weight.detach().float())
        self.integers(*self.matrices[id(weight)][1])

    def _write_matrix(self, weight: Tensor) -> tuple[int, ...]:
        """Write a matrix to the data; return its words: format, shape, and offsets of values and of scales."""
        rows, columns = weight.shape
        padded = F.pad(weight, (0, -columns % PAD))
        scales = None
        array: NDArray[Any] = padded.numpy()
        if self.precision == "int8":
            quantized, scales = quantize_rows(padded)
            array = quantized.numpy()
        elif self.precision == "float16":
            array = array.astype(np.float16)
        return FORMATS[self.precision], rows, columns, self.tensor(array), self.tensor(scales)

    def linear(self, layer: nn.Module | None) -> None:
        """Serialize a linear layer, or no layer for None and nn.Identity."""
        if not isinstance(layer, nn.Linear):
            return self.integers(0)
        self.affine(layer.weight, layer.bias)

    def affine(self, weight: Tensor, bias: Tensor | None) -> None:
        """Serialize the weight and the bias of W x + b."""
        self.matrix(weight)
        self.integers(self.tensor(bias))

    def norm(self, norm: nn.Module) -> None:
        """Serialize a layer norm or an RMS norm, or no norm for nn.Identity."""
        if isinstance(norm, nn.Identity):
            return self.integers(0)
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.eps is not None
        self.integers(1 if isinstance(norm, nn.LayerNorm) else 2)
        self.number(norm.eps)
        self.integers(self.tensor(norm.weight), self.tensor(getattr(norm, "bias", None)))


def serialize_model(bundle: ModelBundle, precision: str = "int8", *, with_head: bool = True) -> SerializedModel:
    """Serialize a model, with its head unless `with_head` is False.

    Raises:
        HeedfulError: If the precision is unknown, or forward.cpp does not support the model; see `unsupported`.
    """
    if precision not in FORMATS:
        raise HeedfulError(f"precision is {precision!r}; a page has one of auto, {', '.join(FORMATS)}")
    if problem := unsupported(bundle) if with_head else unsupported_encoder(bundle):
        raise refusal(bundle, problem)
    writer = _Writer(precision)
    max_length = bundle.max_length or UNLIMITED
    assert isinstance(bundle.model, Transformer)
    _embedding(writer, bundle.model.embedding, max_length)
    if bundle.model.encoder is not None:
        _stack(writer, bundle.model.encoder)
    if isinstance(bundle.model, ClassicModel) and isinstance(bundle.model.over, BidirectionalRnn):
        _recurrent(writer, bundle.model.over)
    num_encoder_ops = writer.num_ops
    if with_head:
        _head(writer, bundle)
    writer.op(END)
    offset = writer.tensor(np.frombuffer(bytes(writer.words), np.uint8))
    return SerializedModel(
        data=bytes(writer.data),
        ops_offset=offset,
        num_ops=writer.num_ops,
        num_encoder_ops=num_encoder_ops,
        max_length=max_length,
    )


def refusal(bundle: ModelBundle, problem: str) -> HeedfulError:
    """Return the error for a model that HTML export does not support."""
    return HeedfulError(
        f"{bundle.source} ({bundle.config.family}) {problem}: HTML export supports encoders with absolute, rotary or "
        "bucketed positions, bags of words and recurrent networks, with heads for classification, regression, "
        "tagging, question answering, multiple choice, embeddings or masked tokens"
    )


def unsupported(bundle: ModelBundle) -> str:
    """Return why HTML export does not support a model, such as "has no head", or "" if it does."""
    return unsupported_encoder(bundle) or unsupported_head(bundle)


def unsupported_encoder(bundle: ModelBundle) -> str:
    """Return why HTML export does not support a model without its head, or "" if it does."""
    model = bundle.config.model
    stack = model.encoder
    positions = model.embedding.positions
    if type(bundle.model) not in (Transformer, ClassicModel) or model.decoder is not None or (stack and stack.causal):
        return "is not an encoder alone"
    if isinstance(model, ClassicConfig):
        if isinstance(model.reader, HierarchicalPooling):
            return "has hierarchical attention"
        if isinstance(model.reader, PoolingConfig) and isinstance(model.reader.over, UntrainedSelfAttention):
            return "has self-attention without weights"
    if positions is not None and positions.join != "add":
        return "concatenates positions"
    relation = None if stack is None else stack.relation
    if not isinstance(relation, c.Rotary | c.Buckets | None):
        return f'has relative positions of the kind "{relation.kind}"'
    scalings = (relation.scaling, relation.local_scaling) if isinstance(relation, c.Rotary) else ()
    if any(isinstance(scaling, c.DynamicNtk | c.LongRope) for scaling in scalings):
        return "has rotations that depend on the length of a text"
    return ""


def unsupported_head(bundle: ModelBundle) -> str:
    """Return why HTML export does not support the head of a model, or "" if it does."""
    head = bundle.config.head
    match head:
        case c.SentenceEmbedding(pools_prompt=False, prompts=prompts) if prompts:
            return "pools a text without its prompt"
        case c.Summary(pooled_token=int()):
            return "pools the row of a token"
        case c.Classes() | c.TokenClasses() | c.SpanScores() | c.Choice() | c.SentenceEmbedding() | c.MaskedTokens():
            return ""
    return "has no head" if head is None else f'has a "{head.kind}" head'


def _embedding(writer: _Writer, layer: EmbeddingLayer, max_length: int) -> None:
    """Write the op of the input embedding. Sinusoids are written as a table of `max_length` positions."""
    config = layer.config
    offset = 0
    positions: Tensor | None = None
    match config.positions:
        case c.Learned(offset=offset):
            positions = layer.positions.weight
        case c.Sinusoidal(layout=layout, base=base, offset=first):
            positions = sinusoid(torch.arange(first, first + max_length), config.width, layout, base)
    writer.op(EMBED)
    writer.matrix(layer.tokens.weight)
    writer.number(config.scale)
    writer.matrix(positions)
    writer.integers(offset)
    writer.matrix(layer.types.weight if config.types else None)
    writer.norm(layer.norm)
    writer.linear(layer.project)


def _stack(writer: _Writer, stack: Stack) -> None:
    """Write an op for each Transformer block, and an op for the final norm."""
    config = stack.config
    positions = [_positions(writer, relation) for relation in stack.relations]
    for layer in range(config.layers):
        block = stack.blocks[layer * len(stack.blocks) // config.layers]
        window = config.window_of(layer)
        assert isinstance(block, Block)
        writer.op(BLOCK)
        writer.integers(int(block.norm_first))
        writer.norm(block.attention_norm)
        _attention(writer, block.attention, window, positions[0 if window is None else -1])
        writer.norm(block.mlp_norm)
        writer.linear(block.mlp.up)
        writer.integers(int(config.gated), ACTIVATIONS.index(config.activation))
        writer.linear(block.mlp.down)
    if config.final_norm:
        writer.op(NORM)
        writer.norm(stack.norm)


class _Positions(NamedTuple):
    """Relative positions of some layers. Tensors are given by their offset, or -1 for no tensor."""

    frequencies: int = -1  # of rotary positions
    magnitude: float = 1.0  # factor of rotated queries and keys
    distances: int = -1  # bias of each distance from -reach to reach, and each head
    reach: int = 0


def _positions(writer: _Writer, relation: nn.Module) -> _Positions:
    """Write the tensors of relative positions."""
    match relation:
        case RotaryPosition():
            return _Positions(writer.tensor(relation.frequencies().numpy()), relation.magnitude)
        case BucketedPosition(count=count, reach=reach, causal=causal):
            buckets = distance_buckets(torch.arange(-reach, reach + 1), count, reach, causal)
            return _Positions(distances=writer.tensor(relation.table(buckets)), reach=reach)
    return _Positions()


def _attention(writer: _Writer, attention: Attention, window: int | None, positions: _Positions) -> None:
    """Append the words of self-attention to the op of a block."""
    writer.integers(attention.heads, attention.kv_heads, attention.head_width)
    writer.number(attention.scale)
    writer.integers(-1 if window is None else window, positions.frequencies)
    writer.number(positions.magnitude)
    writer.integers(positions.distances, positions.reach)
    writer.linear(attention.qkv)
    writer.norm(attention.q_norm)
    writer.norm(attention.k_norm)
    writer.linear(attention.out)


def _recurrent(writer: _Writer, network: BidirectionalRnn) -> None:
    """Write the op of a bidirectional LSTM or GRU."""
    cells = network.cells
    writer.op(RECURRENT)
    writer.integers(CELLS.index("lstm" if isinstance(cells, nn.LSTM) else "gru"), cells.hidden_size, cells.num_layers)
    for layer in range(cells.num_layers):
        for direction in ("", "_reverse"):
            for part in ("ih", "hh"):
                names = (f"{name}_{part}_l{layer}{direction}" for name in ("weight", "bias"))
                writer.affine(*(getattr(cells, name) for name in names))


# -- heads ----------------------------------------------------------------------------------------------------


def _head(writer: _Writer, bundle: ModelBundle) -> None:
    """Write the ops of a head."""
    config = bundle.config.head
    module: Any = bundle.head
    match config:
        case c.Classes() if isinstance(module, PooledClassesHead):
            _pooled_classes(writer, module)
        case c.Classes() | c.Choice():
            if not config.pools_last:
                _pool(writer, [config.pooling])
            _transform(writer, module.first, config.activation)
            if config.pools_last:
                _pool(writer, [config.pooling])
            _dense(writer, module.out)
        case c.TokenClasses() | c.SpanScores():
            writer.op(SELECT)
            _transform(writer, module.first, config.activation)
            _dense(writer, module.out)
        case c.MaskedTokens():
            writer.op(SELECT)
            if config.dense:
                _dense(writer, module.dense, config.activation, module.norm)
            _dense(writer, module.decoder)
        case c.SentenceEmbedding():
            _pool(writer, config.pooling)
            for layer, linear in zip(config.dense, module.dense, strict=True):
                _dense(writer, linear, layer.activation)
            if config.normalise:
                writer.op(L2_NORMALIZE)
        case _:
            raise AssertionError(f"no ops for {config}")


def _pooled_classes(writer: _Writer, head: PooledClassesHead) -> None:
    """Write the ops of the head of a classic model."""
    if isinstance(head.config, BagPooling):
        _pool(writer, [head.config.how])
    else:
        pooler = head.queries
        writer.op(POOL_BY_QUERIES)
        writer.linear(pooler.key)
        writer.integers(ACTIVATIONS.index("tanh" if pooler.tanh else ""))
        writer.linear(pooler.value)
        writer.integers(writer.tensor(pooler.queries), len(pooler.queries))
        writer.number(pooler.scale)
        writer.integers(int(not head.vector_per_class))
    if head.vector_per_class:
        writer.op(SCORE_ROWS)
        return writer.linear(head.out)
    if head.hidden is not None:
        _dense(writer, head.hidden, "relu")
    out = head.out
    if head.one_score:  # add a first row of zeros, since the score of the first label is 0
        out = nn.Linear(out.in_features, 2)
        out.weight.data, out.bias.data = F.pad(head.out.weight.data, (0, 0, 1, 0)), F.pad(head.out.bias.data, (1, 0))
    _dense(writer, out)


def _pool(writer: _Writer, poolings: Sequence[str]) -> None:
    """Write the op that pools hidden states, and concatenates the results if there are several poolings."""
    writer.op(POOL)
    writer.integers(len(poolings), *map(POOLINGS.index, poolings))


def _transform(writer: _Writer, transform: Transform, activation: str | None) -> None:
    """Write the op of a head's first layer, if it has one."""
    if isinstance(transform.dense, nn.Linear):
        _dense(writer, transform.dense, activation, transform.norm)


def _dense(writer: _Writer, layer: nn.Module, activation: str | None = None, norm: nn.Module | None = None) -> None:
    """Write the op of a linear layer, followed by an activation and a norm."""
    writer.op(DENSE)
    writer.linear(layer)
    writer.integers(ACTIVATIONS.index(activation or ""))
    writer.norm(norm or nn.Identity())
