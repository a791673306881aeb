"""Execution plans: a model's precision, linear kernel and attention kernel; and how plans are applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.device import multiplies_bfloat16
from heedful.infer.precision import Precision
from heedful.infer.tuning.fused_block import FusedBlock, can_fuse
from heedful.model.attention import ExecutionOptions
from heedful.model.config import Buckets, Disentangled, ModelConfig, Shaw, StackConfig, TransformerXl
from heedful.model.stack import Block, Stack
from heedful.nn.cpu_ops import usable_kernels
from heedful.nn.inference_linear import (
    FUSED,
    Int8Linear,
    NativeLinear,
    OneDnnLinear,
    cannot_use_native,
    cannot_use_onednn,
)
from heedful.nn.layers import ACTIVATIONS, Mlp
from heedful.nn.layout import Bias, DisentangledBias, RelativeBias
from heedful.nn.positions import DisentangledPosition, ProjectedDistances

LinearKernel = Literal["plain", "onednn", "native", "int8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPlan:
    """The precision and the kernels that compute a model, and why they were chosen."""

    precision: Precision
    linears: LinearKernel = "plain"
    attention: str = ""  # attention kernel to try first, or "" for the order of the kernel table
    why: tuple[str, ...] = ()  # one reason for each choice


class _LinearKernelSpec(NamedTuple):
    # returns a layer that replaces a linear layer, with an activation fused into it if one is given
    make: Callable[[nn.Linear, str | None], nn.Module]
    activations: tuple[str, ...]  # activations that can be fused
    cannot: Callable[[nn.Linear], str]  # returns why a layer cannot be replaced, or ""


LINEAR_KERNELS: dict[LinearKernel, _LinearKernelSpec] = {
    "onednn": _LinearKernelSpec(OneDnnLinear, tuple(FUSED), lambda linear: cannot_use_onednn(linear.weight.dtype)),
    "native": _LinearKernelSpec(NativeLinear, ("gelu",), cannot_use_native),
    "int8": _LinearKernelSpec(Int8Linear, ("gelu",), lambda linear: ""),
}


def default_precision(device: torch.device) -> Precision:
    """Return the default precision of engines on a device: float32 on a CPU, the one of tensor cores on a GPU.

    Tensor cores support bfloat16 from compute capability 8.0 (A100, RTX 30), and float16 from 7.0 (V100, T4).
    """
    if device.type != "cuda":
        return "float32"
    major, _ = torch.cuda.get_device_capability(device)
    if major >= 8:
        return "bfloat16"
    return "float16" if major == 7 else "float32"


def activation_dtype(precision: Precision) -> torch.dtype:
    """Return the activation dtype of a precision; of int8, bfloat16 if the processor supports it, else float32."""
    if precision == "float16":
        return torch.float16
    is_half = precision == "bfloat16" or (precision == "int8" and multiplies_bfloat16())
    return torch.bfloat16 if is_half else torch.float32


def unsupported_reason(precision: Precision, model: ModelConfig, device: torch.device) -> str:
    """Return the reason why a model cannot be computed in a precision on a device, or ""."""
    if precision == "float16" and device.type != "cuda":
        return f"float16 is for GPUs: on {device.type} use float32, bfloat16 or auto"
    if precision == "int8" and device.type != "cpu":
        return f"int8 is for CPUs: on {device.type} use float32, bfloat16 or auto"
    if precision == "int8" and model.encoder is None and model.decoder is None:
        return "int8 rounds the linear layers of blocks, and this model has none: use float32, bfloat16 or auto"
    return ""


def apply_plan(bundle: ModelBundle, plan: ExecutionPlan) -> None:
    """Replace linear layers of a model, and set its execution options. The model cannot be trained any more."""
    model = bundle.model
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            _project_distances(stack)
    if plan.linears != "plain":
        for stack in (model.encoder, model.decoder):
            if stack is not None:
                exchange_linears(stack.blocks, plan.linears)
    blocks = [] if model.encoder is None else list(model.encoder.blocks)
    fuses = plan.attention in ("", "native") and any(isinstance(block, Block) and can_fuse(block) for block in blocks)
    model.execution = ExecutionOptions(
        encoder_kernel=plan.attention,
        fused_block=FusedBlock() if fuses else None,
        pad_to_bucket=model.execution.pad_to_bucket if plan.linears == "plain" else plan.linears == "onednn",
        token_pruning=model.execution.token_pruning,
    )


def _project_distances(stack: nn.Module) -> None:
    """Precompute the projected distance vectors of each block in a stack with disentangled attention.

    They are appended to the relations of the stack, after the original relation with its parameters.
    """
    if isinstance(stack, Stack) and isinstance(position := stack.relations[-1], DisentangledPosition):
        for block in stack.blocks:
            assert isinstance(block, Block)
            stack.relations.append(ProjectedDistances(position, block.attention.project))


def exchange_linears(blocks: nn.ModuleList, linears: LinearKernel) -> None:
    """Replace those linear layers of blocks, in place, that the kernel can compute."""
    kernel = LINEAR_KERNELS[linears]
    for module in list(blocks.modules()):
        if isinstance(module, Mlp):
            activation = _fusible_activation(module)
            if activation in kernel.activations and not kernel.cannot(module.up):
                module.add_module("up", kernel.make(module.up, activation))
                module.activation = _identity
        if isinstance(module, nn.LayerNorm) and usable_kernels(module.weight) is not None:
            module.float()  # the C++ kernels read float32
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and not kernel.cannot(child):
                module.add_module(name, kernel.make(child, None))


def _fusible_activation(mlp: Mlp) -> str:
    """Return the name of an MLP's activation if it can be fused into the linear layer before it, or ""."""
    return next((name for name in FUSED if mlp.activation is ACTIVATIONS[name] and not mlp.gated), "")


def _identity(x: Tensor) -> Tensor:
    return x


def example_bias(config: StackConfig, rows: int, longest: int, dtype: torch.dtype, device: torch.device) -> Bias | None:
    """Return a zero bias with the type and the shape of the bias that a stack adds to attention scores.

    Args:
        config: The stack.
        rows: Number of tokens in all texts.
        longest: Number of tokens in the longest text.
        dtype: Dtype of the bias.
        device: Device of the bias.

    Returns:
        The bias; None if the stack adds no bias.
    """
    match config.relation:
        case Buckets(reach=reach):
            heads: tuple[int, ...] = (config.heads,)
        case Disentangled():
            indexes = torch.arange(2 * longest - 1, device=device)
            vectors = torch.zeros(len(indexes), config.heads, config.head_width, dtype=dtype, device=device)
            return DisentangledBias(position_q=vectors, position_k=vectors, indexes=indexes)
        case Shaw(reach=reach):
            heads = (rows, config.heads)
        case TransformerXl():
            heads, reach = (rows, config.heads), longest
        case _:
            return None
    gaps = 2 * min(reach, longest - 1) + 1
    has_values = isinstance(config.relation, Shaw) and config.relation.values
    values = torch.zeros(gaps, config.head_width, dtype=dtype, device=device) if has_values else None
    return RelativeBias(table=torch.zeros(*heads, gaps, dtype=dtype, device=device), values=values, blocks={})
