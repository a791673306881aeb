"""Attention kernels equal the reference: outputs and gradients, in every precision, with dropout. Plans of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.nn.attend import REFERENCE, attend, choose_kernel
from heedful.nn.dropout import STEPS
from heedful.nn.kernels import KERNELS, _spread_table, best_fit, share_lines
from heedful.nn.layout import AttentionArgs, Bias, DenseBias, Layout, RelativeBias

TESTED_ELSEWHERE = ("varlen", "dense_cache", "native")  # by tests of their own; native in test_cpu_ops.py
CPU_KERNELS = [kernel for kernel in KERNELS if kernel.name not in TESTED_ELSEWHERE]
HEADS, WIDTH, REACH = 2, 8, 5

# name -> number of query rows and number of key rows of each sequence
LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "ragged": ([7, 23, 1, 12], [7, 23, 1, 12]),
    "with empty ones": ([0, 5, 0], [0, 5, 0]),
    "one row": ([1], [1]),
    "all equal": ([16, 16], [16, 16]),
    "lines shared and not": ([300, 20, 20, 64, 70], [300, 20, 20, 64, 70]),
    "no sequence": ([], []),
    "more keys": ([3, 3, 1], [5, 5, 40]),
    "more queries": ([9, 5], [4, 2]),
    "some without keys": ([5, 9, 0, 3, 0], [7, 4, 2, 0, 0]),
    "no keys at all": ([2, 3], [0, 0]),
}


def make_layout(queries: Sequence[int], keys: Sequence[int]) -> Layout:
    """Make a layout from the numbers of query rows and of key rows of each sequence."""
    return Layout.of([0, *accumulate(queries)], [0, *accumulate(keys)])


def sample_qkv(layout: Layout, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """Sample q, k and v for a layout."""
    generator = torch.Generator().manual_seed(0)
    key_rows = layout.keys[-1][1] if layout.keys else 0
    tensors = [torch.randn(rows, HEADS, WIDTH, generator=generator) for rows in (layout.rows, key_rows, key_rows)]
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def sample_bias(kind: str, layout: Layout, dtype: torch.dtype = torch.float64) -> tuple[Bias | None, list[Tensor]]:
    """Sample a bias; returns it and its tensors that require gradients.

    Args:
        kind: "none"; "table", a RelativeBias for all rows; "rows", one for each query row; "dense", a DenseBias that
            masks random pairs, query 1 for all keys, and key 2 for all queries.
        layout: Layout of the call.
        dtype: Dtype of the bias.
    """
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if kind == "none":
        return None, []
    if kind in ("table", "rows"):
        first = (layout.rows,) if kind == "rows" else ()
        table = normal(*first, HEADS, 2 * REACH + 1).requires_grad_()
        return RelativeBias(table=table), [table]
    blocks = []
    for n, m in layout.sizes():
        block = normal(HEADS, n, m).masked_fill_(torch.rand(n, m, generator=generator) < 0.3, -math.inf)
        block[:, 1:2], block[:, :, 2:3] = -math.inf, -math.inf
        blocks.append(block.requires_grad_())
    return DenseBias(blocks=tuple(blocks)), blocks


def run_kernel(kernel: Any, tensors: list[Tensor], trained: list[Tensor], call: AttentionArgs) -> list[Tensor]:
    """Return the output of a kernel, and the gradients of q, k, v and the bias for a fixed gradient of the output."""
    out = kernel.run(*tensors, call)
    generator = torch.Generator().manual_seed(2)
    out_gradient = torch.randn(out.shape, generator=generator).to(out)
    leaves = [*tensors, *trained]
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    if out.requires_grad:
        gradients = torch.autograd.grad(out, leaves, out_gradient, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True))]


def max_error(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest entry of its tensor if that is above 1."""
    assert [tensor.shape for tensor in results] == [tensor.shape for tensor in expected]
    differences = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1.0))
        for a, b in zip(results, expected, strict=True)
        if a.numel()
    ]
    assert not any(map(math.isnan, differences))
    return max(differences, default=0.0)


@pytest.mark.parametrize("bias", ["none", "table", "rows", "dense"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_kernel_equals_the_reference(lengths: tuple[list[int], list[int]], bias: str) -> None:
    for causal, window in product([False, True], [None, 0, 3, 1000]):
        layout = make_layout(*lengths)
        tensors, (bias_values, trained) = sample_qkv(layout), sample_bias(bias, layout)
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window, bias=bias_values)
        expected = run_kernel(REFERENCE, tensors, trained, call)
        for kernel in CPU_KERNELS:
            error = max_error(run_kernel(kernel, tensors, trained, call), expected)
            assert error <= 1e-12, (kernel.name, causal, window, error)


@pytest.mark.parametrize("width", [8, 16, 48])
@pytest.mark.parametrize("kernel", [*KERNELS, None], ids=lambda kernel: kernel.name if kernel else "auto")
def test_keys_and_values_of_different_widths(kernel: Any, width: int) -> None:
    layout, generator = make_layout([6], [11]), torch.Generator().manual_seed(0)
    shapes = ((6, HEADS, 32), (11, HEADS, 32), (11, HEADS, width))
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    call = AttentionArgs(layout=layout, scale=0.3)
    kernel = choose_kernel(*tensors, call) if kernel is None else kernel
    if reason := kernel.cannot(*tensors, call):
        assert kernel.name in ("native", "varlen")
        assert "CUDA" in reason or "values" in reason or "no kernels" in reason
        return
    assert max_error(run_kernel(kernel, tensors, [], call), run_kernel(REFERENCE, tensors, [], call)) <= 2e-6


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)
def test_cached_plans_are_used_only_for_the_arguments_they_were_made_for(kernel: Any) -> None:
    layout = make_layout([7, 23, 1, 12], [7, 23, 1, 12])
    for dtype, bias, causal, window in product(
        [torch.float64, torch.float32], ["none", "table", "rows", "dense"], [False, True], [None, 3]
    ):
        tensors, (bias_values, trained) = sample_qkv(layout, dtype), sample_bias(bias, layout, dtype)
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window, bias=bias_values)
        expected = run_kernel(REFERENCE, tensors, trained, call)
        error = max_error(run_kernel(kernel, tensors, trained, call), expected)
        assert error <= (1e-12 if dtype == torch.float64 else 2e-6), (dtype, bias, causal, window, error)


def in_double(tensors: list[Tensor], bias_values: Bias | None) -> tuple[list[Tensor], Bias | None, list[Tensor]]:
    """Return q, k, v and the bias in float64, and the tensors of the bias that require gradients."""
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    match bias_values:
        case None:
            return exact, None, []
        case RelativeBias(table=table):
            table = table.detach().double().requires_grad_()
            return exact, RelativeBias(table=table), [table]
        case DenseBias(blocks=blocks):
            blocks = tuple(block.detach().double().requires_grad_() for block in blocks)
            return exact, DenseBias(blocks=blocks), list(blocks)


MIXED_LENGTHS = ([300, 20, 7, 64, 70, 0, 1], [300, 20, 9, 64, 70, 4, 0])


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("bias", ["none", "table", "rows", "dense"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_in_lower_precision(kernel: Any, dtype: torch.dtype, causal: bool, bias: str) -> None:
    """Errors against float64 are at most 2e-6 in float32, and in bfloat16 at most twice those of the reference."""
    layout = make_layout(*MIXED_LENGTHS)
    tensors, (bias_values, trained) = sample_qkv(layout, dtype), sample_bias(bias, layout, dtype)
    exact, exact_bias, exact_trained = in_double(tensors, bias_values)
    expected = run_kernel(
        REFERENCE, exact, exact_trained, AttentionArgs(layout=layout, scale=0.3, causal=causal, bias=exact_bias)
    )
    call = AttentionArgs(layout=layout, scale=0.3, causal=causal, bias=bias_values)
    allowed = 2e-6 if dtype == torch.float32 else 2 * max_error(run_kernel(REFERENCE, tensors, trained, call), expected)
    result = run_kernel(kernel, tensors, trained, call)
    assert {tensor.dtype for tensor in result} == {dtype}
    assert max_error(result, expected) <= allowed


# -- dropout ----------------------------------------------------------------------------------------------

NO_ROWS, DROPOUT = torch.zeros(0, 1, 1), AttentionArgs(layout=make_layout([], []), scale=1.0, dropout=0.5)
DROPOUT_KERNELS = [
    kernel for kernel in (*CPU_KERNELS, REFERENCE) if not kernel.cannot(NO_ROWS, NO_ROWS, NO_ROWS, DROPOUT)
]


def unit_values(layout: Layout, width: int) -> Tensor:
    """Return values with which attention returns its weights: the j-th unit vector for key j of each sequence."""
    positions = [j for first, last in layout.keys for j in range(last - first)]
    return torch.eye(width, dtype=torch.float64)[positions][:, None].expand(-1, 4, -1).clone().requires_grad_()


@pytest.mark.parametrize("kernel", DROPOUT_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("bias", ["none", "table"])
def test_dropout_drops_weights_after_the_softmax(kernel: Any, bias: str) -> None:
    p, width = round(0.3 * STEPS) / STEPS, 32
    layout = make_layout([32, 20, 5, 30], [32, 20, 9, 31])
    torch.manual_seed(1)
    q = torch.randn(layout.rows, 4, width, dtype=torch.float64).requires_grad_()
    k = torch.randn(layout.keys[-1][1], 4, width, dtype=torch.float64).requires_grad_()
    v = unit_values(layout, width)
    bias_values = RelativeBias(table=torch.randn(4, 7, dtype=torch.float64)) if bias == "table" else None
    weights = REFERENCE.run(q, k, v, AttentionArgs(layout=layout, scale=0.2, bias=bias_values))
    out = kernel.run(q, k, v, AttentionArgs(layout=layout, scale=0.2, bias=bias_values, dropout=p))

    nonzero = out.detach() != 0
    expected = torch.where(nonzero, weights / (1 - p), 0.0)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    assert (out.sum(-1) - 1).abs().max() > 0.1, "weights are normalised again after dropout"
    positive = weights.detach() > 0
    count, dropped = int(positive.sum()), int((positive & ~nonzero).sum())
    assert abs(dropped - count * p) < 5 * math.sqrt(count * p * (1 - p))

    # with the same weights dropped, gradients equal those of the formula
    gradient = torch.randn_like(out)
    gradients = torch.autograd.grad(out, [q, k, v], gradient)
    outputs = []
    for b, ((start, stop), (first, last)) in enumerate(zip(layout.queries, layout.keys, strict=True)):
        logits = 0.2 * torch.einsum("ihd,jhd->hij", q[start:stop], k[first:last])
        if bias_values is not None:
            n, m = layout.sizes()[b]
            distances = torch.arange(m)[None] - torch.arange(m - n, m)[:, None]
            logits = logits + bias_values.table[:, distances.clamp(-3, 3) + 3]
        factors = nonzero[start:stop, :, : last - first].transpose(0, 1).double() / (1 - p)
        outputs.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1) * factors, v[first:last]))
    expected_gradients = torch.autograd.grad(torch.cat(outputs), [q, k, v], gradient)
    for actual, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, expected_gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kernel", DROPOUT_KERNELS, ids=lambda kernel: kernel.name)
def test_dropout_is_seeded_by_the_global_generator(kernel: Any) -> None:
    layout = make_layout([20, 70], [20, 70])
    tensors, call = sample_qkv(layout), AttentionArgs(layout=layout, scale=0.3, dropout=0.5)
    outs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outs.append(kernel.run(*tensors, call))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_kernels_without_dropout_refuse_it() -> None:
    layout = make_layout([4], [4])
    assert "bmm" in {kernel.name for kernel in DROPOUT_KERNELS}
    for kernel in CPU_KERNELS:
        if kernel not in DROPOUT_KERNELS:
            with pytest.raises(HeedfulError, match="it has no dropout"):
                attend(*sample_qkv(layout), layout, scale=1.0, dropout=0.1, backend=kernel.name)


# -- plans ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 64), max_size=60))
def test_best_fit_packs_every_sequence_once(lengths: list[int]) -> None:
    numbers = list(range(len(lengths)))
    lines = best_fit(numbers, lengths, 64)
    assert sorted(number for line in lines for number in line) == numbers
    used_slots = [sum(lengths[number] for number in line) for line in lines]
    assert all(used <= 64 for used in used_slots)
    assert sum(2 * used <= 64 for used in used_slots) <= 1, "two lines are at most half full and could be one"
    assert lines == best_fit(numbers, lengths, 64)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.none() | st.integers(0, 40)), max_size=20),
    st.sampled_from([1, 1 << 12, 1 << 20]),
)
def test_blocks_have_every_sequence_once_and_do_not_exceed_the_budget(
    sizes: list[tuple[int, int | None]], budget: int
) -> None:
    layout = make_layout([n for n, _ in sizes], [n if m is None else m for n, m in sizes])
    blocks = list(share_lines(layout, budget=budget))
    assert sorted(number for lines in blocks for line in lines for number in line) == list(range(len(sizes)))
    for lines in blocks:
        n, m = (
            max(sum(stop - start for start, stop in (spans[number] for number in line)) for line in lines)
            for spans in (layout.queries, layout.keys)
        )
        assert len(lines) == 1 or len(lines) * n * m <= budget


# -- kernels with tests of their own ----------------------------------------------------------------------


@pytest.mark.gpu
def test_varlen_equals_the_reference() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for lengths, causal, window in product(LENGTHS.values(), [False, True], [None, 0, 3, 1000]):
        layout = make_layout(*lengths)
        tensors = sample_qkv(layout, torch.bfloat16, "cuda")
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window)
        expected = run_kernel(REFERENCE, in_double(tensors, None)[0], [], call)
        # varlen rounds the weights to bfloat16 too
        allowed = 2 * max_error(run_kernel(REFERENCE, tensors, [], call), expected) + 2**-9
        (varlen,) = (kernel for kernel in KERNELS if kernel.name == "varlen")
        assert max_error(run_kernel(varlen, tensors, [], call), expected) <= allowed, (lengths, causal, window)
    with pytest.raises(HeedfulError, match=r"in float16 and bfloat16, not in torch\.float32"):
        attend(*sample_qkv(layout, torch.float32, "cuda"), layout, scale=0.3, backend="varlen")


def test_a_table_is_spread_over_the_pairs_of_a_block() -> None:
    table = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for queries, keys in ((1, 1), (3, 5), (6, 2), (9, 9)):
        distances = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        spread, indexed = _spread_table(table, queries, keys), table[:, distances.clamp(-3, 3) + 3][None]
        assert torch.equal(spread, indexed)
        weights = torch.randn(spread.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients = [torch.autograd.grad(bias, table, weights)[0] for bias in (spread, indexed)]
        torch.testing.assert_close(*gradients, atol=1e-13, rtol=0)


def test_varlen_is_refused_on_a_cpu() -> None:
    layout = make_layout([3], [3])
    with pytest.raises(HeedfulError, match='"varlen" cannot take this call: it runs on CUDA only'):
        attend(*sample_qkv(layout, torch.bfloat16), layout, scale=0.3, backend="varlen")


@pytest.mark.parametrize("bias", ["none", "table"])
def test_dense_cache_equals_the_reference(bias: str) -> None:
    """Keys are in lines of 16 slots, with unused slots after the last key, as in a KV cache."""
    for queries, causal, window in product([1, 3], [False, True], [None, 2]):
        keys = tuple((line * 16, line * 16 + length) for line, length in enumerate([9, 4, 16]))
        layout = Layout(Layout.of([0, queries, 2 * queries, 3 * queries]).queries, keys, stride=16)
        generator = torch.Generator().manual_seed(0)
        shapes = [(3 * queries, HEADS, WIDTH), (50, HEADS, WIDTH), (50, HEADS, WIDTH)]
        tensors = [torch.randn(shape, generator=generator).double().requires_grad_() for shape in shapes]
        bias_values, trained = sample_bias(bias, layout)
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window, bias=bias_values)
        assert choose_kernel(*tensors, call).name == "dense_cache"
        (dense_cache,) = (kernel for kernel in KERNELS if kernel.name == "dense_cache")
        expected = run_kernel(REFERENCE, tensors, trained, call)
        assert max_error(run_kernel(dense_cache, tensors, trained, call), expected) <= 1e-12


def test_dense_cache_is_refused_with_a_reason() -> None:
    rows = torch.zeros(4, HEADS, WIDTH)
    for layout, reason in (
        (Layout(((0, 2), (2, 4)), ((0, 2), (2, 4))), "the keys do not lie in lines of one length"),
        (Layout(((0, 4),), ((1, 4),)), "the keys do not lie in lines of one length"),
        (Layout(((0, 1), (1, 4)), ((0, 2), (2, 4)), stride=2), "sequences have different numbers of queries"),
        (Layout(((0, 2), (2, 4)), ((0, 2), (2, 3)), stride=2), "some queries see no key"),
    ):
        with pytest.raises(HeedfulError, match=reason):
            attend(rows, rows, rows, layout, scale=1.0, causal=True, backend="dense_cache")


def test_gradients_of_keys_that_sequences_share_are_summed() -> None:
    layout = Layout(((0, 2), (2, 4)), ((0, 3), (0, 3)))
    tensors = [torch.randn(rows, HEADS, WIDTH, dtype=torch.float64).requires_grad_() for rows in (4, 3, 3)]
    call = AttentionArgs(layout=layout, scale=0.3)
    expected = run_kernel(REFERENCE, tensors, [], call)
    for kernel in CPU_KERNELS:
        assert max_error(run_kernel(kernel, tensors, [], call), expected) <= 1e-12
