"""Who is still there: each rank says again and again that it lives, and how many exchanges it has come to."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

BEAT_SECONDS = 0.5  # seconds between two signs of life
SILENCE_SECONDS = 5 * BEAT_SECONDS  # seconds without one after which a rank counts as gone
LEAVING = "leaving"  # the last thing that a rank says of itself
LOST = "lost"  # where it lies which ranks the first one that noticed waited for


class Beat(NamedTuple):
    """What a rank said of itself."""

    beat: int  # how often it has
    come: int  # to so many exchanges
    leaving: bool = False


class Heartbeat:
    """The signs of all ranks, which lie in the store where they met; a thread gives this rank's own.

    A process that was stopped gives none, and one that was killed neither. One that is busy, or waits for something
    else, does; it has come to fewer exchanges than those that wait for it.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """`store` is used by this alone: one that is waited for elsewhere would not answer."""
        self.rank, self.size, self.count = rank, size, 0
        self._store, self._beat, self._leaving, self._end = store, 0, False, threading.Event()
        self._heard = ""  # of ranks that are gone, from another one
        self._store.set_timeout(timedelta(seconds=SILENCE_SECONDS))
        self._say()
        self._thread = threading.Thread(target=self._live, name="alive", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Say nothing more."""
        self._end.set()
        self._thread.join(SILENCE_SECONDS)

    def missing(self) -> str:
        """The ranks that the others wait for, in words; found out in a few seconds, by those that are still there."""
        if self._heard:  # one that noticed before has left, which is what is noticed here
            return self._heard
        found: list[str] = []
        looking = threading.Thread(target=self._look, args=(found,), daemon=True)  # a store may be gone, too
        looking.start()
        looking.join(4 * SILENCE_SECONDS)
        return (
            found[0]
            if found
            else self._heard or "another one (where they met, nobody answers: rank 0 may be what is gone)"
        )

    def _look(self, found: list[str]) -> None:
        with suppress(RuntimeError):  # of the store; then nothing is found
            before = self._signs()
            self._end.wait(SILENCE_SECONDS)
            after = self._signs()
            others = [rank for rank in range(self.size) if rank != self.rank]
            silent = [rank for rank in others if after[rank].beat == before[rank].beat]
            gone = [rank for rank in silent if not after[rank].leaving]
            late = [rank for rank in others if after[rank].come < self.count]
            named = gone or silent or late
            self._leaving = True
            self._say()
            found.append(format_ranks(named) if named else "another one")
            if named:
                self._store.set(LOST, found[0])
                self._end.wait(
                    4 * BEAT_SECONDS
                )  # until others have heard it: they may wait for this one, or for its store

    def _signs(self) -> list[Beat]:
        said = [self._store.get(str(rank)).decode().split() for rank in range(self.size)]
        return [Beat(int(beat), int(count), bool(leaving)) for beat, count, *leaving in said]

    def _live(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            self._say()
            with suppress(RuntimeError):
                if not self._heard and self._store.check([LOST]):
                    self._heard = self._store.get(LOST).decode()

    def _say(self) -> None:
        self._beat += 1
        with suppress(RuntimeError):  # the store is gone: others will notice
            self._store.set(str(self.rank), f"{self._beat} {self.count}" + f" {LEAVING}" * self._leaving)


def format_ranks(ranks: list[int]) -> str:
    """In words.

    >>> format_ranks([2]), format_ranks([2, 5, 7])
    ('rank 2', 'ranks 2, 5 and 7')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
