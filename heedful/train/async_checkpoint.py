"""Saver: commits the states of a run, at once or behind its training."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from heedful.train.checkpoint import CheckpointManager
from heedful.train.trainer import Trainer


class AsyncCheckpointer:
    """Commits what it is given to a store; behind, from a copy, while training goes on.

    The copy is made before `save` returns: what training then changes is not saved (pytorch#144657). One commit runs at
    a time. Its error, if it has one, comes with the next call.
    """

    def __init__(self, store: CheckpointManager, trainer: Trainer, *, behind: bool) -> None:
        self.store, self.trainer, self.behind = store, trainer, behind
        self._ranks = trainer.ranks.apart() if behind and trainer.parted else trainer.ranks
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """All ranks call this; where all have the same, the first one alone writes."""
        self.finish()
        mine = self.trainer.parted or self.trainer.ranks.first
        if not self.behind:
            if mine:
                self._commit(step, tensors, values)
            self.trainer.ranks.wait()
        elif mine:
            copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            self._thread = threading.Thread(target=self._try, args=(step, copied, values), name=f"save {step}")
            self._thread.start()

    def finish(self) -> None:
        """Wait until the last one is there."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _try(self, *given: Any) -> None:
        try:
            self._commit(*given)
        except BaseException as error:
            self._error = error

    def _commit(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        if self.trainer.parted:
            self.store.commit_parts(step, self.trainer.placed(tensors), values, self._ranks)
        else:
            self.store.commit(step, tensors, values)
