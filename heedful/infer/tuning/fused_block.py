"""`FusedBlock`: a Transformer encoder block that the C++ kernels compute in a single call."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heedful.csrc import kernels
from heedful.model.attention import AttentionContext, LayerContext
from heedful.model.stack import Block
from heedful.nn.cpu_attention import cannot_attend, span_table
from heedful.nn.cpu_ops import DTYPE_CODES, address, empty, usable_kernels
from heedful.nn.inference_linear import Int8Linear, NativeLinear
from heedful.nn.layout import AttentionArgs
from heedful.nn.positions import RelativePosition

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


# Structures that describe a block to the C++ kernels, with the fields of the structs in csrc in the same order.


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
    """The C++ description of a block, and the tensors whose addresses it contains."""

    block: _Block
    norms: list[dict[str, nn.Parameter | None]]  # parameters of each norm; faster to read than attributes of modules
    addresses: list[int]  # addresses of the norms' parameters, which change with the dtype or in shared memory
    tensors: list[Tensor]  # all tensors at these addresses, referenced so that their memory is not reused
    dtype: torch.dtype | None  # dtype of the rows that native layers accept, or None for int8 layers, which accept any


class FusedBlock:
    """Computes blocks of a model, each in one call; caches the C++ description of each block."""

    def __init__(self) -> None:
        self._descriptors: dict[int, _Descriptor] = {}  # descriptions by id() of the block

    def __reduce__(self) -> tuple[type[FusedBlock], tuple[()]]:
        """Copy and pickle without the descriptions: the weights of a copied block have other addresses."""
        self._descriptors.clear()
        return FusedBlock, ()

    def __call__(self, block: Block, x: Tensor, context: AttentionContext, layer: LayerContext) -> Tensor | None:
        """Return the output of a block, [rows, width]; None if the block must be computed layer by layer."""
        if torch.is_grad_enabled() or block.training:
            return None
        if context.cache is not None or context.memory is not None or context.trace is not None:
            return None
        if usable_kernels(x) is None or not x.is_contiguous() or len(x) == 0:
            return None
        if type(layer.relation) is not RelativePosition:
            return None
        args = AttentionArgs(layout=context.layout, scale=block.attention.scale)
        heads = x[:, None]
        if cannot_attend(heads, heads, heads, args):
            return None
        descriptor = self._descriptors.get(id(block))
        if descriptor is None or _addresses(descriptor.norms) != descriptor.addresses:
            if not can_fuse(block):
                return None
            descriptor = self._descriptors[id(block)] = _describe(block)
        if descriptor.dtype not in (None, x.dtype):
            return None
        block_address = ctypes.addressof(descriptor.block)
        library, spans = kernels(), span_table(context.layout)
        assert library is not None
        dtype_code = DTYPE_CODES[x.dtype]
        workspace_bytes = library.block_space(block_address, len(x), dtype_code)
        y, workspace = torch.empty_like(x), empty(workspace_bytes, dtype=torch.uint8)
        window = -1 if layer.window is None else layer.window
        library.block(
            block_address,
            dtype_code,
            x.data_ptr(),
            len(x),
            len(spans),
            spans.data_ptr(),
            window,
            y.data_ptr(),
            workspace.data_ptr(),
            torch.get_num_threads(),
        )
        return y


def can_fuse(block: Block) -> bool:
    """Return whether the C++ kernels can compute a block in a single call.

    They need a post-norm encoder block with LayerNorms in float32, native layers of one dtype or int8 layers, a GELU
    that is fused into its linear layer, as many key heads as query heads, a head width that is a multiple of the
    processor's vector length, and no cross-attention.
    """
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


def _describe(block: Block) -> _Descriptor:
    """Return the C++ description of a block for which `can_fuse` returns True."""
    attention, mlp = block.attention, block.mlp
    layers: list[Any] = [attention.qkv, attention.out, mlp.up, mlp.down]
    norms: list[Any] = [block.attention_norm, block.mlp_norm]
    native_block = _Block(
        *(_linear(layer) for layer in layers),
        *(_Norm(address(norm.weight), address(norm.bias), norm.eps) for norm in norms),
        attention.heads,
        attention.causal,
        attention.scale,
    )
    packed_layers = [layer.panels if isinstance(layer, Int8Linear) else layer for layer in layers]
    tensors = [getattr(layer, name, None) for layer in packed_layers for name in ("panels", "bias", "scales", "sums")]
    tensors += [parameter for norm in norms for parameter in norm.parameters()]
    norm_parameters = [norm._parameters for norm in norms]
    return _Descriptor(
        block=native_block,
        norms=norm_parameters,
        addresses=_addresses(norm_parameters),
        tensors=[tensor.detach() for tensor in tensors if tensor is not None],
        dtype=next((layer.dtype for layer in layers if isinstance(layer, NativeLinear)), None),
    )


def _linear(layer: NativeLinear | Int8Linear) -> _Linear:
    """Return the C++ description of a linear layer."""
    if isinstance(layer, NativeLinear):
        return _Linear(address(layer.panels), address(layer.bias), 0, 0, layer.width, layer.out, layer.gelu)
    panels = layer.panels
    assert panels is not None
    width, out = layer.weight.shape
    return _Linear(
        address(panels.panels),
        address(panels.bias),
        address(panels.scales),
        address(panels.sums),
        width,
        out,
        panels.gelu,
    )
