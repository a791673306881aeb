"""Attention: the reference against plain loops, properties of every kernel, and the choice of a kernel."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate

import jaxtyping
import pytest
import torch
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.nn import attend as attend_module
from heedful.nn.attend import KERNELS, REFERENCE, attend, choose_kernel, explain
from heedful.nn.kernels import Kernel
from heedful.nn.layout import AttentionArgs, Bias, DenseBias, Layout, RelativeBias

TESTED_ELSEWHERE = ("varlen", "dense_cache", "native", "flash", "grouped", "flex")  # in test_kernels.py and others
CPU_KERNELS = [kernel.name for kernel in (*KERNELS, REFERENCE) if kernel.name not in TESTED_ELSEWHERE]
Tensors = tuple[Tensor, Tensor, Tensor]


def make_layout(queries: Sequence[int], keys: Sequence[int] | None = None) -> Layout:
    """Make a layout from the numbers of query rows and of key rows of each sequence; by default, they are equal."""
    bounds = [[0, *accumulate(lengths)] for lengths in (queries, queries if keys is None else keys)]
    return Layout.of(*bounds)


def sample_qkv(layout: Layout, heads: int = 2, width: int = 3, seed: int = 0, scale: float = 1.0) -> Tensors:
    """Sample q, k and v for a layout; q is multiplied by `scale`."""
    generator = torch.Generator().manual_seed(seed)
    rows = (layout.rows, *[layout.keys[-1][1] if layout.keys else 0] * 2)
    q, k, v = (torch.randn(n, heads, width, dtype=torch.float64, generator=generator) for n in rows)
    return (scale * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()


def sample_bias(kind: str, layout: Layout, heads: int = 2, seed: int = 1) -> Bias | None:
    """Sample a bias.

    Args:
        kind: "none"; "table", a RelativeBias for all rows; "rows", one for each query row; "dense", a DenseBias that
            masks random pairs, query 1 for all keys, and key 2 for all queries.
        layout: Layout of the call.
        heads: Number of heads.
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    if kind == "none":
        return None
    if kind == "table":
        return RelativeBias(table=normal(heads, 7).requires_grad_())
    if kind == "rows":
        return RelativeBias(table=normal(layout.rows, heads, 7).requires_grad_())
    blocks = []
    for n, m in layout.sizes():
        block = normal(heads, n, m).masked_fill(torch.rand(n, m, generator=generator) < 0.3, -math.inf)
        block[:, 1:2], block[:, :, 2:3] = -math.inf, -math.inf
        blocks.append(block.requires_grad_())
    return DenseBias(blocks=tuple(blocks))


BIASES = ["none", "table", "rows", "dense"]
# numbers of query rows and of key rows of each sequence
RAGGED, EMPTY = ([3, 7, 1, 5], None), ([0, 4, 0], None)
CROSS, NO_KEYS = ([5, 2, 4], [2, 6, 4]), ([3, 2, 0], [0, 4, 3])


# -- the reference equals the formula ---------------------------------------------------------------------


def by_loops(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> list[list[list[float]]]:
    """Compute softmax(scale q k + bias) v by loops over numbers; the last query is at the position of the last key."""
    out = []
    for b, ((start, stop), (first, last)) in enumerate(zip(call.layout.queries, call.layout.keys, strict=True)):
        n, m = stop - start, last - first
        for i in range(n):
            position = i + m - n
            heads = []
            for h in range(q.shape[1]):
                logits = {}
                for j in range(m):
                    logit = call.scale * sum(x * y for x, y in zip(q[start + i, h], k[first + j, h], strict=True))
                    match call.bias:
                        case RelativeBias(table=table):
                            bias_row = table if table.ndim == 2 else table[start + i]
                            logit = logit + bias_row[h, 3 + min(3, max(-3, j - position))]
                        case DenseBias(blocks=blocks):
                            logit = logit + blocks[b][h, i, j]
                    outside_window = call.window is not None and abs(j - position) > call.window
                    hidden = (call.causal and j > position) or outside_window
                    if not hidden and logit > -math.inf:
                        logits[j] = float(logit)
                max_logit = max(logits.values(), default=0.0)
                powers = {j: math.exp(logit - max_logit) for j, logit in logits.items()}
                total = sum(powers.values())
                heads.append(
                    [sum(power / total * float(v[first + j, h, d]) for j, power in powers.items()) for d in range(3)]
                )
            out.append(heads)
    return out


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 0), (False, 2), (True, 2)])
def test_reference_equals_plain_loops(bias: str, causal: bool, window: int | None) -> None:
    for queries, keys in (RAGGED, EMPTY, CROSS, NO_KEYS):
        layout = make_layout(queries, keys)
        call = AttentionArgs(layout=layout, scale=0.7, causal=causal, window=window, bias=sample_bias(bias, layout))
        tensors = [tensor.detach() for tensor in sample_qkv(layout)]
        with torch.no_grad():
            expected = torch.tensor(by_loops(*tensors, call), dtype=torch.float64)
            torch.testing.assert_close(REFERENCE.run(*tensors, call), expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 1)])
def test_gradients_of_the_reference_equal_finite_differences(bias: str, causal: bool, window: int | None) -> None:
    layout = make_layout([3, 0, 4, 1], [5, 2, 3, 0])
    bias_values = sample_bias(bias, layout)
    tables = (bias_values.table,) if isinstance(bias_values, RelativeBias) else ()

    def run(*tensors: Tensor) -> Tensor:
        bias = RelativeBias(table=tensors[3]) if tables else bias_values
        return REFERENCE.run(
            *tensors[:3], AttentionArgs(layout=layout, scale=0.7, causal=causal, window=window, bias=bias)
        )

    assert torch.autograd.gradcheck(run, (*sample_qkv(layout), *tables), atol=1e-7)


def test_gradients_of_a_dense_bias_equal_finite_differences() -> None:
    layout = make_layout([3, 2])
    tensors, generator = sample_qkv(layout), torch.Generator().manual_seed(1)
    blocks = [torch.randn(2, n, n, dtype=torch.float64, generator=generator).requires_grad_() for n in (3, 2)]

    def run(*blocks: Tensor) -> Tensor:
        return REFERENCE.run(*tensors, AttentionArgs(layout=layout, scale=0.7, bias=DenseBias(blocks=blocks)))

    assert torch.autograd.gradcheck(run, blocks, atol=1e-7)


# -- properties of every kernel ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [*CPU_KERNELS, "auto"])
@pytest.mark.parametrize("bias", ["none", "table", "dense"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_groups_of_query_heads_share_keys_and_values(backend: str, bias: str, kv_heads: int) -> None:
    """Shared heads of k and v equal a copy for each query head; their gradient is the sum of those of the copies."""
    layout = make_layout([5, 2, 4], [2, 6, 4])
    q, k, v = (tensor.detach().requires_grad_() for tensor in sample_qkv(layout, heads=4))
    bias_values = sample_bias(bias, layout, heads=4)
    shared = [tensor.detach()[:, :kv_heads].requires_grad_() for tensor in (k, v)]
    copies = [tensor.detach()[:, [n * kv_heads // 4 for n in range(4)]].requires_grad_() for tensor in shared]
    out = attend(q, *shared, layout, scale=0.7, causal=True, bias=bias_values, backend=backend)
    expected = REFERENCE.run(q, *copies, AttentionArgs(layout=layout, scale=0.7, causal=True, bias=bias_values))
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=0)
    out_gradient = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    gradients = torch.autograd.grad((out * out_gradient).sum(), [q, *shared])
    expected_gradients = torch.autograd.grad((expected * out_gradient).sum(), [q, *copies])
    torch.testing.assert_close(gradients[0], expected_gradients[0], atol=1e-12, rtol=0)
    for gradient, copy_gradients in zip(gradients[1:], expected_gradients[1:], strict=True):
        sums = copy_gradients.unflatten(1, (kv_heads, -1)).sum(2)
        torch.testing.assert_close(gradient, sums, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", CPU_KERNELS)
def test_a_query_without_a_key_has_the_result_0_and_finite_gradients(backend: str) -> None:
    layout = make_layout([4, 2, 3], [2, 0, 3])  # causal: the first two queries precede every key
    q, k, v = sample_qkv(layout)
    blocks = [torch.zeros(2, n, m, dtype=torch.float64) for n, m in layout.sizes()]
    blocks[2][:, 1] = -math.inf
    for block in blocks:
        block.requires_grad_()
    out = attend(q, k, v, layout, scale=0.5, causal=True, bias=DenseBias(blocks=tuple(blocks)), backend=backend)
    without_key = [0, 1, 4, 5, 7]
    assert out[without_key].eq(0).all() and out[[2, 3, 6, 8]].ne(0).all()
    grads = torch.autograd.grad(out.sum(), [q, k, v, *blocks], allow_unused=True)
    assert all(grad is None or grad.isfinite().all() for grad in grads)
    assert grads[0][without_key].eq(0).all()


@pytest.mark.parametrize("backend", CPU_KERNELS)
@pytest.mark.parametrize("constant", [-10_000.0, 1000.0, 1e6])
def test_a_constant_added_to_all_logits_changes_nothing(backend: str, constant: float) -> None:
    layout = make_layout(*RAGGED)
    tensors = sample_qkv(layout)
    table = torch.zeros(2, 7, dtype=torch.float64)
    plain, shifted = (
        attend(*tensors, layout, scale=0.5, causal=True, bias=RelativeBias(table=values), backend=backend)
        for values in (table, table + constant)
    )
    torch.testing.assert_close(plain, shifted, atol=4 * abs(constant) * 2**-52, rtol=0)


@pytest.mark.parametrize("backend", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_huge_logits_select_the_largest_and_results_are_finite(backend: str, dtype: torch.dtype) -> None:
    layout = make_layout([2, 1], [3000, 4])
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in sample_qkv(layout, scale=1e6))
    out = attend(q, k, v, layout, scale=1.0, backend=backend)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), [q, k, v]))
    best = torch.einsum("ihd,jhd->ihj", q.double(), k.double())[2, :, 3000:].argmax(-1)
    torch.testing.assert_close(out[2], v[3000 + best, torch.arange(2)], atol=0, rtol=1e-2)


@pytest.mark.parametrize("backend", CPU_KERNELS)
@pytest.mark.parametrize("bias", BIASES)
def test_a_sequence_has_the_same_result_in_any_batch(backend: str, bias: str) -> None:
    layout = make_layout([9, 70, 0, 1, 17], [9, 66, 0, 4, 17])
    q, k, v = sample_qkv(layout)
    bias_values = sample_bias(bias, layout)
    batch_result = attend(q, k, v, layout, scale=0.5, causal=True, bias=bias_values, backend=backend)
    for number, ((start, stop), (first, last)) in enumerate(zip(layout.queries, layout.keys, strict=True)):
        sequence_bias = bias_values
        if isinstance(bias_values, DenseBias):
            sequence_bias = DenseBias(blocks=bias_values.blocks[number : number + 1])
        elif isinstance(bias_values, RelativeBias) and bias_values.table.ndim == 3:
            sequence_bias = RelativeBias(table=bias_values.table[start:stop])
        result = attend(
            q[start:stop],
            k[first:last],
            v[first:last],
            make_layout([stop - start], [last - first]),
            scale=0.5,
            causal=True,
            bias=sequence_bias,
            backend=backend,
        )
        torch.testing.assert_close(result, batch_result[start:stop], atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", CPU_KERNELS)
@pytest.mark.parametrize("bias", ["none", "table"])
def test_sequences_do_not_influence_each_other(backend: str, bias: str) -> None:
    layout = make_layout([9, 20, 5, 70, 66])
    q, k, v = sample_qkv(layout)
    bias_values = sample_bias(bias, layout)

    def run(*tensors: Tensor) -> Tensor:
        return attend(*tensors, layout, scale=0.5, bias=bias_values, backend=backend)

    start, stop = layout.queries[1]
    other_rows = [row for row in range(layout.rows) if not start <= row < stop]
    changed = [tensor.detach().clone() for tensor in (q, k, v)]
    for tensor in changed:
        tensor[start + 3] = 50.0
    out = run(q, k, v)
    assert torch.equal(out[other_rows], run(*changed)[other_rows])
    for grad in torch.autograd.grad(out[start:stop].square().sum(), [q, k, v]):
        assert grad[other_rows].eq(0).all() and grad[start:stop].ne(0).any()


@pytest.mark.parametrize("backend", CPU_KERNELS)
def test_permuted_rows_have_permuted_results(backend: str) -> None:
    layout = make_layout([6, 8])
    q, k, v = sample_qkv(layout)
    order = torch.cat([torch.randperm(6), 6 + torch.randperm(8)])
    out = attend(q, k, v, layout, scale=0.5, backend=backend)
    permuted = attend(q[order], k[order], v[order], layout, scale=0.5, backend=backend)
    torch.testing.assert_close(permuted, out[order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", CPU_KERNELS)
def test_a_layout_serves_inference_and_then_training(backend: str) -> None:
    layout = make_layout([9, 20, 5])
    q, k, v = sample_qkv(layout)
    with torch.inference_mode():
        inference = attend(q, k, v, layout, scale=0.5, causal=True, backend=backend)
    training = attend(q, k, v, layout, scale=0.5, causal=True, backend=backend)
    torch.autograd.grad(training.sum(), [q, k, v])
    torch.testing.assert_close(inference.clone(), training.detach(), atol=1e-12, rtol=0)


# -- the choice of a kernel -------------------------------------------------------------------------------


def make_call(dropout: float = 0.0) -> tuple[Tensors, AttentionArgs]:
    """Return q, k and v, and the other arguments of a call of attention."""
    layout = make_layout(*RAGGED)
    return sample_qkv(layout), AttentionArgs(layout=layout, scale=0.5, dropout=dropout)


def picky_kernel(cannot: str = "", slow: str = "") -> Kernel:
    """Return a kernel with these reasons against it; otherwise it is the reference."""
    return Kernel(name="picky", cannot=lambda q, k, v, call: cannot, slow=lambda q, k, v, call: slow, run=REFERENCE.run)


@pytest.mark.parametrize(("name", "hint"), [("refernce", ' (did you mean "reference"?)'), ("xyzzy", "")])
def test_an_unknown_kernel_is_refused(name: str, hint: str) -> None:
    (q, k, v), call = make_call()
    known = ", ".join(kernel.name for kernel in (*KERNELS, REFERENCE))
    with pytest.raises(HeedfulError) as caught:
        choose_kernel(q, k, v, call, name)
    assert str(caught.value) == f'"{name}" is no attention kernel{hint}; known: auto, {known}'


def verdicts(text: str) -> dict[str, str]:
    """Return the verdict on each kernel, by its name, in a text of `explain`."""
    return dict(re.split(" {2,}| (?=no:|could|taken)", line, maxsplit=1) for line in text.splitlines())


def test_a_named_kernel_that_cannot_compute_the_call_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_module, "KERNELS", (picky_kernel(cannot="it wants float8"),))
    (q, k, v), call = make_call()
    text = 'the attention kernel "picky" cannot take this call: it wants float8; use backend="auto"'
    with pytest.raises(HeedfulError, match=f"^{re.escape(text)}$"):
        attend(q, k, v, call.layout, scale=0.5, backend="picky")
    assert choose_kernel(q, k, v, call) is REFERENCE
    assert verdicts(explain(q, k, v, call)) == {"picky": "no: it wants float8", "reference": "taken"}


def test_a_slow_kernel_is_used_only_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = picky_kernel(slow="it sleeps")
    monkeypatch.setattr(attend_module, "KERNELS", (kernel,))
    (q, k, v), call = make_call()
    assert choose_kernel(q, k, v, call) is REFERENCE
    assert choose_kernel(q, k, v, call, "picky") is kernel
    assert verdicts(explain(q, k, v, call)) == {"picky": "no: it sleeps", "reference": "taken"}


def test_the_first_kernel_that_can_compute_the_call_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = picky_kernel()
    monkeypatch.setattr(attend_module, "KERNELS", (kernel,))
    (q, k, v), call = make_call()
    assert choose_kernel(q, k, v, call) is kernel
    assert verdicts(explain(q, k, v, call)) == {"picky": "taken", "reference": "could, but one above is preferred"}


def test_layers_that_call_alike_share_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[float, int | None]] = []
    choose = attend_module.choose_kernel

    def counted(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, backend: str = "auto") -> Kernel:
        chosen.append((args.dropout, args.window))
        return choose(q, k, v, args, backend)

    monkeypatch.setattr(attend_module, "choose_kernel", counted)
    for layout in (make_layout([5, 6]), make_layout([3, 8])):
        tensors = sample_qkv(layout)
        for window in (None, 2, None, 2):
            attend(*tensors, layout, scale=0.5, window=window)
        attend(*tensors, layout, scale=0.5, bias=sample_bias("table", layout))
        attend(*tensors, layout, scale=0.5, dropout=0.5)
    assert chosen == [(0.0, None), (0.0, 2), (0.0, None), (0.5, None)] * 2


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_explain_names_every_kernel_once_and_the_chosen_one(dropout: float) -> None:
    (q, k, v), call = make_call(dropout)
    text = explain(q, k, v, call)
    report, names = verdicts(text), [kernel.name for kernel in (*KERNELS, REFERENCE)]
    assert list(report) == names and text.count("\n") == len(names) - 1
    assert [name for name, verdict in report.items() if verdict == "taken"] == [choose_kernel(q, k, v, call).name]
    assert all(verdict == "taken" or verdict.startswith(("no: ", "could, ")) for verdict in report.values())


@pytest.mark.parametrize(
    ("q", "k", "v", "layout", "message"),
    [
        ((8, 4, 32), (8, 3, 32), (8, 3, 32), Layout.of([0, 8]), r"q is \[8, 4, 32\], k \[8, 3, 32\] and v"),
        ((8, 4, 32), (8, 8, 32), (8, 8, 32), Layout.of([0, 8]), "where kv heads divides heads"),
        ((8, 4, 32), (8, 0, 32), (8, 0, 32), Layout.of([0, 8]), "where kv heads divides heads"),
        ((8, 4, 32), (8, 2, 32), (8, 1, 32), Layout.of([0, 8]), r"v \[8, 1, 32\]; expected"),
        ((8, 4, 32), (8, 4, 16), (8, 4, 16), Layout.of([0, 8]), r"k \[8, 4, 16\] and v \[8, 4, 16\]; expected"),
        ((8, 4, 32), (8, 4, 32), (5, 4, 32), Layout.of([0, 8]), r"v \[5, 4, 32\]; expected"),
        ((8, 32), (8, 32), (8, 32), Layout.of([0, 8]), r"expected \[queries, heads, width\]"),
        ((8, 4, 32), (8, 4, 32), (8, 4, 32), Layout.of([0, 5]), "has 5 query rows and key rows up to 5"),
        ((8, 4, 32), (8, 4, 32), (8, 4, 32), Layout.of([0, 3, 12]), "has 12 query rows .* but q has 8"),
        ((8, 4, 32), (8, 4, 32), (8, 4, 32), Layout.of([0, 3, 8], [0, 3, 9]), "key rows up to 9"),
        ((8, 4, 32), (8, 4, 32), (8, 4, 32), Layout.of([0, 9, 8]), "sequence 1 has the query rows 9 to 8"),
        ((8, 4, 32), (8, 4, 32), (8, 4, 32), Layout(((0, 3), (4, 8)), ((0, 3), (3, 8))), "expected query rows from 3"),
        ((8, 4, 32), (8, 4, 32), (8, 4, 32), Layout(((0, 8),), ((-1, 8),)), "key rows -1 to 8"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_shapes_that_do_not_fit_are_refused(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], layout: Layout, message: str, backend: str
) -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # jaxtyping checks shapes in tests only, before our own checks
    try:
        with pytest.raises(HeedfulError, match=message):
            attend(*(torch.zeros(shape) for shape in (q, k, v)), layout, scale=1.0, backend=backend)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
