"""Ranks: one process alone, or several that torchrun started, which sum numbers and agree on everything else."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from heedful.errors import HeedfulError
from heedful.train.heartbeat import Heartbeat, format_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """How many processes share the work, and which one this is."""

    rank: int = 0
    size: int = 1
    channel: Any = None  # the group that speaks; None: the one of all that is there from the start
    alive: Heartbeat | None = None  # the signs of life of all ranks
    patience: timedelta = timedelta(minutes=10)  # how long one rank waits for another

    @property
    def first(self) -> bool:
        """Whether this one writes."""
        return self.rank == 0

    def begin(self, flat: Tensor) -> Any:
        """Begin to make a tensor the sum of all ranks' own, in place; all ranks begin the same sums in one order."""
        with self.told():
            return dist.all_reduce(flat, group=self.channel, async_op=True)

    def finish(self, begun: Any) -> None:
        """Wait for such a sum."""
        with self.told():
            begun.wait()

    def group(self, members: Sequence[int]) -> Any:
        """A group of some ranks for sums of their own; all ranks call this, and others than the members get None."""
        with self.told():
            made = dist.new_group(list(members), timeout=self.patience)
        return made if self.rank in members else None

    def gather(self, value: Any) -> list[Any]:
        """What each rank has, in the order of the ranks, on every rank; plain values of our own processes only."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self.told():
            dist.all_gather_object(found, value, group=self.channel)
        return found

    def numbers(self, *values: int | float) -> list[list[float]]:
        """Some numbers of each rank, in the order of the ranks, on every rank."""
        mine = torch.tensor(values, dtype=torch.float64)
        found = [mine]
        if self.size > 1:
            found = [torch.empty_like(mine) for _ in range(self.size)]
            with self.told():
                dist.all_gather(found, mine, group=self.channel)
        return [each.tolist() for each in found]

    def apart(self) -> Ranks:
        """The same ranks with a channel of their own, for what goes on beside; all ranks call this."""
        if self.size == 1:
            return self
        with self.told():
            return replace(self, channel=dist.new_group(timeout=self.patience))

    def wait(self) -> None:
        """Until all ranks are here."""
        self.numbers(0)

    @contextmanager
    def told(self) -> Iterator[None]:
        """An exchange: what the library says when a connection breaks, or when nothing comes, in words."""
        if self.alive is not None:
            self.alive.count += 1
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or CONNECTION_ERROR.search(str(error))):
                raise
            whom = "another one" if self.alive is None else self.alive.missing()
            raise HeedfulError(
                f"rank {self.rank} waits for {whom}, which has ended, or hangs: {_said(error)}. See what the "
                "others said; started again, the run resumes from its newest checkpoint"
            ) from None


SINGLE_PROCESS = Ranks()
CONNECTION_ERROR = re.compile(
    r"gloo|nccl|connection|pair closure|timed? ?out", re.IGNORECASE
)  # not all errors name their library
RENDEZVOUS_TIMEOUT = timedelta(minutes=1)  # for which ranks wait for others to be started, at least


@contextmanager
def connect_ranks() -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone; gloo connects them, and NCCL what lies on GPUs.

    One rank waits for another ten minutes, or as many seconds as HEEDFUL_DIST_TIMEOUT says.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SINGLE_PROCESS
        return
    patience = _patience()
    meeting = max(patience, RENDEZVOUS_TIMEOUT)
    try:
        store, rank, size = next(rendezvous("env://", timeout=meeting))
        store = _met(store, rank, size, meeting)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
        alive = Heartbeat(dist.distributed_c10d.PrefixStore("alive", store.clone()), rank, size)
    except RuntimeError as error:
        given = os.environ
        raise HeedfulError(
            f"rank {given.get('RANK')} of {given['WORLD_SIZE']} did not meet the others at "
            f"{given.get('MASTER_ADDR')}:{given.get('MASTER_PORT')}: {_said(error)}. Is each of them started, and is "
            "that address, which is rank 0's, to be reached from here?"
        ) from None
    try:
        yield Ranks(rank=rank, size=size, alive=alive, patience=patience)
    finally:
        alive.end()
        dist.destroy_process_group()


def _said(error: RuntimeError) -> str:
    """What the library says, without the place in its code."""
    return re.sub(r"^\[[^]]*\] *", "", str(error)).partition(". ")[0].partition("\n")[0]


def _patience() -> timedelta:
    given = os.environ.get("HEEDFUL_DIST_TIMEOUT", "600")
    try:
        found = timedelta(seconds=float(given))
    except (ValueError, OverflowError):
        found = timedelta()
    if found <= timedelta():
        raise HeedfulError(f'HEEDFUL_DIST_TIMEOUT is "{given}"; expected a number of seconds above 0')
    return found


def _met(store: Any, rank: int, size: int, meeting: timedelta) -> Any:
    """What all ranks of this start share, once all of them are here; without what an earlier start said.

    torchrun keeps its store when it starts ranks again (pytorch#135712, #167288), so that they would look for ranks
    that are gone, and on several nodes no number tells one start from another. So each rank calls with a name that is
    its own, and the first one answers every call with the place where those of its start come together.
    """
    mine = uuid4().hex
    if rank:
        store.set(f"heedful/call/{rank}", mine)
        store.wait([f"heedful/answer/{mine}"], meeting)
        shared = _place(store, store.get(f"heedful/answer/{mine}").decode())
        shared.set(f"here/{rank}", "")
        shared.wait(["all"], meeting)
        return shared
    shared, end = _place(store, mine), time.monotonic() + meeting.total_seconds()
    answered: dict[int, bytes] = {}
    while away := [each for each in range(1, size) if not shared.check([f"here/{each}"])]:
        if time.monotonic() > end:
            raise dist.DistStoreError(f"nothing was heard of {format_ranks(away)}")
        for each in away:
            if store.check([f"heedful/call/{each}"]):
                call = store.get(f"heedful/call/{each}")
                if answered.get(each) != call:  # it may be that of an earlier start, and another one comes
                    store.set(f"heedful/answer/{call.decode()}", mine)
                    answered[each] = call
        time.sleep(0.02)
    shared.set("all", "")
    return shared


def _place(store: Any, name: str) -> Any:
    return dist.distributed_c10d.PrefixStore(f"heedful/{name}", store)
