"""Heartbeats of ranks: which rank died, or hangs, when a collective operation fails or times out."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import Store

BEAT_SECONDS = 0.5  # between two heartbeats
SILENCE_SECONDS = 5 * BEAT_SECONDS  # without a heartbeat after which a rank counts as dead
LEAVING = "leaving"  # mark in the last heartbeat of a rank that ends by itself
MISSING_KEY = "lost"  # store key: the missing ranks, as the first rank that noticed named them


class Beat(NamedTuple):
    """The last heartbeat of a rank."""

    number: int  # heartbeats so far
    collectives: int  # collective operations that it has entered
    leaving: bool = False


class Heartbeat:
    """Heartbeats of all ranks in the rendezvous store; a daemon thread writes those of this rank.

    A stopped or killed process writes none. One that is busy, or waits elsewhere, still does, but has entered fewer
    collective operations than the ranks that wait for it.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """`store` must be a dedicated connection: a client that is blocked in another wait cannot send heartbeats."""
        self.rank, self.size = rank, size
        self.collectives = 0  # operations that this rank has entered; the caller counts them
        self._store, self._number, self._leaving, self._stop = store, 0, False, threading.Event()
        self._reported = ""  # missing ranks, as another rank named them
        self._store.set_timeout(timedelta(seconds=SILENCE_SECONDS))
        self._beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more heartbeats."""
        self._stop.set()
        self._thread.join(SILENCE_SECONDS)

    def missing_ranks(self) -> str:
        """Name the ranks that the others wait for, within a few seconds, for an error message."""
        if self._reported:  # a rank that noticed earlier has left, which is what is noticed here
            return self._reported
        names: list[str] = []
        search = threading.Thread(target=self._search, args=(names,), daemon=True)  # the store may be gone, too
        search.start()
        search.join(4 * SILENCE_SECONDS)
        if names:
            return names[0]
        return self._reported or "another rank (the rendezvous store does not answer: rank 0 may have ended)"

    def _search(self, names: list[str]) -> None:
        with suppress(RuntimeError):  # of the store: then no name is found
            before = self._beats()
            self._stop.wait(SILENCE_SECONDS)
            after = self._beats()
            others = [rank for rank in range(self.size) if rank != self.rank]
            silent = [rank for rank in others if after[rank].number == before[rank].number]
            dead = [rank for rank in silent if not after[rank].leaving]
            late = [rank for rank in others if after[rank].collectives < self.collectives]
            missing = dead or silent or late
            self._leaving = True
            self._beat()
            names.append(format_ranks(missing) if missing else "another rank")
            if missing:
                self._store.set(MISSING_KEY, names[0])
                self._stop.wait(4 * BEAT_SECONDS)  # until others have read it: they may wait for this rank or its store

    def _beats(self) -> list[Beat]:
        values = [self._store.get(str(rank)).decode().split() for rank in range(self.size)]
        return [Beat(int(number), int(collectives), bool(leaving)) for number, collectives, *leaving in values]

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._beat()
            with suppress(RuntimeError):
                if not self._reported and self._store.check([MISSING_KEY]):
                    self._reported = self._store.get(MISSING_KEY).decode()

    def _beat(self) -> None:
        self._number += 1
        with suppress(RuntimeError):  # the store is gone: other ranks notice that
            self._store.set(str(self.rank), f"{self._number} {self.collectives}" + f" {LEAVING}" * self._leaving)


def format_ranks(ranks: list[int]) -> str:
    """Write ranks for a message.

    >>> format_ranks([2]), format_ranks([2, 5, 7])
    ('rank 2', 'ranks 2, 5 and 7')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
