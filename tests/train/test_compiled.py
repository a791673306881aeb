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
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert process.stdout == "done\n", process.stderr


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
