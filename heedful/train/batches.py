"""The batches of a step: a pure function of its number, computed when needed or ahead of time in worker processes."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_all_start_methods
from typing import Any

from torch.utils.data import DataLoader, Dataset

from heedful.data.sampler import BatchSampler
from heedful.errors import HeedfulError
from heedful.objectives import Batch, Objective, PerEpochSamples, Sample
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
    """Iterator over the batches of consecutive steps, which worker processes prepare ahead of time."""

    def __init__(self, dataset: StepDataset, first: int, num_workers: int) -> None:
        """Start the workers.

        Args:
            dataset: The batches of each step.
            first: Number of the first step to return.
            num_workers: Number of processes.

        Raises:
            HeedfulError: If this system cannot fork processes.
        """
        if "fork" not in get_all_start_methods():
            raise HeedfulError(f"num_workers is {num_workers}, but this system cannot fork processes: set it to 0")
        self._dataset, self._next = dataset, first
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
            self._batches: Iterator[StepBatches] = iter(loader)

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
        """Return the batches of the next step."""
        self._next += 1
        return next(self._batches)


def _unchanged(batches: Any) -> Any:
    """Collate nothing: an item of the dataset is a batch already."""
    return batches


def _start_worker(number: int) -> None:
    """Prepare a worker process: signals do not end it, and tokenizers start no threads."""
    os.setsid()  # signals to the process group reach only the training process, which finishes its step first
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
