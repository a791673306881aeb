"""Fully sharded data parallel: every rank has a shard of each weight, gradient and moment (ZeRO stage 3).

A block's weights are gathered before it runs and freed after it, and its gradient is reduced and scattered at once
(Rajbhandari et al. 2020; PyTorch's `fully_shard`, Zhao et al. 2023). The ranks are a mesh of two dimensions. Along
"shard", tensors are split by their first dimension. Along "replicate", shards are equal, and only sums of gradients are
exchanged.

In half precision on GPUs, the weights of blocks are rounded to it before they are gathered, which halves the traffic
and what autograd keeps. Linear layers compute the same as with autocast alone; weights of norms are rounded too, but
norms are computed in float32, as are embeddings, losses and sums of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.device import autocast
from heedful.errors import SettingError
from heedful.model.stack import Stack
from heedful.objectives import Batch, Loss, Objective
from heedful.train.ddp import trainable_parameters
from heedful.train.ranks import Ranks

ROUNDED_DEVICES = {"cuda"}  # devices on which the gathered weights of blocks are in half precision
# names of the tensors of a state that are sharded like the parameter {}
STATE_NAMES = ("model/{}", "best/{}", "average/{}", "optimizer/{}.m", "optimizer/{}.v")


class Sharded:
    """A shard of each weight on every rank; gradients are reduced and scattered."""

    needs_equal_steps = True  # all ranks must run the same number of micro-batches, since they gather weights together

    def __init__(
        self,
        loaded: ModelBundle,
        extra_module: nn.Module | None,
        ranks: Ranks,
        degree: int,
        *,
        precision: torch.dtype,
        reduce_bf16: bool,
    ) -> None:
        """Shard the model in place.

        Args:
            loaded: The model.
            extra_module: Trained with the model; it may share tensors with it.
            ranks: The processes.
            degree: Number of ranks that share one copy of the weights; it divides the number of ranks.
            precision: The dtype of matrix products.
            reduce_bf16: Whether to sum gradients in bfloat16.
        """
        self.ranks, self.degree, self.num_replicas = ranks, degree, ranks.size // degree
        self._device = next(loaded.parameters()).device
        self.mesh, self._cpu_mesh = _meshes(ranks, degree, self._device.type, "cpu")
        self._gathers_rounded = precision in (torch.bfloat16, torch.float16) and self._device.type in ROUNDED_DEVICES
        reduce_dtype = torch.bfloat16 if reduce_bf16 else None
        policy = block_policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        if self._gathers_rounded:
            # inputs stay float32, since autocast decides about each operation
            block_policy = MixedPrecisionPolicy(
                param_dtype=precision, reduce_dtype=reduce_dtype or torch.float32, cast_forward_inputs=False
            )
        self._root = _LossModule(loaded, extra_module)
        for stack in [module for module in self._root.modules() if isinstance(module, Stack)]:
            for block in stack.blocks:
                if self._gathers_rounded:
                    _keep_norms_in_float32(block)
                fully_shard(block, mesh=self.mesh, mp_policy=block_policy)
        fully_shard(self._root, mesh=self.mesh, mp_policy=policy, reshard_after_forward=False)
        self._modules = [module for module in self._root.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)  # sums instead of means, as in ddp.py
            module.set_force_sum_reduction_for_comms(True)  # the only reduction that gloo has
        self._sharded: dict[str, Any] = dict(trainable_parameters(loaded, extra_module))  # DTensors
        self.parameters: dict[str, Tensor] = {name: item.detach().to_local() for name, item in self._sharded.items()}
        self._states = {form.format(name): item for name, item in self._sharded.items() for form in STATE_NAMES}
        self._used: set[str] = set()  # parameters that the losses of this step depend on
        self._has_full_params = False

    def as_dtensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a state, with shards as DTensors on the CPU; tensors such as step counts stay."""
        result = {}
        for name, tensor in tensors.items():
            if (full := self._states.get(name)) is None:
                result[name] = tensor
                continue
            size: dict[str, Any] = {"shape": full.shape, "stride": full.stride(), "run_check": False}
            result[name] = DTensor.from_local(tensor.detach().cpu(), self._cpu_mesh, (Replicate(), Shard(0)), **size)
        return result

    def backward(
        self, objective: Objective, batch: Batch, *, precision: torch.dtype, weight: float, last: bool
    ) -> Loss:
        """Add `weight` times the gradient of a micro-batch; `last` is true for the last micro-batch of a step."""
        root: Any = self._root  # an FSDPModule since `fully_shard`
        root.set_requires_all_reduce(last)
        with self.ranks.translate_errors():
            with autocast(self.mesh.device_type, precision):
                total, count, used = root(objective, batch)
            self._used |= used
            (total * weight).backward()
        return Loss(total, count)

    def reduce_gradients(self) -> dict[str, Tensor]:
        """Return this rank's shard of each summed gradient, for parameters with a gradient on at least one rank."""
        used = [name in self._used for name in self._sharded]
        has_grad = map(any, zip(*self.ranks.all_gather_scalars(*used), strict=True))
        return {
            name: parameter.grad.to_local()
            for (name, parameter), is_used in zip(self._sharded.items(), has_grad, strict=True)
            if is_used
        }

    def global_norm(self, local_norm: float) -> float:
        """Return the norm of the full gradient, where `local_norm` is that of this rank's shards."""
        norms = self.ranks.all_gather_scalars(local_norm)[: self.degree]
        return math.sqrt(sum(norm * norm for (norm,) in norms))

    def zero_grad(self) -> None:
        """Free the gradients."""
        self._used.clear()
        for parameter in self._sharded.values():
            parameter.grad = None

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Context in which every rank has all weights and can run the model by itself; all ranks enter it."""
        if self._has_full_params:
            yield
            return
        saved_hooks = []
        for module in self._modules:
            assert isinstance(module, nn.Module)
            if self._gathers_rounded and not isinstance(module, _LossModule):
                module.reshard()
            else:
                with self.ranks.translate_errors():
                    module.unshard()
            saved_hooks.append((module, module._forward_pre_hooks, module._forward_hooks))
            # without the hooks, which gather weights, ranks may run the model different numbers of times
            module._forward_pre_hooks, module._forward_hooks = {}, {}
        self._has_full_params = True
        try:
            with self._exact_blocks() if self._gathers_rounded else nullcontext():
                self.ranks.wait_for_gpu(self._device)  # else a read of the weights waits forever for a lost rank
                yield
        finally:
            self._has_full_params = False
            for module, pre_hooks, hooks in saved_hooks:
                module._forward_pre_hooks, module._forward_hooks = pre_hooks, hooks
                module.reshard()

    @contextmanager
    def _exact_blocks(self) -> Iterator[None]:
        """Context in which blocks have all of their weights in float32; `unshard` would round them."""
        sharded: list[tuple[nn.Module, str, Any]] = [
            (module, name, parameter)
            for module in self._root.modules()
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        full: dict[int, nn.Parameter] = {}  # by the id of the sharded tensor, which modules may share
        for _, _, parameter in sharded:
            if id(parameter) not in full:
                with self.ranks.translate_errors():
                    tensor = parameter.detach().full_tensor()
                full[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        try:
            for module, name, parameter in sharded:
                module._parameters[name] = full[id(parameter)]
            yield
        finally:
            for module, name, parameter in sharded:
                module._parameters[name] = parameter


def _keep_norms_in_float32(block: nn.Module) -> None:
    """Let the norms of a block return float32, as under autocast, although their weights are rounded."""
    for norm in block.modules():
        if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
            norm.forward = partial(_norm_in_float32, norm)  # type: ignore[method-assign]


def _norm_in_float32(norm: nn.LayerNorm | nn.RMSNorm, x: Tensor) -> Tensor:
    """Compute a norm in float32."""
    weight, shape = norm.weight.float(), norm.normalized_shape
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(x.float(), shape, weight, norm.eps)
    return F.layer_norm(x.float(), shape, weight, None if norm.bias is None else norm.bias.float(), norm.eps)


class _LossModule(nn.Module):
    """All trained modules, with the loss as forward pass; `fully_shard` keeps weights outside of blocks gathered."""

    def __init__(self, loaded: ModelBundle, extra_module: nn.Module | None) -> None:
        super().__init__()
        self.loaded, self.extra_module = loaded, extra_module

    def forward(self, objective: Objective, batch: Batch) -> tuple[Tensor, float, set[str]]:
        """Return the summed loss, its count, and the names of the parameters that it depends on."""
        loss = objective.loss(self.loaded, batch)
        leaves = _leaves(loss.sum)
        used, unused = set(), []
        for name, parameter in trainable_parameters(self.loaded, self.extra_module).items():
            if isinstance(parameter, DTensor) or id(parameter) in leaves:  # DTensors are weights of blocks, all used
                used.add(name)
            else:
                unused.append(parameter)
        return _AddZeroGradients.apply(loss.sum, *unused), loss.count, used  # type: ignore[no-untyped-call]


class _AddZeroGradients(torch.autograd.Function):
    """Return the loss unchanged, with zero gradients for unused parameters, since ranks must sum the same gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters  # type: ignore[attr-defined]
        return loss.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, ...]:
        parameters = ctx.parameters  # type: ignore[attr-defined]
        return gradients[0], *(torch.zeros_like(parameter) for parameter in parameters)


def _leaves(output: Tensor) -> set[int]:
    """Return the ids of the leaf tensors that a tensor was computed from."""
    visited, stack, leaves = set(), [output.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)  # not its id, which a later node may get
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        stack += [function for function, _ in node.next_functions]
    return leaves


def _meshes(ranks: Ranks, degree: int, *devices: str) -> list[DeviceMesh]:
    """Return a mesh of the ranks for each device; neighbouring ranks share a copy of the weights."""
    if ranks.size % degree:
        raise SettingError(
            f"train.data_parallel_shard_degree is {degree}, but there are {ranks.size} ranks: "
            'set it to a number that divides them, or "all"',
            path="train.data_parallel_shard_degree",
        )
    grid = torch.arange(ranks.size).view(-1, degree)
    columns, rows = ([ranks.new_subgroup(members.tolist()) for members in lines] for lines in (grid.T, grid))
    own_groups = [next(group for group in groups if group) for groups in (columns, rows)]
    names = ("replicate", "shard")
    return [DeviceMesh.from_group(own_groups, device, mesh=grid, mesh_dim_names=names) for device in devices]
