"""Linear layers for inference equal PyTorch's, and int8 layers the formula in integers."""

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
needs_onednn = pytest.mark.skipif(bool(cannot_use_onednn(torch.float32)), reason=cannot_use_onednn(torch.float32))


def make_layer(width: int, out: int, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(width + out)
    return nn.Linear(width, out, bias=bias, dtype=dtype).requires_grad_(False)


@needs_onednn
@pytest.mark.parametrize("activation", [None, *FUSED])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "width", "out"), SIZES)
def test_onednn_layers_equal_the_original_layer(
    rows: int, width: int, out: int, bias: bool, activation: str | None
) -> None:
    layer, x = make_layer(width, out, bias=bias), torch.randn(rows, width)
    activate = {None: lambda y: y, "gelu": F.gelu, "relu": F.relu}[activation]
    with torch.inference_mode():
        torch.testing.assert_close(OneDnnLinear(layer, activation)(x), activate(layer(x)), rtol=1e-5, atol=1e-5)
        assert OneDnnLinear(layer)(x[:0]).shape == (0, out)
        assert OneDnnLinear(layer)(x.view(1, rows, width)).shape == (1, rows, out)


@pytest.mark.skipif(bool(cannot_use_onednn(torch.bfloat16)), reason=cannot_use_onednn(torch.bfloat16))
def test_onednn_layers_in_bfloat16_are_as_precise_as_pytorch() -> None:
    exact_layer, x = make_layer(64, 48), torch.randn(200, 64)
    layer, half_x = make_layer(64, 48, dtype=torch.bfloat16), x.bfloat16()
    layer.load_state_dict(exact_layer.state_dict())
    with torch.inference_mode():
        error, pytorch_error = (
            (y.float() - exact_layer(x)).abs().mean() for y in (OneDnnLinear(layer)(half_x), layer(half_x))
        )
    assert error <= 1.1 * pytorch_error


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_layers_return_their_weights(bias: bool) -> None:
    layer = make_layer(48, 32, bias=bias)
    parts = OneDnnLinear(layer).parts()
    assert parts.keys() == dict(layer.named_parameters()).keys()
    assert all(torch.equal(parts[name], parameter) for name, parameter in layer.named_parameters())


def test_missing_and_wrong_onednn_operators_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cannot_use_onednn(torch.float64) == "it computes in float32 and bfloat16, not in torch.float64"
    monkeypatch.setattr(module, "_operators", lambda: object())
    assert "computes no such products here: 'object' object has no attribute '_reorder" in cannot_use_onednn(
        torch.float32
    )

    class WrongOperators:
        _reorder_linear_weight = staticmethod(lambda weight, rows: weight)
        _linear_pointwise = staticmethod(lambda x, weight, bias, name, scalars, algorithm: x @ weight.t())

    monkeypatch.setattr(module, "_operators", WrongOperators)
    assert "its products are off by " in cannot_use_onednn(torch.float32)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "width", "out"), SIZES)
def test_int8_layers_equal_the_formula_in_integers(rows: int, width: int, out: int, bias: bool) -> None:
    layer, x = make_layer(width, out, bias=bias), torch.randn(rows, width)

    def quantize(matrix: Tensor) -> tuple[np.ndarray, np.ndarray]:
        values = matrix.numpy()
        scale = np.abs(values).max(1, keepdims=True) / np.float32(127)
        return np.rint(values / scale).astype(np.int64), scale.astype(np.float64)

    (inputs, input_scale), (weight, weight_scale) = quantize(x), quantize(layer.weight)
    expected = (inputs @ weight.T) * input_scale * weight_scale.T + (layer.bias.numpy() if bias else 0)
    with torch.inference_mode():
        output = Int8Linear(layer)(x)
        torch.testing.assert_close(output.numpy(), expected.astype(np.float32), rtol=1e-5, atol=1e-5)
        relative_error = (output - layer(x)).square().mean().sqrt() / layer(x).std()
    assert 0 < relative_error < 0.02


def test_rows_of_an_int8_layer_do_not_depend_on_each_other() -> None:
    layer, x = Int8Linear(make_layer(32, 24)), torch.randn(40, 32)
    x[3], x[7] = 0, 1e4
    with torch.inference_mode():
        outputs = layer(x)
        for row in (0, 3, 7, 39):
            assert torch.equal(layer(x[row : row + 1])[0], outputs[row])
        assert torch.equal(outputs[3], layer.bias)
        assert layer(x[:0]).shape == (0, 24)
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    quantized, scale = quantize_rows(x)
    assert quantized.abs().max() == 127 and (quantized * scale - x).abs().max() <= 0.51 * scale.max()


# -- slices of the outputs ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", [NativeLinear, Int8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, 64), (64, 192), (128, 256), (8, 40), (0, 256)])
def test_a_slice_of_the_outputs_equals_that_of_all_outputs(
    kind: type[NativeLinear] | type[Int8Linear], dtype: torch.dtype, bias: bool, start: int, stop: int
) -> None:
    linear, x = kind(make_layer(48, 256, bias=bias, dtype=dtype)), torch.randn(37, 48).to(dtype)
    with torch.inference_mode():
        assert torch.equal(linear_columns(linear, x, start, stop), linear(x)[:, start:stop])
        assert linear_columns(linear, x[:0], start, stop).shape == (0, stop - start)
        columns = linear.columns(x, start, stop)
    if start % 64 == 0 and stop % 64 == 0 and not (kind is Int8Linear and linear.panels is None):
        assert columns is not None, "all outputs are computed"


@pytest.mark.parametrize("bias", [True, False])
def test_a_slice_of_the_outputs_of_pytorch_and_onednn_layers(bias: bool) -> None:
    layer, x = make_layer(48, 32, bias=bias), torch.randn(37, 48)
    torch.testing.assert_close(linear_columns(layer, x, 8, 20), layer(x)[:, 8:20])
    if not cannot_use_onednn(torch.float32):
        with torch.inference_mode():
            onednn_layer = OneDnnLinear(layer)
            assert torch.equal(linear_columns(onednn_layer, x, 8, 20), onednn_layer(x)[:, 8:20])
