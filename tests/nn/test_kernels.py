"""Every kernel against the reference: forward, backward, in every precision, with dropout; and how plans pack."""

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

OTHERS = ("varlen", "dense_cache", "native")  # tested beside; native: in test_cpu_ops.py
CPU_KERNELS = [kernel for kernel in KERNELS if kernel.name not in OTHERS]
HEADS, WIDTH, REACH = 2, 8, 5

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


def layout_of(queries: Sequence[int], keys: Sequence[int]) -> Layout:
    """From lengths."""
    return Layout.of([0, *accumulate(queries)], [0, *accumulate(keys)])


def draw(layout: Layout, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """q, k and v."""
    generator = torch.Generator().manual_seed(0)
    keys = layout.keys[-1][1] if layout.keys else 0
    tensors = [torch.randn(rows, HEADS, WIDTH, generator=generator) for rows in (layout.rows, keys, keys)]
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def draw_bias(kind: str, layout: Layout, dtype: torch.dtype = torch.float64) -> tuple[Bias | None, list[Tensor]]:
    """A bias, and what of it is trained."""
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
        block[:, 1:2], block[:, :, 2:3] = -math.inf, -math.inf  # a query that sees nothing, a key that nobody sees
        blocks.append(block.requires_grad_())
    return DenseBias(blocks=tuple(blocks)), blocks


def outcome(kernel: Any, tensors: list[Tensor], trained: list[Tensor], call: AttentionArgs) -> list[Tensor]:
    """The output, and the gradients of q, k, v and the bias for some fixed gradient of the output."""
    out = kernel.run(*tensors, call)
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(out.shape, generator=generator).to(out)
    leaves = [*tensors, *trained]
    grads = torch.autograd.grad(out, leaves, weights, allow_unused=True) if out.requires_grad else [None] * len(leaves)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


def worst(results: list[Tensor], truth: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry of its tensor where that is above 1."""
    assert [tensor.shape for tensor in results] == [tensor.shape for tensor in truth]
    differences = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1.0))
        for a, b in zip(results, truth, strict=True)
        if a.numel()
    ]
    assert not any(map(math.isnan, differences))
    return max(differences, default=0.0)


@pytest.mark.parametrize("bias", ["none", "table", "rows", "dense"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_kernel_equals_the_reference(lengths: tuple[list[int], list[int]], bias: str) -> None:
    for causal, window in product([False, True], [None, 0, 3, 1000]):
        layout = layout_of(*lengths)
        tensors, (bias_values, trained) = draw(layout), draw_bias(bias, layout)
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window, bias=bias_values)
        truth = outcome(REFERENCE, tensors, trained, call)
        for kernel in CPU_KERNELS:
            error = worst(outcome(kernel, tensors, trained, call), truth)
            assert error <= 1e-12, (kernel.name, causal, window, error)


@pytest.mark.parametrize("width", [8, 16, 48])
@pytest.mark.parametrize("kernel", [*KERNELS, None], ids=lambda kernel: kernel.name if kernel else "auto")
def test_values_of_another_width_than_keys(kernel: Any, width: int) -> None:
    layout, generator = layout_of([6], [11]), torch.Generator().manual_seed(0)
    shapes = ((6, HEADS, 32), (11, HEADS, 32), (11, HEADS, width))
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    call = AttentionArgs(layout=layout, scale=0.3)
    taken = choose_kernel(*tensors, call) if kernel is None else kernel
    if reason := taken.cannot(*tensors, call):
        assert taken.name in ("native", "varlen") and ("CUDA" in reason or "values" in reason or "no kernels" in reason)
        return
    assert worst(outcome(taken, tensors, [], call), outcome(REFERENCE, tensors, [], call)) <= 2e-6


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)
def test_a_layout_keeps_the_plans_of_its_calls_apart(kernel: Any) -> None:
    layout = layout_of([7, 23, 1, 12], [7, 23, 1, 12])
    for dtype, bias, causal, window in product(
        [torch.float64, torch.float32], ["none", "table", "rows", "dense"], [False, True], [None, 3]
    ):
        tensors, (bias_values, trained) = draw(layout, dtype), draw_bias(bias, layout, dtype)
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window, bias=bias_values)
        truth = outcome(REFERENCE, tensors, trained, call)
        error = worst(outcome(kernel, tensors, trained, call), truth)
        assert error <= (1e-12 if dtype == torch.float64 else 2e-6), (dtype, bias, causal, window, error)


def in_double(tensors: list[Tensor], bias_values: Bias | None) -> tuple[list[Tensor], Bias | None, list[Tensor]]:
    """Return the tensors and the bias in float64, and those that are trained."""
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


MIXED = ([300, 20, 7, 64, 70, 0, 1], [300, 20, 9, 64, 70, 4, 0])


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("bias", ["none", "table", "rows", "dense"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_in_lower_precision(kernel: Any, dtype: torch.dtype, causal: bool, bias: str) -> None:
    """float32 is right to 2e-6 of scale; bfloat16 is at most twice as far from the truth as the reference is."""
    layout = layout_of(*MIXED)
    tensors, (bias_values, trained) = draw(layout, dtype), draw_bias(bias, layout, dtype)
    exact, exact_bias, exact_trained = in_double(tensors, bias_values)
    truth = outcome(
        REFERENCE, exact, exact_trained, AttentionArgs(layout=layout, scale=0.3, causal=causal, bias=exact_bias)
    )
    call = AttentionArgs(layout=layout, scale=0.3, causal=causal, bias=bias_values)
    allowed = 2e-6 if dtype == torch.float32 else 2 * worst(outcome(REFERENCE, tensors, trained, call), truth)
    result = outcome(kernel, tensors, trained, call)
    assert {tensor.dtype for tensor in result} == {dtype}
    assert worst(result, truth) <= allowed


# -- dropout ----------------------------------------------------------------------------------------------

NOTHING, DROPOUT = torch.zeros(0, 1, 1), AttentionArgs(layout=layout_of([], []), scale=1.0, dropout=0.5)
DROPPING = [kernel for kernel in (*CPU_KERNELS, REFERENCE) if not kernel.cannot(NOTHING, NOTHING, NOTHING, DROPOUT)]


def reveal(layout: Layout, width: int) -> Tensor:
    """v that shows weights: the key at place j of its sequence is the j-th unit vector."""
    places = [j for first, last in layout.keys for j in range(last - first)]
    return torch.eye(width, dtype=torch.float64)[places][:, None].expand(-1, 4, -1).clone().requires_grad_()


@pytest.mark.parametrize("kernel", DROPPING, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("bias", ["none", "table"])
def test_dropout_drops_weights_after_the_softmax(kernel: Any, bias: str) -> None:
    p, width = round(0.3 * STEPS) / STEPS, 32
    layout = layout_of([32, 20, 5, 30], [32, 20, 9, 31])
    torch.manual_seed(1)
    q = torch.randn(layout.rows, 4, width, dtype=torch.float64).requires_grad_()
    k = torch.randn(layout.keys[-1][1], 4, width, dtype=torch.float64).requires_grad_()
    v = reveal(layout, width)
    bias_values = RelativeBias(table=torch.randn(4, 7, dtype=torch.float64)) if bias == "table" else None
    weights = REFERENCE.run(q, k, v, AttentionArgs(layout=layout, scale=0.2, bias=bias_values))
    out = kernel.run(q, k, v, AttentionArgs(layout=layout, scale=0.2, bias=bias_values, dropout=p))

    nonzero = out.detach() != 0
    expected = torch.where(nonzero, weights / (1 - p), 0.0)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)  # whole or gone; rows are not renormalised
    assert (out.sum(-1) - 1).abs().max() > 0.1
    there = weights.detach() > 0
    count, dropped = int(there.sum()), int((there & ~nonzero).sum())
    assert abs(dropped - count * p) < 5 * math.sqrt(count * p * (1 - p))

    gradient = torch.randn_like(out)
    by_kernel = torch.autograd.grad(out, [q, k, v], gradient)
    rows = []
    for b, ((start, stop), (first, last)) in enumerate(zip(layout.queries, layout.keys, strict=True)):
        scores = 0.2 * torch.einsum("ihd,jhd->hij", q[start:stop], k[first:last])
        if bias_values is not None:
            n, m = layout.sizes()[b]
            gap = torch.arange(m)[None] - torch.arange(m - n, m)[:, None]
            scores = scores + bias_values.table[:, gap.clamp(-3, 3) + 3]
        mask = nonzero[start:stop, :, : last - first].transpose(0, 1).double() / (1 - p)
        rows.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1) * mask, v[first:last]))
    for actual, expected_gradient in zip(
        by_kernel, torch.autograd.grad(torch.cat(rows), [q, k, v], gradient), strict=True
    ):
        torch.testing.assert_close(actual, expected_gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kernel", DROPPING, ids=lambda kernel: kernel.name)
def test_the_global_seed_decides_what_is_dropped(kernel: Any) -> None:
    layout = layout_of([20, 70], [20, 70])
    tensors, call = draw(layout), AttentionArgs(layout=layout, scale=0.3, dropout=0.5)
    outs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outs.append(kernel.run(*tensors, call))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_kernels_without_dropout_refuse_it() -> None:
    layout = layout_of([4], [4])
    assert "bmm" in {kernel.name for kernel in DROPPING}
    for kernel in CPU_KERNELS:
        if kernel not in DROPPING:
            with pytest.raises(HeedfulError, match="it has no dropout"):
                attend(*draw(layout), layout, scale=1.0, dropout=0.1, backend=kernel.name)


# -- plans ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 64), max_size=60))
def test_best_fit_packs_every_sequence_once(lengths: list[int]) -> None:
    numbers = list(range(len(lengths)))
    lines = best_fit(numbers, lengths, 64)
    assert sorted(number for line in lines for number in line) == numbers
    filled = [sum(lengths[number] for number in line) for line in lines]
    assert all(full <= 64 for full in filled)
    assert sum(2 * full <= 64 for full in filled) <= 1  # two lines that are half empty would have been one
    assert lines == best_fit(numbers, lengths, 64)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.none() | st.integers(0, 40)), max_size=20),
    st.sampled_from([1, 1 << 12, 1 << 20]),
)
def test_blocks_hold_every_sequence_once_and_keep_to_their_budget(
    sizes: list[tuple[int, int | None]], budget: int
) -> None:
    layout = layout_of([n for n, _ in sizes], [n if m is None else m for n, m in sizes])
    blocks = list(share_lines(layout, budget=budget))
    assert sorted(number for lines in blocks for line in lines for number in line) == list(range(len(sizes)))
    for lines in blocks:
        n, m = (
            max(sum(stop - start for start, stop in (spans[number] for number in line)) for line in lines)
            for spans in (layout.queries, layout.keys)
        )
        assert len(lines) == 1 or len(lines) * n * m <= budget


# -- an accelerator ---------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_varlen_equals_the_reference() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for lengths, causal, window in product(LENGTHS.values(), [False, True], [None, 0, 3, 1000]):
        layout = layout_of(*lengths)
        tensors = draw(layout, torch.bfloat16, "cuda")
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window)
        truth = outcome(REFERENCE, in_double(tensors, None)[0], [], call)
        allowed = 2 * worst(outcome(REFERENCE, tensors, [], call), truth) + 2**-9  # it rounds its weights as well
        (varlen,) = (kernel for kernel in KERNELS if kernel.name == "varlen")
        assert worst(outcome(varlen, tensors, [], call), truth) <= allowed, (lengths, causal, window)
    with pytest.raises(HeedfulError, match=r"in float16 and bfloat16, not in torch\.float32"):
        attend(*draw(layout, torch.float32, "cuda"), layout, scale=0.3, backend="varlen")


def test_a_table_is_spread_over_the_pairs_of_a_block() -> None:
    table = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for queries, keys in ((1, 1), (3, 5), (6, 2), (9, 9)):
        distances = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        spread, indexed = _spread_table(table, queries, keys), table[:, distances.clamp(-3, 3) + 3][None]
        assert torch.equal(spread, indexed)
        weights = torch.randn(spread.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients = [torch.autograd.grad(bias, table, weights)[0] for bias in (spread, indexed)]
        torch.testing.assert_close(*gradients, atol=1e-13, rtol=0)


def test_varlen_wants_cuda() -> None:
    layout = layout_of([3], [3])
    with pytest.raises(HeedfulError, match='"varlen" cannot take this call: it runs on CUDA only'):
        attend(*draw(layout, torch.bfloat16), layout, scale=0.3, backend="varlen")


@pytest.mark.parametrize("bias", ["none", "table"])
def test_lined_equals_the_reference(bias: str) -> None:
    """Keys in lines with room behind them, which nobody sees."""
    for queries, causal, window in product([1, 3], [False, True], [None, 2]):
        keys = tuple((line * 16, line * 16 + length) for line, length in enumerate([9, 4, 16]))
        layout = Layout(Layout.of([0, queries, 2 * queries, 3 * queries]).queries, keys, stride=16)
        generator = torch.Generator().manual_seed(0)
        shapes = [(3 * queries, HEADS, WIDTH), (50, HEADS, WIDTH), (50, HEADS, WIDTH)]
        tensors = [torch.randn(shape, generator=generator).double().requires_grad_() for shape in shapes]
        bias_values, trained = draw_bias(bias, layout)
        call = AttentionArgs(layout=layout, scale=0.3, causal=causal, window=window, bias=bias_values)
        assert choose_kernel(*tensors, call).name == "dense_cache"
        (lined,) = (kernel for kernel in KERNELS if kernel.name == "dense_cache")
        assert worst(outcome(lined, tensors, trained, call), outcome(REFERENCE, tensors, trained, call)) <= 1e-12


def test_when_keys_are_not_in_lines() -> None:
    rows = torch.zeros(4, HEADS, WIDTH)
    for layout, reason in (
        (Layout(((0, 2), (2, 4)), ((0, 2), (2, 4))), "the keys do not lie in lines of one length"),
        (Layout(((0, 4),), ((1, 4),)), "the keys do not lie in lines of one length"),
        (Layout(((0, 1), (1, 4)), ((0, 2), (2, 4)), stride=2), "sequences have different numbers of queries"),
        (Layout(((0, 2), (2, 4)), ((0, 2), (2, 3)), stride=2), "some queries see no key"),
    ):
        with pytest.raises(HeedfulError, match=reason):
            attend(rows, rows, rows, layout, scale=1.0, causal=True, backend="dense_cache")


def test_keys_that_several_sequences_share_have_their_gradients_summed() -> None:
    layout = Layout(((0, 2), (2, 4)), ((0, 3), (0, 3)))
    tensors = [torch.randn(rows, HEADS, WIDTH, dtype=torch.float64).requires_grad_() for rows in (4, 3, 3)]
    call = AttentionArgs(layout=layout, scale=0.3)
    truth = outcome(REFERENCE, tensors, [], call)
    for kernel in CPU_KERNELS:
        assert worst(outcome(kernel, tensors, [], call), truth) <= 1e-12
