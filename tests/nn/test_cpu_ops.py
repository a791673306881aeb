"""The kernels in C++ as functions of tensors: against PyTorch in float64, forward, backward and with dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.csrc import Kernels
from heedful.nn import cpu_attention as attending
from heedful.nn import cpu_ops as of
from heedful.nn.attend import attend_with, choose_kernel
from heedful.nn.inference_linear import Int8Linear, NativeLinear
from heedful.nn.layers import Mlp
from heedful.nn.layout import AttentionArgs, DisentangledBias, Layout

pytestmark = pytest.mark.usefixtures("native")

ODD = [float("nan"), float("inf"), float("-inf")]
LENGTHS = [1, 2, 13, 0, 47, 48, 49, 64, 65, 130]
KEYS = [7, 0, 1, 3, 59, 66, 73, 88, 5, 10]
FLOAT, HALF = 2e-6, 1e-2


def off(x: Tensor, y: Tensor) -> float:
    """How far x is from y, over the size of y."""
    x, y = x.detach().double(), y.detach().double()
    return float((x - y).norm() / y.norm().clamp(min=1e-30))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def skip_without_half(native: Kernels, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not native.has_bfloat16:
        pytest.skip("this processor does not multiply bfloat16")


def layout_of(queries: list[int], keys: list[int] | None = None) -> Layout:
    return Layout.of(*[[0, *accumulate(lengths)] for lengths in (queries, *([] if keys is None else [keys]))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(32, 3, 3), (64, 2, 2), (16, 4, 2), (96, 1, 1), (128, 3, 1)])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 5), (True, 3)])
@pytest.mark.parametrize("keys", [None, KEYS], ids=["self", "cross"])
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
    skip_without_half(native, dtype)
    layout = layout_of(LENGTHS, keys)
    if keys is None:
        rows = drawn(sum(LENGTHS), (heads + 2 * kv_heads) * width, dtype=dtype)  # side by side, as a layer has them
        qkv = attending.split_qkv(rows, heads, kv_heads)
    else:
        shapes = ((sum(LENGTHS), heads), (sum(keys), kv_heads), (sum(keys), kv_heads))
        qkv = tuple(drawn(*shape, width, seed=n, dtype=dtype) for n, shape in enumerate(shapes))
    call = AttentionArgs(layout=layout, scale=width**-0.5, causal=causal, window=window, preferred="native")
    assert choose_kernel(*qkv, call).name == "native"

    def ran(how: Callable[..., Tensor], tensors: Any) -> list[Tensor]:
        mine = [tensor.detach().requires_grad_() for tensor in tensors]
        out = how(*mine, call)
        out.backward(drawn(*out.shape, seed=9, dtype=out.dtype))
        return [out, *(tensor.grad for tensor in mine)]

    results = ran(attending.attention, qkv)
    expected = ran(lambda *x: attend_with(*x, backend="reference"), [tensor.double() for tensor in qkv])
    most = FLOAT if dtype == torch.float32 else HALF
    assert max(off(x, y) for x, y in zip(results, expected, strict=True)) < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [16, 64])
def test_attention_of_a_sequence_has_the_same_bits_alone(native: Kernels, dtype: torch.dtype, width: int) -> None:
    skip_without_half(native, dtype)
    call = AttentionArgs(layout=layout_of(LENGTHS), scale=width**-0.5, preferred="native")
    rows, gradient = drawn(sum(LENGTHS), 6 * width, dtype=dtype), drawn(sum(LENGTHS), 2, width, seed=9, dtype=dtype)

    def ran(first: int, last: int, args: AttentionArgs) -> list[Tensor]:
        x = rows[first:last].clone().requires_grad_()
        out = attending.attention(*attending.split_qkv(x, 2), args)
        return [out, *torch.autograd.grad(out, x, gradient[first:last])]

    together = ran(0, len(rows), call)
    for start, stop in call.layout.queries:
        alone = ran(start, stop, replace(call, layout=layout_of([stop - start])))
        assert all(torch.equal(x, y[start:stop]) for x, y in zip(alone, together, strict=True))


def disentangled(layout: Layout, heads: int, width: int, near: int, reach: int, dtype: torch.dtype) -> AttentionArgs:
    """Distances up to `near` have vectors of their own; farther ones share them three by three."""
    distances = torch.arange(-reach, reach + 1)
    far = ((distances.abs() - near).clamp(min=0) + 2) // 3
    indexes = (distances.abs().clamp(max=near) + far) * distances.sign()
    indexes = indexes - indexes[0]
    vectors = 0.5 * drawn(2, int(indexes[-1]) + 1, heads, width, seed=4).to(dtype)
    bias = DisentangledBias(position_q=vectors[0], position_k=vectors[1], indexes=indexes)
    return AttentionArgs(layout=layout, scale=width**-0.5, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "heads"), [(32, 3), (64, 2), (16, 1)])
@pytest.mark.parametrize(("near", "reach"), [(0, 129), (7, 140), (200, 200)], ids=["far", "near and far", "near"])
def test_disentangled_attention(
    native: Kernels, dtype: torch.dtype, width: int, heads: int, near: int, reach: int
) -> None:
    """In company and alone, by one thread and by three."""
    skip_without_half(native, dtype)
    call = disentangled(layout_of(LENGTHS), heads, width, near, reach, dtype)
    qkv = attending.split_qkv(drawn(sum(LENGTHS), 3 * heads * width, dtype=dtype), heads, heads)
    assert choose_kernel(*qkv, call).name == "native"
    out, threads = attending.attention(*qkv, call), torch.get_num_threads()
    bias = call.bias
    assert isinstance(bias, DisentangledBias)
    exact = replace(bias, position_q=bias.position_q.double(), position_k=bias.position_k.double())
    reference = attend_with(*[x.double() for x in qkv], replace(call, bias=exact), backend="reference")
    assert off(out, reference) < (FLOAT if dtype == torch.float32 else HALF)
    torch.set_num_threads(3)
    try:
        assert torch.equal(out, attending.attention(*qkv, call))
    finally:
        torch.set_num_threads(threads)
    for start, stop in call.layout.queries:
        alone = replace(call, layout=layout_of([stop - start]))
        rows = attending.attention(*[x[start:stop] for x in qkv], alone)
        assert torch.equal(rows, out[start:stop])


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
    call = disentangled(layout_of([2, 6]), 2, 32, 10, 10, torch.float32)
    assert isinstance(call.bias, DisentangledBias)
    if change.keys() & {"indexes", "position_q"}:
        call = replace(call, bias=replace(call.bias, **change))
    elif "keys" in change:
        call = replace(call, layout=Layout(call.layout.queries, change["keys"]))
    else:
        call = replace(call, **change)
    q = drawn(8, 2, 32)
    assert message in attending.cannot_attend(q, q, q, call)
    assert choose_kernel(q, q, q, call).name != "native"


def test_disentangled_attention_with_a_gradient_is_left_to_other_kernels() -> None:
    call = disentangled(layout_of([2, 6]), 2, 32, 10, 10, torch.float32)
    q, x = drawn(8, 2, 32), drawn(8, 2, 32).requires_grad_()
    assert "no backward pass" in attending.cannot_attend(x, q, q, call)
    with torch.no_grad():
        assert not attending.cannot_attend(x, q, q, call)
    attend_with(x, q, q, call).sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)


@pytest.mark.parametrize("value", ODD, ids=str)
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("width", [16, 32])  # by vectors; by tiles in bfloat16 where the processor has AMX
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_hides_no_number_that_is_not_finite(
    native: Kernels, dtype: torch.dtype, width: int, part: str, value: float
) -> None:
    skip_without_half(native, dtype)
    call = AttentionArgs(layout=layout_of([20, 70]), scale=0.25)
    tensors = dict(zip("qkv", drawn(90, 3, 2, width).unbind(1), strict=True))
    tensors[part][5, 0, 3] = value

    def ran(how: Callable[..., Tensor], kind: torch.dtype) -> list[Tensor]:
        mine = [tensor.to(dtype).to(kind, copy=True).requires_grad_() for tensor in tensors.values()]
        out = how(*mine, call)
        out.backward(drawn(*out.shape, seed=9, dtype=out.dtype))
        return [result.detach().isfinite() for result in (out, *(tensor.grad for tensor in mine)) if result is not None]

    results = ran(attending.attention, dtype)
    expected = ran(lambda *x: attend_with(*x, backend="reference"), torch.float32)
    for mine, expected_result in zip(results, expected, strict=True):
        assert torch.equal(mine, expected_result)
    assert not results[0].all() and results[0][20:].all()  # and the other sequence has nothing to do with it


def test_dropout_of_weights_has_the_gradient_of_what_it_computes() -> None:
    layout = layout_of([40, 60])
    call = AttentionArgs(layout=layout, scale=0.2, dropout=0.3)
    inputs = [drawn(100, heads, 32, seed=n) for n, heads in enumerate((2, 1, 1))]
    weight = drawn(100, 2, 32, seed=7)

    def value(*tensors: Tensor) -> Tensor:
        torch.manual_seed(5)
        return (attending.attention(*tensors, call).double() * weight).sum()

    mine = [tensor.clone().requires_grad_() for tensor in inputs]
    value(*mine).backward()
    for number, tensor in enumerate(mine):
        way = drawn(*tensor.shape, seed=20 + number)
        moved = [[x + step * way if n == number else x for n, x in enumerate(inputs)] for step in (1e-2, -1e-2)]
        slope = float(value(*moved[0]) - value(*moved[1])) / 2e-2
        assert tensor.grad is not None
        assert slope == pytest.approx(float((tensor.grad.double() * way).sum()), rel=2e-2, abs=2e-2)


def test_what_is_dropped_is_a_share_p_and_the_mean_stays() -> None:
    ones, norm = torch.zeros(4000, 64), nn.LayerNorm(64)
    q = torch.zeros(4000, 1, 64)
    torch.manual_seed(1)
    out = attending.attention(
        q, q, torch.ones(4000, 1, 64), AttentionArgs(layout=layout_of([4000]), scale=1.0, dropout=0.25)
    )
    assert float(out.mean()) == pytest.approx(1.0, abs=5e-3)
    seen = of.add_norm(ones, torch.ones(4000, 64), norm, 0.25)
    assert seen is not None
    assert float((seen < 0).float().mean()) == pytest.approx(0.25, abs=5e-3)
    rows = (seen < 0).float().mean(0)
    assert float(rows.std()) < 3 * (0.25 * 0.75 / 4000) ** 0.5  # no column is favoured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_norm_of_a_sum(native: Kernels, dtype: torch.dtype, p: float) -> None:
    skip_without_half(native, dtype)
    norm = nn.LayerNorm(80, eps=1e-3)
    norm.weight.data, norm.bias.data = drawn(80, seed=3), drawn(80, seed=4)
    x, y = drawn(70, 80, seed=1).requires_grad_(), drawn(70, 80, seed=2, dtype=dtype).requires_grad_()
    torch.manual_seed(3)
    z = of.add_norm(x, y, norm, p)
    assert z is not None
    z.backward(drawn(70, 80, seed=5))
    results = [z, x.grad, y.grad, norm.weight.grad, norm.bias.grad]
    assert x.grad is not None and y.grad is not None
    ones = torch.ones(70, 80, dtype=torch.float64)
    if p:  # what was dropped is read off the gradients
        ones = (y.grad != 0).double() / (1 - p)
        assert 0.1 < float((ones == 0).double().mean()) < 0.3
    wide = nn.LayerNorm(80, eps=1e-3, dtype=torch.float64)
    wide.load_state_dict(norm.state_dict())
    a, b = x.detach().double().requires_grad_(), y.detach().double().requires_grad_()
    expected = wide(a + b * ones)
    expected.backward(drawn(70, 80, seed=5).double())
    grads = [expected, a.grad, b.grad, wide.weight.grad, wide.bias.grad]
    most = FLOAT if dtype == torch.float32 else HALF
    assert (
        max(off(result, gradient) for result, gradient in zip(results, grads, strict=True) if result is not None) < most
    )


@pytest.mark.parametrize(
    ("rows", "width", "out"), [(1, 48, 64), (7, 32, 16), (65, 80, 112), (433, 64, 192), (600, 192, 48)]
)
def test_linear_layers_in_training(
    native: Kernels, rows: int, width: int, out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_half(native, torch.bfloat16)
    monkeypatch.setattr(of, "trains_in_bfloat16", lambda: True)  # also where the rule prefers oneDNN: with AMX
    layer = of.TrainedLinear(width, out)
    x = drawn(rows, width).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    dy = drawn(rows, out, seed=2, dtype=torch.bfloat16)
    y.backward(dy)
    a, w = x.detach().bfloat16().double().requires_grad_(), layer.weight.detach().bfloat16().double().requires_grad_()
    b = layer.bias.detach().double().requires_grad_()
    expected = F.linear(a, w, b)
    expected.backward(dy.double())
    assert y.dtype == torch.bfloat16 and layer.weight.grad is not None
    assert off(y, expected) < HALF
    for mine, reference in ((x.grad, a.grad), (layer.weight.grad, w.grad), (layer.bias.grad, b.grad)):
        assert mine is not None and reference is not None
        assert off(mine, reference) < FLOAT  # gradients are not rounded


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 300])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_laid_out_layers_answer_as_the_layer_does(native: Kernels, rows: int, activation: str | None) -> None:
    skip_without_half(native, torch.bfloat16)
    layer = nn.Linear(80, 208, dtype=torch.bfloat16)
    x = drawn(rows, 80, dtype=torch.bfloat16)
    expected = layer.double()(x.double())
    expected = expected if activation is None else F.gelu(expected)
    with torch.inference_mode():
        assert off(NativeLinear(layer.bfloat16(), activation)(x), expected) < HALF
        exact = Int8Linear(layer.float(), activation)
        assert (exact.panels is not None) == native.has_int8
        mine = exact(x)
        exact.panels = None
        assert off(mine, expected) < off(exact(x), expected) + 1e-3  # its steps are no coarser
        assert off(mine, expected) < 3e-2
        assert exact(x[:0]).shape == mine[:0].shape


@pytest.mark.parametrize("rows", [1, 4, 5, 9, 16, 17, 31, 33, 65, 200])
@pytest.mark.parametrize(("width", "out"), [(1536, 64), (64, 48), (128, 80), (192, 16), (80, 144)])
def test_whole_numbers_are_summed_exactly(native: Kernels, rows: int, width: int, out: int) -> None:
    """By vectors and, with AMX, by tiles, which take some numbers of rows and some widths alone."""
    if not native.has_int8:
        pytest.skip("this processor does not multiply bytes")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, (out, width), generator=generator, dtype=torch.int8)
    x = torch.randint(-100, 156, (rows, width), generator=generator).float()
    x[:, 0], x[:, 1] = -100.0, 155.0  # each row's step is 1
    panels = of.Int8Weight.of(weight, torch.ones(out), None, gelu=False)
    assert panels is not None
    assert torch.equal(panels.linear(x), (x.double() @ weight.double().t()).float())
    level = torch.full((2, width), 3.0)
    assert torch.equal(panels.linear(level), (level.double() @ weight.double().t()).float())


def test_gelu_and_its_gradient(native: Kernels) -> None:
    skip_without_half(native, torch.bfloat16)
    x = torch.linspace(-12, 12, 4096, dtype=torch.bfloat16).requires_grad_()
    y = of.gelu(x)
    y.backward(torch.ones_like(y))
    wide = x.detach().double().requires_grad_()
    expected = F.gelu(wide)
    expected.backward(torch.ones_like(expected))
    assert x.grad is not None and wide.grad is not None
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=6e-6)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=2**-7, atol=1e-6)


def test_the_same_bits_with_any_number_of_threads(native: Kernels) -> None:
    skip_without_half(native, torch.bfloat16)
    mlp = Mlp(width=64, inner_width=128, activation="gelu", gated=False, bias=True, inner_dropout=0.0)
    norm, layout = nn.LayerNorm(64), layout_of(LENGTHS)

    def ran(threads: int) -> list[Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(2)
            mlp.zero_grad()
            x = drawn(sum(LENGTHS), 192).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                q, k, v = attending.split_qkv(x, 2)
                mixed = attending.attention(q, k, v, AttentionArgs(layout=layout, scale=0.2, dropout=0.1)).flatten(1)
                z = of.add_norm(x[:, :64], mlp(mixed), norm, 0.1)
            assert z is not None and x.grad is None
            z.square().sum().backward()
            assert x.grad is not None and mlp.up.weight.grad is not None
            return [z.detach(), x.grad, mlp.up.weight.grad.clone()]
        finally:
            torch.set_num_threads(before)

    for single, threaded in zip(ran(1), ran(3), strict=True):
        assert torch.equal(single, threaded)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1)])
def test_gradients_of_parts_that_lie_together_are_not_copied(native: Kernels, heads: int, kv_heads: int) -> None:
    rows = drawn(5, 96).requires_grad_()
    q, k, v = attending.split_qkv(rows, heads, kv_heads)
    out = attending.attention(q, k, v, AttentionArgs(layout=layout_of([5]), scale=1.0))
    parts = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    (gradient,) = torch.autograd.grad(out.sum(), rows, retain_graph=True)
    assert torch.equal(gradient, torch.cat(parts, 1).flatten(1))
    pushes = [drawn(*part.shape, seed=n) for n, part in enumerate((q, k, v))]  # three tensors of their own
    (gradient,) = torch.autograd.grad(sum((x * push).sum() for x, push in zip((q, k, v), pushes, strict=True)), rows)
    assert torch.equal(gradient, torch.cat(pushes, 1).flatten(1))


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
    assert message in attending.cannot_attend(q, q, q, call)
    assert choose_kernel(q, q, q, call).name != "native"


def test_without_kernels_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from heedful.csrc import library

    monkeypatch.setattr(library, "_library_or_reason", lambda: "none today")
    q = drawn(6, 2, 32)
    assert "none today" in attending.cannot_attend(q, q, q, AttentionArgs(layout=layout_of([6]), scale=1.0))
    assert of.add_norm(q[:, 0], q[:, 1], nn.LayerNorm(32), 0.0) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert of.TrainedLinear(32, 32)(q[:, 0]).grad_fn.name() == "AddmmBackward0"


def published(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's losses in float64, and their gradient."""
    wide = scores.double().requires_grad_()
    losses = F.cross_entropy(wide, targets, reduction="none")
    losses.sum().backward()
    assert wide.grad is not None
    return losses.detach(), wide.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [2, 16, 37, 1000])
def test_cross_entropy_and_its_gradient(native: Kernels, dtype: torch.dtype, classes: int) -> None:
    skip_without_half(native, dtype)
    scores, targets = 5 * drawn(40, classes, dtype=dtype), torch.arange(40) % classes
    scores[3, 1] = 300.0  # certain, and wrong
    scores[1, 1] = 300.0  # certain, and right
    logs, losses, gradient = of.cross_entropy(scores, targets), *published(scores, targets)
    assert logs is not None
    torch.testing.assert_close(logs[0].double(), losses, rtol=1e-6, atol=5e-6)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(logs[1].double(), gradient, **tolerance)
    assert of.cross_entropy(scores, targets + classes) is None
    assert of.cross_entropy(scores[:0], targets[:0]) is not None


@pytest.mark.parametrize("value", ODD, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_of_scores_that_are_not_finite(native: Kernels, dtype: torch.dtype, value: float) -> None:
    skip_without_half(native, dtype)
    scores, targets = drawn(8, 37, dtype=dtype), torch.arange(8) + 2
    for row, column in enumerate((0, 3, 7, 8, 20, 35, 36)):  # one is the row's target; the last row is as it was
        scores[row, column] = value
    logs, losses, gradient = of.cross_entropy(scores, targets), *published(scores, targets)
    assert logs is not None
    torch.testing.assert_close(logs[0].double(), losses, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(logs[1].double(), gradient, rtol=2**-7, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("value", ODD, ids=str)
def test_rows_in_bytes_hide_no_number_that_is_not_finite(native: Kernels, value: float) -> None:
    x, whole, scales = drawn(6, 64), torch.empty(6, 64, dtype=torch.uint8), torch.empty(6, 2)
    for row, column in enumerate((0, 15, 16, 40, 63)):
        x[row, column] = value
    native.round_rows(x.data_ptr(), 64, 6, 64, 0, whole.data_ptr(), scales.data_ptr(), 1)
    assert scales.isfinite().all(1).tolist() == [False] * 5 + [True]


def test_libraries_are_checked_under_autocast_and_other_devices(native: Kernels) -> None:
    from heedful.csrc.check import find_error

    with torch.autocast("cpu", torch.bfloat16):  # a model whose first product is the first to ask
        assert find_error(native) == ""
    with torch.device("meta"):
        assert find_error(native) == ""


def test_defaults_of_the_caller_are_not_ours(native: Kernels) -> None:
    layer = nn.LayerNorm(64)
    x = drawn(5, 64).requires_grad_()

    def learned() -> list[Tensor]:
        x.grad = layer.weight.grad = None
        z = of.add_norm(x, x.detach(), layer, 0.0)
        assert z is not None
        z.square().sum().backward()
        assert x.grad is not None and layer.weight.grad is not None
        return [z, x.grad, layer.weight.grad]

    expected = learned()
    for dtype in (torch.bfloat16, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                got = learned()
        finally:
            torch.set_default_dtype(before)
        assert all(torch.equal(result, expected_result) for result, expected_result in zip(got, expected, strict=True))


def test_a_second_derivative_is_refused(native: Kernels) -> None:
    x = drawn(5, 64).requires_grad_()
    z = of.add_norm(x, x.detach(), nn.LayerNorm(64), 0.0)
    assert z is not None
    (first,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_an_empty_sequence_between_hides_no_keys_that_several_have() -> None:
    q = torch.zeros(8, 2, 32)
    call = AttentionArgs(layout=Layout(((0, 3), (3, 3), (3, 8)), ((0, 6), (2, 2), (3, 8))), scale=1.0)
    assert "same keys" in attending.cannot_attend(q, q, q, call)
    assert choose_kernel(q, q, q, call).name != "native"


@pytest.mark.parametrize("level", [0.0, 300.0, 1e4, 1e6])
def test_cross_entropy_of_large_scores(native: Kernels, level: float) -> None:
    scores, targets = drawn(20, 100) + level, torch.arange(20)
    result = of.cross_entropy(scores, targets)
    assert result is not None
    for mine, expected_result in zip(result, published(scores, targets), strict=True):
        assert off(mine, expected_result) < 3e-7


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("has_tiles", [True, False])
@pytest.mark.parametrize("width", [16, 32])
def test_training_on_amx_takes_our_attention_where_it_uses_tiles(
    native: Kernels, monkeypatch: pytest.MonkeyPatch, amx: bool, has_tiles: bool, width: int
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx})
    monkeypatch.setattr(attending, "kernels", lambda: replace(native, has_tiles=has_tiles))
    rows = torch.zeros(4, 2, width, dtype=torch.bfloat16)
    args = AttentionArgs(layout=Layout.of([0, 4]), scale=1.0)
    reason = attending.slow_to_attend(rows, rows, rows, args)
    assert (reason == "") == (not amx or (has_tiles and width == 32))
    assert not attending.slow_to_attend(rows, rows, rows, replace(args, preferred="native"))
    assert not attending.slow_to_attend(rows.float(), rows.float(), rows.float(), args)
