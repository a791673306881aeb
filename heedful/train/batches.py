"""The batches of a step, a pure function of its number: made when needed, or ahead of time by a thread or workers."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count
from multiprocessing import get_all_start_methods
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from heedful.data.sampler import BatchSampler
from heedful.device import CPU
from heedful.errors import HeedfulError
from heedful.objectives import Batch, Objective, PerEpochSamples, Sample
from heedful.packed import Packed
from heedful.train.microbatch import MicroBatch, RankShare


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepBatches:
    """The micro-batches that one rank computes in one step."""

    share: RankShare
    micro_batches: list[tuple[MicroBatch, Batch]]

    @classmethod
    def of(cls, objective: Objective, share: RankShare, max_tokens: int) -> StepBatches:
        """Split the share of a rank into micro-batches of at most `max_tokens` tokens."""
        micro_batches = [(micro, objective.batch(micro.samples, micro.keys)) for micro in share.split(max_tokens)]
        return cls(share=share, micro_batches=micro_batches)

    def counts(self, terms: int) -> list[float]:
        """Return the number of targets of each term of the loss.

        Args:
            terms: Number of terms.
        """
        columns = zip(*(batch.counts for _, batch in self.micro_batches), strict=True)
        return [sum(column) for column in columns] or [0.0] * terms


@dataclass(frozen=True, kw_only=True, eq=False)
class StepDataset(Dataset[StepBatches]):
    """The batches of each step of a stage, by the step's number from 0."""

    samples: Sequence[Sample]
    objective: Objective
    order: BatchSampler
    rank: int
    ranks: int
    max_tokens: int

    def __getitem__(self, step: int) -> StepBatches:
        """Return the batches of a step."""
        plan = self.order.plan(step, self.objective.num_static_masks)
        samples = self.samples.at(plan.epoch) if isinstance(self.samples, PerEpochSamples) else self.samples
        batch = [samples[index] for index in plan.indices.tolist()]
        share = RankShare(batch, plan.keys, self.objective.group_size, self.rank, self.ranks)
        return StepBatches.of(self.objective, share, self.max_tokens)


class StepLoader(Iterator[StepBatches]):
    """Iterator over the batches of consecutive steps; batches prepared ahead of time have the same bits.

    Worker processes prepare several steps ahead. A thread prepares the next step when `prefetch` is called: it takes
    the batches of the workers, or makes them, and copies them to pinned memory.
    """

    def __init__(
        self,
        dataset: StepDataset,
        first: int,
        *,
        num_workers: int = 0,
        prefetches: bool = False,
        device: torch.device = CPU,
        stop: int | None = None,
    ) -> None:
        """Start the workers.

        Args:
            dataset: The batches of each step.
            first: Number of the first step to return.
            num_workers: Number of processes.
            prefetches: Whether `prefetch` has an effect.
            device: The device to which batches will be sent; those for a GPU are pinned.
            stop: Index of the first step that is not prefetched. If None, all steps are.

        Raises:
            HeedfulError: If there are workers, and this system cannot fork processes.
        """
        self._dataset, self._next, self._stop, self._device = dataset, first, stop, device
        self._worker_batches = _start_workers(dataset, first, num_workers) if num_workers else None
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[StepBatches] | None = None  # the next batches, if they were requested ahead of time
        if prefetches:
            # a new thread would use the first GPU instead of the one of this process
            initializer = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
            self._executor = ThreadPoolExecutor(1, "batches", initializer)

    def continues(self, dataset: StepDataset, step: int) -> bool:
        """Return whether the next batches are those of step `step` of `dataset`."""
        own = self._dataset
        return (
            step == self._next
            and dataset.samples is own.samples
            and dataset.objective is own.objective
            and (dataset.order, dataset.max_tokens) == (own.order, own.max_tokens)
        )

    def __next__(self) -> StepBatches:
        """Return the batches of the next step; an error of the thread is raised here."""
        if self._pending is None:
            batches = self._prepare(self._next)
        else:
            try:
                batches = self._pending.result()
            finally:
                if self._pending.done():  # false after Ctrl-C, when the thread still prepares the batches
                    self._pending = None
        self._next += 1
        return batches

    def prefetch(self) -> None:
        """Let the thread prepare the next step; call this when the device has work, and Python has none.

        Before that, the thread would keep Python from sending work to the device.
        """
        if self._executor is not None and self._pending is None and self._next != self._stop:
            self._pending = self._executor.submit(self._prepare, self._next)

    def close(self) -> None:
        """End the thread and the workers, and drop batches that were not used."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._executor = self._pending = self._worker_batches = None

    def _prepare(self, step: int) -> StepBatches:
        """Return the batches of a step, pinned if they are for a GPU."""
        batches = self._dataset[step] if self._worker_batches is None else next(self._worker_batches)
        if self._device.type != "cuda":
            return batches
        return replace(batches, micro_batches=[(micro, pin_batch(batch)) for micro, batch in batches.micro_batches])


def pin_batch(batch: Batch) -> Batch:
    """Return a batch in pinned memory, from which it is sent without waiting, with all that `Batch.to` computes."""
    packed = replace(batch.packed, extremes=batch.packed.id_extremes())
    result: Batch = _pin(replace(batch, packed=packed, weight_sum=batch.total_weight))
    return result


def _pin(value: Any) -> Any:
    """Copy all tensors of a batch to pinned memory."""
    if isinstance(value, Tensor):
        return value.pin_memory() if value.numel() else value
    if isinstance(value, Batch | Packed):
        return replace(value, **{field.name: _pin(getattr(value, field.name)) for field in fields(value)})
    return tuple(map(_pin, value)) if type(value) is tuple else value


def _start_workers(dataset: StepDataset, first: int, num_workers: int) -> Iterator[StepBatches]:
    """Start worker processes; raises a HeedfulError if this system cannot fork."""
    if "fork" not in get_all_start_methods():
        raise HeedfulError(f"num_workers is {num_workers}, but this system cannot fork processes: set it to 0")
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=count(first),
        collate_fn=_unchanged,
        num_workers=num_workers,
        multiprocessing_context="fork",  # workers share the samples without pickling them
        worker_init_fn=_start_worker,
    )
    with warnings.catch_warnings():  # workers use neither threads nor the GPU of this process
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        return iter(loader)


def _unchanged(batches: Any) -> Any:
    """Collate nothing: an item of the dataset is a batch already."""
    return batches


def _start_worker(number: int) -> None:
    """Prepare a worker process: signals do not end it, and tokenizers start no threads."""
    os.setsid()  # signals to the process group reach only the training process, which finishes its step first
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
