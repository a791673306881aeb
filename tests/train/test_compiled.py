"""Compiled blocks: compiled once for all layers and batches of one shape, with the same results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import save_tiny

# run in another process, since the checks of shapes in tests would be compiled too
SCRIPT = """
import sys
import torch
import heedful
from heedful.packed import Packed
from heedful.train.compiled import CompiledBlocks

folder, device = sys.argv[1:]
loaded = heedful.load(folder, dtype=torch.float64).to(device).train(device == "cpu")  # dropout differs on other devices
compiled = []

def backend(module, inputs):
    compiled.append(module)
    return module.forward

def loss_and_gradients(batch):
    torch.manual_seed(0)
    loaded.zero_grad()
    loss = loaded.head(loaded.model(batch), batch).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in loaded.parameters() if parameter.grad is not None)]

names = list(loaded.state_dict())
batches = [Packed.of([[5] * length for length in lengths]).to(device) for lengths in ((7, 9, 3), (2, 9, 8), (18, 1))]
plain = [loss_and_gradients(batch) for batch in batches]
options = {"backend": backend, "dynamic": False} if device == "cpu" else {}
blocks = CompiledBlocks(loaded, **options)
before = loss_and_gradients(batches[0])
assert not compiled, "blocks are compiled outside of the context"
with blocks:
    inside = []
    for batch in batches:
        inside.append(loss_and_gradients(batch))
        if len(inside) == 1:
            first = len(compiled)
    assert list(loaded.state_dict()) == names
if device == "cpu":
    assert len(blocks.blocks) == 4 and 0 < first == len(compiled) <= 6, compiled  # graphs of one block
for expected, actual in zip(plain, inside, strict=True):
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b) if device == "cpu" else torch.allclose(a, b, atol=1e-10)
after = loss_and_gradients(batches[0])
with blocks:
    reentered = loss_and_gradients(batches[0])
assert len(compiled) == first
for values in (before, after, reentered):
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(values, plain[0], strict=True))
print("done")
"""


@pytest.mark.slow
def test_one_block_for_all_layers_and_batches(tmp_path: Path) -> None:
    check_compiled_blocks(tmp_path, "cpu")


def check_compiled_blocks(folder: Path, device: str) -> None:
    """Assert that compiled blocks have the same loss and gradients on a device, for three batches of one shape."""
    save_tiny(folder, "bert", "BertForMaskedLM")
    command = [sys.executable, "-c", SCRIPT, str(folder), device]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert process.stdout == "done\n", process.stderr


IN_GRAPH = """
import sys
from contextlib import nullcontext

import torch
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters

import heedful
from heedful.nn import compiled_attention
from heedful.packed import Packed
from heedful.train.compiled import CompiledBlocks

folder, device, dropout, backend = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
graphs = []


def counting(module, inputs):
    graphs.append(module)
    return lookup_backend(backend)(module, inputs)


def weights(q, k, bounds, scale, causal, window):
    rows = torch.arange(len(q))
    sequence = torch.searchsorted(bounds[1:].long(), rows, right=True)
    distances = rows[None] - rows[:, None]
    visible = sequence[:, None] == sequence
    visible &= distances <= 0 if causal else True
    visible &= distances.abs() <= window if window >= 0 else True
    return (scale * torch.einsum("ihd,jhd->hij", q, k)).masked_fill(~visible, -torch.inf).softmax(-1)


def forward(q, k, v, bounds, longest, scale, causal, window, dropout):
    assert not dropout and bounds.dtype == torch.int32 and longest == bounds.diff().max()
    out = torch.einsum("hij,jhd->ihd", weights(q, k, bounds, scale, causal, window), v)
    return out.contiguous(), torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def backward(gradient, q, k, v, out, log_sums, random_state, bounds, longest, scale, causal, window, dropout):
    p = weights(q, k, bounds, scale, causal, window)
    dp = torch.einsum("ihd,jhd->hij", gradient, v)
    ds = scale * p * (dp - (dp * p).sum(-1, keepdim=True))
    dq, dk = torch.einsum("hij,jhd->ihd", ds, k), torch.einsum("hij,ihd->jhd", ds, q)
    return dq.contiguous(), dk.contiguous(), torch.einsum("hij,ihd->jhd", p, gradient).contiguous()


if device == "cpu":  # the operator runs on CUDA only: kernels of its definition stand for it
    compiled_attention.cannot_use_flash = lambda *arguments: ""
    compiled_attention.FLASH_OPERATOR.register_kernel("cpu", forward)
    compiled_attention.FLASH_BACKWARD_OPERATOR.register_kernel("cpu", backward)

loaded = heedful.load(folder, dtype=torch.float64 if device == "cpu" else torch.float32).to(device).eval()
for part in loaded.modules():
    if type(part).__name__ == "Attention" and dropout:
        part.dropout, part.training = dropout, True


def learn(batch, output_rows, seed=0):
    torch.manual_seed(seed)
    loaded.zero_grad()
    with nullcontext() if device == "cpu" else torch.autocast(device, torch.bfloat16):
        loss = loaded.model(batch, output_rows=output_rows).double().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in loaded.model.parameters() if p.grad is not None)]


batches = [Packed.of([[5] * n for n in range(3, 5 + number)]).to(device) for number in range(1, 11)]
chosen = [torch.tensor([0, *range(2, 3 + number)]).to(device) for number in range(10)]
calls = [*zip(batches, [None] * 10), *zip(batches, chosen)]
expected = [learn(*call) for call in calls]
counts = []
with CompiledBlocks(loaded, backend=counting):
    for right, call in zip(expected, calls, strict=True):
        inside = learn(*call)
        counts.append(len(graphs))
        if dropout:
            right = learn(*call)  # numbers that are dropped may differ from those of other code
            assert inside[0] != learn(*call, seed=1)[0]
        for one, other in zip(right, inside, strict=True):
            bound = 1e-10 if device == "cpu" else 0.05 * float(one.abs().max())
            assert float((one - other).abs().max()) <= bound, (bound, float((one - other).abs().max()))
assert counts[1] == counts[9] and counts[11] == counts[19], f"other sizes were compiled again: {counts}"
print(counts[9], counts[19] - counts[9])
assert not counters["graph_break"], counters["graph_break"]
print("done")
"""
IN_GRAPH_FAMILIES = {  # a model, and the kinds of its blocks that cannot share compiled code
    "bert": ("BertForMaskedLM", 1),
    "gpt2": ("GPT2LMHeadModel", 1),
    "qwen3": ("Qwen3ForCausalLM", 1),
    "modernbert": ("ModernBertForMaskedLM", 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", IN_GRAPH_FAMILIES)
def test_a_block_is_one_graph_for_batches_of_all_sizes(family: str, tmp_path: Path) -> None:
    learn_in_graph(tmp_path, family, "cpu")


def learn_in_graph(
    folder: Path, family: str, device: str, dropout: float = 0.0, backend: str = "aot_eager", timeout: float = 110
) -> None:
    """Ten batches of other sizes, compiled and not: all rows of the last block, then some of them."""
    architecture, kinds = IN_GRAPH_FAMILIES[family]
    save_tiny(folder, family, architecture)
    command = [sys.executable, "-c", IN_GRAPH, str(folder), device, str(dropout), backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
    all_rows, some_rows = map(int, done.stdout.split()[:2])
    assert 0 < all_rows <= 2 * kinds and 0 < some_rows <= 2, (all_rows, some_rows)


TRAINER_SCRIPT = """
import sys
from dataclasses import replace
from functools import partialmethod

import torch

sys.path[:0] = sys.argv[1:]
from tests.support import tiny_runs
from heedful.train.trainer import Trainer

compiled = []

def backend(module, inputs):
    compiled.append(module)
    return module.forward

torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend=backend)
steps = []
for compile in (False, True):
    template = tiny_runs.make_trainer("tag", 0.1)
    settings = replace(template.settings, compile=compile)
    trainer = Trainer(template.loaded, template.objective, template.samples, settings)
    steps.append([trainer.train_step().record for _ in range(3)])
    count = len(compiled)
    trainer.loaded.hidden_states(template.objective.batch(list(template.samples[:2]), [0, 0]).packed)
    assert len(compiled) == count, "blocks were compiled outside of a step"
assert compiled and steps[0] == steps[1], steps
print("done")
"""


@pytest.mark.slow
def test_training_with_compiled_blocks_has_the_same_steps() -> None:
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", TRAINER_SCRIPT, folder]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert process.stdout == "done\n", process.stderr
