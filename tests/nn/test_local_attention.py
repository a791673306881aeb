"""Restricted and local attention: against attend with a window and loops, and how much memory they take."""

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
CROSS = Layout.of([0, 5, 7, 8], [0, 4, 4, 6])


def draw(layout: Layout, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = (layout.rows, *[layout.keys[-1][1]] * 2)
    return [torch.randn(n, *shape, dtype=torch.float64, generator=generator).requires_grad_() for n in rows]


class Counted(TorchFunctionMode):
    """How many numbers are made, views of them included, and the most in one tensor."""

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
def test_restricted_is_attend_with_a_window(radius: int) -> None:
    q, k, v = draw(SELF, 2, 3)
    actual = restricted(q, k, v, SELF, radius=radius, scale=0.7)
    expected = attend(q, k, v, SELF, scale=0.7, window=radius, backend="reference")
    assert torch.allclose(actual, expected, atol=1e-12)
    if radius >= 7:
        assert torch.allclose(actual, attend(q, k, v, SELF, scale=0.7), atol=1e-12), "all see all"
    weights = torch.randn(11, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    gradients, expected_gradients = (
        torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (actual, expected)
    )
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(gradients, expected_gradients, strict=True))


def test_the_cost_of_restricted_attention_is_linear() -> None:
    """Numbers that are made, and kept for backward: twice as many for twice the rows, and no tensor of n x n."""
    byte_counts = []
    for n in (64, 128, 256):
        q, k, v = draw(Layout.of([0, n]), 1, 2)
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with Counted() as counted, saved_tensors_hooks(keep, lambda tensor: tensor):
            restricted(q, k, v, Layout.of([0, n]), radius=2, scale=1.0)
        byte_counts.append((counted.total, sum(sizes), max(*sizes, counted.largest)))
        assert byte_counts[-1][2] < n * n // 4
    for less, more in pairwise(byte_counts):
        assert all(1.9 < b / a < 2.05 for a, b in zip(less, more, strict=True))


def test_what_is_refused_and_what_is_empty() -> None:
    q, k, v = draw(SELF, 2, 3)
    assert restricted(q[:0], k[:0], v[:0], Layout.of([0, 0]), radius=1, scale=1.0).shape == (0, 2, 3)
    with pytest.raises(HeedfulError, match="radius is -1; expected a whole number from 0"):
        restricted(q, k, v, SELF, radius=-1, scale=1.0)
    with pytest.raises(HeedfulError, match="compares rows with their neighbours"):
        restricted(q[:8], k[:8], v[:8], CROSS, radius=1, scale=1.0)
    with pytest.raises(HeedfulError, match="location scores ignore keys"):
        local_monotonic(Location(width=3, longest=9).double(), q[:8, 0], k[:6, 0], v[:6, 0], CROSS, radius=1)
    with pytest.raises(HeedfulError, match="radius is 0; expected a whole number from 1"):
        LocalPredictive(dot, width=3, inner_width=2, radius=0)


def by_loops(q: Tensor, k: Tensor, v: Tensor, centres: list[float], radius: int, sharp: bool) -> list[list[float]]:
    """Luong et al. 2015, equations 7 and 10, with dot products."""
    out = []
    for (start, stop), (first, last) in zip(CROSS.queries, CROSS.keys, strict=True):
        for i in range(start, stop):
            p, m = centres[i], last - first
            places = [s for s in range(m) if p - radius <= s <= p + radius]
            scores = [math.exp(float(q[i] @ k[first + s])) for s in places]
            weights = [score / sum(scores) for score in scores]
            if sharp:
                gauss = [math.exp(-((s - p) ** 2) / (2 * (radius / 2) ** 2)) for s in places]
                weights = [w * g for w, g in zip(weights, gauss, strict=True)]
            rows = [[w * float(x) for x in v[first + s]] for w, s in zip(weights, places, strict=True)]
            out.append([sum(column) for column in zip(*rows, strict=True)] or [0.0] * v.shape[1])
    return out


@pytest.mark.parametrize("radius", [1, 2, 9])
def test_local_attention_of_luong(radius: int) -> None:
    q, k, v = (tensor.detach() for tensor in draw(CROSS, 3))
    monotonic = local_monotonic(dot, q, k, v, CROSS, radius=radius)
    places = [float(i - start) for start, stop in CROSS.queries for i in range(start, stop)]
    wanted = torch.tensor(by_loops(q, k, v, places, radius, False), dtype=torch.float64)
    assert torch.allclose(monotonic, wanted, atol=1e-12)
    if radius == 9:
        wide = weighted_sum(soft_weights(align(dot, q, k, CROSS)), v, CROSS)
        assert torch.allclose(monotonic, wide, atol=1e-12), "all of the keys are near: local is global"

    local = LocalPredictive(dot, width=3, inner_width=2, radius=radius).double().requires_grad_(False)
    for number, parameter in enumerate(local.parameters()):
        parameter.normal_(generator=torch.Generator().manual_seed(number))
    centres = []
    for i, m in zip(range(8), [m for n, m in CROSS.sizes() for _ in range(n)], strict=True):
        inner = (local.inner.weight @ q[i]).tanh()
        centres.append(m / (1 + math.exp(-float(local.out.weight[0] @ inner))))
    assert local.centres(q, CROSS).tolist() == pytest.approx(centres, abs=1e-12)
    wanted = torch.tensor(by_loops(q, k, v, centres, radius, True), dtype=torch.float64)
    assert torch.allclose(local(q, k, v, CROSS), wanted, atol=1e-12)
    assert (local(q, k, v, CROSS)[5:7] == 0).all(), "queries without a key"
    local.requires_grad_()
    q, k, v = draw(CROSS, 3)
    assert torch.autograd.gradcheck(
        lambda *tensors: local(*tensors[:3], CROSS), (q, k, v, *local.parameters()), fast_mode=True
    )


def test_other_scores_look_through_the_same_window() -> None:
    q, k, v = draw(CROSS, 3)
    for score in (scaled_dot, Additive(width=3, key_width=3, inner_width=2).double()):
        wide = weighted_sum(soft_weights(align(score, q, k, CROSS)), v, CROSS)
        assert torch.allclose(local_monotonic(score, q, k, v, CROSS, radius=9), wide, atol=1e-12)


def test_places_above_256_in_bfloat16() -> None:
    """There are not all whole numbers in it: query 257 would look around 256."""
    q, k = torch.ones(300, 4), torch.ones(400, 4)
    v = torch.arange(400.0)[:, None] % 100
    layout = Layout.of([0, 300], [0, 400])
    exact = local_monotonic(dot, q, k, v, layout, radius=0)
    output = local_monotonic(dot, q.bfloat16(), k.bfloat16(), v.bfloat16(), layout, radius=0)
    assert output.float().tolist() == exact.tolist()
