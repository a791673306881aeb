"""Micro-batches: memory after a backward pass that failed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from heedful.train.microbatch import release_failed_backward


class Held:
    """An object that a node of the graph refers to."""


class Holds(torch.autograd.Function):
    """Passes a tensor on; its node refers to an object."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Held) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class Fails(torch.autograd.Function):
    """Passes a tensor on; its backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        raise MemoryError


def test_the_graph_of_a_failed_backward_pass_is_released() -> None:
    x, held = torch.zeros(2, requires_grad=True), Held()
    alive = weakref.ref(held)
    loss = (Holds.apply(x, held) + Fails.apply(x * 2)).sum()  # type: ignore[no-untyped-call]
    del held
    with pytest.raises(MemoryError):
        loss.backward()
    del loss
    release_failed_backward()
    gc.collect()
    assert alive() is None
