"""Ranks, the processes of data-parallel training: their collective operations, and how they connect."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from heedful.device import gpu_identity, resolve_device
from heedful.errors import RunError, SettingError
from heedful.train.heartbeat import SILENCE_SECONDS, Heartbeat, format_ranks
from heedful.train.microbatch import is_out_of_memory

T = TypeVar("T")
CONNECTION_ERROR = re.compile(r"gloo|nccl|connection|pair closure|timed? ?out", re.IGNORECASE)  # PyTorch's messages
POLL_SECONDS = 1e-4  # time between two looks at a GPU
RENDEZVOUS_TIMEOUT = timedelta(minutes=1)  # minimum time for the start of all ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The processes that train together, seen from one of them."""

    rank: int = 0  # number of this process
    size: int = 1  # number of processes
    process_group: dist.ProcessGroup | None = None  # group for collective operations, or None for the default group
    heartbeat: Heartbeat | None = None
    timeout: timedelta = timedelta(minutes=10)  # time that a rank waits for another

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and reports."""
        return self.rank == 0

    def all_reduce_async(self, flat: Tensor) -> dist.Work | None:
        """Begin to sum a tensor over all ranks, in place; all ranks begin the same sums in the same order."""
        with self.translate_errors():
            work: dist.Work | None = dist.all_reduce(flat, group=self.process_group, async_op=True)
        return work

    def wait(self, work: dist.Work | None) -> None:
        """Wait for the end of `all_reduce_async`."""
        if work is not None:
            with self.translate_errors():
                work.wait()

    def wait_for_gpu(self, device: torch.device) -> None:
        """Wait until a GPU has computed what it was sent; returns at once on a CPU, and if there is one rank.

        Call this before a number is read from the GPU: a sum by NCCL waits for a lost rank forever, and so would the
        read. `wait` does not: for NCCL it only lets later work of the GPU wait.

        Raises:
            RunError: If another rank is lost, or after `timeout`.
        """
        if self.size > 1 and device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self.wait_until(event.query)

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until a function returns True, such as `is_completed` of the work of a sum over ranks.

        Raises:
            RunError: If another rank is lost, or after `timeout`.
        """
        start = time.monotonic()
        with self.translate_errors():
            while not is_done():
                seconds = time.monotonic() - start
                if seconds > self.timeout.total_seconds():
                    raise RuntimeError(f"timed out after {seconds:.0f} s")
                if self.heartbeat is not None and seconds > SILENCE_SECONDS and self.heartbeat.is_rank_lost():
                    raise RuntimeError(f"connection lost: no heartbeat, after {seconds:.0f} s of waiting")
                time.sleep(POLL_SECONDS)

    def new_subgroup(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """Make a process group of some ranks; all ranks call this, and those outside of the group get None."""
        with self.translate_errors():
            group: dist.ProcessGroup = dist.new_group(list(members), timeout=self.timeout)
        return group if self.rank in members else None

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all ranks in their order; they are pickled, so only our own processes may send them."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        with self.translate_errors():
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def all_gather_scalars(self, *values: float) -> list[list[float]]:
        """Return the numbers of all ranks in float64, [ranks, values]."""
        own_values = torch.tensor(values, dtype=torch.float64)
        gathered = [own_values]
        if self.size > 1:
            gathered = [torch.empty_like(own_values) for _ in range(self.size)]
            with self.translate_errors():
                dist.all_gather(gathered, own_values, group=self.process_group)
        return [numbers.tolist() for numbers in gathered]

    def with_new_group(self) -> Ranks:
        """Return the ranks with another process group, for a background thread; all ranks call this."""
        if self.size == 1:
            return self
        with self.translate_errors():
            return replace(self, process_group=dist.new_group(timeout=self.timeout))

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.all_gather_scalars(0)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Context for a collective operation: connection errors and timeouts become a RunError that names the rank."""
        if self.heartbeat is not None:
            self.heartbeat.collectives += 1
        try:
            yield
        except RuntimeError as error:
            is_connection_error = isinstance(error, dist.DistError) or CONNECTION_ERROR.search(str(error))
            if is_out_of_memory(error) or not is_connection_error:
                raise
            missing = "another rank" if self.heartbeat is None else self.heartbeat.missing_ranks()
            raise RunError(
                f"rank {self.rank} waits for {missing}, which has ended, or hangs: {_first_sentence(error)}. See the "
                "messages of the other ranks; the same command resumes the run from its newest checkpoint"
            ) from None


SINGLE_PROCESS = Ranks()


@contextmanager
def connect_ranks(device: str = "auto") -> Iterator[Ranks]:
    """Connect the ranks that torchrun started, by gloo on the CPU and NCCL on GPUs; yields SINGLE_PROCESS without it.

    A rank waits for another for HEEDFUL_DIST_TIMEOUT seconds (600 by default).

    Args:
        device: The device of training, as in the settings. NCCL connects at once unless it is "cpu", or a rank has no
            GPU of its own.

    Raises:
        RunError: If a rank cannot be reached.
        SettingError: If the device is a GPU, and ranks share one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SINGLE_PROCESS
        return
    timeout = _timeout()
    start_timeout = max(timeout, RENDEZVOUS_TIMEOUT)
    try:
        store, rank, size = next(rendezvous("env://", timeout=start_timeout))
        store = _new_store(store, rank, size, start_timeout)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        gpu = None if device == "cpu" else _gpu_of_each_rank(store, rank, size, device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=gpu)
        heartbeat = Heartbeat(dist.distributed_c10d.PrefixStore("alive", store.clone()), rank, size)  # type: ignore[attr-defined]  # missing in torch's stubs
    except RuntimeError as error:
        environment = os.environ
        raise RunError(
            f"rank {environment.get('RANK')} of {environment['WORLD_SIZE']} could not connect to the others at "
            f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}: {_first_sentence(error)}. Check that "
            "all ranks are started, and that this address, which is rank 0's, can be reached from here"
        ) from None
    has_failed = True
    try:
        yield Ranks(rank=rank, size=size, heartbeat=heartbeat, timeout=timeout)
        has_failed = False
    finally:
        heartbeat.stop()
        # sums by NCCL may wait for a lost rank, and destroy_process_group for them; PyTorch aborts them at exit
        if backend == "gloo" or not has_failed:
            dist.destroy_process_group()


def _gpu_of_each_rank(store: Store, rank: int, size: int, device: str = "auto") -> torch.device | None:
    """Return the GPU of this rank; None if some rank has none of its own, since all ranks connect by NCCL or none does.

    Raises:
        SettingError: If the device is a GPU, and ranks share one.
    """
    store.set(f"gpu/{rank}", gpu_identity() if dist.is_nccl_available() else "")
    gpus = [store.get(f"gpu/{number}").decode() for number in range(size)]
    if not all(gpus):
        return None
    if sharing := ranks_sharing_gpus(gpus):
        if device == "auto":
            return None
        raise shared_gpu_error(sharing)
    return resolve_device("cuda")


def ranks_sharing_gpus(gpus: Sequence[str]) -> list[int]:
    """Return the ranks whose GPU is also that of another rank.

    Args:
        gpus: `gpu_identity` of each rank; "": it has none.

    >>> ranks_sharing_gpus(["host/a", "host/b", "host/a", "", ""])
    [0, 2]
    """
    return [rank for rank, gpu in enumerate(gpus) if gpu and gpus.count(gpu) > 1]


def shared_gpu_error(sharing: list[int]) -> SettingError:
    """Return the error for ranks that share a GPU."""
    return SettingError(
        f"{format_ranks(sharing)} share a GPU with each other: start at most one process for each GPU, or use the "
        "device cpu",
        path="train.device",
    )


def _first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of a PyTorch error, without its position in the source."""
    return re.sub(r"^\[[^]]*\] *", "", str(error)).partition(". ")[0].partition("\n")[0]


def _timeout() -> timedelta:
    """Return the timeout that HEEDFUL_DIST_TIMEOUT sets; raises SettingError if it is no number above 0."""
    value = os.environ.get("HEEDFUL_DIST_TIMEOUT", "600")
    try:
        timeout = timedelta(seconds=float(value))
    except (ValueError, OverflowError):
        timeout = timedelta()
    if timeout <= timedelta():
        raise SettingError(
            f'HEEDFUL_DIST_TIMEOUT is "{value}"; expected a number of seconds above 0', path="HEEDFUL_DIST_TIMEOUT"
        )
    return timeout


def _new_store(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return a store for the ranks of this start, without keys of earlier starts, after all ranks are connected.

    torchrun keeps its store when it restarts ranks (pytorch#135712, #167288), so that they would look for ranks that
    have ended, and on several nodes no number differs between starts. So each rank writes a random name, and rank 0
    answers every name with the prefix of the new store.
    """
    name = uuid4().hex
    if rank:
        store.set(f"heedful/call/{rank}", name)
        store.wait([f"heedful/answer/{name}"], timeout)
        shared = _prefixed(store, store.get(f"heedful/answer/{name}").decode())
        shared.set(f"here/{rank}", "")
        shared.wait(["all"], timeout)
        return shared
    shared, end = _prefixed(store, name), time.monotonic() + timeout.total_seconds()
    answered: dict[int, bytes] = {}  # last name that was answered, by rank
    while absent := [number for number in range(1, size) if not shared.check([f"here/{number}"])]:
        if time.monotonic() > end:
            raise dist.DistStoreError(f"no connection from {format_ranks(absent)}")
        for number in absent:
            if store.check([f"heedful/call/{number}"]):
                call = store.get(f"heedful/call/{number}")
                if answered.get(number) != call:  # a call of an earlier start is followed by another one
                    store.set(f"heedful/answer/{call.decode()}", name)
                    answered[number] = call
        time.sleep(0.02)
    shared.set("all", "")
    return shared


def _prefixed(store: Store, name: str) -> Store:
    """Return the part of a store whose keys begin with this name."""
    return dist.distributed_c10d.PrefixStore(f"heedful/{name}", store)
