"""Dropout: the share of dropped elements, the scale of the others, independence, gradient and seed."""

from __future__ import annotations

import pytest
import torch

from heedful.nn.dropout import STEPS, dropout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_elements_are_dropped_or_scaled(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.ones(401, 501, dtype=dtype)
    y = dropout(x, p)
    share = round(p * STEPS) / STEPS
    nonzero = y != 0
    assert (y[nonzero] == torch.tensor(STEPS / (STEPS - round(p * STEPS)), dtype=torch.float64).to(dtype)).all()
    assert abs(float((~nonzero).double().mean()) - share) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    for dimension in (0, 1):  # all rows and all columns have the same share
        means = (~nonzero).double().mean(dimension)
        assert (means - share).abs().max() < 6 * (p * (1 - p) / nonzero.shape[dimension]) ** 0.5


def test_elements_near_each_other_are_independent() -> None:
    torch.manual_seed(2)
    centred = (dropout(torch.ones(1_000_000), 0.5) != 0).double() - 0.5
    for distance in (1, 2, 3, 4, 8, 64):
        assert abs(float((centred[distance:] * centred[:-distance]).mean())) < 5 * 0.25 / 1000


def test_the_gradient_has_the_factors_of_the_output() -> None:
    torch.manual_seed(3)
    x = torch.randn(7, 13, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.3)
    y.backward(torch.full_like(y, 2.0))
    torch.testing.assert_close(x.grad, 2 * (y / x).detach())


def test_dropout_is_seeded_by_the_global_generator() -> None:
    x = torch.ones(5, 5)
    torch.manual_seed(4)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(4)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(first, second)


def test_extreme_probabilities_empty_and_transposed_tensors() -> None:
    x = torch.ones(3)
    assert dropout(x, 0.0) is x
    assert dropout(x, 0.7, training=False) is x
    assert dropout(x, 1.0).sum() == 0
    assert dropout(torch.ones(0, 4), 0.5).shape == (0, 4)
    assert dropout(torch.ones(2, 3).T, 0.5).shape == (3, 2)
