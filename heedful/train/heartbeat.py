"""Heartbeats of ranks, which tell the rank that died or hangs when a collective operation fails or times out."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import Store

BEAT_SECONDS = 0.5  # seconds between two heartbeats
SILENCE_SECONDS = 5 * BEAT_SECONDS  # seconds without a heartbeat after which a rank counts as dead
LOST_READINGS = 5  # consecutive readings without a new heartbeat after which a rank is given up
LEAVING = "leaving"  # mark in the last heartbeat of a rank that ends by itself
MISSING_KEY = "lost"  # store key of the missing ranks, as the first rank that noticed it named them


class Beat(NamedTuple):
    """The last heartbeat of a rank."""

    number: int  # number of heartbeats so far
    collectives: int  # number of collective operations that the rank has entered
    leaving: bool = False  # whether the rank ends by itself


class Heartbeat:
    """Heartbeats of all ranks in the rendezvous store; a daemon thread writes those of this rank.

    A stopped or killed process writes no heartbeats. A process that is busy or waits for something else still writes
    them, but has entered fewer collective operations than the ranks that wait for it.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Start to send heartbeats.

        Args:
            store: A dedicated connection: a client that is blocked in another wait cannot send heartbeats.
            rank: Number of this rank.
            size: Number of ranks.
        """
        self.rank, self.size = rank, size
        self.collectives = 0  # collective operations that this rank has entered; the caller counts them
        self._store, self._number, self._leaving, self._stop = store, 0, False, threading.Event()
        self._reported = ""  # missing ranks, as another rank named them
        self._next_reading = 0.0  # time from which `is_rank_lost` reads the store again
        self._last_beats = [Beat(0, 0)] * size  # heartbeats at its last reading
        self._silent_readings = [0] * size  # consecutive readings without a new heartbeat, by rank
        self._store.set_timeout(timedelta(seconds=SILENCE_SECONDS))
        self._beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._stop.set()
        self._thread.join(SILENCE_SECONDS)

    def is_rank_lost(self) -> bool:
        """Return whether another rank was reported as missing, or has sent no heartbeat for LOST_READINGS readings.

        Call it again and again while waiting for other ranks; it reads the store every SILENCE_SECONDS. Readings are
        counted instead of seconds, since all processes of a machine may have been suspended together.
        """
        if self._reported or time.monotonic() < self._next_reading:
            return bool(self._reported)
        self._next_reading = time.monotonic() + SILENCE_SECONDS
        beats = self._last_beats
        with suppress(RuntimeError):  # without the store, all ranks are silent
            beats = self._beats()
        for rank, (old, new) in enumerate(zip(self._last_beats, beats, strict=True)):
            is_silent = rank != self.rank and old.number == new.number
            self._silent_readings[rank] = self._silent_readings[rank] + 1 if is_silent else 0
        self._last_beats = beats
        return max(self._silent_readings) >= LOST_READINGS

    def missing_ranks(self) -> str:
        """Name the ranks that other ranks wait for, for an error message; takes a few seconds."""
        if self._reported:  # the failure noticed here is that the reporting rank has left
            return self._reported
        names: list[str] = []
        search = threading.Thread(target=self._search, args=(names,), daemon=True)  # a dead store would block it
        search.start()
        search.join(4 * SILENCE_SECONDS)
        if names:
            return names[0]
        return self._reported or "another rank (the rendezvous store does not answer: rank 0 may have ended)"

    def _search(self, names: list[str]) -> None:
        """Append the missing ranks to `names`, and report them to other ranks; appends nothing if the store is gone."""
        with suppress(RuntimeError):
            old_beats = self._beats()
            self._stop.wait(SILENCE_SECONDS)
            beats = self._beats()
            others = [rank for rank in range(self.size) if rank != self.rank]
            silent = [rank for rank in others if beats[rank].number == old_beats[rank].number]
            dead = [rank for rank in silent if not beats[rank].leaving]
            late = [rank for rank in others if beats[rank].collectives < self.collectives]
            missing = dead or silent or late
            self._leaving = True
            self._beat()
            names.append(format_ranks(missing) if missing else "another rank")
            if missing:
                self._store.set(MISSING_KEY, names[0])
                self._stop.wait(4 * BEAT_SECONDS)  # until other ranks have read it: this rank may end the store

    def _beats(self) -> list[Beat]:
        """Read the last heartbeat of each rank."""
        values = [self._store.get(str(rank)).decode().split() for rank in range(self.size)]
        return [Beat(int(number), int(collectives), bool(leaving)) for number, collectives, *leaving in values]

    def _run(self) -> None:
        """Send heartbeats, and look for missing ranks that another rank reports, until `stop`."""
        while not self._stop.wait(BEAT_SECONDS):
            self._beat()
            with suppress(RuntimeError):
                if not self._reported and self._store.check([MISSING_KEY]):
                    self._reported = self._store.get(MISSING_KEY).decode()

    def _beat(self) -> None:
        """Send a heartbeat."""
        self._number += 1
        with suppress(RuntimeError):  # without a store, other ranks notice that themselves
            self._store.set(str(self.rank), f"{self._number} {self.collectives}" + f" {LEAVING}" * self._leaving)


def format_ranks(ranks: list[int]) -> str:
    """Write ranks for a message.

    >>> format_ranks([2]), format_ranks([2, 5, 7])
    ('rank 2', 'ranks 2, 5 and 7')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
