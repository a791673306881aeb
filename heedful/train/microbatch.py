"""Micro-batches of a step (gradient accumulation): the samples of a rank, in parts that fit into memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from heedful.data.sampler import assign_to_ranks, group, split_microbatches
from heedful.objectives import Sample


class MicroBatch(NamedTuple):
    """Samples of one forward and backward pass, and their keys."""

    samples: list[Sample]
    keys: list[int]
    groups: int  # number of groups of samples, which are never split
    is_filler: bool = False  # whether it only keeps ranks in step and does not contribute to the loss

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding included."""
        return sum(map(len, self.samples))


class RankShare:
    """The samples of one step that a rank computes, in groups that are never split."""

    def __init__(self, samples: Sequence[Sample], keys: Sequence[int], group_size: int, rank: int, size: int) -> None:
        """Select the groups of one rank.

        Args:
            samples: Samples of the whole step.
            keys: A key for each sample.
            group_size: Number of samples that one loss is computed from, which are never split.
            rank: Number of the rank.
            size: Number of ranks.
        """
        groups = [
            MicroBatch([samples[number] for number in numbers], [keys[number] for number in numbers], 1)
            for numbers in group(len(samples), group_size)
        ]
        sizes = [group.num_tokens for group in groups]
        self._groups = [groups[number] for number in assign_to_ranks(sizes, size)[rank]]
        self._smallest = min(groups, key=lambda group: group.num_tokens)

    @property
    def samples(self) -> list[Sample]:
        """All samples of this rank."""
        return [sample for group in self._groups for sample in group.samples]

    @property
    def keys(self) -> list[int]:
        """Keys of `samples`."""
        return [key for group in self._groups for key in group.keys]

    def split(self, max_tokens: int) -> list[MicroBatch]:
        """Return micro-batches of at most `max_tokens` tokens, or of one group with more tokens."""
        batches = split_microbatches([group.num_tokens for group in self._groups], max_tokens)
        members = [[self._groups[number] for number in batch] for batch in batches]
        return [
            MicroBatch(
                [sample for group in groups for sample in group.samples],
                [key for group in groups for key in group.keys],
                len(groups),
            )
            for groups in members
        ]

    def fillers(self, count: int) -> list[MicroBatch]:
        """Return `count` filler micro-batches, for a rank with fewer micro-batches than others."""
        return [self._smallest._replace(is_filler=True)] * count


OUT_OF_MEMORY = (  # parts of messages of errors that are no torch.OutOfMemoryError
    *("can't allocate memory", "bad_alloc", "could not create a primitive"),  # PyTorch, C++ and oneDNN
    *("CUDA error: out of memory", "Triton Error [CUDA]: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    *("Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'", "Failed to CUDA calloc"),  # NCCL
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)


@cache
def first_operation() -> torch.Tensor:
    """Return the result of an operation with the lowest number of all, which `release_failed_backward` needs."""
    products: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: products.append(torch.zeros((), requires_grad=True) * 1.0))
    thread.start()
    thread.join()
    return products[0]


def release_failed_backward() -> None:
    """Free the graph of a backward pass on the CPU that ended in an error.

    The autograd engine keeps the rest of the graph in the calling thread's queue, which is ordered by the numbers of
    operations, latest first. Each thread numbers its operations from 0, so the first one of a new thread comes last: a
    backward pass through it empties the queue.
    """
    first_operation().backward(retain_graph=True)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators, and restore their states afterwards."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
