"""Saving checkpoints, either before training continues or in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from heedful.train.checkpoint import CheckpointManager
from heedful.train.trainer import Trainer


class AsyncCheckpointer:
    """Saves the states of a trainer by a CheckpointManager, with `background` in a thread while training continues.

    In the background, `save` copies the state before it returns, so that later updates do not change what is saved
    (pytorch#144657). A GPU copies it to pinned memory on a stream of its own, and the next update waits for that, not
    `save`. One save runs at a time. Its error, if any, is raised by the next call of `save` or `wait`.
    """

    def __init__(self, manager: CheckpointManager, trainer: Trainer, *, background: bool) -> None:
        self.manager, self.trainer, self.background = manager, trainer, background
        self._stream = torch.cuda.Stream(trainer.device) if background and trainer.device.type == "cuda" else None
        self._ranks = trainer.ranks.with_new_group() if background and trainer.is_sharded else trainer.ranks
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, object]) -> None:
        """Save a state. All ranks call this; if all have the same state, only rank 0 writes."""
        self.wait()
        writes = self.trainer.is_sharded or self.trainer.ranks.is_main
        if not self.background:
            if writes:
                self._commit(step, tensors, values)
            self.trainer.ranks.barrier()
        elif writes:
            copies = self._copy(tensors)
            arguments = (step, copies, values, self.trainer.state_copied)
            self._thread = threading.Thread(target=self._run, args=arguments, name=f"save {step}")
            self._thread.start()

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy a state to the CPU; a GPU does it later, until the event `state_copied` of the trainer."""
        if self._stream is None:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self.trainer.device))
        with torch.cuda.stream(self._stream):
            copies = {name: tensor.detach().to("cpu", non_blocking=True, copy=True) for name, tensor in tensors.items()}
            self.trainer.state_copied = self._stream.record_event()
        return copies

    def wait(self) -> None:
        """Wait for the last save, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(
        self,
        step: int,
        copies: Mapping[str, Tensor],
        values: Mapping[str, object],
        copied: torch.cuda.Event | None,
    ) -> None:
        """Commit a state in the background thread, and keep the error.

        Args:
            step: Number of the step.
            copies: Tensors on the CPU.
            values: Plain values.
            copied: Event of a GPU after which the copies are complete. If None, they are.
        """
        try:
            if copied is not None:
                copied.synchronize()
            self._commit(step, copies, values)
        except BaseException as error:
            self._error = error

    def _commit(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, object]) -> None:
        """Write a state to disk."""
        if self.trainer.is_sharded:
            self.manager.save_sharded(step, self.trainer.as_dtensors(tensors), values, self._ranks)
        else:
            self.manager.save(step, tensors, values)
