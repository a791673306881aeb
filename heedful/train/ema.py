"""Exponential moving average (EMA) of weights, which is evaluated and saved instead of the trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightAverage:
    """The exponential moving average of weights: average <- d average + (1 - d) weights after each step.

    d = min(decay, (1 + t) / (10 + t)) at step t: the smaller decay of early steps forgets the random initial weights
    sooner (as `num_updates` in TensorFlow's ExponentialMovingAverage).
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        """Copy the weights; with `decay` 0 there is no average, and `tensors` is empty."""
        self._parameters, self._decay = parameters, decay
        self.tensors = {name: tensor.detach().clone() for name, tensor in parameters.items()} if decay else {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after step `step`, counted from 1."""
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
        """Exchange the averages and the model's weights."""
        for name, tensor in self.tensors.items():
            weights = self._parameters[name]
            trained = weights.detach().clone()
            weights.copy_(tensor)
            tensor.copy_(trained)
