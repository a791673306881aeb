"""Norms, activations, segment means and the MLP equal their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from heedful.nn.layers import ACTIVATIONS, Mlp, make_norm, segment_means


def test_gelu_and_its_approximation_by_tanh() -> None:
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    exact, tanh = ACTIVATIONS["gelu"](x), ACTIVATIONS["gelu_tanh"](x)
    by_erf = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()]
    torch.testing.assert_close(exact, torch.tensor(by_erf, dtype=torch.float64), atol=1e-14, rtol=0)
    tanh_input = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(tanh, 0.5 * x * (1 + tanh_input.tanh()), atol=1e-14, rtol=0)
    assert 4e-4 < (exact - tanh).abs().max() <= 4.74e-4


def test_other_activations() -> None:
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    assert torch.equal(ACTIVATIONS["relu"](x), x.clamp(min=0))
    torch.testing.assert_close(ACTIVATIONS["silu"](x), x / (1 + (-x).exp()), atol=1e-14, rtol=0)
    assert torch.equal(ACTIVATIONS["tanh"](x), x.tanh())


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_segment_means_are_summed_in_float32_at_least(power: float, dtype: torch.dtype) -> None:
    rows = (torch.rand(900, 3, generator=torch.Generator().manual_seed(2)) + 0.5).to(dtype).requires_grad_()
    segments, counts = torch.tensor([3] * 700 + [0] * 200), torch.tensor([200, 0, 0, 700])
    means = segment_means(rows, segments, counts, power)
    sums = torch.stack([rows[700:].double().sum(0), torch.zeros(3), torch.zeros(3), rows[:700].double().sum(0)])
    exact = sums / counts.clamp(min=1).double()[:, None] ** power
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 0.0}[dtype]
    torch.testing.assert_close(means, exact.to(dtype), rtol=tolerance, atol=0)
    means.sum().backward()
    assert rows.grad is not None and rows.grad.unique().numel() == (1 if power == 0 else 2)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, 1.0, 1e-3, 300.0])
def test_an_eps_of_1e_12_does_not_underflow(kind: str, dtype: torch.dtype, value: float) -> None:
    norm = make_norm(kind, 16, eps=1e-12, bias=True).to(dtype)  # type: ignore[arg-type]
    x = torch.full((3, 16), value, dtype=dtype, requires_grad=True)
    y = norm(x)
    expected = 0.0 if kind == "layer" or value == 0 else 1.0
    assert torch.equal(y, torch.full_like(y, expected)) or kind == "rms"
    torch.testing.assert_close(y.double(), torch.full_like(y, expected).double(), atol=1e-5, rtol=0)
    if dtype != torch.float16:  # in float16, 1 / sqrt(eps) overflows in PyTorch's own backward pass
        (y * torch.randn_like(y)).sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()


def test_layer_norm_equals_its_formula() -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    norm = make_norm("layer", 8, eps=0.1, bias=True).double()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected, atol=1e-12, rtol=0)
    assert [name for name, _ in make_norm("layer", 8, eps=0.1, bias=False).named_parameters()] == ["weight"]


def test_rms_norm_has_no_mean_and_no_bias() -> None:
    x = torch.randn(5, 8, dtype=torch.float64) + 3
    norm = make_norm("rms", 8, eps=0.1, bias=True).double()
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    torch.nn.init.normal_(norm.weight)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, atol=1e-12, rtol=0)


def make_mlp(*, gated: bool, bias: bool = True, inner_dropout: float = 0.0) -> Mlp:
    """Make an MLP of widths 6 and 10, in float64."""
    return Mlp(width=6, inner_width=10, activation="silu", gated=gated, bias=bias, inner_dropout=inner_dropout).double()


def test_mlp_equals_its_formula() -> None:
    mlp, x = make_mlp(gated=False), torch.randn(4, 6, dtype=torch.float64)
    inner = F.silu(x @ mlp.up.weight.T + mlp.up.bias)
    torch.testing.assert_close(mlp(x), inner @ mlp.down.weight.T + mlp.down.bias, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_gated_mlp_equals_its_formula(bias: bool) -> None:
    mlp, x = make_mlp(gated=True, bias=bias), torch.randn(4, 6, dtype=torch.float64)
    gate, up = x @ mlp.up.weight[:10].T, x @ mlp.up.weight[10:].T
    if bias:
        gate, up = gate + mlp.up.bias[:10], up + mlp.up.bias[10:]
    expected = (F.silu(gate) * up) @ mlp.down.weight.T + (mlp.down.bias if bias else 0)
    torch.testing.assert_close(mlp(x), expected, atol=1e-12, rtol=0)
    assert len(list(mlp.parameters())) == (4 if bias else 2)


def test_inner_dropout_is_after_the_activation_and_only_in_training() -> None:
    mlp, x = make_mlp(gated=True, inner_dropout=0.5), torch.randn(400, 6, dtype=torch.float64)
    torch.nn.init.eye_(mlp.down.weight)  # the output is the first six inner values
    torch.nn.init.zeros_(mlp.down.bias)
    without_dropout = mlp.eval()(x)
    ratio = mlp.train()(x) / without_dropout
    torch.testing.assert_close(ratio[ratio != 0], torch.full_like(ratio[ratio != 0], 2.0))
    assert abs((ratio == 0).double().mean() - 0.5) < 5 * 0.5 / ratio.numel() ** 0.5
