"""What tests of learning share: one tiny model in two libraries, and losses and gradients side by side."""

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
    """transformers' model and tokenizer, and ours; all in eval mode, so that nothing is dropped out."""

    theirs: Any
    tokenizer: Any
    ours: ModelBundle


@cache
def both(name: str, dtype: torch.dtype = torch.float64) -> Both:
    """The tiny model of folders.HEADS of that name."""
    with TemporaryDirectory() as folder:
        make(Path(folder), name)
        ours = load(folder, dtype=dtype)
        tokenizer = transformers.BertTokenizer.from_pretrained(folder)
        kind = next(iter(transformers.AutoConfig.from_pretrained(folder).architectures))
        theirs = getattr(transformers, kind).from_pretrained(folder).to(dtype).eval()
        theirs.load_state_dict({key: value.clone() for key, value in theirs.state_dict().items()})
    return Both(theirs, tokenizer, ours)


def tokenizer() -> Tokenizer:
    """Of all tiny models."""
    found = both("bare").ours.tokenizer
    assert found is not None
    return found


def learned(task: Task, loaded: ModelBundle, examples: Sequence[Any], parts: int = 1) -> Loss:
    """The loss of all samples, in so many batches one after the other; gradients are left in the parameters."""
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


def same_gradients(theirs: Any, loss: Tensor, ours: ModelBundle, count: float, tolerance: float = 1e-10) -> None:
    """The gradient of their mean loss is ours of the sum, divided by the count."""
    theirs.zero_grad()
    loss.backward()
    table = FAMILIES[ours.config.family].table(ours.config.model, ours.config.head)
    given = {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in theirs.state_dict(keep_vars=True).items()
        if name not in table.tied
    }
    moved = 0
    for name, expected in to_our_names(table, given).items():
        mine = ours.named_tensors()[name].grad
        found = torch.zeros_like(expected) if mine is None else mine / count
        assert (found - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max())), name
        moved += bool(expected.any())
    assert moved > 20


def windowed(task: Task, example: Any) -> list[list[Encoding]]:
    """The windows of an example's items."""
    items = task.tokenizer_inputs(example)
    return task.windows(items, task._encode(items))


def text_of(sample: Any, number: int = 0) -> str:
    """One sequence of a sample, as tokens with spaces between them."""
    start, stop = sample.bounds[number : number + 2]
    return " ".join(tokenizer().name(int(id)) for id in sample.tokens[start:stop])
