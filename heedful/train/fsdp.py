"""Sharded: every rank has a part of each weight, of its gradient and of its moments (Rajbhandari et al. 2020, stage 3).

A block's weights are gathered when it is its turn and forgotten after it, and its gradient is summed and parted at
once: PyTorch's fully_shard (Zhao et al. 2023), over a mesh of ranks with two dimensions. Along "shard" tensors are
parted by their first dimension; along "replicate" the parts are the same, and only sums of gradients cross it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.model.stack import Stack
from heedful.objectives import Batch, Loss, Objective
from heedful.train.ddp import trainable_parameters
from heedful.train.ranks import Ranks


class Sharded:
    """The weights of a rank that has a part of each, and how their gradients come together."""

    even = True  # each micro-batch is one of all ranks: they gather weights for it together

    def __init__(self, loaded: ModelBundle, beside: nn.Module | None, ranks: Ranks, parts: int, *, half: bool) -> None:
        """In place; `half`: sums of gradients are made in bfloat16."""
        self.ranks, self.parts, self.copies = ranks, parts, ranks.size // parts
        device = next(loaded.parameters()).device.type
        self.mesh, self._paper = _meshes(ranks, parts, device, "cpu")
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if half else None)
        self._root = _Learning(loaded, beside)
        for stack in [module for module in self._root.modules() if isinstance(module, Stack)]:
            for block in stack.blocks:
                fully_shard(block, mesh=self.mesh, mp_policy=policy)
        fully_shard(self._root, mesh=self.mesh, mp_policy=policy, reshard_after_forward=False)
        self._modules: list[Any] = [module for module in self._root.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)  # sums, as everywhere here
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        self._owned: dict[str, Any] = dict(trainable_parameters(loaded, beside))
        self.parameters: dict[str, Tensor] = {name: each.detach().to_local() for name, each in self._owned.items()}
        forms = ("model/{}", "best/{}", "average/{}", "optimizer/{}.m", "optimizer/{}.v")
        self._states = {form.format(name): each for name, each in self._owned.items() for form in forms}
        self._used: set[str] = set()
        self._open = False

    def placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a state as parts of whole ones, on the CPU; what has no part, as a count of steps, as it is."""
        found = {}
        for name, tensor in tensors.items():
            if (whole := self._states.get(name)) is None:
                found[name] = tensor
                continue
            size: dict[str, Any] = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
            found[name] = DTensor.from_local(tensor.detach().cpu(), self._paper, (Replicate(), Shard(0)), **size)
        return found

    def learn(self, objective: Objective, batch: Batch, *, precision: torch.dtype, weight: float, last: bool) -> Loss:
        """Add the gradient of a micro-batch, times a weight; `last`: the step has no more."""
        self._parted.set_requires_all_reduce(last)
        with self.ranks.told():
            with torch.autocast(self.mesh.device_type, torch.bfloat16, enabled=precision == torch.bfloat16):
                total, count, used = self._root(objective, batch)
            self._used |= used
            (total * weight).backward()
        return Loss(total, count)

    def gradients(self) -> dict[str, Tensor]:
        """The sums over all ranks, this rank's part: of every parameter that has a gradient on some rank."""
        mine = [name in self._used for name in self._owned]
        anywhere = map(any, zip(*self.ranks.numbers(*mine), strict=True))
        return {
            name: parameter.grad.to_local()
            for (name, parameter), there in zip(self._owned.items(), anywhere, strict=True)
            if there
        }

    def norm(self, mine: float) -> float:
        """The norm of the whole gradient, from that of what this rank has."""
        return math.sqrt(sum(each * each for (each,) in self.ranks.numbers(mine)[: self.parts]))

    def forget(self) -> None:
        """The gradients, and the memory that they take."""
        self._used.clear()
        for parameter in self._owned.values():
            parameter.grad = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While all weights are in the model, on every rank, and it is an ordinary one; all ranks come here."""
        if self._open:
            yield
            return
        kept = []
        for module in self._modules:
            with self.ranks.told():
                module.unshard()
            kept.append((module, module._forward_pre_hooks, module._forward_hooks))
            module._forward_pre_hooks, module._forward_hooks = {}, {}  # they gather: ranks need not call as often
        self._open = True
        try:
            yield
        finally:
            self._open = False
            for module, before, after in kept:
                module._forward_pre_hooks, module._forward_hooks = before, after
                module.reshard()

    @property
    def _parted(self) -> Any:
        return self._root


class _Learning(nn.Module):
    """What is parted: all that learns. It makes the loss, so that weights outside of blocks are there all the time."""

    def __init__(self, loaded: ModelBundle, beside: nn.Module | None) -> None:
        super().__init__()
        self.loaded, self.beside = loaded, beside

    def forward(self, objective: Objective, batch: Batch) -> tuple[Tensor, float, set[str]]:
        """The summed loss, its count, and which parameters it depends on."""
        loss = objective.loss(self.loaded, batch)
        reached = _reached(loss.sum)
        used, without = set(), []
        for name, parameter in trainable_parameters(self.loaded, self.beside).items():
            if isinstance(parameter, DTensor) or id(parameter) in reached:  # a block's: it is used as a whole
                used.add(name)
            else:
                without.append(parameter)
        return _Touched.apply(loss.sum, *without), loss.count, used  # type: ignore[no-untyped-call]


class _Touched(torch.autograd.Function):
    """The loss itself; parameters it does not depend on get a gradient of 0, since ranks sum those of the same ones."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
        return given[0], *(torch.zeros_like(each) for each in ctx.parameters)


def _reached(output: Tensor) -> set[int]:
    """The ids of the leaves that a tensor was computed from."""
    seen, waiting, found = set(), [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)  # itself: its id may be that of another one, once it is gone
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [each for each, _ in node.next_functions]
    return found


def _meshes(ranks: Ranks, parts: int, *devices: str) -> list[DeviceMesh]:
    """The same ranks for several devices; those that stand beside each other share a copy of the weights."""
    if ranks.size % parts:
        raise HeedfulError(
            f"train.data_parallel_shard_degree is {parts}, but there are {ranks.size} ranks: "
            'set it to a number that divides them, or "all"'
        )
    whole = torch.arange(ranks.size).view(-1, parts)
    groups = [ranks.group(each.tolist()) for each in (*whole.T, *whole)]
    mine = [next(group for group in found if group) for found in (groups[:parts], groups[parts:])]
    names = ("replicate", "shard")
    return [DeviceMesh.from_group(mine, device, mesh=whole, mesh_dim_names=names) for device in devices]
