"""Attention for CUDA, as far as a CPU can check it: plans, masks and arguments against the reference."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from heedful.nn import attend as attend_module
from heedful.nn import cuda_attention, kernels
from heedful.nn.attend import REFERENCE, choose_kernel, explain
from heedful.nn.cuda_attention import CUDA, TILE, make_tiles
from heedful.nn.layout import AttentionArgs, Layout, RelativeBias
from tests.nn import test_kernels as grid
from tests.nn.test_kernels import LENGTHS, draw, draw_bias, layout_of, outcome, worst

FLASH, GROUPED, FLEX = CUDA
VARLEN = next(kernel for kernel in kernels.KERNELS if kernel.name == "varlen")
WINDOWS = ((False, None), (True, None), (False, 3), (True, 3), (False, 0))


def as_documented(
    q: Tensor, k: Tensor, v: Tensor, of: Tensor, to: Tensor, *rest: Any, scale: float, **window: int
) -> tuple[Tensor, None]:
    """Compute aten::_flash_attention_forward as documented.

    Query i of n looks at keys i + m - n - left to i + m - n + right of m; -1 is no limit, is_causal is
    right = 0. A query without keys gives zeros.
    """
    longest_of, longest_to, dropped, causal, debug = rest
    assert of.dtype == to.dtype == torch.int32 and not debug and dropped == 0.0
    left, right = window["window_size_left"], window["window_size_right"]
    assert not causal or (left, right) == (-1, 0)
    rows = []
    for b in range(len(of) - 1):
        queries, keys, values = q[of[b] : of[b + 1]], k[to[b] : to[b + 1]], v[to[b] : to[b + 1]]
        n, m = len(queries), len(keys)
        assert n <= longest_of and m <= longest_to
        for i in range(n):
            middle = i + m - n
            low = 0 if left < 0 else max(0, middle - left)
            high = m if right < 0 else min(m, middle + right + 1)
            if low >= high:
                rows.append(0.0 * queries[i] + 0.0 * (keys.sum() + values.sum()))
                continue
            weights = (scale * torch.einsum("hd,jhd->hj", queries[i], keys[low:high])).softmax(-1)
            rows.append(torch.einsum("hj,jhd->hd", weights, values[low:high]))
    return (torch.stack(rows) if rows else 0.0 * q), None


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_flash_is_told_what_the_reference_computes(
    lengths: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_attention, "_operator", lambda: as_documented)
    layout = layout_of(*lengths)
    tensors = draw(layout)
    for causal, window in WINDOWS if layout.rows < 100 else WINDOWS[3:4]:
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window)
        assert worst(outcome(FLASH, tensors, [], call), outcome(REFERENCE, tensors, [], call)) <= 1e-12


def test_flash_calls_an_operator_that_is_there_and_learns() -> None:
    assert cuda_attention._missing_arguments() == ""
    layout = layout_of([7, 30], [7, 33])
    shapes = [(37, 4, 64), (40, 4, 64), (40, 4, 64)]
    q, k, v = (torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    for causal, window in WINDOWS:
        out = FLASH.run(q, k, v, AttentionArgs(layout=layout, scale=0.1, causal=causal, window=window, dropout=0.1))
        gradients = torch.autograd.grad(out.sum(), [q, k, v])
        assert [out.shape, *(gradient.shape for gradient in gradients)] == [q.shape, q.shape, k.shape, v.shape]


@pytest.mark.parametrize("bias", ["none", "table", "rows", "dense"])
def test_grouped_equals_the_reference(bias: str) -> None:
    for lengths in LENGTHS.values():
        layout = layout_of(*lengths)
        tensors, (bias_values, trained) = draw(layout), draw_bias(bias, layout)
        for causal, window in WINDOWS[:1] + WINDOWS[3:4]:
            call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window, bias=bias_values)
            truth = outcome(REFERENCE, tensors, trained, call)
            assert worst(outcome(GROUPED, tensors, trained, call), truth) <= 1e-12, (lengths, causal, window)


@pytest.mark.parametrize("bias", ["none", "table"])
def test_grouped_drops_weights_after_the_softmax(bias: str) -> None:
    grid.test_dropout_drops_weights_after_the_softmax(GROUPED, bias)
    if bias == "none":
        grid.test_the_global_seed_decides_what_is_dropped(GROUPED)


@pytest.mark.parametrize("bias", ["none", "table", "rows"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_equals_the_reference(bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(cuda_attention, "_compiled_flex_attention", lambda: flex_attention)
    for name, causal, window in (("lines shared and not", False, None), ("some without keys", True, 3)):
        layout = layout_of(*LENGTHS[name])
        tensors, (bias_values, _) = [tensor.detach() for tensor in draw(layout)], draw_bias(bias, layout)
        if isinstance(bias_values, RelativeBias):
            bias_values = RelativeBias(table=bias_values.table.detach())
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window, bias=bias_values)
        assert worst([FLEX.run(*tensors, call)], [REFERENCE.run(*tensors, call)]) <= 1e-6, name


def test_tiles_hold_every_pair_that_counts_and_no_others() -> None:
    lengths = [3, 130, 0, 250, 64, 1, 700, 20]
    spans = Layout.of([0, *torch.tensor(lengths).cumsum(0).tolist()]).queries
    for keys in (spans, tuple((start + 40, stop + 40) for start, stop in spans)):
        layout = Layout(spans, keys)
        q, k = torch.zeros(sum(lengths), 1, 16), torch.zeros(keys[-1][1], 1, 16)
        tiles = make_tiles(AttentionArgs(layout=layout, scale=1.0), q, k)
        computed = tiles.mask.to_dense()[0, 0].bool()
        rows, columns = (torch.arange(len(tensor)) for tensor in (q, k))
        zero = torch.tensor(0)
        counts = tiles.mask.mask_mod(zero, zero, rows[:, None], columns[None, :])
        truth = torch.zeros(len(q), len(k), dtype=torch.bool)
        for (start, stop), (first, last) in zip(layout.queries, layout.keys, strict=True):
            truth[start:stop, first:last] = True
        assert torch.equal(counts, truth)
        pad = [-(-size // TILE) * TILE - size for size in truth.shape]
        whole = torch.nn.functional.pad(truth, (0, pad[1], 0, pad[0]))
        busy = whole.unflatten(1, (-1, TILE)).any(-1).unflatten(0, (-1, TILE)).any(1)
        assert torch.equal(computed, busy)


# -- the choice ---------------------------------------------------------------------------------------------------


def test_what_is_taken_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_module, "KERNELS", (*CUDA, *kernels.KERNELS))
    layout = layout_of([20, 20], [20, 20])
    with FakeTensorMode():
        halves, singles, narrow = (
            torch.empty(40, 4, width, device="cuda", dtype=dtype)
            for width, dtype in ((64, torch.bfloat16), (64, torch.float32), (68, torch.bfloat16))
        )
        table = RelativeBias(table=torch.empty(4, 9, device="cuda"))
        values = RelativeBias(table=table.table, values=torch.empty(9, 64, device="cuda"))
    for q, bias, dropout, first, name in (
        (halves, None, 0.0, "", "varlen"),
        (halves, None, 0.1, "", "flash"),
        (halves, table, 0.0, "", "grouped"),
        (halves, table, 0.1, "", "grouped"),
        (halves, table, 0.0, "flex", "flex"),
        (halves, table, 0.1, "flex", "grouped"),
        (narrow, table, 0.0, "flex", "grouped"),
        (halves, values, 0.1, "", "bmm"),
        (singles, None, 0.0, "", "grouped"),
        (singles, None, 0.1, "", "grouped"),
    ):
        call = AttentionArgs(layout=layout, scale=1.0, bias=bias, dropout=dropout, preferred=first)
        assert choose_kernel(q, q, q, call).name == name, (name, explain(q, q, q, call))


@pytest.mark.parametrize(
    ("capability", "width", "learns", "name"),
    [
        ((7, 5), 64, False, "grouped"),  # T4, which infers in float16
        ((8, 0), 256, True, "varlen"),
        ((8, 6), 192, True, "varlen"),
        ((8, 6), 256, True, "grouped"),
        ((8, 6), 256, False, "varlen"),
        ((9, 0), 256, True, "varlen"),
    ],
)
def test_gpus_that_lack_flash_attention_or_its_gradient(
    capability: tuple[int, int], width: int, learns: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode():
        q = torch.empty(40, 4, width, device="cuda", dtype=torch.float16, requires_grad=learns)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for dropout, expected in ((0.0, name), (0.1, name.replace("varlen", "flash"))):
        call = AttentionArgs(layout=layout_of([20, 20], [20, 20]), scale=1.0, dropout=dropout)
        assert choose_kernel(q, q, q, call).name == expected, explain(q, q, q, call)


def test_keys_that_belong_to_no_sequence_are_refused() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(rows, 4, 64, device="cuda", dtype=torch.bfloat16) for rows in (40, 50))
    reason = "its key rows must follow each other without a gap, and all belong to a sequence"
    for keys in (((0, 20), (20, 40)), ((0, 20), (30, 50)), ((10, 30), (30, 50))):
        layout = Layout(((0, 20), (20, 40)), keys)
        assert FLASH.cannot(q, k, k, AttentionArgs(layout=layout, scale=1.0, dropout=0.1)) == reason
        call = AttentionArgs(layout=layout, scale=1.0)
        assert VARLEN.cannot(q, k, k, call) == reason and choose_kernel(q, k, k, call).name == "grouped"
    layout = layout_of([20, 20], [20, 30])
    assert FLASH.cannot(q, k, k, AttentionArgs(layout=layout, scale=1.0, dropout=0.1)) == ""
    assert VARLEN.cannot(q, k, k, AttentionArgs(layout=layout, scale=1.0)) == ""


def test_values_of_another_width_are_left_to_blocks() -> None:
    layout = layout_of([20, 20], [20, 20])
    with FakeTensorMode():
        q, v = (torch.empty(40, 4, width, device="cuda", dtype=torch.bfloat16) for width in (64, 32))
    for dropout, first in ((0.0, ""), (0.1, ""), (0.0, "flex")):
        call = AttentionArgs(layout=layout, scale=1.0, dropout=dropout, preferred=first)
        assert choose_kernel(q, q, v, call).name == "grouped", explain(q, q, v, call)
    assert VARLEN.cannot(q, q, v, call) == "its values are as wide as its keys, and these are 32 and 64 wide"


def test_an_operator_of_another_signature_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "REQUIRED_ARGUMENTS", (*cuda_attention.REQUIRED_ARGUMENTS, "softcap"))
    missing = cuda_attention._missing_arguments.__wrapped__()
    assert missing == f"PyTorch {torch.__version__} has another operator for it, without softcap"


def test_nothing_changes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of([20, 20], [20, 20])
    q = torch.zeros(40, 4, 64)
    for bias, dropout in product((None, RelativeBias(table=torch.zeros(4, 9))), (0.0, 0.1)):
        call = AttentionArgs(layout=layout, scale=1.0, bias=bias, dropout=dropout)
        before = choose_kernel(q, q, q, call).name
        with monkeypatch.context() as patch:
            patch.setattr(attend_module, "KERNELS", (*CUDA, *kernels.KERNELS))
            assert choose_kernel(q, q, q, call).name == before
            assert explain(q, q, q, call).count("it runs on CUDA only") == 4
