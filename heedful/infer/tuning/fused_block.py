"""A block of an encoder that the kernels in C++ compute in one call."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heedful.csrc import kernels
from heedful.model.stack import AttentionContext, Block, LayerContext
from heedful.nn.cpu_attention import cannot_attend, span_table
from heedful.nn.cpu_ops import DTYPE_CODES, address, empty, usable_kernels
from heedful.nn.inference_linear import Int8Linear, NativeLinear
from heedful.nn.layout import AttentionArgs
from heedful.nn.positions import RelativePosition

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("panels", "bias", "scales", "sums")),
        *((name, _INT) for name in ("depth", "columns", "gelu")),
    ]


class _Norm(ctypes.Structure):
    _fields_ = [("gain", _POINTER), ("bias", _POINTER), ("eps", _DOUBLE)]


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "out", "up", "down")),
        ("attended", _Norm),
        ("done", _Norm),
        ("heads", _INT),
        ("causal", _INT),
        ("scale", _DOUBLE),
    ]


class _Descriptor(NamedTuple):
    block: _Block
    norms: list[
        dict[str, nn.Parameter | None]
    ]  # their parameters by name, without what asking the module costs each time
    addresses: list[int]  # of these, which may come to lie elsewhere: in another dtype, or in shared memory
    held: list[Tensor]  # the memory that it points into, so that nothing else comes to lie there
    dtype: torch.dtype | None  # of the rows that its weights multiply; None: any, as int8 weights do


class FusedBlock:
    """Computes a block of a model in one call; keeps the addresses of the weights of each block."""

    def __init__(self) -> None:
        self._described: dict[int, _Descriptor] = {}  # by the identity of the block

    def __reduce__(self) -> tuple[type[FusedBlock], tuple[()]]:
        """Forget the addresses: a copy of a block has its weights elsewhere, and so has a block sent to a process."""
        self._described.clear()
        return FusedBlock, ()

    def __call__(self, block: Block, x: Tensor, sight: AttentionContext, placed: LayerContext) -> Tensor | None:
        """Return the block's rows, or None if it has to be computed part by part."""
        if torch.is_grad_enabled() or block.training:
            return None
        if sight.cache is not None or sight.memory is not None or sight.trace is not None:
            return None
        if usable_kernels(x) is None or not x.is_contiguous() or len(x) == 0:
            return None
        if type(placed.relation) is not RelativePosition:
            return None
        call = AttentionArgs(layout=sight.layout, scale=block.attention.scale)
        heads = x[:, None]
        if cannot_attend(heads, heads, heads, call):
            return None
        descriptor = self._described.get(id(block))
        if descriptor is None or _addresses(descriptor.norms) != descriptor.addresses:
            if not can_fuse(block):
                return None
            descriptor = self._described[id(block)] = _described(block)
        if descriptor.dtype not in (None, x.dtype):
            return None
        described = ctypes.addressof(descriptor.block)
        library, where = kernels(), span_table(sight.layout)
        assert library is not None
        half = DTYPE_CODES[x.dtype]
        z, space = torch.empty_like(x), empty(library.block_space(described, len(x), half), dtype=torch.uint8)
        window = -1 if placed.window is None else placed.window
        library.block(
            described,
            half,
            x.data_ptr(),
            len(x),
            len(where),
            where.data_ptr(),
            window,
            z.data_ptr(),
            space.data_ptr(),
            torch.get_num_threads(),
        )
        return z


def can_fuse(block: Block) -> bool:
    """Whether its parts are of those kinds."""
    attention, mlp = block.attention, block.mlp
    layers: list[Any] = [attention.qkv, attention.out, mlp.up, mlp.down]
    norms = [block.attention_norm, block.mlp_norm]
    library = kernels()
    return (
        library is not None
        and attention.head_width % library.lanes == 0
        and attention.kv_heads == attention.heads
        and isinstance(attention.q_norm, nn.Identity)
        and not block.norm_first
        and not hasattr(block, "cross")
        and not mlp.gated
        and all(isinstance(layer, NativeLinear) or (isinstance(layer, Int8Linear) and layer.panels) for layer in layers)
        and (mlp.up.gelu if isinstance(mlp.up, NativeLinear) else mlp.up.activation == "gelu")
        and len({layer.dtype for layer in layers if isinstance(layer, NativeLinear)}) <= 1
        and all(isinstance(norm, nn.LayerNorm) and norm.weight.dtype == torch.float32 for norm in norms)
    )


def _addresses(norms: list[dict[str, nn.Parameter | None]]) -> list[int]:
    return [parameter.data_ptr() for norm in norms for parameter in norm.values() if parameter is not None]


def _described(block: Block) -> _Descriptor:
    attention, mlp = block.attention, block.mlp
    layers: list[Any] = [attention.qkv, attention.out, mlp.up, mlp.down]
    norms: list[Any] = [block.attention_norm, block.mlp_norm]
    native = _Block(
        *(_linear(layer) for layer in layers),
        *(_Norm(address(norm.weight), address(norm.bias), norm.eps) for norm in norms),
        attention.heads,
        attention.causal,
        attention.scale,
    )
    parts = [layer.panels if isinstance(layer, Int8Linear) else layer for layer in layers]
    read = [getattr(part, name, None) for part in parts for name in ("panels", "bias", "scales", "sums")]
    read += [parameter for norm in norms for parameter in norm.parameters()]
    held, named = [tensor.detach() for tensor in read if tensor is not None], [norm._parameters for norm in norms]
    dtype = next((layer.dtype for layer in layers if isinstance(layer, NativeLinear)), None)
    return _Descriptor(native, named, _addresses(named), held, dtype)


def _linear(layer: NativeLinear | Int8Linear) -> _Linear:
    if isinstance(layer, NativeLinear):
        return _Linear(address(layer.panels), address(layer.bias), 0, 0, layer.width, layer.out, layer.gelu)
    assert layer.panels is not None
    part = layer.panels
    width, out = layer.weight.shape
    return _Linear(
        address(part.panels), address(part.bias), address(part.scales), address(part.sums), width, out, part.gelu
    )
