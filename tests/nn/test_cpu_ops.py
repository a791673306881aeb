"""The C++ kernels equal PyTorch in float64: results, gradients and dropout; and the calls that they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.csrc import Kernels
from heedful.nn import cpu_attention, cpu_ops
from heedful.nn.attend import attend_with, choose_kernel
from heedful.nn.inference_linear import Int8Linear, NativeLinear
from heedful.nn.layers import Mlp
from heedful.nn.layout import AttentionArgs, DisentangledBias, Layout

pytestmark = pytest.mark.usefixtures("native")

NONFINITE = [float("nan"), float("inf"), float("-inf")]
LENGTHS = [1, 2, 13, 0, 47, 48, 49, 64, 65, 130]  # rows of each sequence; query rows in cross-attention
KEY_LENGTHS = [7, 0, 1, 3, 59, 66, 73, 88, 5, 10]  # key rows of each sequence in cross-attention
FLOAT32_TOLERANCE, BFLOAT16_TOLERANCE = 2e-6, 1e-2  # of `relative_error`


def relative_error(x: Tensor, y: Tensor) -> float:
    """Return the norm of x - y over the norm of y."""
    x, y = x.detach().double(), y.detach().double()
    return float((x - y).norm() / y.norm().clamp(min=1e-30))


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sample a tensor from a normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def skip_without_bfloat16(native: Kernels, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not native.has_bfloat16:
        pytest.skip("this processor does not multiply bfloat16")


def make_layout(queries: list[int], keys: list[int] | None = None) -> Layout:
    """Make a layout from the numbers of query rows and of key rows of each sequence; by default, they are equal."""
    return Layout.of(*[[0, *accumulate(lengths)] for lengths in (queries, *([] if keys is None else [keys]))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(32, 3, 3), (64, 2, 2), (16, 4, 2), (96, 1, 1), (128, 3, 1)])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 5), (True, 3)])
@pytest.mark.parametrize("keys", [None, KEY_LENGTHS], ids=["self", "cross"])
def test_attention(
    native: Kernels,
    dtype: torch.dtype,
    width: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    window: int | None,
    keys: Any,
) -> None:
    skip_without_bfloat16(native, dtype)
    layout = make_layout(LENGTHS, keys)
    if keys is None:
        rows = sample(sum(LENGTHS), (heads + 2 * kv_heads) * width, dtype=dtype)
        qkv = cpu_attention.split_qkv(rows, heads, kv_heads)
    else:
        shapes = ((sum(LENGTHS), heads), (sum(keys), kv_heads), (sum(keys), kv_heads))
        qkv = tuple(sample(*shape, width, seed=n, dtype=dtype) for n, shape in enumerate(shapes))
    call = AttentionArgs(layout=layout, scale=width**-0.5, causal=causal, window=window, preferred="native")
    assert choose_kernel(*qkv, call).name == "native"

    def run(attention: Callable[..., Tensor], tensors: Any) -> list[Tensor]:
        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        out = attention(*inputs, call)
        out.backward(sample(*out.shape, seed=9, dtype=out.dtype))
        return [out, *(tensor.grad for tensor in inputs)]

    results = run(cpu_attention.attention, qkv)
    expected = run(lambda *x: attend_with(*x, backend="reference"), [tensor.double() for tensor in qkv])
    tolerance = FLOAT32_TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    assert max(relative_error(x, y) for x, y in zip(results, expected, strict=True)) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [16, 64])
def test_attention_of_a_sequence_has_the_same_bits_in_any_batch(
    native: Kernels, dtype: torch.dtype, width: int
) -> None:
    skip_without_bfloat16(native, dtype)
    call = AttentionArgs(layout=make_layout(LENGTHS), scale=width**-0.5, preferred="native")
    rows, gradient = sample(sum(LENGTHS), 6 * width, dtype=dtype), sample(sum(LENGTHS), 2, width, seed=9, dtype=dtype)

    def run(first: int, last: int, args: AttentionArgs) -> list[Tensor]:
        x = rows[first:last].clone().requires_grad_()
        out = cpu_attention.attention(*cpu_attention.split_qkv(x, 2), args)
        return [out, *torch.autograd.grad(out, x, gradient[first:last])]

    batch_results = run(0, len(rows), call)
    for start, stop in call.layout.queries:
        results = run(start, stop, replace(call, layout=make_layout([stop - start])))
        assert all(torch.equal(x, y[start:stop]) for x, y in zip(results, batch_results, strict=True))


def make_disentangled_call(
    layout: Layout, heads: int, width: int, near: int, reach: int, dtype: torch.dtype
) -> AttentionArgs:
    """Return arguments with a DisentangledBias of random vectors.

    Args:
        layout: Layout of the call.
        heads: Number of heads.
        width: Head dimension.
        near: Distances up to this one have a vector each; three longer distances share a vector.
        reach: Largest distance.
        dtype: Dtype of the vectors.
    """
    distances = torch.arange(-reach, reach + 1)
    far = ((distances.abs() - near).clamp(min=0) + 2) // 3
    indexes = (distances.abs().clamp(max=near) + far) * distances.sign()
    indexes = indexes - indexes[0]
    vectors = 0.5 * sample(2, int(indexes[-1]) + 1, heads, width, seed=4).to(dtype)
    bias = DisentangledBias(position_q=vectors[0], position_k=vectors[1], indexes=indexes)
    return AttentionArgs(layout=layout, scale=width**-0.5, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "heads"), [(32, 3), (64, 2), (16, 1)])
@pytest.mark.parametrize(("near", "reach"), [(0, 129), (7, 140), (200, 200)], ids=["far", "near and far", "near"])
def test_disentangled_attention(
    native: Kernels, dtype: torch.dtype, width: int, heads: int, near: int, reach: int
) -> None:
    """Results equal the reference, with the same bits in any batch and with any number of threads."""
    skip_without_bfloat16(native, dtype)
    call = make_disentangled_call(make_layout(LENGTHS), heads, width, near, reach, dtype)
    qkv = cpu_attention.split_qkv(sample(sum(LENGTHS), 3 * heads * width, dtype=dtype), heads, heads)
    assert choose_kernel(*qkv, call).name == "native"
    out, threads = cpu_attention.attention(*qkv, call), torch.get_num_threads()
    bias = call.bias
    assert isinstance(bias, DisentangledBias)
    exact = replace(bias, position_q=bias.position_q.double(), position_k=bias.position_k.double())
    reference = attend_with(*[x.double() for x in qkv], replace(call, bias=exact), backend="reference")
    assert relative_error(out, reference) < (FLOAT32_TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE)
    torch.set_num_threads(3)
    try:
        assert torch.equal(out, cpu_attention.attention(*qkv, call))
    finally:
        torch.set_num_threads(threads)
    for start, stop in call.layout.queries:
        sequence_call = replace(call, layout=make_layout([stop - start]))
        assert torch.equal(cpu_attention.attention(*[x[start:stop] for x in qkv], sequence_call), out[start:stop])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": True}, "attends to its whole sequence"),
        ({"dropout": 0.1}, "without dropout"),
        ({"indexes": torch.arange(9)}, "9 distances have indexes, and a sequence of 6 rows has 11"),
        ({"indexes": torch.arange(0)}, "0 distances have indexes, and a sequence of 6 rows has 11"),
        ({"indexes": torch.arange(12)}, "12 distances have indexes"),
        ({"indexes": 2 * torch.arange(11)}, "must start at 0 or more and ascend in steps of 0 or 1"),
        ({"indexes": torch.arange(11) - 1}, "must start at 0 or more"),
        ({"indexes": torch.arange(11) + 11}, "(21, 2, 32) and (21, 2, 32); expected at least 22 of (2, 32)"),
        ({"position_q": torch.zeros(20, 2, 32)}, "(20, 2, 32) and (21, 2, 32); expected at least 21 of (2, 32)"),
        ({"keys": ((0, 2), (2, 5))}, "attends to its whole sequence"),
    ],
    ids=str,
)
def test_unsupported_disentangled_attention_is_refused(change: dict[str, Any], message: str) -> None:
    call = make_disentangled_call(make_layout([2, 6]), 2, 32, 10, 10, torch.float32)
    assert isinstance(call.bias, DisentangledBias)
    if change.keys() & {"indexes", "position_q"}:
        call = replace(call, bias=replace(call.bias, **change))
    elif "keys" in change:
        call = replace(call, layout=Layout(call.layout.queries, change["keys"]))
    else:
        call = replace(call, **change)
    q = sample(8, 2, 32)
    assert message in cpu_attention.cannot_attend(q, q, q, call)
    assert choose_kernel(q, q, q, call).name != "native"


def test_disentangled_attention_with_gradients_is_computed_by_another_kernel() -> None:
    call = make_disentangled_call(make_layout([2, 6]), 2, 32, 10, 10, torch.float32)
    q, x = sample(8, 2, 32), sample(8, 2, 32).requires_grad_()
    assert "no backward pass" in cpu_attention.cannot_attend(x, q, q, call)
    with torch.no_grad():
        assert not cpu_attention.cannot_attend(x, q, q, call)
    attend_with(x, q, q, call).sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [-200.0, -60.0, -30.0, 30.0, 80.0, 200.0])
def test_attention_with_large_or_small_logits(native: Kernels, dtype: torch.dtype, offset: float) -> None:
    """A row of weights whose sum would be near the limits of float32 has the largest logit subtracted."""
    skip_without_bfloat16(native, dtype)
    call = AttentionArgs(layout=make_layout([50, 3, 70]), scale=1.0)
    q, k, v = sample(123, 3, 2, 32, dtype=dtype).unbind(1)
    q[..., 0], k[..., 0] = abs(offset) ** 0.5, math.copysign(abs(offset) ** 0.5, offset)  # adds about `offset`
    result = cpu_attention.attention(q, k, v, call)
    expected = attend_with(q.double(), k.double(), v.double(), call, backend="reference")
    rounding = 1 + abs(offset) / 10  # of logits of this size
    tolerance = FLOAT32_TOLERANCE * rounding if dtype == torch.float32 else BFLOAT16_TOLERANCE
    assert relative_error(result, expected) < tolerance


@pytest.mark.parametrize("value", NONFINITE, ids=str)
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("width", [16, 32])  # with AMX, bfloat16 products of width 32 are computed by tile registers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nonfinite_inputs_of_attention_have_nonfinite_results(
    native: Kernels, dtype: torch.dtype, width: int, part: str, value: float
) -> None:
    skip_without_bfloat16(native, dtype)
    call = AttentionArgs(layout=make_layout([20, 70]), scale=0.25)
    tensors = dict(zip("qkv", sample(90, 3, 2, width).unbind(1), strict=True))
    tensors[part][5, 0, 3] = value

    def run(attention: Callable[..., Tensor], input_dtype: torch.dtype) -> list[Tensor]:
        """Return which elements of the output and of the gradients are finite."""
        inputs = [tensor.to(dtype).to(input_dtype, copy=True).requires_grad_() for tensor in tensors.values()]
        out = attention(*inputs, call)
        out.backward(sample(*out.shape, seed=9, dtype=out.dtype))
        results = (out, *(tensor.grad for tensor in inputs))
        return [result.detach().isfinite() for result in results if result is not None]

    finite = run(cpu_attention.attention, dtype)
    expected_finite = run(lambda *x: attend_with(*x, backend="reference"), torch.float32)
    for is_finite, is_expected in zip(finite, expected_finite, strict=True):
        assert torch.equal(is_finite, is_expected)
    assert not finite[0].all() and finite[0][20:].all(), "the other sequence is finite"


def test_gradients_with_dropout_equal_finite_differences() -> None:
    layout = make_layout([40, 60])
    call = AttentionArgs(layout=layout, scale=0.2, dropout=0.3)
    inputs = [sample(100, heads, 32, seed=n) for n, heads in enumerate((2, 1, 1))]
    weight = sample(100, 2, 32, seed=7)

    def value(*tensors: Tensor) -> Tensor:
        torch.manual_seed(5)
        return (cpu_attention.attention(*tensors, call).double() * weight).sum()

    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    value(*leaves).backward()
    for number, tensor in enumerate(leaves):
        direction = sample(*tensor.shape, seed=20 + number)
        ahead, behind = (
            [x + step * direction if n == number else x for n, x in enumerate(inputs)] for step in (1e-2, -1e-2)
        )
        slope = float(value(*ahead) - value(*behind)) / 2e-2
        assert tensor.grad is not None
        assert slope == pytest.approx(float((tensor.grad.double() * direction).sum()), rel=2e-2, abs=2e-2)


def test_dropout_drops_a_share_p_and_keeps_the_mean() -> None:
    zeros, norm = torch.zeros(4000, 64), nn.LayerNorm(64)
    q = torch.zeros(4000, 1, 64)
    torch.manual_seed(1)
    out = cpu_attention.attention(
        q, q, torch.ones(4000, 1, 64), AttentionArgs(layout=make_layout([4000]), scale=1.0, dropout=0.25)
    )
    assert float(out.mean()) == pytest.approx(1.0, abs=5e-3)
    normed = cpu_ops.add_norm(zeros, torch.ones(4000, 64), norm, 0.25)
    assert normed is not None
    is_dropped = (normed < 0).float()  # a dropped element is below the mean of its row, another one above
    assert float(is_dropped.mean()) == pytest.approx(0.25, abs=5e-3)
    assert float(is_dropped.mean(0).std()) < 3 * (0.25 * 0.75 / 4000) ** 0.5, "columns have different shares"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_norm_of_a_residual_sum(native: Kernels, dtype: torch.dtype, p: float) -> None:
    skip_without_bfloat16(native, dtype)
    norm = nn.LayerNorm(80, eps=1e-3)
    norm.weight.data, norm.bias.data = sample(80, seed=3), sample(80, seed=4)
    x, y = sample(70, 80, seed=1).requires_grad_(), sample(70, 80, seed=2, dtype=dtype).requires_grad_()
    torch.manual_seed(3)
    z = cpu_ops.add_norm(x, y, norm, p)
    assert z is not None
    z.backward(sample(70, 80, seed=5))
    results = [z, x.grad, y.grad, norm.weight.grad, norm.bias.grad]
    assert x.grad is not None and y.grad is not None
    factors = torch.ones(70, 80, dtype=torch.float64)
    if p:  # the gradient of a dropped element is 0
        factors = (y.grad != 0).double() / (1 - p)
        assert 0.1 < float((factors == 0).double().mean()) < 0.3
    exact_norm = nn.LayerNorm(80, eps=1e-3, dtype=torch.float64)
    exact_norm.load_state_dict(norm.state_dict())
    exact_x, exact_y = x.detach().double().requires_grad_(), y.detach().double().requires_grad_()
    exact_z = exact_norm(exact_x + exact_y * factors)
    exact_z.backward(sample(70, 80, seed=5).double())
    expected = [exact_z, exact_x.grad, exact_y.grad, exact_norm.weight.grad, exact_norm.bias.grad]
    tolerance = FLOAT32_TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    for result, exact in zip(results, expected, strict=True):
        assert result is not None and relative_error(result, exact) < tolerance


@pytest.mark.parametrize(
    ("rows", "width", "out"), [(1, 48, 64), (7, 32, 16), (65, 80, 112), (433, 64, 192), (600, 192, 48)]
)
def test_linear_layers_in_training(
    native: Kernels, rows: int, width: int, out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_bfloat16(native, torch.bfloat16)
    monkeypatch.setattr(cpu_ops, "trains_in_bfloat16", lambda: True)  # with AMX, oneDNN would be used
    layer = cpu_ops.TrainedLinear(width, out)
    x = sample(rows, width).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    dy = sample(rows, out, seed=2, dtype=torch.bfloat16)
    y.backward(dy)
    exact_x, exact_weight = (tensor.detach().bfloat16().double().requires_grad_() for tensor in (x, layer.weight))
    exact_bias = layer.bias.detach().double().requires_grad_()
    expected = F.linear(exact_x, exact_weight, exact_bias)
    expected.backward(dy.double())
    assert y.dtype == torch.bfloat16 and layer.weight.grad is not None
    assert relative_error(y, expected) < BFLOAT16_TOLERANCE
    for tensor, exact in ((x, exact_x), (layer.weight, exact_weight), (layer.bias, exact_bias)):
        assert tensor.grad is not None and exact.grad is not None
        assert relative_error(tensor.grad, exact.grad) < FLOAT32_TOLERANCE, "the gradient is rounded to bfloat16"


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 300])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_linear_layers_for_inference_equal_the_original_layer(
    native: Kernels, rows: int, activation: str | None
) -> None:
    skip_without_bfloat16(native, torch.bfloat16)
    layer = nn.Linear(80, 208, dtype=torch.bfloat16)
    x = sample(rows, 80, dtype=torch.bfloat16)
    expected = layer.double()(x.double())
    expected = expected if activation is None else F.gelu(expected)
    with torch.inference_mode():
        assert relative_error(NativeLinear(layer.bfloat16(), activation)(x), expected) < BFLOAT16_TOLERANCE
        int8_layer = Int8Linear(layer.float(), activation)
        assert (int8_layer.panels is not None) == native.has_int8
        result = int8_layer(x)
        int8_layer.panels = None  # PyTorch's operators, instead of our kernels
        assert relative_error(result, expected) < relative_error(int8_layer(x), expected) + 1e-3
        assert relative_error(result, expected) < 3e-2
        assert int8_layer(x[:0]).shape == result[:0].shape


@pytest.mark.parametrize("rows", [1, 4, 5, 9, 16, 17, 31, 33, 65, 200])
@pytest.mark.parametrize(("width", "out"), [(1536, 64), (64, 48), (128, 80), (192, 16), (80, 144)])
def test_int8_products_are_exact(native: Kernels, rows: int, width: int, out: int) -> None:
    """Sums are exact with vector registers and with the tile registers of AMX, which compute some sizes only."""
    if not native.has_int8:
        pytest.skip("this processor does not multiply int8")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, (out, width), generator=generator, dtype=torch.int8)
    x = torch.randint(-100, 156, (rows, width), generator=generator).float()
    x[:, 0], x[:, 1] = -100.0, 155.0  # levels of a row are 1 apart, so that x is quantized exactly
    int8_weight = cpu_ops.Int8Weight.of(weight, torch.ones(out), None, gelu=False)
    assert int8_weight is not None
    assert torch.equal(int8_weight.linear(x), (x.double() @ weight.double().t()).float())
    constant_rows = torch.full((2, width), 3.0)
    assert torch.equal(int8_weight.linear(constant_rows), (constant_rows.double() @ weight.double().t()).float())


def test_gelu_and_its_gradient(native: Kernels) -> None:
    skip_without_bfloat16(native, torch.bfloat16)
    x = torch.linspace(-12, 12, 4096, dtype=torch.bfloat16).requires_grad_()
    y = cpu_ops.gelu(x)
    y.backward(torch.ones_like(y))
    exact_x = x.detach().double().requires_grad_()
    expected = F.gelu(exact_x)
    expected.backward(torch.ones_like(expected))
    assert x.grad is not None and exact_x.grad is not None
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=6e-6)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=2**-7, atol=1e-6)


def test_results_have_the_same_bits_with_any_number_of_threads(native: Kernels) -> None:
    skip_without_bfloat16(native, torch.bfloat16)
    mlp = Mlp(width=64, inner_width=128, activation="gelu", gated=False, bias=True, inner_dropout=0.0)
    norm, layout = nn.LayerNorm(64), make_layout(LENGTHS)

    def run(threads: int) -> list[Tensor]:
        previous_threads = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(2)
            mlp.zero_grad()
            x = sample(sum(LENGTHS), 192).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                q, k, v = cpu_attention.split_qkv(x, 2)
                call = AttentionArgs(layout=layout, scale=0.2, dropout=0.1)
                out = cpu_attention.attention(q, k, v, call).flatten(1)
                z = cpu_ops.add_norm(x[:, :64], mlp(out), norm, 0.1)
            assert z is not None and x.grad is None
            z.square().sum().backward()
            assert x.grad is not None and mlp.up.weight.grad is not None
            return [z.detach(), x.grad, mlp.up.weight.grad.clone()]
        finally:
            torch.set_num_threads(previous_threads)

    for single, threaded in zip(run(1), run(3), strict=True):
        assert torch.equal(single, threaded)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1)])
def test_the_gradient_of_split_qkv_is_that_of_its_parts(native: Kernels, heads: int, kv_heads: int) -> None:
    """Gradients of q, k and v may be adjacent in memory, as attention returns them, or three tensors."""
    rows = sample(5, 96).requires_grad_()
    q, k, v = cpu_attention.split_qkv(rows, heads, kv_heads)
    out = cpu_attention.attention(q, k, v, AttentionArgs(layout=make_layout([5]), scale=1.0))
    parts = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    (gradient,) = torch.autograd.grad(out.sum(), rows, retain_graph=True)
    assert torch.equal(gradient, torch.cat(parts, 1).flatten(1))
    separate = [sample(*part.shape, seed=n) for n, part in enumerate((q, k, v))]
    (gradient,) = torch.autograd.grad(sum((x * dx).sum() for x, dx in zip((q, k, v), separate, strict=True)), rows)
    assert torch.equal(gradient, torch.cat(separate, 1).flatten(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "float32 and bfloat16"),
        ({"width": 20}, "not 20"),
        ({"keys": ((0, 4), (2, 6))}, "same keys"),
        ({"scale": -1.0}, "scale must be 0 or more"),
    ],
)
def test_unsupported_attention_is_refused(change: dict[str, Any], message: str) -> None:
    q = torch.zeros(6, 2, change.get("width", 32), dtype=change.get("dtype", torch.float32))
    spans = ((0, 3), (3, 6))
    call = AttentionArgs(layout=Layout(spans, change.get("keys", spans)), scale=change.get("scale", 1.0))
    assert message in cpu_attention.cannot_attend(q, q, q, call)
    assert choose_kernel(q, q, q, call).name != "native"


def test_without_kernels_pytorch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    from heedful.csrc import library

    monkeypatch.setattr(library, "_library_or_reason", lambda: "none today")
    q = sample(6, 2, 32)
    assert "none today" in cpu_attention.cannot_attend(q, q, q, AttentionArgs(layout=make_layout([6]), scale=1.0))
    assert cpu_ops.add_norm(q[:, 0], q[:, 1], nn.LayerNorm(32), 0.0) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert cpu_ops.TrainedLinear(32, 32)(q[:, 0]).grad_fn.name() == "AddmmBackward0"


def pytorch_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return PyTorch's losses in float64, and their gradient."""
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, targets, reduction="none")
    losses.sum().backward()
    assert exact.grad is not None
    return losses.detach(), exact.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [2, 16, 37, 1000])
def test_cross_entropy_and_its_gradient(native: Kernels, dtype: torch.dtype, classes: int) -> None:
    skip_without_bfloat16(native, dtype)
    logits, targets = 5 * sample(40, classes, dtype=dtype), torch.arange(40) % classes
    logits[3, 1] = 300.0  # a wrong class with probability 1
    logits[1, 1] = 300.0  # the right class with probability 1
    result = cpu_ops.cross_entropy(logits, targets)
    losses, gradient = pytorch_cross_entropy(logits, targets)
    assert result is not None
    torch.testing.assert_close(result[0].double(), losses, rtol=1e-6, atol=5e-6)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(result[1].double(), gradient, **tolerance)
    assert cpu_ops.cross_entropy(logits, targets + classes) is None, "targets out of range"
    assert cpu_ops.cross_entropy(logits[:0], targets[:0]) is not None, "no rows"


@pytest.mark.parametrize("value", NONFINITE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_of_nonfinite_logits(native: Kernels, dtype: torch.dtype, value: float) -> None:
    skip_without_bfloat16(native, dtype)
    logits, targets = sample(8, 37, dtype=dtype), torch.arange(8) + 2
    for row, column in enumerate((0, 3, 7, 8, 20, 35, 36)):  # column 3 is the target of row 1; row 7 is finite
        logits[row, column] = value
    result = cpu_ops.cross_entropy(logits, targets)
    losses, gradient = pytorch_cross_entropy(logits, targets)
    assert result is not None
    torch.testing.assert_close(result[0].double(), losses, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(result[1].double(), gradient, rtol=2**-7, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("value", NONFINITE, ids=str)
def test_quantized_rows_with_nonfinite_elements_have_nonfinite_scales(native: Kernels, value: float) -> None:
    x, quantized, scales = sample(6, 64), torch.empty(6, 64, dtype=torch.uint8), torch.empty(6, 2)
    for row, column in enumerate((0, 15, 16, 40, 63)):  # row 5 is finite
        x[row, column] = value
    native.round_rows(x.data_ptr(), 64, 6, 64, 0, quantized.data_ptr(), scales.data_ptr(), 1)
    assert scales.isfinite().all(1).tolist() == [False] * 5 + [True]


def test_the_check_of_a_library_ignores_autocast_and_the_default_device(native: Kernels) -> None:
    from heedful.csrc.check import find_error

    with torch.autocast("cpu", torch.bfloat16):
        assert find_error(native) == ""
    with torch.device("meta"):
        assert find_error(native) == ""


def test_results_do_not_depend_on_the_default_dtype_and_device(native: Kernels) -> None:
    layer = nn.LayerNorm(64)
    x = sample(5, 64).requires_grad_()

    def run() -> list[Tensor]:
        x.grad = layer.weight.grad = None
        z = cpu_ops.add_norm(x, x.detach(), layer, 0.0)
        assert z is not None
        z.square().sum().backward()
        assert x.grad is not None and layer.weight.grad is not None
        return [z, x.grad, layer.weight.grad]

    expected = run()
    for dtype in (torch.bfloat16, torch.float64):
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                results = run()
        finally:
            torch.set_default_dtype(default_dtype)
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_a_second_derivative_is_refused(native: Kernels) -> None:
    x = sample(5, 64).requires_grad_()
    z = cpu_ops.add_norm(x, x.detach(), nn.LayerNorm(64), 0.0)
    assert z is not None
    (first,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_shared_keys_are_detected_across_an_empty_sequence() -> None:
    q = torch.zeros(8, 2, 32)
    call = AttentionArgs(layout=Layout(((0, 3), (3, 3), (3, 8)), ((0, 6), (2, 2), (3, 8))), scale=1.0)
    assert "same keys" in cpu_attention.cannot_attend(q, q, q, call)
    assert choose_kernel(q, q, q, call).name != "native"


@pytest.mark.parametrize("offset", [0.0, 300.0, 1e4, 1e6])
def test_cross_entropy_of_large_logits(native: Kernels, offset: float) -> None:
    logits, targets = sample(20, 100) + offset, torch.arange(20)
    result = cpu_ops.cross_entropy(logits, targets)
    assert result is not None
    for actual, expected in zip(result, pytorch_cross_entropy(logits, targets), strict=True):
        assert relative_error(actual, expected) < 3e-7


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("has_tiles", [True, False])
@pytest.mark.parametrize("width", [16, 32])
def test_with_amx_our_attention_is_used_only_if_it_uses_tile_registers(
    native: Kernels, monkeypatch: pytest.MonkeyPatch, amx: bool, has_tiles: bool, width: int
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx})
    monkeypatch.setattr(cpu_attention, "kernels", lambda: replace(native, has_tiles=has_tiles))
    rows = torch.zeros(4, 2, width, dtype=torch.bfloat16)
    args = AttentionArgs(layout=Layout.of([0, 4]), scale=1.0)
    reason = cpu_attention.slow_to_attend(rows, rows, rows, args)
    assert (reason == "") == (not amx or (has_tiles and width == 32))
    assert not cpu_attention.slow_to_attend(rows, rows, rows, replace(args, preferred="native"))
    assert not cpu_attention.slow_to_attend(rows.float(), rows.float(), rows.float(), args)
