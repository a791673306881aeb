"""Embeddings whose rows are updated lazily ("lazy Adam"): a step changes a few hundred rows of thirty thousand.

A dense gradient of the table, mostly zeros, costs as much as the rest of a short step. Here the gradient has the used
rows alone; weight decay and momentum of the others are applied when they are next read, with the same result.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from heedful.model.embedding import EmbeddingLayer
from heedful.nn.cpu_ops import usable_kernels
from heedful.train.optim import Optimizer


def make_embeddings_lazy(
    models: Sequence[nn.Module], parameters: Mapping[str, Tensor], optimizer: Optimizer
) -> list[nn.Embedding]:
    """Make the optimizer update embeddings lazily that are used only for lookup and not tied to an output layer.

    A lookup updates its rows first; `state_dict`, `load_state_dict`, `ModelBundle.named_tensors` and copies of a
    `ModelBundle` update all rows. Call `loaded.flush()` before reading a table in another way, as through
    `loaded.parameters()`. While `sparse` is set on a table, its gradient has the used rows alone.

    Returns:
        The tables that are updated lazily.
    """
    uses = Counter(id(tensor) for model in models for part in model.modules() for tensor in part._parameters.values())
    names = {id(tensor): name for name, tensor in parameters.items()}
    lazy = []
    for part in (part for model in models for part in model.modules() if isinstance(part, EmbeddingLayer)):
        table = part.tokens
        name = names.get(id(table.weight))
        if name is None or uses[id(table.weight)] > 1:
            continue
        if usable_kernels(table.weight) is None or table.weight.dtype.itemsize != 4:
            continue
        optimizer.make_lazy(name)
        rows = LazyRows(optimizer, name)
        table.register_forward_pre_hook(rows.before_forward)
        table.register_state_dict_pre_hook(rows)
        table.register_load_state_dict_pre_hook(rows)
        lazy.append(table)
    return lazy


class LazyRows:
    """Hooks that apply pending steps of a table before it is read or replaced; no-ops once the optimizer is gone."""

    def __init__(self, optimizer: Optimizer | None, name: str = "") -> None:
        self._optimizer: Callable[[], Optimizer | None] = _gone if optimizer is None else weakref.ref(optimizer)
        self._name = name

    def __call__(self, *args: object) -> None:
        """Apply all pending steps of all tables, also as a hook of `state_dict` and `load_state_dict`."""
        if (optimizer := self._optimizer()) is not None:
            optimizer.flush()

    def before_forward(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Apply pending steps to the rows that a lookup reads."""
        if (optimizer := self._optimizer()) is not None:
            optimizer.catch_up(self._name, args[0])

    def __reduce__(self) -> tuple[type[LazyRows], tuple[None]]:
        """Pickle hooks without the optimizer: it does not train the copy of a model."""
        return LazyRows, (None,)


def _gone() -> None:
    """Stands in for the reference to an optimizer that no longer exists."""
