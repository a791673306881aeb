"""Ranks: one process alone, or several that torchrun started, which sum gradients and agree on everything else.

Gradients of a step are summed once, after all micro-batches, in fixed pieces: what is added in which order depends on
the number of ranks alone, neither on what ran before nor on what overlaps, so that a resumed run gets the same bits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from heedful.errors import HeedfulError

PIECE = 2**23  # numbers that are summed at once
PATIENCE = timedelta(minutes=10)  # how long one rank waits for another


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """How many processes share the work, and which one this is."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this one writes."""
        return self.rank == 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes its sum over all ranks, in place; all have one dtype and one device."""
        if self.size == 1:
            return
        for group in _pieces(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            with _told():
                dist.all_reduce(flat)
            for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather(self, value: Any) -> list[Any]:
        """What each rank has, in the order of the ranks, on every rank; plain values of our own processes only."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _told():
            dist.all_gather_object(found, value)
        return found

    def numbers(self, *values: int | float) -> list[list[float]]:
        """Some numbers of each rank, in the order of the ranks, on every rank."""
        mine = torch.tensor(values, dtype=torch.float64)
        found = [mine]
        if self.size > 1:
            found = [torch.empty_like(mine) for _ in range(self.size)]
            with _told():
                dist.all_gather(found, mine)
        return [each.tolist() for each in found]

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            with _told():
                dist.barrier()


ALONE = Ranks()


@contextmanager
def ranks() -> Iterator[Ranks]:
    """The ranks that torchrun started (gloo), or this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
    dist.init_process_group("gloo", store=_fresh(store), rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield Ranks(rank=rank, size=size)
    finally:
        dist.destroy_process_group()


def _fresh(store: Any) -> Any:
    """Without what the processes of an earlier start said.

    torchrun keeps its store when it starts ranks again (pytorch#135712, #167288), so that they would look for ranks
    that are gone. The starts are counted on each node alone: on several nodes the numbers may differ.
    """
    one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_node else "0"
    return dist.PrefixStore(f"heedful/{start}", store)  # type: ignore[attr-defined]


@contextmanager
def _told() -> Iterator[None]:
    """What the library says when a connection breaks, or when nothing comes, in words."""
    try:
        yield
    except RuntimeError as error:
        said = re.sub(r"^\[[^]]*\] *", "", str(error)).partition(". ")[0]
        raise HeedfulError(
            f"rank {dist.get_rank()} waits for another one, which has ended, or hangs: {said}. See what the others "
            "said; started again, the run goes on from its newest checkpoint"
        ) from None


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbouring tensors, together as large as a piece; one that is larger is alone."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.numel() > PIECE:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.numel()
    if group:
        yield group
