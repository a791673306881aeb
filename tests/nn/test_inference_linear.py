"""Linear layers of inference against PyTorch's and against the formula in whole numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.nn import inference_linear as module
from heedful.nn.inference_linear import (
    FUSED,
    Int8Linear,
    NativeLinear,
    OneDnnLinear,
    cannot_use_onednn,
    linear_columns,
    quantize_rows,
)

SIZES = [(1, 8, 5), (3, 48, 32), (70, 32, 96), (1000, 64, 48)]  # rows, width, out
laid_here = pytest.mark.skipif(bool(cannot_use_onednn(torch.float32)), reason=cannot_use_onednn(torch.float32))


def layer(width: int, out: int, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(width + out)
    return nn.Linear(width, out, bias=bias, dtype=dtype).requires_grad_(False)


@laid_here
@pytest.mark.parametrize("activation", [None, *FUSED])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "width", "out"), SIZES)
def test_packed_linear_layers_compute_the_same(
    rows: int, width: int, out: int, bias: bool, activation: str | None
) -> None:
    plain, x = layer(width, out, bias=bias), torch.randn(rows, width)
    after = {None: lambda y: y, "gelu": F.gelu, "relu": F.relu}[activation]
    with torch.inference_mode():
        torch.testing.assert_close(OneDnnLinear(plain, activation)(x), after(plain(x)), rtol=1e-5, atol=1e-5)
        assert OneDnnLinear(plain)(x[:0]).shape == (0, out)
        assert OneDnnLinear(plain)(x.view(1, rows, width)).shape == (1, rows, out)


@pytest.mark.skipif(bool(cannot_use_onednn(torch.bfloat16)), reason=cannot_use_onednn(torch.bfloat16))
def test_packed_linear_layers_round_no_more_than_pytorch() -> None:
    exact, x = layer(64, 48), torch.randn(200, 64)
    half, rows = layer(64, 48, dtype=torch.bfloat16), x.bfloat16()
    half.load_state_dict(exact.state_dict())
    with torch.inference_mode():
        off, usual = ((y.float() - exact(x)).abs().mean() for y in (OneDnnLinear(half)(rows), half(rows)))
    assert off <= 1.1 * usual


@laid_here
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear_layers_return_their_weights(bias: bool) -> None:
    plain = layer(48, 32, bias=bias)
    parts = OneDnnLinear(plain).parts()
    assert parts.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(parts[name], parameter) for name, parameter in plain.named_parameters())


def test_layers_that_cannot_be_packed_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cannot_use_onednn(torch.float64) == "it computes in float32 and bfloat16, not in torch.float64"
    monkeypatch.setattr(module, "_operators", lambda: object())
    assert "computes no such products here: 'object' object has no attribute '_reorder" in cannot_use_onednn(
        torch.float32
    )

    class Wrong:
        _reorder_linear_weight = staticmethod(lambda weight, rows: weight)
        _linear_pointwise = staticmethod(lambda x, weight, bias, name, more, algorithm: x @ weight.t())

    monkeypatch.setattr(module, "_operators", Wrong)
    assert "its products are off by " in cannot_use_onednn(torch.float32)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "width", "out"), SIZES)
def test_rounded_is_the_formula_in_whole_numbers(rows: int, width: int, out: int, bias: bool) -> None:
    plain, x = layer(width, out, bias=bias), torch.randn(rows, width)

    def whole(matrix: Tensor) -> tuple[np.ndarray, np.ndarray]:
        values = matrix.numpy()
        scale = np.abs(values).max(1, keepdims=True) / np.float32(127)
        return np.rint(values / scale).astype(np.int64), scale.astype(np.float64)

    (left, left_scale), (right, right_scale) = whole(x), whole(plain.weight)
    expected = (left @ right.T) * left_scale * right_scale.T + (plain.bias.numpy() if bias else 0)
    with torch.inference_mode():
        output = Int8Linear(plain)(x)
        torch.testing.assert_close(output.numpy(), expected.astype(np.float32), rtol=1e-5, atol=1e-5)
        off = (output - plain(x)).square().mean().sqrt() / plain(x).std()
    assert 0 < off < 0.02


def test_a_rounded_row_depends_on_itself_alone() -> None:
    layer8, x = Int8Linear(layer(32, 24)), torch.randn(40, 32)
    x[3], x[7] = 0, 1e4
    with torch.inference_mode():
        together = layer8(x)
        for number in (0, 3, 7, 39):
            assert torch.equal(layer8(x[number : number + 1])[0], together[number])
        assert torch.equal(together[3], layer8.bias)
        assert layer8(x[:0]).shape == (0, 24)
        assert layer8(x.bfloat16()).dtype == torch.bfloat16
    numbers, scale = quantize_rows(x)
    assert numbers.abs().max() == 127 and (numbers * scale - x).abs().max() <= 0.51 * scale.max()


# -- some of the outputs ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", [NativeLinear, Int8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, 64), (64, 192), (128, 256), (8, 40), (0, 256)])
def test_some_outputs_are_those_of_the_whole_layer(
    kind: type[NativeLinear] | type[Int8Linear], dtype: torch.dtype, bias: bool, start: int, stop: int
) -> None:
    linear, x = kind(layer(48, 256, bias=bias, dtype=dtype)), torch.randn(37, 48).to(dtype)
    with torch.inference_mode():
        assert torch.equal(linear_columns(linear, x, start, stop), linear(x)[:, start:stop])
        assert linear_columns(linear, x[:0], start, stop).shape == (0, stop - start)
        columns = linear.columns(x, start, stop)
    if start % 64 == 0 and stop % 64 == 0 and not (kind is Int8Linear and linear.panels is None):
        assert columns is not None, "all outputs are computed"


@pytest.mark.parametrize("bias", [True, False])
def test_some_outputs_of_pytorch_layers(bias: bool) -> None:
    plain, x = layer(48, 32, bias=bias), torch.randn(37, 48)
    torch.testing.assert_close(linear_columns(plain, x, 8, 20), plain(x)[:, 8:20])
    if not cannot_use_onednn(torch.float32):
        with torch.inference_mode():
            packed = OneDnnLinear(plain)
            assert torch.equal(linear_columns(packed, x, 8, 20), packed(x)[:, 8:20])
