"""Micro-batches: memory after a backward pass that failed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from heedful.train.microbatch import release_failed_backward


class Payload:
    """An object that a node of the graph refers to."""


class KeepPayload(torch.autograd.Function):
    """Return a copy of a tensor; the node in the graph refers to a payload."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, payload: Payload) -> Tensor:
        ctx.payload = payload
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class FailBackward(torch.autograd.Function):
    """Return a copy of a tensor; the backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        raise MemoryError


def test_the_graph_of_a_failed_backward_pass_is_released() -> None:
    x, payload = torch.zeros(2, requires_grad=True), Payload()
    reference = weakref.ref(payload)
    loss = (KeepPayload.apply(x, payload) + FailBackward.apply(x * 2)).sum()  # type: ignore[no-untyped-call]
    del payload
    with pytest.raises(MemoryError):
        loss.backward()
    del loss
    release_failed_backward()
    gc.collect()
    assert reference() is None
