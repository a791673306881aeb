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
from heedful.nn.cpu_ops import usable_kernels
from heedful.train.optim import Optimizer


def make_embeddings_lazy(
    models: Sequence[nn.Module], parameters: Mapping[str, Tensor], optimizer: Optimizer
) -> list[nn.Embedding]:
    """The tables of which that becomes true: read by rows and by nothing else, no scores among it.

    They bring rows up to date as they are read, and all rows before `state_dict` and `load_state_dict`; so do
    `Loaded.named` and copies of a `Loaded`. Whoever reads a table in another way, as `loaded.parameters()`, calls
    `loaded.flush()` before.
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
            or usable_kernels(table.weight) is None
            or table.weight.dtype.itemsize != 4
        ):
            continue
        optimizer.lag(name)
        settling = LazyRows(optimizer, name)
        table.register_forward_pre_hook(settling.rows)
        table.register_state_dict_pre_hook(settling)
        table.register_load_state_dict_pre_hook(settling)
        found.append(table)
    return found


class LazyRows:
    """Brings rows up to date before they are read or replaced; nothing once the optimizer is gone."""

    def __init__(self, optimizer: Optimizer | None, name: str = "") -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._name = name

    def __call__(self, *given: Any) -> None:
        """All rows of all tables: by itself, or as a hook before weights are written down or replaced."""
        if (optimizer := self._of()) is not None:
            optimizer.settle()

    def rows(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Those that the table is asked for, as a hook before its forward pass."""
        if (optimizer := self._of()) is not None:
            optimizer.catch_up(self._name, given[0])

    def _of(self) -> Optimizer | None:
        return None if self._optimizer is None else self._optimizer()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model is trained by nobody."""
        return LazyRows, (None,)
