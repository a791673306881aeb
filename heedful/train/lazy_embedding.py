"""Embeddings whose rows are updated lazily ("lazy Adam").

A step uses a few hundred of thirty thousand rows, and a dense gradient, mostly zeros, takes as long as the rest of a
short step. Here the gradient has only the rows that were used. Weight decay and momentum of other rows are applied when
these are next read, with the same result.
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
    """Make the optimizer update embeddings lazily, if they are used only for lookup and not tied to an output layer.

    A lookup first applies the pending updates of its rows; `state_dict`, `load_state_dict`, `ModelBundle.named_tensors`
    and copies of a `ModelBundle` first apply all of them. Call `loaded.flush()` before reading a table in another way,
    as through `loaded.parameters()`.

    Returns:
        The embeddings that are updated lazily. While `sparse` is set on one, its gradient has only the used rows.
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
    """Hooks that apply pending steps of a table before it is read or replaced.

    They do nothing after the optimizer was deleted, to which they have a weak reference.
    """

    def __init__(self, optimizer: Optimizer | None, name: str = "") -> None:
        self._optimizer: Callable[[], Optimizer | None] = _gone if optimizer is None else weakref.ref(optimizer)
        self._name = name

    def __call__(self, *args: object) -> None:
        """Apply all pending steps of all tables; this is the hook of `state_dict` and `load_state_dict`."""
        if (optimizer := self._optimizer()) is not None:
            optimizer.flush()

    def before_forward(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Apply pending steps to the rows that a lookup reads."""
        if (optimizer := self._optimizer()) is not None:
            optimizer.catch_up(self._name, args[0])

    def __reduce__(self) -> tuple[type[LazyRows], tuple[None]]:
        """Pickle hooks without the optimizer, which does not train the copy of a model."""
        return LazyRows, (None,)


def _gone() -> None:
    """Return None, as a weak reference to a deleted optimizer does."""
