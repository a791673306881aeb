"""Restricted and local attention equal `attend` with a window and loops over numbers; their cost is linear."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from heedful.errors import HeedfulError
from heedful.nn.attend import attend
from heedful.nn.layout import Layout
from heedful.nn.local_attention import LocalPredictive, local_monotonic, restricted
from heedful.nn.scores import Additive, Location, align, dot, scaled_dot, soft_weights, weighted_sum

SELF = Layout.of([0, 3, 3, 10, 11])
CROSS = Layout.of([0, 5, 7, 8], [0, 4, 4, 6])  # n x m: 5 x 4, 2 x 0, 1 x 2


def sample_qkv(layout: Layout, *shape: int) -> list[Tensor]:
    """Sample q, k and v, whose rows have this shape."""
    generator = torch.Generator().manual_seed(3)
    rows = (layout.rows, *[layout.keys[-1][1]] * 2)
    return [torch.randn(n, *shape, dtype=torch.float64, generator=generator).requires_grad_() for n in rows]


class ElementCounter(TorchFunctionMode):
    """Counts the elements of all tensors that functions return, views included, and those of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.total += out.numel()
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("radius", [0, 1, 2, 7, 50])
def test_restricted_attention_equals_attend_with_a_window(radius: int) -> None:
    q, k, v = sample_qkv(SELF, 2, 3)
    actual = restricted(q, k, v, SELF, radius=radius, scale=0.7)
    expected = attend(q, k, v, SELF, scale=0.7, window=radius, backend="reference")
    assert torch.allclose(actual, expected, atol=1e-12)
    if radius >= 7:
        assert torch.allclose(actual, attend(q, k, v, SELF, scale=0.7), atol=1e-12), "all keys are in the window"
    weights = torch.randn(11, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    gradients, expected_gradients = (
        torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (actual, expected)
    )
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(gradients, expected_gradients, strict=True))


def test_the_cost_of_restricted_attention_is_linear() -> None:
    """Twice the rows make and save twice the elements, and no tensor has n x n elements."""
    element_counts = []
    for n in (64, 128, 256):
        q, k, v = sample_qkv(Layout.of([0, n]), 1, 2)
        saved_sizes: list[int] = []

        def save(tensor: Tensor, saved_sizes: list[int] = saved_sizes) -> Tensor:
            saved_sizes.append(tensor.numel())
            return tensor

        with ElementCounter() as counter, saved_tensors_hooks(save, lambda tensor: tensor):
            restricted(q, k, v, Layout.of([0, n]), radius=2, scale=1.0)
        element_counts.append((counter.total, sum(saved_sizes), max(*saved_sizes, counter.largest)))
        assert element_counts[-1][2] < n * n // 4
    for counts, doubled in pairwise(element_counts):
        assert all(1.9 < b / a < 2.05 for a, b in zip(counts, doubled, strict=True))


def test_invalid_arguments_are_refused_and_no_rows_are_allowed() -> None:
    q, k, v = sample_qkv(SELF, 2, 3)
    assert restricted(q[:0], k[:0], v[:0], Layout.of([0, 0]), radius=1, scale=1.0).shape == (0, 2, 3)
    with pytest.raises(HeedfulError, match="radius is -1; expected a whole number from 0"):
        restricted(q, k, v, SELF, radius=-1, scale=1.0)
    with pytest.raises(HeedfulError, match="compares rows with their neighbours"):
        restricted(q[:8], k[:8], v[:8], CROSS, radius=1, scale=1.0)
    with pytest.raises(HeedfulError, match="location scores ignore keys"):
        local_monotonic(Location(width=3, longest=9).double(), q[:8, 0], k[:6, 0], v[:6, 0], CROSS, radius=1)
    with pytest.raises(HeedfulError, match="radius is 0; expected a whole number from 1"):
        LocalPredictive(dot, width=3, inner_width=2, radius=0)


def by_loops(q: Tensor, k: Tensor, v: Tensor, centres: list[float], radius: int, gaussian: bool) -> list[list[float]]:
    """Compute local attention with dot products by loops (Luong et al. 2015, equations 7 and, if `gaussian`, 10)."""
    out = []
    for (start, stop), (first, last) in zip(CROSS.queries, CROSS.keys, strict=True):
        for i in range(start, stop):
            p, m = centres[i], last - first
            positions = [s for s in range(m) if p - radius <= s <= p + radius]
            powers = [math.exp(float(q[i] @ k[first + s])) for s in positions]
            weights = [power / sum(powers) for power in powers]
            if gaussian:
                factors = [math.exp(-((s - p) ** 2) / (2 * (radius / 2) ** 2)) for s in positions]
                weights = [w * factor for w, factor in zip(weights, factors, strict=True)]
            rows = [[w * float(x) for x in v[first + s]] for w, s in zip(weights, positions, strict=True)]
            out.append([sum(column) for column in zip(*rows, strict=True)] or [0.0] * v.shape[1])
    return out


@pytest.mark.parametrize("radius", [1, 2, 9])
def test_local_attention_of_luong(radius: int) -> None:
    q, k, v = (tensor.detach() for tensor in sample_qkv(CROSS, 3))
    monotonic = local_monotonic(dot, q, k, v, CROSS, radius=radius)
    positions = [float(i - start) for start, stop in CROSS.queries for i in range(start, stop)]
    expected = torch.tensor(by_loops(q, k, v, positions, radius, False), dtype=torch.float64)
    assert torch.allclose(monotonic, expected, atol=1e-12)
    if radius == 9:
        global_attention = weighted_sum(soft_weights(align(dot, q, k, CROSS)), v, CROSS)
        assert torch.allclose(monotonic, global_attention, atol=1e-12), "all keys are in the window"

    local = LocalPredictive(dot, width=3, inner_width=2, radius=radius).double().requires_grad_(False)
    for number, parameter in enumerate(local.parameters()):
        parameter.normal_(generator=torch.Generator().manual_seed(number))
    centres = []
    for i, m in zip(range(8), [m for n, m in CROSS.sizes() for _ in range(n)], strict=True):
        inner = (local.inner.weight @ q[i]).tanh()
        centres.append(m / (1 + math.exp(-float(local.out.weight[0] @ inner))))
    assert local.centres(q, CROSS).tolist() == pytest.approx(centres, abs=1e-12)
    expected = torch.tensor(by_loops(q, k, v, centres, radius, True), dtype=torch.float64)
    assert torch.allclose(local(q, k, v, CROSS), expected, atol=1e-12)
    assert (local(q, k, v, CROSS)[5:7] == 0).all(), "queries without keys"
    local.requires_grad_()
    q, k, v = sample_qkv(CROSS, 3)
    assert torch.autograd.gradcheck(
        lambda *tensors: local(*tensors[:3], CROSS), (q, k, v, *local.parameters()), fast_mode=True
    )


def test_a_wide_window_equals_global_attention_with_any_score() -> None:
    q, k, v = sample_qkv(CROSS, 3)
    for score in (scaled_dot, Additive(width=3, key_width=3, inner_width=2).double()):
        global_attention = weighted_sum(soft_weights(align(score, q, k, CROSS)), v, CROSS)
        assert torch.allclose(local_monotonic(score, q, k, v, CROSS, radius=9), global_attention, atol=1e-12)


def test_positions_above_256_in_bfloat16() -> None:
    """Positions are not rounded to bfloat16, in which the centre of query 257 would be 256."""
    q, k = torch.ones(300, 4), torch.ones(400, 4)
    v = torch.arange(400.0)[:, None] % 100
    layout = Layout.of([0, 300], [0, 400])
    exact = local_monotonic(dot, q, k, v, layout, radius=0)
    output = local_monotonic(dot, q.bfloat16(), k.bfloat16(), v.bfloat16(), layout, radius=0)
    assert output.float().tolist() == exact.tolist()
