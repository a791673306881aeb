"""Embeddings whose rows move when they are needed: a step touches a few hundred of thirty thousand.

A gradient of the whole table, mostly zeros, costs as much as the rest of a short step. Here it has the touched rows
alone, and the others, which only decay and follow what is left of their momentum, catch up when they are next read.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from heedful.model.embedding import Embedding
from heedful.nn.native import usable
from heedful.train.optim import Optimizer


def lagging(models: Sequence[nn.Module], parameters: Mapping[str, Tensor], optimizer: Optimizer) -> list[nn.Embedding]:
    """The tables of which that becomes true: read by rows and by nothing else, no scores among it.

    They bring rows up to date as they are read; whoever reads a table in another way calls optimizer.settle() before.
    While `sparse` is set on a table, its gradient has the touched rows alone.
    """
    uses = Counter(id(each) for model in models for part in model.modules() for each in part._parameters.values())
    names = {id(each): name for name, each in parameters.items()}
    found = []
    for part in (part for model in models for part in model.modules() if isinstance(part, Embedding)):
        table = part.tokens
        name = names.get(id(table.weight))
        if (
            name is None
            or uses[id(table.weight)] > 1
            or usable(table.weight) is None
            or table.weight.dtype.itemsize != 4
        ):
            continue
        optimizer.lag(name)
        table.register_forward_pre_hook(Settling(optimizer, name))
        found.append(table)
    return found


class Settling:
    """Brings rows of one table up to date before they are read, or all tables; nothing once the optimiser is gone."""

    def __init__(self, optimizer: Optimizer | None, name: str = "") -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._name = name

    def __call__(self, module: nn.Module | None = None, given: tuple[Tensor, ...] = ()) -> None:
        """As a hook before a module's forward pass, or by itself."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None and given:
            optimizer.catch_up(self._name, given[0])
        elif optimizer is not None:
            optimizer.settle()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model is trained by nobody."""
        return Settling, (None,)
