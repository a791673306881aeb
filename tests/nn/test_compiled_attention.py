"""Arguments, shapes and sequence bounds of flash attention as one operator, checked on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from heedful.nn import compiled_attention, cuda_attention
from heedful.nn.attend import REFERENCE
from heedful.nn.compiled_attention import OperatorBounds, attend_by_operator, operator_bounds
from heedful.nn.layout import AttentionArgs, Layout
from tests.nn.test_cuda_attention import MASKS, documented_flash_attention
from tests.nn.test_kernels import make_layout, sample_qkv


def test_the_operator_computes_what_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def operator(*arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        return (*documented_flash_attention(*arguments, **keywords), None)

    monkeypatch.setattr(cuda_attention, "_operator", lambda: operator)
    layout = make_layout([7, 0, 23, 1], [7, 0, 23, 1])
    q, k, v = (tensor.detach() for tensor in sample_qkv(layout))
    bounds = torch.tensor([0, 7, 7, 30, 31], dtype=torch.int32)
    for causal, window in MASKS:
        width = -1 if window is None else window
        out, _, random_state = compiled_attention._forward(q, k, v, bounds, torch.tensor(23), 0.3, causal, width, 0.0)
        truth = REFERENCE.run(q, k, v, AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window))
        assert (out - truth).abs().max() <= 1e-12
        assert (random_state.shape, random_state.dtype) == ((2,), torch.uint64)


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_its_shapes_are_known_on_every_device(causal: bool, window: int | None) -> None:
    q, k, v = torch.empty(40, 12, 64, device="meta", dtype=torch.bfloat16, requires_grad=True).split(4, 1)
    bounds = OperatorBounds(rows=torch.empty(3, device="meta", dtype=torch.int32), longest=torch.tensor(30))
    out = attend_by_operator(q, k, v, bounds, scale=0.1, causal=causal, window=window, dropout=0.1)
    gradients = torch.autograd.grad(out.sum(), [q, k, v])
    for result in (out, *gradients):
        assert (result.shape, result.dtype, result.device.type) == (q.shape, torch.bfloat16, "meta")
        assert result.is_contiguous()


def test_its_gradient_is_that_of_an_operator_that_is_there() -> None:
    q = torch.empty(40, 4, 64, device="meta", dtype=torch.bfloat16)
    log_sums, state = torch.empty(4, 40, device="meta"), torch.empty(2, device="meta", dtype=torch.uint64)
    bounds = torch.empty(3, device="meta", dtype=torch.int32)
    for causal, window in MASKS:
        width = -1 if window is None else window
        rest = (bounds, torch.tensor(30), 0.1, causal, width, 0.1)
        gradients = compiled_attention._backward(q, q, q, q, q, log_sums, state, *rest)
        assert [gradient.shape for gradient in gradients] == [q.shape] * 3


def test_bounds_are_for_what_flash_attention_computes() -> None:
    layout = Layout.of([0, 30, 30, 40])
    with FakeTensorMode():
        x, single = (torch.empty(40, 256, device="cuda", dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        no_rows = torch.empty(0, 256, device="cuda", dtype=torch.bfloat16)
        bounds = operator_bounds(layout, x, 64)
        assert bounds is not None
        assert (bounds.rows.shape, bounds.rows.dtype, bounds.rows.device.type) == ((4,), torch.int32, "cuda")
        assert bounds.longest.device.type == "cpu" and bounds.longest.ndim == 0
        for unusable in (
            operator_bounds(layout, single, 64),
            operator_bounds(layout, x, 68),
            operator_bounds(Layout.of([0]), no_rows, 64),
            operator_bounds(Layout(((0, 30), (30, 40)), ((0, 20), (30, 40))), x, 64),
        ):
            assert unusable is None
    assert operator_bounds(layout, torch.zeros(40, 256), 64) is None
