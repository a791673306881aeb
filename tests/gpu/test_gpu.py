"""Tests that need a GPU: every CUDA kernel against float64, models, learning, compiled blocks.

scripts/test tests/gpu        # all of it, on a machine with a CUDA device
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heedful
from heedful.nn.attend import REFERENCE
from heedful.nn.compiled_attention import attend_by_operator, operator_bounds
from heedful.nn.cuda_attention import CUDA
from heedful.nn.kernels import KERNELS, Kernel
from heedful.nn.layout import (
    AttentionArgs,
    Bias,
    DenseBias,
    Layout,
    RelativeBias,
    allowed_pairs,
    relative_distances,
)
from heedful.packed import Packed
from heedful.train.fit import Reporter
from heedful.train.optim import AdamW, Optimizer
from heedful.train.trainer import Step, Trainer
from tests.nn.test_kernels import HEADS, LENGTHS, make_layout, max_error, run_kernel, sample_bias
from tests.support.generated_data import classification_rows, finetune_tiny, write_splits
from tests.support.tiny_models import random_sequences, save_tiny
from tests.train.test_compiled import IN_GRAPH_FAMILIES, check_compiled_blocks, learn_in_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # what PyTorch's compiler has to say about a device differs with the device
]
BY_NAME = {kernel.name: kernel for kernel in (*CUDA, *KERNELS)}
GRID = list(product((False, True), (None, 0, 3, 1000)))  # causal, window
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}  # of sums that are made in another order; halves: see `allowed`
TABLE = {torch.float32: 1e-4}  # where an entry of a table is added to hundreds of scores, and its gradient is their sum
KINDS = {  # which precisions each kernel is checked in
    "flash": (torch.bfloat16, torch.float16),
    "varlen": (torch.bfloat16, torch.float16),
    "grouped": (torch.float64, torch.float32, torch.bfloat16),
    "fused": (torch.float64, torch.float32, torch.bfloat16),
    "bmm": (torch.float64, torch.float32, torch.bfloat16),
    "flex": (torch.float32, torch.bfloat16),
}
BIASES = {"flash": ("none",), "varlen": ("none",), "flex": ("none", "table", "rows")}  # of kernels that lack some


def drawn(layout: Layout, dtype: torch.dtype, width: int) -> list[Tensor]:
    """q, k and v on the device."""
    generator = torch.Generator().manual_seed(0)
    keys = layout.keys[-1][1] if layout.keys else 0
    tensors = [torch.randn(rows, HEADS, width, generator=generator) for rows in (layout.rows, keys, keys)]
    return [tensor.to("cuda", dtype).requires_grad_() for tensor in tensors]


def moved(bias: Bias | None, dtype: torch.dtype) -> tuple[Bias | None, list[Tensor]]:
    """Move a bias to the device in that precision; return it and its trained tensors."""

    def there(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cuda", dtype).requires_grad_()

    match bias:
        case RelativeBias(table=table):
            table = there(table)
            return RelativeBias(table=table), [table]
        case DenseBias(blocks=blocks):
            blocks = tuple(map(there, blocks))
            return DenseBias(blocks=blocks), list(blocks)
    return None, []


def check(kernel: Kernel, layout: Layout, bias: str, dtype: torch.dtype, width: int, **more: Any) -> bool:
    """Compare forward and backward of one call with the reference in float64 on numbers of the same precision.

    Returns whether the kernel computes such a call.
    """
    tensors, (bias_values, trained) = drawn(layout, dtype, width), moved(sample_bias(bias, layout)[0], dtype)
    if not len(tensors[0]) or not len(tensors[1]):
        return False  # attend answers before it takes a kernel
    call = AttentionArgs(layout=layout, scale=0.3, bias=bias_values, **more)
    if kernel.cannot(*tensors, call):
        return False
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact_bias, exact_trained = moved(bias_values, torch.float64)
    truth = run_kernel(
        REFERENCE, exact, exact_trained, AttentionArgs(layout=layout, scale=0.3, bias=exact_bias, **more)
    )
    results = run_kernel(kernel, tensors, trained, call)
    assert {result.dtype for result in results} == {dtype}
    allowed = EXACT.get(dtype) if bias != "table" else TABLE.get(dtype, EXACT.get(dtype))
    if allowed is None:  # twice the reference's own error, and its rounding
        factor = 4 if bias == "table" else 2  # a gradient of the table is a sum of hundreds of rounded numbers
        allowed = factor * max_error(run_kernel(REFERENCE, tensors, trained, call), truth) + torch.finfo(dtype).eps
    error = max_error(results, truth)
    assert error <= allowed, (kernel.name, bias, dtype, more, layout.sizes(), error, allowed)
    return True


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, several in KINDS.items() for dtype in several])
@pytest.mark.parametrize("bias", ["none", "table", "rows", "dense"])
def test_every_kernel_equals_the_reference(name: str, dtype: torch.dtype, bias: str) -> None:
    calls = GRID if name != "flex" else GRID[::3]  # it is compiled for each number of rows
    torch._dynamo.reset()
    several = [LENGTHS["ragged"], LENGTHS["lines shared and not"]] if name == "flex" else LENGTHS.values()
    computed = [
        check(BY_NAME[name], make_layout(*lengths), bias, dtype, 16, causal=causal, window=window)
        for lengths in several
        for causal, window in calls
    ]
    assert any(computed) == (bias in BIASES.get(name, (bias,)))


@pytest.mark.parametrize("name", ["flash", "varlen", "grouped"])
def test_widths_of_heads(name: str) -> None:
    for width in (8, 40, 64, 96, 128, 256):
        layout = make_layout([130, 7, 250], [130, 9, 250])
        assert check(BY_NAME[name], layout, "none", torch.bfloat16, width, causal=True) or width == 256


@pytest.mark.parametrize("name", ["flash", "grouped"])
@pytest.mark.parametrize("bias", ["none", "table"])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 7), (True, 7)])
def test_dropout_drops_weights_after_the_softmax(name: str, bias: str, causal: bool, window: int | None) -> None:
    kernel, p, width = BY_NAME[name], 0.25, 64
    mask: dict[str, Any] = {"causal": causal, "window": window}
    layout = make_layout([64, 40, 5, 60] * 4, [64, 40, 9, 61] * 4)
    generator = torch.Generator().manual_seed(1)
    shapes = [(layout.rows, 4, width), (layout.keys[-1][1], 4, width)]
    q, k = (torch.randn(shape, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for shape in shapes)
    places = [j for first, last in layout.keys for j in range(last - first)]
    v = torch.eye(width)[places][:, None].expand(-1, 4, -1).contiguous().to("cuda", torch.bfloat16).requires_grad_()
    bias_values = RelativeBias(table=torch.randn(4, 7, generator=generator).to("cuda")) if bias == "table" else None
    call = AttentionArgs(layout=layout, scale=0.1, bias=bias_values, dropout=p, **mask)
    if kernel.cannot(q, k, v, call):
        pytest.skip(kernel.cannot(q, k, v, call))
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    double = None if bias_values is None else RelativeBias(table=bias_values.table.double())
    weights = REFERENCE.run(*exact, AttentionArgs(layout=layout, scale=0.1, bias=double, **mask)).detach()
    outs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outs.append(kernel.run(q, k, v, call))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])

    out, nonzero = outs[2], outs[2].detach() != 0
    there = weights > 1e-3  # what is smaller may be rounded to nothing
    assert (out.detach().double() - torch.where(nonzero, weights / (1 - p), 0.0))[there].abs().max() < 0.02
    count, dropped = int(there.sum()), int((there & ~nonzero).sum())
    assert abs(dropped - count * p) < 5 * math.sqrt(count * p * (1 - p))

    gradient = torch.randn(out.shape, generator=generator).to(out)
    gradients = torch.autograd.grad(out, [q, k, v], gradient)
    rows = []
    for (start, stop), (first, last) in zip(layout.queries, layout.keys, strict=True):
        n, m = stop - start, last - first
        scores = 0.1 * torch.einsum("ihd,jhd->hij", exact[0][start:stop], exact[1][first:last])
        distances = relative_distances(n, m, q.device)
        if double is not None:
            scores = scores + double.table[:, distances.clamp(-3, 3) + 3]
        scores = scores.masked_fill(~allowed_pairs(distances, call), -math.inf)
        factors = nonzero[start:stop, :, :m].transpose(0, 1).double() / (1 - p)
        rows.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1) * factors, exact[2][first:last]))
    right = torch.autograd.grad(torch.cat(rows), exact, gradient.double())
    assert max_error(list(gradients), list(right)) < 0.03


# -- models -------------------------------------------------------------------------------------------------------

ARCHITECTURES = {"bert": "BertForMaskedLM", "modernbert": "ModernBertForMaskedLM", "gpt2": "GPT2LMHeadModel"}
ARCHITECTURES |= {"xlnet": "XLNetLMHeadModel", "t5": "T5ForConditionalGeneration", "qwen3": "Qwen3ForCausalLM"}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_models_learn_the_same(family: str, tmp_path: Path) -> None:
    """float32 rows and gradients on the device, beside float64 on the CPU."""
    save_tiny(tmp_path, family, ARCHITECTURES[family])
    ids, types = random_sequences(family)
    outcomes = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        loaded = heedful.load(tmp_path, dtype=dtype).to(device).eval()
        batch = Packed.of(ids, types).to(device)
        rows = loaded.hidden_states(batch, batch) if loaded.needs_target else loaded.hidden_states(batch)
        rows.double().square().mean().backward()
        gradients = [parameter.grad for parameter in loaded.model.parameters() if parameter.grad is not None]
        outcomes.append([rows.detach().cpu().double(), *(gradient.cpu().double() for gradient in gradients)])
    for right, mine in zip(*outcomes, strict=True):
        assert (right - mine).abs().max() <= 1e-4 * right.abs().max().clamp(min=1e-3)


def test_the_optimizer_moves_the_same() -> None:
    results = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        tensors = {name: torch.randn(shape, generator=generator).to(device) for name, shape in _SHAPES.items()}
        optimizer = Optimizer(tensors, AdamW(lr=1e-2))
        for _ in range(5):
            gradients = {
                name: torch.randn(tensor.shape, generator=generator).to(device) for name, tensor in tensors.items()
            }
            norm = optimizer.grad_norm(gradients, scale=0.5)
            optimizer.step(gradients, lr_factor=0.7, scale=0.5, grad_norm=norm)
        results.append([tensor.cpu() for tensor in tensors.values()])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_cpu, on_gpu, atol=1e-6, rtol=1e-5)


_SHAPES = {"encoder.blocks.0.mlp.up.weight": (40, 30), "encoder.blocks.0.mlp.up.bias": (40,)}


@pytest.mark.timeout(420)
def test_compiled_blocks_learn_the_same(tmp_path: Path) -> None:
    """In float64, where attention is computed between the two parts of a block."""
    check_compiled_blocks(tmp_path, "cuda")


@pytest.mark.parametrize("family", IN_GRAPH_FAMILIES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_compiled_blocks_are_one_graph(family: str, dropout: float, tmp_path: Path) -> None:
    learn_in_graph(tmp_path, family, "cuda", dropout)


@pytest.mark.timeout(420)
def test_compiled_blocks_that_are_one_graph_learn_the_same(tmp_path: Path) -> None:
    learn_in_graph(tmp_path, "bert", "cuda", backend="inductor", timeout=400)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 3), (True, 3)])
def test_the_operator_of_compiled_blocks_equals_the_reference(causal: bool, window: int | None, dropout: float) -> None:
    layout = make_layout([130, 7, 0, 250], [130, 7, 0, 250])
    q, k, v = drawn(layout, torch.bfloat16, 64)
    bounds = operator_bounds(layout, torch.empty(387, 128, device="cuda", dtype=torch.bfloat16), 64)
    assert bounds is not None
    call = AttentionArgs(layout=layout, scale=0.1, causal=causal, window=window, dropout=dropout)
    kernel = BY_NAME["flash" if dropout else "varlen"]
    outcomes = []
    for run in (
        lambda: kernel.run(q, k, v, call),
        lambda: attend_by_operator(q, k, v, bounds, scale=0.1, causal=causal, window=window, dropout=dropout),
    ):
        torch.manual_seed(3)
        out = run()
        outcomes.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    for usual, mine in zip(*outcomes, strict=True):
        assert (usual.float() - mine.float()).abs().max() <= 0.02 * usual.float().abs().max()


# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", ["true", "false"])
def test_a_run_resumes_and_serves_on_cpu_and_gpu(behind: str, tmp_path: Path) -> None:
    class Stop(Reporter):
        """After the fourth step."""

        def step(self, step: Step, trainer: Trainer) -> None:
            assert {parameter.device.type for parameter in trainer.loaded.parameters()} == {"cuda"}
            trainer.stop_requested = step.number == 4

    files, folder = write_splits("single", tmp_path / "data"), tmp_path / "run"
    more = {"train.device": "cuda", "train.epochs": 6, "fit.async_checkpoint": behind}
    assert finetune_tiny("classify", files, folder, more, reporter=Stop()).status == "interrupted"
    done = finetune_tiny("classify", files, folder, more)
    assert done.status == "completed" and done.results["settings"]["train"]["device"] == "cuda"
    texts = [row["text"] for row in classification_rows(20, seed=5)]
    on_cpu = heedful.Engine(folder, device="cpu")(texts)
    exact, default = heedful.Engine(folder, dtype=torch.float32, device="cuda"), heedful.Engine(folder)
    assert default.gpu_line() and default.precision != "float32"
    for engine, tolerance in ((exact, 1e-3), (default, 0.05)):  # the default has half precision
        for right, on_gpu in zip(on_cpu, engine(texts), strict=True):
            assert right["probabilities"] == pytest.approx(on_gpu["probabilities"], abs=tolerance)
