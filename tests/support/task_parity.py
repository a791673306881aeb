"""Comparison of training with transformers: one tiny model in both libraries, their losses and gradients."""

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
from tests.support.model_folders import make_model_dir

SHORT = 20  # tokens; with this limit, even short texts are split into windows


class ModelPair(NamedTuple):
    """A model and its tokenizer in transformers, and the same model in Heedful, both in eval mode."""

    reference: Any
    tokenizer: Any
    model: ModelBundle


@cache
def load_both(name: str, dtype: torch.dtype = torch.float64) -> ModelPair:
    """Return the tiny model with this name in both libraries."""
    with TemporaryDirectory() as folder:
        make_model_dir(Path(folder), name)
        model = load(folder, dtype=dtype)
        tokenizer = transformers.BertTokenizer.from_pretrained(folder)
        kind = next(iter(transformers.AutoConfig.from_pretrained(folder).architectures))
        reference = getattr(transformers, kind).from_pretrained(folder).to(dtype).eval()
        reference.load_state_dict({key: value.clone() for key, value in reference.state_dict().items()})
    return ModelPair(reference, tokenizer, model)


def tokenizer() -> Tokenizer:
    """Return the tokenizer of all tiny models."""
    words = load_both("bare").model.tokenizer
    assert words is not None
    return words


def backward_all(task: Task, loaded: ModelBundle, examples: Sequence[Any], parts: int = 1) -> Loss:
    """Compute the loss of all samples in `parts` batches, accumulate gradients in the parameters, return the loss."""
    samples = task.encode_split(examples).samples
    loaded.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    size = -(-len(samples) // parts)
    for start in range(0, len(samples), size):
        batch_samples = samples[start : start + size]
        loss = task.loss(loaded, task.batch(batch_samples, [0] * len(batch_samples)))
        loss.sum.backward()
        total, count = total + loss.sum.detach(), count + loss.count
    return Loss(total, count)


def assert_same_gradients(
    reference: Any, loss: Tensor, model: ModelBundle, count: float, tolerance: float = 1e-10
) -> None:
    """Assert that gradients of the mean loss in transformers are those of the summed loss in Heedful, over `count`."""
    reference.zero_grad()
    loss.backward()
    table = FAMILIES[model.config.family].table(model.config.model, model.config.head)
    expected_gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in reference.state_dict(keep_vars=True).items()
        if name not in table.tied
    }
    num_nonzero = 0
    for name, expected in to_our_names(table, expected_gradients).items():
        grad = model.named_tensors()[name].grad
        actual = torch.zeros_like(expected) if grad is None else grad / count
        assert (actual - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max())), name
        num_nonzero += bool(expected.any())
    assert num_nonzero > 20


def example_windows(task: Task, example: Any) -> list[list[Encoding]]:
    """Return the windows into which a task splits an example."""
    items = task.tokenizer_inputs(example)
    return task.windows(items, task._encode(items))


def sequence_text(sample: Any, number: int = 0) -> str:
    """Return the tokens of one sequence of a sample, joined by spaces."""
    start, stop = sample.bounds[number : number + 2]
    return " ".join(tokenizer().name(int(id)) for id in sample.tokens[start:stop])
