"""Exponential moving average (EMA) of weights, which is evaluated and saved in place of the trained ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightAverage:
    """average <- d average + (1 - d) weights after each step, with d = min(decay, (1 + t) / (10 + t)) at step t.

    The smaller decay of early steps keeps the random initial weights out (as `num_updates` does in TensorFlow's
    ExponentialMovingAverage).
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        """`decay` 0: no average is kept, and `tensors` is empty."""
        self._parameters, self._decay = parameters, decay
        self.tensors = {name: tensor.detach().clone() for name, tensor in parameters.items()} if decay else {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after `step`, counted from 1."""
        if self.tensors:
            decay = min(self._decay, (1 + step) / (10 + step))
            weights = [self._parameters[name].detach() for name in self.tensors]
            torch._foreach_lerp_(list(self.tensors.values()), weights, 1 - decay)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore saved averages."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model has the averages; the trained weights are restored afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, tensor in self.tensors.items():
            weights = self._parameters[name]
            trained = weights.detach().clone()
            weights.copy_(tensor)
            tensor.copy_(trained)
