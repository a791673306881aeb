"""Data parallel training: every rank has all weights, and gradients are summed over the ranks in buckets.

The parameters alone decide the order and the content of the buckets, the last parameter first, so that a resumed run
adds in the same order and gets the same bits. During the last micro-batch of a step, a bucket is summed as soon as its
gradients are ready, while the backward pass computes the others (Li et al. 2020, section 3.2.3). A token embedding has
a bucket of its own: if an output layer is tied to it, its gradient is ready last, and the rest of the bucket would
wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import Work

from heedful.checkpoint import ModelBundle
from heedful.device import autocast
from heedful.model.embedding import EmbeddingLayer
from heedful.objectives import Batch, Loss, Objective
from heedful.train.ranks import Ranks

BUCKET_NUMEL = 2**23  # numbers in one bucket


def trainable_parameters(loaded: ModelBundle, extra_module: nn.Module | None) -> dict[str, nn.Parameter]:
    """Return trainable parameters by name; names of the parameters of `extra_module` begin with "beside.".

    A tensor that is shared with `extra_module` is listed once, under the model's name.
    """
    extra = (extra_module or nn.Module()).named_parameters()
    named = loaded.named_tensors() | {f"beside.{name}": parameter for name, parameter in extra}
    by_id = {id(tensor): (name, tensor) for name, tensor in reversed(named.items()) if tensor.requires_grad}
    return dict(reversed(by_id.values()))  # type: ignore[arg-type]


@dataclass(kw_only=True, slots=True, eq=False)
class _Bucket:
    """Parameters whose gradients are summed over the ranks together."""

    names: list[str]
    missing: int = 0  # number of gradients that are not ready
    had_grad: list[bool] = field(default_factory=list)  # whether each parameter has a gradient on this rank
    flat: Tensor | None = None  # all gradients in one vector
    work: Work | None = None  # the running sum; None before it starts, after it ends, and with one rank


class Replicated:
    """All weights on every rank; `reduce_gradients` sums their gradients over the ranks."""

    needs_equal_steps = False  # ranks may run different numbers of micro-batches

    def __init__(
        self, loaded: ModelBundle, extra_module: nn.Module | None, ranks: Ranks, *, reduce_bf16: bool, overlap: bool
    ) -> None:
        """Prepare the buckets.

        Args:
            loaded: The model.
            extra_module: Trained with the model; it may share tensors with it.
            ranks: The processes.
            reduce_bf16: Whether to sum in bfloat16 instead of the parameters' dtype.
            overlap: Whether to sum while the backward pass runs; then a micro-batch cannot be repeated.
        """
        self.ranks, self._loaded, self._reduce_bf16 = ranks, loaded, reduce_bf16
        self.num_replicas = ranks.size
        self._named = trainable_parameters(loaded, extra_module)
        self.parameters: dict[str, Tensor] = dict(self._named)
        self._overlap = overlap and ranks.size > 1
        models = [model for model in (loaded, extra_module) if model is not None]
        tables = {
            id(part.tokens.weight) for model in models for part in model.modules() if isinstance(part, EmbeddingLayer)
        }
        names = list(reversed(self._named))
        sizes = [(self._named[name].numel(), id(self._named[name]) in tables) for name in names]
        groups = group_into_buckets(sizes, BUCKET_NUMEL)
        self._buckets = [_Bucket(names=[names[number] for number in group]) for group in groups]
        self._bucket_of = {id(self._named[name]): bucket for bucket in self._buckets for name in bucket.names}
        self._launched = 0  # number of buckets whose sum has begun, the first ones

    def as_dtensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a state unchanged, since every rank has them in full."""
        return dict(tensors)

    def backward(
        self, objective: Objective, batch: Batch, *, precision: torch.dtype, weight: float, last: bool
    ) -> Loss:
        """Add `weight` times the gradient of a micro-batch; `last` is true for the last micro-batch of a step."""
        with autocast(batch.packed.tokens.device, precision):
            loss = objective.loss(self._loaded, batch)
        with self._launch_ready_buckets() if last and self._overlap else nullcontext():
            (loss.sum * weight if weight != 1.0 else loss.sum).backward()
        return loss

    def reduce_gradients(self) -> dict[str, Tensor]:
        """Return the sum of each gradient over all ranks, for parameters with a gradient on at least one rank."""
        if self.ranks.size == 1:
            grads = {name: tensor.grad for name, tensor in self._named.items() if tensor.grad is not None}
            return {name: grad.coalesce() if grad.is_sparse else grad for name, grad in grads.items()}
        self._launch(len(self._buckets))
        gradients: dict[str, Tensor] = {}
        had_grad: dict[str, bool] = {}
        for bucket in self._buckets:
            parts = self._wait(bucket).split([self._named[name].numel() for name in bucket.names])
            for name, part, had in zip(bucket.names, parts, bucket.had_grad, strict=True):
                gradients[name], had_grad[name] = part.view_as(self._named[name]), had
        had_grad_by_rank = self.ranks.all_gather_scalars(*(had_grad[name] for name in self._named))
        has_grad = map(any, zip(*had_grad_by_rank, strict=True))
        return {name: gradients[name] for name, is_used in zip(self._named, has_grad, strict=True) if is_used}

    def global_norm(self, local_norm: float) -> float:
        """Return the norm of the full gradient: `local_norm`, since every rank has all of it."""
        return local_norm

    def zero_grad(self) -> None:
        """Free the gradients; waits for sums that have begun."""
        if 0 < self._launched < len(self._buckets):
            self._launch(len(self._buckets))
        for bucket in self._buckets[: self._launched]:
            if bucket.work is not None:
                self._wait(bucket)
            bucket.flat = None
        self._launched = 0
        for parameter in self._named.values():
            parameter.grad = None

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Context in which the model has all weights; here it always has them."""
        yield

    @contextmanager
    def _launch_ready_buckets(self) -> Iterator[None]:
        """Context for a backward pass in which each bucket is summed as soon as its gradients are ready."""
        for bucket in self._buckets:
            bucket.missing = len(bucket.names)
        hooks = [tensor.register_post_accumulate_grad_hook(self._on_grad) for tensor in self._named.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _on_grad(self, parameter: Tensor) -> None:
        """Count a gradient that is ready, and sum the buckets that are complete."""
        self._bucket_of[id(parameter)].missing -= 1
        ready = self._launched
        while ready < len(self._buckets) and not self._buckets[ready].missing:
            ready += 1
        self._launch(ready)

    def _launch(self, until: int) -> None:
        """Begin to sum the buckets with numbers below `until`, in their order, which is the same on all ranks."""
        for bucket in self._buckets[self._launched : until]:
            parameters = [self._named[name] for name in bucket.names]
            bucket.had_grad = [parameter.grad is not None for parameter in parameters]
            grads = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in parameters]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            bucket.flat = flat.bfloat16() if self._reduce_bf16 else flat
            for parameter in parameters:
                parameter.grad = None
            bucket.work = self.ranks.all_reduce_async(bucket.flat)
        self._launched = max(self._launched, until)

    def _wait(self, bucket: _Bucket) -> Tensor:
        """Wait for the sum of a bucket, and return it in the parameters' dtype."""
        assert bucket.flat is not None
        self.ranks.wait(bucket.work)
        bucket.work = None
        return bucket.flat.to(self._named[bucket.names[0]].dtype)


def group_into_buckets(sizes: Sequence[tuple[int, bool]], max_numel: int) -> list[list[int]]:
    """Group neighbouring tensors into buckets of at most `max_numel` numbers; a larger tensor has its own bucket.

    Args:
        sizes: For each tensor, how many numbers it has, and whether it must have its own bucket.

    >>> group_into_buckets([(4, False), (5, False), (3, False), (1, True), (2, False)], 10)
    [[0, 1], [2], [3], [4]]
    """
    groups: list[list[int]] = []
    room = 0
    for number, (size, is_single) in enumerate(sizes):
        if is_single or not groups or size > room:
            groups.append([])
            room = max_numel
        groups[-1].append(number)
        room = 0 if is_single else room - size
    return groups
