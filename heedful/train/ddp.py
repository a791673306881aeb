"""Copied: every rank has all weights, and the gradients of a step are summed over the ranks.

They are summed in buckets, whose order and content follow from the parameters alone, the last parameter first: so what
is added in which order does not depend on what ran before, and a resumed run gets the same bits. During the last
micro-batch a bucket goes off as soon as its gradients are there, while others are still being made (Li et al. 2020,
section 3.2.3). A table of tokens has a bucket of its own: where scores are tied to it, its gradient is there last, and
what stands beside it would wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.model.embedding import Embedding
from heedful.objectives import Batch, Loss, Objective
from heedful.train.ranks import Ranks

BUCKET_NUMEL = 2**23  # numbers that are summed at once


def trainable_parameters(loaded: ModelBundle, beside: nn.Module | None) -> dict[str, nn.Parameter]:
    """What requires a gradient; what both share stands once, under the model's name."""
    named = loaded.named_tensors() | {
        f"beside.{name}": each for name, each in (beside or nn.Module()).named_parameters()
    }
    found = {id(tensor): (name, tensor) for name, tensor in reversed(named.items()) if tensor.requires_grad}
    return dict(reversed(found.values()))  # type: ignore[arg-type]


@dataclass(kw_only=True, slots=True, eq=False)
class _Bucket:
    names: list[str]
    missing: int = 0  # gradients that are not there yet
    had: list[bool] = field(default_factory=list)  # which parameters had a gradient here
    flat: Tensor | None = None
    work: Any = None


class Replicated:
    """The weights of a rank that has all of them, and how their gradients come together."""

    even = False  # ranks may make different numbers of micro-batches

    def __init__(self, loaded: ModelBundle, beside: nn.Module | None, ranks: Ranks, *, half: bool, early: bool) -> None:
        """`half`: sums are made in bfloat16; `early`: before all gradients are there, so that none can be undone."""
        self.ranks, self._loaded, self._half = ranks, loaded, half
        self.copies = ranks.size  # of the weights
        self._named = trainable_parameters(loaded, beside)
        self.parameters: dict[str, Tensor] = dict(self._named)
        self._early = early and ranks.size > 1
        tables = {id(table) for model in (loaded, beside) if model is not None for table in _tables(model)}
        names = list(reversed(self._named))
        groups = buckets([(self._named[name].numel(), id(self._named[name]) in tables) for name in names], BUCKET_NUMEL)
        self._buckets = [_Bucket(names=[names[number] for number in group]) for group in groups]
        self._of = {id(self._named[name]): bucket for bucket in self._buckets for name in bucket.names}
        self._gone = 0  # buckets that went off

    def placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a state as parts of whole ones: they are whole."""
        return dict(tensors)

    def learn(self, objective: Objective, batch: Batch, *, precision: torch.dtype, weight: float, last: bool) -> Loss:
        """Add the gradient of a micro-batch, times a weight; `last`: the step has no more."""
        device = batch.packed.tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=precision == torch.bfloat16):
            loss = objective.loss(self._loaded, batch)
        with self._watched() if last and self._early else nullcontext():
            (loss.sum * weight if weight != 1.0 else loss.sum).backward()
        return loss

    def gradients(self) -> dict[str, Tensor]:
        """The sums over all ranks: of every parameter that has a gradient on some rank."""
        if self.ranks.size == 1:
            there = {name: each.grad for name, each in self._named.items() if each.grad is not None}
            return {name: each.coalesce() if each.is_sparse else each for name, each in there.items()}
        self._go(len(self._buckets))
        found: dict[str, Tensor] = {}
        for bucket in self._buckets:
            flat = self._summed(bucket)
            parts = flat.split([self._named[name].numel() for name in bucket.names])
            found |= {name: part.view_as(self._named[name]) for name, part in zip(bucket.names, parts, strict=True)}
        had = {name: each for bucket in self._buckets for name, each in zip(bucket.names, bucket.had, strict=True)}
        anywhere = map(any, zip(*self.ranks.numbers(*(had[name] for name in self._named)), strict=True))
        return {name: found[name] for name, there in zip(self._named, anywhere, strict=True) if there}

    def norm(self, mine: float) -> float:
        """The norm of the whole gradient, from that of what this rank has."""
        return mine

    def forget(self) -> None:
        """The gradients, and the memory that they take; sums that are under way are waited for."""
        if 0 < self._gone < len(self._buckets):
            self._go(len(self._buckets))
        for bucket in self._buckets[: self._gone]:
            if bucket.work is not None:
                self._summed(bucket)
            bucket.flat = None
        self._gone = 0
        for parameter in self._named.values():
            parameter.grad = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While all weights are in the model: always."""
        yield

    @contextmanager
    def _watched(self) -> Iterator[None]:
        for bucket in self._buckets:
            bucket.missing = len(bucket.names)
        hooks = [each.register_post_accumulate_grad_hook(self._made) for each in self._named.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _made(self, parameter: Tensor) -> None:
        self._of[id(parameter)].missing -= 1
        ready = self._gone
        while ready < len(self._buckets) and not self._buckets[ready].missing:
            ready += 1
        self._go(ready)

    def _go(self, until: int) -> None:
        """Let buckets go off, in their order, which is the same on all ranks."""
        for bucket in self._buckets[self._gone : until]:
            parameters = [self._named[name] for name in bucket.names]
            bucket.had = [each.grad is not None for each in parameters]
            found = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
            flat = torch.cat([each.reshape(-1) for each in found])
            bucket.flat = flat.bfloat16() if self._half else flat
            for each in parameters:
                each.grad = None
            bucket.work = self.ranks.begin(bucket.flat)
        self._gone = max(self._gone, until)

    def _summed(self, bucket: _Bucket) -> Tensor:
        assert bucket.flat is not None
        self.ranks.finish(bucket.work)
        bucket.work = None
        return bucket.flat.to(self._named[bucket.names[0]].dtype)


def _tables(model: nn.Module) -> Iterator[Tensor]:
    for part in model.modules():
        if isinstance(part, Embedding):
            yield part.tokens.weight


def buckets(sizes: Sequence[tuple[int, bool]], most: int) -> list[list[int]]:
    """Numbers of neighbours that together have `most` numbers; one that has more, or is to be alone, is alone.

    >>> buckets([(4, False), (5, False), (3, False), (1, True), (2, False)], 10)
    [[0, 1], [2], [3], [4]]
    """
    found: list[list[int]] = []
    left = 0
    for number, (size, alone) in enumerate(sizes):
        if alone or not found or size > left:
            found.append([])
            left = most
        found[-1].append(number)
        left = 0 if alone else left - size
    return found
