"""Helpers for tests of training: one tiny model in two libraries, and losses and gradients side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from heedful.checkpoint import ModelBundle, load
from heedful.families import FAMILIES
from heedful.families.names import to_our_names
from heedful.objectives import Loss
from heedful.tasks.task import Task
from heedful.tokenizer import Encoding, Tokenizer
from tests.support.model_folders import make

SHORT = 20  # tokens: a limit that cuts short texts into windows


class Both(NamedTuple):
    """A model and tokenizer of transformers and the same model in Heedful, in eval mode, so without dropout."""

    reference: Any
    tokenizer: Any
    model: ModelBundle


@cache
def both(name: str, dtype: torch.dtype = torch.float64) -> Both:
    """Load the tiny model of that name in both libraries."""
    with TemporaryDirectory() as folder:
        make(Path(folder), name)
        model = load(folder, dtype=dtype)
        tokenizer = transformers.BertTokenizer.from_pretrained(folder)
        kind = next(iter(transformers.AutoConfig.from_pretrained(folder).architectures))
        reference = getattr(transformers, kind).from_pretrained(folder).to(dtype).eval()
        reference.load_state_dict({key: value.clone() for key, value in reference.state_dict().items()})
    return Both(reference, tokenizer, model)


def tokenizer() -> Tokenizer:
    """Return the tokenizer of all tiny models."""
    words = both("bare").model.tokenizer
    assert words is not None
    return words


def learned(task: Task, loaded: ModelBundle, examples: Sequence[Any], parts: int = 1) -> Loss:
    """Return the loss of all samples in `parts` batches one after the other; gradients stay in the parameters."""
    samples = task.encode_split(examples).samples
    loaded.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    size = -(-len(samples) // parts)
    for start in range(0, len(samples), size):
        mine = samples[start : start + size]
        loss = task.loss(loaded, task.batch(mine, [0] * len(mine)))
        loss.sum.backward()
        total, count = total + loss.sum.detach(), count + loss.count
    return Loss(total, count)


def same_gradients(reference: Any, loss: Tensor, model: ModelBundle, count: float, tolerance: float = 1e-10) -> None:
    """Assert that the gradient of the reference's mean loss is Heedful's of the sum, divided by the count."""
    reference.zero_grad()
    loss.backward()
    table = FAMILIES[model.config.family].table(model.config.model, model.config.head)
    expected_gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in reference.state_dict(keep_vars=True).items()
        if name not in table.tied
    }
    moved = 0
    for name, expected in to_our_names(table, expected_gradients).items():
        mine = model.named_tensors()[name].grad
        actual = torch.zeros_like(expected) if mine is None else mine / count
        assert (actual - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max())), name
        moved += bool(expected.any())
    assert moved > 20


def windowed(task: Task, example: Any) -> list[list[Encoding]]:
    """Return the windows of an example's items."""
    items = task.tokenizer_inputs(example)
    return task.windows(items, task._encode(items))


def text_of(sample: Any, number: int = 0) -> str:
    """One sequence of a sample, as tokens with spaces between them."""
    start, stop = sample.bounds[number : number + 2]
    return " ".join(tokenizer().name(int(id)) for id in sample.tokens[start:stop])
