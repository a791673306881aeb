"""Compiled blocks: once for all layers and all batches of one shape, the same numbers, and as before afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import save_tiny

# in a process of its own: the tests' checks of shapes would be compiled, too
SCRIPT = """
import sys
import torch
import heedful
from heedful.packed import Packed
from heedful.train.compiled import CompiledBlocks

folder, device = sys.argv[1:]
loaded = heedful.load(folder, dtype=torch.float64).to(device).train(device == "cpu")  # elsewhere it drops otherwise
made = []

def pieces(module, inputs):
    made.append(module)
    return module.forward

def learn(batch):
    torch.manual_seed(0)
    loaded.zero_grad()
    loss = loaded.head(loaded.model(batch), batch).square().mean()
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in loaded.parameters() if each.grad is not None)]

names = list(loaded.state_dict())
batches = [Packed.of([[5] * each for each in lengths]).to(device) for lengths in ((7, 9, 3), (2, 9, 8), (18, 1))]
plain = [learn(batch) for batch in batches]
options = {"backend": pieces, "dynamic": False} if device == "cpu" else {}
blocks = CompiledBlocks(loaded, **options)
plainly = learn(batches[0])
assert not made, "outside they are as they were"
with blocks:
    inside = []
    for batch in batches:
        inside.append(learn(batch))
        if len(inside) == 1:
            first = len(made)
    assert list(loaded.state_dict()) == names
if device == "cpu":
    assert len(blocks.blocks) == 4 and 0 < first == len(made) <= 6, made  # the pieces of one block
for one, other in zip(plain, inside, strict=True):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if device == "cpu" else torch.allclose(a, b, atol=1e-10)
again = learn(batches[0])
with blocks:
    once_more = learn(batches[0])
assert len(made) == first
for found in (plainly, again, once_more):
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(found, plain[0], strict=True))
print("done")
"""


@pytest.mark.slow
def test_one_block_for_all_layers_and_batches(tmp_path: Path) -> None:
    learn_compiled(tmp_path, "cpu")


def learn_compiled(folder: Path, device: str) -> None:
    """Three batches of one shape, as they are and compiled."""
    save_tiny(folder, "bert", "BertForMaskedLM")
    command = [sys.executable, "-c", SCRIPT, str(folder), device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.stdout == "done\n", done.stderr


TRAINED = """
import sys
from dataclasses import replace
from functools import partialmethod

import torch

sys.path[:0] = sys.argv[1:]
from tests.support import tiny_runs
from heedful.train.trainer import Trainer

made = []

def pieces(module, inputs):
    made.append(module)
    return module.forward

torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend=pieces)
steps = []
for compile in (False, True):
    kept = tiny_runs.make_trainer("tag", 0.1)
    trainer = Trainer(kept.loaded, kept.objective, kept.samples, replace(kept.settings, compile=compile))
    steps.append([trainer.train_step().record for _ in range(3)])
    count = len(made)
    trainer.loaded.hidden_states(kept.objective.batch(list(kept.samples[:2]), [0, 0]).packed)
    assert len(made) == count, "answers are given by the blocks as they are"
assert made and steps[0] == steps[1], steps
print("done")
"""


@pytest.mark.slow
def test_a_trainer_learns_the_same_with_them() -> None:
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", TRAINED, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.stdout == "done\n", done.stderr
