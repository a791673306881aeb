"""Plans, masks and arguments of the CUDA attention kernels, compared with the reference on a CPU."""

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
from tests.nn import test_kernels as kernel_tests
from tests.nn.test_kernels import LENGTHS, make_layout, max_error, run_kernel, sample_bias, sample_qkv

FLASH, GROUPED, FLEX = CUDA
VARLEN = next(kernel for kernel in kernels.KERNELS if kernel.name == "varlen")
MASKS = ((False, None), (True, None), (False, 3), (True, 3), (False, 0))  # causal, window


def documented_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, *rest: Any, scale: float, **window: int
) -> tuple[Tensor, None]:
    """Compute what aten::_flash_attention_forward is documented to compute.

    Query i of n attends to the keys i + m - n - left to i + m - n + right of m keys; -1 is no limit, and is_causal is
    right = 0. The result of a query without keys is 0.
    """
    max_queries, max_keys, dropout, causal, debug = rest
    assert q_bounds.dtype == k_bounds.dtype == torch.int32 and not debug and dropout == 0.0
    left, right = window["window_size_left"], window["window_size_right"]
    assert not causal or (left, right) == (-1, 0)
    rows = []
    for b in range(len(q_bounds) - 1):
        queries = q[q_bounds[b] : q_bounds[b + 1]]
        keys, values = (x[k_bounds[b] : k_bounds[b + 1]] for x in (k, v))
        n, m = len(queries), len(keys)
        assert n <= max_queries and m <= max_keys
        for i in range(n):
            position = i + m - n
            first = 0 if left < 0 else max(0, position - left)
            stop = m if right < 0 else min(m, position + right + 1)
            if first >= stop:
                rows.append(0.0 * queries[i] + 0.0 * (keys.sum() + values.sum()))
                continue
            weights = (scale * torch.einsum("hd,jhd->hj", queries[i], keys[first:stop])).softmax(-1)
            rows.append(torch.einsum("hj,jhd->hd", weights, values[first:stop]))
    return (torch.stack(rows) if rows else 0.0 * q), None


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_arguments_of_the_flash_operator_mean_what_the_reference_computes(
    lengths: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_attention, "_operator", lambda: documented_flash_attention)
    layout = make_layout(*lengths)
    tensors = sample_qkv(layout)
    for causal, window in MASKS if layout.rows < 100 else MASKS[3:4]:
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window)
        assert max_error(run_kernel(FLASH, tensors, [], call), run_kernel(REFERENCE, tensors, [], call)) <= 1e-12


def test_the_flash_operator_exists_and_has_a_gradient() -> None:
    assert cuda_attention._missing_arguments() == ""
    layout = make_layout([7, 30], [7, 33])
    shapes = [(37, 4, 64), (40, 4, 64), (40, 4, 64)]
    q, k, v = (torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    for causal, window in MASKS:
        out = FLASH.run(q, k, v, AttentionArgs(layout=layout, scale=0.1, causal=causal, window=window, dropout=0.1))
        gradients = torch.autograd.grad(out.sum(), [q, k, v])
        assert [out.shape, *(gradient.shape for gradient in gradients)] == [q.shape, q.shape, k.shape, v.shape]


@pytest.mark.parametrize("bias", ["none", "table", "rows", "dense"])
def test_grouped_equals_the_reference(bias: str) -> None:
    for lengths in LENGTHS.values():
        layout = make_layout(*lengths)
        tensors, (bias_values, trained) = sample_qkv(layout), sample_bias(bias, layout)
        for causal, window in MASKS[:1] + MASKS[3:4]:
            call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window, bias=bias_values)
            expected = run_kernel(REFERENCE, tensors, trained, call)
            assert max_error(run_kernel(GROUPED, tensors, trained, call), expected) <= 1e-12, (lengths, causal, window)


@pytest.mark.parametrize("bias", ["none", "table"])
def test_grouped_drops_weights_after_the_softmax(bias: str) -> None:
    kernel_tests.test_dropout_drops_weights_after_the_softmax(GROUPED, bias)
    if bias == "none":
        kernel_tests.test_dropout_is_seeded_by_the_global_generator(GROUPED)


@pytest.mark.parametrize("bias", ["none", "table", "rows"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_equals_the_reference(bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(cuda_attention, "_compiled_flex_attention", lambda: flex_attention)
    for name, causal, window in (("lines shared and not", False, None), ("some without keys", True, 3)):
        layout = make_layout(*LENGTHS[name])
        tensors, (bias_values, _) = [tensor.detach() for tensor in sample_qkv(layout)], sample_bias(bias, layout)
        if isinstance(bias_values, RelativeBias):
            bias_values = RelativeBias(table=bias_values.table.detach())
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window, bias=bias_values)
        assert max_error([FLEX.run(*tensors, call)], [REFERENCE.run(*tensors, call)]) <= 1e-6, name


def test_tiles_have_every_pair_of_one_sequence_and_no_others() -> None:
    lengths = [3, 130, 0, 250, 64, 1, 700, 20]
    spans = Layout.of([0, *torch.tensor(lengths).cumsum(0).tolist()]).queries
    for keys in (spans, tuple((start + 40, stop + 40) for start, stop in spans)):
        layout = Layout(spans, keys)
        q, k = torch.zeros(sum(lengths), 1, 16), torch.zeros(keys[-1][1], 1, 16)
        tiles = make_tiles(AttentionArgs(layout=layout, scale=1.0), q, k)
        computed = tiles.mask.to_dense()[0, 0].bool()
        rows, columns = (torch.arange(len(tensor)) for tensor in (q, k))
        zero = torch.tensor(0)
        visible = tiles.mask.mask_mod(zero, zero, rows[:, None], columns[None, :])
        expected = torch.zeros(len(q), len(k), dtype=torch.bool)
        for (start, stop), (first, last) in zip(layout.queries, layout.keys, strict=True):
            expected[start:stop, first:last] = True
        assert torch.equal(visible, expected)
        padding = [-(-size // TILE) * TILE - size for size in expected.shape]
        padded = torch.nn.functional.pad(expected, (0, padding[1], 0, padding[0]))
        has_pairs = padded.unflatten(1, (-1, TILE)).any(-1).unflatten(0, (-1, TILE)).any(1)
        assert torch.equal(computed, has_pairs)


# -- the choice ---------------------------------------------------------------------------------------------------


def test_choice_of_kernels_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_module, "KERNELS", (*CUDA, *kernels.KERNELS))
    layout = make_layout([20, 20], [20, 20])
    with FakeTensorMode():
        half, single, unusual_width = (
            torch.empty(40, 4, width, device="cuda", dtype=dtype)
            for width, dtype in ((64, torch.bfloat16), (64, torch.float32), (68, torch.bfloat16))
        )
        table = RelativeBias(table=torch.empty(4, 9, device="cuda"))
        values = RelativeBias(table=table.table, values=torch.empty(9, 64, device="cuda"))
    for q, bias, dropout, preferred, name in (
        (half, None, 0.0, "", "flash"),
        (half, None, 0.1, "", "flash"),
        (half, table, 0.0, "", "grouped"),
        (half, table, 0.1, "", "grouped"),
        (half, table, 0.0, "flex", "flex"),
        (half, table, 0.1, "flex", "grouped"),
        (unusual_width, table, 0.0, "flex", "grouped"),
        (half, values, 0.1, "", "bmm"),
        (single, None, 0.0, "", "grouped"),
        (single, None, 0.1, "", "grouped"),
    ):
        call = AttentionArgs(layout=layout, scale=1.0, bias=bias, dropout=dropout, preferred=preferred)
        assert choose_kernel(q, q, q, call).name == name, (name, explain(q, q, q, call))


@pytest.mark.parametrize(
    ("capability", "width", "learns", "name"),
    [
        ((7, 5), 64, False, "grouped"),  # T4, which infers in float16
        ((8, 0), 256, True, "flash"),
        ((8, 6), 192, True, "flash"),
        ((8, 6), 256, True, "grouped"),
        ((8, 6), 256, False, "flash"),
        ((9, 0), 256, True, "flash"),
    ],
)
def test_gpus_that_lack_flash_attention_or_its_gradient(
    capability: tuple[int, int], width: int, learns: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode():
        q = torch.empty(40, 4, width, device="cuda", dtype=torch.float16, requires_grad=learns)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for dropout in (0.0, 0.1):
        call = AttentionArgs(layout=make_layout([20, 20], [20, 20]), scale=1.0, dropout=dropout)
        assert choose_kernel(q, q, q, call).name == name, explain(q, q, q, call)


def test_keys_that_belong_to_no_sequence_are_refused() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(rows, 4, 64, device="cuda", dtype=torch.bfloat16) for rows in (40, 50))
    reason = "its key rows must follow each other without a gap, and all belong to a sequence"
    for keys in (((0, 20), (20, 40)), ((0, 20), (30, 50)), ((10, 30), (30, 50))):
        layout = Layout(((0, 20), (20, 40)), keys)
        assert FLASH.cannot(q, k, k, AttentionArgs(layout=layout, scale=1.0, dropout=0.1)) == reason
        call = AttentionArgs(layout=layout, scale=1.0)
        assert VARLEN.cannot(q, k, k, call) == reason and choose_kernel(q, k, k, call).name == "grouped"
    layout = make_layout([20, 20], [20, 30])
    assert FLASH.cannot(q, k, k, AttentionArgs(layout=layout, scale=1.0, dropout=0.1)) == ""
    assert VARLEN.cannot(q, k, k, AttentionArgs(layout=layout, scale=1.0)) == ""


def test_keys_and_values_of_different_widths_are_computed_in_blocks() -> None:
    layout = make_layout([20, 20], [20, 20])
    with FakeTensorMode():
        q, v = (torch.empty(40, 4, width, device="cuda", dtype=torch.bfloat16) for width in (64, 32))
    for dropout, preferred in ((0.0, ""), (0.1, ""), (0.0, "flex")):
        call = AttentionArgs(layout=layout, scale=1.0, dropout=dropout, preferred=preferred)
        assert choose_kernel(q, q, v, call).name == "grouped", explain(q, q, v, call)
    assert VARLEN.cannot(q, q, v, call) == "its values are as wide as its keys, and these are 32 and 64 wide"


def test_an_operator_with_another_signature_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "REQUIRED_ARGUMENTS", (*cuda_attention.REQUIRED_ARGUMENTS, "softcap"))
    missing = cuda_attention._missing_arguments.__wrapped__()
    assert missing == f"PyTorch {torch.__version__} has another operator for it, without softcap"
    monkeypatch.setattr(cuda_attention, "_missing_arguments", lambda: missing)
    with FakeTensorMode():
        q = torch.empty(40, 4, 64, device="cuda", dtype=torch.bfloat16)
    for dropout, name in ((0.0, "varlen"), (0.1, "grouped")):
        call = AttentionArgs(layout=make_layout([20, 20], [20, 20]), scale=1.0, dropout=dropout)
        assert choose_kernel(q, q, q, call).name == name, explain(q, q, q, call)


def test_cuda_kernels_do_not_change_the_choice_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout([20, 20], [20, 20])
    q = torch.zeros(40, 4, 64)
    for bias, dropout in product((None, RelativeBias(table=torch.zeros(4, 9))), (0.0, 0.1)):
        call = AttentionArgs(layout=layout, scale=1.0, bias=bias, dropout=dropout)
        name = choose_kernel(q, q, q, call).name
        with monkeypatch.context() as patch:
            patch.setattr(attend_module, "KERNELS", (*CUDA, *kernels.KERNELS))
            assert choose_kernel(q, q, q, call).name == name
            assert explain(q, q, q, call).count("it runs on CUDA only") == 4
