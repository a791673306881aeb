"""Micro-batches of a step (gradient accumulation): which samples a rank computes, and in which parts."""

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
    groups: int  # groups of samples that are never split
    is_filler: bool = False  # keeps ranks in step, and does not contribute to the loss

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding included."""
        return sum(map(len, self.samples))


class RankShare:
    """The samples of one step that a rank computes, in groups that are never split."""

    def __init__(self, samples: Sequence[Sample], keys: Sequence[int], group_size: int, rank: int, size: int) -> None:
        """`samples` and `keys` are those of the whole step, `group_size` the samples that one loss sees at once."""
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
        """The keys of `samples`."""
        return [key for group in self._groups for key in group.keys]

    def split(self, max_tokens: int) -> list[MicroBatch]:
        """Micro-batches of at most `max_tokens` tokens, or of one group that has more."""
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
        """Micro-batches for a rank that has `count` fewer than others, if all ranks run equally many."""
        return [self._smallest._replace(is_filler=True)] * count


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or a CPU."""
    messages = ("can't allocate memory", "bad_alloc", "could not create a primitive")  # of torch, C++ and oneDNN
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in str(error) for text in messages)


@cache
def first_operation() -> torch.Tensor:
    """Return the result of an operation whose number comes before that of any other; see `release_failed_backward`."""
    products: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: products.append(torch.zeros((), requires_grad=True) * 1.0))
    thread.start()
    thread.join()
    return products[0]


def release_failed_backward() -> None:
    """Free the graph of a backward pass on the CPU that ended in an error.

    The autograd engine keeps what is left of it in the calling thread's queue, which is ordered by the numbers of
    operations, latest first. Operations are numbered by thread, so the first one of a new thread comes last: a backward
    pass through it empties the queue.
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
